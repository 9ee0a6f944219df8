"""Name what a router computes otherwise: its scores, what it selects by, the weights of the chosen, whom it leaves out.

The values tell, not the code: each side's scores are looked for among few functions of the router's output (softmax,
sigmoid), and the weights of the chosen places among few functions of the scores (as they are, divided by their sum).
What both sides' functions differ in is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.choices import paired
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.place import graphs_of
from padiff.compare.diagnose.router import Found, Router, rounding
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import allowed
from padiff.compare.measure.operands import Arrays, operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import ROOT, Both, Cause, Diff

# Functions that rank the places of a row alike.
_RANKS_ALIKE = frozenset({"softmax", "sigmoid", "the router's output"})
# Least number of rows that prove which rows are left out, and largest share of them.
_LEAST_ROWS, _LARGEST_SHARE = 2, 0.9
# Usual coefficients of a loss that balances the load, besides the numbers of places.
_COEFFICIENTS = (1.0, 0.1, 0.01, 0.001, 0.02, 0.05, 0.005, 0.5)


def routing_cause(diff: Diff, step: Sequence[Diff], evidence: Evidence) -> Cause | None:
    """Return what a router computes otherwise before an output that differs; `None` if no router is found to.

    Args:
        diff: the first diff of the step: an output, or the gradient of one.
        step: the judged diffs of the step.
    """
    steps, record = evidence.steps, diff.pair.reference
    if steps is None or record is None or not diff.pair.complete or diff.pair.stage not in ("forward", "backward"):
        return None
    try:
        graphs = graphs_of(steps, evidence.runs.map(lambda run: run.info))
        of_gradient = diff.pair.stage == "backward"
        end = len(graphs.reference.trace.calls) if of_gradient else _end(graphs.reference, record.layer, record.call)
        routers = []
        for position, calls in paired(graphs.map(lambda graph: graph.trace), evidence.alignment):
            choices = calls.map(lambda call: call.choice)
            if position < end and all(choice is not None and choice.chosen for choice in choices):
                routers.append(Both(*(Router(graph, call) for graph, call in zip(graphs, calls))))
        if of_gradient:  # of a scalar that differs by no more than rows which chose otherwise explain
            causes = (_auxiliary(some, each) for each in _scalars(step) for some in (routers[-1:], routers) if some)
            return next((cause for cause in causes if cause is not None), None)
        for sides in reversed(routers):  # the last one before the difference
            if not _agree(*sides.map(lambda side: side.output)):
                continue
            cause = _weights(sides, diff) or _scores(sides) or (_rows(sides, diff) if sides is routers[-1] else None)
            if cause is not None:
                return cause
        if routers and math.prod(diff.pair.anchor.shape) == 1:
            return _auxiliary([routers[-1]], diff) or _auxiliary(routers, diff)
    except (RunFolderError, SketchOnlyError, ValueError, IndexError):
        pass  # the values can no longer be read, or are those of another kind of choice
    return None


def _scalars(step: Sequence[Diff]) -> list[Diff]:
    """Return the diffs of scalar outputs that are not equal."""
    return [
        diff
        for diff in step
        if diff.pair.stage == "forward" and diff.compared and math.prod(diff.pair.anchor.shape) == 1
        if diff.figures is not None and diff.figures.l2
    ]


def _agree(reference: np.ndarray | None, candidate: np.ndarray | None) -> bool:
    """Return False if the outputs of two routers differ by more than rounding in half precision."""
    if reference is None or candidate is None:
        return True
    return reference.shape == candidate.shape and bool(
        np.linalg.norm(candidate - reference) <= rounding("bfloat16") * np.linalg.norm(reference)
    )


def _end(graph: Graph, layer: str, number: int) -> int:
    call = graph.layers.get((layer, number))
    return len(graph.trace.calls) if call is None else graph.places[id(call)]


def _scores(sides: Both[Router]) -> Cause | None:
    """Return a cause in what the call chooses by."""
    where = _where(sides.reference)
    narrow = sides.map(lambda side: side.narrow)
    found = sides.map(lambda side: side.score)
    if narrow.candidate != narrow.reference:
        names = narrow.map(lambda name: name or "float32")
        text = f"the scores of {where} are computed in {names.candidate} for the reference's {names.reference}"
        fix = f"compute the scores in {names.reference}"
        return Cause("routing_precision", text, fix=fix, lines=sides.map(lambda side: side.call.line))
    lines = sides.map(lambda side: side.call.line)
    for side, one, other in (("candidate", *found), ("reference", *found.swapped())):
        noise = getattr(sides, side).noise if one is not None and other is None else None
        if one is not None and noise is not None:
            text = (
                f"{where}: the {side} adds noise of about {noise:.2g} to the router's output before the {one[0].words}"
            )
            return Cause("routing_noise", text, lines=lines)
    if found.reference is None or found.candidate is None:
        return None
    (a, shift_a, out_a), (b, shift_b, out_b) = found.reference, found.candidate
    lines = Both(a.line, b.line)
    ranks_alike = {a.words, b.words} <= _RANKS_ALIKE and shift_a is None and shift_b is None
    if not a.same(b) and not ranks_alike:
        text = f"{where} chooses by {b.sentence} for the reference's {a.sentence}"
        return Cause("routing_scores", text, lines=lines)
    if (shift_a is None) != (shift_b is None):
        with_bias, without = ("reference", "candidate") if shift_b is None else ("candidate", "reference")
        text = f"{where}: the {with_bias} adds a bias to the scores that it chooses by, the {without} does not"
        return Cause("routing_bias", text, lines=lines)
    if shift_a is not None and shift_b is not None and len(shift_a) == len(shift_b):
        error = np.abs(shift_a - shift_b).max()
        if error > 1e-3 * np.abs(shift_a).max():
            return Cause("routing_bias", f"{where} selects with another bias of the scores", lines=lines)
    kept = [int((~out).sum(1).max()) for out in (out_a, out_b)]
    if kept[0] != kept[1] and (out_a.any() or out_b.any()):
        text = f"{where} chooses among {kept[1]} places of each row for the reference's {kept[0]}"
        return Cause("routing_groups", text, lines=lines)
    return None


def _weights(sides: Both[Router], diff: Diff) -> Cause | None:
    """Return a cause in the weights of the chosen places; proven if each row's output is as much larger as its weights
    are.
    """
    found = sides.map(lambda side: side.weight)
    if found.reference is None or found.candidate is None:
        return None
    (a, values_a), (b, values_b) = found.reference, found.candidate
    if a.same(b) or (values_a.shape == values_b.shape and np.allclose(values_a, values_b, rtol=1e-4, atol=1e-6)):
        return None
    text = f"the weights of {_where(sides.reference)} are {b.sentence}; the reference's are {a.sentence}"
    fix = ""
    if a.words == b.words:
        fix = f"multiply the weights by {a.factor / b.factor:.3g}"
    elif a.words == f"{b.words}, divided by their sum":
        fix = "divide the weights by their sum over the chosen"
    elif b.words == f"{a.words}, divided by their sum":
        fix = "do not divide the weights by their sum"
    cause = Cause("routing_weights", text, fix=fix, lines=Both(a.line, b.line))
    remaining = _left_over(sides, values_a, values_b, diff)
    if remaining is None:
        return cause
    evidence = f"explains the difference: each row is as much larger or smaller as its weights, to {remaining:.2g}"
    return replace(cause, proven=True, evidence=evidence)


def _left_over(sides: Both[Router], reference: np.ndarray, candidate: np.ndarray, diff: Diff) -> float | None:
    """Return the relative error that is left of the rows of an output with the weights' ratio; `None` if the ratio does
    not explain the difference.
    """
    both = operands(diff.pair)
    count = len(sides.reference.numbers)
    if not isinstance(both, Arrays) or reference.shape != candidate.shape or both.reference.size % count:
        return None
    if count != sides.reference.rows or sides.reference.picked.shape != sides.candidate.picked.shape:
        return None
    with np.errstate(all="ignore"):
        ratios = candidate / reference
    alike = (sides.reference.picked == sides.candidate.picked).all(axis=1) & np.isfinite(ratios).all(axis=1)
    ratio = ratios[:, :1]
    spread = np.abs(ratios - ratio)[alike].max(initial=0.0)
    if not alike.any() or spread > 4 * rounding(diff.pair.anchor.dtype) * np.abs(ratio[alike]).max():
        return None
    rows = both.values().map(lambda array: array.reshape(count, -1)[alike])
    size = np.linalg.norm(rows.reference)
    before = float(np.linalg.norm(rows.candidate - rows.reference) / size)
    after = float(np.linalg.norm(rows.candidate - ratio[alike] * rows.reference) / size)
    return after if after < min(rounding(diff.pair.anchor.dtype) * 4, before / 10) else None


def _auxiliary(routers: Sequence[Both[Router]], diff: Diff) -> Cause | None:
    """Return a cause in a loss that balances the load: what each side counts, averages and multiplies."""
    both = operands(diff.pair)
    if not isinstance(both, Arrays):
        return None
    values = both.values().map(lambda array: float(array.reshape(-1)[0]))
    sides = Both([pair.reference for pair in routers], [pair.candidate for pair in routers])
    found = Both(*map(_balance, sides, values))
    if found.reference is None or found.candidate is None or found.reference.same(found.candidate):
        return None
    where, texts = _where(routers[-1].reference), (found.candidate.sentence, found.reference.sentence)
    text = f"the auxiliary loss of {where} is {texts[0]}; the reference's is {texts[1]}"
    return Cause("routing_auxiliary", text, lines=routers[-1].map(lambda side: side.call.line))


def _balance(routers: Sequence[Router], value: float) -> Found | None:
    """Return a loss as a function of what routers chose, and of their scores; `None` if no known function gives it."""
    terms: dict[str, float] = {}
    for router in routers:
        if router.output is None or len(router.numbers) != router.rows:
            return None
        width, chosen = router.output.shape[1], router.picked.shape[1]
        top = router.output.max(axis=1)
        logs = top + np.log(np.exp(router.output - top[:, None]).sum(axis=1))
        for over, mask in router.masks.items():
            rows = float(mask.sum())
            counts = {
                "all choices": np.bincount(router.picked[mask].ravel(), minlength=width) / rows,
                "first choices": np.bincount(router.picked[mask, 0], minlength=width) / rows,
            }
            new = {"the mean square of logsumexp": float((logs[mask] ** 2).mean())}
            for count, shares in counts.items():
                for words in ("softmax", "sigmoid"):
                    mean = router.bases[words][mask].mean(axis=0)
                    new[f"the shares of {count} times the mean of {words}"] = float((shares * mean).sum())
            for text, term in new.items():
                terms[text + over] = terms.get(text + over, 0.0) + term
    counts_of = (1.0, width, chosen, width / chosen, width * chosen, 1 / chosen)
    usual = [float(a * b) for a in counts_of for b in _COEFFICIENTS]
    for text, term in terms.items():
        for layers in (1, len(routers)):
            factor = next((x for x in usual if math.isclose(x * term / layers, value, rel_tol=rounding(""))), None)
            if factor is not None:
                return Found(text, factor / layers)
    return None


def _rows(sides: Both[Router], diff: Diff) -> Cause | None:
    """Return a cause in whom the candidate leaves out: the rows that differ tell."""
    both = operands(diff.pair)
    if not isinstance(both, Arrays):
        return None
    picked, count = sides.reference.picked, len(sides.reference.picked)
    if picked.shape != sides.candidate.picked.shape or (picked != sides.candidate.picked).any():
        return None
    values = both.values()
    if count < _LEAST_ROWS or values.reference.size % count or "rows" in diff.pair.layout.steps:
        return None
    rows = values.map(lambda array: array.reshape(count, -1))
    sizes = np.linalg.norm(rows.reference, axis=1)
    errors = np.linalg.norm(rows.candidate - rows.reference, axis=1)
    differs = errors > 50 * allowed(diff.pair.anchor.dtype, "forward") * max(float(np.median(sizes)), 1e-30)
    if not _LEAST_ROWS <= differs.sum() <= _LARGEST_SHARE * count:
        return None
    where, lines = _where(sides.reference), sides.map(lambda side: side.call.line)
    for order in ("C", "F"):
        capacity = _capacity(picked, differs, order)
        if capacity is not None:
            less = np.linalg.norm(rows.candidate[differs]) <= np.linalg.norm(rows.reference[differs])
            side = "candidate" if less else "reference"
            text = (
                f"the {side} drops {int(differs.sum())} of {count} rows of {where}: those beyond {capacity} rows for a "
                "place (its capacity)"
            )
            return Cause("routing_capacity", text, lines=lines)
    places = [k for k in np.unique(picked).tolist() if differs[(picked == k).any(axis=1)].all()]
    if (
        places
        and len(places) <= max(2, len(np.unique(picked)) // 4)
        and (np.isin(picked, places).any(axis=1) == differs).all()
    ):
        names = ", ".join(map(str, places))
        text = f"only the rows differ that choose {'place' if len(places) == 1 else 'places'} {names} in {where}"
        if len(places) == 2:
            text += ": the two are exchanged, or computed otherwise"
        return Cause("routing_places", text, lines=lines)
    return None


def _capacity(picked: np.ndarray, differs: np.ndarray, order: str) -> int | None:
    """Return the number of rows beyond which a place takes no more, if just the rows that differ lie beyond it.

    Args:
        order: ``C`` if a row's choices count one after the other, ``F`` if all rows' first choices count first.
    """
    ranks = np.empty(picked.shape, np.int64)
    flat = picked.reshape(-1, order=order)  # type: ignore[call-overload]
    for place in np.unique(flat):
        at = np.flatnonzero(flat == place)
        row, column = np.unravel_index(at, picked.shape, order=order)  # type: ignore[call-overload]
        ranks[row, column] = np.arange(len(at))
    worst = ranks.max(axis=1)
    capacity = int(worst[differs].min())
    return capacity if ((worst >= capacity) == differs).all() else None


def _where(router: Router) -> str:
    layer = router.call.layer
    return f"{router.call.function}() in {'the model' if layer == ROOT else f'`{layer}`'}"
