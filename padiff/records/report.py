"""Report of a comparison as values, text, tables and cards, and a run as text."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from padiff.errors import UsageError
from padiff.records.compared import Diff
from padiff.records.declared import Settings, setting_text
from padiff.records.diagnostic import diagnostic_json, diagnostic_of
from padiff.records.diagnostic_text import diagnostic_text
from padiff.records.recorded import Layer, Record, Run, RunInfo, Step
from padiff.records.report_data import ReportData
from padiff.records.report_text import count_text, details_text, stage_table
from padiff.records.traces import LOOP
from padiff.system.language import language, translated
from padiff.system.terminal import counted


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        name: its name.
        kind: its type: ``int64``, ``float64``, or ``string``.
        meaning: its meaning, with the unit.
        value: the value of a diff of a report; `None` if there is none.
    """

    name: str
    kind: str
    meaning: str
    value: Callable[[Diff, ReportData], Any]


def _figure(name: str, meaning: str, exact: bool = False) -> Column:
    """Return the column of a figure; with ``exact``, of one that sketches do not have."""

    def value(diff: Diff, report: ReportData) -> float | None:
        figures = diff.figures if diff.compared else None
        return None if figures is None or (exact and figures.basis != "tensors") else float(getattr(figures, name))

    return Column(name, "float64", meaning, value)


def _judged(name: str, kind: str, meaning: str, value: Callable[[Any], Any]) -> Column:
    return Column(name, kind, meaning, lambda diff, report: None if diff.judgement is None else value(diff.judgement))


def _layer(record: Record | None) -> str | None:
    return None if record is None else record.layer


def _standing(diff: Diff, report: ReportData) -> str | None:
    standing = report.standing(diff)
    return None if standing is None else standing.name.lower()


def _outcome(diff: Diff, report: ReportData) -> str:
    return "differs" if not diff.passed else "agrees" if diff.compared else "not compared"


#: The columns of the table, in order. Quantities of tensors have the tensor's own unit; relative ones have none.
COLUMNS = (
    Column("step", "int64", "number of the step", lambda diff, report: diff.pair.step),
    Column("stage", "string", "`input`, `weight`, `forward`, `loss`, `backward`, `grad` or `update`",
           lambda diff, report: diff.pair.stage),
    Column("reference", "string", "path of the reference's layer", lambda diff, report: _layer(diff.pair.reference)),
    Column("candidate", "string", "path of the candidate's layer", lambda diff, report: _layer(diff.pair.candidate)),
    Column("slot", "string", "name of the tensor in its layer, the reference's",
           lambda diff, report: diff.pair.anchor.slot),
    Column("call", "int64", "number of the layer's call in the step, from 0",
           lambda diff, report: diff.pair.anchor.call),
    Column("outcome", "string", "`agrees`, `differs` or `not compared`", _outcome),
    _figure("rel_l2", "L2 norm of the difference by that of the reference, no unit"),
    _figure("max_abs", "largest difference, in the tensor's unit", exact=True),
    _figure("max_rel", "largest difference by the reference's value there, no unit", exact=True),
    _figure("mean_abs", "mean difference, in the tensor's unit", exact=True),
    _figure("l2", "L2 norm of the difference, in the tensor's unit"),
    _figure("reference_l2", "L2 norm of the reference, in the tensor's unit"),
    _figure("candidate_l2", "L2 norm of the candidate, in the tensor's unit"),
    Column("size", "int64", "number of elements",
           lambda diff, report: None if diff.figures is None or not diff.compared else diff.figures.size),
    Column("basis", "string", "what was measured: `tensors`, `sketches` or `moments`",
           lambda diff, report: None if diff.figures is None or not diff.compared else diff.figures.basis),
    _judged("figure", "string", "the figure that is held against the limit", lambda judged: str(judged.figure)),
    _judged("value", "float64", "value of that figure, in its unit", lambda judged: judged.value),
    _judged("limit", "float64", "largest value that passes, in the same unit", lambda judged: judged.limit),
    Column("times_limit", "float64", "value by limit, no unit; infinite where the limit is 0 and the value is not",
           lambda diff, report: None if diff.judgement is None else diff.excess),
    _judged("rule", "string", "the rule that set the limit, in words", lambda judged: str(judged.rule)),
    Column("floor", "float64", "L2 norm that rounding alone makes, as measured, in the tensor's unit",
           lambda diff, report: None if diff.figures is None else diff.figures.floor),
    Column("problem", "string", "why the tensors could not be compared, or are wrong at any tolerance",
           lambda diff, report: None if diff.problem is None else str(diff.problem)),
    Column("standing", "string", "relation to the first diff: `first`, `follows`, `again` or `new`; none if it agrees",
           _standing),
)  # fmt: skip


