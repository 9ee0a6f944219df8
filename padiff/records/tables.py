"""The diffs of a report as a table, for pandas and Arrow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from padiff.errors import UsageError
from padiff.records.compared import Diff
from padiff.records.recorded import Record
from padiff.records.report_data import ReportData


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
