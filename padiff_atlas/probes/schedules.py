"""Probes of learning rate schedules."""

from __future__ import annotations

from functools import partial

from padiff_atlas.probe import Group, Probe

_epochs = partial(Probe, way="schedule")
_S, _P = "torch.optim.lr_scheduler", "paddle.optimizer.lr"
SCHEDULES = Group(
    "schedules",
    (
        _epochs("StepLR", f"{_S}.StepLR(optimizer, step_size=3)", f"{_P}.StepDecay(0.1, step_size=3)"),
        _epochs(
            "MultiStepLR",
            f"{_S}.MultiStepLR(optimizer, milestones=[3, 6])",
            f"{_P}.MultiStepDecay(0.1, milestones=[3, 6])",
        ),
        _epochs("ExponentialLR", f"{_S}.ExponentialLR(optimizer, gamma=0.9)", f"{_P}.ExponentialDecay(0.1, gamma=0.9)"),
        _epochs(
            "CosineAnnealingLR",
            f"{_S}.CosineAnnealingLR(optimizer, T_max=10)",
            f"{_P}.CosineAnnealingDecay(0.1, T_max=10)",
        ),
        _epochs(
            "CosineAnnealingWarmRestarts",
            f"{_S}.CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2)",
            f"{_P}.CosineAnnealingWarmRestarts(0.1, T_0=3, T_mult=2)",
        ),
        _epochs(
            "LinearLR",
            f"{_S}.LinearLR(optimizer, start_factor=0.1, total_iters=5)",
            f"{_P}.LinearLR(0.1, 5, start_factor=0.1)",
        ),
        _epochs(
            "LinearLR against LinearWarmup",
            f"{_S}.LinearLR(optimizer, start_factor=0.1, total_iters=5)",
            f"{_P}.LinearWarmup(0.1, warmup_steps=5, start_lr=0.01, end_lr=0.1)",
        ),
        _epochs(
            "polynomial decay",
            f"{_S}.PolynomialLR(optimizer, total_iters=10, power=2.0)",
            f"{_P}.PolynomialDecay(0.1, decay_steps=10, end_lr=0.0, power=2.0)",
        ),
        _epochs(
            "polynomial decay, end by default",
            f"{_S}.PolynomialLR(optimizer, total_iters=10)",
            f"{_P}.PolynomialDecay(0.1, decay_steps=10)",
            mended=f"{_P}.PolynomialDecay(0.1, decay_steps=10, end_lr=0.0)",
            note="paddle ends at 1e-4, torch at 0",
        ),
        _epochs(
            "warm-up, then cosine",
            f"warm = {_S}.LinearLR(optimizer, 0.1, total_iters=5)\ncosine = {_S}.CosineAnnealingLR(optimizer, 10)\n"
            f"{_S}.SequentialLR(optimizer, [warm, cosine], [5])",
            f"{_P}.LinearWarmup({_P}.CosineAnnealingDecay(0.1, 10), warmup_steps=5, start_lr=0.01, end_lr=0.1)",
        ),
        _epochs(
            "LambdaLR",
            f"{_S}.LambdaLR(optimizer, lambda epoch: 0.9**epoch)",
            f"{_P}.LambdaDecay(0.1, lambda epoch: 0.9**epoch)",
        ),
        _epochs(
            "MultiplicativeLR",
            f"{_S}.MultiplicativeLR(optimizer, lambda epoch: 0.9)",
            f"{_P}.MultiplicativeDecay(0.1, lambda epoch: 0.9)",
        ),
        _epochs(
            "OneCycleLR",
            f"{_S}.OneCycleLR(optimizer, max_lr=0.5, total_steps=20)",
            f"{_P}.OneCycleLR(0.5, total_steps=20)",
            mended=f"{_P}.OneCycleLR(0.5, total_steps=20, end_learning_rate=0.5 / 25 / 1e4)",
            note="torch ends at the first rate over 1e4, paddle at 1e-4",
        ),
        _epochs(
            "CyclicLR",
            f"{_S}.CyclicLR(optimizer, base_lr=0.1, max_lr=0.5, step_size_up=4, cycle_momentum=False)",
            f"{_P}.CyclicLR(0.1, 0.5, step_size_up=4)",
        ),
        _epochs(
            "ReduceLROnPlateau",
            f"{_S}.ReduceLROnPlateau(optimizer, patience=2)",
            f"{_P}.ReduceOnPlateau(0.1, patience=2)",
        ),
    ),
    {"losses": (1.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8)},
)