def to_pandas(report: ReportData) -> Any:
    """Return a report's table as a ``pandas.DataFrame``."""
    try:
        import pandas
    except ImportError as error:
        raise _absent("to_pandas()", "pandas", error) from None
    kinds = {"int64": "Int64", "float64": "float64", "string": "string"}
    values = _values(report)
    series = {column.name: pandas.Series(values[column.name], dtype=kinds[column.kind]) for column in COLUMNS}
    return pandas.DataFrame(series)


def to_arrow(report: ReportData) -> Any:
    """Return a report's table as a ``pyarrow.Table``, with the meaning of each column in the metadata of its field."""
    try:
        import pyarrow
    except ImportError as error:
        raise _absent("to_arrow()", "pyarrow", error) from None
    kinds = {"int64": pyarrow.int64(), "float64": pyarrow.float64(), "string": pyarrow.string()}
    fields = [pyarrow.field(each.name, kinds[each.kind], metadata={"meaning": each.meaning}) for each in COLUMNS]
    return pyarrow.table(_values(report), schema=pyarrow.schema(fields))


def _values(report: ReportData) -> dict[str, list[Any]]:
    """Return the values of each column, one for each pair."""
    values: dict[str, list[Any]] = {column.name: [] for column in COLUMNS}
    for diff in report.diffs:  # in one pass, as diffs of a long comparison are made anew in each
        for column in COLUMNS:
            values[column.name].append(column.value(diff, report))
    return values


def _absent(call: str, package: str, error: ImportError) -> UsageError:
    return UsageError(f"{call} needs {package}, which cannot be imported ({error}): pip install 'padiff-hooks[tables]'")


# Maximum number of layers that a printed run lists, and of steps that a line names.
_MOST_LAYERS, _STEPS = 40, 10
# Number of items that are printed of longer lists.
_NAMED = 3


def run_line(run: Run) -> str:
    """Return one line about a run: framework, model, size, number of steps."""
    info, numbers = run.info, run.numbers()
    state = "finished" if run.finished() else "not ended"
    return f"{run.name}: {model_text(info)}, {counted(len(numbers), 'recorded step')}, {state}"


def run_text(run: Run) -> str:
    """Return a run as text: framework, model, steps, counts of the first step's records, layers, and declared
    settings.
    """
    numbers = run.numbers()
    lines = [run_line(run)]
    if numbers:
        lines.append(steps_text(numbers))
        lines += [step_text(step) for step in run.steps(numbers[0])]
    rows = [
        (layer.path, layer.type, owned_text(layer), settings_text(layer)) for layer in run.info.layers[:_MOST_LAYERS]
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines += ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip() for row in rows]
    more = len(run.info.layers) - _MOST_LAYERS
    lines += [f"... and {more} more layers"] if more > 0 else []
    return "\n".join([*lines, *run.info.errors, *declared_lines(run.info.settings)])


def model_text(info: RunInfo) -> str:
    """Return the framework and the model, with its numbers of layers and parameters."""
    count = sum(
        math.prod(p.shape) for layer in info.layers for p in layer.parameters if p.role == "parameter" and not p.tied_to
    )
    kind = info.layers[0].type if info.layers else "no layer"
    layers = counted(len(info.layers), "layer")
    return f"{info.framework} {info.framework_version}, {kind}, {layers}, {count:,} parameters"


