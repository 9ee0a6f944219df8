"""``assign_weight`` copies all weights of one model into another, or none, and proves it by the outputs."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from padiff.align import NOTHING_SEEN, Alignment, LayerPair, ParameterPair, RuntimeEvidence, align
from padiff.errors import UsageError
from padiff.frameworks.base import Framework
from padiff.frameworks.settings import FRAMEWORKS
from padiff.model.given_map import GivenMap
from padiff.model.tree import LiveModel, frameworks_name
from padiff.pair.steps import pair_steps
from padiff.recorder.capture import Capture
from padiff.recorder.layers import FixedLayers
from padiff.records import ROOT, Both, Pair, Step
from padiff.records.report_text import tree_text
from padiff.weights.carried_state import ruled
from padiff.weights.stored import StoredModel, open_stored
from padiff.weights.transfer import Model, Transfer, TransferError, live, plan_transfer

_NEW, _OLD = ("base_model", "raw_model"), ("layer", "module")
_MORE = ("layer_map", "inputs", "partial")


@dataclass(frozen=True)
class AssignCall:
    """The arguments of a call of ``assign_weight`` in one form.

    Attributes:
        models: the source of the weights (reference) and the model that receives the weights (candidate).
        inputs: inputs of the two models, in the same order.
        partial: True to carry over the weights that fit and list all others.
        swapped: True if the source of the weights is the second model in the call.
    """

    models: Both[Any]
    layer_map: Any = None
    inputs: Any = None
    partial: bool = False
    swapped: bool = False


def read_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AssignCall:
    """Read the arguments: ``(base_model, raw_model)``, or the first generation's ``(layer, module, layer_map)``.

    Raises:
        UsageError: the arguments have neither form, or mix both.
    """
    names = _OLD if kwargs.keys() & set(_OLD) else _NEW
    values = dict(zip((*names, "layer_map"), args))
    allowed = {*names, *_MORE}
    if len(args) > 3 or kwargs.keys() - allowed or values.keys() & kwargs.keys() or not {*names} <= {*values, *kwargs}:
        raise UsageError(
            "assign_weight takes (base_model, raw_model), or (layer, module, layer_map) as in the first generation, "
            f"and layer_map, inputs, partial by name; got {len(args)} positional arguments"
            + (f" and {', '.join(kwargs)}" if kwargs else "")
        )
    values |= kwargs
    partial = values.get("partial", False)
    if not isinstance(partial, bool):
        raise UsageError(f"assign_weight: partial is True or False, got {partial!r}")
    if isinstance(values[names[1]], (str, os.PathLike)):
        raise UsageError(f"assign_weight: weights go into a live model, got the path {str(values[names[1]])!r}")
    # Only the first generation's form had a positional layer map; the keyword `base_model` rules that form out.
    old = names is _OLD or ("layer_map" in values and not kwargs.keys() & set(_NEW))
    models, inputs = Both(*(values[name] for name in names)), values.get("inputs")
    swapped = old and torch_is_second(models)
    if swapped:
        models = models.swapped()
        inputs = inputs[::-1] if isinstance(inputs, (list, tuple)) else inputs
    return AssignCall(models, values.get("layer_map"), inputs, partial, swapped)


def torch_is_second(models: Both[Any]) -> bool:
    """Return True if the models are a paddle layer and a torch module, the pair of the first generation's calls.

    In calls of the first generation the torch module of such a pair is the reference. For all other pairs the first
    model is the reference.
    """
    if any(isinstance(model, (str, os.PathLike)) for model in models):
        return False
    return models.map(lambda model: FRAMEWORKS[frameworks_name(model)].layer) == Both("layer", "module")


#: Relative L2 error up to which two outputs agree: float32 rounding errors of many layers stay below it.
AGREES = 1e-3


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model's forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def pair(cls, value: Any) -> Both[Inputs]:
        """Read the inputs of two models from a pair; each is a dict of keywords, a tuple of arguments, or one tensor.

        Raises:
            UsageError: `value` is not a pair.
        """
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise UsageError(
                f"inputs have to be a pair, the base model's and the raw model's, got {type(value).__name__}"
            )
        return Both(*value).map(cls.from_value)

    @classmethod
    def from_value(cls, value: Any) -> Inputs:
        """Read the inputs of one model from a dict of keywords, a tuple or list of arguments, or one tensor."""
        if isinstance(value, Inputs):
            return value
        if isinstance(value, Mapping):
            return cls((), dict(value))
        return cls(tuple(value), {}) if isinstance(value, (list, tuple)) else cls((value,), {})


def run_once(live: LiveModel, inputs: Inputs, training: bool = False) -> Step:
    """Run a model once and return its records; modes, buffers and random states are restored.

    Args:
        training: True to run in training mode, False for eval mode.

    Raises:
        UsageError: the model's forward failed on these inputs; the cause is attached.
    """
    framework = live.framework
    paths = frozenset(node.path for node in live.nodes)
    capture = Capture(0, FixedLayers(framework, live.nodes, paths))
    layers = [node.layer for node in live.nodes]
    mode = _training(layers, framework) if training else framework.layers.evaluating(layers)
    with live.buffers_kept(), mode, ExitStack() as after:
        after.callback(live.draws())
        capture.attach()
        try:
            live.model(*inputs.args, **inputs.kwargs)
            return capture.finish(updates=False)
        except Exception as error:
            raise UsageError(f"the forward of {type(live.model).__name__} failed on the inputs: {error}") from error
        finally:
            capture.detach()


@contextmanager
def _training(layers: Sequence[Any], framework: Framework) -> Iterator[None]:
    """Put the layers into training mode without gradients; restore their modes at the end of the block."""
    modes = [(layer, layer.training) for layer in layers]
    try:
        for layer in layers:
            layer.training = True
        with framework.tensors.without_grad():
            yield
    finally:
        for layer, mode in modes:
            layer.training = mode


@dataclass(frozen=True)
class Output:
    """Difference of one output of two paired layers: place, relative L2 error and largest absolute difference."""

    path: str
    slot: str
    error: float
    max_abs: float


@dataclass(frozen=True)
class Proof:
    """Differences of the outputs of all paired layers, after both models ran once on equal weights.

    Attributes:
        outputs: the differences, in the base model's order of execution.
    """

    outputs: tuple[Output, ...]

    @property
    def holds(self) -> bool:
        """Return True if the root layers' outputs agree; if none was compared, the last compared output decides."""
        final = [output for output in self.outputs if output.path == ROOT] or list(self.outputs[-1:])
        return bool(final) and all(output.error <= AGREES for output in final)

    @property
    def agreeing(self) -> int:
        """Return the number of outputs that agree."""
        return sum(output.error <= AGREES for output in self.outputs)

    @property
    def rank(self) -> tuple[bool, int]:
        """Return the sort key of this proof, larger is better: final outputs first, then the number of agreeing
        outputs.
        """
        return self.holds, self.agreeing

    def table(self, at_most: int = 20) -> str:
        """Return the `at_most` largest diffs as text, one for each layer, in the base's order of execution."""
        worst: dict[str, Output] = {}
        for output in self.outputs:
            if output.path not in worst or worst[output.path].error < output.error:
                worst[output.path] = output
        shown = sorted(worst, key=lambda path: -worst[path].error)[:at_most]
        lines = [
            f"    {path}  {output.slot}: relative L2 {output.error:.3g}, max |diff| {output.max_abs:.3g}"
            for path, output in worst.items()
            if path in shown
        ]
        if len(worst) > len(shown):
            lines.append(f"    ... and {len(worst) - len(shown)} more layers with smaller diffs")
        return "\n".join(lines)


