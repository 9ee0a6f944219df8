"""A loss as a sum of terms: their weights on both sides, and the slopes of the loss along the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.edit import FormulaView
from padiff.compare.diagnose.computing.formula import Change, Formula, Get, Node, UnknownError
from padiff.compare.diagnose.computing.operations import OPERATIONS
from padiff.frameworks.catalog import is_loss
from padiff.records import SIDES, Both
from padiff.system.frames import Frame

#: The most terms of a loss.
_MOST = 16
# Columns with a smaller relative distance are multiples of each other. Chosen: above errors of finite differences.
_MULTIPLE = 1e-4
# Smallest ratio of singular values of terms that can be distinguished.
_DISTINCT = 1e-3
# Relative error of a ratio that is taken as another number.
_SAME = 1e-3
# Share of its weight below which nothing is left of a term. Chosen: below any number that a program puts instead.
_NOTHING = 1e-6
_REARRANGING = frozenset({"reshape", "transpose", "expand", "cast"})


@dataclass(frozen=True)
class Term:
    """A term of a loss: a linear function of the value of a node.

    Attributes:
        path: the nodes from the loss to the node.
        share: returns the term's share of the loss for a value of the node.
        factors: for each node of the path, the numbers that multiply it.
        counts: for each node of the path, the product of the counts that means divide it by.
    """

    path: tuple[int, ...]
    share: Callable[[np.ndarray], np.ndarray]
    factors: tuple[tuple[float, ...], ...] = ((),)
    counts: tuple[float, ...] = (1.0,)

    @property
    def node(self) -> int:
        return self.path[-1]

    def of_operand(
        self, operand: int, change: Callable[[np.ndarray], np.ndarray], factor: float = 1.0, count: float = 1.0
    ) -> Term:
        """Return the term of an operand of the node, which ``change`` maps to the node's value."""
        share = self.share
        return Term(
            (*self.path, operand),
            lambda value: share(change(value)),
            (*self.factors, (*self.factors[-1], *([factor] if abs(factor) != 1.0 else []))),
            (*self.counts, self.counts[-1] * count),
        )


@dataclass(frozen=True)
class Terms:
    """The terms of one side's loss whose columns are not multiples of each other.

    Attributes:
        sheet: the formula of the loss.
        groups: the terms; several together have one column.
        columns: for each group, the share of the loss and of its slopes.
        has_zeros: True if a further term is zero, such as one whose mask lets nothing through.
    """

    sheet: FormulaView
    groups: tuple[tuple[Term, ...], ...]
    columns: np.ndarray
    has_zeros: bool = False

    def inside(self, places: Sequence[int]) -> list[Term]:
        """Return the terms of some groups."""
        return [term for k in places for term in self.groups[k]]


@dataclass(frozen=True)
class Weighing:
    """How one side's loss follows from the terms of the other's.

    Attributes:
        ratios: for each group, how many times as much it counts; 1 if it counts the same.
        row: the loss and its slopes, from these ratios.
    """

    ratios: tuple[float, ...]
    row: np.ndarray


def terms_of(sheet: FormulaView, loss: int, leaves: Collection[int], scalar: bool) -> list[Term]:
    """Return the terms of a loss; too many are not divided.

    Args:
        sheet: the formula.
        loss: the node of the loss.
        leaves: the nodes of the model's outputs; what does not depend on them is not divided.
        scalar: True to divide sums of scalars only, False to divide sums of tensors below linear reductions, too.
    """
    depending = sheet.formula.below(leaves)
    terms: list[Term] = []
    waiting = [Term((loss,), lambda value: value)]
    while waiting:
        term = waiting.pop(0)
        parts = [*_parts(sheet, term, depending)] if term.node in depending else []
        if scalar and len(parts) > 1 and sheet.shape(term.node) != ():
            parts = []
        if not parts or len(waiting) + len(terms) + len(parts) > _MOST:
            terms.append(term)
        else:
            waiting += parts
    return terms


