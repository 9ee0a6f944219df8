"""The outputs of layers' calls, and the gradients that reach them."""

from __future__ import annotations

from functools import partial
from typing import Any

from padiff.frameworks.base import Framework
from padiff.frameworks.hooking import Handle, OnGradient
from padiff.recorder.calls import Call
from padiff.recorder.copying import LevelOf
from padiff.recorder.detail import FULL, NOTHING
from padiff.recorder.interrupts import Interrupts
from padiff.recorder.known import OutputSite
from padiff.recorder.left_out import Left
from padiff.recorder.plan import Draft
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.seen_tensors import SeenTensor, SeenTensors
from padiff.recorder.taken import Sampled, Taken
from padiff.system.guard import Guard, Tolerated


class Activations:
    """Records what calls give, and in backward the gradients of it.

    Args:
        records: where records go.
        levels: how much is kept of each.
        interrupts: keeps Ctrl-C in backward.
        tensors: those that were seen so far.
        guard: stops errors in backward.

    Attributes:
        interrupts, tensors, guard: likewise.
        draft: what writes down what happens, to make a plan of it; `None`: nothing does.
    """

    def __init__(
        self,
        records: RecordBuffer,
        framework: Framework,
        levels: LevelOf,
        interrupts: Interrupts,
        tensors: SeenTensors,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._records = records
        self._on_gradient, self._aside = framework.hooks.on_gradient, framework.hooks.aside
        self._levels, self.interrupts, self.tensors = levels, interrupts, tensors
        self.draft: Draft | None = None
        self._times: dict[OutputSite, int] = {}
        self._leaf_handles: list[Handle] = []
        self._closed = False

    def see_input(self, call: Call, slot: str, tensor: Any) -> None:
        """Record a tensor that the model is called with."""
        level = self._levels[call.node.path, "input"]
        if level == NOTHING:
            return
        taken = self._records.copier.take(tensor, level)
        self._records.write(call.node, "input", slot, taken, call.number, call.training)
        if not isinstance(taken, Left):
            with Tolerated():  # what is not known again is copied again
                self.tensors.of(tensor).traced = taken

    def see(self, call: Call, slot: str, tensor: Any) -> SeenTensor | None:
        """Record a tensor that a call gave, and from now on its gradient. Returns what is known of it now."""
        node, levels = call.node, self._levels
        path = node.path
        level = levels[path, "forward"]
        backward = levels[path, "backward"] != NOTHING
        if level == NOTHING and not backward:
            return None
        site = self._records.known.output(path, type(node.layer).__name__, slot, call.number, call.training)
        try:
            seen = self.tensors.of(tensor)
            if not seen.followed:
                # A tensor hook, not a module's backward hook: paddle has none, and torch's full backward hook breaks
                # before in-place layers. The hook goes with the graph, so it needs no handle - but for a leaf, a
                # parameter or an input that a layer hands on, which lives on.
                self.hook(tensor, partial(Activations._gradient, self, seen))
                seen.followed = True
        except Exception as error:
            self._records.write(node, "forward", slot, Left.because(error), call.number, call.training)
            return None
        if backward:
            seen.sites = seen.sites + site.alone if seen.sites else site.alone
        if level == NOTHING or call.recomputed:
            return seen
        taken = seen.full if level == FULL else seen.sketched
        if taken is None:
            taken = self._records.copier.take(tensor, level)
            if level == FULL:
                seen.full = taken
            else:
                seen.sketched = taken
        if isinstance(taken, Sampled):
            site.forward = self._records.write_sample(site.forward, site, "forward", taken)
        else:
            self._records.write(node, "forward", slot, taken, call.number, call.training)
        return seen

    def hook(self, tensor: Any, gradient: OnGradient) -> None:
        """Put a hook on the gradient of a tensor, if it has any."""
        handle = self._on_gradient(tensor, gradient)
        if handle is not None and tensor.is_leaf:
            self._leaf_handles.append(handle)

    def again(self, site: OutputSite) -> None:
        """The gradient of a tensor that is recorded there was recorded already."""
        self._times[site] = self._times.get(site, 0) + 1

    def _gradient(self, seen: SeenTensor, gradient: Any) -> None:
        if self.guard.tripped:
            return
        try:
            with self._aside():
                self.see_gradient(seen, gradient)
        except KeyboardInterrupt:
            self.interrupts.keep()
        except Exception as error:
            self.guard.catch(error)

    def see_gradient(self, seen: SeenTensor, gradient: Any) -> None:
        """Record the gradient of a tensor."""
        if self._closed or gradient is None:
            return
        first = len(self._records) if self.draft is not None else 0
        copies: dict[str, Taken | Left] = {}
        records, times = self._records, self._times
        for site in seen.sites:
            level = self._levels[site.path, "backward"]
            taken = copies.get(level)
            if taken is None:
                taken = copies[level] = records.copier.take(gradient, level)
            again = times.get(site, 0)
            times[site] = again + 1
            if isinstance(taken, Sampled) and not again:
                site.backward = records.write_sample(site.backward, site, "backward", taken)
                continue
            # A second backward through the same graph is a quantity of its own.
            name = f"{site.slot}@{again}" if again else site.slot
            records.write_at(site.path, site.kind, "backward", name, taken, site.call, site.training)
        if self.draft is not None:
            self.draft.gradient(seen, [*copies.values()], first)

    def detach(self) -> None:
        """Take the hooks off that would outlive the graph."""
        while self._leaf_handles:
            self._leaf_handles[-1].remove()
            self._leaf_handles.pop()

    def close(self) -> None:
        """The step is over: from now on nothing is recorded."""
        self.detach()
        self._closed = True