def prove(reference: Step, candidate: Step, alignment: Alignment) -> Proof:
    """Compare the outputs of two forward passes."""
    pairs = (p for p in pair_steps(reference, candidate, alignment) if p.stage == "forward" and p.complete)
    return Proof(tuple(_output(pair) for pair in pairs if not (pair.reference and pair.reference.source.sketched)))


def _output(pair: Pair) -> Output:
    assert pair.reference is not None and pair.candidate is not None
    reference = pair.reference.value
    candidate = pair.layout.apply(pair.candidate.value, reference.shape)
    path, slot = pair.reference.layer, pair.reference.slot
    try:
        reference, candidate = np.broadcast_arrays(reference, candidate)
    except ValueError:
        return Output(path, slot, math.inf, math.inf)
    if reference.size == 0 or reference.dtype.kind not in "fV":
        return Output(path, slot, 0.0 if np.array_equal(reference, candidate) else math.inf, 0.0)
    # The plain norm in the tensors' own precision is enough here, and fast: a search runs several trials.
    sides = Both(reference, candidate).map(lambda a: a.astype(np.promote_types(a.dtype, np.float32), copy=False))
    with np.errstate(all="ignore"):
        apart = np.nan_to_num(sides.reference - sides.candidate)
        size = float(np.linalg.norm(np.nan_to_num(sides.reference)))
    error = float(np.linalg.norm(apart))
    return Output(path, slot, error / size if size else (math.inf if error else 0.0), float(np.abs(apart).max()))


