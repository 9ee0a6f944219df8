"""Proposals for settings of the optimizer's step: groups of parameters, numbers of schedules, arguments of trainers.

Trainers of transformers, PaddleFormers and Lightning make optimizer, clipping and schedule in their own code, so that
no line of the candidate is about them but the arguments of the trainer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from padiff.frameworks.catalog import number_text
from padiff.records import Difference
from padiff.system.code import literal
from padiff_cli.fix.fault import Fault
from padiff_cli.fix.insertions import literals
from padiff_cli.fix.matching import Change, UnwritableError, Writer
from padiff_cli.fix.source import Edit, Project, Proposal, Source, dotted, last_name
from padiff_cli.fix.vocabulary import kind_of, number_of, value_text

_WEIGHT, _RATE = 1.1, 1.8
_MOST_RATES, _MOST_PLACES = 6, 3
# Names of the numbers of a schedule, and the most characters of a number that somebody wrote.
_OF_SCHEDULE = re.compile(
    r"schedule|warm|gamma|decay_rate|lr_decay|total|step_size|t_max|max_steps|factor", re.IGNORECASE
)
_LONGEST_NUMBER = 7
_DECAYS = ("weight_decay", "decay.decoupled", "decay.coupled")
_PARAMETERS = ("parameters", "params")
# Names of parameters in the lists of what decay skips.
_SKIPPED = frozenset(
    ("bias", "norm", ".bias", "bn", "ln", "LayerNorm.weight", "LayerNorm.bias", "norm.weight", "gamma")
)
_BY_NAME = "apply_decay_param_fun"
_TRAINER_WEIGHT = 1.2
# The arguments that make a setting, by its name in `Difference.name`; an argument that no call has is added where the
# class is one of `_CLASSES`.
_ARGUMENTS = {
    "warm-up steps": ("warmup_steps",),
    "the schedule of the learning rate": ("lr_scheduler_type",),
    "steps of the whole training": ("max_steps",),
    "label smoothing": ("label_smoothing_factor",),
    "samples of a micro-batch": ("per_device_train_batch_size",),
    "accumulation": ("gradient_accumulation_steps", "accumulate_grad_batches"),
    "weight_decay": ("weight_decay",),
    "decay.decoupled": ("weight_decay",),
    "decay.coupled": ("weight_decay",),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    "eps": ("adam_epsilon",),
}
_CLASSES = frozenset(("TrainingArguments", "Seq2SeqTrainingArguments", "PretrainingTrainingArguments", "SFTConfig"))
_LIGHTNING = "Trainer"
# Settings whose effect on the optimizer's step a trainer decides.
_RATES = ("warm-up steps", "the schedule of the learning rate", "steps of the whole training")


def parameter_groups(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield groups of parameters for each setting that differs for some parameters only, and numbers of schedules."""
    yield from _group_rates(fault, project)
    yield from _rates(fault, project)
    yield from _declared_numbers(fault, project)
    framework = fault.frameworks[1]
    for difference in fault.settings:
        sites = difference.parameters.candidate
        if fault.first.stage != "update" or not sites or difference.name not in (*_DECAYS, "lr"):
            continue
        setting = _setting(difference, framework)
        calls = project.catalog_calls("optimizer")
        if difference.name in _DECAYS and not difference.values.reference:
            yield from _named(project, sites)
        for source, call in calls:
            given = _parameters_of(call)
            model = _model_of(given)
            for keyword in call.keywords:
                if keyword.arg == _BY_NAME and difference.name in _DECAYS and difference.values.reference:
                    edits = Writer(source, framework, {}).edits(Change("remove", keyword, _BY_NAME))
                    yield Proposal(edits, f"`{_BY_NAME}` is left out", _WEIGHT)
            if setting and given is not None:
                yield from _in_groups(source, given, sites, setting)
            if given is None or not model or not setting:
                continue
            for test, words in _tests(sites):
                yield from _grouped(source, call, given, model, test, words, setting, framework)


