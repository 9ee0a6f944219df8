"""Where two runs part first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from padiff.records.aftermath import Standing
from padiff.records.both import Both
from padiff.records.cause import Cause
from padiff.records.compared import Diff, Figures, Pair, figures_text
from padiff.records.extent import Extent
from padiff.records.picture import Picture
from padiff.records.recomputed import Recomputed
from padiff.records.recorded import is_below

_NOTHING: Both[tuple[str, ...]] = Both((), ())


@dataclass(frozen=True, slots=True)
class FirstDiff:
    """Where two runs part, first in causal order: step, stage, execution order of the reference.

    Attributes:
        step, stage: where in the run.
        reference, candidate: paths of the two layers, `None` where there is no such layer.
        slot: which tensor of the layer.
        diff: what was measured there; `None` where no tensor shows it.
        cause: why; `None` where nothing speaks for a cause.
        caveat: why it may be no diff at all, as a sentence; else empty.
        statement: what is wrong where no tensor shows it.
        extent: how far it reaches; `None` where no tensor shows it.
        parameters: of what the runs declare differently, which parameters it concerns, by ``layer/slot``; empty: all.
        last_agreeing: of an output, the last layer before it whose output agrees, by the reference's path; empty where
            that is not known.
        inside: whether what goes into the layer agrees, so that the diff comes from inside of it; `None` where that is
            not known. If it does not, it comes from the code between the last layer that agrees and this one, and
            ``slot`` and ``diff`` are what goes in.
        call: which call of a function it comes from, in words; empty where that is not known.
        recomputed: whose figures agree with float64; `None` where that can't be computed.
        standing: whether it is the first diff of the run, follows from it (of a later step's report), or is a fault by
            itself.
        picture: what both tensors look like; `None` where they are not there in full.
        rank: of which process; `None` where there is one, or where what all of them share parts.
        stacks: lines of either side's code that the call comes from, ``file:line function``, the innermost first; empty
            where they were not recorded.
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

    @property
    def max_abs(self) -> float:
        """Largest ``|c - r|``; NaN where nothing was measured."""
        return self._figures.max_abs

    @property
    def max_rel(self) -> float:
        """Largest ``|c - r| / |r|``; NaN where nothing was measured."""
        return self._figures.max_rel

    @property
    def _figures(self) -> Figures:
        measured = self.diff is not None and self.diff.compared and self.diff.figures
        return measured or Figures(max_abs=math.nan, max_rel=math.nan)

    @property
    def message(self) -> str:
        """All of it in words."""
        if self.standing is Standing.NEW:
            return self._by_itself
        if self.diff is None:
            mending = f" To mend it: {self.cause.fix}" if self.cause is not None and self.cause.fix else ""
            return f"{self.statement}{mending}"
        because = f" {self.cause.text}" if self.cause is not None else ""
        caveat = f" {self.caveat}" if self.caveat else ""
        reach = f" {self.extent.text}" if self.extent is not None and self.extent.text else ""
        whose = f" {self.recomputed.text}" if self.recomputed is not None else ""
        parts = (
            "This follows from the first diff: the runs differ"
            if self.standing is Standing.FOLLOWS
            else "The runs part"
        )
        return f"{parts} at {self.place_text}.{self._place}{reach}{whose}{because}{caveat}"

    @property
    def _by_itself(self) -> str:
        """A fault that does not follow from the first one, in short."""
        because = f" {self.cause.text}" if self.cause is not None else ""
        whose = f" {self.recomputed.text}" if self.recomputed is not None else ""
        where = self.statement or f"at {self.where if self.recomputed is not None else self.place_text}"
        return f"A second fault, which does not follow from the first: {where}.{whose}{because}"

    @property
    def place_text(self) -> str:
        """Where a tensor parts, and how far."""
        return self.where if self.diff is None else f"{self.where}: {figures_text(self.diff)}"

    @property
    def where(self) -> str:
        """Where a tensor parts."""
        step = f"step {self.step}" + ("" if self.rank is None else f", rank {self.rank}")
        if self.diff is None:
            return f"{step}, stage {self.stage}"
        call = f" (call {self.diff.pair.anchor.call})" if self.diff.pair.anchor.call else ""
        return f"{step}, stage {self.stage}, {self._layers(self.diff.pair)}, {self.slot}{call}"

    @property
    def _place(self) -> str:
        """Where in the code it is, in words, as far as that is known."""
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
