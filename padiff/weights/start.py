"""``start_from`` sets a live model and its optimizer to a recorded step, or to weights from files."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.base import Framework
from padiff.model.tree import LiveModel
from padiff.recorder.layers import claimed, group
from padiff.records import ROOT, OptimizerState, ParameterState, Step
from padiff.records.recorded import recorded_batches
from padiff.records.traces import MASTER_WEIGHT, STEPS, Pack, unkept, with_leaves
from padiff.system.terminal import counted, first_few, say
from padiff.weights.assign import AGREES, Carried, Inputs, Recorded, carry_over, run_once, weak_pairs
from padiff.weights.carried_state import SHORT, StateCarrier
from padiff.weights.stored import Stored, open_stored

# Number of learning rates, and of assumptions, that the line names.
_NAMED = 3


@dataclass(frozen=True)
class Started:
    """The result of `start_from`; its text is one line.

    Attributes:
        source: the run or the weight files.
        step: number of the recorded step that the model is set to the beginning of; `None` for files.
        model: framework and class of the recorded model, as ``torch ResNet``.
        parameters, buffers: number of parameters and buffers of the live model that were set.
        by_rule: number of layers that the user's rules copied.
        left_as_is: parameters of the live model that stayed unchanged, and recorded ones without a place in it (with
            ``partial=True``).
        optimizers: the state that each optimizer received, under the live model's names, without the tensors.
        assumed: ambiguities that neither names nor shapes resolve, with the assumption made.
        computed: buffers that the model computes itself with values that differ from the recorded ones. These buffers
            are unchanged.
        unpaired_buffers: buffers of paired layers, of both models, and frozen or copied parameters (target networks)
            that were not carried over, as neither names nor shapes show a partner.
        outputs: comparison of the model's outputs with the recorded ones, if they could be compared.
    """

    source: str
    step: int | None
    model: str
    parameters: int
    buffers: int
    by_rule: int = 0
    left_as_is: tuple[str, ...] = ()
    optimizers: tuple[OptimizerState, ...] = ()
    assumed: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    outputs: str = ""
    unpaired_buffers: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = [counted(self.parameters, "parameter"), counted(self.buffers, "buffer")]
        if self.by_rule:
            counts.append(f"{counted(self.by_rule, 'layer')} by rules of your own")
        where = f"step {self.step} of {self.source}" if self.step is not None else self.source
        text = f"starts from {where} ({self.model}): {', '.join(counts)}"
        text += "".join(f"; {_state_text(state)}" for state in self.optimizers)
        if self.left_as_is:
            text += f"; left as it is: {first_few(self.left_as_is, _NAMED)}"
        if self.computed:
            text += f"; the model computes otherwise, and keeps: {first_few(self.computed, _NAMED)}"
        if self.assumed:
            text += f"; assumed: {first_few(self.assumed, _NAMED)}"
        if self.unpaired_buffers:
            text += f"; without a partner: {first_few(self.unpaired_buffers, _NAMED)}"
        return f"{self.outputs}; {text}" if self.outputs else text


def start_from(
    source: Any,
    model: Any,
    *,
    step: int | None = None,
    optimizer: Any = None,
    layer_map: Any = None,
    partial: bool = False,
    framework: str | None = None,
    prove: bool = True,
) -> Started:
    """Set a model, and its optimizer, to the state that a recorded run had: weights, buffers and optimizer state.

    The framework of the recording need not be installed. Parameters are paired as in `compare_runs`; matrices are
    transposed, fused ones joined or split, and moments are treated like their weights. Either everything is copied or
    nothing is changed. One line on standard error says what was copied.

    Args:
        source: a run folder; or a file or folder of safetensors, as Hugging Face's libraries save models
            (``model.safetensors``, or several with ``model.safetensors.index.json``).
        model: a torch Module or a paddle Layer, or several by name, as `record` takes them. The model is changed in
            place; dtypes and devices stay.
        step: number of the recorded step; the state before this step is restored. Default: the first recorded one.
        optimizer: the optimizer to set, or several: moments, step counts, and the learning rate of the next step. This
            state comes from the step's pack (``replay_every_n_steps``); before step 0 only the rate is known. A
            scheduler continues from its own position after that step.
        layer_map: pairs of layers (recorded, live); all other layers are paired automatically.
        partial: True to copy all weights that fit and name the others; False to refuse if some do not fit.
        framework: ``"torch"`` or ``"paddle"``, for files that do not name their framework.
        prove: True to allow running the model on the recorded batch, without gradients, if the run has one. The order
            of execution pairs layers better than names do, and the outputs show if the weights went to the right
            places. Buffers, modes and random states are restored; Python state that your forward changes is not.

    Returns:
        A summary of the copied state; its text is the printed line.

    Raises:
        RunFolderError: the source can't be read.
        UsageError: some weights can't be copied, or the step has no weights or no optimizer state; nothing was changed.
    """
    model = group(model) if isinstance(model, Mapping) else model
    stored = open_stored(source, step, framework, LiveModel.from_model(model).info)
    return start(stored, model, _listed(optimizer), layer_map, partial, prove=prove)


def start(
    stored: Stored,
    model: Any,
    optimizers: Sequence[Any] = (),
    layer_map: Any = None,
    partial: bool = False,
    quiet: bool = False,
    prove: bool | None = None,
) -> Started:
    """Set a model to an opened recording, like `start_from`.

    Args:
        quiet: True to print no line.
        prove: True to run the model, False to never run it. Default: run it only if names and shapes are ambiguous.
    """
    if optimizers and stored.optimizers is None:
        raise UsageError(stored.why_not)
    raw = LiveModel.from_model(model)
    if any(raw.framework.layers.sharded(node.layer) for node in raw.nodes):
        raise UsageError("the model's parameters are spread over processes (FSDP): start it before it is wrapped")
    if claimed(raw.model):
        prove = False  # the active recorder would record this run as a training step
    inner = _inner(raw.framework, optimizers)
    states: list[OptimizerState] = []
    carried = carry_over(
        stored.model,
        model,
        layer_map,
        partial=partial,
        recorded=None if prove is False else recorded_of(stored, raw, always=prove is True),
        then=lambda done: states.extend(_set(stored, raw, inner, done)),
    )
    started = _started(stored, carried, states)
    if not quiet:
        say(f"{raw.info.name}: {started}" if started.outputs else f"{raw.info.name} {started}")
    return started


def recorded_of(stored: Stored, model: LiveModel, always: bool) -> Recorded | None:
    """Return the recorded forward pass of a step, or `None` if its first batch is not known or the model is compiled.

    The order of execution and the outputs pair layers more reliably than names.
    """
    if stored.recorded is None or any(model.framework.layers.compiled(node.layer) for node in model.nodes):
        return None  # hooks would make a compiled model compile again
    inputs = _inputs(stored.pack, stored.recorded)
    if inputs is None:
        return None

    def run(raw: LiveModel) -> Step:
        near = next((tensor for _, tensor in raw.tensors()), None)
        args, kwargs = with_leaves(inputs, lambda source: raw.framework.data.tensor(source.read(), near))
        if not set(kwargs) <= _parameters(raw.model.forward):
            args, kwargs = (*args, *kwargs.values()), {}  # its forward uses other argument names
        return run_once(raw, Inputs(args, kwargs), stored.training)

    ran = tuple(r for r in stored.recorded.records if r.stage == "forward" and r.call == 0)
    telling = not stored.draws(model.info.layers) and any(not record.source.sketched for record in ran)
    return Recorded(replace(stored.recorded, records=ran), run, telling, always)


def _inputs(pack: Pack | None, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return positional and keyword arguments of the model's first call in the step; `None` if unknown."""
    if pack is not None and pack.batches and pack.batches[0].seen:
        batch = pack.batches[0]
        if not any(unkept((batch.args, batch.kwargs))):
            return batch.args, dict(batch.kwargs)
    recorded = recorded_batches(step)[0]
    return None if recorded.problem else ((), dict(recorded.inputs))


