"""Bound what rows that chose otherwise can change: the tensors that a choice reaches, and by how much."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.choices import Flips, Swaps, reached
from padiff.frameworks.catalog import LOOKING
from padiff.records import LOOP, Operand, Trace

# Error of a table, relative to the distance of its rows, up to which it has no rows to tell apart.
_LEAST_SPREAD = 1e-4
# Functions that take rows at places, and those that join places, or count them from another one on.
_TAKING = frozenset({"gather", "take_along_axis", "index_select", "getitem", "embedding"})
_JOINING = frozenset({"cat", "stack", "add"})
#: Layer, call, and slot of a tensor.
Site = tuple[str, int, str]


@dataclass(frozen=True)
class Unreached:
    """What no choice of a step changes.

    Attributes:
        outputs: outputs of layers.
        gradients: outputs of layers whose gradients no choice changes.
        layers: paths of the layers of whose parameters no choice changes a gradient.
        losses: True if no choice changes a loss.
    """

    outputs: frozenset[Site] = frozenset()
    gradients: frozenset[Site] = frozenset()
    layers: frozenset[str] = frozenset()
    losses: bool = False


def unreached(trace: Trace | None, flips: Sequence[Flips], agreeing: Collection[Site] = ()) -> Unreached:
    """Return what does not depend on calls which chose otherwise.

    A choice is handed on by tensors that differ. Backward, it changes the gradients of what the code makes of the
    chosen rows, and of all that these are computed from.

    Args:
        trace: a trace with calls of functions, of this step or an earlier one; `None` if there is none.
        agreeing: outputs of layers that agree in each row.
    """
    if trace is None or not flips:
        return Unreached()
    names = {each.calls.reference.full_name for each in flips}
    positions = {k for k, call in enumerate(trace.calls) if call.function and call.full_name in names}
    choosing = {k for k in positions if trace.calls[k].chooses}
    if {each.calls.reference.full_name for each in flips if each.calls.reference.chooses} != {
        trace.calls[k].full_name for k in choosing
    }:
        return Unreached()
    after = reached(trace, choosing, jumps=True, ends=_ends(trace, agreeing))
    outputs = frozenset(site for site, tensor in _outputs(trace) if tensor not in after)
    if {trace.calls[k].full_name for k in positions} != names:
        return Unreached(outputs)
    before = _gradients_changed(trace, after, positions)
    changed = {
        call.layer
        for call in trace.calls
        if not call.function and (_tensors(call.outputs) & before or _tensors(call.inputs) & after)
    }
    return Unreached(
        outputs,
        frozenset(site for site, tensor in _outputs(trace) if tensor not in before | after),
        frozenset(call.layer for call in trace.calls if not call.function and call.layer not in changed),
        not any(call.layer == LOOP and _tensors(call.inputs) & after for call in trace.calls),
    )


def _ends(trace: Trace, agreeing: Collection[Site]) -> set[int]:
    """Return the tensors of outputs that agree; none that several functions write, as what they held is not known."""
    written = Counter(tensor for call in trace.calls if call.function for tensor in _tensors(call.outputs))
    return {tensor for site, tensor in _outputs(trace) if site in agreeing and written[tensor] < 2}


def _gradients_changed(trace: Trace, after: set[int], positions: Collection[int]) -> set[int]:
    """Return the tensors whose gradients a choice changes.

    Args:
        after: the tensors that it changes.
        positions: the positions of the calls that chose otherwise.
    """
    before: set[int] = set()
    for position in reversed(range(len(trace.calls))):
        call, inputs = trace.calls[position], _tensors(trace.calls[position].inputs)
        if position in positions or inputs & after or _tensors(call.outputs) & before:
            before |= inputs
    return before


def _outputs(trace: Trace) -> Iterator[tuple[Site, int]]:
    for call in trace.calls:
        if not call.function:
            yield from (((call.layer, call.call, operand.slot), operand.tensor) for operand in call.outputs)


def _tensors(operands: Sequence[Operand]) -> set[int]:
    return {operand.tensor for operand in operands}


def effect_of(flips: Flips, trace: Trace, traced: Trace | None) -> float:
    """Return the largest distance of what was chosen otherwise, relative to that of any two rows; 1 if not known.

    Tensors with a row for each place show what the places hold.

    Args:
        trace: the reference's trace of the step.
        traced: a trace with calls of functions, of this step or an earlier one; `None` if there is none.
    """
    swaps, effect, name = flips.swaps, None, flips.calls.reference.full_name
    if swaps is None or not len(swaps.rows) or traced is None:
        return 1.0
    positions = [k for k, call in enumerate(traced.calls) if call.chooses and call.full_name == name]
    if not positions or not all(_only_takes(traced, position) for position in positions):
        return 1.0
    for tensor in trace.tensors:
        source, count = tensor.source, math.prod(tensor.shape)
        if (
            source is None
            or source.sketched
            or count < 2 * swaps.width
            or not tensor.dtype.startswith(("float", "bfloat"))
        ):
            continue
        for lead, starts in _tables(swaps, tensor.shape):
            table = source.read().reshape(lead, -1).astype(np.float64)
            spread = math.sqrt(float(((table - table.mean(axis=0)) ** 2).sum()) / lead)
            if not spread > _LEAST_SPREAD * math.sqrt(float((table**2).sum()) / lead):
                continue
            reference, candidate = (table[starts + places] for places in swaps.places)
            apart = np.linalg.norm(candidate - reference, axis=1)
            effect = max(effect or 0.0, float(apart.max()) / spread)
            if not effect < 1:
                return 1.0
    return 1.0 if effect is None else effect


def _only_takes(trace: Trace, position: int) -> bool:
    """Return True if the code takes rows from the chosen places, and does nothing else with these.

    Rows that are added at the chosen places, or counted, change what the places hold.
    """
    integers = {number for number, traced in enumerate(trace.tensors) if traced.dtype.startswith(("int", "uint"))}
    indices, takes = _tensors(trace.calls[position].outputs) & integers, False
    for call in trace.calls[position + 1 :]:
        given = [operand.tensor in indices for operand in call.inputs]
        if not any(given):
            continue
        outputs = _tensors(call.outputs)
        if outputs <= integers and call.function in LOOKING | _JOINING:
            indices |= outputs
        elif call.function in _TAKING and not given[0]:
            takes = True
        else:
            return False
    return takes


def _tables(swaps: Swaps, shape: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of rows of a tensor that has one for each place, and where those of each choosing row begin.

    The rows that choose may have places of their own, or share those of their sample, or of all.
    """
    leads = {math.prod(shape[:axes]) for axes in range(1, len(shape)) if math.prod(shape[axes:]) > 1}
    for axes in range(len(swaps.grid) + 1):
        for first in range(axes + 1):
            groups, inner = math.prod(swaps.grid[first:axes]), math.prod(swaps.grid[axes:])
            if groups * swaps.width in leads and (first == 0 or first < axes):
                yield groups * swaps.width, swaps.rows // inner % groups * swaps.width
