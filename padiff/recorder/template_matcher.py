"""Fast recording of a step that repeats an earlier one: outputs and gradients by plan, and without one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from padiff.frameworks.base import Framework
from padiff.frameworks.hooking import Handle, OnGradient
from padiff.model.nested import flatten, flatten_inputs
from padiff.recorder.calls import Call, Calls
from padiff.recorder.copying import LevelOf
from padiff.recorder.failures import Interrupts
from padiff.recorder.options import FULL, NOTHING
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.step_template import ActiveMatcher, Copy, Event, Operand, StepTemplate, TemplateBuilder
from padiff.recorder.tensor_copy import OutputSite, Sampled, SeenTensor, SeenTensors, SkippedTensor, TensorCopy
from padiff.recorder.tracer import Tracer
from padiff.sketches.sketch import move
from padiff.system.guard import Guard, Tolerated, reraise_from_signal_handler


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


class _Callback:
    """Gradient hook of one of a plan's tensors; a graph that lives on holds this callback, not the rest of the step.

    Attributes:
        course: holder of the step, which is empty after the step's end.
        place: index of the tensor in the plan.
    """

    __slots__ = ("course", "place")

    def __init__(self, course: ActiveMatcher, place: int) -> None:
        self.course, self.place = course, place

    def __call__(self, gradient: Any) -> None:
        following = self.course.following
        if following is None or following.guard.tripped:
            return
        try:
            with following.aside():
                following.gradient(self.place, gradient)
        except KeyboardInterrupt:
            following.interrupts.keep()
        except Exception as error:
            following.guard.catch(error)


class TemplateMatcher:
    """Matcher of a step's events against a plan.

    Args:
        plan: the expected events.
        records, tracer, calls, activations: recorders of the step, still empty.

    Attributes:
        left: True once an unexpected event has come.
        running: stack of the running layer calls, the outermost first.
        guard, interrupts: handlers of errors and of Ctrl-C in gradient hooks.
        aside: the context in which gradients are inspected (`Hooking.aside`).
    """

    def __init__(
        self,
        plan: StepTemplate,
        framework: Framework,
        records: RecordBuffer,
        tracer: Tracer,
        calls: Calls,
        activations: Activations,
    ) -> None:
        tensors = framework.tensors
        self._type, self._is_tensor = tensors.TYPE, tensors.is_tensor
        self._version, self._address = tensors.WRITTEN, tensors.address
        self.aside = framework.hooks.aside
        self.guard, self.interrupts = activations.guard, activations.interrupts
        self._transforming, self._recomputing = framework.hooks.transforming, framework.hooks.recomputing
        self._plan, self._events = plan, plan.events
        self._records, self._tracer, self._calls, self._activations = records, tracer, calls, activations
        self.running, self._copier = calls.running, records.copier
        self._addresses = self._copier.samples.lay(plan.kinds, plan.others)
        self._row = self._copier.samples.row
        #: Number of events so far, and number of events whose records are written.
        self._at = self._written = 0
        #: By place in the plan: weak references to the tensors, and their versions. Places by ``id()`` of the tensor.
        self._alive: list[weakref.ref[Any] | None] = [None] * len(plan.history)
        self._versions = [0] * len(plan.history)
        self._places: dict[int, int] = {}
        #: By place: the state of a tensor, and the number of events that the state includes.
        self._seen: dict[int, tuple[SeenTensor, int]] = {}
        #: Places of the tensors whose gradient hook is part of their state.
        self._followed: set[int] = set()
        self._ended = self.left = False
        self._course = ActiveMatcher()
        self._course.following = self
        records.following = activations.tensors.following = self

    @property
    def whole(self) -> bool:
        """Return True if exactly the expected events have come."""
        return not self.left and self._at == len(self._events) - 1

    # -- events ----------------------------------------------------------------------------------------------

    def model_begins(self, key: int, call: Call) -> bool:
        """Handle a call of the outermost layer, after its inputs were traced; return True if the call was expected."""
        event = self._events[self._at]
        planned = event.call
        if event.key != key or planned is None or call.inputs != planned.inputs:
            return False
        if call.number != planned.number or call.training is not planned.training:
            return False
        for operand, number in zip(event.operands or (), (call.inputs or ())[1::2]):
            entry = self._tracer.numbered(number)
            if operand is None or not isinstance(entry, SeenTensor):
                continue  # the output of a layer, which the plan knows
            self._alive[operand.place], self._versions[operand.place] = entry.alive, entry.version
            self._places[id(entry.alive())] = operand.place
            self._seen[operand.place] = entry, self._at + 1
        self._at += 1
        return True

    # The next methods run for each layer and each gradient, when the training's own data has driven this code out of
    # the processor's cache: so these methods are few and long.

    def begins(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Handle a call of a layer inside of the outermost one; return True if the call was expected."""
        event = self._events[self._at]
        if event.key != key or not self.running or self._transforming() or self._recomputing():
            return False
        operands = event.operands
        if operands is not None:
            try:
                if len(args) == 1 and not kwargs and len(operands) == 1 and isinstance(args[0], self._type):
                    if not self._meets(operands[0], args[0]):
                        return False
                elif not self._all_met(event, list(flatten_inputs(layer.forward, args, kwargs, self._is_tensor))):
                    return False
            except MemoryError:
                raise
            except Exception as error:  # recording without a plan reports the error
                reraise_from_signal_handler(error)
                return False
        self.running.append(event.call)  # type: ignore[arg-type]
        self._at += 1
        return True

    def ends(self, key: int, output: Any) -> bool:
        """Handle the end of a layer's call; return True if the end and the output were expected."""
        event = self._events[self._at]
        if event.key != ~key:
            return False
        operands = event.operands
        if operands:
            try:
                if len(operands) == 1 and isinstance(output, self._type):
                    if not self._meets(operands[0], output):
                        return False
                elif not self._all_met(event, list(flatten(output, "output", self._is_tensor))):
                    return False
            except MemoryError:
                raise
            except Exception as error:  # recording without a plan reports the error
                reraise_from_signal_handler(error)
                return False
        self._at += 1
        return True

    def chose(self, entry: tuple[Any, ...]) -> None:
        """Handle a function that chose, and is traced already; all records before it are written."""
        if self._events[self._at].key == entry and not self.left:
            self._at += 1
            self._written = self._at
        else:
            self.abandon()

    def gradient(self, place: int, gradient: Any) -> None:
        """Handle the gradient of a tensor of the plan."""
        if self._ended or gradient is None:
            return
        if not self.left:
            event = self._events[self._at]
            if event.place == place and event.copy is not None and self._copied(event.copy, gradient):
                self._at += 1
                return
            self.abandon()
        if place in self._followed:
            self._activations.see_gradient(self._seen[place][0], gradient)

    def _all_met(self, event: Event, named: Sequence[tuple[str, Any]]) -> bool:
        """Check the inputs or outputs of a call; return True if they are the expected tensors."""
        operands = event.operands or ()
        if tuple([slot for slot, _ in named]) != event.slots:
            return False
        return all(self._meets(operand, tensor) for operand, (_, tensor) in zip(operands, named))

    def _meets(self, operand: Operand | None, tensor: Any) -> bool:
        """Check one input or output of a call and copy its sample; return True if it is the expected tensor."""
        if operand is None:
            return True
        place, position = operand.place, self._places.get(id(tensor))
        # Raises for a tensor without a version: the plan can't be followed, as changes of such a tensor go unnoticed.
        version = self._version(tensor)
        if position is not None:
            alive = self._alive[position]
            if version != self._versions[position] or alive is None or alive() is not tensor:
                position = None
        if position != (None if operand.fresh else place):
            return False
        if operand.copy is not None and not self._copied(operand.copy, tensor):
            return False
        if operand.follow:
            self._activations.hook(tensor, _Callback(self._course, place))
        if operand.fresh:
            self._alive[place], self._places[id(tensor)] = weakref.ref(tensor), place
            self._versions[place] = version
        return True

    def _copied(self, copy: Copy, tensor: Any) -> bool:
        """Copy the sample of a tensor; return True if the tensor has the expected dtype and shape."""
        form = copy.form
        start = 0 if form is None else self._address(tensor, form)
        if form is None or not start:
            return self._copier.fill(copy.number, tensor, copy.dtype, copy.shape)
        if form.direct:
            move(self._addresses[copy.number], start, form.nbytes)
        else:
            form.copy_sample(start, self._row(copy.number))
        return True

    # -- records ---------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the records, calls and counts of the events so far."""
        start, end, plan = self._written, self._at, self._plan
        if self.left or start == end:
            return
        self._written = end
        marks = zip(plan.marks[start], plan.marks[end])
        records, calls, numbered, counted = [slice(*each) for each in marks]
        self._records.write_all(plan.sites[records], plan.numbers[records])
        self._tracer.add(plan.calls[calls], plan.numbered[numbered])
        self._calls.count(plan.counted[counted])

    def show(self, tensor: Any, last: int = 0) -> None:
        """Update the state of a tensor in `SeenTensors`.

        Args:
            last: also update this number of the tensors that came last.
        """
        position = self._places.get(id(tensor))
        alive = None if position is None else self._alive[position]
        if position is not None and alive is not None and alive() is tensor:
            self._bring(position)
        if last:
            for place in [place for place, alive in enumerate(self._alive) if alive is not None][-last:]:
                self._bring(place)

    def abandon(self) -> None:
        """Stop following: give the recorders the state that the step would have without a plan."""
        if self.left:
            return
        self.write()
        self.left = True
        self._records.following = self._activations.tensors.following = None
        for place, history in enumerate(self._plan.history):
            if history[0][0] < self._at:
                self._bring(place)
        self._at, at = len(self._events) - 1, self._at  # the last event never comes: nothing matches from now on
        self._tracer.put_in({place: entry for place, (entry, _) in self._seen.items()})
        for number, event in enumerate(self._events[:at]):
            for before, operand in self._plan.history[event.place] if event.place >= 0 else ():
                if before < number and operand.site is not None:
                    self._activations.again(operand.site)

    def end(self) -> None:
        """End the step: gradients that come later are ignored."""
        self._ended, self._course.following = True, None
        self._records.following = self._activations.tensors.following = None

    def _bring(self, place: int) -> None:
        """Bring the state of a tensor up to the current event, and store the state in `SeenTensors`."""
        alive, at = self._alive[place], self._at
        assert alive is not None
        known = self._seen.get(place)
        entry, start = known or (self._activations.tensors.known(alive, self._versions[place]), 0)
        for number, operand in self._plan.history[place]:
            if start <= number < at:
                self._apply(operand, entry)
        self._seen[place] = entry, at
        self._activations.tensors.know(entry)

    def _apply(self, operand: Operand, entry: SeenTensor) -> None:
        copy = operand.copy
        if copy is not None:
            sample = Sampled(copy.dtype, copy.shape, self._copier.samples, copy.number)
            if operand.given:
                entry.sketched = sample
            else:
                entry.traced = sample
        if operand.site is not None:
            entry.sites = entry.sites + operand.site.alone
        if operand.follow:
            entry.followed = True
            self._followed.add(operand.place)
        if operand.number >= 0:
            entry.number = operand.number


