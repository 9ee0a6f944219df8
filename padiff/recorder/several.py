"""Several of the tensors that layers own, looked at together: where they lie, and what their records are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from padiff.frameworks.base import Framework
from padiff.frameworks.spreading import Held
from padiff.model.selection import Node
from padiff.recorder.gathered import Gathered, Lies, Pieces, gathered_of
from padiff.recorder.known import Known
from padiff.records.alike import Site
from padiff.records.parts import Part
from padiff.system.guard import Tolerated

#: Bytes of an element from which on updates are kept in the dtype of the parameter.
WIDE = 4
# Lists of sites that are kept in mind.
_MOST = 64


class Owner(NamedTuple):
    """A parameter or buffer, and the first layer that reaches it.

    Attributes:
        tensor: of one that is spread over processes, what this one holds, as a plain tensor.
        part: which part of the whole that is; `None`: all of it.
        held: how it is spread; `None`: it is not.
    """

    node: Node
    slot: str
    tensor: Any
    role: str
    part: Part | None = None
    held: Held | None = None


class Several:
    """Tensors that are owned, in an order.

    Args:
        keys, places: which they are, as `padiff.recorder.owned.Owned` has them.
        owners: of each, whose it is.
        transposed: of each, whether its samples are of the transposed matrix.

    Attributes:
        keys, places, transposed: likewise.
        trains: which are trainable, as of when they were last gathered; `None`: they were not yet.
    """

    def __init__(
        self,
        keys: Sequence[int],
        places: Sequence[int],
        owners: Sequence[Owner],
        transposed: Sequence[bool],
        framework: Framework,
    ) -> None:
        self.keys, self.places, self.transposed = keys, places, transposed
        self._owners, self._tensors = owners, framework.tensors
        self._given = [owner.tensor for owner in owners]
        self.trains: list[bool] | None = None
        self._memories: list[Any] = [None] * len(owners)
        self._lies: list[Lies | None] = [None] * len(owners)
        self._gathered: Gathered | None = None
        self._watch = self._tensors.watch(self._given)
        #: As long as dtypes and shapes are what they were.
        self._of_weights: list[Site] | None = None
        self._of_steps: dict[tuple[int, ...], list[Site]] = {}

    def gathered(self) -> Gathered | None:
        """Where their samples are now. `None` where that can't be said."""
        if self.trains is not None and self._watch.same():
            return self._gathered
        changed = self.trains is None
        for place, (tensor, before) in enumerate(zip(self._given, self._memories)):
            memory = self._memory(tensor)
            if memory is None or memory != before:
                self._memories[place], self._lies[place], changed = memory, self._where(place), True
        trains = self._tensors.all_trainable(self._given)
        self._watch.note(unchanged=not changed and trains == self.trains)
        self.trains = trains
        if changed:
            self._of_weights = None
            self._of_steps.clear()
            self._gathered = gathered_of(self._lies, self._tensors, self.transposed, self._given)
        return self._gathered

    def gathered_before(self) -> Gathered | None:
        """Where they were when they were last looked for."""
        return self.gathered() if self.trains is None else self._gathered

    def weight_sites(self, known: Known) -> list[Site]:
        """The sites of the weights, all of them as they are where they were last looked for (`gathered`)."""
        if self._of_weights is None:
            self._of_weights = [
                self._site(place, "weight", lies.dtype, 0, known)
                for place, lies in enumerate(self._lies)
                if lies is not None
            ]
        return self._of_weights

    def stepped_sites(self, calls: tuple[int, ...], known: Known) -> list[Site]:
        """The sites of gradients that are as their parameters, and of updates, in turn.

        Args:
            calls: of each, which of its steps within the step.
        """
        kept = self._of_steps.get(calls)
        if kept is None:
            kept = []
            for place, (lies, call) in enumerate(zip(self._lies, calls)):
                assert lies is not None
                # The difference of two neighbours in 16 bits is kept in more.
                dtype = "float32" if lies.itemsize < WIDE else lies.dtype
                kept.append(self._site(place, "grad", lies.dtype, call, known))
                kept.append(self._site(place, "update", dtype, call, known))
            if len(self._of_steps) >= _MOST:
                self._of_steps.clear()
            self._of_steps[calls] = kept
        return kept

    def _site(self, place: int, stage: str, dtype: str, call: int, known: Known) -> Site:
        (node, slot, *_), lies, transposed = self._owners[place], self._lies[place], self.transposed[place]
        assert lies is not None
        return known.site(
            Site(node.path, type(node.layer).__name__, stage, slot, dtype, lies.shape, call, True, transposed)
        )

    def _memory(self, tensor: Any) -> Any:
        with Tolerated():
            return self._tensors.memory(tensor)
        return None

    def _where(self, place: int) -> Lies | None:
        if self._owners[place].part is not None:
            return None  # where the whole's sample lies in a part, its shape does not tell
        tensors, tensor, transposed = self._tensors, self._given[place], self.transposed[place]
        with Tolerated():
            cut = tensors.cut(tensor, transposed)
            if cut is not None or not tensors.JOINS or tensors.device(tensor) == "cpu":
                return cut
            itemsize = int(tensor.element_size())
            return Pieces(tensors.dtype(tensor), tensors.shape(tensor), itemsize, tensors.pieces(tensor, transposed))
        return None
