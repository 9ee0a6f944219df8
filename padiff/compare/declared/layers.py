"""Hyper-parameters that differ between paired layers, and lines of code that set what the reference sets."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from padiff.align import Alignment, LayerPair
from padiff.align.matching.parameter_units import containers_of
from padiff.frameworks.catalog import LAYERS, OPTIMIZERS, SPELLINGS, ArgumentNames, checked_fix, is_loss, number_text
from padiff.frameworks.losses import WEIGHTS
from padiff.frameworks.settings import LAYER_SETTINGS
from padiff.model import equivalents
from padiff.records import ROOT, Both, Difference, Layer, is_below
from padiff.system.code import literal

# How many parameters a line names.
_NAMED = 3
# The most ends of names in a condition, which has to stay readable.
_ENDS = 6


def optimizer_fix(
    framework: str,
    rule: str,
    names: Sequence[str],
    values: Mapping[str, Any],
    parameters: Sequence[str] = (),
    base_rate: float | None = None,
    rest: Sequence[str] = (),
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
        rest: the candidate's names of all other parameters of its optimizer, which has no groups; empty if unknown.
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
    if spelling.parameters:
        rate = values.get("lr")
        if "lr" in names and not (base_rate and isinstance(rate, (int, float))):
            return ""
        factors = {**values, "lr": rate / base_rate} if "lr" in names and base_rate and rate is not None else values
        arguments = [_argument(spelling, name, factors) for name in names]
    group = ", ".join(f'"{name}": {value}' for name, _, value in (a.partition("=") for a in dict.fromkeys(arguments)))
    test = parameter_test(parameters, rest) if rest else ""
    if test:
        named = "p for n, p in candidate_model.named_parameters() if"
        groups = f'[{{"params": [{named} {test}], {group}}}, {{"params": [{named} not {test}]}}]'
        call = f"..., {spelling.parameters}={groups}" if spelling.parameters else f"{groups}, ..."
        return f"{kind}({call})" if checked_fix(framework, f"{kind}(...)") else ""
    # Names of parameters come from a run, so these become string literals.
    listed = ", ".join(literal(name) for name in map(_parameter_name, parameters[:_NAMED]))
    listed += ", ..." if len(parameters) > _NAMED else ""
    groups = f'[{{"params": [{listed}], {group}}}, ...]'
    shown = [f"..., {spelling.parameters}={groups}" if spelling.parameters else groups]
    shown += [_argument(spelling, name, others) for name in others] if others else []
    return checked_fix(framework, f"{kind}({', '.join(shown)})")


def parameter_test(parameters: Sequence[str], rest: Sequence[str]) -> str:
    """Return a condition on a parameter's name ``n`` that holds for some parameters and no other one, as code; empty
    if it would be longer than six ends of names.

    Args:
        parameters, rest: the parameters for which it holds, and all others, by ``layer/slot``.
    """
    names, others = ([_parameter_name(site) for site in sites] for sites in (parameters, rest))
    ends: list[str] = []
    for parts in (name.split(".") for name in names):
        tails = (".".join(parts[-k:]) for k in range(1, len(parts) + 1))
        end = next((tail for tail in tails if not any(other.endswith(tail) for other in others)), "")
        if not end:
            return ""
        ends += [end] if end not in ends else []
    if not 0 < len(ends) <= _ENDS:
        return ""
    # Names of parameters come from a run, so these become string literals.
    return f"n.endswith({literal(ends[0] if len(ends) == 1 else tuple(ends))})"


def _parameter_name(site: str) -> str:
    return site.removeprefix(f"{ROOT}/").replace("/", ".")


def attribute_fix(parameters: Sequence[str], argument: str) -> str:
    """Return the argument of paddle's layers that sets an attribute of some of their parameters.

    Args:
        parameters: the parameters, by ``layer/slot``.
        argument: the argument of `ParamAttr`, as code.
    """
    slots = dict.fromkeys(site.rpartition("/")[2] for site in parameters)
    names = [f"{slot}_attr" if slot in ("weight", "bias") else "attr" for slot in slots]
    return checked_fix("paddle", "; ".join(f"{name}=paddle.ParamAttr({argument})" for name in dict.fromkeys(names)))


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
    texts = {key: number_text(value) for key, value in settings.items() if key != "function"}
    texts |= {key: f"{spelling.tensor}({texts[key]})" for key in texts if key in WEIGHTS and settings[key] is not None}
    arguments = [f"{spelling.loss_arguments.get(key, key)}={text}" for key, text in texts.items()]
    line = f"{spelling.layers}.functional.{name}({', '.join(['...', *([more] if more else []), *arguments])})"
    return checked_fix(framework, line)


def layer_fix(framework: str, layer: Layer, name: str, value: Any) -> str:
    """Return a line that creates a layer with the reference's value of a setting; empty if there is none."""
    spelling = SPELLINGS.get(framework)
    if spelling is None or name not in LAYER_SETTINGS:
        return ""
    is_own = layer.type.lower() != layer.kind or layer.type not in LAYERS[framework]
    kind = next((each for each in LAYERS[framework] if each.lower() == layer.kind), "") if is_own else layer.type
    if not kind:
        return ""
    convert = spelling.converted.get(name)
    if convert is not None and (name != "momentum" or "norm" in layer.kind):
        try:
            value = convert(value)
        except (TypeError, ValueError, OverflowError):  # no value that a framework declares
            return ""
    value = None if value == "none" and name == "padding_idx" else value
    argument = spelling.arguments.get(name, name)
    line = checked_fix(framework, f"{spelling.layers}.{kind}(..., {argument}={number_text(value)})")
    # A class of the user's gives the argument to the framework's, which it derives from.
    return line and f"super().__init__{line[line.index('(') :]}  # in a {kind} of your own" if is_own else line


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


