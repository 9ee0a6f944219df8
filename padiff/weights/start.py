"""``start_from``: a live model and its optimizer as they were before a recorded step, or with weights from files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.base import Framework
from padiff.model.live_model import LiveModel
from padiff.recorder.claims import claimed
from padiff.records import OptimizerState, ParameterState, Step
from padiff.records.optimizer_state import MASTER_WEIGHT, STEPS
from padiff.records.pack import Pack, unkept, with_leaves
from padiff.records.recorded_batches import recorded_batches
from padiff.system.naming import first_few
from padiff.system.switches import say
from padiff.weights.assign import Carried, Recorded, carry_over, weak_pairs
from padiff.weights.carried_state import SHORT, StateCarrier
from padiff.weights.output_proof import Inputs, run_once
from padiff.weights.stored import Stored, open_stored

# Learning rates, and things that were assumed, that the line names.
_NAMED = 3


@dataclass(frozen=True)
class Started:
    """What a model was given to start from; its text is one line.

    Attributes:
        source: the run, or the files.
        step: the recorded step that the model is at the beginning of; `None` of files.
        model: what was recorded, as ``torch ResNet``.
        parameters, buffers: how many of the live model's were set.
        by_rule: layers that rules of the user's carried over.
        left_as_is: what stayed as it was, and what of the source has no place (with ``partial=True``).
        optimizers: what each optimizer was given, under the live model's names; without the tensors.
        assumed: what neither names nor shapes tell, and what was taken for it.
        computed: buffers that the model computes when it is made, and that are not as they were recorded: they stay.
        outputs: how the model's outputs compare with those that were recorded, where that could be seen.
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

    def __str__(self) -> str:
        counts = [_count(self.parameters, "parameter"), _count(self.buffers, "buffer")]
        if self.by_rule:
            counts.append(f"{_count(self.by_rule, 'layer')} by rules of your own")
        where = f"step {self.step} of {self.source}" if self.step is not None else self.source
        text = f"starts from {where} ({self.model}): {', '.join(counts)}"
        text += "".join(f"; {_state_text(state)}" for state in self.optimizers)
        if self.left_as_is:
            text += f"; left as it is: {first_few(self.left_as_is, _NAMED)}"
        if self.computed:
            text += f"; the model computes otherwise, and keeps: {first_few(self.computed, _NAMED)}"
        if self.assumed:
            text += f"; assumed: {first_few(self.assumed, _NAMED)}"
        return text + (f"; {self.outputs}" if self.outputs else "")


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
    """Start a model where a recorded run was: its weights and buffers, and what its optimizer held.

    The framework of the recording need not be installed. Which parameter answers to which is found as `compare_runs`
    finds it: matrices are transposed, fused ones put together or taken apart, moments like their weights. Either all
    of it is carried, or nothing is changed. One line on standard error says what was carried.

    Args:
        source: a run folder; or a file or folder of safetensors, as Hugging Face's libraries save models
            (``model.safetensors``, or several with ``model.safetensors.index.json``).
        model: a torch Module or a paddle Layer; it is changed in place, dtypes and devices stay.
        step: which recorded step's beginning. Default: the first recorded one.
        optimizer: the optimizer to set, or several: moments, counts of steps, and the learning rate of the next step.
            They come from the step's pack (``replay_every_n_steps``); before step 0 there is the rate alone. A
            scheduler goes on from its own place after that step.
        layer_map: pairs of layers (recorded, live) that answer to each other; the rest is found around them.
        partial: carry all that fits, and name the rest, instead of refusing where not everything fits.
        framework: ``"torch"`` or ``"paddle"``, of files that do not say it.
        prove: whether the model may be run on the recorded batch, without gradients, where a run has it: which layers
            run when tells more than names do, and the outputs say whether the weights went to their places. Buffers,
            modes and random numbers are as before; what a forward of yours counts or keeps in Python is not.

    Returns:
        What was carried; its text is the line that was printed.

    Raises:
        RunFolderError: the source can't be read.
        UsageError: not everything can be carried, or the step has no weights, or no state; nothing was changed.
    """
    stored = open_stored(source, step, framework, LiveModel.of(model).info)
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
    """As `start_from`, from what is open already.

    Args:
        prove: whether the model may be run. Default: where names and shapes leave something open.
        quiet: whether not to print the line.
    """
    if optimizers and stored.optimizers is None:
        raise UsageError(stored.why_not)
    raw = LiveModel.of(model)
    if any(raw.framework.layers.sharded(node.layer) for node in raw.nodes):
        raise UsageError("the model's parameters are spread over processes (FSDP): start it before it is wrapped")
    if claimed(raw.model):
        prove = False  # the run would be taken for one of the training
    inner = _inner(raw.framework, optimizers)
    given: list[OptimizerState] = []
    carried = carry_over(
        stored.model,
        model,
        layer_map,
        partial=partial,
        recorded=None if prove is False else recorded_of(stored, raw, always=prove is True),
        then=lambda done: given.extend(_set(stored, raw, inner, done)),
    )
    found = _started(stored, carried, given)
    if not quiet:
        say(f"{raw.info.name} {found}")
    return found