def _parts(sheet: FormulaView, term: Term, depending: Collection[int]) -> Iterator[Term]:
    """Yield the terms of the operands of a linear operation."""
    node, shape = sheet.nodes[term.node], sheet.shape(term.node)
    operation, how = node.operation, node.how
    if operation in ("add", "sub"):
        for place, operand in enumerate(node.given):
            sign = -1.0 if operation == "sub" and place else 1.0
            yield term.of_operand(operand, lambda value, sign=sign: np.broadcast_to(sign * value, shape), sign)  # type: ignore[misc]
    elif operation == "neg":
        yield term.of_operand(node.given[0], np.negative, -1.0)
    elif operation in ("mul", "div"):
        for operand, other in (node.given, node.given[::-1]):
            factor = sheet.formula.values[other]
            if other in depending or factor.size != 1 or (operation == "div" and other == node.given[0]):
                continue
            number = float(factor.reshape(())) if operation == "mul" else 1.0 / float(factor.reshape(()) or np.inf)
            # What is counted (a mask's sum) is no weight.
            counted = not sheet.is_number(other) and operation == "div"
            yield term.of_operand(
                operand,
                lambda value, number=number: np.asarray(value * number).reshape(shape),  # type: ignore[misc]
                1.0 if counted else number,
                1.0 / number if counted and number else 1.0,
            )
            break
    elif operation == "reduced" and how["by"] in ("sum", "mean"):
        count = _reduced(sheet, term.node)[1]
        yield term.of_operand(
            node.given[0],
            lambda value: np.asarray(OPERATIONS["reduced"](value, **how)),
            count=count if how["by"] == "mean" else 1.0,
        )
    elif operation in _REARRANGING and sheet.is_float(node.given[0]):
        yield term.of_operand(node.given[0], lambda value: np.asarray(OPERATIONS[operation](value, **how)))


def merged(sheet: FormulaView, terms: Sequence[Term], columns: np.ndarray) -> Terms | None:
    """Return terms with one column for those that are multiples of each other; `None` if not distinguishable."""
    groups: list[list[Term]] = []
    together: list[np.ndarray] = []
    for term, column in zip(terms, columns.T):
        if not column.any():
            continue
        for k, other in enumerate(together):
            if multiple_of(column, other):
                groups[k].append(term)
                together[k] = other + column
                break
        else:
            groups.append([term])
            together.append(column)
    sizes = [np.linalg.norm(column) for column in together]
    if not groups or min(sizes) < 1e-9 * max(sizes):
        return None  # terms that cancel each other
    matrix = np.stack(together, 1)
    singular = np.linalg.svd(matrix / np.linalg.norm(matrix, axis=0), compute_uv=False)
    if len(groups) > len(matrix) // 2 or singular[-1] < _DISTINCT:
        return None
    has_zeros = any(not sheet.formula.values[term.node].any() for term in terms)
    return Terms(sheet, tuple(map(tuple, groups)), matrix, has_zeros)


def multiple_of(column: np.ndarray, other: np.ndarray) -> float | None:
    """Return how many times another column a column is; `None` if it is no multiple."""
    square = float(other @ other)
    ratio = float(column @ other) / square if square else 0.0
    return ratio if np.linalg.norm(column - ratio * other) <= _MULTIPLE * np.linalg.norm(column) else None


def weighed(terms: Terms, row: np.ndarray, noise: float) -> Weighing | None:
    """Return how often each term counts in another loss; `None` if that does not follow from the terms.

    Args:
        terms: the terms of one side.
        row: the loss and its slopes of the other side.
        noise: the rounding error of an element of the row.
    """
    sizes = np.linalg.norm(terms.columns, axis=0)
    unit = terms.columns / sizes
    solution = np.linalg.lstsq(unit, row, rcond=None)[0]
    if np.linalg.norm(unit @ solution - row) > 3 * noise * math.sqrt(row.size):
        return None
    smallest = np.linalg.svd(unit, compute_uv=False)[-1]
    errors = noise * math.sqrt(row.size) / (smallest * sizes)
    if (errors > 0.03).any():
        return None  # a term too small for its weight to be seen
    ratios = solution / sizes
    ratios = np.where(np.abs(ratios - 1) <= np.maximum(3 * errors, 1e-4), 1.0, ratios)
    ratios = np.where(np.abs(ratios) <= np.maximum(3 * errors, _NOTHING), 0.0, ratios)
    return Weighing(tuple(map(float, ratios)), terms.columns @ ratios)


def _counts(sheet: FormulaView, value: np.ndarray) -> bool:
    """Return True if a formula computes a value, and its end depends on that."""
    nodes, end = sheet.equal(value), sheet.formula.values[sheet.formula.end]
    shape = sheet.shape(nodes[0]) if nodes else ()
    changed = sheet.formula.changed({nodes[0]: lambda get, values: value.reshape(shape) * 2.0}) if nodes else None
    return changed is not None and not np.array_equal(changed, end)


