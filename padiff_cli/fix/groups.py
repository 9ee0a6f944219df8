"""Proposals that give some parameters of an optimizer another weight decay or learning rate, as the reference does."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import takewhile

from padiff.frameworks.catalog import number_text
from padiff.records import Difference
from padiff.system.code import literal
from padiff_cli.fix.fault import Fault
from padiff_cli.fix.matching import Change, UnwritableError, Writer
from padiff_cli.fix.source import Edit, Project, Proposal, Source, dotted, last_name
from padiff_cli.fix.vocabulary import kind_of

_WEIGHT = 1.1
_DECAYS = ("weight_decay", "decay.decoupled", "decay.coupled")
_PARAMETERS = ("parameters", "params")
_BY_NAME = "apply_decay_param_fun"


def parameter_groups(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield groups of parameters for each setting that differs for some parameters only."""
    framework = fault.frameworks[1]
    for difference in fault.settings:
        sites = difference.parameters.candidate
        if fault.first.stage != "update" or not sites or difference.name not in (*_DECAYS, "lr"):
            continue
        setting = _setting(difference, framework)
        calls = [
            (source, node)
            for source in project
            for node in source.nodes
            if isinstance(node, ast.Call) and kind_of(last_name(node.func)) == "optimizer"
        ]
        for source, call in calls:
            given = _parameters_of(call)
            model = _model_of(given)
            for keyword in call.keywords:
                if keyword.arg == _BY_NAME and difference.name in _DECAYS and difference.values.reference:
                    edits = Writer(source, framework, {}).edits(Change("remove", keyword, _BY_NAME))
                    yield Proposal(edits, f"`{_BY_NAME}` is left out", _WEIGHT)
            if given is None or not model or not setting:
                continue
            for test, words in _tests(sites):
                yield from _grouped(source, call, given, model, test, words, setting, framework)


def _setting(difference: Difference, framework: str) -> tuple[str, str] | None:
    """Return the key of a group and its value as code; `None` if it cannot be said."""
    reference, candidate = difference.values
    if isinstance(reference, bool) or not isinstance(reference, (int, float)):
        return None
    if difference.name != "lr":
        return "weight_decay", number_text(float(reference))
    if framework != "paddle":
        return "lr", number_text(float(reference))
    # In paddle a group's rate is a factor of the optimizer's.
    if not isinstance(candidate, (int, float)) or not candidate:
        return None
    return "learning_rate", number_text(float(f"{reference / candidate:.9g}"))


def _tests(sites: Sequence[str]) -> list[tuple[str, str]]:
    """Return conditions that hold for some parameters, as code of their name and tensor, and in words."""
    names = [site.replace("/", ".") for site in sites]
    flat = ("p.ndim < 2", "norms and biases")
    found = [('n.endswith("bias")', "biases"), flat] if all(name.endswith("bias") for name in names) else [flat]
    columns = zip(*(name.split(".")[:-1] for name in names))
    path = ".".join(column[0] for column in takewhile(lambda column: len({*column}) == 1, columns))
    if path:
        found.insert(0, (f"n.startswith({literal(f'{path}.')})", path))
    return found


def _grouped(
    source: Source, call: ast.Call, given: ast.expr, model: str, test: str, words: str, setting: tuple[str, str],
    framework: str,
) -> Iterator[Proposal]:  # fmt: skip
    key, value = setting
    text = f"`{key}` is {value} for {words}"
    named = f"for n, p in {model}.named_parameters() if"
    if framework == "paddle" and last_name(call.func) == "AdamW" and (key, value) == ("weight_decay", "0.0"):
        code = f"{_BY_NAME}=lambda name: name not in [p.name {named} {test}]"
        try:
            edits = Writer(source, framework, {}).argument(call, code)
        except UnwritableError:
            return
        yield Proposal(edits, text, _WEIGHT)
        return
    start, end = source.span(given)
    groups = f'[{{"params": [p {named} not {test}]}}, {{"params": [p {named} {test}], "{key}": {value}}}]'
    yield Proposal((Edit(source.file, start, end, groups),), text, _WEIGHT)


def _parameters_of(call: ast.Call) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg in _PARAMETERS:
            return keyword.value
    return next((each for each in call.args if _model_of(each)), None)


def _model_of(given: ast.expr | None) -> str:
    """Return the model of an expression such as ``model.parameters()``; empty if it is none."""
    is_call = isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters"
    return dotted(given.func.value) if is_call else ""  # type: ignore[union-attr]