def steps_text(numbers: Sequence[int]) -> str:
    """Return the numbers of a run's steps, the first ones and the last."""
    more = f", ... {numbers[-1]}" if len(numbers) > _STEPS else ""
    return f"steps: {', '.join(map(str, numbers[:_STEPS]))}{more}"


def step_text(step: Step) -> str:
    """Return one rank's part of a step as text: number of tensors of each stage, settings, and notes."""
    counts = Counter(
        "learning rate" if record.layer == LOOP and record.stage == "update" else record.stage
        for record in step.records
    )
    text = ", ".join(f"{count} {stage}" for stage, count in counts.items())
    sketched = sum(record.sketch is not None for record in step.records)
    text += f"; {sketched} of them as sketches" if sketched else ""
    if step.trace.functions:
        functions = sum(bool(call.function) for call in step.trace.calls)
        text += f"; {counted(functions, 'call')} of functions traced"
    lines = [f"step {step.number}, rank {step.rank}: {text}; {step.micro_batches} micro-batch(es)"]
    if step.settings:
        lines.append(f"  set otherwise than at first: {', '.join(_said(step.settings))}")
    lines += [f"  {note}" for note in step.notes]
    for each in step.evaluations:
        shapes = ", ".join(str(list(shape)) for shape in each.shapes) or "other shapes"
        lines.append(f"  evaluation: {counted(each.calls, 'call')} of {each.layer}, {shapes}")
    return "\n".join(lines)


def declared_lines(settings: Settings) -> list[str]:
    """Return a run's declared settings, a line for each parameter group and each family of names."""
    families: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        *family, last = name.split(".")
        if family[:1] == ["optimizer"]:
            of_group = family[2:3] == ["group"]
            split = 4 if of_group else 2
            family, last = name.split(".")[:split], ".".join(name.split(".")[split:])
        families.setdefault(".".join(family), {})[last] = value
    return [f"{family or 'run'}: {', '.join(_said(values))}" for family, values in families.items()]


def _said(settings: Settings) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, (list, tuple)) and len(value) > _STEPS:
            yield f"{name} {', '.join(map(setting_text, value[:_NAMED]))}, ... ({len(value)})"
        elif isinstance(value, (list, tuple)):
            yield f"{name} {', '.join(map(setting_text, value)) or 'none'}"
        else:
            yield f"{name} {setting_text(value)}"


def owned_text(layer: Layer) -> str:
    """Return the slots and shapes of a layer's parameters and buffers."""
    return ", ".join(f"{p.slot} {list(p.shape)}" + (f" = {p.tied_to}" if p.tied_to else "") for p in layer.parameters)


def settings_text(layer: Layer) -> str:
    """Return a layer's hyper-parameters as text."""
    return ", ".join(f"{name}={value}" for name, value in layer.settings.items())