def _weighs_nothing(sheet: FormulaView, value: np.ndarray) -> bool:
    """Return True if a formula computes a value, and multiplies it by a zero of the code."""
    products = (sheet.nodes[user].given for node in sheet.equal(value) for user in sheet.users(node))
    return any(
        sheet.is_number(each) and not sheet.formula.values[each].any() for operands in products for each in operands
    )


def described(
    own: Terms, other: Terms | None, sheet: FormulaView | None, weighing: Weighing, surplus: bool
) -> tuple[str, str, Both[Frame | None], Both[Any] | None] | None:
    """Return the kind and the text of a difference in weights, the lines of the reference's and the candidate's code,
    and the reductions or the weights of both; `None` if there is no such difference, or it has several forms.

    Args:
        own: the terms that explain the other side's loss.
        other: the terms of the other side; `None` if unknown.
        sheet: the formula of the other side; `None` if unknown.
        weighing: how often each term counts in the other's loss.
        surplus: True if the terms are the candidate's.
    """
    ratios = weighing.ratios
    changed = sorted({ratio for ratio in ratios if ratio != 1.0}, key=abs)
    changed = [
        ratio for k, ratio in enumerate(changed) if not k or not math.isclose(ratio, changed[k - 1], rel_tol=_SAME)
    ]
    if not changed or len(changed) > 2:
        return None
    texts, kinds, weights = [], [], []
    amounts: Both[Any] = Both(0.0, 0.0)
    for ratio in changed:
        places = [k for k, each in enumerate(ratios) if math.isclose(each, ratio, rel_tol=_SAME, abs_tol=1e-12)]
        if not ratio:
            uncounted = _uncounted(own, other, sheet, places, surplus)
            if uncounted is None:
                return None
            kind, text, zeros = uncounted
            texts.append(text)
            kinds.append(kind)
            if zeros is not None:
                amounts = zeros
                weights.append(amounts)
            continue
        if any(np.count_nonzero(own.columns[:, k]) < 2 for k in places):
            return None  # of terms without slopes only the sum is known
        whole = len(places) == len(ratios)
        kind, text, amounts = _counted(own, other, places, ratio, surplus)
        if not kind:
            return None
        if whole and kind != "reduction":
            return None  # a scale of the whole loss is an effect of many causes
        if not changed[0] and len(changed) == 2 and len(places) == len(ratios) - 1:
            text = f"what remains counts {_times(1 / ratio if surplus else ratio)} as much"
        term = "the loss" if whole else f"a term of the loss ({names_of(own, places)})"
        texts.append(text.replace("{term}", term))
        kinds.append(kind)
        weights.append(amounts)
    places = [k for k, each in enumerate(ratios) if each != 1.0]
    partner = None if other is None else _partner(own, other, places)
    differing = amounts if kinds[0] == "reduction" and amounts.reference and len(texts) == 1 else None
    if {*kinds} == {"loss_term_weight"} and all(map(any, weights)):
        differing = Both(*zip(*weights))
    own_weight, other_weight = amounts.swapped(surplus) if kinds[0] != "reduction" else (0.0, 0.0)
    line = _line(own, places, kinds[0], own_weight)
    other_line = None if sheet is None else sheet.line(sheet.last)
    if other is not None and partner is not None:
        other_line = _line(other, partner, kinds[0], other_weight) or other_line
        inner = _inner_reduction(own, places, other, partner) if kinds == ["reduction"] else None
        if inner is not None:
            views = Both((own.sheet, inner[0]), (other.sheet, inner[1])).swapped(surplus)
            lines = views.map(lambda side: side[0].line(side[1]))
            return kinds[0], _inner_text(*views), lines, None
    return kinds[0], "; ".join(texts), Both(line, other_line).swapped(surplus), differing


