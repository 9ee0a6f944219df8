"""Lines of code that set what the reference sets, in the candidate's framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from padiff.frameworks.argument_names import SPELLINGS, ArgumentNames, number_text
from padiff.frameworks.catalog import LAYERS, OPTIMIZERS, checked_fix, is_loss
from padiff.frameworks.settings import LAYER_SETTINGS
from padiff.records import Layer
from padiff.system.code import literal

# How many parameters a line names.
_NAMED = 3


def optimizer_fix(
    framework: str,
    rule: str,
    names: Sequence[str],
    values: Mapping[str, Any],
    parameters: Sequence[str] = (),
    base_rate: float | None = None,
    others: Mapping[str, Any] | None = None,
) -> str:
    """Return a call of the optimizer with some of the reference's values; empty if the framework lacks an option.

    Args:
        framework: name of the candidate's framework, here and below.
        rule: common name of the reference's optimizer rule.
        names: names of the values to set.
        values: all settings of the reference's optimizer.
        parameters: the candidate's names of the parameters to set the values for; empty for all parameters.
        base_rate: the learning rate of the candidate's optimizer, by which paddle multiplies that of a group; `None`
            if it is not known.
        others: settings of all other parameters, which the class would set otherwise.
    """
    spelling = SPELLINGS.get(framework)
    if spelling is None or _class(spelling, rule, values) not in OPTIMIZERS[framework]:
        return ""
    kind = f"{spelling.optimizers}.{_class(spelling, rule, values)}"
    if rule == "SGD" and spelling.with_momentum and not values.get("momentum"):
        names = [name for name in names if name != "momentum"]  # the class implies no momentum
    arguments = [_argument(spelling, name, values) for name in names]
    if not all(arguments):
        return ""
    if not parameters:
        return checked_fix(framework, f"{kind}({', '.join(['...', *dict.fromkeys(arguments)])})")
    # Names of parameters come from a run, so these become string literals.
    listed = ", ".join(literal(site.replace("/", ".")) for site in parameters[:_NAMED])
    listed += ", ..." if len(parameters) > _NAMED else ""
    if spelling.parameters:
        rate = values.get("lr")
        if "lr" in names and not (base_rate and isinstance(rate, (int, float))):
            return ""
        factors = {**values, "lr": rate / base_rate} if "lr" in names and base_rate and rate is not None else values
        arguments = [_argument(spelling, name, factors) for name in names]
    group = ", ".join(f'"{name}": {value}' for name, _, value in (a.partition("=") for a in dict.fromkeys(arguments)))
    groups = f'[{{"params": [{listed}], {group}}}, ...]'
    shown = [f"..., {spelling.parameters}={groups}" if spelling.parameters else groups]
    shown += [_argument(spelling, name, others) for name in others] if others else []
    return checked_fix(framework, f"{kind}({', '.join(shown)})")


def _class(spelling: ArgumentNames, rule: str, values: Mapping[str, Any]) -> str:
    if rule == "SGD" and spelling.with_momentum and values.get("momentum"):
        return spelling.with_momentum
    return spelling.rules.get(rule, rule)


def _argument(spelling: ArgumentNames, name: str, values: Mapping[str, Any]) -> str:
    if name == "lr":
        return f"{spelling.rate}={number_text(values['lr'])}"
    if name not in spelling.values:
        return ""
    argument, parts = spelling.values[name]
    texts = [number_text(values.get(part)) for part in parts]
    if name == "decay.l1":
        return f"{argument}=paddle.regularizer.L1Decay({texts[0]})"
    together = ", ".join(texts)
    return f"{argument}={together}" if len(parts) == 1 else f"{argument}=({together})"


def clip_fix(framework: str, rule: str, kind: str, limit: Any) -> str:
    """Return a line that clips gradients as the reference does; empty if the framework has no such clipping."""
    spelling = SPELLINGS.get(framework)
    line = spelling.clips.get(kind) if spelling is not None else None
    if spelling is None or line is None:
        return ""
    line = line.format(number_text(limit))
    if line.startswith("grad_clip=") and rule and "." not in rule:
        line = f"{spelling.optimizers}.{spelling.rules.get(rule, rule)}(..., {line})"
    return checked_fix(framework, line)


def loss_fix(framework: str, function: str, settings: Mapping[str, Any]) -> str:
    """Return a call of a loss function with the reference's settings; empty for an unknown function.

    Args:
        function: common name of the function.
    """
    spelling = SPELLINGS.get(framework)
    if spelling is None or not is_loss(function, settings):
        return ""
    name, more = spelling.losses.get(function, (function, ""))
    arguments = [
        f"{spelling.loss_arguments.get(key, key)}={number_text(value)}"
        for key, value in settings.items()
        if key != "function"
    ]
    line = f"{spelling.layers}.functional.{name}({', '.join(['...', *([more] if more else []), *arguments])})"
    return checked_fix(framework, line)


def layer_fix(framework: str, layer: Layer, name: str, value: Any) -> str:
    """Return a line that creates a layer with the reference's value of a setting; empty for a class of the user's."""
    spelling = SPELLINGS.get(framework)
    if spelling is None or layer.type.lower() != layer.kind or layer.type not in LAYERS[framework]:
        return ""  # a class of the user's, whose arguments are unknown
    if name not in LAYER_SETTINGS:
        return ""
    convert = spelling.converted.get(name)
    if convert is not None and (name != "momentum" or "norm" in layer.kind):
        try:
            value = convert(value)
        except (TypeError, ValueError, OverflowError):  # no value that a framework declares
            return ""
    value = None if value == "none" and name == "padding_idx" else value
    argument = spelling.arguments.get(name, name)
    return checked_fix(framework, f"{spelling.layers}.{layer.type}(..., {argument}={number_text(value)})")


def together(fixes: Sequence[str]) -> str:
    """Return several fixes as one line, with the arguments of equal calls merged into one call."""
    calls: dict[str, list[str]] = {}
    for fix in dict.fromkeys(fix for fix in fixes if fix):
        head, dots, arguments = fix.partition("(..., ")
        call_arguments = calls.setdefault(head + dots, [])
        if dots and arguments not in call_arguments:
            call_arguments.append(arguments.removesuffix(")"))
    return "; ".join(f"{head}{', '.join(arguments)})" if arguments else head for head, arguments in calls.items())


def optimizer_call(framework: str, rule: str, values: Mapping[str, Any], rate: str, parameter: str) -> str:
    """Return a line that creates an optimizer of one parameter with all settings; empty if a setting is not
    expressible.

    Args:
        rate: expression of the learning rate.
        parameter: name of the parameter's variable.
    """
    spelling = SPELLINGS.get(framework)
    if spelling is None:
        return ""
    kind = _class(spelling, rule, values)
    if kind not in OPTIMIZERS[framework]:
        return ""
    decays = [name for name in values if name.startswith("decay.") and values[name]]
    usual = [name for name in values if name.startswith("decay.")][:1]
    # A class for SGD without momentum has none of these arguments.
    without = {"momentum", "nesterov", "dampening"} if spelling.with_momentum and kind == "SGD" else set()
    names = [
        name for name in values if name in spelling.values and not name.startswith("decay.") and name not in without
    ]
    arguments = [_argument(spelling, name, values) for name in [*names, *(decays or usual)]]
    if len(decays) > 1 or not all(arguments):
        return ""
    learnt = f"[{parameter}]" if not spelling.parameters else f"{spelling.parameters}=[{parameter}]"
    listed = [learnt, f"{spelling.rate}={rate}", *dict.fromkeys(arguments)]
    return f"{spelling.optimizers}.{kind}({', '.join(listed)})"
