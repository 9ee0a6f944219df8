"""Reports as JSON.

See `padiff.records.report_text`, `padiff.report_junit` and `padiff.report_markdown` for other formats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import groupby, islice
from typing import Any

from padiff.records import (
    SIDES,
    Both,
    Diff,
    Difference,
    FirstDiff,
    Models,
    Picture,
    Recomputed,
    Report,
    Standing,
    coverage_lines,
    stage_table,
    verdict,
)
from padiff.records.diagnostic import diagnostic_of
from padiff.report_junit import to_junit
from padiff.report_markdown import to_markdown
from padiff.system.frames import Frame
from padiff.system.language import language, messages, translated

__all__ = [
    "SCHEMA_VERSION", "coverage_lines", "diff_to_json", "difference_to_json", "first_to_json", "head_to_json",
    "json_parts", "number", "page_words", "stage_table", "steps_to_json", "to_json", "to_junit", "to_markdown",
    "verdict",
]  # fmt: skip

#: Version of the schema of `to_json`.
SCHEMA_VERSION = 1
# Parts of a report that have sentences, and most texts of them that are translated.
_SPOKEN = ("verdict", "tolerance", "diagnostic", "first_diff", "independent", "environment", "settings_differ")
_MOST_TEXTS = 500


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON values; NaN and infinity become `None` and the string ``"inf"``."""
    return {**head_to_json(report), "steps": list(steps_to_json(report))}


def json_parts(report: Report) -> Iterator[str]:
    """Yield the text of `to_json` in parts: each item that occurs by the thousand (a diff, all layers) is one line."""
    head = head_to_json(report)
    models = head.pop("models")
    # Python writes indented JSON ten times as slowly as other JSON.
    yield json.dumps(head, indent=1).removesuffix("\n}")
    yield f',\n "models": {json.dumps(models)},\n "steps": ['
    between = ""
    for step in steps_to_json(report):
        diffs = step.pop("diffs")
        yield f'{between}\n  {json.dumps(step).removesuffix("}")}, "diffs": [\n'
        yield ",\n".join(map(json.dumps, diffs))
        yield "\n  ]}"
        between = ","
    yield "\n ]\n}"