def _uncounted(
    own: Terms, other: Terms | None, sheet: FormulaView | None, places: Sequence[int], surplus: bool
) -> tuple[str, str, Both[Any] | None] | None:
    """Return the kind and the text of terms that count nothing in the other side's loss, and their weights if one is 0;
    `None` if the other side adds them with a weight too small to be told from 0. For the arguments see `described`.
    """
    names, values = names_of(own, places), own.sheet.formula.values
    if sheet is not None and any(_counts(sheet, values[term.node]) for term in own.inside(places)):
        return None
    scales = _scales(own, places)
    if sheet is not None and scales and any(_weighs_nothing(sheet, values[node]) for node in _tops(own, places)):
        weights = Both(math.prod(scales[0].factors), 0.0).swapped(surplus)
        shown, term = weights.map(lambda each: f"{each:.4g}"), f"a term of the loss ({names})"
        text = f"the weight of {term} is {shown.candidate} for the reference's {shown.reference}"
        return "loss_term_weight", text, weights
    lacking, owner = (f"the {side}" for side in SIDES.swapped(not surplus))
    if sheet is not None and ((other is not None and other.has_zeros) or _calls_as_many(own, sheet, places)):
        # The same with itself, of a tensor without gradients, or with a mask that lets nothing through.
        text = f"{lacking} does not add {names} to its loss as {owner} does: it is given other tensors"
        return "loss_input", text, None
    text = f"{lacking} does not add {names} to its loss, {owner} does"
    return "loss_term_added" if surplus else "loss_term_missing", text, None


def _inner_reduction(own: Terms, places: Sequence[int], other: Terms, partner: Sequence[int]) -> tuple[int, int] | None:
    """Return the first of several sums and means in a row that reduces other numbers; `None` if it is the last one."""
    chains = [
        [node for node in terms.inside(at)[0].path[::-1] if terms.sheet.nodes[node].operation == "reduced"]
        for terms, at in ((own, places), (other, partner))
    ]
    if len(chains[0]) != len(chains[1]):
        return None
    apart = (pair for pair in zip(*chains) if _reduced(own.sheet, pair[0]) != _reduced(other.sheet, pair[1]))
    first = next(apart, None)
    return None if first is None or first[0] == chains[0][-1] else first


def _reduced(sheet: FormulaView, node: int) -> tuple[str, int]:
    """Return the name of a reduction, and how many numbers it takes together."""
    (operand,) = sheet.nodes[node].given
    size = sheet.formula.values[operand].size // max(1, sheet.formula.values[node].size)
    return sheet.nodes[node].how["by"], size


def _inner_text(reference: tuple[FormulaView, int], candidate: tuple[FormulaView, int]) -> str:
    (name, count), (other_name, other_count) = _reduced(*candidate), _reduced(*reference)
    where = reference[0].where(reference[1])
    if name != other_name:
        return f"the {name} for the reference's {other_name} ({where})"
    return f"{where} takes {count} numbers together for the reference's {other_count}"


def _calls_as_many(own: Terms, sheet: FormulaView, places: Sequence[int]) -> bool:
    """Return True if the other side calls the loss functions of some terms as often as these terms' side does."""
    functions = {own.sheet.function(node) for node in _tops(own, places)}
    counts = [sum(call.function in functions for call in view.graph.trace.calls) for view in (own.sheet, sheet)]
    return all(map(is_loss, functions)) and 0 < counts[0] <= counts[1]


def _line(terms: Terms, places: Sequence[int], kind: str, weight: float) -> Frame | None:
    """Return the line of the call that makes a number of some terms, of the division of that number, or of the product
    with a weight.
    """
    top, sheet = _tops(terms, places)[0], terms.sheet
    for node in terms.inside(places)[0].path:
        operands = sheet.nodes[node].given if sheet.nodes[node].operation == "mul" else ()
        numbers = [sheet.formula.values[each] for each in operands if sheet.is_number(each)]
        if any(number.size == 1 and math.isclose(abs(number.item()), weight, rel_tol=1e-6) for number in numbers):
            return sheet.line(node)
    dividing = [k for k in sorted(sheet.below(top, 1)) if sheet.nodes[k].operation == "div" and kind == "reduction"]
    return sheet.line(next(iter(dividing), top))


def _times(ratio: float) -> str:
    return f"{ratio:.4g} times"


def names_of(terms: Terms, places: Sequence[int]) -> str:
    """Return the calls that give some terms, as text."""
    return " and ".join(dict.fromkeys(terms.sheet.where(node) for node in _tops(terms, places)[:3]))


