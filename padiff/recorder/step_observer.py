"""The observer that the hooks of one due step call, and that records the step."""

from __future__ import annotations

import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from padiff.frameworks.hooking import TRANSFORMED, RegionRecorder
from padiff.frameworks.losses import LossObserver
from padiff.model.nested import flatten, flatten_inputs, numbers_of
from padiff.model.selection import Node
from padiff.recorder.calls import Call, Calls
from padiff.recorder.copying import COPYING, LevelOf
from padiff.recorder.failures import Interrupts
from padiff.recorder.layers import FixedLayers, Layers, TrackedLayers
from padiff.recorder.losses import Losses
from padiff.recorder.model_hooks import CaptureOptions, EvaluationFilter, EvaluationObserver, Hooks
from padiff.recorder.packing import Packing
from padiff.recorder.parameter_map import ParameterMapCache
from padiff.recorder.parameters import Parameters
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.template_matcher import Activations, Planning
from padiff.recorder.tensor_copy import SeenTensors
from padiff.recorder.tracer import Functions, Tracer
from padiff.system.guard import Guard, Tolerated
from padiff.system.terminal import Switches

# Number of recent outputs of models that are checked for sharing their values with an input.
_LAST = 32
#: Recent outputs of the models of all recorders of this process.
_OUTPUTS: deque[weakref.ref[Any]] = deque(maxlen=_LAST)


def add_output(tensor: Any) -> None:
    """Add an output of a model."""
    _OUTPUTS.append(weakref.ref(tensor))


def is_computed(tensor: Any, same_values: Any) -> bool:
    """Return True if an input is a result that gradients flow through, or another view of an output of a model.

    Args:
        same_values: returns True if two tensors are views of the same values.
    """
    if not tensor.is_leaf:
        return True
    outputs = (output() for output in _OUTPUTS)
    return any(output is not None and (output is tensor or same_values(tensor, output)) for output in outputs)


