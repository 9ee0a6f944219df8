"""Probes of optimizers over several steps, and of clipping."""

from __future__ import annotations

from functools import partial

from padiff_atlas.probe import Group, Probe

_step = partial(Probe, way="optimizer", dtype="float64")
_clip = partial(Probe, way="clip")

OPTIMIZERS = Group(
    "optimizers",
    (
        _step("SGD", "torch.optim.SGD(parameters, lr=0.1)", "paddle.optimizer.SGD(0.1, parameters=parameters)"),
        _step("SGD, defaults", "torch.optim.SGD(parameters)", "paddle.optimizer.SGD(parameters=parameters)"),
        _step(
            "SGD, weight decay",
            "torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)",
            "paddle.optimizer.SGD(0.1, parameters=parameters, weight_decay=0.1)",
        ),
        _step(
            "momentum",
            "torch.optim.SGD(parameters, lr=0.1, momentum=0.9)",
            "paddle.optimizer.Momentum(0.1, momentum=0.9, parameters=parameters)",
        ),
        _step(
            "momentum, weight decay",
            "torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)",
            "paddle.optimizer.Momentum(0.1, momentum=0.9, parameters=parameters, weight_decay=0.1)",
        ),
        _step(
            "Nesterov",
            "torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)",
            "paddle.optimizer.Momentum(0.1, momentum=0.9, parameters=parameters, use_nesterov=True)",
        ),
        _step(
            "Adagrad",
            "torch.optim.Adagrad(parameters, lr=0.1, eps=1e-6)",
            "paddle.optimizer.Adagrad(0.1, epsilon=1e-6, parameters=parameters)",
        ),
        _step(
            "Adagrad, epsilon by default",
            "torch.optim.Adagrad(parameters, lr=0.1)",
            "paddle.optimizer.Adagrad(0.1, parameters=parameters)",
            mended="paddle.optimizer.Adagrad(0.1, epsilon=1e-10, parameters=parameters)",
            note="epsilon is 1e-10 in torch, 1e-6 in paddle",
        ),
        _step(
            "Adadelta",
            "torch.optim.Adadelta(parameters, lr=0.1, rho=0.9, eps=1e-6)",
            "paddle.optimizer.Adadelta(0.1, rho=0.9, epsilon=1e-6, parameters=parameters)",
        ),
        _step(
            "Adadelta, defaults",
            "torch.optim.Adadelta(parameters)",
            "paddle.optimizer.Adadelta(parameters=parameters)",
            mended="paddle.optimizer.Adadelta(1.0, rho=0.9, parameters=parameters)",
            note="learning rate 1.0 and rho 0.9 in torch, 0.001 and 0.95 in paddle",
        ),
        _step("Adam", "torch.optim.Adam(parameters, lr=0.1)", "paddle.optimizer.Adam(0.1, parameters=parameters)"),
        _step("Adam, defaults", "torch.optim.Adam(parameters)", "paddle.optimizer.Adam(parameters=parameters)"),
        _step(
            "Adam, weight decay",
            "torch.optim.Adam(parameters, lr=0.1, weight_decay=0.1)",
            "paddle.optimizer.Adam(0.1, parameters=parameters, weight_decay=0.1)",
        ),
        _step(
            "Adam, amsgrad",
            "torch.optim.Adam(parameters, lr=0.1, amsgrad=True)",
            "paddle.optimizer.Adam(0.1, parameters=parameters, amsgrad=True)",
        ),
        _step(
            "AdamW",
            "torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)",
            "paddle.optimizer.AdamW(0.1, parameters=parameters, weight_decay=0.1)",
        ),
        _step("AdamW, defaults", "torch.optim.AdamW(parameters)", "paddle.optimizer.AdamW(parameters=parameters)"),
        _step(
            "Adamax",
            "torch.optim.Adamax(parameters, lr=0.1)",
            "paddle.optimizer.Adamax(0.1, parameters=parameters)",
            note="torch adds epsilon to the size of the gradient, paddle to the decayed maximum; it shows in tiny "
            "gradients only, and no argument changes it",
        ),
        _step(
            "Adamax, next to no epsilon",
            "torch.optim.Adamax(parameters, lr=0.1, eps=1e-30)",
            "paddle.optimizer.Adamax(0.1, epsilon=1e-30, parameters=parameters)",
        ),
        _step(
            "Adamax, learning rate by default",
            "torch.optim.Adamax(parameters, eps=1e-30)",
            "paddle.optimizer.Adamax(epsilon=1e-30, parameters=parameters)",
            mended="paddle.optimizer.Adamax(0.002, epsilon=1e-30, parameters=parameters)",
            note="0.002 in torch, 0.001 in paddle",
        ),
        _step("NAdam", "torch.optim.NAdam(parameters, lr=0.1)", "paddle.optimizer.NAdam(0.1, parameters=parameters)"),
        _step("RAdam", "torch.optim.RAdam(parameters, lr=0.1)", "paddle.optimizer.RAdam(0.1, parameters=parameters)"),
        _step(
            "RMSprop",
            "torch.optim.RMSprop(parameters, lr=0.1, alpha=0.9, eps=1e-6)",
            "paddle.optimizer.RMSProp(0.1, rho=0.9, epsilon=1e-6, parameters=parameters)",
            note="torch adds epsilon to the root, paddle adds it below the root; paddle's set to the square of torch's "
            "comes near where gradients are far larger, and no argument gives the same",
        ),
        _step(
            "RMSprop, next to no epsilon",
            "torch.optim.RMSprop(parameters, lr=0.1, alpha=0.9, eps=1e-30)",
            "paddle.optimizer.RMSProp(0.1, rho=0.9, epsilon=1e-30, parameters=parameters)",
        ),
        _step(
            "RMSprop, rho by default, next to no epsilon",
            "torch.optim.RMSprop(parameters, lr=0.1, eps=1e-30)",
            "paddle.optimizer.RMSProp(0.1, epsilon=1e-30, parameters=parameters)",
            mended="paddle.optimizer.RMSProp(0.1, rho=0.99, epsilon=1e-30, parameters=parameters)",
            note="alpha is 0.99 in torch, rho 0.95 in paddle",
        ),
        _step(
            "RMSprop, defaults",
            "torch.optim.RMSprop(parameters, lr=0.1)",
            "paddle.optimizer.RMSProp(0.1, parameters=parameters)",
            note="the place of epsilon, its size (1e-8 in torch, 1e-6 in paddle), and alpha (0.99) against rho (0.95)",
        ),
        _step(
            "RMSprop, centered, momentum",
            "torch.optim.RMSprop(parameters, lr=0.1, alpha=0.9, eps=1e-6, momentum=0.9, centered=True)",
            "paddle.optimizer.RMSProp(0.1, rho=0.9, epsilon=1e-6, momentum=0.9, centered=True, parameters=parameters)",
            note="the place of epsilon",
        ),
        _step(
            "ASGD",
            "torch.optim.ASGD(parameters, lr=0.1)",
            "paddle.optimizer.ASGD(0.1, parameters=parameters)",
            mended_torch="torch.optim.SGD(parameters, lr=0.1)",
            note="two methods of one name: Polyak's averaging in torch, averaged gradients of batches in paddle, which "
            "with one batch is SGD",
        ),
        _step(
            "SGD, learning rate of a group",
            "groups = [{'params': parameters[:1]}, {'params': parameters[1:], 'lr': 0.01}]\n"
            "torch.optim.SGD(groups, lr=0.1)",
            "groups = [{'params': parameters[:1]}, {'params': parameters[1:], 'learning_rate': 0.01}]\n"
            "paddle.optimizer.SGD(0.1, parameters=groups)",
            mended="groups = [{'params': parameters[:1]}, {'params': parameters[1:], 'learning_rate': 0.1}]\n"
            "paddle.optimizer.SGD(0.1, parameters=groups)",
            note="a group's learning rate is the rate in torch, and what the rate is multiplied by in paddle",
        ),
        _step("Rprop", "torch.optim.Rprop(parameters, lr=0.1)", "paddle.optimizer.Rprop(0.1, parameters=parameters)"),
    ),
)

