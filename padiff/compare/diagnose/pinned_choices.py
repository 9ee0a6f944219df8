"""Outputs behind rows that chose otherwise, computed by the reference's code from what the candidate recorded.

Rows that chose otherwise excuse differences in all that they reach. There the code still has to give the candidate's
tensors, if it gets the candidate's choices, and the outputs of layers that the candidate recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from padiff.compare.choices import Flips, by_host, jumping, reached, shape_and_axis
from padiff.compare.diagnose.computing.formula import Formula, UnknownError, computed
from padiff.compare.diagnose.computing.writer import Writer
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.drift import RELATIVE
from padiff.compare.judge.limits import SINGLE, allowed
from padiff.errors import PadiffError
from padiff.records import Both, Figure, Rule, RunInfo, Step, TracedCall
from padiff.records.step_diffs import FIGURE_NUMBERS, FIGURES, RULE_NUMBERS, StepDiffs

# Relative error up to which the code gives the reference's own tensor, and multiple of that error that is rounding.
_GIVES, _ROUNDING = 1e-4, 3.0
# Relative distance of weights that are equal: the code is computed with those of the reference.
_EQUAL = 1e-6
# Largest number of elements of a formula.
_MOST = 8_000_000


def contradicted(diffs: StepDiffs, steps: Both[Step], infos: Both[RunInfo], flips: Sequence[Flips]) -> StepDiffs:
    """Return the diffs with the first one failed that passed because rows chose otherwise, if these do not explain it.

    Args:
        diffs: the judged diffs of one rank of a step with calls of functions, in causal order.
        flips: the step's calls that chose otherwise.
    """
    places = [
        k
        for k in diffs.sites.places["forward"].tolist()
        if diffs.rows["passed"][k] and diffs.rows["rule"][k] == RULE_NUMBERS[Rule.CHOICES]
    ]
    weights = diffs.relative[diffs.sites.places["weight"]]
    if not places or not steps.reference.trace.functions or not (weights <= _EQUAL).all():
        return diffs
    pinned = _Pinned(diffs, steps, infos, flips)
    for place in places if pinned.is_traced else ():
        try:
            judged = pinned.judged(place)
        except (PadiffError, UnknownError, ValueError, IndexError, KeyError):
            continue  # values that can't be read, or computed, show nothing
        if judged is not None and judged[0] > judged[1]:
            rows = diffs.rows.copy()
            rows["passed"][place], rows["figure"][place] = False, FIGURE_NUMBERS[Figure.REL_L2]
            rows["value"][place], rows["limit"][place] = judged
            return diffs.judged(rows)
    return diffs


class _Pinned:
    """The reference's code, with the choices and the outputs of layers that the candidate recorded.

    Args:
        diffs, steps, infos, flips: see `contradicted`.
    """

    def __init__(self, diffs: StepDiffs, steps: Both[Step], infos: Both[RunInfo], flips: Sequence[Flips]) -> None:
        self._diffs, self._step, self._info = diffs, steps.reference, infos.reference
        self._graphs = steps.zip(infos).map(lambda side: Graph(side[0].trace, side[1].layers))
        trace = self._step.trace
        names = {each.calls.reference.full_name for each in flips if each.calls.reference.chooses}
        self._choosing = {k for k, call in enumerate(trace.calls) if call.chooses and call.full_name in names}
        used = {operand.tensor for call in trace.calls if call.function for operand in call.inputs}
        #: True if the trace shows all that chose otherwise, and that functions use what these calls chose.
        self.is_traced = names == {trace.calls[k].full_name for k in self._choosing} and all(
            each.calls.reference.function for each in flips
        )
        self.is_traced &= all(jumping(trace, trace.calls[k]) & used for k in self._choosing)
        #: Tensors that the choices may change.
        self._after = reached(trace, self._choosing, jumps=True)
        self._chosen = {number: values for each in flips for number, values in self._picks(each).items()}
        self._outputs = self._recorded()

    def _picks(self, flips: Flips) -> Mapping[int, np.ndarray]:
        """Return the places that the candidate chose, as the output of the reference's call; empty: not known."""
        call, swaps, trace = flips.calls.reference, flips.swaps, self._step.trace
        numbers = [k for k, each in enumerate(trace.calls) if each.chooses and each.full_name == call.full_name]
        places = [o.tensor for o in call.outputs if trace.tensors[o.tensor].dtype.startswith("int")]
        values = self._graphs.reference.values(places[0]) if len(places) == 1 else None
        if swaps is None or swaps.ranks is None or values is None or len(numbers) != 1:
            return {}
        axis, chosen = shape_and_axis(trace, call)[1], call.choice.chosen if call.choice is not None else 0
        if axis is None or flips.chosen.reference != flips.chosen.candidate:
            return {}
        kept = values.ndim == len(trace.tensors[call.inputs[0].tensor].shape)
        rows = np.moveaxis(values, axis, -1) if kept else values[..., None]
        if rows.shape[-1] != chosen or rows.size // max(chosen, 1) != flips.rows:
            return {}
        table = rows.reshape(flips.rows, chosen).copy()
        table[swaps.rows, swaps.ranks] = swaps.places.candidate
        if any(len(np.unique(table[row])) < chosen for row in np.unique(swaps.rows)):
            return {}  # all places are ranked, and not all ranks of the other side are known
        chosen_places = table.reshape(rows.shape)
        return {places[0]: np.moveaxis(chosen_places, -1, axis) if kept else chosen_places[..., 0]}

    def _recorded(self) -> dict[int, np.ndarray]:
        """Return the candidate's outputs of layers, in the reference's layout, by the reference's tensors."""
        outputs: dict[int, np.ndarray] = {}
        for place in self._diffs.sites.places["forward"].tolist():
            if not self._diffs.sites.complete[place]:
                continue
            pair = self._diffs[place].pair
            assert pair.reference is not None and pair.candidate is not None
            numbers = self._graphs.zip(Both(pair.reference, pair.candidate)).map(
                lambda side: side[0].tensor_of(side[1])
            )
            if numbers.reference is None or numbers.candidate is None or "rows" in pair.layout.steps:
                continue
            values = self._graphs.candidate.values(numbers.candidate)
            if values is not None:
                values = pair.layout.apply(values, pair.reference.shape)
                if values.shape == pair.reference.shape:
                    outputs.setdefault(numbers.reference, values)
        return outputs

    def judged(self, place: int) -> tuple[float, float] | None:
        """Return the relative error of an output against what the code gives, and its limit; `None`: not known."""
        record = self._diffs[place].pair.reference
        tensor = self._graphs.reference.tensor_of(record) if record is not None else None
        if tensor is None or FIGURES[self._diffs.rows["figure"][place]] not in RELATIVE | {Figure.OTHER_ROWS}:
            return None
        expected, recorded = self._outputs.get(tensor), self._graphs.reference.values(tensor)
        if expected is None or recorded is None or expected.dtype.kind not in "fV":
            return None
        writer = Writer(self._graphs.reference, self._step, self._info)
        formula = writer.write(tensor, {tensor}, {*self._chosen})
        if any(by_host(call) or (call.chooses and self._is_open(k, call)) for k, call in writer.calls.items()):
            return None
        rounding = _apart(formula.values[formula.end], recorded)
        values = self._with(formula, {node: number for number, node in writer.nodes.items()})
        if values is None or not rounding <= _GIVES or sum(value.size for value in values) > _MOST:
            return None
        dtype = self._diffs.sites.anchor_dtypes[place]
        return _apart(values[formula.end], expected), SINGLE * max(allowed(dtype, "forward"), _ROUNDING * rounding)

    def _is_open(self, position: int, call: TracedCall) -> bool:
        """Return True if a call of the formula may choose otherwise."""
        return position in self._choosing or bool(self._after & {operand.tensor for operand in call.inputs})

    def _with(self, formula: Formula, tensors: Mapping[int, int]) -> list[np.ndarray] | None:
        """Return the values of a formula's nodes with what the candidate recorded as leaves; `None`: not known.

        Args:
            tensors: number of the tensor of each node.
        """
        values: list[np.ndarray] = []
        for node, (item, value) in enumerate(zip(formula.nodes, formula.values)):
            number = tensors.get(node)
            if item.operation:
                with np.errstate(all="ignore"):
                    values.append(computed(item, values.__getitem__))
            elif number in self._chosen or number in self._outputs:
                values.append(
                    self._chosen[number] if number in self._chosen else self._outputs[number].astype(np.float64)
                )  # type: ignore[index]
            elif number in self._after:
                return None
            else:
                values.append(value)
        return values


def _apart(values: np.ndarray, recorded: np.ndarray) -> float:
    """Return the relative distance of computed values; infinite for those of another shape."""
    if values.shape != recorded.shape:
        return np.inf
    wide = np.asarray(recorded, np.float64)
    return float(np.linalg.norm(values - wide)) / (float(np.linalg.norm(wide)) or np.inf)