class AssignError(UsageError):
    """Weights can't be carried to the other model. The text shows both layer trees and the place."""


@dataclass(frozen=True)
class Carried:
    """The result of a transfer of weights.

    Attributes:
        alignment: the pairs of layers and of parameters.
        transfer: the tensors that were written, and the parameters that were skipped.
        models: names of the base and the raw model, as ``torch ResNet``.
        seen: evidence from running both models.
        proof: comparison of both models' outputs; None if the models were not run.
        choices: answers that the outputs gave where names and shapes are ambiguous.
        without: kinds of evidence that the outputs showed to be misleading.
    """

    alignment: Alignment
    transfer: Transfer
    models: Both[str]
    seen: Both[RuntimeEvidence]
    proof: Proof | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def proved(self) -> bool:
        """Return True if the models' final outputs agree."""
        return self.proof is not None and self.proof.holds

    @property
    def surely(self) -> bool:
        """Return True if all outputs agree, those of inner layers included.

        `proved` can be True although two layers have swapped partners: freshly initialised norms all hold ones and
        zeros.
        """
        return self.proof is not None and self.proof.holds and self.proof.agreeing == len(self.proof.outputs)

    def described(self) -> list[str]:
        """Return one line for each group of copied or skipped parameters."""
        transfer = self.transfer
        by_rule = len(transfer.calls)
        rules = f", {by_rule} layer{'s' if by_rule > 1 else ''} by rules of your own" if by_rule else ""
        lines = [
            f"weights: {' -> '.join(self.models)} ({transfer.parameters} tensors, {transfer.buffers} buffers{rules})"
        ]
        for base, raw in transfer.left_wholes:
            lines.append(
                f"not carried over, the raw model's stays as it is: `{base}` to `{raw}`. Initialise it yourself, or "
                "register how (add_special_init)"
            )
        if transfer.not_carried:
            lines.append(f"not carried over, the raw model has no place for it: {', '.join(transfer.not_carried)}")
        if transfer.left_as_is:
            lines.append(f"as it was, the base model has nothing for it: {', '.join(transfer.left_as_is)}")
        if transfer.unpaired_buffers:
            lines.append(f"buffers without a partner, as they were: {', '.join(transfer.unpaired_buffers)}")
        return lines


@dataclass(frozen=True)
class Recorded:
    """A recorded forward pass of the base model, and a way to repeat this pass with a live model.

    Attributes:
        step: the recorded forward records, sketches included.
        run: runs a live model on the recorded inputs in the recorded mode, and restores its state. Raises `UsageError`
            if the forward fails.
        telling: True if different outputs prove wrong weights; False if random numbers are drawn, or if only sketches
            are recorded.
        always: True to run the model even if names and shapes leave no doubt.
    """

    step: Step
    run: Callable[[LiveModel], Step]
    telling: bool = True
    always: bool = True