CLIPPING = Group(
    "clipping",
    (
        _clip(
            "clip by global norm",
            "nn.utils.clip_grad_norm_(parameters, 0.001)",
            "nn.ClipGradByGlobalNorm(0.001)",
            mended="nn.utils.clip_grad_norm_(parameters, 0.001)",
            note="torch divides by the norm + 1e-6; so does paddle's clip_grad_norm_, but not its ClipGradByGlobalNorm",
        ),
        _clip(
            "clip by global norm, not reached",
            "nn.utils.clip_grad_norm_(parameters, 100.0)",
            "nn.ClipGradByGlobalNorm(100.0)",
        ),
        _clip("clip_grad_norm_ of both", "nn.utils.clip_grad_norm_(parameters, 0.001)"),
        _clip(
            "clip_grad_norm_, largest element", "nn.utils.clip_grad_norm_(parameters, 0.001, norm_type=float('inf'))"
        ),
        _clip("clip by value", "nn.utils.clip_grad_value_(parameters, 0.0005)", "nn.ClipGradByValue(0.0005)"),
        _clip("clip_grad_value_ of both", "nn.utils.clip_grad_value_(parameters, 0.0005)"),
        _clip(
            "clip each by its norm",
            "[nn.utils.clip_grad_norm_([p], 0.001) for p in parameters]",
            "nn.ClipGradByNorm(0.001)",
            mended="[nn.utils.clip_grad_norm_([p], 0.001) for p in parameters]",
            note="torch divides by the norm + 1e-6",
        ),
    ),
)
