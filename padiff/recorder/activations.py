"""Recording of layers' outputs and of the gradients with respect to these outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

from padiff.frameworks.base import Framework
from padiff.frameworks.hooking import Handle, OnGradient
from padiff.recorder.calls import Call
from padiff.recorder.copying import LevelOf
from padiff.recorder.detail import FULL, NOTHING
from padiff.recorder.interrupts import Interrupts
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.seen_tensors import SeenTensor, SeenTensors
from padiff.recorder.skip_log import SkippedTensor
from padiff.recorder.step_cache import OutputSite
from padiff.recorder.step_template import TemplateBuilder
from padiff.recorder.tensor_copy import Sampled, TensorCopy
from padiff.system.guard import Guard, Tolerated


class Activations:
    """Recorder of the outputs of calls, and of their gradients in backward.

    Args:
        records: buffer that receives the records.
        levels: level of detail by layer path and stage.
        interrupts: handler of Ctrl-C in backward.
        tensors: index of the step's tensors so far.
        guard: handler of errors in backward.

    Attributes:
        interrupts, tensors, guard: the arguments of the same names.
        draft: builder of a plan from the step's events, or None if no plan is being built.
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
        self.draft: TemplateBuilder | None = None
        self._times: dict[OutputSite, int] = {}
        self._leaf_handles: list[Handle] = []
        self._closed = False

    def see_input(self, call: Call, slot: str, tensor: Any) -> None:
        """Record an input tensor of the model."""
        level = self._levels[call.node.path, "input"]
        if level == NOTHING:
            return
        copy = self._records.copier.copy_at_level(tensor, level)
        self._records.write(call.node, "input", slot, copy, call.number, call.training)
        if not isinstance(copy, SkippedTensor):
            with Tolerated():  # on an error the tensor is copied again when it is met next
                self.tensors.lookup(tensor).traced = copy

    def see(self, call: Call, slot: str, tensor: Any) -> SeenTensor | None:
        """Record an output tensor of a call, and arrange that its gradient is recorded.

        Returns:
            The state of the tensor, or None if nothing of the tensor is recorded.
        """
        node, levels = call.node, self._levels
        path = node.path
        level = levels[path, "forward"]
        backward = levels[path, "backward"] != NOTHING
        if level == NOTHING and not backward:
            return None
        site = self._records.known.output(path, type(node.layer).__name__, slot, call.number, call.training)
        try:
            entry = self.tensors.lookup(tensor)
            if not entry.followed:
                # A tensor hook, not a module's backward hook: paddle has none, and torch's full backward hook breaks
                # before in-place layers. The hook is freed with the graph, so it needs no handle, except on a leaf (a
                # parameter, or an input that a layer returns), which lives on.
                self.hook(tensor, partial(Activations._gradient, self, entry))
                entry.followed = True
        except Exception as error:
            self._records.write(node, "forward", slot, SkippedTensor.because(error), call.number, call.training)
            return None
        if backward:
            entry.sites = entry.sites + site.alone if entry.sites else site.alone
        if level == NOTHING or call.recomputed:
            return entry
        copy = entry.full if level == FULL else entry.sketched
        if copy is None:
            copy = self._records.copier.copy_at_level(tensor, level)
            if level == FULL:
                entry.full = copy
            else:
                entry.sketched = copy
        if isinstance(copy, Sampled):
            site.forward = self._records.write_sample(site.forward, site, "forward", copy)
        else:
            self._records.write(node, "forward", slot, copy, call.number, call.training)
        return entry

    def hook(self, tensor: Any, gradient: OnGradient) -> None:
        """Register a hook on the gradient of a tensor, if the tensor has one."""
        handle = self._on_gradient(tensor, gradient)
        if handle is not None and tensor.is_leaf:
            self._leaf_handles.append(handle)

    def again(self, site: OutputSite) -> None:
        """Count a gradient at a site that was recorded without `see_gradient`."""
        self._times[site] = self._times.get(site, 0) + 1

    def _gradient(self, entry: SeenTensor, gradient: Any) -> None:
        if self.guard.tripped:
            return
        try:
            with self._aside():
                self.see_gradient(entry, gradient)
        except KeyboardInterrupt:
            self.interrupts.keep()
        except Exception as error:
            self.guard.catch(error)

    def see_gradient(self, seen: SeenTensor, gradient: Any) -> None:
        """Record the gradient of a tensor."""
        if self._closed or gradient is None:
            return
        first = len(self._records) if self.draft is not None else 0
        copies: dict[str, TensorCopy | SkippedTensor] = {}
        records, times = self._records, self._times
        for site in seen.sites:
            level = self._levels[site.path, "backward"]
            copy = copies.get(level)
            if copy is None:
                copy = copies[level] = records.copier.copy_at_level(gradient, level)
            repeats = times.get(site, 0)
            times[site] = repeats + 1
            if isinstance(copy, Sampled) and not repeats:
                site.backward = records.write_sample(site.backward, site, "backward", copy)
                continue
            # A second backward through the same graph is a quantity of its own.
            name = f"{site.slot}@{repeats}" if repeats else site.slot
            records.write_at(site.path, site.kind, "backward", name, copy, site.call, site.training)
        if self.draft is not None:
            self.draft.gradient(seen, [*copies.values()], first)

    def remove_leaf_hooks(self) -> None:
        """Remove the hooks that would outlive the graph: those on leaf tensors."""
        while self._leaf_handles:
            self._leaf_handles[-1].remove()
            self._leaf_handles.pop()

    def close(self) -> None:
        """End the step: gradients that come later are not recorded."""
        self.remove_leaf_hooks()
        self._closed = True