def _tops(terms: Terms, places: Sequence[int]) -> list[int]:
    """Return the nodes that have exactly some terms between them, as near to the loss as calls that make a number."""
    outside = terms.inside([k for k in range(len(terms.groups)) if k not in places])
    others = {node for term in outside for node in term.path}
    tops: list[int] = []
    for term in terms.inside(places):
        own = [node for node in term.path if node not in others] or [term.node]
        # A product with a number says less than what it multiplies.
        telling = [node for node in own if terms.sheet.nodes[node].operation not in ("add", "sub", "mul", "div", "neg")]
        tops.append(next(iter(telling or own)))
    return [*dict.fromkeys(tops)]


@dataclass(frozen=True)
class _Scale:
    """Numbers that multiply and divide some terms.

    Attributes:
        factors: the numbers, without their signs.
        count: the product of the counts that means divide by.
        shape: the shape of what they apply to.
    """

    factors: tuple[float, ...]
    count: float
    shape: tuple[int, ...]

    @property
    def divisor(self) -> float:
        return self.count / math.prod(self.factors)

    def is_like(self, partner: _Scale) -> bool:
        """Return True if another scale has the same numbers."""
        scales = [[each.count, *sorted(each.factors)] for each in (self, partner)]
        return len(self.factors) == len(partner.factors) and all(
            math.isclose(*pair, rel_tol=1e-6) for pair in zip(*scales)
        )

    def factor_without(self, other: _Scale) -> float:
        """Return the product of the numbers that another scale does not have."""
        left, theirs = [], [*other.factors]
        for factor in self.factors:
            same = next((each for each in theirs if math.isclose(each, factor, rel_tol=1e-6)), None)
            if same is None:
                left.append(factor)
            else:
                theirs.remove(same)
        return math.prod(left)

    def counted_as(self, other: _Scale) -> _Scale:
        """Return the scale with a number that does what the other scale's means do as their count."""
        share = self.count / other.count
        number = next((f for f in self.factors if share < 1 and math.isclose(f, share, rel_tol=1e-6)), None)
        if number is None:
            return self
        factors = [*self.factors]
        factors.remove(number)
        return _Scale(tuple(factors), other.count, self.shape)

    def divisor_text(self, divisor: float) -> str:
        """Return a divisor as text: all places, the samples of the batch, or the number."""
        size = math.prod(self.shape)
        if size > 1 and math.isclose(divisor, size):
            return f"all {size} places"
        if len(self.shape) > 1 and math.isclose(divisor, self.shape[0]):
            return f"the {self.shape[0]} samples of the batch"
        return f"{divisor:.6g}"


def _scales(terms: Terms, places: Sequence[int]) -> list[_Scale]:
    """Return the scales of some terms, from the call that makes a number of them to what it is computed from."""
    inside = terms.inside(places)
    shared = [node for node in inside[0].path if all(node in term.path for term in inside)]
    tops = _tops(terms, places)
    first = next((k for k, node in enumerate(shared) if node in tops), len(shared) - 1)
    shape = next((shape for node in shared[::-1] if (shape := terms.sheet.shape(node))), ())
    # Terms with no call in common have no common scale.
    alone = len(terms.groups) == len(places)
    return [
        _Scale(tuple(map(abs, inside[0].factors[k])), inside[0].counts[k], shape)
        for k in range(first, len(shared))
        if alone or k or len(inside) == 1
    ]