def _group_rates(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the learning rate of a parameter group that makes the group's rate the reference's."""
    rates = fault.values if fault.kind == "learning_rate" else None
    if rates is None or len(rates.reference) != len(rates.candidate) or not all(map(min, rates)):
        return
    for source in project:
        groups = [node for node in source.nodes if isinstance(node, ast.Dict) and "params" in map(_key, node.keys)]
        for group, (right, own) in zip(groups, zip(*rates)) if len(groups) == len(rates.candidate) else ():
            for key, value in zip(group.keys, group.values):
                places = [(source, value)] if number_of(value) is not None else project.definitions(source, value)
                number = number_of(places[0][1]) if len(places) == 1 else None
                if right != own and _key(key) in ("lr", "learning_rate") and number is not None:
                    # In paddle a factor of the optimizer's rate.
                    edit = Edit(source.file, *source.span(value), number_text(float(f"{number * right / own:.9g}")))
                    yield Proposal((edit,), f"the group's `{_key(key)}` is {edit.text}", _WEIGHT)


def _key(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _named(project: Project, sites: Sequence[str]) -> Iterator[Proposal]:
    """Yield lists of names that decay skips, such as ``("bias",)``, with the name of more layers."""
    names = {site.rpartition("/")[0].rpartition(".")[2] for site in sites}
    name = next(iter(names)) if len(names) == 1 else ""
    for source in project if name.isidentifier() else ():
        for node in source.nodes:
            items = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
            texts = [each.value for each in items if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            if texts and len(texts) == len(items) and _SKIPPED.intersection(texts) and name not in texts:
                start, end = source.span(items[0])[0], source.span(items[-1])[1]
                tail = source.text[end : source.span(node)[1]]
                last = end + (tail.index(",") + 1 if tail[:-1].strip() == "," and "\n" not in tail else 0)
                edit = Edit(source.file, start, last, f'{source.text[start:end]}, "{name}"')
                yield Proposal((edit,), f"decay skips layers named {name}", _WEIGHT - 0.1)


def _rates(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the number of a schedule that makes the first rate which differs the reference's: a length or a factor."""
    rates = fault.rates
    ratio = rates.reference / rates.candidate if min(rates) > 0 else 1.0
    numbers = [] if ratio == 1.0 else literals(project)
    values = [(source, node, number) for source, node, number in numbers if _OF_SCHEDULE.search(_owner(source, node))]
    new: dict[Edit, float] = {}
    for source, node, number in values:
        for value in (number / ratio, number * ratio):
            text = number_text(round(value)) if number == int(number) else number_text(float(f"{value:.4g}"))
            if abs(float(text) - value) <= 1e-3 * abs(value) and len(text) < _LONGEST_NUMBER:
                shown = text.removesuffix(".0") if number == int(number) else text
                new.setdefault(Edit(source.file, *source.span(node), shown), value)
    for k, edit in enumerate([*new][:_MOST_RATES]):
        yield Proposal((edit,), f"the schedule has {edit.text}", _RATE + 0.01 * k)


def _declared_numbers(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the reference's value of a setting in the places of the candidate's: first where a name says so."""
    for difference in fault.settings:
        numbers = [each for each in difference.values if isinstance(each, (int, float)) and not isinstance(each, bool)]
        if not difference.changes or difference.stage != fault.first.stage or len(numbers) < 2:
            continue
        text, words = number_text(float(numbers[0])), {*re.split(r"[\W_]+", difference.name.lower())}
        places = [(source, node) for source, node, number in literals(project) if number == numbers[1]]
        ranked = sorted(places, key=lambda place: not words.intersection(re.split(r"[\W_]+", _owner(*place).lower())))
        for k, (source, node) in enumerate(ranked[:_MOST_PLACES]):
            edit = Edit(source.file, *source.span(node), text)
            yield Proposal((edit,), f"`{difference.name}` is {text}", _RATE + 0.3 * k)


def _owner(source: Source, node: ast.AST) -> str:
    """Return the names of the argument, the parameter or the variable that a value is given to, and the call's."""
    above = source.parents.get(node)
    if isinstance(above, ast.keyword):
        call = source.parents.get(above)
        is_schedule = isinstance(call, ast.Call) and kind_of(last_name(call.func)) == "schedule"
        return f"{above.arg} {'schedule' if is_schedule and above.arg != 'learning_rate' else ''}"
    if isinstance(above, ast.Call):
        return "schedule" if kind_of(last_name(above.func)) == "schedule" and node is not above.args[0] else ""
    if isinstance(above, ast.arguments):
        places = [*above.posonlyargs, *above.args][-len(above.defaults) :] if above.defaults else []
        pairs = [*zip(places, above.defaults), *zip(above.kwonlyargs, above.kw_defaults)]
        return next((each.arg for each, value in pairs if value is node), "")
    if isinstance(above, ast.Dict):
        keys = [key for key, value in zip(above.keys, above.values) if value is node]
        return str(keys[0].value) if keys and isinstance(keys[0], ast.Constant) else ""
    if isinstance(above, ast.AnnAssign):
        return last_name(above.target)
    return " ".join(map(last_name, above.targets)) if isinstance(above, ast.Assign) else ""


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


def _listed(source: Source, function: ast.expr, test: str, words: str) -> Iterator[Proposal]:
    """Yield the list of the names that decay, without those for which a condition of the tensor holds."""
    tested = [each for each in ast.walk(function) if isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.In)]
    names = {dotted(each.comparators[0]) for each in tested}
    for node in source.nodes if test.startswith("p.ndim ") else ():
        lists = node.value if isinstance(node, ast.Assign) and names & {*map(dotted, node.targets)} else None
        if not isinstance(lists, (ast.ListComp, ast.SetComp)) or not isinstance(lists.elt, ast.Attribute):
            continue
        variable, generator = dotted(lists.elt.value), lists.generators[-1]
        if lists.elt.attr == "name" and variable and not generator.ifs:
            end = source.span(generator.iter)[1]
            test = test.replace("p.ndim <", f"{variable}.ndim >=")
            yield Proposal((Edit(source.file, end, end, f" if {test}"),), words, _WEIGHT - 0.1)


def _in_groups(source: Source, given: ast.expr, sites: Sequence[str], setting: tuple[str, str]) -> Iterator[Proposal]:
    """Yield the setting of a group that does not set it: the group whose code names one of the layers comes first."""
    groups = [
        node
        for node in ast.walk(_list_of(source, given))
        if isinstance(node, ast.Dict) and "params" in map(_key, node.keys) and setting[0] not in map(_key, node.keys)
    ]
    layers = {part for site in sites for part in site.rpartition("/")[0].split(".")}
    ranked = sorted(groups, key=lambda node: not layers.intersection(re.findall(r"\.(\w+)", source.code(node))))
    for k, node in enumerate(ranked[:_MOST_PLACES] if len(groups) > 1 or isinstance(given, ast.List) else ()):
        end = source.span(node.values[-1])[1]
        edit = Edit(source.file, end, end, f', "{setting[0]}": {setting[1]}')
        yield Proposal((edit,), f"the group's `{setting[0]}` is {setting[1]}", _WEIGHT + 0.1 * k)


def _list_of(source: Source, given: ast.expr) -> ast.AST:
    """Return the list of groups that a variable holds, or the expression itself."""
    values: Sequence[ast.AST] = source.assigned(dotted(given))
    if isinstance(given, ast.Call):
        values = source.functions(last_name(given.func))
    return values[0] if len(values) == 1 else given


def _grouped(
    source: Source, call: ast.Call, given: ast.expr, model: str, test: str, words: str, setting: tuple[str, str],
    framework: str,
) -> Iterator[Proposal]:  # fmt: skip
    key, value = setting
    text = f"`{key}` is {value} for {words}"
    named = f"for n, p in {model}.named_parameters() if"
    if framework == "paddle" and last_name(call.func) == "AdamW" and (key, value) == ("weight_decay", "0.0"):
        function = f"lambda name: name not in [p.name {named} {test}]"
        chosen = next((each.value for each in call.keywords if each.arg == _BY_NAME), None)
        if chosen is not None:
            yield from _listed(source, chosen, test, text)
            yield Proposal((Edit(source.file, *source.span(chosen), function),), text, _WEIGHT)
            return
        try:
            edits = Writer(source, framework, {}).argument(call, f"{_BY_NAME}={function}")
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
    return next((each for each in call.args if _model_of(each) or isinstance(each, ast.List)), None)


def _model_of(given: ast.expr | None) -> str:
    """Return the model of an expression such as ``model.parameters()``; empty if it is none."""
    is_call = isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters"
    return dotted(given.func.value) if is_call else ""  # type: ignore[union-attr]


def trainer_arguments(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield arguments of trainers with the reference's values of the settings that a fault is about."""
    calls = [(source, call) for source, call in project.calls(*_CLASSES, _LIGHTNING) if call.keywords]
    if not calls:
        return
    for difference in fault.settings:
        if difference.name in _ARGUMENTS and _is_about(difference, fault):
            for name in _ARGUMENTS[difference.name]:
                yield from _set(project, calls, name, difference.values.reference)
    yield from _rate(fault, project, calls)
    function, limit = fault.clipping
    if function:
        by_norm = "orm" in function
        of_lightning = [(source, call) for source, call in calls if _keyword(call, "gradient_clip_val") is not None]
        yield from _set(project, calls, "max_grad_norm", limit if by_norm else None)
        yield from _set(project, of_lightning, "gradient_clip_algorithm", "norm" if by_norm else "value")
        yield from _set(project, calls, "gradient_clip_val", limit)


def _is_about(difference: Difference, fault: Fault) -> bool:
    """Return True if a setting may have made a fault."""
    stage, kind = fault.first.stage, fault.kind
    if difference.name in _RATES:
        return kind in ("learning_rate", "lr", "rate") or stage == "update"
    return difference.stage == stage or difference.name in (fault.first.slot or "", kind) or difference.kind == kind


def _rate(fault: Fault, project: Project, calls: list[tuple[Source, ast.Call]]) -> Iterator[Proposal]:
    """Yield the learning rate, where the reference's is the candidate's times one number in all steps."""
    pairs = [(each.values.reference, each.values.candidate) for each in fault.settings if each.kind == "learning_rate"]
    numbers = [pair for pair in pairs if all(isinstance(value, (int, float)) and value > 0 for value in pair)]
    if not numbers or len(numbers) != len(pairs):
        return
    ratios = [reference / candidate for reference, candidate in numbers]
    if max(ratios) - min(ratios) > 1e-6 * max(ratios):
        return
    for source, call in calls:
        keyword = _keyword(call, "learning_rate")
        places = [] if keyword is None else _numbers_of(project, source, keyword.value)
        for place, node in places:
            own = number_of(node)
            if own:
                text = value_text(ast.Constant(float(f"{own * ratios[0]:.6g}")))
                start, end = place.span(node)
                yield Proposal((Edit(place.file, start, end, text),), f"`learning_rate` is {text}", _TRAINER_WEIGHT)


def _set(project: Project, calls: list[tuple[Source, ast.Call]], name: str, value: Any) -> Iterator[Proposal]:
    """Yield edits that give a trainer's argument a value: where it is defined, in the call, or as a new argument."""
    text = value_text(ast.Constant(value)) if isinstance(value, (int, float, str)) else ""
    if not text:
        return
    words = f"`{name}` is {text}"
    having = [(source, keyword) for source, call in calls if (keyword := _keyword(call, name)) is not None]
    for source, keyword in having:
        for place, node in _numbers_of(project, source, keyword.value):
            start, end = place.span(node)
            yield Proposal((Edit(place.file, start, end, text),), words, _TRAINER_WEIGHT)
        start, end = source.span(keyword.value)
        yield Proposal((Edit(source.file, start, end, text),), words, _TRAINER_WEIGHT + 0.1)
    if having:
        return
    is_lightning = name in ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
    for source, call in calls:
        if (last_name(call.func) == _LIGHTNING) == is_lightning and not _is_hugging_face(call):
            try:
                edits = Writer(source, "torch", {}).edits(Change("add", call, name, ast.Constant(value)))
            except UnwritableError:
                continue
            yield Proposal(edits, words, _TRAINER_WEIGHT + 0.2)


def _is_hugging_face(call: ast.Call) -> bool:
    return last_name(call.func) == _LIGHTNING and any(each.arg in ("model", "args") for each in call.keywords)


def _numbers_of(project: Project, source: Source, value: ast.expr) -> list[tuple[Source, ast.expr]]:
    """Return the places where the value of an argument is defined."""
    return [(source, value)] if isinstance(value, ast.Constant) else project.definitions(source, value)


def _keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((each for each in call.keywords if each.arg == name), None)
