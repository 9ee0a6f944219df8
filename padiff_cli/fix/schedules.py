"""Proposals for the numbers of schedules: those with which the candidate's schedule has the reference's rates.

The rates of all steps in which they differ are recorded, and the schedules of the catalog are computed here, so that no
number has to be tried in a run.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from padiff.frameworks.catalog import number_text
from padiff.records import Both
from padiff.system.construction import key_of
from padiff_cli.fix.arithmetic import Arithmetic, UnknownError, defined_function
from padiff_cli.fix.fault import Fault
from padiff_cli.fix.source import Edit, Project, Proposal, Source, last_name
from padiff_cli.fix.vocabulary import common_argument, number_of

# The computed numbers come before moves of calls.
_WEIGHT = 0.9
# Largest integer that is tried, in multiples of the steps; steps of a search for another number, and the relative error
# of a rate.
_AS_LONG, _SEARCHED, _EXACT = 20, 30, 1e-6
# Largest number of places that read the step.
_MOST_READS = 6
# Arguments by place, behind the optimizer or the learning rate, with the defaults.
_PLACES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": None, "gamma": 0.1},
    "StepDecay": {"step_size": None, "gamma": 0.1},
    "MultiStepLR": {"milestones": None, "gamma": 0.1},
    "MultiStepDecay": {"milestones": None, "gamma": 0.1},
    "ExponentialLR": {"gamma": None},
    "ExponentialDecay": {"gamma": None},
    "NaturalExpDecay": {"gamma": None},
    "InverseTimeDecay": {"gamma": None},
    "CosineAnnealingLR": {"T_max": None, "eta_min": 0.0},
    "CosineAnnealingDecay": {"T_max": None, "eta_min": 0.0},
    "ConstantLR": {"factor": 1 / 3, "total_iters": 5},
    "LinearWarmup": {"warmup_steps": None, "start_lr": None, "end_lr": None},
    "PolynomialDecay": {"total_iters": None, "end_lr": 0.0001, "power": 1.0},
    "PolynomialLR": {"total_iters": 5, "power": 1.0},
    "LambdaLR": {"lr_lambda": None},
    "LambdaDecay": {"lr_lambda": None},
}
_LINEAR: dict[str, dict[str, Any]] = {
    "torch": {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5},
    "paddle": {"total_iters": None, "start_factor": 1 / 3, "end_factor": 1.0},
}


def _steps(base: float, a: Mapping[str, Any], k: int) -> float:
    return float(base * a["gamma"] ** (k // int(a["step_size"])))


def _linear(base: float, a: Mapping[str, Any], k: int) -> float:
    share = min(k, a["total_iters"]) / a["total_iters"]
    return float(base * (a["start_factor"] + (a["end_factor"] - a["start_factor"]) * share))


def _polynomial(base: float, a: Mapping[str, Any], k: int) -> float:
    last = a.get("end_lr", 0.0)
    return float((base - last) * (1 - min(k, a["total_iters"]) / a["total_iters"]) ** a["power"] + last)


def _milestones(base: float, a: Mapping[str, Any], k: int) -> float:
    return float(base * a["gamma"] ** sum(k >= each for each in a["milestones"]))


def _cosine(base: float, a: Mapping[str, Any], k: int) -> float:
    return float(a["eta_min"] + (base - a["eta_min"]) * (1 + math.cos(math.pi * k / a["T_max"])) / 2)


_RULES: dict[str, Callable[[float, Mapping[str, Any], int], float]] = {
    "StepLR": _steps, "StepDecay": _steps, "MultiStepLR": _milestones, "MultiStepDecay": _milestones,
    "ExponentialLR": lambda base, a, k: base * a["gamma"] ** k,
    "ExponentialDecay": lambda base, a, k: base * a["gamma"] ** k,
    "NaturalExpDecay": lambda base, a, k: base * math.exp(-a["gamma"] * k),
    "InverseTimeDecay": lambda base, a, k: base / (1 + a["gamma"] * k),
    "CosineAnnealingLR": _cosine, "CosineAnnealingDecay": _cosine, "LinearLR": _linear,
    "PolynomialLR": _polynomial, "PolynomialDecay": _polynomial,
    "ConstantLR": lambda base, a, k: base * (a["factor"] if k < a["total_iters"] else 1.0),
}  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """A construction of a schedule in the candidate's source.

    Attributes:
        project: the files.
        source: the file of the construction.
        call: the construction.
        framework: the candidate's framework.
    """

    project: Project
    source: Source
    call: ast.Call
    framework: str

    def rates(self, steps: Sequence[int], arithmetic: Arithmetic) -> list[float]:
        """Return the learning rates of some steps.

        Raises:
            UnknownError: the schedule is not known, or one of its numbers is not.
        """
        try:
            return [self._rate(arithmetic, self.source, self.call, k) for k in steps]
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UnknownError from error

    def _rate(self, arithmetic: Arithmetic, source: Source, call: ast.Call, k: int) -> float:
        name = last_name(call.func)
        places = _LINEAR[self.framework] if name == "LinearLR" else _PLACES.get(name)
        if places is None or any(each.arg is None for each in call.keywords):
            raise UnknownError
        nodes = {common_argument(str(each.arg)): each.value for each in call.keywords}
        nodes |= dict(zip(places, call.args[1:]))
        first = call.args[0] if call.args else nodes.get("lr")
        if name == "LinearWarmup":
            values = {each: arithmetic.evaluate(source, nodes[each]) for each in places if each in nodes}
            if len(values) < len(places) or first is None:
                raise UnknownError
            if k >= values["warmup_steps"]:
                return self._base(arithmetic, source, first, int(k - values["warmup_steps"]))
            share = k / values["warmup_steps"]
            return float(values["start_lr"] + (values["end_lr"] - values["start_lr"]) * share)
        base = (
            self._base(arithmetic, source, first, 0) if self.framework == "paddle" else self._of_optimizer(arithmetic)
        )
        if "lr_lambda" in places:
            if "lr_lambda" not in nodes:
                raise UnknownError
            return float(base * arithmetic.result(source, nodes["lr_lambda"], float(k)))
        argument = {each: arithmetic.evaluate(source, nodes[each]) for each in places if each in nodes}
        return _RULES[name](base, {**places, **argument}, k)

    def _base(self, arithmetic: Arithmetic, source: Source, first: ast.expr | None, k: int) -> float:
        """Return the rate of what a schedule begins with or goes on with: a number, or another schedule."""
        if first is None:
            raise UnknownError
        if isinstance(first, ast.Name):
            calls = [value for value in source.assigned(first.id) if isinstance(value, ast.Call)]
            first = calls[0] if len(calls) == 1 and last_name(calls[0].func) in (*_PLACES, "LinearLR") else first
        if isinstance(first, ast.Call) and last_name(first.func) in (*_PLACES, "LinearLR"):
            return self._rate(arithmetic, source, first, k)
        return float(arithmetic.evaluate(source, first))

    def _of_optimizer(self, arithmetic: Arithmetic) -> float:
        for source, call in self.project.catalog_calls("optimizer"):
            given = [each.value for each in call.keywords if each.arg == "lr"] or call.args[1:2]
            if given:
                return float(arithmetic.evaluate(source, given[0]))
        raise UnknownError

    @property
    def stepping(self) -> list[ast.Name]:
        """Return the places that read the step in a function of the schedule."""
        values = [keyword.value for keyword in self.call.keywords if keyword.arg == "lr_lambda"] or self.call.args[1:2]
        function = defined_function(self.source, values[0]) if values else None
        if "lr_lambda" not in _PLACES.get(last_name(self.call.func), ()):
            return []
        is_function = isinstance(function, (ast.Lambda, ast.FunctionDef)) and function.args.args
        return _reads(function, function.args.args[-1].arg) if is_function else []  # type: ignore[union-attr,arg-type]


@dataclass(frozen=True)
class Written:
    """A function of the candidate's source that computes the learning rate of a step.

    Attributes:
        project: the files.
        source: the file of the function.
        function: the function.
        step: the parameter that is the step.
    """

    project: Project
    source: Source
    function: ast.FunctionDef
    step: str

    def rates(self, steps: Sequence[int], arithmetic: Arithmetic) -> list[float]:
        """Return the learning rates of some steps.

        Raises:
            UnknownError: the function computes something else.
        """
        try:
            return [float(arithmetic.result(self.source, self.function, float(k), self.step)) for k in steps]
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UnknownError from error

    @property
    def stepping(self) -> list[ast.Name]:
        """Return the places that read the step."""
        return _reads(self.function, self.step)


def _reads(function: ast.AST, name: str) -> list[ast.Name]:
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return [node for node in nodes if node.id == name]


def _schedules(project: Project, framework: str) -> list[Schedule | Written]:
    """Return the schedules of a project, and the functions called where code sets the rate itself; in one order
    for edited projects.
    """
    setting: list[tuple[Source, ast.AST]] = [*project.calls("set_lr")]
    for source in project:
        written = [node for node in source.nodes if isinstance(node, ast.Assign)]
        setting += [(source, node) for node in written if any(map(_is_rate, node.targets))]
    names = {
        last_name(node.func)
        for source, place in setting
        for node in ast.walk(source.function(place) or source.tree)
        if isinstance(node, ast.Call)
    }
    calls = [Schedule(project, *each, framework) for each in project.catalog_calls("schedule")]
    functions = [(source, node) for source in project for node in source.nodes if isinstance(node, ast.FunctionDef)]
    return [
        *calls,
        *(
            Written(project, source, node, each.arg)
            for source, node in functions
            for each in node.args.args
            if node.name in names and each.arg != "self"
        ),
    ]


def _is_rate(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and key_of(target) == "lr"


def schedule_numbers(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the number of a schedule, or the step before or after it, with which the candidate has the reference's
    learning rates in all steps.
    """
    rates = {
        each.step: each.values
        for each in fault.settings
        if each.kind == "learning_rate" and not any(each.parameters)
        and all(isinstance(value, (int, float)) for value in each.values)
    }  # fmt: skip
    if fault.kind != "learning_rate" or not rates:
        return
    lines = fault.models.lines.reference
    wanted = [number for key in lines if "#" in key or key == "@scheduler" for number in _numbers_in(lines[key].code)]
    length = max(fault.length, max(rates) + 1)
    for number, schedule in enumerate(_schedules(project, fault.frameworks[1])):
        target = _target(schedule, rates, length)
        for edit in _edits(schedule, target, min(rates), wanted) if target else ():
            yield Proposal((edit,), f"the schedule has {edit.text}", _WEIGHT)
        for edits in _shifts(schedule) if target else ():
            changed = project.with_edits(edits)
            later = [] if changed is None else _schedules(changed, fault.frameworks[1])
            if len(later) > number and _are_equal(_computed(later[number], length), target):
                yield Proposal(edits, f"the schedule is at {edits[0].text}", _WEIGHT)