def _counted(
    terms: Terms, other: Terms | None, places: Sequence[int], ratio: float, surplus: bool
) -> tuple[str, str, Both[Any]]:
    """Return the kind and the text of terms that count more or less, and their weights, zeros if not known, or their
    reductions; no kind if both sides have the same numbers, so that a function differs.
    """
    unknown: Both[Any] = Both(0.0, 0.0)
    scales = _scales(terms, places)
    partner = None if other is None else _partner(terms, other, places)
    if other is not None and partner is not None:
        others = _scales(other, partner)
        if ratio > 0 and scales and others and scales[-1].is_like(others[-1]):
            return "", "", unknown
        pairs = [(own, theirs) for own in scales for theirs in others]
        fitting = (pair for pair in pairs if math.isclose(pair[0].divisor / pair[1].divisor, abs(ratio), rel_tol=_SAME))
        pair = next(fitting, None)
        if pair is not None:
            reference, candidate = pair[::-1] if surplus else pair
            reference, candidate = reference.counted_as(candidate), candidate.counted_as(reference)
            sign = ", and its sign is flipped" if ratio < 0 else ""
            weights = candidate.factor_without(reference), reference.factor_without(candidate)
            if math.isclose(reference.count, candidate.count, rel_tol=1e-9):
                if weights[0] == weights[1]:
                    return "loss_term_weight", "the sign of {term} is flipped", unknown
                text = f"the weight of {{term}} is {weights[0]:.4g} for the reference's {weights[1]:.4g}"
                return "loss_term_weight", text + sign, Both(weights[1], weights[0])
            divisors = candidate.count / weights[0], reference.count / weights[1]
            ends = candidate.divisor_text(divisors[0]), reference.divisor_text(divisors[1])
            # A mean divides by the number of all places, not by another one such as that of the labels which count.
            values = Both("mean", "sum") if any(each.startswith("all ") for each in ends) else unknown
            if divisors[0] == 1.0:
                text = f"{{term}} is the sum for the mean: it is not divided by {ends[1]}"
            elif divisors[1] == 1.0:
                text, values = f"{{term}} is the mean for the sum: it is divided by {ends[0]}", values.swapped()
            else:
                text = f"{{term}} is divided by {ends[0]}, in the reference by {ends[1]}"
                values = Both(divisors[1], divisors[0])
            return "reduction", text + sign, unknown if sign else values
    times = 1 / ratio if surplus else ratio
    if times < 0:
        how = "with the other sign" if math.isclose(times, -1.0, rel_tol=_SAME) else _times(times)
        return "loss_term_weight", f"{{term}} counts {how}", unknown
    if scales and scales[0].factors and not surplus:
        weight = math.prod(scales[0].factors)
        text = f"the weight of {{term}} is {weight * times:.4g} for the reference's {weight:.4g}"
        return "loss_term_weight", text, Both(weight, weight * times)
    return "loss_term_weight", f"{{term}} counts {_times(times)} as much as in the reference", unknown


def _partner(terms: Terms, other: Terms, places: Sequence[int]) -> list[int] | None:
    """Return the other side's terms that are multiples of some terms; `None` if there are none."""
    column = terms.columns[:, list(places)].sum(1)
    partners = []
    for k, theirs in enumerate(other.columns.T):
        if multiple_of(theirs, column) is not None:
            return [k]
        if any(multiple_of(theirs, terms.columns[:, place]) is not None for place in places):
            partners.append(k)
    together = other.columns[:, partners].sum(1)
    return partners if partners and multiple_of(together, column) is not None else None


#: The most values of formulas with moved leaves that are cached: 64 MB of float64.
_KEPT = 8_000_000


@dataclass(frozen=True)
class Leaf:
    """An output of the model in the formula of a loss.

    Attributes:
        node: the node of the output.
        directions: the directions of the output along which slopes are computed.
    """

    node: int
    directions: Sequence[np.ndarray]