# Settings that change the computation or the training, even by less than rounding; a dropout rate does not count.
_TELLING = frozenset(
    {
        "eps",
        "momentum",
        "approximate",
        "slope",
        "alpha",
        "padding_mode",
        "num_heads",
        "num_groups",
        "groups",
        "rope_theta",
    }
)
_MOMENTUM = "counted as torch does: paddle's own `momentum` is 1 minus it"


def layer_notes(alignment: Alignment) -> tuple[str, ...]:
    """Return the hyper-parameters that differ between paired layers, in words."""
    notes = ((pair, [_text(name, pair) for name in differing(pair)]) for pair in alignment.pairs)
    return tuple(f"{pair.reference.path} / {pair.candidate.path}: {', '.join(texts)}" for pair, texts in notes if texts)


def _text(name: str, pair: LayerPair) -> str:
    values = pair.map(lambda layer: layer.settings[name])
    return f"{name} {values.reference} against {values.candidate}"


def differing(pair: LayerPair) -> list[str]:
    """Return the names of the settings that differ between two layers."""
    reference, candidate = pair.map(lambda layer: layer.settings)
    return [
        name
        for name, value in reference.items()
        if name in candidate and not _equal(name, value, candidate[name])
        # A convolution over patches and a linear layer compute the same with different sizes.
        if name not in _SIZES or equivalents.kind(pair.reference) == equivalents.kind(pair.candidate)
        # The axis of the batch may differ as the inputs' axes do: the diffs of calls tell (`causes`).
        if name != "batch_first"
        # These settings have no effect without padding, which another layer may do.
        if name != "count_include_pad" or any(_pads(layer) for layer in pair)
        if name != "padding_mode" or all(_pads(layer) for layer in pair)
    ]


def _equal(name: str, a: object, b: object) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b or (type(a) is not type(b) and name != "padding_idx")


def _pads(layer: Layer) -> bool:
    padding = layer.settings.get("padding")
    return bool(any(padding) if isinstance(padding, list) else padding)


# Numbers of input and output features.
_SIZES = frozenset({"inputs", "outputs"})
# Settings that only have an effect in training mode.
_OF_TRAINING = frozenset({"p", "dropout"})