def bytes_text(size: float) -> str:
    """Return a number of bytes with a unit, to about three digits."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


# Colours that are readable on white and on black, as a notebook may have either background.
_COLOURS = {"match": "#2e8b63", "differ": "#d2542f", "cannot tell": "#b8860b"}
_CARD = "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:12px 16px;max-width:860px;line-height:1.45"
_BLOCK = "margin:6px 0 8px;line-height:1.3;background:none;white-space:pre;overflow-x:auto"
# Width of the diagnostic, in columns.
_CARDS_WIDE = 96
_QUIET = "opacity:.7"
_CELL = "text-align:{};padding:2px 18px 2px 0;border:0;background:none"
_LAYERS = 6


def report_card(report: ReportData) -> str:
    """Return a card with the diagnostic and a row for each stage."""
    rows = []
    for row in stage_table(report):
        figures = ["" if row[name] is None else f"{row[name]:.2g}" for name in ("worst", "limit")]
        rows.append([row["stage"], f"{row['compared']:,}", f"{row['differ']:,}", *figures, row["where"]])
    parts = [
        _head(report.outcome, f"{report.reference} against {report.candidate}"),
        f'<pre style="{_BLOCK}">{html.escape(diagnostic_text(diagnostic_of(report), _CARDS_WIDE))}</pre>',
        _table(["stage", "pairs", "differ", "relative L2", "allowed", "closest to its limit"], rows),
    ]
    return _card(parts, f"padiff: {count_text(report)}")


def run_card(run: Run) -> str:
    """Return a card with a run's model, its steps, and its declared settings."""
    numbers = run.numbers()
    state = f"{len(numbers):,} recorded step{'' if len(numbers) == 1 else 's'}, "
    state += "finished" if run.finished() else "not ended"
    lines = [
        model_text(run.info),
        state,
        *([steps_text(numbers)] if numbers else []),
        *declared_lines(run.info.settings),
    ]
    shown = "".join(f"<div>{html.escape(line)}</div>" for line in lines[:_LAYERS])
    more = len(lines) - _LAYERS
    parts = [f"<b>{html.escape(run.name)}</b>", shown]
    parts += [f'<div style="{_QUIET}">and {more} more lines: print it</div>'] if more > 0 else []
    return _card(parts, "padiff: a run")


def _card(parts: Iterable[str], title: str) -> str:
    return f'<div style="{_CARD}" title="{html.escape(title)}">{"".join(parts)}</div>'


def _head(outcome: str, names: str) -> str:
    shown = outcome if language() == "en" else translated(outcome.upper(), "outcome")
    return (
        f'<div><b style="color:{_COLOURS[outcome]}">{shown}</b> '
        f'<span style="{_QUIET};margin-left:8px">{html.escape(names)}</span></div>'
    )


def _table(titles: list[str], rows: list[list[str]]) -> str:
    sides = ["left", "right", "right", "right", "right", "left"]
    head = "".join(
        f'<th style="{_CELL.format(side)};{_QUIET};font-weight:normal">{title}</th>'
        for side, title in zip(sides, titles)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL.format(side)}">{html.escape(cell)}</td>' for side, cell in zip(sides, row))
        + "</tr>"
        for row in rows
    )
    return f'<table style="border-collapse:collapse;border:0"><tr>{head}</tr>{body}</table>'


# Width of the text, in columns.
_WIDE = 120


@dataclass(frozen=True, eq=False, repr=False)
class Report(ReportData):
    """All diffs of two steps or two runs, in causal order. True in a condition if the runs match.

    An existing report may be false, so write ``report is None``, ``report.passed`` or ``report.first_diff``.

    Attributes: those of `ReportData`.
    """

    def __str__(self) -> str:
        return f"{self.text()}\n\n{details_text(self)}"

    def text(self, width: int = _WIDE) -> str:
        """Return the block that `padiff compare` prints: where the runs differ first, why, the lines of code, the fix.

        Args:
            width: number of available columns.
        """
        return diagnostic_text(diagnostic_of(self), width)

    def brief(self) -> dict[str, Any]:
        """Return the first fault, its cause, its fix and the lines of code, as JSON values of at most 4 kB.

        ``padiff schema`` prints the schema.
        """
        brief: dict[str, Any] = json.loads(diagnostic_json(diagnostic_of(self)))
        return brief

    def to_pandas(self) -> Any:
        """Return all pairs as a ``pandas.DataFrame``, a row for each pair, in causal order.

        Raises:
            UsageError: pandas is not installed.
        """
        return to_pandas(self)

    def to_arrow(self) -> Any:
        """Return all pairs as a ``pyarrow.Table``, a row for each pair, in causal order.

        Raises:
            UsageError: pyarrow is not installed.
        """
        return to_arrow(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        return report_card(self)

    def __repr__(self) -> str:
        return f"<Report: {self.outcome}, {count_text(self)}, {self.reference} against {self.candidate}>"