def _target(schedule: Schedule | Written, rates: Mapping[int, Both[float]], length: int) -> list[float]:
    """Return the reference's rates of all steps; none if the schedule is another one than the candidate's, or one that
    does not step with each step.
    """
    before = _computed(schedule, length)
    is_own = before and _are_equal([before[k] for k in rates], [each.candidate for each in rates.values()])
    return [rates[k].reference if k in rates else rate for k, rate in enumerate(before)] if is_own else []


def _computed(schedule: Schedule | Written, length: int) -> list[float]:
    try:
        return schedule.rates([*range(length)], Arithmetic(schedule.project))
    except UnknownError:
        return []


def _are_equal(rates: Sequence[float], others: Sequence[float]) -> bool:
    return len(rates) == len(others) and all(map(partial(math.isclose, rel_tol=_EXACT), rates, others))


def _shifts(schedule: Schedule | Written) -> Iterator[tuple[Edit, ...]]:
    """Yield edits that take the step before or after: at each place that reads the step, and at all of them."""
    places = schedule.stepping[:_MOST_READS]
    for nodes in [*([each] for each in places), *([places] if len(places) > 1 else [])]:
        for sign in "+-":
            yield tuple(
                Edit(schedule.source.file, *schedule.source.span(node), f"({node.id} {sign} 1)") for node in nodes
            )