class Sloped(Formula):
    """A formula whose end is a row of numbers: the loss, if it was recorded, and its slopes.

    Args:
        formula: the formula of the loss.
        leaves: the outputs of the model, all with the same number of directions.
        value: the node of the recorded loss; `None` if it was not recorded.
        few: the number of slopes at the end; `row` computes any number of slopes.
        scales: the divisors of the loss and of the slopes.
    """

    def __init__(
        self, formula: Formula, leaves: Sequence[Leaf], value: int | None, few: int, scales: tuple[float, float]
    ) -> None:
        super().__init__()
        self._formula = formula
        self.nodes, self.values = [*formula.nodes], [*formula.values]
        self.loss, self.leaves, self.value = formula.end, leaves, value
        self._scales, self.few = scales, few
        #: What is added to the slopes: the gradients that come through code which the formula does not know.
        self._unknown = np.zeros(0)
        self._detached = [k for k, node in enumerate(self.nodes) if node.operation == "detach"]
        size = sum(value.size for value in self.values)
        self._keeps = 2 * size * max((len(leaf.directions) for leaf in leaves), default=0) <= _KEPT
        #: By direction and sign, a function that returns node values with moved leaves and no other changes.
        self._moved: dict[tuple[int, float], Get] = {}
        self.nodes.append(Node("slopes", (self.loss,)))
        self.values.append(np.zeros(0))
        self.end = len(self.nodes) - 1
        row = self.row({}, few)
        self.values[self.end] = np.zeros(0) if row is None else row

    def complete(self, recorded: np.ndarray, count: int) -> None:
        """Add to all slopes what the recorded ones have beside them: gradients through code that is not in the formula.

        Args:
            recorded: the loss, if it was recorded, and the slopes.
            count: the number of slopes.
        """
        row = self.row({}, count)
        if row is not None:
            self._unknown = (recorded - row)[-count:]
            self.values[self.end] = recorded[: len(recorded) - count + self.few]

    def with_leaves(self, leaves: Sequence[Leaf]) -> Sloped:
        """Return the formula with slopes along other leaves, in the units of the loss."""
        return Sloped(self._formula, leaves, None, 0, (1.0, 1.0))

    def along(self, leaves: Sequence[Leaf]) -> Sloped:
        """Return the formula with slopes along other leaves, in the same units."""
        return Sloped(self._formula, leaves, self.value, self.few, self._scales)

    def row(self, changes: Mapping[int, Change], count: int) -> np.ndarray | None:
        """Return the loss and some slopes, with changes to some nodes; `None` if they can't be computed.

        Args:
            changes: the changes, by node.
            count: the number of slopes.
        """
        numbers: list[float] = []
        if self.value is not None:
            value = super().changed(changes, self.value)
            if value is None or value.size != 1:
                return None
            numbers.append(float(value.reshape(())) / self._scales[0])
        changes = {**self._held(changes), **changes}
        for k in range(count):
            ends = []
            for sign in (1.0, -1.0):
                end = self._end(changes, k, sign)
                if end is None or end.size != 1:
                    return None
                ends.append(float(end.reshape(())))
            unknown = float(self._unknown[k]) if self._unknown.size else 0.0
            numbers.append((ends[0] - ends[1]) / 2 / self._scales[1] + unknown)
        return np.array(numbers)

    def columns(self, terms: Sequence[Term], count: int) -> np.ndarray | None:
        """Return the loss and some slopes of each term, one term a column; `None` if they can't be computed.

        Args:
            terms: the terms of the loss.
            count: the number of slopes.
        """
        try:
            with np.errstate(all="ignore"):
                rows = [[_number(term.share(self.values[term.node])) / self._scales[0] for term in terms]]
                held = self._held({})
                for k in range(count):
                    gets = [self.getter({**held, **self._steps(held, k, sign)}) for sign in (1.0, -1.0)]
                    ends = [[_number(term.share(get(term.node))) for term in terms] for get in gets]
                    rows.append([(up - down) / 2 / self._scales[1] for up, down in zip(*ends)])
        except (UnknownError, ValueError, IndexError):
            return None
        columns = np.array(rows)
        return columns if np.isfinite(columns).all() else None

    def changed(
        self, changes: Mapping[int, Change], end: int | None = None, base: Get | None = None
    ) -> np.ndarray | None:
        if end is None or end == self.end:
            return self.row(changes, self.few)
        return super().changed(changes, end, base)

    def _end(self, changes: Mapping[int, Change], k: int, sign: float) -> np.ndarray | None:
        """Return the loss with changes to some nodes and moved leaves; `None` if it can't be computed."""
        if self._keeps and all(leaf.node not in changes for leaf in self.leaves):
            # Only nodes that depend on the changes are computed again; changes usually come late in a formula.
            if (k, sign) not in self._moved:
                self._moved[k, sign] = self.getter(self._steps({}, k, sign))
            return super().changed(changes, self.loss, self._moved[k, sign])
        return super().changed({**changes, **self._steps(changes, k, sign)}, self.loss)

    def _steps(self, changes: Mapping[int, Change], k: int, sign: float) -> dict[int, Change]:
        """Return the changes of the leaves: an existing change, followed by the step along a direction."""
        return {leaf.node: _moved(changes.get(leaf.node), leaf.node, sign * leaf.directions[k]) for leaf in self.leaves}

    def _held(self, changes: Mapping[int, Change]) -> dict[int, Change]:
        """Return the changes that keep detached nodes at their values without steps."""
        if not self._detached:
            return {}
        get = self.getter(changes)
        held = {k: get(k) for k in self._detached if k not in changes}
        return {k: lambda get, own, value=value: value for k, value in held.items()}  # type: ignore[misc]


def _moved(change: Change | None, node: int, by: np.ndarray) -> Change:
    """Return a change that adds a step to a node's value, after another change of the node if there is one."""
    return lambda get, own: np.asarray((own(node) if change is None else change(get, own)) + by)


def _number(value: np.ndarray) -> float:
    """Return the only element of an array.

    Raises:
        ValueError: the array has several.
    """
    return float(value.reshape(()))