class Planning:
    """Follower or builder of the plan of one step; neither exists before `begin`.

    Attributes:
        following: follower of the plan of the previous step; `None` if the step follows no plan.
        draft: builder of a plan for the next step; `None` if no plan is built.
    """

    def __init__(
        self, framework: Framework, records: RecordBuffer, tracer: Tracer, calls: Calls, activations: Activations
    ) -> None:
        self._framework, self._records, self._tracer = framework, records, tracer
        self._calls, self._activations = calls, activations
        self.following: TemplateMatcher | None = None
        self.draft: TemplateBuilder | None = None

    def begin(self, about: tuple[Any, ...]) -> None:
        """Follow the existing plan if it fits; else build a new one, if the last steps had the same schema.

        Args:
            about: objects that must be identical for a step to follow a plan.
        """
        records, cache = self._records, self._records.known
        if cache.plan is not None and cache.plan.fits(about) and not len(records) and not len(records.copier.samples):
            self.following = TemplateMatcher(
                cache.plan, self._framework, records, self._tracer, self._calls, self._activations
            )
        elif cache.steady:
            self.draft = self._activations.draft = TemplateBuilder(about, self._framework, records, self._tracer)

    def model_begins(self, key: int, call: Call) -> None:
        """Handle the beginning of an outermost call whose inputs are recorded."""
        if self.following is not None and not self.following.model_begins(key, call):
            self.following.abandon()
        if self.draft is not None:
            self.draft.begun(key, call, True)

    def chose(self, entry: tuple[Any, ...], start: int) -> None:
        """Handle a function that chose, and is traced; ``start`` is the number of traced tensors before it."""
        if self.following is not None:
            self.following.chose(entry)
        if self.draft is not None:
            self.draft.chose(entry, start)

    def model_ends(self, key: int, output: Any) -> bool:
        """Handle the end of a call; return True if the plan expected it, and so has its records."""
        if self.following is None or self.following.ends(key, output):
            return self.following is not None
        self.following.abandon()
        return False

    def abandon(self) -> None:
        """Stop following or building a plan for this step, after an event that plans do not support."""
        self.draft = self._activations.draft = None
        if self.following is not None:
            self.following.abandon()

    def write(self) -> None:
        """Write the pending records of the followed plan."""
        if self.following is not None:
            self.following.write()

    def settle(self) -> None:
        """Write the pending records at the end of the step; leave the plan if the step is shorter than expected."""
        if self.following is not None and not self.following.whole:
            self.following.abandon()
        self.write()

    def end(self) -> None:
        """Store the plan for the next step, and release the data of this one."""
        cache = self._records.known
        if self.following is not None:
            cache.plan = cache.plan if self.following.whole else None
            self.following.end()
        elif self.draft is not None:
            cache.plan = self.draft.plan()
        self.following = self.draft = self._activations.draft = None
