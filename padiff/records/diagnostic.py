"""The result of a comparison in brief: the first diff, its cause, its fix, and the lines of code."""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from padiff.records.both import SIDES, Both
from padiff.records.compared import UNKNOWN_LINES, Cause, Diff, factor_text
from padiff.records.first_diff import FirstDiff, Standing
from padiff.records.recorded import ROOT, STAGES, Layer, is_below
from padiff.records.report_data import CANNOT_TELL, MATCH, NO_FILES, Models, ReportData, choice_notes
from padiff.records.report_text import NOUNS, floor_lines, match_notes, third_lines, verdict
from padiff.records.traces import LOOP
from padiff.system.construction import buffer_key, has_changed, is_here, loss_key
from padiff.system.frames import Frame
from padiff.system.language import translated
from padiff.system.process import command_text
from padiff.system.terminal import printable

#: Version of the schema of `Diagnostic`.
DIAGNOSTIC_VERSION = 1
#: Largest size of a diagnostic's JSON, in bytes.
LARGEST = 4096
# Characters of a text in JSON: the largest number with which the JSON has room is used. Number of further faults.
_LONGEST, _FAULTS = (400, 200, 100, 40), 4
# Kinds of causes that the line of the optimizer's construction shows.
_OF_OPTIMIZER = ("optimizer", "learning_rate", "weight_decay", "momentum", "beta")
# Kinds of causes that the line of the layer's construction shows.
_OF_LAYER = ("layer_setting", "dropout", "batch_norm")
# Lines of the training's own calls, by the kind of the cause.
_OF_STEP = {
    "stale_gradient": ("@zero_grad", "@step"),
    "left_over": ("@zero_grad", "@step"),
    "micro_batch_missing": ("@zero_grad", "@step"),
    "accumulation": ("@total", "@backward"),
    "gradient_scale": ("@backward",),
    "loss_divisor": ("@backward", "@total"),
    "loss_scale": ("@backward",),
    "step_skipped": ("@step",),
    "gradients_cleared": ("@zero_grad",),
    "backward_missing": ("@backward", "@total", "@step"),
    "step_repeated": ("@step",),
    "no_gradient": ("@backward",),
    "average_order": ("@average",),
    "average_decay": ("@average",),
    "average_missing": ("@average", "@step"),
}
# Words of causes in data, and the code that does what they say, the surest first.
_OF_DATA = tuple((re.compile(words), re.compile(code)) for words, code in (
    (r"variance of", r"\b(?:std|var)\("),
    (r"times the reference|scaled|normalised", r"\bNormalize\(|/(?![/=])"),
    (r"times the reference|scaled|normalised", r"\bmul\(|(?<!\*)\*(?!\*)"),
    (r"exchanged", r"\b(?:transpose|permute|moveaxis|swapaxes|rollaxis)\(|\.T\b"),
    (r"flipped", r"flip|::-1|cvtColor"),
    (r"shifted", r"\[[^\]]*:[^\]]*\]|crop|roll\("),
))  # fmt: skip
# Kinds of causes of a first diff in an input that no line that makes data shows.
_NOT_OF_DATA = ("model", "step_repeated", "never_stepped")
# The object whose mode a line sets.
_MODE = re.compile(r"(\w+)\.(?:train|eval)\(")
# Kinds of causes that the line of the data loader shows.
_OF_LOADER = ("batch_order", "input_order", "sizes")
# Kinds of causes for which the call itself is wrong, not one of its arguments.
_WHOLE = ("rule", "weight_decay_form", "optimizer_rule", "clip_missing")
# Keyword arguments and keys of a line of code, and functions that a sentence names.
_KEYWORD, _CALLED = re.compile(r"""(?:\b(\w+)\s*=(?!=)|["'](\w+)["']\s*:)\s*"""), re.compile(r"\b(\w+)\(")
# The text that an argument is, such as a mode.
_VALUE = re.compile(r"""["']([a-z_]{4,})["']$""")
_READ = re.compile(r"[A-Za-z_]\w*\b(?!\s*\()")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e[-+]?\d+)?(?!\w)")
# Numbers of both sides in a cause: the reference's first, and the candidate's first.
_AGAINST = (
    re.compile(rf"({_NUMBER.pattern}) against ({_NUMBER.pattern})"),
    re.compile(rf"is ({_NUMBER.pattern})(?: in the candidate| \(.*?\)+)? for the reference's ({_NUMBER.pattern})"),
)
_POWER = re.compile(r"(?:\bpow\(|\*\*)\s*$")
_SHAPE = re.compile(r"\(\d+(?:, \d+)*,?\)")
# Characters of a number that may have more digits than are shown.
_ROUNDED = 7
# Arguments of optimizers that are fixed without another class.
_OF_ONE_RULE = re.compile(r"\.\.\., (?:beta|eps|rho|alpha|lr|learning_rate|apply_decay_param_fun)")
# A keyword argument that is a number, or a list of numbers.
_PLAIN = re.compile(r"\w+\s*=\s*[-+\d.e\[\], ]+")
# Words of causes by a schedule that goes on at other steps.
_PACE, _SHIFT = re.compile("schedule goes|rate stays the same"), "schedule is shifted"
# Words of causes by weight decay of parameters that the reference spares.
_SPARED = re.compile(r"reference's 0\b(?!\.).*, of ")
# Arguments of a schedule, among others of a trainer.
_OF_SCHEDULE = re.compile(
    r"lr|rate|warmup|sched|step|epoch|gamma|(?<!weight_)decay|power|factor|milestones|t_max", re.IGNORECASE
)
# Arguments that hold objects, not settings.
_OBJECTS = ("parameters", "params", "model", "optimizer")
# Key of an optimizer's line.
_OPTIMIZER = re.compile(r"optimizer\.\d+")
# Tokens of a line of code, and the names in it that are variables or modules: no attributes, keywords or calls.
_TOKEN, _WORD = re.compile(r"\w+|\S"), re.compile(r"[\w.]+(?:(?<=\de)[-+]\d+)?|\S")
_VARIABLE = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*(?![\w\"'])(?!\s*=(?!=))")
_ATTRIBUTE = re.compile(r"\bself\.(\w+)")
_NAMES = re.compile(r"(?<![\w.\"'])[A-Za-z_][\w.]*")
# Operands that mean the same in both frameworks: names, numbers, functions of Python, and `detach`.
_ANYTHING = re.compile(".*")
_MEANT_BY_BOTH = re.compile(r"""(?:[^(\[="']|(?:\bmath\.\w+|\bdetach|\b(?:len|float|int|max|min|abs)|(?<!\w))\(|\[)*""")
# Share of a line's tokens that are the same in a line that can take its place. Chosen.
_LIKE = 0.6
# Names of one argument in code and in causes.
ARGUMENT_NAMES = (
    ("lr", "learning_rate", "max_lr", "base_lr"), ("eps", "epsilon", "adam_epsilon"), ("p", "dropout", "drop"),
    ("bias", "bias_attr"), ("affine", "elementwise_affine", "weight_attr"),
    ("betas", "beta1", "beta2", "adam_beta1", "adam_beta2"), ("decay", "weight_decay"),
    ("max_norm", "clip_norm", "clip", "norm of", "max_grad_norm", "grad_clip", "gradient_clip_val"),
    ("smoothing", "label_smoothing"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of one side's code.

    Attributes:
        file, line: path relative to the folder that the training was started in, and number of the line from 1.
        code: text of the line.
        span: first and last column of the part that the fault is about, in ``code``, counted from 0 and without the
            last; `None` if not known.
    """

    file: str
    line: int
    code: str
    span: list[int] | None


@dataclass(frozen=True, slots=True)
class CodeLines:
    """The line of either side that a fault points at; `None` if not known."""

    reference: CodeLine | None
    candidate: CodeLine | None


@dataclass(frozen=True, slots=True)
class BriefCause:
    """The cause: machine-readable kind, sentence, and True if a computation with it reproduces the values."""

    kind: str
    text: str
    proven: bool


@dataclass(frozen=True, slots=True)
class BriefFix:
    """The code that fixes the cause, in the candidate's framework.

    Attributes:
        text: the code.
        file, line, old, new: the candidate's line to change, its text, and the text in its place; `None` if not known.
    """

    text: str
    file: str | None = None
    line: int | None = None
    old: str | None = None
    new: str | None = None


@dataclass(frozen=True, slots=True)
class BriefFault:
    """A fault: where it is, why, how to fix it, and how large it is.

    Attributes:
        step, stage, reference, candidate, slot: position: step, stage, paths of both layers, name of the tensor.
        where: the position in words.
        times_limit: the error as a multiple of its limit; `None` if it has none.
        size: the error in words.
        cause, fix, places: the cause, its fix, and the lines of code; `None` if not known.
    """

    step: int
    stage: str
    reference: str | None
    candidate: str | None
    slot: str
    where: str
    times_limit: float | None
    size: str
    cause: BriefCause | None
    fix: BriefFix | None
    places: CodeLines


@dataclass(frozen=True, slots=True)
class BriefCompared:
    """What was compared: pairs of tensors, those that differ, steps, and the share of all records."""

    tensors: int
    differ: int
    steps: int
    share: float


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """The result of a comparison in brief; the fields of the first fault are `None` if the runs match.

    Attributes:
        schema_version: version of this form.
        outcome: ``match``, ``differ`` or ``cannot tell``.
        step, stage, reference, candidate, slot, where, times_limit, size, cause, fix, places: of the first fault
            (`BriefFault`).
        follows: what follows from the first fault, in words; empty if nothing does.
        faults: further faults that do not follow from the first one, 4 at most.
        closest: of runs that match, the tensor that is closest to its limit, in words; `None` if there is none.
        moved: of runs that match, how far the reference's weights and loss moved, in words; `None` if not known.
        notes: of runs that match or cannot be judged, what was not compared, and other remarks; of all runs, measured
            floors, the comparison with float64, and files of the shown lines that have
            changed since the run.
        environment: differences around the two trainings (threads, versions), the most informative first.
        next: commands that tell more.
        runs: names of the reference and the candidate.
        compared: what was compared.
        artifacts: paths of files that hold the whole report.
    """

    schema_version: int
    outcome: Literal["match", "differ", "cannot tell"]
    step: int | None
    stage: str | None
    reference: str | None
    candidate: str | None
    slot: str | None
    where: str | None
    times_limit: float | None
    size: str | None
    cause: BriefCause | None
    fix: BriefFix | None
    places: CodeLines
    follows: str
    faults: list[BriefFault]
    closest: str | None
    moved: str | None
    notes: list[str]
    environment: list[str]
    next: list[str]
    runs: list[str]
    compared: BriefCompared
    artifacts: list[str]

    @property
    def all_faults(self) -> list[BriefFault]:
        """Return the first fault and the further ones; empty if the runs match."""
        if self.step is None:
            return []
        own = {each.name: getattr(self, each.name) for each in fields(BriefFault)}
        return [BriefFault(**own), *self.faults]


def diagnostic_of(report: ReportData, runs: Both[str] | None = None, artifacts: tuple[str, ...] = ()) -> Diagnostic:
    """Return a report in brief.

    Args:
        report: the report.
        runs: paths of both run folders, for the commands; `None` if the runs are in no folder.
        artifacts: paths of files that hold the whole report.
    """
    coverage = report.coverage
    first = None if report.first_diff is None else brief_fault(report.first_diff, report.models, runs)
    nothing = dict.fromkeys((each.name for each in fields(BriefFault)), None) | {"places": CodeLines(None, None)}
    notes = (
        [f"{note}." for note in match_notes(report)]
        if report.outcome == MATCH
        else [verdict(report)] * (report.outcome == CANNOT_TELL)
    )
    notes = [f"{line}." for line in (*report.tokens, *report.regions)] + notes
    notes = [f"{note}." for note in choice_notes(report.choices)] + notes
    notes += [f"{line}." for line in (*floor_lines(report), *third_lines(report))]
    faults = [brief_fault(each, report.models, runs) for each in report.independent[:_FAULTS]]
    notes += _changed_files([first, *faults] if first is not None else [], report.models)
    return Diagnostic(
        schema_version=DIAGNOSTIC_VERSION,
        outcome=report.outcome,  # type: ignore[arg-type]
        **(nothing if first is None else {each.name: getattr(first, each.name) for each in fields(BriefFault)}),  # type: ignore[arg-type]
        follows=_follows(report),
        faults=faults,
        closest=_closest(report) if first is None else None,
        moved=None if report.moved is None else report.moved.sentence,
        notes=[printable(note) for note in notes],
        environment=[printable(each) for each in report.environment],
        next=[]
        if runs is None or first is None
        else [*_commands(runs), *_fixing([first, *faults], report.models, runs)],
        runs=[printable(report.reference), printable(report.candidate)],
        compared=BriefCompared(coverage.compared, len(report.failed), len(coverage.steps), round(coverage.share, 4)),
        artifacts=[printable(path) for path in artifacts],
    )


def diagnostic_json(diagnostic: Diagnostic) -> str:
    """Return a diagnostic as JSON of at most 4,096 bytes.

    If there is no room, notes, the last faults and artifacts are left out, and then texts are cut shorter.
    """
    few = replace(diagnostic, notes=diagnostic.notes[:2], environment=diagnostic.environment[:2])
    fewer = replace(few, notes=[], environment=[], faults=diagnostic.faults[:1])
    text = ""
    for longest in _LONGEST:
        for smaller in (diagnostic, few, fewer, replace(fewer, faults=[], artifacts=[])):
            text = json.dumps(_cut(asdict(smaller), longest), ensure_ascii=True)
            if len(text) <= LARGEST:
                return text
    return text


def _cut(value: Any, longest: int) -> Any:
    """Return a value of JSON with its texts cut to a number of characters."""
    if isinstance(value, str):
        return value if len(value) <= longest else f"{value[: longest - 3]}..."
    if isinstance(value, dict):
        return {key: _cut(each, longest) for key, each in value.items()}
    return [_cut(each, longest) for each in value] if isinstance(value, list) else value


def diagnostic_schema() -> dict[str, Any]:
    """Return the JSON Schema of a diagnostic, made from its types."""
    definitions: dict[str, Any] = {}
    schema = _schema(Diagnostic, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "padiff diagnostic", **schema,
            "$defs": definitions}  # fmt: skip


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    plain: Mapping[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
    if kind in plain:
        return {"type": plain[kind]}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is UnionType:
        return {"anyOf": [_schema(each, definitions) for each in get_args(kind)]}
    if get_origin(kind) is list:
        return {"type": "array", "items": _schema(get_args(kind)[0], definitions)}
    if kind is not Diagnostic and kind.__name__ in definitions:
        return {"$ref": f"#/$defs/{kind.__name__}"}
    hints = get_type_hints(kind)
    properties = {each.name: _schema(hints[each.name], definitions) for each in fields(kind)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    if kind is Diagnostic:
        return schema
    definitions[kind.__name__] = schema
    return {"$ref": f"#/$defs/{kind.__name__}"}


def code_lines(first: FirstDiff, models: Models | None) -> Both[Frame | None]:
    """Return the line of either side's code that a fault points at; `None` if not known.

    A setting or a weight is shown where the layer or the optimizer is constructed, everything else where it is called.
    """
    if models is None:
        return UNKNOWN_LINES if first.cause is None else first.cause.lines
    return _choices(first, models) or _called_lines(first, models)


def _called_lines(first: FirstDiff, models: Models) -> Both[Frame | None]:
    """Return the lines of `code_lines` for a layer that no table chooses."""
    shown = _lines_of(first, models)
    about = UNKNOWN_LINES if first.cause is None else first.cause.lines
    ends = models.lines.map(lambda lines: _of_role(lines, "@return:"))
    if about.candidate is None and ends.candidate and any(is_same(each, about.reference) for each in ends.reference):
        # The candidate makes no such call where a layer of its own gives its outputs.
        code = "" if about.reference is None else about.reference.code
        shown = replace(shown, candidate=max(ends.candidate, key=lambda each: _likeness(each.code, code)))
    if first.stage == "forward" and first.cause is not None and first.cause.kind == "loss_term_missing":
        shown = replace(shown, candidate=_returned(first, models) or shown.candidate)  # the model gives its loss
    if not is_same(*shown):
        return shown
    changed = _changed_argument(models, shown)
    if changed is not None:
        return changed[1]  # a value that the line reads
    named = [] if first.cause is None else re.findall(r"`([\w.]+)`", first.cause.sentence)
    for name in named if not _is_ported(models) else ():
        construction = models.lines.map(lambda lines: lines.get(name))  # noqa: B023
        if all(construction) and not is_same(*construction):
            return construction  # the layer that the cause names is made otherwise
    # A call that both sides have alike is given another value where the layer, or one around it, is made.
    paths, words = Both(first.reference, first.candidate), _words(first.cause)
    while all(paths):
        construction = models.lines.zip(paths).map(lambda side: side[0].get(side[1] or ""))
        if construction.reference is not None and construction.candidate is not None:
            candidate, reference = construction.candidate.code, construction.reference.code
            if _named_spans(candidate, reference, words) or _named_spans(reference, candidate, words):
                return construction
            is_setting = first.cause is not None and first.cause.kind == "layer_setting"
            if is_setting and candidate != reference and not _is_ported(models):
                return construction  # gives the setting under another name
        paths = paths.map(lambda path: str(path).rpartition(".")[0] or (ROOT if path != ROOT else ""))
    at_start = (
        first.stage == "weight"
        and not first.step
        and not any(UNKNOWN_LINES if first.cause is None else first.cause.lines)
    )
    return _started(first, models) if at_start else shown


def _likeness(code: str, other: str) -> float:
    """Return the share of tokens that two lines have in common."""
    return difflib.SequenceMatcher(a=_TOKEN.findall(code), b=_TOKEN.findall(other), autojunk=False).ratio()


def _choices(first: FirstDiff, models: Models) -> Both[Frame | None] | None:
    """Return the lines that choose the class of a layer from a table by different keys; `None` if they are not known,
    or both layers are of one kind.
    """
    paths = Both(first.reference, first.candidate)
    kinds = models.layers.zip(paths).map(lambda side: {each.kind for each in side[0] if each.path == side[1]})
    sites = models.lines.zip(paths).map(lambda side: _of_role(side[0], f"@choice:{side[1]}#"))
    is_setting = first.cause is not None and first.cause.kind.startswith(_OF_LAYER)
    if is_setting or kinds.reference == kinds.candidate or len(sites.candidate) != 1 or not sites.reference:
        return None
    (candidate,) = sites.candidate
    nearest = max(sites.reference, key=lambda each: _likeness(each.code, candidate.code))
    return None if nearest.function == candidate.function else Both(nearest, candidate)


def _of_role(lines: Mapping[str, Frame], start: str) -> list[Frame]:
    """Return the lines whose keys have a start, such as ``@init:`` for those that make or write weights."""
    return [frame for key, frame in lines.items() if key.startswith(start)]


def _assigned(first: FirstDiff, models: Models) -> Both[Frame | None]:
    """Return the only line of each side that assigns the parameter of a fault to an attribute; `None` if not known."""
    making = re.compile(rf"self\.{re.escape(first.slot)}\s*[:=]")
    weights = models.lines.map(lambda lines: [each for each in _of_role(lines, "@init:") if making.match(each.code)])
    return weights.map(lambda frames: frames[0] if len(frames) == 1 else None)


def _started(first: FirstDiff, models: Models) -> Both[Frame | None]:
    """Return the lines that make the weight, or that initialize weights, if one of them differs; else the first lines
    of what makes the model.
    """
    inits = models.lines.map(lambda lines: _of_role(lines, "@init:"))
    weights = _assigned(first, models)
    if all(weights):
        return weights
    changed = _changed_line(models, "@init:")
    if changed is not None and all(changed):
        return changed
    arguments = [each for pair in map(Both, *inits) if (each := _changed_argument(models, pair)) is not None]
    if len({each for _, each in arguments}) == 1:
        return arguments[0][1]
    tops = Both(first.reference, first.candidate).map(lambda path: str(path).partition(".")[0])
    models_lines = models.lines.zip(tops).map(lambda side: side[0].get(ROOT) or side[0].get(side[1]))
    return models_lines.map(lambda frame: frame and frame._replace(code=frame.code.partition("\n")[0]))


def _lines_of(first: FirstDiff, models: Models) -> Both[Frame | None]:
    """Return the lines of `code_lines`, which both sides may have alike."""
    about = UNKNOWN_LINES if first.cause is None else first.cause.lines

    def written(frames: Both[Frame | None]) -> Both[Frame | None]:
        if frames.reference is not None and "partial(" in frames.reference.code:
            # The reference sets it where the class is chosen.
            frames = replace(frames, candidate=_class_line(models.lines.candidate, frames.candidate))
        defined = models.lines.zip(frames).map(lambda side: _defined(side[0], side[1], first))
        if not is_same(*defined):
            # A definition that the reference's calls read as well is right: the candidate's call reads the wrong one.
            read = [frame for key, frame in models.lines.reference.items() if "#" in key]
            return frames if defined.candidate in read else defined
        # Of a value that both define alike, another one is used, or it is computed of another one.
        changed = None if defined == frames else _changed_argument(models, defined)
        # One argument that both write alike may mean another thing in the other framework.
        texts = frames.map(lambda frame: frame and _named_value(frame.code, _words(first.cause)))
        is_read_alike = _is_ported(models) and (
            is_same(*frames) or (bool(texts.candidate) and texts.reference == texts.candidate)
        )
        return changed[1] if changed is not None else defined if is_read_alike else frames

    kind = "" if first.cause is None else first.cause.kind
    role = _role(first, kind)
    if kind.startswith("learning_rate") and first.cause is not None:
        numbers = models.lines.map(lambda lines: [_numbers(frame) for frame in _of_role(lines, "@schedule:")])
        is_shifted = _SHIFT in first.cause.sentence and numbers.reference == numbers.candidate
        if is_shifted or _PACE.search(first.cause.sentence):
            role = ("@scheduled", *role)  # the schedule is right, and goes on at other steps
    in_role = line_of_role(role, first, models)
    clears = "@zero_grad" in role and any(key.startswith("@zero_grad") for key in models.lines.candidate)
    cleared = _changed_line(models, role[0]) if clears else None
    in_role = cleared or in_role  # one optimizer of several is left out
    if kind == "mode":
        paths = Both(first.reference, first.candidate)
        tops = models.layers.map(lambda layers: {each.path for each in layers if each.path and "." not in each.path})
        in_role = Both(*map(_of_its_model, in_role, paths, tops, models.lines))
    frames = models.stacks.zip(models.lines).map(lambda side: [*chain(*side[0].values()), *side[1].values()])
    called = first.code.zip(first.stacks.zip(frames)).map(lambda side: side[0] or _innermost(side[1]))
    if (first.stage == "input" or kind == "labels") and kind not in _NOT_OF_DATA:
        # A call between two models is shown where it is made, not where the batch comes from.
        between = first.diff is not None and first.diff.pair.derived and any(about) and not is_same(*about)
        given = None if between else _changed_line(models, "@data:") or _data_lines(first, models)
        if given is not None:
            return given
        if first.stage == "input" and any(about):
            return _attributes(models.lines, about.zip(called).map(lambda side: side[0] or side[1]), first)
        if first.stage == "input":
            in_role = in_role.zip(models.lines).map(lambda side: side[0] or side[1].get("@batch"))
    # Weights of a loss are set where the loss is made.
    is_weight = first.slot.endswith((".input.weight", ".input.pos_weight"))
    if kind == "loss_function" and first.cause is not None:
        keys = tuple(map(loss_key, re.findall(r"\b[a-z\d_]+_loss\b", first.cause.sentence)))
        made = line_of_role(keys, first, models)
        if all(made):
            return written(made)
    if first.stage == "loss" and not is_weight and (about.candidate is not None or ".input." in first.slot):
        # The call that differs or takes the tensor says more than the sum of all terms.
        shown = about.zip(called.zip(in_role)).map(lambda side: side[0] or side[1][0] or side[1][1])
        return _attributes(models.lines, shown, first)
    if kind == "frozen" and all(assigned := _assigned(first, models)):
        return assigned
    if any(in_role):
        # A schedule is at fault by its own arguments, not by the rate that it starts from.
        return written(in_role) if role[:1] != ("@scheduler",) else _schedule(models, in_role)
    made = Both(first.reference, first.candidate).zip(models.lines).map(lambda side: side[1].get(side[0] or LOOP))
    if first.cause is not None and "_attr=paddle.ParamAttr(" in first.cause.fix:
        return replace(written(made), reference=_optimizers(first, models).reference)  # set in the layer
    start = first.stage == "weight" and not first.step and not kind.startswith(_OF_LAYER)
    if kind == "other_table":
        key = buffer_key(first.slot)
        computed = _changed_line(models, f"{key}:")
        return computed or written(made.zip(models.lines).map(lambda side: side[1].get(key, side[0])))
    if kind == "start_weights" or (start and not any(about) and first.diff is not None and first.diff.pair.complete):
        return _started(first, models)
    same_call = (about.candidate or called.candidate) == called.candidate
    if first.inside and same_call and _is_leaf(first.reference, models) and _returned(first, models) is None:
        # Of a layer of the framework's, the call says nothing that the construction does not.
        about = written(made).zip(about).map(lambda side: side[0] or side[1])
    chained = _chained(first, models) if first.stage == "forward" else UNKNOWN_LINES
    if all(chained):
        return written(chained)
    about = chained.zip(about).map(lambda side: side[0] or side[1])
    if any(about):
        read = _attributes(models.lines, called, first)
        if read != called and read.candidate is not None and _is_computed(read.candidate.code):
            return read  # the first call that differs reads a value that is computed otherwise
        about = about.zip(called).map(lambda side: side[0] or side[1])
        return _attributes(models.lines, about, first)
    if kind.startswith(_OF_OPTIMIZER) or (first.stage == "update" and kind != "unknown"):
        calls = _optimizers(first, models)
        shown = written(calls)
        is_spared = first.cause is not None and _SPARED.search(first.cause.sentence) is not None
        if is_spared or (is_same(*shown) and is_same(*calls)):
            chosen = _changed_line(models, "@optimizer.")
            if chosen is not None and all(chosen):
                return chosen  # the code that makes the groups, or chooses their parameters
        if is_spared:
            shown = replace(shown, candidate=calls.candidate)  # the value is right, for fewer parameters
        schedules = line_of_role(("@scheduler",), first, models)
        if kind == "learning_rate" and all(schedules) and (is_same(*shown) or not _starts_otherwise(shown)):
            return _schedule(models, schedules)  # both start from one rate
        return shown
    if (kind.startswith(_OF_LAYER) or first.stage == "weight") and any(made):
        return written(made)
    called = called.zip(made).map(lambda side: side[0] or side[1])
    return _attributes(models.lines, called, first)


def _chained(first: FirstDiff, models: Models) -> Both[Frame | None]:
    """Return the lines of the layers of a `Sequential` at which a difference arises: they follow each other in the
    order in which they are made. `None` for a side where the layer, and the last one that agrees, are in none.
    """
    partners = [each for each in models.partners if each.reference == first.last_agreeing]
    agreeing = Both(first.last_agreeing, partners[0].candidate if partners else "")

    def line(path: str, before: str, layers: Sequence[Layer], lines: Mapping[str, Frame]) -> Frame | None:
        above, kinds = path.rpartition(".")[0], {layer.path: layer.kind for layer in layers}
        if above != before.rpartition(".")[0] or "sequential" not in kinds.get(above, ""):
            return None
        chain = [each for each in kinds if each.rpartition(".")[0] == above]
        between = chain[chain.index(before) + 1 : chain.index(path)] if {before, path} <= {*chain} else []
        return lines.get(between[0] if len(between) == 1 and first.slot.startswith("input") else path)

    paths = Both(first.reference or "", first.candidate or "")
    return Both(*(line(*side) for side in zip(paths, agreeing, models.layers, models.lines)))


def _named_value(code: str, words: str) -> str:
    """Return the text of the first keyword argument in a line that words name; empty if there is none."""
    named = (code[slice(*at)].partition("=")[2] for name, at in _arguments(code) if named_at(words, name) is not None)
    return next(named, "")


def _starts_otherwise(shown: Both[Frame | None]) -> bool:
    """Return True if the line of the candidate's optimizer has numbers that the reference's has not."""
    numbers = shown.map(_numbers)
    return not numbers.candidate <= numbers.reference


def _schedule(models: Models, calls: Both[Frame | None]) -> Both[Frame | None]:
    """Return the lines of the argument, or in the functions, of a schedule that differ; else the lines of its calls."""
    argument = _changed_argument(models, calls)
    return argument[1] if argument is not None else _changed_line(models, "@schedule:") or calls


def _attributes(lines: Both[Mapping[str, Frame]], called: Both[Frame | None], first: FirstDiff) -> Both[Frame | None]:
    """Return the lines of the number that a cause names, if a call reads it from an attribute, a config or a parameter;
    else the lines of the calls.
    """
    own = called.candidate
    if own is None or first.cause is None or first.stage == "weight":
        return called
    if first.cause.sentence.startswith("other code"):
        return called  # of the numbers in code that differs, none is said to be the fault
    keys = dict.fromkeys(f"self.{name}" for name in _READ.findall(own.code))
    changed = [key for key in keys if key in lines.candidate]
    changed = [key for key in changed if not is_same(lines.reference.get(key), lines.candidate[key])]
    values = {key: [side[key].code for side in lines if key in side] for key in changed}
    attributes = [key for key in changed if any(_shares_number(code, first.cause.sentence) for code in values[key])]
    # A value that both sides compute, each in another way, names no number.
    attributes = attributes or [
        key for key in changed if key in lines.reference and _is_computed(lines.candidate[key].code)
    ]
    if not attributes and not _numbers(own) and _AGAINST[1].search(first.cause.sentence):
        # The number that differs is not written in the call: it is what the only attribute holds that is computed.
        attributes = [key for key in changed if _is_computed(lines.candidate[key].code)]
    if len(attributes) != 1:
        return called
    return called.zip(lines).map(lambda side: side[1].get(attributes[0], side[0]))


def _is_computed(code: str) -> bool:
    """Return True if a line assigns the result of an operator to an attribute."""
    return re.match(r"self\.\w+\s*=.*[-+*/]", code) is not None


def _changed_line(models: Models, role: str) -> Both[Frame | None] | None:
    """Return the lines that differ in a piece of code, e.g. of the data; `None` unless there is one such line.

    Of two frameworks, lines differ by what functions and variables are called: then a line with other numbers counts.

    Args:
        models: both runs' lines.
        role: start of the lines' keys.
    """
    sides = models.lines.map(lambda lines: _of_role(lines, role))
    by_numbers = _is_ported(models) and role != "@zero_grad"
    if by_numbers:
        sides = sides.map(lambda frames: [frame for frame in frames if _numbers(frame)])
        codes = sides.map(lambda frames: [str(sorted(_numbers(frame))) for frame in frames])
        if len({*codes.map(tuple)}) == 1:  # the same numbers, in another order
            codes = sides.map(lambda frames: [str(_NUMBER.findall(frame.code)) for frame in frames])
    else:
        codes = sides.map(lambda frames: [_plain_code(frame.code) for frame in frames])
    changed: list[Both[Frame | None]] = []
    matcher = difflib.SequenceMatcher(a=codes.reference, b=codes.candidate, autojunk=False)
    for kind, first, last, start, end in matcher.get_opcodes():
        if kind != "equal" and (kind == "replace" or not by_numbers):
            old, new = sides.reference[first:last], sides.candidate[start:end]
            if len(old) == len(new):
                changed += map(Both, old, new)
            elif len(old) + len(new) == 1:
                changed.append(Both(*(next(iter(frames), None) for frames in (old, new))))
            else:
                return None
    return changed[0] if len(changed) == 1 else None


def _data_lines(first: FirstDiff, models: Models) -> Both[Frame | None] | None:
    """Return the lines that do with the data what a cause says; `None` unless the candidate has one such line."""
    sides = models.lines.map(lambda lines: _of_role(lines, "@data:"))
    codes = {frame.code for frame in sides.reference}
    sentence = "" if first.cause is None else first.cause.sentence
    for code in (code for words, code in _OF_DATA if words.search(sentence)):
        reference, candidate = sides.map(lambda frames: [each for each in frames if code.search(each.code)])  # noqa: B023
        candidate = [each for each in candidate if each.code not in codes]
        if len(candidate) == 1:
            batch = models.lines.reference.get("@batch")
            return Both(reference[0] if len(reference) == 1 else batch, candidate[0])
    return None


def _changed_argument(models: Models, calls: Both[Frame | None]) -> tuple[str, Both[Frame | None]] | None:
    """Return the name and the lines of the argument of a schedule that differs between two calls; `None` unless there
    is one.
    """
    heads = calls.map(lambda call: "" if call is None else f"{call.file}:{call.line}#")
    values = models.lines.zip(heads).map(
        lambda side: {
            key[len(side[1]) :]: frame for key, frame in side[0].items() if side[1] and key.startswith(side[1])
        }
    )
    names = [name for name in values.candidate if name in values.reference]
    pairs = {name: values.map(lambda side: side[name]) for name in names}  # noqa: B023
    changed = {
        name: pair
        for name, pair in pairs.items()
        if (len({*pair.map(_numbers)}) > 1 if _is_ported(models) else not is_same(*pair))
    }
    changed = {name: pair for name, pair in changed.items() if _OF_SCHEDULE.search(name)} or changed
    return next(iter(changed.items())) if len(changed) == 1 else None  # type: ignore[return-value]


def _changed_keyword(frames: Both[Frame | None]) -> str:
    """Return the name of the only keyword argument of a schedule that has another value in the candidate's line."""
    values = frames.map(
        lambda frame: (
            {}
            if frame is None
            # At the start of the line stands the variable that has the schedule.
            else {name: frame.code[slice(*at)] for name, at in _arguments(frame.code) if at[0]}
        )
    )
    names = [
        name
        for name, text in values.candidate.items()
        if _OF_SCHEDULE.search(name) and not _is_one_value(text, values.reference.get(name, text))
    ]
    return names[0] if len(names) == 1 else ""


def _is_one_value(text: str, other: str) -> bool:
    """Return True if two texts are equal, but for the way in which their numbers are written."""
    sides = [[*map(float, _NUMBER.findall(each))] for each in (text, other)]
    return sides[0] == sides[1] and _NUMBER.sub("0", text) == _NUMBER.sub("0", other)


def _is_ported(models: Models) -> bool:
    """Return True if the runs are of two frameworks."""
    return len({name.partition(" ")[0] for name in models.frameworks}) > 1


def _numbers(frame: Frame | None) -> frozenset[float]:
    """Return the numbers in a line of code."""
    return frozenset(map(float, _NUMBER.findall("" if frame is None else frame.code)))


def _plain_code(code: str) -> str:
    """Return a line of code without what a framework calls its own."""
    return re.sub(r"\b(?:torch|paddle)\.", "", code).replace("clear_grad", "zero_grad")


def is_same(reference: Frame | None, candidate: Frame | None) -> bool:
    """Return True if two lines have one text."""
    return None not in (reference, candidate) and reference.code == candidate.code  # type: ignore[union-attr]


def _returned(first: FirstDiff, models: Models) -> Frame | None:
    """Return the line of what the candidate's layer returns; `None` for a layer of the framework's."""
    kinds = {layer.type for layer in models.layers.candidate if layer.path == first.candidate}
    return next((models.lines.candidate.get(f"@return:{kind}") for kind in kinds), None)


def _is_leaf(path: str | None, models: Models) -> bool:
    """Return True if a layer of the reference holds no other layers."""
    return path is not None and not any(is_below(layer.path, path) for layer in models.layers.reference)


def _role(first: FirstDiff, kind: str) -> tuple[str, ...]:
    """Return the keys of the line of the call that a fault is about, the best one first; empty for layers.

    Args:
        first: the fault.
        kind: the kind of its cause.
    """
    if kind.startswith("clip"):
        # What is not there belongs before the step, unless the optimizer clips.
        before = ("@step",) if first.cause is not None and "clip_grad_" in first.cause.fix else ()
        return "@clip", *before, "optimizer.0"
    if kind in _OF_STEP:
        return _OF_STEP[kind]
    if kind == "in_place" and first.cause is not None and first.cause.values is not None:
        return (first.cause.values.candidate,)  # the path of the layer
    if kind == "learning_rate" and (first.step if first.extent is None else first.extent.agreed is not None):
        return "@scheduler", "optimizer.0"
    if kind in _OF_LOADER:
        return ("@loader",)
    if kind in ("mode", "not_called"):
        return "@train", "@eval"
    if first.stage == "loss":
        function = first.slot.partition("()")[0]
        if first.slot == "loss":
            return "@total", "@backward"
        is_weight = first.slot.endswith((".input.weight", ".input.pos_weight"))
        return ("@total", loss_key(function)) if ".input." in first.slot and not is_weight else (loss_key(function),)
    return ()


def _of_its_model(
    frame: Frame | None, path: str | None, models: Collection[str], lines: Mapping[str, Frame]
) -> Frame | None:
    """Return the line that sets a layer's mode; if that is of another one of several models, where its own is made."""
    receiver, model = _MODE.search(frame.code) if frame is not None else None, (path or "").partition(".")[0]
    return lines.get(model) if receiver is not None and receiver[1] in {*models} - {model} else frame


def _defined(lines: Mapping[str, Frame], made: Frame | None, first: FirstDiff) -> Frame | None:
    """Return the line that defines the argument that a cause names, e.g. in a config; else the line itself."""
    if made is None or first.cause is None:
        return made
    if first.cause.kind in _WHOLE:
        return lines.get(f"{made.file}:{made.line}#@call#0", made)
    words, head = _words(first.cause), f"{made.file}:{made.line}#"
    found = [
        (named_at(words, key[len(head) :].partition("#")[0]), not _shares_number(frame.code, words), k)
        for k, (key, frame) in enumerate(lines.items())
        if key.startswith(head)
    ]
    named = min(((at, *rest) for at, *rest in found if at is not None), default=None)
    frame = made if named is None else list(lines.values())[named[-1]]
    if _numbers(frame) or named is None:
        return frame
    # The value is made of another one, which the line reads.
    read = {each for key, each in lines.items() if key.startswith(f"{frame.file}:{frame.line}#")}
    read = {each for each in read if _shares_number(each.code, words)}
    return read.pop() if len(read) == 1 else frame


def _class_line(lines: Mapping[str, Frame], made: Frame | None) -> Frame | None:
    """Return the line where the class stands that a line calls by a variable; else the line itself."""
    head = "" if made is None else f"{made.file}:{made.line}#"
    names = {key: key[len(head) :].partition("#")[0] for key in lines if head and key.startswith(head)}
    classes = {lines[key] for key, name in names.items() if name[:1].isupper() and made and name not in made.code}
    return classes.pop() if len(classes) == 1 else made


def _words(cause: Cause | None) -> str:
    """Return the words of a cause that name what it is about: its kind, its sentence, and the arguments of its fix."""
    if cause is None:
        return ""
    return " ".join([cause.kind, cause.sentence, *re.findall(r"\b(\w+)=(?!=)", cause.fix)])


def _shares_number(code: str, words: str) -> bool:
    """Return True if a line of code has a number that a cause names."""
    # Extents of a shape are no settings.
    words = _SHAPE.sub("", words)
    numbers = [{float(each) for each in _NUMBER.findall(text)} for text in (code, words)]
    return bool(numbers[0] & numbers[1])


def _optimizers(first: FirstDiff, models: Models) -> Both[Frame | None]:
    """Return the line of either side's parameter group or optimizer that a fault is about."""
    return models.lines.zip(_groups(first, models)).map(lambda side: _optimizer(*side, first))


def _groups(first: FirstDiff, models: Models) -> Both[set[str]]:
    """Return the keys of the parameter groups that a fault is about, such as ``optimizer.0.group.1``."""
    own = Both(first.reference, first.candidate).map(lambda path: (f"{path}/{first.slot}",))
    sites = first.parameters if any(first.parameters) else own
    return models.optimized.zip(sites).map(lambda side: {side[0][site] for site in side[1] if site in side[0]})


def line_of_role(role: Sequence[str], first: FirstDiff, models: Models) -> Both[Frame | None]:
    """Return the line of the first of some roles that a side has, of the optimizer that a fault is about.

    Where one side has such a line for each optimizer, the only line of the other side is of one of them.
    """
    keys = _groups(first, models).map(lambda groups: {group.partition(".group.")[0] for group in groups})
    only = keys.map(lambda side: side.pop() if len(side) == 1 else "")
    names = [each for each in role if any(f"{each}:{key}" in lines for lines, key in zip(models.lines, only))]

    def line(lines: Mapping[str, Frame], key: str) -> Frame | None:
        spellings = (
            (key, each) if each == "optimizer.0" else (f"{each}:{key}", *([] if each in names else [each]))
            for each in role
        )
        return next((lines[name] for each in spellings for name in each if name in lines), None)

    return models.lines.zip(only).map(lambda side: line(*side))


def _optimizer(lines: Mapping[str, Frame], groups: set[str], first: FirstDiff) -> Frame | None:
    """Return the line of the entry of a parameter group that a cause names, else of the optimizer's construction.

    Args:
        lines: the run's lines.
        groups: the keys of the groups.
        first: the fault.
    """
    words = _words(first.cause)
    if len(groups) == 1:
        (group,) = groups
        for key, frame in lines.items():
            if key.startswith(f"{group}.") and named_at(words, key[len(group) + 1 :]) is not None:
                return frame
    keys = {group.partition(".group.")[0] for group in groups}
    calls = [frame for key, frame in lines.items() if (key in keys if keys else _OPTIMIZER.fullmatch(key))]
    if len(calls) > 1:
        calls = [_defined(lines, each, first) or each for each in calls]  # of one helper
    return calls[0] if len({*calls}) == 1 else None


def _innermost(side: tuple[tuple[str, ...], Sequence[Frame]]) -> Frame | None:
    """Return the innermost line of a stack, with its text if one of some frames has it."""
    stack, frames = side
    if not stack:
        return None
    file, _, line = stack[0].partition(" ")[0].rpartition(":")
    if not line.isdecimal():
        return None
    return next(
        (each for each in frames if (each.file, each.line) == (file, int(line))), Frame(file, int(line), "", "")
    )


def brief_fault(first: FirstDiff, models: Models | None, runs: Both[str] | None = None) -> BriefFault:
    """Return a fault in brief; `runs` are the paths of both run folders, as in `diagnostic_of`."""
    cause = first.cause
    times = math.nan if first.diff is None or first.diff.figures is None else first.diff.excess
    size = "" if first.diff is None else _against_limit(first.diff)
    if size and cause is not None and cause.proven and cause.remaining is not None:
        left = f"{cause.remaining:.2g} times rounding noise" if cause.remaining else "equal to the bit"
        size += f"; with the fix {left}"
    words = _words(cause)
    chosen = None if models is None else _choices(first, models)
    frames = code_lines(first, None) if models is None else chosen or _called_lines(first, models)
    if cause is not None and cause.kind == "learning_rate" and models is not None:
        argument = _changed_argument(models, line_of_role(("@scheduler",), first, models))
        words = (argument[0] if argument is not None else _changed_keyword(frames)) or words
    called = _CALLED.search("" if cause is None else cause.fix)
    call = first.call if called is None else f"{first.call} {called[0]}"
    lines = frames.zip(Both(frames.candidate, frames.reference)).map(lambda side: _code_line(*side, words, call))
    text = first.statement if cause is None else cause.sentence
    fix = _fix(first, lines, models, runs) if chosen is None else _with_choice(chosen, lines, first, models)
    number = None
    if fix is not None and fix.old and fix.new and first.stage == "input":
        number = _changed_number(fix.old, fix.new)
    if number is not None and lines.candidate is not None:
        lines = replace(lines, candidate=replace(lines.candidate, span=number[0]))
    return BriefFault(
        step=first.step,
        stage=first.stage,
        reference=None if first.reference is None else printable(first.reference),
        candidate=None if first.candidate is None else printable(first.candidate),
        slot=printable(first.slot),
        where=printable(f"{_where(first)}, {first.tokens}" if first.tokens else _where(first)),
        times_limit=float(f"{times:.3g}") if math.isfinite(times) else None,
        size=printable(size),
        cause=BriefCause(
            "unknown" if cause is None else cause.kind, printable(text), cause is not None and cause.proven
        )
        if text
        else None,
        fix=fix,
        places=CodeLines(*lines),
    )


def _changed_files(faults: Iterable[BriefFault], models: Models | None) -> list[str]:
    """Return a note for each file that a fault's line is in and that has changed since the run."""
    notes = []
    for fault in faults:
        lines = Both(fault.places.reference, fault.places.candidate)
        for side, line, files in zip(SIDES, lines, NO_FILES if models is None else models.files):
            if line is None:
                continue
            # A file that is the candidate's says nothing of the reference's run, whose line is shown.
            other = "" if models is None or side == "candidate" else models.files.candidate.get(line.file, "")
            if line.file in files and not is_here(line.file, other) and has_changed(line.file, files[line.file]):
                notes.append(f"{line.file} has changed since the {side}'s run, whose line this is.")
    return list(dict.fromkeys(notes))


def _fix(
    first: FirstDiff, lines: Both[CodeLine | None], models: Models | None, runs: Both[str] | None
) -> BriefFix | None:
    """Return the code that fixes a fault: that of its cause, else the reference's line in the candidate's place."""
    cause, old = first.cause, lines.candidate
    if cause is None:
        return None
    if cause.fix and not _is_scheduled(cause, lines, models):
        text = re.sub(r"^optimizer(?=\.)", _optimizer_name(first, models), cause.fix)
        fix = BriefFix(_named_as_made(_filled(text, models, runs), first, models))
        new = "" if old is None else _with_argument(old, cause.fix)
        replaced = "" if old is None or new else _with_number(old, cause)
        if replaced:
            fix, new = BriefFix(replaced), replaced
        called = _CALLED.search(cause.fix)
        is_called = bool(new) and called is not None and old is not None and called[1] in old.code
        if old is not None and not is_called and not replaced and "  # line" not in cause.fix:
            new = _reference_line(cause, lines, models) or new
            fix = BriefFix(new) if new and new != old.code else fix
    else:
        new = "" if old is None else _with_reduction(old, cause) or _with_scaled_number(old, cause, models)
        new = new or _reference_line(cause, lines, models) or ("" if old is None else _with_number(old, cause))
        new = "" if old is not None and new == old.code else new
        if not new:
            is_data = first.stage == "input"
            text = "" if old is None or lines.reference is None else _unchecked(old, lines.reference, models, is_data)
            return BriefFix(f"{text}  # as the reference has it; not checked") if text else None
        fix = BriefFix(new)
    if old is None or new in ("", old.code):
        return fix
    return replace(fix, file=old.file, line=old.line, old=old.code, new=new)


def _optimizer_name(first: FirstDiff, models: Models | None) -> str:
    """Return the variable of the candidate's optimizer that a parameter belongs to, or `optimizer`."""
    keys = {} if models is None else models.optimized.candidate
    key = keys.get(f"{first.candidate}/{first.slot}", "").partition(".group.")[0]
    frame = None if models is None else models.lines.candidate.get(key)
    named = None if frame is None else re.match(r"([\w.]+)\s*=(?!=)", frame.code)
    return "optimizer" if named is None else named[1]


def _with_choice(
    chosen: Both[Frame | None], lines: Both[CodeLine | None], first: FirstDiff, models: Models | None
) -> BriefFix | None:
    """Return the line that chooses a class with the reference's key, if the cause is proven and the candidate's table
    has that key, too.
    """
    old, keys = lines.candidate, chosen.map(lambda frame: "" if frame is None else frame.function)
    known = set() if models is None else {each.function for each in models.lines.candidate.values()}
    if old is None or first.cause is None or not first.cause.proven or keys.reference not in known:
        return None
    new = re.sub(rf"\b{re.escape(keys.candidate)}\b", lambda _: keys.reference, old.code)
    is_single = len(re.findall(rf"\b{re.escape(keys.candidate)}\b", old.code)) == 1
    return BriefFix(new, old.file, old.line, old.code, new) if is_single else None


def _reference_line(cause: Cause, lines: Both[CodeLine | None], models: Models | None) -> str:
    """Return the reference's line if it fixes a known cause in the place of the candidate's; else an empty text.

    Of two frameworks, lines that differ by more than their numbers may call other functions by one name.
    """
    old, reference = lines.candidate, lines.reference
    # That one call is given other arguments, another rate is used, or one side detaches, is read off both runs.
    is_known = cause.proven or cause.kind in ("call_arguments", "learning_rate", "detached")
    if not is_known or old is None or reference is None or models is None:
        return ""
    if cause.kind in _OF_STEP and (".step(" in old.code) != (".step(" in reference.code):
        return ""  # the call is missing, and belongs near that of the candidate's line
    if _is_ported(models) and _NUMBER.search(cause.fix) and not _shares_number(reference.code, cause.fix):
        return ""  # one name has other values in the other framework, such as `momentum`
    if any(
        key.startswith("optimizer.") and each.code == reference.code for key, each in models.lines.candidate.items()
    ):
        return ""  # the candidate has that group, too
    is_same_but_numbers = len({_NUMBER.sub("0", line.code) for line in (old, reference)}) == 1
    spans = [None if line.span is None else line.code[slice(*line.span)] for line in (old, reference)]
    tokens = [sorted(_TOKEN.findall(text)) for text in spans if text is not None]
    if cause.kind == "operands" and cause.proven and len(tokens) == 2 and tokens[0] == tokens[1]:
        return old.code.replace(str(spans[0]), str(spans[1]), 1)
    if cause.kind == "loss_term_weight" and not is_same_but_numbers and not _is_of_weight(old.code, reference.code):
        return ""  # the lines make the term, and do not weigh it
    frames = chain(models.lines.candidate.values(), *models.stacks.candidate.values())
    codes = [frame.code for frame in frames if frame.file == old.file]
    names = {name for code in codes for pattern in (_VARIABLE, _ATTRIBUTE) for name in pattern.findall(code)}
    is_other = _is_ported(models) and not is_same_but_numbers and not _is_without(old.code, reference.code)
    if is_other and not _is_without(reference.code, old.code, _MEANT_BY_BOTH):
        return _with_reference_part(old, reference, models) if cause.proven else ""
    whole = _like_reference(old.code, reference.code, names)
    return whole or (_with_reference_part(old, reference, models) if cause.proven else "")


def _is_of_weight(code: str, other: str) -> bool:
    """Return True if two lines differ by a sign, or by a factor that only one of them has."""
    changes = difflib.SequenceMatcher(None, code, other, autojunk=False).get_opcodes()
    parts = {line.strip() for what, a, b, c, d in changes if what != "equal" for line in (code[a:b], other[c:d])}
    return parts == {"+", "-"} or ("" in parts and max(parts)[:1] in ("*", "/"))


def _with_reference_part(candidate: CodeLine, reference: CodeLine, models: Models) -> str:
    """Return the candidate's line with the reference's marked part in the place of its own; empty if that part names
    anything that neither the candidate's line names nor its layers have as an attribute.
    """
    if candidate.span is None or reference.span is None:
        return ""
    part, (start, end) = reference.code[slice(*reference.span)], candidate.span
    texts = (part, candidate.code[start:end])
    first, keys = ([each.match(text) for text in texts] for each in (_TOKEN, _KEYWORD))
    if None in first or first[0][0] != first[1][0] or len({each and each[0] for each in keys}) > 1:  # type: ignore[index]
        return ""  # another argument or another call
    names = {*_NAMES.findall(part)} - {*_NAMES.findall(candidate.code), "True", "False", "None"}
    words = {*re.findall(r"\w+", candidate.code)}
    names = {name for name in names if not {*name.split(".")} <= words}
    # Texts and other arguments may mean something else in the other framework, or be of another call.
    texts_of_part = {*re.findall(r"""["']\w+["']""", part)} - {*re.findall(r"""["']\w+["']""", candidate.code)}
    if texts_of_part or part.count("(") != part.count(")") or not all(name in models.lines.candidate for name in names):
        return ""
    return f"{candidate.code[:start]}{part}{candidate.code[end:]}"


def _is_without(code: str, shorter: str, but: re.Pattern[str] = _ANYTHING) -> bool:
    """Return True if a line is another one without some operands or arguments, all of which match a pattern."""
    texts = [_TOKEN.findall(line) for line in (code, shorter)]
    matcher = difflib.SequenceMatcher(a=texts[0], b=texts[1], autojunk=False)
    changed = [each for each in matcher.get_opcodes() if each[0] != "equal"]
    parts = ["".join(texts[0][first:last]) for _, first, last, _, _ in changed]
    return bool(changed) and all(each[0] == "delete" for each in changed) and all(map(but.fullmatch, parts))


def _is_scheduled(cause: Cause, lines: Both[CodeLine | None], models: Models | None) -> bool:
    """Return True if a fix sets the rate of a step, or the momentum, which a schedule made of what an optimizer starts
    from.
    """
    if not cause.kind.startswith("learning_rate") or models is None:
        return False
    if not any(key.partition(":")[0] == "@scheduler" for key in models.lines.candidate):
        return False
    return lines.reference is None or not _shares_number(lines.reference.code, cause.fix)


def _with_argument(line: CodeLine, fix: str) -> str:
    """Return a line of code with the argument that a fix such as ``LayerNorm(..., eps=1e-05)`` names, or the argument
    alone if the line is a part of a call; empty if another part of the line is marked.
    """
    call = re.fullmatch(r"[\w.()]+\(\.\.\., (\w+)=([\w.]+\(\[[^]]*\]\)|\[[^]]*\]|[^(),]+)\)(?:  #.*)?", fix)
    if call is None or line.span is None:
        return ""
    start, end = line.span
    own, name = (re.match(r"(?:\w+\.)*(\w+)\(", text) for text in (line.code[start:end], fix))
    # A loss has a class and a function.
    if own and name and own[1] != name[1] and loss_key(own[1]) == loss_key(name[1]) and line.code[end - 1] == ")":
        comma = ", " * (not line.code[: end - 1].endswith("("))
        return f"{line.code[: end - 1]}{comma}{call[1]}={call[2]}{line.code[end - 1 :]}"
    given = re.fullmatch(rf"({call[1]}\s*=\s*)(.*)", line.code[start:end])
    value = call[2]
    if given is not None and "(" in given[2]:  # a tensor is made of the list
        lists = re.findall(r"\[[^\[\]]*\]", given[2])
        value = (
            given[2].replace(lists[0], value[value.find("[") :].rstrip(")")) if len(lists) == 1 and "[" in value else ""
        )
    if given is None or not value:
        return ""
    argument = f"{given[1]}{value}"
    return f"{line.code[:start]}{argument}{line.code[end:]}" if _is_whole(line.code) else argument


def _is_whole(code: str) -> bool:
    """Return True if a line of code is no part of another one, such as arguments of a call."""
    try:
        (statement,) = ast.parse(code.strip()).body
    except (SyntaxError, ValueError):
        return False
    return not (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Tuple) and len(statement.value.elts) > 1
    )


def _with_number(line: CodeLine, cause: Cause) -> str:
    """Return the line that defines a setting, with the reference's number in the place of the candidate's; empty if the
    line has not just one such number, or the fix says more than one.
    """
    values = [each for pattern in _AGAINST for each in pattern.findall(cause.sentence)]
    # A number of a computed cause has six digits, and may be rounded.
    numbers = _NUMBER.findall(cause.fix) if cause.fix or not cause.proven or len(values) != 1 else [values[0][1]]
    numbers = [each for each in numbers if cause.fix or len(each) < _ROUNDED]
    if not cause.fix and "+" in cause.kind:
        return ""  # one number is not all of several causes
    if len(numbers) != 1 or len(values) > 1 or " for n, p in " in cause.fix or "[" in cause.fix:
        return ""
    pairs = [each if " against " in cause.sentence else each[::-1] for each in values]
    marked = _NUMBER.findall(line.code[slice(*line.span)]) if line.span is not None and cause.fix else []
    if len(marked) == 1 and not any(float(each[0]) == float(numbers[0]) for each in pairs):
        # The cause says both in other words, or as the other framework counts.
        is_said = _shares_number(marked[0], cause.sentence) and float(marked[0]) != float(numbers[0])
        pairs = [(numbers[0], marked[0])] if is_said else []
    if not pairs:
        return ""
    reference, candidate = map(float, pairs[0])
    if not cause.fix and candidate in (0.0, 1.0) and cause.kind != "loss_term_weight":
        return ""  # a term or a factor that is left out stands nowhere: a 0 or 1 of the line is another number
    places = [each for each in _NUMBER.finditer(line.code) if float(each[0]) == candidate]
    if cause.kind == "loss_term_weight":  # a product, or the value that a name, an entry or an option has
        around = [(line.code[: each.start()].rstrip()[-1:], line.code[each.end() :].lstrip()[:1]) for each in places]
        places = [each for each, (before, after) in zip(places, around) if before in "*=:" or after == "*"]
    if len(places) != 1 or float(numbers[0]) != reference:
        return ""
    if _POWER.search(line.code[: places[0].start()]) and candidate % 2 == 0 != reference % 2:
        return ""  # an even power drops the sign, an odd one does not
    return f"{line.code[: places[0].start()]}{numbers[0]}{line.code[places[0].end() :]}"


def _with_scaled_number(line: CodeLine, cause: Cause, models: Models | None) -> str:
    """Return the line of the data with the reference's number for the number by which the data are scaled; empty unless
    one number, times or over the factor, stands in the reference's lines of the data.
    """
    if models is None or not cause.proven or not cause.kind.endswith("_scaled") or cause.values is None:
        return ""
    ((factor, _),) = cause.values.candidate if len(cause.values.candidate) == 1 else ((1.0, 0.0),)
    sides = models.lines.map(lambda lines: _of_role(lines, "@data:"))
    numbers = sides.map(lambda frames: {number for frame in frames for number in _numbers(frame)})
    places = {
        (*place.span(), text)
        for place in _NUMBER.finditer(line.code)
        for text in map("{:.6g}".format, numbers.reference - numbers.candidate)
        if any(math.isclose(float(text), float(place[0]) * each, rel_tol=1e-5) for each in (factor, 1 / factor))
    }
    if len(places) != 1:
        return ""
    start, end, text = places.pop()
    return f"{line.code[:start]}{text}{line.code[end:]}"


def _with_reduction(line: CodeLine, cause: Cause) -> str:
    """Return the line with the reference's reduction in the place of the candidate's; empty unless the line calls the
    candidate's once, and nothing else than its result is taken.
    """
    if not cause.proven or not cause.kind.startswith("reduction") or cause.values is None or line.span is None:
        return ""
    (start, end), (reference, candidate) = line.span, cause.values
    if not isinstance(reference, str):
        return ""  # an index on one side
    mentions = re.finditer(rf"\ba?{candidate}(?=\()|(?<=[\"']){candidate}(?=[\"'])", line.code)
    calls = [each for each in mentions if start <= each.start() < end]
    # Along an axis, torch's maximum is a tuple, and the largest value alone has a name of its own.
    is_pair = re.match(r"\[|\.(?:values|indices)", line.code[end:]) or "," in line.code[end : end + 1]
    if len(calls) != 1 or is_pair:
        return ""
    name = reference if reference in ("mean", "sum") else f"a{reference}"
    return f"{line.code[: calls[0].start()]}{name}{line.code[calls[0].end() :]}"


def _named_as_made(fix: str, first: FirstDiff, models: Models | None) -> str:
    """Return a fix that calls a class by the name that the candidate's construction calls it."""
    call = re.match(r"(?:torch\.nn|paddle\.nn|torch\.optim|paddle\.optimizer)\.(\w+)\(", fix)
    if call is None or models is None:
        return fix
    lines = models.lines.candidate
    is_layer = ".nn." in call[0]
    keys = [first.candidate or ROOT] if is_layer else [key for key in lines if _OPTIMIZER.fullmatch(key)]
    codes = {lines[key].code for key in keys if key in lines}
    code = codes.pop() if len(codes) == 1 else ""
    names = {each[0] for each in re.finditer(rf"(?:\b\w+\.)*\b{call[1]}(?=\()", code)}
    if not names and _OF_ONE_RULE.match(fix, call.end()):
        # An optimizer's class by another name: the call is all that is assigned.
        full_name = re.match(r"[\w.]+\s*=\s*((?:\w+\.)*[A-Z]\w*)\(", code)
        names = {full_name[1]} if full_name is not None else names
    return f"{names.pop()}{fix[call.end() - 1 :]}" if len(names) == 1 else fix


def _unchecked(candidate: CodeLine, reference: CodeLine, models: Models | None, is_data: bool = False) -> str:
    """Return the reference's line if one part of the candidate's is not the same, so that nothing else can be meant; of
    two frameworks, one number, and of lines that make the data, the candidate's line with that number.
    """
    place = _changed_number(candidate.code, reference.code)
    if is_data and place is not None:
        return f"{candidate.code[: place[0][0]]}{place[1]}{candidate.code[place[0][1] :]}"
    texts = [_WORD.findall(line.code) for line in (candidate, reference)]
    matcher = difflib.SequenceMatcher(a=texts[0], b=texts[1], autojunk=False)
    is_one = sum(each[0] != "equal" for each in matcher.get_opcodes()) == 1
    codes = {_NUMBER.sub("0", line.code) for line in (candidate, reference)}
    if not (is_one or (is_data and len(codes) == 1)) or (models is not None and _is_ported(models) and len(codes) > 1):
        return ""
    return _like_reference(candidate.code, reference.code)


def _like_reference(candidate: str, reference: str, variables: Collection[str] = ()) -> str:
    """Return the reference's line if it can stand in the place of the candidate's: most of it is the same, and it reads
    no other variables; else an empty text.

    Args:
        candidate, reference: the lines.
        variables: further variables, and attributes of `self`, of the candidate's file.
    """
    names = [{*_VARIABLE.findall(code)} - {"True", "False", "None"} for code in (candidate, reference)]
    # Lines of other layers are other lines.
    own = [{*_ATTRIBUTE.findall(code)} for code in (candidate, reference)]
    more = own[1] - own[0] if own[0] < own[1] and _is_without(reference, candidate) else set()
    names[1] -= {each for each in names[1] if each in sys.stdlib_module_names and f"{each}." in reference}
    balance = [sum(code.count(each) for each in "([{") - sum(code.count(each) for each in ")]}") for code in
               (candidate, reference)]  # fmt: skip
    if (
        candidate == reference
        or balance[0] != balance[1]
        or own[0] != own[1] - (more & {*variables})
        or not names[1] <= {*names[0], *variables}
    ):
        return ""
    alike = _likeness(candidate, reference) >= _LIKE
    return reference if alike or _is_without(reference, candidate) else ""


def _filled(fix: str, models: Models | None, runs: Both[str] | None) -> str:
    """Return a fix with the path of the reference and the name of the candidate's model where they are known."""
    root = None if models is None else models.lines.candidate.get(ROOT)
    # The parameters of an optimizer are those of what its own call names.
    calls = (
        [] if models is None else [each for key, each in models.lines.candidate.items() if _OPTIMIZER.fullmatch(key)]
    )
    owners = {each for call in calls for each in re.findall(r"([\w.]+)\.(?:named_)?parameters\(", call.code)}
    if len(owners) == 1:
        fix = fix.replace("candidate_model.named_parameters", f"{owners.pop()}.named_parameters")
    name = None if root is None else re.match(r"(\w+)\s*=(?!=)", root.code)
    fix = fix if runs is None else fix.replace("reference_run", repr(runs.reference))
    variables = _variables_of_models(models) if models is not None and name is None else ""
    fix = fix.replace("candidate_model", variables or ("candidate_model" if name is None else name[1]))
    return printable(fix, lines=True)


def _variables_of_models(models: Models) -> str:
    """Return the candidate's models by name, as `padiff.start_from` takes several; empty unless they have the names of
    the variables that hold them.
    """
    names = [layer.path for layer in models.layers.candidate if layer.path != ROOT and "." not in layer.path]
    lines = {name: models.lines.candidate.get(name) for name in names}
    held = [line is not None and re.search(rf"\b{name}\b[^=(]*=(?!=)", line.code) for name, line in lines.items()]
    return "{" + ", ".join(f'"{name}": {name}' for name in names) + "}" if any(held) and ROOT not in lines else ""


def position_text(first: FirstDiff) -> str:
    """Return the position of a fault in the user's language: step, stage, and the code, layer or setting."""
    return translated(f"step {first.step}, {translated(first.stage, 'stage')}: {_where(first)}")


def _where(first: FirstDiff) -> str:
    """Return the position of a fault in words: the code between two layers, a layer, or a setting."""
    names = [path for path in (first.reference, first.candidate) if path and path not in (LOOP, ROOT)]
    layer = " against ".join(dict.fromkeys(names))
    rank = "" if first.rank is None else f"rank {first.rank}, "
    if first.diff is None:
        return f"{rank}{first.slot.replace('_', ' ') or 'settings'}{f' of {layer}' if layer else ''}"
    last, call = first.last_agreeing, first.call
    if last and first.reference is not None and is_below(last, first.reference):
        return f"{rank}{f'{call}, ' if call else ''}in {layer or 'the model'} after {last}"
    if first.inside is False and (last or call):
        end = layer or ("the model" if first.stage == "input" else "the output")
        between = f"between {last} and {end}" if last else f"before {end}"
        return f"{rank}{call.partition(' in `')[0]} {between}".replace("  ", " ") if call else f"{rank}{between}"
    place = _tensor_text(first, names)
    return f"{rank}{call}, {place}" if call and layer not in call else f"{rank}{place}"


def _tensor_text(first: FirstDiff, names: list[str]) -> str:
    """Return a tensor's name with the layer that it belongs to, in words.

    Args:
        first: the fault.
        names: the paths of both layers, without the model and the loop.
    """
    slot = first.slot
    if first.stage in ("weight", "grad", "update"):
        sites = [f"{name}.{slot}" if not k else name for k, name in enumerate(dict.fromkeys(names))]
        return " against ".join(sites) or slot
    if first.stage == "loss" and slot == "loss":
        return "the loss"
    if first.stage == "input" and not names:
        name = slot.removeprefix("input.")
        return "the input" if name == "input" else f"the input {name}"
    slot = "" if slot == "output.0" and names else slot.replace("input.", "input ").replace("output.", "output ")
    return " ".join(filter(None, (" against ".join(dict.fromkeys(names)), slot))) or "the model"


def _against_limit(diff: Diff) -> str:
    """Return the size of an error against its limit, in words."""
    figures, judged = diff.figures, diff.judgement
    if diff.problem is not None:
        return str(diff.problem)
    if figures is None or judged is None:
        return "" if figures is None else f"relative error {figures.rel_l2:.2g}"
    name = {"rel_l2": "relative error", "max_abs": "largest difference"}.get(str(judged.figure), str(judged.figure))
    if not judged.limit:
        return f"{name} {judged.value:.3g}, which has to be 0"
    if diff.passed:
        return f"{judged.value:.2g} of {judged.limit:.2g} allowed"
    return f"{factor_text(judged.excess)} times the limit: {name} {judged.value:.2g}, limit {judged.limit:.2g}"


def _closest(report: ReportData) -> str | None:
    """Return the tensor that is closest to its limit, in words; `None` if nothing was measured."""
    stages = [stage for stage in report.stages.values() if stage.worst is not None]
    closest = max(stages, key=lambda stage: stage.excess, default=None)
    if closest is None or closest.worst is None:
        return None
    worst = closest.worst
    if worst.figures is not None and not worst.figures.l2 and not closest.excess:
        return "all tensors are equal to the bit" if report.worst is None or not report.worst.excess else None
    return printable(f"{worst.pair.anchor.site}, step {worst.pair.step}: {_against_limit(worst)}")


def _follows(report: ReportData) -> str:
    """Return what follows from the first diff: the number of tensors of each stage; empty if nothing does."""
    counts = Counter(diff.pair.stage for diff in report.failed if report.standing(diff) is Standing.FOLLOWS)
    parts = []
    for stage in STAGES:
        if counts[stage]:
            singular, plural = NOUNS.get(stage, ("tensor", "tensors"))
            parts.append(f"{counts[stage]:,} {plural if counts[stage] > 1 else singular}")
    extent = None if report.first_diff is None else report.first_diff.extent
    before = ""
    if parts and extent is not None and extent.agreed is not None:
        before = "; the step before agreed" if extent.steps == 1 else f"; the {extent.steps:,} steps before agreed"
    return f"{', '.join(parts)}{before}"


def _code_line(frame: Frame | None, other: Frame | None, words: str, call: str) -> CodeLine | None:
    if frame is None:
        return None
    code, others = (printable("" if each is None else each.code, lines=True) for each in (frame, other))
    span = _span(code, others, words, call)
    # Of a statement of several lines, the line that the marked part begins in.
    before = code[: span[0]] if span is not None else ""
    number, start = before.count("\n"), before.rfind("\n") + 1
    line = code.split("\n")[number]
    span = None if span is None else [span[0] - start, min(span[1] - start, len(line))]
    return CodeLine(printable(frame.file), frame.line + number, line, span)


def _span(code: str, other: str, words: str, call: str) -> list[int] | None:
    """Return the part of a line of code that a fault is about: an argument that its words name, a call, or the only
    part that differs from the other side's line.

    Args:
        code: the line.
        other: the line of the other side.
        words: the kind of the cause and its sentence.
        call: the function call that causes the diff, in words, and the call of the fix.
    """
    # An argument or a call that the other line has, too, is less likely to be at fault.
    own, others = (
        [each for each in _arguments(line) if named_at(words, each[0]) is not None] for line in (code, other)
    )
    new = _named_spans(code, other, words)
    if new or (own and not _named_spans(other, code, words)):
        return new[0] if new else own[0][1]
    number = _changed_number(code, other)
    if number is not None:
        return number[0]
    said = [at for _, at in _arguments(code) if _PLAIN.fullmatch(code[slice(*at)]) and
            _shares_number(code[slice(*at)], words)]  # fmt: skip
    if len(said) == 1:
        return said[0]
    names = dict.fromkeys(_CALLED.findall(f"{call} {words}"))
    calls = [span for name in names for span in _calls(code, rf"{re.escape(name)}\(")]
    calls = calls or (_calls(code, r"\w+\(")[:1] if others else [])  # the call lacks the other's argument
    calls = sorted(calls, key=lambda span: _contains(other, code, span))
    if "\n" in code and calls and _contains(other, code, calls[0]):
        return _changed_part(code, other) or calls[0]  # of a long statement, where both sides differ
    return calls[0] if calls else _changed_part(code, other)


def _changed_number(code: str, partner: str) -> tuple[list[int], str] | None:
    """Return the place of the only number of a line that another line does not have there, and the other's number."""
    numbers = [[*_NUMBER.finditer(line)] for line in (code, partner)]
    pairs = [(number, theirs) for number, theirs in zip(*numbers) if float(number[0]) != float(theirs[0])]
    if len(numbers[0]) != len(numbers[1]) or len(pairs) != 1:
        return None
    ((place, theirs),) = pairs
    if (code[: place.start()].rstrip()[-1:] == "-") != (partner[: theirs.start()].rstrip()[-1:] == "-"):
        return None  # numbers of other signs are not exchanged without them
    return [place.start(), place.end()], theirs[0]


def _named_spans(code: str, other: str, words: str) -> list[list[int]]:
    """Return the places of the arguments in a line that words name, or whose text they name, and that another line does
    not have.
    """
    named = [(name, _VALUE.search(code[slice(*span)]), span) for name, span in _arguments(code)]
    named_spans = [
        span
        for name, value, span in named
        if named_at(words, name) is not None or (value is not None and named_at(words, value[1]) is not None)
    ]
    return [span for span in named_spans if not _contains(other, code, span)]


def _arguments(code: str) -> list[tuple[str, list[int]]]:
    """Return the name and the place of each keyword argument and entry of a dict in a line, without objects."""
    arguments = [(each[1] or each[2], each) for each in _KEYWORD.finditer(code)]
    return [(name, [at.start(), _end_of_argument(code, at.end())]) for name, at in arguments if name not in _OBJECTS]


def _calls(code: str, name: str) -> list[list[int]]:
    """Return the place of each call of a name, a pattern, in a line."""
    calls = list(re.finditer(rf"(?:\w+\.)*\b{name}", code, re.IGNORECASE))
    ends = [_end_of_argument(code, each.end(), several=True) for each in calls]
    return [[each.start(), min(end + 1, len(code))] for each, end in zip(calls, ends)]


def _contains(line: str, code: str, span: list[int]) -> bool:
    """Return True if a line has a part of another one."""
    return re.sub(r"\s", "", code[span[0] : span[1]]) in re.sub(r"\s", "", line)


def _changed_part(code: str, other: str) -> list[int] | None:
    """Return the part of a line that differs from another line, in whole words; `None` if most of the line does."""
    own, others = ([*_WORD.finditer(line)] for line in (code, other))
    texts = [[each[0] for each in spans] for spans in (others, own)]
    matcher = difflib.SequenceMatcher(a=texts[0], b=texts[1], autojunk=False)
    changed = [each for each in matcher.get_opcodes() if each[0] != "equal"]
    if not other or not changed or (len(changed) > 1 and matcher.ratio() < _LIKE):
        return None
    start, end = changed[0][3], changed[-1][4]
    if end == start and "\n" in code and start:
        start -= 1  # before what the other line has in addition
    return [own[start].start(), own[end - 1].end()] if end > start else None


def named_at(words: str, name: str) -> int | None:
    """Return the position at which a text names an argument, in one of its spellings; `None` if it does not."""
    alike = next((names for names in ARGUMENT_NAMES if name in names), (name,))
    spellings = {spelling for each in alike for spelling in (each, each.replace("_", " "))}
    matches = (
        re.search(rf"(?<![^\W_]){re.escape(spelling)}(?![^\W_])", words, re.IGNORECASE) for spelling in spellings
    )
    return min((match.start() for match in matches if match is not None), default=None)


def _end_of_argument(code: str, start: int, several: bool = False) -> int:
    """Return the position of the bracket or comma that ends an argument; with `several`, of the bracket."""
    depth, quote = 0, ""
    for place in range(start, len(code)):
        character = code[place]
        if quote:
            quote = "" if character == quote and code[place - 1] != "\\" else quote
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            if not depth:
                return place
            depth -= 1
        elif character == "," and not depth and not several:
            return place
    return len(code)


def _fixing(faults: Iterable[BriefFault], models: Models | None, runs: Both[str]) -> list[str]:
    """Return the command that proposes a patch, if a fault has a fix or is proven, and the candidate was trained by a
    script that lies here and is the same file now: a run of a stranger names no command.
    """
    command = "" if models is None else command_text(models.command.split(" "))
    is_proposable = any(fault.fix is not None or (fault.cause is not None and fault.cause.proven) for fault in faults)
    if models is None or not command or not is_proposable:
        return []
    script = command.partition(" ")[0]
    if not is_here(script, models.files.candidate.get(script, "")):
        return []
    return [f"{_command('fix', runs)} -- {command}"]


def _command(name: str, runs: Both[str]) -> str:
    return f"padiff {name} {' '.join(shlex.quote(printable(run)) for run in runs)}"


def _commands(runs: Both[str]) -> list[str]:
    command = _command("compare", runs)
    return [f"{command} -v", f"{command} --html report.html"]