def _numbers_in(code: str) -> list[float]:
    try:
        tree = ast.parse(code.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    numbers = [number_of(node) for node in ast.walk(tree) if isinstance(node, ast.expr)]
    return [each for each in numbers if each is not None]


def _edits(
    schedule: Schedule | Written, target: Sequence[float], first: int, wanted: Sequence[float]
) -> Iterator[Edit]:
    """Yield the numbers with which a schedule has some rates, of which a step is the first that differs."""
    steps, arithmetic = [*range(len(target))], Arithmetic(schedule.project)
    schedule.rates(steps, arithmetic)

    def errors(node: ast.expr, number: float, at: Sequence[int]) -> list[float]:
        try:
            computed = schedule.rates(at, Arithmetic(schedule.project, {node: number}))
        except UnknownError:
            return [math.inf]
        return [after - target[k] for after, k in zip(computed, at)]

    def error_of_first(node: ast.expr, number: float) -> float:
        return errors(node, number, [first])[0]

    def is_right(node: ast.expr, number: float) -> bool:
        # Most numbers are wrong in the first step that differs: the other steps are not computed.
        return all(
            abs(error) <= _EXACT * abs(target[k])
            for at in ([first], steps)
            for k, error in zip(at, errors(node, number, at))
        )

    for node, source in arithmetic.literals.items():
        number = number_of(node)
        is_whole = isinstance(node, ast.Constant) and isinstance(node.value, int)
        numbers = [float(k) for k in range(1, _AS_LONG * len(steps))] if is_whole else []
        numbers = [*wanted, *sorted(numbers, key=lambda each, number=number: abs(each - number))]  # type: ignore[misc]
        if number is not None and not is_whole:
            solved = _solved(partial(error_of_first, node), number)
            numbers += [] if solved is None else [float(f"{solved:.{digits}g}") for digits in (2, 4, 9)]
        answer = next((each for each in numbers if each != number and is_right(node, each)), None)
        if answer is not None:
            text = str(int(answer)) if is_whole and answer == int(answer) else number_text(answer)
            yield Edit(source.file, *source.span(node), text)


def _solved(error: Callable[[float], float], number: float) -> float | None:
    """Return the number at which an error is 0, by secants; `None` if none is near."""
    former, latter = number, number * 1.01 if number else 1e-3
    values = error(former), error(latter)
    for _ in range(_SEARCHED):
        if not all(map(math.isfinite, values)) or values[0] == values[1]:
            return None
        former, latter = latter, latter - values[1] * (latter - former) / (values[1] - values[0])
        values = values[1], error(latter)
        if abs(latter - former) <= 1e-12 * abs(latter):
            return latter
    return None
