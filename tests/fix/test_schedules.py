"""Numbers of schedules are computed: an edit is proposed only if it gives the reference's rates in all steps."""

from __future__ import annotations

import math

import pytest

from padiff.records import Both, Difference, Models
from padiff.records.compared import Cause
from padiff.records.first_diff import FirstDiff
from padiff_cli.fix.fault import Fault
from padiff_cli.fix.schedules import schedule_numbers
from padiff_cli.fix.source import Project, Source

STEPS = 9


def edits(code, right, own, framework="paddle", length=STEPS):
    """Return what becomes of the code with each proposal, for rates as functions of the step."""
    source = Source.from_bytes("train.py", code.encode())
    project = Project([source])
    settings = tuple(
        Difference("lr", Both(right(k), own(k)), "update", "learning_rate", step=k)
        for k in range(length)
        if right(k) != own(k)
    )
    first = FirstDiff(0, "update", None, None, cause=Cause("learning_rate", "the learning rates differ"))
    models = Models(Both((), ()), Both("torch 2", f"{framework} 3"))
    fault = Fault(first, models, "runs/torch", Project(()), settings, length)
    return [project.with_edits(each.edits).get("train.py").text for each in schedule_numbers(fault, project)]


WRITTEN = """def lr_at(step, args):
    if step < args.warmup:
        return args.lr * step / args.warmup
    return args.lr * 0.5 * (1.0 + math.cos(math.pi * (step - args.warmup) / 8))
args = dict(warmup=4, lr=0.1)
for step in range(9):
    opt.set_lr(lr_at(step, args))
"""


def _written(k, more):
    return 0.1 * (k + more) / 4 if k < 4 else 0.05 * (1 + math.cos(math.pi * (k - 4) / 8))


CASES = {
    "a warm-up of a function that begins with the first step": (
        WRITTEN, lambda k: _written(k, 1), lambda k: _written(k, 0), "args.lr * step", "args.lr * (step + 1)",
    ),
    "a number of a function": (
        WRITTEN, lambda k: 3 * _written(k, 0), lambda k: _written(k, 0), "lr=0.1", "lr=0.3",
    ),
    "a warm-up of a lambda": (
        "s = LambdaDecay(0.1, lambda k: min(1.0, k / 4))\n",
        lambda k: 0.1 * min(1.0, (k + 1) / 4), lambda k: 0.1 * min(1.0, k / 4), "1.0, k", "1.0, (k + 1)",
    ),
    "the length of a warm-up, an option's default": (
        'cli.add_argument("--warmup", default=5)\n'
        "s = LinearWarmup(opts.lr, warmup_steps=opts.warmup, start_lr=0.1, end_lr=0.5)\nlr = 0.5\n",
        lambda k: 0.1 + 0.4 * min(k, 4) / 4, lambda k: 0.1 + 0.4 * min(k, 5) / 5, "default=5", "default=4",
    ),
    "a factor": (
        "s = ExponentialDecay(0.1, gamma=0.8)\n", lambda k: 0.1 * 0.7**k, lambda k: 0.1 * 0.8**k, "=0.8", "=0.7",
    ),
    "a period": (
        "s = StepDecay(learning_rate=0.1, step_size=4, gamma=0.5)\n",
        lambda k: 0.1 * 0.5 ** (k // 3), lambda k: 0.1 * 0.5 ** (k // 4), "size=4", "size=3",
    ),
    "one of several steps": (
        "s = MultiStepDecay(0.1, milestones=[3, 5])\n",
        lambda k: 0.1 * 0.1 ** ((k >= 3) + (k >= 6)), lambda k: 0.1 * 0.1 ** ((k >= 3) + (k >= 5)), "5]", "6]",
    ),
    "a half period": (
        "N = 8\ns = CosineAnnealingDecay(0.1, T_max=N)\n", lambda k: 0.05 * (1 + math.cos(math.pi * k / 16)),
        lambda k: 0.05 * (1 + math.cos(math.pi * k / 8)), "N = 8", "N = 16",
    ),
    "the exponent of a function": (
        "WARM = 3\ndef factor(step):\n    s = (step + 1) / WARM\n    return min(s, s**-1.0)\n"
        "s = LambdaDecay(0.1, lr_lambda=factor)\n",
        lambda k: 0.1 * min((k + 1) / 3, ((k + 1) / 3) ** -0.5), lambda k: 0.1 * min((k + 1) / 3, 3 / (k + 1)),
        "-1.0", "-0.5",
    ),
    "the last rate": (
        "s = PolynomialDecay(0.1, decay_steps=8, end_lr=0.01)\n", lambda k: 0.1 - 0.08 * k / 8,
        lambda k: 0.1 - 0.09 * k / 8, "0.01", "0.02",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_number_that_gives_the_reference_s_rates_is_proposed(name):
    code, right, own, before, after = CASES[name]
    assert code.replace(before, after) in edits(code, right, own)


@pytest.mark.parametrize("name", CASES)
def test_no_number_is_proposed_for_rates_that_none_gives(name):
    code, _, own, *_ = CASES[name]
    assert edits(code, lambda k: 0.1 + 0.01 * (k % 2) + 0.02 * (k % 3), own) == []


def test_a_schedule_with_other_rates_than_the_candidate_s_is_left_alone():
    code = "s = StepDecay(0.1, step_size=4, gamma=0.5)\n"
    assert edits(code, lambda k: 0.1 * 0.5 ** (k // 3), lambda k: 0.2 * 0.5 ** (k // 5)) == []


def test_torch_s_rate_is_the_optimizer_s():
    code = "opt = torch.optim.SGD(net.parameters(), lr=0.2)\ns = LinearLR(opt, start_factor=0.5, total_iters=6)\n"
    right, own = (lambda k, n=n: 0.2 * (0.5 + 0.5 * min(k, n) / n) for n in (3, 6))
    assert code.replace("=6", "=3") in edits(code, right, own, "torch")
