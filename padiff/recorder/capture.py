"""What the hooks of one due step write down.

A capture keeps copies, never tensors (only weak references to them): nothing it holds can keep a graph alive,
and there is no cycle between it and the model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from padiff.frameworks.base import Framework
from padiff.frameworks.hooking import TRANSFORMED, Hearing
from padiff.model.nested import flatten, flatten_inputs
from padiff.model.selection import Node
from padiff.recorder.activations import Activations
from padiff.recorder.calls import Call, Calls
from padiff.recorder.hooks import Hooks
from padiff.recorder.interrupts import Interrupts
from padiff.recorder.layers import FixedLayers, Layers
from padiff.recorder.left_out import Left
from padiff.recorder.losses import Losses
from padiff.recorder.owned import LastOwned
from padiff.recorder.packing import Packing
from padiff.recorder.parameters import Parameters
from padiff.recorder.record_buffer import EVERYTHING, LevelOf, RecordBuffer
from padiff.recorder.seen_tensors import SeenTensors
from padiff.recorder.tracer import Begun, Tracer
from padiff.records import LOOP, Step
from padiff.system.switches import Switches


def _wrappers(nodes: Sequence[Node], framework: Framework) -> frozenset[str]:
    """Paths of the layers that own nothing and hold one layer."""
    return frozenset(
        node.path
        for node in nodes[1:]
        if not any(framework.layers.parameters(node.layer)) and len(list(framework.layers.children(node.layer))) == 1
    )


class Capture:
    """Collects the records of one step of one model.

    Args:
        number: the step's number.
        layers: the model's layers, followed where they change.
        optimizers: those whose gradients and updates are recorded; without any, gradients are what backward left.
        records: where records go. Default: a buffer of its own.
        levels: how much is kept of each layer's tensors at each stage. Default: everything.
        owned: what the layers owned, as earlier captures of the model found it.
        stepped: called when an optimizer has stepped, with how often it did within this step.
        stacks: whether to keep each call's Python stack, as `stacks`.
        consuming: called with an optimizer that is about to step.
        functions: whether the step's trace is to have the functions and operators that layers' code calls.
        losses: whether to record what loss functions are called with.
        packing: whether to keep what the step needs to be done again.
        whole: whether the trace is to have tensors in full.
        loss_logged: whether losses are logged, so that a scalar ``loss`` that the model itself gives is no activation.

    Attributes:
        packing: what keeps it; `None` where nothing does.
        losses: what hears of loss functions; `None` where nothing does.
    """

    def __init__(
        self,
        number: int,
        layers: Layers | FixedLayers,
        optimizers: Sequence[Any] = (),
        records: RecordBuffer | None = None,
        levels: LevelOf = EVERYTHING,
        owned: LastOwned | None = None,
        stepped: Callable[[int], None] | None = None,
        stacks: bool = False,
        consuming: Callable[[Any], None] | None = None,
        functions: bool = False,
        losses: bool = False,
        packing: bool = False,
        whole: bool = False,
        loss_logged: bool = False,
    ) -> None:
        self._loss_logged = loss_logged
        self.number = number
        #: What the step showed of how the training is set (`padiff.records.settings`).
        self.settings: dict[str, Any] = {}
        self._consuming = consuming
        framework = layers.framework
        self._framework, self._is_tensor = framework, framework.tensors.is_tensor
        self._tensor_type = framework.tensors.TYPE
        self._transforming, self._recomputing = framework.hooks.transforming, framework.hooks.recomputing
        self._layers, self._optimizers = layers, optimizers
        self._switches = Switches.from_environment()
        self._functions = functions
        self._take_layers()
        self._keep_stacks = stacks
        #: Python stack of each layer's call, outermost frame first, by path and number of the call; a
        #: functional call's by ``path/name()``.
        self.stacks: dict[tuple[str, int], traceback.StackSummary] = {}
        self._records = RecordBuffer(framework) if records is None else records
        self._levels = levels
        #: What the layers own.
        self.parameters = Parameters(self._records, layers, optimizers, levels, owned)
        self._interrupts = Interrupts(framework.hooks.RAISES_AS_IT_IS)
        self._tensors = SeenTensors(framework)
        self._activations = Activations(self._records, framework, levels, self._interrupts, self._tensors)
        self._tracer = Tracer(self._records, framework, levels, self._tensors, functions, whole)
        self._hearing: Hearing | None = None
        #: The loop, as what calls functions after the model was called and before its backward.
        self._in_loop: Call | None = None
        self._hooks = Hooks(framework)
        self._begun = self._backward = False
        self._calls = Calls()
        self._running = self._calls.running
        #: The autocast that the model was called in (`padiff.frameworks.base.Environment.autocast`); empty before.
        self.autocast: dict[str, Any] = {}
        self._autocast_open = False
        self._logged = 0
        self._stepped = stepped
        self.packing = Packing(number, framework, optimizers, self._records, self._running) if packing else None
        self.losses = self._losses() if losses else None

    def _losses(self) -> Losses:
        return Losses(
            self._records,
            self._framework,
            self._levels,
            self._nodes,
            self._chosen,
            self._tensors,
            self._running,
            None if self.packing is None else self.packing.loss,
        )

    def backward_begins(self) -> None:
        """A backward begins; with the step's first one, what parameters hold is added to."""
        self._leave_loop()
        if self._backward:
            return
        self._backward = True
        with suppress(Exception):  # never the training's trouble
            if self.parameters.gradients_left():
                self.settings.setdefault("gradients.left_over", "of the step before")

    def backward_ended(self, tensor: Any) -> None:
        """A backward that began at this tensor has ended."""
        if self._tracer.functions:
            self._tracer.noted("backward", tensor)

    def _enter_loop(self, call: Call) -> None:
        """The outermost call has ended: what is called now, up to a backward, may be the loss."""
        heard = self.losses is not None and self._hooks.hears_losses and call.training and not call.recomputed
        if self._hearing is None or not heard or call.transformed or self._nodes[0].path not in self._chosen:
            return
        self._in_loop = Call(Node(LOOP, None), 0, True, False)
        if not self._tracer.full:
            self._hearing.listen_outside(True)

    def _leave_loop(self) -> None:
        if self._hearing is not None and self._in_loop is not None:
            self._hearing.listen_outside(False)
        self._in_loop = None

    def _take_layers(self) -> None:
        self._nodes, self._chosen = self._layers.nodes, self._layers.chosen
        self._known = {id(node.layer): node for node in self._nodes}
        if self._switches.skip_wrappers:
            self._chosen -= _wrappers(self._nodes, self._framework)
        #: Of which what goes in is looked at, whichever layer is called first.
        self._traced = self._chosen if self._functions else self._chosen & self._layers.computing

    # -- hooks on and off ---------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on, if they are not. In a step that is not due they can do nothing: then they are not there."""
        self._hooks.observer = self
        self._hooks.on_layers(self._nodes)
        self._hooks.on_others(self._optimizers, self._switches)
        if self._tracer.functions and self._hearing is None:
            self._hearing = self._framework.hooks.hear_functions(self)
        if self.packing is not None:
            self.packing.attach(self._nodes)
        if self._begun:
            self._hook_parameters()

    def take_over(self, before: Capture) -> None:
        """Go on with the hooks of the capture of the step before, instead of taking them off and putting them on."""
        self._hooks, before._hooks = before._hooks, Hooks(self._framework)
        self._hooks.observer = self

    def detach(self) -> None:
        """Take every hook off again; may be called twice."""
        self._hooks.remove()
        if self.packing is not None:
            self.packing.detach()
        self._stop_hearing()
        self._activations.detach()
        self._running.clear()

    def _stop_hearing(self) -> None:
        hearing, self._hearing, self._in_loop = self._hearing, None, None
        if hearing is not None:
            hearing.remove()

    def _begin(self) -> None:
        """The step's first call: what the model is now holds for the step. Since the step before it may have changed,
        and hooks stay on.
        """
        self._begun = True
        if self._layers.look():
            self._take_layers()
            if self.losses is not None:
                self.losses.follow(self._nodes, self._chosen)
            self._hooks.on_layers(self._nodes)
            self.parameters.follow(self._layers)
        self.parameters.stamp = self._layers.stamp
        if self._tracer.functions:
            self._tracer.know_parameters(self._nodes)
        if self.packing is not None:
            self.packing.begin(self._nodes)
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        if not self._optimizers:
            self._hooks.on_gradients(self.parameters.trainable())

    # -- forward and backward -----------------------------------------------------------------------------

    def before_call(self, identity: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hearing = self._hearing
        if hearing is not None:
            self._leave_loop()
            hearing.listen(False)  # what is called here is not the model's
        try:
            transforming = self._transforming()
            if not self._begun and not transforming:
                self._begin()
            node = self._known.get(identity)
            if node is None:  # a layer that the model had before
                return
            recomputed = self._recomputing()
            training = self._running[0].training if self._running else bool(self._nodes[0].layer.training)
            if transforming:
                # vmap, grad and their like call the layer with stand-ins: there are no values, no one call for each.
                self._calls.begin_transformed(node, training, recomputed)
                if node.path in self._chosen:
                    self._records.left_out.add(node.path, TRANSFORMED, training, "call")
                self.parameters.snapshot_later()
                return
            outermost = not self._running
            if self.packing is not None and not recomputed:
                self.packing.layer_begins(node, args, kwargs, training)
            call = self._calls.begin(node, training, recomputed)
            if self._keep_stacks and not recomputed:
                self.stacks[node.path, call.number] = traceback.extract_stack()
            if self._switches.path_log:
                print(f"[padiff] {node.path} ({type(layer).__name__}), call {call.number}")
            if outermost and (training or not self.autocast):
                self._autocast_open = True
            if self._autocast_open:
                # Trainers enter it within the model's forward: what the first layer that computes is called in counts.
                self.autocast = self._framework.environment.autocast()
                self._autocast_open = node.path not in self._layers.computing
            if recomputed:
                return
            if outermost:
                if self.losses is not None:
                    # What is compiled must not meet another function than it was compiled with.
                    self._hooks.on_losses(not self._framework.layers.compiled(layer))
                self.parameters.snapshot()
                self._note_modes(training)
                if node.path in self._chosen:
                    for slot, tensor in flatten_inputs(layer.forward, args, kwargs, self._is_tensor):
                        self._activations.see_input(call, slot, tensor)
            if node.path in self._traced or (outermost and node.path in self._chosen):
                call.inputs, call.stack = self._tracer.inputs(node, args, kwargs), self._tracer.stack()
        finally:
            if hearing is not None:
                self._listen()

    def after_call(self, key: int, output: Any, failed: bool) -> None:
        hearing = self._hearing
        if hearing is not None:
            hearing.listen(False)  # what is called here is not the model's
        try:
            node, ended = self._known.get(key), None
            if node is None:
                return
            if self.packing is not None and self._running and self._running[-1].node is node:
                self.packing.layer_ended()
            call = self._calls.end(node)
            if not self._running and not failed:
                if self._layers.fresh:
                    self._take_lazy()
                if self.losses is not None and call is not None:
                    self.losses.called(output)
                    self._hooks.on_losses(True)
                ended = call
            if call is None or failed or call.transformed or node.path not in self._chosen:
                return
            see, logged = self._activations.see, self._loss_logged and not self._running
            if isinstance(output, self._tensor_type) and not logged:
                seen = [("output.0", output, see(call, "output.0", output))]
            else:
                slots = flatten(output, "output", self._is_tensor)
                seen = [
                    (slot, tensor, None if logged and self._is_loss(slot, tensor) else see(call, slot, tensor))
                    for slot, tensor in slots
                ]
            if call.inputs is not None:
                self._tracer.layer_ended(call, seen)
        finally:
            if hearing is not None:
                self._listen()
                if ended is not None:
                    self._enter_loop(ended)

    def _listen(self) -> None:
        """Hear functions while a layer's own code runs."""
        if self._hearing is not None and self._running:
            inside = self._running[-1]
            heard = inside.node.path in self._chosen and not inside.recomputed and not inside.transformed
            if heard and not self._tracer.full and not self._framework.layers.is_builtin(inside.node.layer):
                self._hearing.listen(True)

    def _note_modes(self, training: bool) -> None:
        """Which layers train, in the step's first call; in its first one in training mode, where there is one."""
        if (not training and "training" in self.settings) or self.settings.get("training"):
            return
        others = [node.path for node in self._nodes if bool(node.layer.training) is not training]
        self.settings["training"] = training
        self.settings.pop("training.others", None)
        if others:
            self.settings["training.others"] = others

    def _is_loss(self, slot: str, tensor: Any) -> bool:
        """Whether an output of the model is its loss: by name, or the first of a tuple."""
        return slot in ("output.loss", "output.0") and self._framework.tensors.shape(tensor) == ()

    def _take_lazy(self) -> None:
        """Lazy layers own nothing before their first call."""
        if self.parameters.look_again():
            self._hook_parameters()
        if self.packing is not None:
            self.packing.look_again()

    def after_function(self, name: str, output: Any) -> None:
        """A functional call inside of a layer is a record of that layer, in a slot of its own: ``softmax().0``."""
        if self._records.copying or not self._running or self._running[-1].node.path not in self._chosen:
            return
        inside = self._running[-1]
        if inside.transformed:
            return
        call = self._calls.function(inside, name)
        if self._keep_stacks and not inside.recomputed:
            self.stacks[f"{inside.node.path}/{name}()", call.number] = traceback.extract_stack()
        for slot, tensor in flatten(output, f"{name}()", self._is_tensor):
            self._activations.see(call, slot, tensor)

    def function_begins(
        self, name: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Begun | None:
        """A layer's own code calls a function; `None` where that is not looked at."""
        inside = self._running[-1] if self._running else self._in_loop
        if self._records.copying or inside is None or self._transforming():
            return None
        return self._tracer.function_begins(name, parameters, inside, args, kwargs)

    def function_ended(self, begun: Begun, output: Any) -> None:
        """The function has given this."""
        self._tracer.function_ended(begun, output)

    def consume(self, optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._interrupts.raise_kept()
        self._leave_loop()
        if self._consuming is not None:
            self._consuming(optimizer)
        if self.packing is not None:
            self.packing.consumed(optimizer)
        self.parameters.consume(optimizer, pairs)

    def optimizer_stepped(self, optimizer: Any) -> None:
        self.parameters.stepped(optimizer)
        if self.losses is not None and self._hooks.hears_losses:
            self.losses.stepped()
        if self._stepped is not None:
            self._stepped(self.parameters.steps_taken)

    def add_gradient(self, key: int, gradient: Any) -> None:
        try:
            self.parameters.add(key, gradient)
        except KeyboardInterrupt:
            self._interrupts.keep()

    def raise_interrupt(self) -> None:
        """Raise a Ctrl-C that was kept."""
        self._interrupts.raise_kept()

    # -- the end of the step ------------------------------------------------------------------------------

    def log_loss(self, value: Any) -> None:
        """Note the loss of a micro-batch: a number, or a tensor of one element."""
        if self._is_tensor(value):
            if self._tracer.functions:
                self._tracer.noted("log_loss", value)
            try:
                array = self._records.copy(value)
            except Exception as error:
                self._records.left_out.add(LOOP, Left.because(error).reason, training=True)
                return
        else:
            array = np.asarray(value, dtype=np.float64)
        self._records.scalar("loss", "loss", float(array.astype(np.float64).mean()), self._logged, str(array.dtype))
        self._logged += 1

    @property
    def running(self) -> list[str]:
        """Paths of the layers whose calls are under way, the outermost first."""
        return [call.node.path for call in self._running]

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """What is called inside is not recorded."""
        observer, self._hooks.observer = self._hooks.observer, None
        before, RecordBuffer.copying = RecordBuffer.copying, True
        try:
            yield
        finally:
            self._hooks.observer, RecordBuffer.copying = observer, before

    @property
    def micro_batch(self) -> int | None:
        """Which call of the whole model, in training mode, is under way or was the last; `None` before the first."""
        calls = self._calls.trained(self._nodes[0].path)
        return calls - 1 if calls else None

    @property
    def empty(self) -> bool:
        """Whether no layer was called and nothing was noted."""
        return not len(self._records) and not self._calls.any

    @property
    def called(self) -> frozenset[str]:
        """Paths of the layers that were called."""
        return self._calls.paths

    def finish(self, rank: int = 0, loss_scale: float = 1.0, updates: bool = True, detach: bool = True) -> Step:
        """Take the hooks off and hand the step over; the capture is empty afterwards.

        Args:
            updates: false if no optimizer has stepped yet.
            detach: false to leave the layers' hooks on for the capture of the next step (`take_over`).
        """
        self.parameters.finish(updates)
        if self.losses is not None:
            if not self._logged:
                self.losses.finish(self._calls.micro_batches, loss_scale)
            self.settings.update(self.losses.settings)
            self.losses.close()
        if detach:
            self.detach()
        if self.packing is not None:
            self.packing.detach()
        self._stop_hearing()
        self._running.clear()
        self._activations.close()
        self._records.fetch()
        step = self._whole(rank, loss_scale) or self.peek(rank, loss_scale)
        self._records.clear()
        self._tracer.clear()
        self._tensors.clear()
        return step

    def _whole(self, rank: int, loss_scale: float) -> Step | None:
        """The step as one that nothing is left out of; `None` where something is."""
        if self._calls.evaluations or self._calls.recomputed:
            return None
        records, trace = self._tracer.finished()
        return Step(self.number, records, rank, loss_scale, self._calls.micro_batches, self.left_out, trace=trace)

    def parameters_now(self) -> Step:
        """A step of weights, buffers and gradients, as they are now."""
        self.parameters.snapshot()
        self.parameters.finish(updates=False)
        return self.peek()

    def weights(self) -> Step:
        """A step of the weights and buffers alone, as they are now."""
        self.parameters.snapshot()
        return self.peek()

    @property
    def left_out(self) -> tuple[str, ...]:
        """What could not be recorded, in words, but for calls in evaluation mode within the step."""
        return self._records.left_out.notes(training_only=self._calls.in_both_modes)

    def peek(self, rank: int = 0, loss_scale: float = 1.0) -> Step:
        """What was recorded so far; the capture goes on."""
        # Evaluation in between is left out: calls in eval mode, where the step has calls in training mode too.
        left_out = self._calls.evaluations
        evaluated = f"{left_out} call(s) in evaluation mode within the step are not recorded"
        return Step(
            number=self.number,
            records=self._records.records(bool(left_out), self._calls.recomputed),
            rank=rank,
            loss_scale=loss_scale,
            micro_batches=self._calls.micro_batches,
            notes=(*((evaluated,) if left_out else ()), *self.left_out),
            trace=self._tracer.trace(bool(left_out)),
        )