def steps_to_json(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the steps of a report as JSON values, one at a time to save memory."""
    for step, diffs in groupby(report.diffs, lambda diff: diff.pair.step):
        step_diffs = list(diffs)
        yield {
            "step": step,
            "passed": all(diff.passed for diff in step_diffs),
            "diffs": [diff_to_json(diff, report.standing(diff)) for diff in step_diffs],
        }


def page_words(head: Mapping[str, Any], to: str | None = None) -> dict[str, str]:
    """Return the words of the page in the user's language, by the English text: labels, and sentences of a report.

    Args:
        head: the result of `head_to_json`.
        to: language, ``en`` or ``zh``; `None` for the user's.
    """
    if (language() if to is None else to) != "zh":
        return {}
    words = {message: translation for context, message, translation in messages() if context == "page"}
    spoken = [head[key] for key in _SPOKEN if key in head]
    for text in dict.fromkeys(islice(_texts(spoken), _MOST_TEXTS)):
        local = translated(text, to="zh")
        if local != text:
            words.setdefault(text, local)
    return words


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def head_to_json(report: Report) -> dict[str, Any]:
    """Return the report without its steps, as JSON values."""
    first, coverage = report.first_diff, report.coverage
    head: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "passed": report.passed,
        "outcome": report.outcome,
        "reference": report.reference,
        "candidate": report.candidate,
        "tolerance": report.tolerance,
        "verdict": verdict(report),
        "diagnostic": asdict(diagnostic_of(report)),
        "environment": list(report.environment),
        "settings_differ": [difference_to_json(item) for item in report.settings_differ],
        "first_diff": None if first is None else first_to_json(first),
        "independent": [first_to_json(item) for item in report.independent],
        "coverage": {
            "share": coverage.share,
            "complete": coverage.complete,
            "compared": coverage.compared,
            "missing": coverage.missing,
            "records": {"reference": coverage.reference_records, "candidate": coverage.candidate_records},
            "unmatched_layers": _sides(coverage.reference_layers, coverage.candidate_layers),
            "unmatched_containers": _sides(coverage.reference_containers, coverage.candidate_containers),
            "parts_of_layers": _sides(coverage.reference_parts, coverage.candidate_parts),
            "unrecorded_parameters": _sides(coverage.reference_unrecorded, coverage.candidate_unrecorded),
            "left_out": list(coverage.left_out),
            "unmatched_parameters": _sides(coverage.reference_parameters, coverage.candidate_parameters),
            "unmatched_sites": _sides(coverage.reference_sites, coverage.candidate_sites),
            "unmatched_steps": _sides(coverage.reference_steps, coverage.candidate_steps),
            "uncalled": list(coverage.uncalled),
            "settings": list(coverage.notes),
            "ambiguous": list(coverage.ambiguous),
            "assumed": list(coverage.assumed),
            "views": list(coverage.views),
            "cut_elsewhere": list(coverage.cut_elsewhere),
            "sketched": coverage.sketched,
            "bounded": coverage.bounded,
            "unmeasured": list(coverage.unmeasured),
            "ranks": coverage.ranks,
            "amplified": coverage.amplified,
            "zeros": list(coverage.zeros),
            "lost": list(coverage.lost),
        },
    }
    # These entries are shown by the page.
    head["models"] = None if report.models is None else _models(report.models)
    if first is not None:
        head["first_diff"]["site"] = None if first.diff is None else _sites(first.diff)
        head["first_diff"]["picture"] = None if first.picture is None else _picture(first.picture)
    return head


def first_to_json(first: FirstDiff) -> dict[str, Any]:
    """Return the first diff, or a further fault, as JSON values."""
    return {
        "step": first.step,
        "rank": first.rank,
        "stage": first.stage,
        "reference": first.reference,
        "candidate": first.candidate,
        "slot": first.slot,
        "max_abs": number(first.max_abs),
        "max_rel": number(first.max_rel),
        "last_agreeing": first.last_agreeing or None,
        "inside": first.inside,
        "call": first.call or None,
        "message": first.message,
        "cause": "" if first.cause is None else first.cause.sentence,
        "extent": "" if first.extent is None else first.extent.text,
        "why": None if first.cause is None else {k: v for k, v in asdict(first.cause).items() if k != "lines"},
        "recomputed": None if first.recomputed is None else _recomputed(first.recomputed),
        "standing": first.standing.name.lower(),
        "stacks": _sides(*first.stacks),
    }


def _recomputed(recomputed: Recomputed) -> dict[str, Any]:
    errors = dict(SIDES.zip(recomputed.errors.map(number)))
    return {
        "what": recomputed.what,
        "rules": dict(SIDES.zip(recomputed.rules)),
        "errors": errors,
        "wrong": recomputed.wrong,
        "text": recomputed.text,
    }


def difference_to_json(one: Difference) -> dict[str, Any]:
    """Return a declared difference as JSON values."""
    return {
        "name": one.name,
        "reference": one.values.reference,
        "candidate": one.values.candidate,
        "step": one.step,
        "stage": one.stage,
        "kind": one.kind,
        "about": one.about,
        "changes": one.changes,
        "fix": one.fix,
        "note": one.note,
        "parameters": _sides(*one.parameters),
        "layers": _sides(*one.layers),
    }


def diff_to_json(diff: Diff, standing: Standing | None = None) -> dict[str, Any]:
    """Return one diff as JSON values.

    Args:
        diff: the diff.
        standing: relation of the diff to the first diff.
    """
    pair, figures = diff.pair, diff.figures
    out: dict[str, Any] = {
        "stage": pair.stage,
        "reference": pair.reference.site if pair.reference else None,
        "candidate": pair.candidate.site if pair.candidate else None,
        "passed": diff.passed,
    }
    if diff.grade is not None:
        out["grade"] = diff.grade.name.lower()
    if diff.floors is not None and figures is not None and figures.floor is not None:
        # Relative to the reference's norm, like `rel_l2`.
        scale = figures.reference_l2
        out["floor"] = number(figures.floor / scale) if scale else 0.0
        out["floors"] = number(diff.floors)
    if figures is not None and figures.third is not None:
        third = figures.third
        out["float64"] = {
            **dict(SIDES.zip(third.errors.map(number))),
            "code": third.code,
            "farther": third.farther or None,
            "times": number(third.times),
        }
    if standing is not None:
        out["standing"] = standing.name.lower()
    if pair.layout:
        out["view"] = str(pair.layout)
    if diff.problem:
        out["problem"] = str(diff.problem)
    if figures is not None:
        out["l2"] = {"reference": number(figures.reference_l2), "candidate": number(figures.candidate_l2)}
        if pair.complete:
            out |= {
                "max_abs": number(figures.max_abs),
                "max_rel": number(figures.max_rel),
                "mean_abs": number(figures.mean_abs),
                "rel_l2": number(figures.rel_l2),
            }
        if not diff.passed and pair.complete and figures.basis == "tensors":
            out["worst"] = _element(figures.index, figures.values)
            out["shape"] = list(pair.anchor.shape)
        if figures.basis != "tensors":
            out["basis"] = figures.basis
            out["spread"] = figures.spread
    judged = diff.judgement
    if judged is not None:
        out["judged"] = {
            "figure": str(judged.figure),
            "value": number(judged.value),
            "limit": number(judged.limit),
            "rule": judged.rule.name.lower(),
            "allowed_because": str(judged.rule),
        }
    return out


def _sites(diff: Diff) -> dict[str, str | None]:
    sites = diff.pair.sides.map(lambda record: record.site if record is not None else None)
    return {"reference": sites.reference, "candidate": sites.candidate}


def _element(index: tuple[int, ...], values: Both[float]) -> dict[str, Any]:
    return {"index": list(index), **dict(SIDES.zip(values.map(number)))}


def _models(models: Models) -> dict[str, Any]:
    """Return both trees (path and type of each layer), and the pairs by path."""
    sides = models.frameworks.zip(models.layers)
    trees = sides.map(lambda side: {"framework": side[0], "layers": [[layer.path, layer.type] for layer in side[1]]})
    stacks = dict(SIDES.zip(models.stacks.map(_stacks)))
    return {**dict(SIDES.zip(trees)), "stacks": stacks, "partners": [asdict(partners) for partners in models.partners]}


def _stacks(stacks: Mapping[str, tuple[Frame, ...]]) -> dict[str, Any]:
    """Return the call stacks of layers: the lines, and for each layer the numbers of its lines, outermost first."""
    frames: dict[Frame, int] = {}
    layers = {path: [frames.setdefault(frame, len(frames)) for frame in stack] for path, stack in stacks.items()}
    return {"frames": [frame._asdict() for frame in frames], "layers": layers}


def _picture(picture: Picture) -> dict[str, Any]:
    return {
        "shape": list(picture.shape),
        "edges": [_rounded(edge) for edge in picture.edges],
        "counts": dict(SIDES.zip(picture.counts.map(list))),
        "worst": [_element(element.index, element.values) for element in picture.worst],
        "error": [[_rounded(value) for value in row] for row in picture.error],
        "rows": picture.rows,
        "columns": picture.columns,
    }


def _rounded(value: float) -> float | str | None:
    """Round a number to the digits that a picture shows."""
    return number(float(f"{value:.4g}"))


def number(value: float | None) -> float | str | None:
    """Return a float for JSON: NaN becomes `None`, and infinity the string ``"inf"`` or ``"-inf"``."""
    if value is None or math.isnan(value):
        return None
    return float(value) if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def _sides(reference: Iterable[Any], candidate: Iterable[Any]) -> dict[str, list[Any]]:
    return {"reference": list(reference), "candidate": list(candidate)}