class StepObserver:
    """Observer of the hooks of one step, which records the step. It holds copies and weak references, never tensors.

    Args:
        number: number of the step.
        layers: the model's layers; changes of the model are followed.
        optimizers: optimizers whose gradients and updates are recorded.
        records: buffer that the records are added to.
        levels: recording level of each layer and stage.
        owned: cache of the parameters of the previous step.
        wanted: optional parts of the recording.
        guard: guard that stops errors at each hook.

    Attributes:
        hooks: hooks that call this observer.
        records: buffer that the records are added to.
        parameters: recorder of weights, gradients and updates.
        activations: recorder of the outputs of calls.
        tracer: collector of the trace.
        functions: observer of the functions that layers' code calls.
        calls: calls of layers so far.
        watched: layers whose calls are observed.
        interrupts: holder of a Ctrl-C that arrives during backward.
        packing: collector of the replay pack; `None` if the step gets no pack.
        regions: recorder of compiled regions; `None` if these are not recorded.
        losses: observer of loss functions; `None` if these are not recorded.
        settings: settings of the training that the step has shown (`padiff.records.declared`).
        stacks: Python stack of each layer call, outermost frame first, by path and number of the call; the path of a
            functional call is ``path/name()``.
        hears: True if the functions that choose are heard, and no others.
        autocast_open: True until the autocast of the model is known (`padiff.recorder.model_hooks.Observer`).
        autocast: autocast that the model was called in (`padiff.frameworks.base.Environment.autocast`); empty until it
            is known.
    """

    def __init__(
        self,
        number: int,
        layers: Layers | FixedLayers,
        optimizers: Sequence[Any],
        records: RecordBuffer,
        levels: LevelOf,
        owned: ParameterMapCache | None,
        wanted: CaptureOptions,
        guard: Guard,
    ) -> None:
        self._framework = framework = layers.framework
        self._is_tensor, self._tensor_type = framework.tensors.is_tensor, framework.tensors.TYPE
        self._transforming, self._recomputing = framework.hooks.transforming, framework.hooks.recomputing
        self._layers, self._optimizers, self._wanted = layers, optimizers, wanted
        #: Ids of the optimizers that have not stepped in this step.
        self._to_step = set(map(id, optimizers))
        self._switches = Switches.from_environment()
        self.watched = TrackedLayers(layers, wanted.functions, self._switches.skip_wrappers)
        self.settings: dict[str, Any] = {}
        self.stacks: dict[tuple[str, int], traceback.StackSummary] = {}
        self.autocast: dict[str, Any] = {}
        self.hooks, self.records = Hooks(framework, guard), records
        self.parameters = Parameters(records, layers, optimizers, levels, owned)
        self.interrupts = Interrupts(framework.hooks.RAISES_AS_IT_IS)
        before = None if wanted.prelude is None or not wanted.functions else wanted.prelude.hand_over()
        self.tensors = SeenTensors(framework) if before is None else before[0]
        self.activations = Activations(records, framework, levels, self.interrupts, self.tensors, guard)
        self.tracer = Tracer(records, framework, levels, self.tensors, wanted.functions, wanted.whole)
        #: Losses and backwards of this step that came before its tensors were known.
        self._before: list[Callable[[LossObserver], None]] = []
        if before is not None:
            _, self.tracer.waiting, events = before
            self._before = [] if self.has_layers else events
        self.calls = Calls()
        self._evaluation = EvaluationFilter(framework, self.calls, wanted.history)
        self._running = self.calls.running
        self.functions = Functions(framework, self.tracer, self._running, self.watched, guard)
        self.packing: Packing | None = None
        if wanted.packing:
            self.packing = Packing(number, framework, optimizers, records, self._running, guard)
        self.regions: RegionRecorder | None = None
        self.losses: Losses | None = None
        if wanted.losses:
            heard = None if self.packing is None else self.packing.loss
            nodes, chosen = self.watched.nodes, self.watched.chosen
            self.losses = Losses(records, framework, levels, nodes, chosen, self.tensors, self._running, heard)
        self._begun = self._backward = self.autocast_open = self.hears = False
        #: True if more than the tensors of layer calls is observed, e.g. functions or stacks.
        self._closely = True
        self._about = levels, wanted.loss_logged, self._switches.skip_wrappers
        self.planning = self.functions.planning = Planning(
            framework, records, self.tracer, self.calls, self.activations
        )

    @property
    def has_layers(self) -> bool:
        """Return False for a dictionary of layers without any, which holds tensors alone (`padiff run`)."""
        nodes = self.watched.nodes
        return len(nodes) > 1 or type(nodes[0].layer).__name__ not in ("ModuleDict", "LayerDict")

    # -- hooks on and off ---------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attach the hooks that are not attached yet."""
        self.hooks.observer = self
        self.hooks.on_layers(self.watched.nodes)
        self.hooks.on_others(self._optimizers, self._switches)
        self.functions.hook()
        packing, switches = self.packing is not None, self._switches
        traced = self.functions.attached and self.tracer.functions
        self.hears = self.functions.attached and not traced
        more = traced, packing, self._wanted.stacks, switches.path_log, switches.api_check
        self._closely = any(more)
        if self.packing is not None:
            self.packing.record_masks(self.watched.nodes)
        if self.regions is not None:
            self.regions.listen()
        elif self._wanted.functions:
            layers = [(node.path, node.layer) for node in self.watched.nodes]
            running = self._running
            self.regions = self._framework.hooks.on_regions(
                layers, lambda: running[-1].node.path if running else "", self.hooks.guard
            )
        if self._begun:
            self._hook_parameters()
        elif self.losses is not None and self.watched.chose(self.watched.nodes[0]):
            if not self.has_layers:  # no call of a layer begins the step
                self._begin()
                self.hooks.on_losses(True)
                self._catch_up()
            self.functions.enter_loop(before=True)

    def _catch_up(self) -> None:
        """Take over the losses and backwards of the step so far, from before its tensors were known."""
        self._backward = bool(self._before)
        for event in self._before:
            with Tolerated():
                event(self.hooks.loss_observer)
        self._before.clear()

    def take_over(self, before: StepObserver) -> None:
        """Reuse the attached hooks of the previous step's observer."""
        self.hooks, before.hooks = before.hooks, Hooks(self._framework, before.hooks.guard)
        self.hooks.observer = self

    def detach(self) -> None:
        """Remove every hook; may be called twice."""
        self.hooks.remove()
        if self.regions is not None:
            self.regions.remove()
        if self.packing is not None:
            self.packing.detach()
        self.functions.remove()
        self.activations.remove_leaf_hooks()
        self._running.clear()

    def end(self) -> None:
        """Stop recording at the end of the step; hooks may stay attached for the next step."""
        if self.packing is not None:
            self.packing.detach()
        self.functions.remove()
        self._running.clear()
        self.activations.close()

    def clear(self) -> None:
        """Drop the data of the step, after storing the plan for the next step."""
        self.planning.end()
        self.records.clear()
        self.tracer.clear()
        self.tensors.clear()

    def _begin(self) -> None:
        """Read the model's layers and parameters at the step's first call, as the model may have changed since the
        previous step, whose hooks are still attached.
        """
        self._begun = True
        if self._layers.refresh():
            self.records.known.plan = None
            self.watched.refresh()
            if self.losses is not None:
                self.losses.follow(self.watched.nodes, self.watched.chosen)
            self.hooks.on_layers(self.watched.nodes)
            self.parameters.follow(self._layers)
        self.parameters.stamp = self._layers.stamp
        if self.tracer.functions:
            self.tracer.know_parameters(self.watched.nodes)
        if self.packing is not None:
            self.packing.begin(self.watched.nodes)
        self._hook_parameters()
        if not self._closely:
            self.planning.begin((self.watched.nodes, *self._about))

    def _hook_parameters(self) -> None:
        if not self._optimizers:
            self.hooks.on_gradients(self.parameters.trainable())

    # -- forward and backward -----------------------------------------------------------------------------

    def before_call(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running = self._running
        if not running or self._closely or self._transforming() or self._recomputing():
            self._before_any_call(key, layer, args, kwargs)
            return
        # The fast path of nearly all calls: a layer inside of the model, with nothing but its tensors to record.
        following = self.planning.following
        if following is not None and self.autocast_open and following.begins(key, layer, args, kwargs):
            self._look_at_autocast(running[-1].node)
            return
        node = self.watched.known.get(key)
        if node is None:  # a layer that is no longer part of the model
            return
        if following is not None:
            following.abandon()
        call = self.calls.begin(node, running[0].training, False)
        if self.autocast_open:
            self._look_at_autocast(node)
        if node.path in self.watched.traced:
            call.inputs = self.tracer.inputs(node, args, kwargs)
        if self.planning.draft is not None:
            self.planning.draft.begun(key, call, False)

    def _before_any_call(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.functions.leave_loop()
        self.functions.pause()
        try:
            transforming, watched = self._transforming(), self.watched
            if not self._running and not transforming and self._evaluates(key, args, kwargs):
                return
            if not self._begun and not transforming:
                self._begin()
            node = watched.known.get(key)
            if node is None:
                return
            recomputed = self._recomputing()
            if transforming or recomputed or self._running:
                self.planning.abandon()
            self.planning.write()
            training = self._running[0].training if self._running else bool(watched.nodes[0].layer.training)
            if transforming:
                # Function transforms (vmap, grad, ...) call the layer with placeholders that have no values.
                self.calls.begin_transformed(node, training, recomputed)
                if node.path in watched.chosen:
                    self.records.left_out.add(node.path, TRANSFORMED, training, "call")
                return
            outermost = not self._running
            if outermost and training and not recomputed and not self.calls.has_trained:
                self.records.copier.refund()  # earlier calls in evaluation mode will be left out
            if self.packing is not None and not recomputed:
                self.packing.layer_begins(node, args, kwargs, training)
            learning = not outermost or recomputed or self._framework.hooks.learning()
            call = self.calls.begin(node, training, recomputed, learning)
            if self._wanted.stacks and not recomputed:
                self.stacks[node.path, call.number] = traceback.extract_stack()
            if self._switches.path_log:
                print(f"[padiff] {node.path} ({type(layer).__name__}), call {call.number}")
            if outermost and (training or not self.autocast):
                self.autocast_open = True
            if self.autocast_open:
                self._look_at_autocast(node)
            if recomputed:
                return
            if outermost:
                self._model_begins(call, layer, args, kwargs)
            if node.path in watched.traced or (outermost and node.path in watched.chosen):
                call.inputs, call.stack = self.tracer.inputs(node, args, kwargs), self.tracer.stack()
            self.planning.model_begins(key, call)
        finally:
            self.functions.resume()

    def _evaluates(self, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if an outermost call is evaluation, which is counted and not recorded."""
        node = self.watched.known.get(key)
        if node is None or self._recomputing():
            return False
        evaluates = self._evaluation.check(node, self.watched.nodes[0], args, kwargs)
        if self.losses is not None:
            self.losses.evaluating = evaluates
        if evaluates:
            EvaluationObserver(key, self.hooks)
        return evaluates

    def _model_begins(self, call: Call, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record weights, modes and inputs of the model at the beginning of the outermost call."""
        if self.losses is not None:
            # A compiled layer must call the loss functions that it was compiled with, without hooks.
            self.hooks.on_losses(not self._framework.layers.compiled(layer))
        self.parameters.snapshot()
        self.watched.note_modes(call.training, self.settings)
        for name, number in numbers_of(layer.forward, args, kwargs):
            self.settings.setdefault(f"argument.{name}", number)
        if self.watched.chose(call.node):
            computed = self.records.known.computed_inputs
            for slot, tensor in flatten_inputs(layer.forward, args, kwargs, self._is_tensor):
                self.activations.see_input(call, slot, tensor)
                with Tolerated():
                    if is_computed(tensor, self._framework.tensors.same_values) or self._is_own(tensor):
                        computed.add(f"{call.node.path}/{slot}" + (f"#{call.number}" if call.number else ""))
            if computed:
                self.settings["inputs.computed"] = ", ".join(sorted(computed))

    def _is_own(self, tensor: Any) -> bool:
        """Return True for a parameter or buffer of the model that it is given as an input: its weights are compared.

        An image that is trained, say, or the parameters of a forward that takes them as arguments.
        """
        learns, owned = self._framework.tensors.trainable(tensor), self._framework.layers.parameters
        nodes = self.watched.nodes if learns else self.watched.nodes[:1]
        return any(each is tensor for node in nodes for _, each, _ in owned(node.layer))

    def _look_at_autocast(self, node: Node) -> None:
        """Read the autocast at a call, up to the first layer that computes: trainers enter autocast inside forward."""
        self.autocast = self._framework.environment.autocast()
        self.autocast_open = node.path not in self._layers.computing

    def after_call(self, key: int, output: Any, failed: bool) -> None:
        running = self._running
        if failed or self._closely or len(running) < 2:
            self._after_any_call(key, output, failed)
            return
        node = self.watched.known.get(key)
        if node is None:
            return
        if self.planning.following is not None:
            self.planning.following.abandon()
        call = self.calls.end(node)
        if call is None or call.transformed:
            self.planning.abandon()
            return
        if not running:  # the outer calls ended in an exception
            self.planning.abandon()
            if self.watched.chose(node):
                self._model_ended(call, output)
        self._see(key, call, output)

    def _after_any_call(self, key: int, output: Any, failed: bool) -> None:
        self.functions.pause()
        ended: Call | None = None
        try:
            node = self.watched.known.get(key)
            if node is None:
                return
            if self.packing is not None and self._running and self._running[-1].node is node:
                self.packing.layer_ended()
            call = self.calls.end(node)
            if not self._running and not failed:
                self._model_ended(call, output)
                ended = call
            if failed or call is None or call.transformed or call.recomputed:
                self.planning.abandon()
            if call is not None and not failed and not call.transformed and not self.planning.model_ends(key, output):
                self._see(key, call, output)
        finally:
            self.functions.resume()
            if ended is not None and self.losses is not None and self.hooks.hears_losses:
                recorded = ended.training and not ended.recomputed and not ended.transformed
                if recorded and self.watched.chose(self.watched.nodes[0]):
                    self.functions.enter_loop()

    def _model_ended(self, call: Call | None, output: Any) -> None:
        """Record lazy parameters, and restore the hooks on losses, after the outermost call."""
        if self._layers.fresh:
            self._take_lazy()
        with Tolerated():
            for _, tensor in flatten(output, "output", self._is_tensor):
                add_output(tensor)
        if self.losses is not None and call is not None:
            self.losses.called(output)
            self.hooks.on_losses(True)

    def _see(self, key: int, call: Call, output: Any) -> None:
        """Record the outputs of a call, if the layer is chosen."""
        draft = self.planning.draft
        if not self.watched.chose(call.node):
            if draft is not None:
                draft.ended(key, call, (), len(self.records))
            return
        first = len(self.records) if draft is not None else 0
        see, logged = self.activations.see, self._wanted.loss_logged and not self._running
        if isinstance(output, self._tensor_type) and not logged:
            outputs = [("output.0", output, see(call, "output.0", output))]
        else:
            slots = flatten(output, "output", self._is_tensor)
            outputs = [
                (slot, tensor, None if logged and self._is_loss(slot, tensor) else see(call, slot, tensor))
                for slot, tensor in slots
            ]
        if call.inputs is not None:
            self.tracer.layer_ended(call, outputs)
        if draft is not None:
            draft.ended(key, call, [(slot, each) for slot, _, each in outputs], first)

    def _is_loss(self, slot: str, tensor: Any) -> bool:
        """Return True if an output of the model is its loss: a scalar that is named ``loss`` or is the first output."""
        return slot in ("output.loss", "output.0") and self._framework.tensors.shape(tensor) == ()

    def _take_lazy(self) -> None:
        """Record parameters of lazy layers, which create them in their first call."""
        if self.parameters.look_again():
            self._hook_parameters()
        if self.packing is not None:
            self.packing.look_again()

    def backward_begins(self) -> None:
        """Note the beginning of a backward; at the step's first one, check if gradients are left over."""
        self.functions.leave_loop()
        if self._backward:
            return
        self._backward = True
        with Tolerated():  # an error here must not stop the training
            if self.parameters.gradients_left():
                self.settings.setdefault("gradients.left_over", "of the step before")

    def backward_ended(self, tensor: Any) -> None:
        """Add a backward that began at this tensor to the trace."""
        if self.tracer.functions:
            self.tracer.noted("backward", tensor)
            self.functions.enter_loop(before=True)

    def after_function(self, name: str, output: Any) -> None:
        """Record the outputs of a functional call as records of the layer around it, in slots like ``softmax().0``."""
        if COPYING.now or not self._running or self._running[-1].node.path not in self.watched.chosen:
            return
        inside = self._running[-1]
        if inside.transformed:
            return
        call = self.calls.function(inside, name)
        if self._wanted.stacks and not inside.recomputed:
            self.stacks[f"{inside.node.path}/{name}()", call.number] = traceback.extract_stack()
        for slot, tensor in flatten(output, f"{name}()", self._is_tensor):
            self.activations.see(call, slot, tensor)

    def consume(self, optimizer: Any, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        self.interrupts.raise_kept()
        self.functions.leave_loop()
        if self.tracer.functions:
            self.tracer.consumed(parameters, gradients)
        if self._wanted.consuming is not None:
            self._wanted.consuming(optimizer)
        if self.packing is not None:
            self.packing.consumed(optimizer)
        self.parameters.consume(optimizer, parameters, gradients)

    def optimizer_stepped(self, optimizer: Any) -> None:
        self.parameters.stepped(optimizer)
        if self.losses is not None and self.hooks.hears_losses:
            self.losses.stepped()
            self._to_step.discard(id(optimizer))
            if self.tracer.functions and self._backward and self._to_step:  # a further loss may follow
                self.functions.enter_loop(before=True)
        if self._wanted.stepped is not None:
            self._wanted.stepped(self.parameters.steps_taken)

    def add_gradient(self, key: int, gradient: Any) -> None:
        self._evaluation.note_gradient()
        try:
            self.parameters.add(key, gradient)
        except KeyboardInterrupt:
            self.interrupts.keep()
