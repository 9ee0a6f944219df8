"""Groups of parameters and buffers that are sampled together: their memory and the sites of their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from padiff.frameworks.base import Framework
from padiff.frameworks.spreading import Held
from padiff.model.selection import Node
from padiff.recorder.gather import Gather, Lies, Pieces, gather_of
from padiff.recorder.step_cache import StepCache
from padiff.records.parts import Part
from padiff.records.step_schema import Site
from padiff.system.guard import Tolerated

#: Minimum element size, in bytes, for which updates have the dtype of the parameter; smaller ones are in float32.
WIDE = 4
# Maximum number of cached lists of sites.
_MOST = 64


class Owner(NamedTuple):
    """A parameter or buffer, and the first layer that reaches it.

    Attributes:
        node, slot: first layer that reaches the tensor, and its slot there.
        tensor: the tensor; for a distributed parameter, the local part as a plain tensor.
        role: ``"parameter"``, or another role for a buffer.
        part: part of the whole parameter that the tensor is; `None`: all of it.
        held: distribution of the parameter over processes; `None` if it is not distributed.
    """

    node: Node
    slot: str
    tensor: Any
    role: str
    part: Part | None = None
    held: Held | None = None


class ParameterBatch:
    """A sequence of parameters and buffers that are sampled together.

    Args:
        keys, places: keys and positions of the tensors in `padiff.recorder.parameter_map.ParameterMap`.
        owners: owner of each tensor.
        transposed: for each tensor, True if its samples are samples of the transposed matrix.

    Attributes:
        keys, places, transposed: the arguments.
        trains: for each tensor, True if it was trainable at the last call of `gathered`; `None` before the first call.
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
        self._gathered: Gather | None = None
        self._watch = self._tensors.watch(self._given)
        #: Cached sites, valid as long as the memory of the tensors is unchanged.
        self._of_weights: list[Site] | None = None
        self._of_steps: dict[tuple[int, ...], list[Site]] = {}

    def gathered(self) -> Gather | None:
        """Return the current memory layout of the samples, or None if the tensors cannot be sampled together."""
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
            self._gathered = gather_of(self._lies, self._tensors, self.transposed, self._given)
        return self._gathered

    def gathered_before(self) -> Gather | None:
        """Return the memory layout of the last call of `gathered`, which is called if it never was."""
        return self.gathered() if self.trains is None else self._gathered

    def weight_sites(self, known: StepCache) -> list[Site]:
        """Return the sites of the weights, with the dtypes and shapes of the last call of `gathered`."""
        if self._of_weights is None:
            self._of_weights = [
                self._site(place, "weight", lies.dtype, 0, known)
                for place, lies in enumerate(self._lies)
                if lies is not None
            ]
        return self._of_weights

    def stepped_sites(self, calls: tuple[int, ...], known: StepCache) -> list[Site]:
        """Return the sites of gradients and updates, in turn. Gradients have the dtypes and shapes of the parameters.

        Args:
            calls: for each tensor, number of the optimizer's step within the recorded step.
        """
        sites = self._of_steps.get(calls)
        if sites is None:
            sites = []
            for place, (lies, call) in enumerate(zip(self._lies, calls)):
                assert lies is not None
                # Updates of 16-bit weights are stored in float32, as the difference of neighbours would be rounded.
                dtype = "float32" if lies.itemsize < WIDE else lies.dtype
                sites.append(self._site(place, "grad", lies.dtype, call, known))
                sites.append(self._site(place, "update", dtype, call, known))
            if len(self._of_steps) >= _MOST:
                self._of_steps.clear()
            self._of_steps[calls] = sites
        return sites

    def _site(self, place: int, stage: str, dtype: str, call: int, cache: StepCache) -> Site:
        (node, slot, *_), lies, transposed = self._owners[place], self._lies[place], self.transposed[place]
        assert lies is not None
        return cache.site(
            Site(node.path, type(node.layer).__name__, stage, slot, dtype, lies.shape, call, True, transposed)
        )

    def _memory(self, tensor: Any) -> Any:
        with Tolerated():
            return self._tensors.memory(tensor)
        return None

    def _where(self, place: int) -> Lies | None:
        if self._owners[place].part is not None:
            return None  # the shape of a part does not determine which of its elements are sampled
        tensors, tensor, transposed = self._tensors, self._given[place], self.transposed[place]
        with Tolerated():
            cut = tensors.cut(tensor, transposed)
            if cut is not None or not tensors.JOINS or tensors.device(tensor) == "cpu":
                return cut
            itemsize = int(tensor.element_size())
            return Pieces(tensors.dtype(tensor), tensors.shape(tensor), itemsize, tensors.pieces(tensor, transposed))
        return None