# Pairs with a confidence below this limit are listed.
_SURE = 0.8

#: Kinds of evidence to ignore, one attempt after another: names or the order of execution can be misleading.
_TRUST: tuple[tuple[str, ...], ...] = ((), ("names",), ("execution",), ("names", "order"))


def assign_weight(*args: Any, **kwargs: Any) -> bool:
    """Copy the weights of one model into another: ``assign_weight(base_model, raw_model)``.

    Parameters are paired by names, shapes, nesting and order. Fused matrices are split or joined, and matrices are
    transposed where necessary. The first generation's form is ``assign_weight(layer, module, layer_map=LayerMap())``
    with a paddle layer and a torch module; torch's weights go to paddle. For other pairs in this form the first model
    is the base. Parameters and buffers are copied; dtypes and devices of the raw model stay, tied parameters are
    written once, and no memory is shared. Either all weights are copied or none. One line says what was copied where.
    The base can be a recording: the path of a run folder (its first step) or of safetensors, as `start_from` accepts.

    Args:
        layer_map: pairs of layers, as objects or paths; all other layers are paired automatically.
        inputs: a pair of inputs in the order of the models, in the form that `auto_diff` accepts. Both models are then
            run in eval mode, and their state is restored. The order of execution helps to pair layers; the outputs
            decide what names leave open (the order of rows in a fused matrix); the largest output diff of each layer is
            printed as a proof.
        partial: True to copy all weights that fit and list the others by path; False to refuse if some do not fit. The
            raw model is unchanged after an error in both cases.

    Returns:
        True on success; False after printing the place in both trees, the reason, and hints.

    Raises:
        UsageError: a model belongs to neither framework, or the arguments have neither form.
    """
    call = read_call(args, kwargs)
    try:
        carried = carry_over(_base(call), call.models.candidate, call.layer_map, call.inputs, call.partial)
    except AssignError as error:
        print(f"[AutoDiff] Assign weight Failed !!!\n\n{error}")
        return False
    for ambiguity in carried.alignment.ambiguities:
        if carried.proof is None or ambiguity.about in carried.choices:
            decided = ambiguity.about in carried.choices
            how = "found by running both models" if decided else "assumed; give inputs to prove it"
            print(f"[AutoDiff] {ambiguity.about}: {carried.choices.get(ambiguity.about, ambiguity.options[0])} ({how})")
    if carried.proof is None or not carried.proof.holds:
        for line in _little(carried.alignment):
            print(f"[AutoDiff] {line}")
    if carried.proof is not None:
        print(f"[AutoDiff] Largest output diff of each layer, both models run once:\n{carried.proof.table()}")
    first, *more = carried.described()
    swapped = "; the second argument is the source, as in PaDiff's first generation" if call.swapped else ""
    for line in (f"{first}{swapped}", *more):
        print(f"[AutoDiff] {line}")
    print(f"[AutoDiff] {success_text(carried)}")
    return True


def _base(call: AssignCall) -> Any:
    """Return the source of the weights: a live model, or the stored model of a run folder or of weight files."""
    base = call.models.reference
    if not isinstance(base, (str, os.PathLike)):
        return base
    if call.inputs is not None:
        raise UsageError(f"inputs need both models at hand, and {base} is a recorded one: leave inputs out")
    return open_stored(base, beside=LiveModel.from_model(call.models.candidate).info).model


def success_text(carried: Carried) -> str:
    """Return the line that reports success, and that says if some parameters were skipped."""
    return f"Assign weight success{'' if carried.transfer.whole else ', but for what is listed'} !!!"


