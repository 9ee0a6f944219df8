"""The first diff of two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from padiff.records.aftermath import Standing
from padiff.records.both import Both
from padiff.records.cause import UNKNOWN_LINES, Cause
from padiff.records.compared import Diff, Figures, Pair, figures_text
from padiff.records.extent import Extent
from padiff.records.picture import Picture
from padiff.records.recomputed import Recomputed
from padiff.records.recorded import is_below
from padiff.system.frames import Frame

_NOTHING: Both[tuple[str, ...]] = Both((), ())


@dataclass(frozen=True, slots=True)
class FirstDiff:
    """The first diff of two runs in causal order: step, stage, execution order of the reference.

    Attributes:
        step, stage: position in the run.
        reference, candidate: paths of the two layers, `None` if there is no such layer.
        slot: the tensor of the layer, e.g. ``output.0``.
        diff: the measured diff; `None` if no tensor shows the fault.
        cause: the explanation; `None` if nothing indicates a cause.
        caveat: a sentence that says why this may be no diff at all; else empty.
        statement: a sentence that describes the fault if no tensor shows it.
        extent: the share of the tensor, the step and the run that differs; `None` if no tensor shows the fault.
        parameters: parameters that a difference in declared settings affects, by ``layer/slot``; empty: all.
        last_agreeing: for an output, the last layer before it whose output agrees, by the reference's path; empty if
            not known.
        inside: True if the inputs of the layer agree, so that the diff is caused inside the layer; `None` if not known.
            If False, the cause is in the code between the last layer that agrees and this one, and ``slot`` and
            ``diff`` are those of the differing input.
        call: the function call that causes the diff, in words; empty if not known.
        recomputed: agreement of either side with a computation in float64; `None` if not computable.
        standing: relation to the first diff of the run: it is the first, follows from it (in a later step's report), or
            is a separate fault.
        picture: distributions and worst elements of both tensors; `None` if they were not recorded in full.
        rank: number of the process; `None` if there is one process, or if the diff is in a tensor that all processes
            share.
        stacks: lines of each side's code that lead to the call, ``file:line function``, innermost first; empty if not
            recorded.
        tokens: the first token that differs, in words, if the tensor has a row for each token; else empty.
        code: the line of each side's code that makes the call of a function; `None` if not known.
    """

    step: int
    stage: str
    reference: str | None
    candidate: str | None
    slot: str = ""
    diff: Diff | None = None
    cause: Cause | None = None
    caveat: str = ""
    statement: str = ""
    extent: Extent | None = None
    parameters: Both[tuple[str, ...]] = _NOTHING
    last_agreeing: str = ""
    inside: bool | None = None
    call: str = ""
    recomputed: Recomputed | None = None
    standing: Standing = Standing.FIRST
    picture: Picture | None = None
    rank: int | None = None
    stacks: Both[tuple[str, ...]] = _NOTHING
    tokens: str = ""
    code: Both[Frame | None] = UNKNOWN_LINES

    @property
    def max_abs(self) -> float:
        """Return the largest ``|c - r|``; NaN if nothing was measured."""
        return self._figures.max_abs

    @property
    def max_rel(self) -> float:
        """Return the largest ``|c - r| / |r|``; NaN if nothing was measured."""
        return self._figures.max_rel

    @property
    def _figures(self) -> Figures:
        measured = self.diff is not None and self.diff.compared and self.diff.figures
        return measured or Figures(max_abs=math.nan, max_rel=math.nan)

    @property
    def message(self) -> str:
        """Return the whole description in words."""
        if self.standing is Standing.NEW:
            return self._by_itself
        if self.diff is None:
            fix = f" Fix: {self.cause.fix}" if self.cause is not None and self.cause.fix else ""
            return f"{self.statement}{fix}"
        because = f" {self.cause.text}" if self.cause is not None else ""
        caveat = f" {self.caveat}" if self.caveat else ""
        reach = f" {self.extent.text}" if self.extent is not None and self.extent.text else ""
        float64 = f" {self.recomputed.text}" if self.recomputed is not None else ""
        parts = (
            "This follows from the first diff: the runs differ"
            if self.standing is Standing.FOLLOWS
            else "The runs differ first"
        )
        return f"{parts} at {self.place_text}.{self._place}{reach}{float64}{because}{caveat}"

    @property
    def _by_itself(self) -> str:
        """Return a short description of a fault that does not follow from the first diff."""
        because = f" {self.cause.text}" if self.cause is not None else ""
        float64 = f" {self.recomputed.text}" if self.recomputed is not None else ""
        where = self.statement or f"at {self.where if self.recomputed is not None else self.place_text}"
        return f"A second fault, which does not follow from the first: {where}.{float64}{because}"

    @property
    def place_text(self) -> str:
        """Return the position of the diff and its figures, in words."""
        return self.where if self.diff is None else f"{self.where}: {figures_text(self.diff)}"

    @property
    def where(self) -> str:
        """Return the position of the diff in words: step, rank, stage, layers, slot and call."""
        step = f"step {self.step}" + ("" if self.rank is None else f", rank {self.rank}")
        if self.diff is None:
            return f"{step}, stage {self.stage}"
        call = f" (call {self.diff.pair.anchor.call})" if self.diff.pair.anchor.call else ""
        return f"{step}, stage {self.stage}, {self._layers(self.diff.pair)}, {self.slot}{call}"

    @property
    def _place(self) -> str:
        """Return a sentence that locates the diff in the code; empty if not known."""
        last, layer = self.last_agreeing, self.reference
        call = f": {self.call}" if self.call else ""
        if last and layer is not None and is_below(last, layer):
            return f" It is in the code of `{layer}` after `{last}`, the last layer that agrees{call}."
        if self.inside is None and not call:
            return ""
        if self.inside:
            return f" It is inside of this layer, as its inputs agree{call}."
        if last:
            return f" It is in the code between `{last}`, the last layer that agrees, and `{layer}`{call}."
        return f" It is in the code before `{layer}`, the first layer that is called{call}."

    def _layers(self, pair: Pair) -> str:
        names = [
            f"{path} ({record.layer_type})" if record is not None and record.layer_type else str(path or "nothing")
            for path, record in zip((self.reference, self.candidate), pair.sides)
        ]
        return f"layer {names[0]} against {names[1]}"

    def __str__(self) -> str:
        return self.message