def layer_differences(
    alignment: Alignment, settings: Both[Mapping[str, Any]], called: Both[Collection[str]], framework: str
) -> Iterator[Difference]:
    """Yield the settings of layers that differ; a difference counts if both layers ran.

    Args:
        framework: the candidate's framework.
    """
    modes = settings.map(modes_of)
    for pair in alignment.pairs:
        names = differing(pair)
        if not names:
            continue
        evaluates = [mode is not None and not trains(layer, *mode) for mode, layer in zip(modes, pair)]
        names = [name for name in names if name not in _OF_TRAINING or not all(evaluates)]
        ran = pair.reference.path in called.reference and pair.candidate.path in called.candidate
        for name in names:
            telling = name in _TELLING or name == "count_include_pad"
            yield Difference(
                name,
                pair.map(lambda layer, name=name: layer.settings[name]),  # type: ignore[misc]
                "forward",
                "layer_setting",
                about=_sides(pair),
                changes=ran and telling,
                fix=layer_fix(framework, pair.candidate, name, pair.reference.settings[name]),
                layers=pair.map(lambda layer: (layer.path,)),
                note=_MOMENTUM if name == "momentum" else "",
            )


def mode_differences(
    alignment: Alignment, settings: Both[Mapping[str, Any]], called: Both[Collection[str]]
) -> Iterator[Difference]:
    """Yield the layers that train in one run and evaluate in the other, if the mode changes the computation."""
    reference_modes, candidate_modes = settings.map(modes_of)
    if reference_modes is None or candidate_modes is None:
        return
    pairs = [
        (pair, Both(trains(pair.reference, *reference_modes), trains(pair.candidate, *candidate_modes)))
        for pair in alignment.pairs
        if pair.reference.path in called.reference and pair.candidate.path in called.candidate
        if any(has_modes(layer) for layer in pair)
    ]
    alike = [pair.candidate.path for pair, training in pairs if training.reference == training.candidate]
    partners = {pair.candidate.path: pair.reference.path for pair in alignment.pairs}

    def is_wrong(path: str, expected: bool) -> bool:
        if path in partners:
            expected = _is_on(partners[path], *reference_modes)
        return _is_on(path, *candidate_modes) != expected

    for pair, training in pairs:
        if training.reference != training.candidate:
            # The outermost layer in which none has the right mode.
            above = [path for path in containers_of(pair.candidate.path) if is_wrong(path, training.reference)]
            outer = (path for path in above if not any(path == ROOT or is_below(each, path) for each in alike))
            yield Difference(
                "mode",
                training.map(lambda on: "train" if on else "eval"),
                "forward",
                "mode",
                about=_sides(pair),
                fix=_mode_fix(next(outer, pair.candidate.path), training.reference),
                layers=pair.map(lambda layer: (layer.path,)),
            )


def _sides(pair: LayerPair) -> str:
    reference, candidate = pair.map(lambda layer: f"{layer.path} ({layer.type})")
    return f"{reference} against {candidate}"


def _mode_fix(path: str, training: bool) -> str:
    suffix = "" if path.startswith("(") else f".{path}"
    if not re.fullmatch(r"(\.[A-Za-z0-9]\w*)*", suffix, re.ASCII):
        return ""  # text from a run must not become code
    return f"model{suffix}.{'train' if training else 'eval'}()"


def modes_of(settings: Mapping[str, Any]) -> tuple[bool, frozenset[str]] | None:
    """Return True if the model trains, and the paths of the layers in the opposite mode; `None` if unknown."""
    if not isinstance(settings.get("training"), bool):
        return None
    others = settings.get("training.others")
    return settings["training"], frozenset(others if isinstance(others, list) else ())


def _is_on(path: str, training: bool, others: Collection[str]) -> bool:
    """Return True if a layer is in training mode, given the result of `modes_of`."""
    return training is not (path in others)


def trains(layer: Layer, training: bool, others: Collection[str]) -> bool:
    """Return True if a layer trains, given the result of `modes_of`."""
    on = _is_on(layer.path, training, others)
    # With global statistics, a BatchNorm uses its running statistics in both modes.
    return on and not (_is_batch_norm(layer) and layer.settings.get("use_global_stats") is True)


def has_modes(layer: Layer) -> bool:
    """Return True if a layer computes differently in training."""
    kind = equivalents.kind(layer)
    if _is_batch_norm(layer):
        return True
    if "dropout" in kind:
        return bool(layer.settings.get("p", 0) != 0)
    return bool(equivalents.is_composite(kind) and layer.settings.get("dropout", 0) != 0)


def _is_batch_norm(layer: Layer) -> bool:
    return equivalents.kind(layer).startswith("batchnorm")