def carry_over(
    base_model: Any,
    raw_model: Any,
    layer_map: Any = None,
    inputs: Any = None,
    partial: bool = False,
    may_stay: Collection[tuple[str, str]] = (),
    then: Callable[[Carried], None] | None = None,
    recorded: Recorded | None = None,
) -> Carried:
    """Copy the weights of one model into another like `assign_weight`, without printing.

    Args:
        base_model: a live model, or a `StoredModel`.
        may_stay: pairs of layers, by path, that can stay unchanged if some of their parameters do not fit.
        recorded: the recorded forward pass of a stored base model.
        then: a function called at the end with the result; if this function raises, the weights are restored.

    Raises:
        AssignError: the weights can't be carried over; nothing was changed.
    """
    raw = LiveModel.from_model(raw_model)
    models: Both[Model] = Both(
        base_model if isinstance(base_model, StoredModel) else LiveModel.from_model(base_model), raw
    )
    pairs = GivenMap.resolve(layer_map, models.map(lambda model: model.nodes))
    rules = ruled(models.map(lambda model: model.info.framework))
    pair_of_inputs = Inputs.pair(inputs) if inputs is not None else None
    before = [(tensor, raw.framework.tensors.copy(tensor)) for _, tensor in raw.tensors()]

    def restore() -> None:
        for tensor, array in before:
            raw.framework.tensors.write(tensor, array)

    aligned = functools.partial(align, models.reference.info, raw.info, pairs, whole=rules)
    plan = functools.partial(plan_transfer, models, layer_map=pairs, partial=partial, may_stay=may_stay)
    try:
        carried = _Search(models, plan, aligned, pair_of_inputs, restore, recorded).search()
        if partial and not (carried.transfer.writes or carried.transfer.calls):
            raise AssignError("no parameter of the one model fits the other: nothing was carried over")
        if then is not None:
            then(carried)
        return carried
    except BaseException as error:
        restore()
        if isinstance(error, Exception) and not isinstance(error, UsageError):
            raise AssignError(f"a rule failed, and the raw model is as it was: {error!r}") from error
        raise


class _Search:
    """Search for the alignment of two models; with inputs, the models' outputs choose between candidates."""

    def __init__(
        self,
        models: Both[Model],
        plan: Callable[[Alignment], Transfer],
        aligned: Callable[..., Alignment],
        inputs: Both[Inputs] | None,
        restore: Callable[[], None],
        recorded: Recorded | None = None,
    ) -> None:
        self._models, self._plan, self._restore = models, plan, restore
        self._names = models.map(lambda model: f"{model.info.framework} {model.info.layers[0].type}")
        self._align, self._inputs, self._recorded = aligned, inputs, recorded
        self._seen = NOTHING_SEEN
        self._reference_step: Step | None = None
        self._tried: list[tuple[ParameterPair, ...]] = []
        self._written = False

    def search(self) -> Carried:
        if self._inputs is None and not self._run_recorded():
            alignment = self._align()
            return Carried(alignment, self._write(alignment), self._names, self._seen)
        if self._inputs is not None:
            # The order of execution is stronger evidence than the order of definition; outputs then prove the result.
            steps = self._models.map(live).zip(self._inputs).map(lambda run: run_once(*run))
            self._reference_step, self._seen = steps.reference, steps.map(RuntimeEvidence.from_step)
        best: Carried | None = None
        for without in _TRUST:
            alignment = self._align(seen=self._seen, without=without)
            best = self._better(best, alignment, without, {})
            for ambiguity in best.alignment.ambiguities if best is not None else ():
                for option in ambiguity.options[1:]:
                    if best is not None and not best.surely:
                        choices = {**best.choices, ambiguity.about: option}
                        best = self._better(best, alignment.answered(choices), without, choices)
            if best is not None and (best.surely or (self._recorded is not None and not self._recorded.telling)):
                break
        if best is None:
            # No alignment fits: raise the error of the most likely one.
            self._write(self._align(seen=self._seen))
            raise AssertionError("a plan that failed before has succeeded")
        self._write(best.alignment)
        return best

    def _run_recorded(self) -> bool:
        """Run the raw model on the recorded batch, and return True if this was possible."""
        if self._recorded is None or (not self._recorded.always and self._align().sure):
            return False
        try:
            step = self._recorded.run(live(self._models.candidate))
        except UsageError:  # the model needs other inputs, or some that were not recorded
            return False
        evidence = Both(self._recorded.step, step).map(RuntimeEvidence.from_step)
        self._reference_step, self._seen = self._recorded.step, evidence.map(lambda side: replace(side, values=None))
        return True

    def _better(
        self, best: Carried | None, alignment: Alignment, without: tuple[str, ...], choices: Mapping[str, str]
    ) -> Carried | None:
        """Try another alignment; return its result, or `best` if at least as many outputs agree for `best`."""
        if alignment.parameters in self._tried:
            return best
        self._tried.append(alignment.parameters)
        try:
            transfer = self._write(alignment)
        except AssignError:
            return best
        assert self._reference_step is not None
        step = self._again()
        proof = prove(self._reference_step, step, alignment)
        if best is not None and best.proof is not None and best.proof.rank >= proof.rank:
            return best
        return Carried(alignment, transfer, self._names, self._seen, proof, choices, without)

    def _again(self) -> Step:
        """Run the raw model with its current weights, and return the records."""
        raw = live(self._models.candidate)
        if self._inputs is not None:
            return run_once(raw, self._inputs.candidate)
        assert self._recorded is not None
        return self._recorded.run(raw)

    def _write(self, alignment: Alignment) -> Transfer:
        try:
            transfer = self._plan(alignment)
        except TransferError as error:
            raise AssignError(_explain(error, alignment, self._models)) from None
        if self._written:
            self._restore()  # undo the writes of an earlier attempt
        self._written = True
        raw = live(self._models.candidate)
        for tensor, array in transfer.writes:
            raw.framework.tensors.write(tensor, array)
        for call in transfer.calls:
            call()
        return transfer


