"""Checks that the arguments of an ``auto_diff`` fit the models, before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

from padiff.auto.settings import ModelSetup
from padiff.errors import UsageError
from padiff.frameworks import framework_of_tensor
from padiff.model.live_model import LiveModel
from padiff.system.spelling import nearest


def check_call(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, live: LiveModel) -> None:
    """Check that the model's forward accepts these inputs, and that their framework and device are the model's.

    Raises:
        UsageError: the inputs do not fit.
    """
    signature = inspect.signature(live.model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(str(parameter) for parameter in signature.parameters.values())
        hint = ""
        wrong = [key for key in kwargs if key not in signature.parameters]
        if wrong:
            hint = f" {wrong[0]!r} is none of them. {nearest(wrong[0], signature.parameters)}"
        raise UsageError(f"inputs: the {name} model's forward takes ({takes}): {error}.{hint}") from None
    framework = live.framework
    devices = {framework.tensors.device(tensor) for _, tensor in live.tensors()}
    for key, value in (*enumerate(args), *kwargs.items()):
        source = framework_of_tensor(value)
        if source is not None and source is not framework:
            raise UsageError(
                f"inputs: the {name} model is of {framework.name}, its input {key!r} is a tensor of {source.name}"
            )
        if framework.tensors.is_tensor(value) and devices and framework.tensors.device(value) not in devices:
            raise UsageError(
                f"inputs: the {name} model is on {', '.join(sorted(devices))}, an input of it on "
                f"{framework.tensors.device(value)}: bring them to one device"
            )


def check_loss(loss: Any, name: str, live: LiveModel) -> None:
    """Check that a loss is a function of one argument.

    Raises:
        UsageError: the loss is not.
    """
    if not callable(loss):
        raise UsageError(f"loss_fns: the {name} model's loss has to be a function of the output, got {loss!r}")
    try:
        # The signature of a layer is that of its forward: its __call__ accepts anything.
        inspect.signature(loss.forward if live.framework.layers.is_model(loss) else loss).bind(None)
    except TypeError as error:
        raise UsageError(
            f"loss_fns: the {name} model's loss has to take one argument, the model's output ({error}). "
            "Bind the others, by name: functools.partial(loss, label=label)"
        ) from None
    except ValueError:
        pass  # a builtin without a signature


def check_optimizer(optimizer: Any, name: str, live: LiveModel) -> None:
    """Check that an optimizer belongs to the model's framework, or is a function that steps and clears gradients.

    Raises:
        UsageError: the optimizer is neither.
    """
    if optimizer is None or live.framework.optimizers.is_optimizer(optimizer):
        return
    if callable(optimizer) and not hasattr(optimizer, "step"):
        return  # a function without arguments that steps and clears the gradients
    raise UsageError(
        f"optimizers: the {name} model is of {live.framework.name}; expected an optimizer of {live.framework.name} or "
        f"a function without arguments, got {type(optimizer).__module__}.{type(optimizer).__qualname__}"
    )


def drop_inside(side: ModelSetup) -> list[str]:
    """Return the paths of attentions and recurrent layers that apply dropout without a dropout layer."""
    paths = []
    for node in side.live.nodes:
        rate = getattr(node.layer, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0 and node.layer.training:
            paths.append(node.path)
    return paths