def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the forward's parameters that accept keywords."""
    try:
        return frozenset(
            p.name
            for p in inspect.signature(forward).parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        )
    except (TypeError, ValueError):  # a builtin without a signature
        return frozenset()


def _listed(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _inner(framework: Framework, optimizers: Sequence[Any]) -> list[Any]:
    for optimizer in optimizers:
        if not framework.optimizers.steppers(optimizer):
            raise UsageError(
                f"optimizer has to be one of {framework.name}, as the model is, or a list of them; "
                f"got {type(optimizer).__module__}.{type(optimizer).__qualname__}"
            )
    return list(optimizers)


def _set(stored: Stored, raw: LiveModel, optimizers: Sequence[Any], carried: Carried) -> list[OptimizerState]:
    """Set the optimizers to the recorded states, all of them or none; return these states."""
    if not optimizers:
        return []
    api = raw.framework.optimizers
    carrier = StateCarrier(stored.model, raw, carried.alignment, stored.optimizers or ())
    names = {id(tensor): site for site, tensor in raw.tensors()}
    states = [carrier.state_for(_sites(api.optimized(optimizer), names)) for optimizer in optimizers]
    for state in states:
        _write_in_full(state, raw)
    undo: list[Callable[[], None]] = []
    try:
        for optimizer, state in zip(optimizers, states):
            undo.append(api.set_state(optimizer, names, state))
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise
    return states


def _write_in_full(state: OptimizerState, raw: LiveModel) -> None:
    """Write the recorded float32 master weights into the model's parameters, if these are not float16 or bfloat16."""
    tensors = raw.framework.tensors
    for site, parameter in state.parameters.items():
        tensor = raw.tensor(*site.rsplit("/", 1))
        if MASTER_WEIGHT in parameter.tensors and tensors.dtype(tensor) not in SHORT:
            tensors.write(tensor, parameter.tensors[MASTER_WEIGHT])


def _sites(parameters: Sequence[Any], names: Mapping[int, str]) -> list[str]:
    sites = [names[id(parameter)] for parameter in parameters if id(parameter) in names]
    if not sites:
        raise UsageError("the optimizer steps no parameter of this model: make it of model.parameters()")
    return sites


def _started(stored: Stored, carried: Carried, states: Sequence[OptimizerState]) -> Started:
    transfer = carried.transfer
    wholes = [f"{base} to {raw}" for base, raw in transfer.left_wholes]
    return Started(
        source=stored.label,
        step=stored.step,
        model=carried.models.reference,
        parameters=transfer.parameters,
        buffers=transfer.buffers,
        by_rule=len(transfer.calls),
        left_as_is=(*transfer.not_carried, *transfer.left_as_is, *wholes),
        optimizers=tuple(map(_without_tensors, states)),
        computed=transfer.computed,
        unpaired_buffers=transfer.unpaired_buffers,
        assumed=() if carried.proved else tuple(_assumed(carried)),
        outputs=_outputs_text(stored, carried),
    )


def _without_tensors(state: OptimizerState) -> OptimizerState:
    """Return the state without its tensors, so that a stored result does not keep the moments in memory."""
    return replace(
        state, parameters={site: ParameterState({}, parameter.numbers) for site, parameter in state.parameters.items()}
    )


def _assumed(carried: Carried) -> Iterator[str]:
    for ambiguity in carried.alignment.ambiguities:
        if not ambiguity.answer and ambiguity.about not in carried.choices:
            yield f"{ambiguity.about}: {ambiguity.options[0]}"
    weak = weak_pairs(carried.alignment) if carried.proof is None else []
    if weak:
        first = f"{weak[0].reference.path} to {weak[0].candidate.path}"
        yield f"which layers answer to {counted(len(weak), 'layer')} ({first}{', ...' if len(weak) > 1 else ''})"


def _outputs_text(stored: Stored, carried: Carried) -> str:
    if carried.proof is None or not carried.proof.outputs:
        return ""
    if carried.proved:
        return "outputs agree with the recorded ones"
    if stored.draws(carried.alignment.layers.candidate):
        return ""
    # Tensors of other shapes, such as a convolution's patches and a matrix's, can't be held against each other.
    inner = [output for output in carried.proof.outputs if output.path != ROOT and math.isfinite(output.max_abs)]
    look = f"record a step and look with `padiff compare {stored.label} RUN`"
    if inner and all(output.error <= AGREES for output in inner):
        layers = counted(len({output.path for output in inner}), "layer")
        return f"outputs of {layers} agree with the recorded ones, what the model makes of them differs: {look}"
    return f"outputs differ from the recorded ones: {look}"


def _state_text(state: OptimizerState) -> str:
    rates = sorted({rate.value for rate in state.rates})
    shown = ", ".join(f"{rate:g}" for rate in rates[:_NAMED]) + (", ..." if len(rates) > _NAMED else "")
    counts = sorted({int(moments.numbers[STEPS]) for moments in state.parameters.values() if STEPS in moments.numbers})
    after = f" after {'-'.join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))} steps" if counts else ""
    moments = f"state of {counted(len(state.parameters), 'parameter')}{after}" if state.parameters else "no state yet"
    return f"{state.rule}: {moments}, learning rate {shown or 'not known'}"