def weak_pairs(alignment: Alignment) -> list[LayerPair]:
    """Return the pairs of layers with parameters whose confidence is low."""
    return [p for p in alignment.pairs if p.reference.parameters and p.confidence < _SURE and p.reason != "given"]


def _little(alignment: Alignment) -> list[str]:
    """Return a line that names the layers paired on little evidence; no line if there are none."""
    pairs = weak_pairs(alignment)
    if not pairs:
        return []
    shown = [
        f"`{p.reference.path}` with `{p.candidate.path}`"
        + (f" (or {', '.join(p.alternatives)})" if p.ambiguous else "")
        for p in pairs[:4]
    ]
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    return [f"Paired on little evidence: {', '.join(shown)}{more}; inputs=(...) proves it by the outputs"]


def _explain(error: TransferError, alignment: Alignment, models: Both[Model]) -> str:
    what = str(error)
    sides = Both("base", "raw ").zip(models.zip(error.paths))
    places = [
        f"    {name} ({model.info.framework}): `{type(model.layer(path)).__name__}` at `{path}`"
        for name, (model, path) in sides
        if path is not None
    ]
    trees = [
        f"{name.strip().capitalize()} model ({model.info.framework})\n=========================\n"
        + tree_text(model.info.layers, path)
        for name, (model, path) in sides
    ]
    doubtful = [
        f"    `{pair.reference.path}` was paired with `{pair.candidate.path}`, but {', '.join(pair.alternatives)} "
        "would fit nearly as well"
        for pair in alignment.ambiguous[:8]
    ]
    hints = [
        "Hint:",
        "    1. define layers and parameters in the same order in both models,",
        "    2. or say which layers answer to each other (set_layer_map, LayerMap),",
        "    3. or register how such a layer is carried over (add_special_init),",
        "    4. or carry over all that fits and have the rest listed: ",
    ]
    if isinstance(models.reference, StoredModel):
        hints[-1] += "partial=True, for start_from and replay alike."
    else:
        hints[-1] += "assign_weight(base_model, raw_model, partial=True),"
        hints.append("       and then auto_diff(..., auto_init=False).")
    return "\n".join(
        ["Error occurred between:", *places, "", f"{what[:1].upper()}{what[1:]}.", "", *trees, ""]
        + (["Ambiguous:", *doubtful, ""] if doubtful else [])
        + hints
    )
