"""What the hooks of one due step call: what they see is written down."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from padiff.frameworks.hooking import TRANSFORMED
from padiff.model.nested import flatten, flatten_inputs
from padiff.model.selection import Node
from padiff.recorder.activations import Activations
from padiff.recorder.calls import Call, Calls
from padiff.recorder.copying import COPYING, LevelOf
from padiff.recorder.evaluation import EvaluationFilter, EvaluationObserver
from padiff.recorder.functions import Functions
from padiff.recorder.hooks import Hooks
from padiff.recorder.interrupts import Interrupts
from padiff.recorder.layers import FixedLayers, Layers
from padiff.recorder.losses import Losses
from padiff.recorder.owned import LastOwned
from padiff.recorder.packing import Packing
from padiff.recorder.parameters import Parameters
from padiff.recorder.planning import Planning
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.seen_tensors import SeenTensors
from padiff.recorder.tracer import Tracer
from padiff.recorder.wanted import Wanted
from padiff.recorder.watched import Watched
from padiff.system.guard import Guard, Tolerated
from padiff.system.switches import Switches


class StepObserver:
    """Writes down what the hooks of one step see. It keeps copies, never tensors (only weak references to them).

    Args:
        number: the step's number.
        layers: the model's layers, followed where they change.
        optimizers: those whose gradients and updates are recorded.
        records: where records go.
        levels: how much is kept of each layer's tensors at each stage.
        owned: what the layers owned, as earlier captures of the model found it.
        wanted: what else is.
        guard: stops errors at each hook.

    Attributes:
        hooks: those that call this.
        records: likewise.
        parameters: what the layers own.
        activations: what their calls give.
        tracer: what goes into them.
        functions: what their code calls.
        calls: theirs.
        watched: those whose calls are seen.
        interrupts: keeps Ctrl-C in backward.
        packing: what keeps what the step needs to be done again; `None` where nothing does.
        losses: what hears of loss functions; `None` where nothing does.
        settings: what the step showed of how the training is set (`padiff.records.settings`).
        stacks: Python stack of each layer's call, outermost frame first, by path and number of the call; a
            functional call's by ``path/name()``.
        autocast_open: whether that is still to be seen (`padiff.recorder.hooks.Observer`).
        autocast: the autocast that the model was called in (`padiff.frameworks.base.Environment.autocast`); empty
            before.
    """

    def __init__(
        self,
        number: int,
        layers: Layers | FixedLayers,
        optimizers: Sequence[Any],
        records: RecordBuffer,
        levels: LevelOf,
        owned: LastOwned | None,
        wanted: Wanted,
        guard: Guard,
    ) -> None:
        self._framework = framework = layers.framework
        self._is_tensor, self._tensor_type = framework.tensors.is_tensor, framework.tensors.TYPE
        self._transforming, self._recomputing = framework.hooks.transforming, framework.hooks.recomputing
        self._layers, self._optimizers, self._wanted = layers, optimizers, wanted
        self._switches = Switches.from_environment()
        self.watched = Watched(layers, wanted.functions, self._switches.skip_wrappers)
        self.settings: dict[str, Any] = {}
        self.stacks: dict[tuple[str, int], traceback.StackSummary] = {}
        self.autocast: dict[str, Any] = {}
        self.hooks, self.records = Hooks(framework, guard), records
        self.parameters = Parameters(records, layers, optimizers, levels, owned)
        self.interrupts = Interrupts(framework.hooks.RAISES_AS_IT_IS)
        self.tensors = SeenTensors(framework)
        self.activations = Activations(records, framework, levels, self.interrupts, self.tensors, guard)
        self.tracer = Tracer(records, framework, levels, self.tensors, wanted.functions, wanted.whole)
        self.calls = Calls()
        self._evaluation = EvaluationFilter(framework, self.calls, wanted.history)
        self._running = self.calls.running
        self.functions = Functions(framework, self.tracer, self._running, self.watched, guard)
        self.packing: Packing | None = None
        if wanted.packing:
            self.packing = Packing(number, framework, optimizers, records, self._running, guard)
        self.losses: Losses | None = None
        if wanted.losses:
            heard = None if self.packing is None else self.packing.loss
            nodes, chosen = self.watched.nodes, self.watched.chosen
            self.losses = Losses(records, framework, levels, nodes, chosen, self.tensors, self._running, heard)
        self._begun = self._backward = self.autocast_open = False
        #: Whether of a layer's call more is looked at than its tensors.
        self._closely = True
        self._about = levels, wanted.loss_logged, self._switches.skip_wrappers
        self.planning = Planning(framework, records, self.tracer, self.calls, self.activations)

    # -- hooks on and off ---------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on, if they are not."""
        self.hooks.observer = self
        self.hooks.on_layers(self.watched.nodes)
        self.hooks.on_others(self._optimizers, self._switches)
        self.functions.attach()
        packing, switches = self.packing is not None, self._switches
        more = self.functions.attached, packing, self._wanted.stacks, switches.path_log, switches.api_check
        self._closely = any(more)
        if self.packing is not None:
            self.packing.attach(self.watched.nodes)
        if self._begun:
            self._hook_parameters()

    def take_over(self, before: StepObserver) -> None:
        """Take the hooks of the observer of the step before, instead of taking them off and putting them on."""
        self.hooks, before.hooks = before.hooks, Hooks(self._framework, before.hooks.guard)
        self.hooks.observer = self

    def detach(self) -> None:
        """Take every hook off again; may be called twice."""
        self.hooks.remove()
        if self.packing is not None:
            self.packing.detach()
        self.functions.remove()
        self.activations.detach()
        self._running.clear()

    def end(self) -> None:
        """The step is over: nothing more is written down, though hooks may still be on for the next one."""
        if self.packing is not None:
            self.packing.detach()
        self.functions.remove()
        self._running.clear()
        self.activations.close()

    def clear(self) -> None:
        """Forget what was seen; but for what the next step is expected to do."""
        self.planning.end()
        self.records.clear()
        self.tracer.clear()
        self.tensors.clear()

    def _begin(self) -> None:
        """The step's first call: what the model is now holds for the step. Since the step before it may have changed,
        and hooks stay on.
        """
        self._begun = True
        if self._layers.look():
            self.records.known.plan = None
            self.watched.take()
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
        # What nearly all calls are: of a layer inside of the model, of which nothing but its tensors is looked at.
        following = self.planning.following
        if following is not None and self.autocast_open and following.begins(key, layer, args, kwargs):
            self._look_at_autocast(running[-1].node)
            return
        node = self.watched.known.get(key)
        if node is None:  # a layer that the model had before
            return
        if following is not None:
            following.leave()
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
                self.planning.leave()
            self.planning.write()
            training = self._running[0].training if self._running else bool(watched.nodes[0].layer.training)
            if transforming:
                # vmap, grad and their like call the layer with stand-ins: there are no values, no one call for each.
                self.calls.begin_transformed(node, training, recomputed)
                if node.path in watched.chosen:
                    self.records.left_out.add(node.path, TRANSFORMED, training, "call")
                self.parameters.snapshot_later()
                return
            outermost = not self._running
            if outermost and training and not recomputed and not self.calls.has_trained:
                self.records.copier.refund()  # calls in evaluation mode so far are left out in the end
            if self.packing is not None and not recomputed:
                self.packing.layer_begins(node, args, kwargs, training)
            call = self.calls.begin(node, training, recomputed)
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
        """Let a call of the loop pass, if it is evaluation."""
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
        """The outermost call begins."""
        if self.losses is not None:
            # What is compiled must not meet another function than it was compiled with.
            self.hooks.on_losses(not self._framework.layers.compiled(layer))
        self.parameters.snapshot()
        self.watched.note_modes(call.training, self.settings)
        if self.watched.chose(call.node):
            for slot, tensor in flatten_inputs(layer.forward, args, kwargs, self._is_tensor):
                self.activations.see_input(call, slot, tensor)

    def _look_at_autocast(self, node: Node) -> None:
        """Trainers enter it within the model's forward: what the first layer that computes is called in counts."""
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
            self.planning.following.leave()
        call = self.calls.end(node)
        if call is None or call.transformed:
            self.planning.leave()
            return
        if not running:  # those above it had ended in an exception
            self.planning.leave()
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
                self.planning.leave()
            if call is not None and not failed and not call.transformed and not self.planning.model_ends(key, output):
                self._see(key, call, output)
        finally:
            self.functions.resume()
            if ended is not None and self.losses is not None and self.hooks.hears_losses:
                own = ended.training and not ended.recomputed and not ended.transformed
                if own and self.watched.chose(self.watched.nodes[0]):
                    self.functions.enter_loop()

    def _model_ended(self, call: Call | None, output: Any) -> None:
        """The outermost call has ended."""
        if self._layers.fresh:
            self._take_lazy()
        if self.losses is not None and call is not None:
            self.losses.called(output)
            self.hooks.on_losses(True)

    def _see(self, key: int, call: Call, output: Any) -> None:
        """Record what a call has given, if the layer is chosen."""
        draft = self.planning.draft
        if not self.watched.chose(call.node):
            if draft is not None:
                draft.ended(key, call, (), len(self.records))
            return
        first = len(self.records) if draft is not None else 0
        see, logged = self.activations.see, self._wanted.loss_logged and not self._running
        if isinstance(output, self._tensor_type) and not logged:
            seen = [("output.0", output, see(call, "output.0", output))]
        else:
            slots = flatten(output, "output", self._is_tensor)
            seen = [
                (slot, tensor, None if logged and self._is_loss(slot, tensor) else see(call, slot, tensor))
                for slot, tensor in slots
            ]
        if call.inputs is not None:
            self.tracer.layer_ended(call, seen)
        if draft is not None:
            draft.ended(key, call, [(slot, each) for slot, _, each in seen], first)

    def _is_loss(self, slot: str, tensor: Any) -> bool:
        """Whether an output of the model is its loss: by name, or the first of a tuple."""
        return slot in ("output.loss", "output.0") and self._framework.tensors.shape(tensor) == ()

    def _take_lazy(self) -> None:
        """Lazy layers own nothing before their first call."""
        if self.parameters.look_again():
            self._hook_parameters()
        if self.packing is not None:
            self.packing.look_again()

    def backward_begins(self) -> None:
        """A backward begins; with the step's first one, what parameters hold is added to."""
        self.functions.leave_loop()
        if self._backward:
            return
        self._backward = True
        with Tolerated():  # never the training's trouble
            if self.parameters.gradients_left():
                self.settings.setdefault("gradients.left_over", "of the step before")

    def backward_ended(self, tensor: Any) -> None:
        """A backward that began at this tensor has ended."""
        if self.tracer.functions:
            self.tracer.noted("backward", tensor)

    def after_function(self, name: str, output: Any) -> None:
        """A functional call inside of a layer is a record of that layer, in a slot of its own: ``softmax().0``."""
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
        if self._wanted.consuming is not None:
            self._wanted.consuming(optimizer)
        if self.packing is not None:
            self.packing.consumed(optimizer)
        self.parameters.consume(optimizer, parameters, gradients)

    def optimizer_stepped(self, optimizer: Any) -> None:
        self.parameters.stepped(optimizer)
        if self.losses is not None and self.hooks.hears_losses:
            self.losses.stepped()
        if self._wanted.stepped is not None:
            self._wanted.stepped(self.parameters.steps_taken)

    def add_gradient(self, key: int, gradient: Any) -> None:
        self._evaluation.note_gradient()
        try:
            self.parameters.add(key, gradient)
        except KeyboardInterrupt:
            self.interrupts.keep()