def recorded_of(stored: Stored, model: LiveModel, always: bool) -> Recorded | None:
    """The recorded step, where the batch that it began with is known: what runs when, and what comes out, tells which
    layer answers to which better than any name.
    """
    if stored.recorded is None or any(model.framework.layers.compiled(node.layer) for node in model.nodes):
        return None  # what is compiled would be compiled again, for the hooks
    inputs = _inputs(stored.pack, stored.recorded)
    if inputs is None:
        return None

    def run(raw: LiveModel) -> Step:
        near = next((tensor for _, tensor in raw.tensors()), None)
        args, kwargs = with_leaves(inputs, lambda source: raw.framework.data.tensor(source.read(), near))
        if not set(kwargs) <= _parameters(raw.model.forward):
            args, kwargs = (*args, *kwargs.values()), {}  # it calls them otherwise
        return run_once(raw, Inputs(args, kwargs), stored.training)

    ran = tuple(r for r in stored.recorded.records if r.stage == "forward" and r.call == 0)
    telling = not stored.draws(model.info.layers) and any(not record.source.sketched for record in ran)
    return Recorded(replace(stored.recorded, records=ran), run, telling, always)


def _inputs(pack: Pack | None, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What the model was called with at first; `None` where that is not known."""
    if pack is not None and pack.batches and pack.batches[0].seen:
        batch = pack.batches[0]
        if not any(unkept((batch.args, batch.kwargs))):
            return batch.args, dict(batch.kwargs)
    recorded = recorded_batches(step)[0]
    return None if recorded.problem else ((), dict(recorded.inputs))


def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    """The names that arguments of a forward may be given by."""
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
    for one in optimizers:
        if not framework.optimizers.steppers(one):
            raise UsageError(
                f"optimizer has to be one of {framework.name}, as the model is, or a list of them; "
                f"got {type(one).__module__}.{type(one).__qualname__}"
            )
    return list(optimizers)


def _set(stored: Stored, raw: LiveModel, optimizers: Sequence[Any], carried: Carried) -> list[OptimizerState]:
    """Give the optimizers what the recorded ones held; all of them or none."""
    if not optimizers:
        return []
    api = raw.framework.optimizers
    carrier = StateCarrier(stored.model, raw, carried.alignment, stored.optimizers or ())
    names = {id(tensor): site for site, tensor in raw.tensors()}
    states = [carrier.of(_sites(api.optimized(one), names)) for one in optimizers]
    for state in states:
        _write_in_full(state, raw)
    undo: list[Callable[[], None]] = []
    try:
        for one, state in zip(optimizers, states):
            undo.append(api.set_state(one, names, state))
    except BaseException:
        for back in reversed(undo):
            back()
        raise
    return states


def _write_in_full(state: OptimizerState, raw: LiveModel) -> None:
    """Where the recorded optimizer kept parameters in more digits than its model, and this model has the digits, these
    are its parameters.
    """
    tensors = raw.framework.tensors
    for site, held in state.parameters.items():
        tensor = raw.tensor(*site.rsplit("/", 1))
        if MASTER_WEIGHT in held.tensors and tensors.dtype(tensor) not in SHORT:
            tensors.write(tensor, held.tensors[MASTER_WEIGHT])


def _sites(parameters: Sequence[Any], names: Mapping[int, str]) -> list[str]:
    found = [names[id(parameter)] for parameter in parameters if id(parameter) in names]
    if not found:
        raise UsageError("the optimizer steps no parameter of this model: make it of model.parameters()")
    return found


def _started(stored: Stored, carried: Carried, given: Sequence[OptimizerState]) -> Started:
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
        optimizers=tuple(map(_without_tensors, given)),
        computed=transfer.computed,
        assumed=() if carried.proved else tuple(_assumed(carried)),
        outputs=_outputs_text(stored, carried),
    )


def _without_tensors(state: OptimizerState) -> OptimizerState:
    """Who keeps the result does not keep the moments."""
    return replace(state, parameters={site: ParameterState({}, one.numbers) for site, one in state.parameters.items()})


def _assumed(carried: Carried) -> Iterator[str]:
    for ambiguity in carried.alignment.ambiguities:
        if not ambiguity.answer and ambiguity.about not in carried.choices:
            yield f"{ambiguity.about}: {ambiguity.options[0]}"
    weak = weak_pairs(carried.alignment) if carried.proof is None else []
    if weak:
        first = f"{weak[0].reference.path} to {weak[0].candidate.path}"
        yield f"which layers answer to {_count(len(weak), 'layer')} ({first}{', ...' if len(weak) > 1 else ''})"


def _outputs_text(stored: Stored, carried: Carried) -> str:
    if carried.proof is None or not carried.proof.outputs:
        return ""
    if carried.proved:
        return "run once on the recorded batch, it gives what was recorded"
    if stored.draws(carried.alignment.layers.candidate):
        return ""
    return "run once on the recorded batch, it gives something else: padiff.compare_runs says where"


def _state_text(state: OptimizerState) -> str:
    rates = sorted({rate.value for rate in state.rates})
    shown = ", ".join(f"{rate:g}" for rate in rates[:_NAMED]) + (", ..." if len(rates) > _NAMED else "")
    counts = sorted({int(held.numbers[STEPS]) for held in state.parameters.values() if STEPS in held.numbers})
    after = f" after {'-'.join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))} steps" if counts else ""
    held = f"state of {_count(len(state.parameters), 'parameter')}{after}" if state.parameters else "no state yet"
    return f"{state.rule}: {held}, learning rate {shown or 'not known'}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
