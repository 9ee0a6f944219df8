"""Coverage of a comparison in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from padiff.records.report_data import ReportData
from padiff.records.row_summary import with_ranges
from padiff.sketches.sketch import ELEMENTS, SPREAD
from padiff.system.printable import printable_lines

# Maximum number of names that a line lists.
_NAMED = 8


def coverage_lines(report: ReportData, at_most: int = _NAMED) -> list[str]:
    """Return lines that say how much was compared, what was not, and further remarks."""
    coverage = report.coverage
    lines = [f"{coverage.compared} pairs, {coverage.share:.1%} of what was recorded in the compared steps"]
    if coverage.ranks:
        lines.append(coverage.ranks)
    if coverage.sketched:
        sampled = f"of tensors above {ELEMENTS:,} elements a sample was looked at"
        lines.append(f"{coverage.sketched} pairs judged from sketches: relative L2 to +- {SPREAD:.0%}, {sampled}")
    if coverage.bounded:
        lines.append(f"{coverage.bounded} of them from norms and means only: the layouts differ")
    if coverage.amplified is not None:
        lines.append(
            f"from step {coverage.amplified} on the runs are apart by rounding that the training "
            "amplified: ignore other differences from there on"
        )
    if coverage.zeros:
        lines.append(f"{zeros_text(coverage.zeros)}: {_first(coverage.zeros, at_most)}")
    named: list[tuple[str, Iterable[str]]] = [
        (f"layers of the {report.reference} run without a partner", coverage.reference_layers),
        (f"layers of the {report.candidate} run without a partner", coverage.candidate_layers),
        (
            f"containers of the {report.reference} run without a partner (another nesting)",
            coverage.reference_containers,
        ),
        (
            f"containers of the {report.candidate} run without a partner (another nesting)",
            coverage.candidate_containers,
        ),
        (f"compared as parts of another layer, but for their outputs ({report.reference})", coverage.reference_parts),
        (f"compared as parts of another layer, but for their outputs ({report.candidate})", coverage.candidate_parts),
        (f"parameters of the {report.reference} run that train and have no record", coverage.reference_unrecorded),
        (f"parameters of the {report.candidate} run that train and have no record", coverage.candidate_unrecorded),
        ("not recorded", coverage.left_out),
        (f"parameters of the {report.reference} run without a partner", coverage.reference_parameters),
        (f"parameters of the {report.candidate} run without a partner", coverage.candidate_parameters),
        (f"recorded on the {report.reference} run only", coverage.reference_sites),
        (f"recorded on the {report.candidate} run only", coverage.candidate_sites),
        ("steps that lack a rank", coverage.lost),
        ("steps of the reference only", map(str, coverage.reference_steps)),
        ("steps of the candidate only", map(str, coverage.candidate_steps)),
        ("never called", coverage.uncalled),
        ("layers that are set differently", coverage.notes),
        ("close choices of a partner (`padiff map` shows them)", coverage.ambiguous),
        ("assumed, since neither names nor shapes tell", coverage.assumed),
        ("compared in the reference's layout", coverage.views),
        ("layers that end at another place of the computation, compared inside only", coverage.cut_elsewhere),
        ("kept as sketches, which do not show parts of a tensor: not compared", coverage.unmeasured),
    ]
    others = [difference.text for difference in report.settings_differ if difference.kind not in ("layer_setting",)]
    named.append(("set differently", others))
    named.append(("environments differ", report.environment))
    for title, names in named:
        listed = list(names)
        if listed:
            lines.append(f"{title}: {_first(listed, at_most)}")
    return printable_lines(lines)


def zeros_text(zeros: Collection[str]) -> str:
    """Return a sentence that counts the gradients accepted as noise and the tensors that this noise moved."""
    counts = [sum(f"/{stage}/" in site for site in zeros) for stage in ("grad", "weight")]
    counts.append(len(zeros) - sum(counts))
    text = f"{counts[0]} gradient{' is' if counts[0] == 1 else 's are'} rounding noise around zero"
    moved = [f"{n} {what}{'s' if n > 1 else ''}" for n, what in zip(counts[1:], ("weight", "output")) if n]
    return text + (f", and moved {' and '.join(moved)}" if moved else "")


def _first(names: Sequence[str], at_most: int) -> str:
    if len(names) > at_most:
        names = with_ranges(names)
    more = f", and {len(names) - at_most} more" if len(names) > at_most else ""
    return f"{', '.join(names[:at_most])}{more}"


def left_out_text(report: ReportData) -> str:
    coverage = report.coverage
    counts = [
        (len(coverage.reference_layers), "layer", "reference"),
        (len(coverage.candidate_layers), "layer", "candidate"),
        (len(coverage.reference_parameters), "parameter", "reference"),
        (len(coverage.candidate_parameters), "parameter", "candidate"),
        (len(coverage.reference_steps), "step", "reference"),
        (len(coverage.candidate_steps), "step", "candidate"),
    ]
    return ", ".join(f"{n} {what}{'s' if n > 1 else ''} of the {side}" for n, what, side in counts if n)
