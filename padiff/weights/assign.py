"""``assign_weight``: all of one model's weights into another, or none."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from padiff.align import NOTHING_SEEN, Alignment, LayerPair, ParameterPair, Seen, align
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.model.live_model import LiveModel
from padiff.records import Both, Step
from padiff.records.tree_text import tree_text
from padiff.weights.arguments import AssignCall, read_call
from padiff.weights.output_proof import Inputs, Proof, prove, run_once
from padiff.weights.special_init import ruled
from padiff.weights.stored import open_stored
from padiff.weights.stored_model import StoredModel
from padiff.weights.transfer import Model, Transfer, TransferError, live, plan_transfer


class AssignError(UsageError):
    """The weights of one model can't be carried to the other; the text shows both trees and the place."""


@dataclass(frozen=True)
class Carried:
    """Weights that were carried over.

    Attributes:
        alignment: which layers and parameters answered to each other.
        transfer: what was written, and what was left.
        models: the base and the raw model, as ``torch ResNet``.
        seen: what running the models showed.
        proof: both models' outputs, where there were inputs to run them on.
        choices: what the outputs decided where names and shapes did not tell.
        without: kinds of evidence that misled, as the outputs showed.
    """

    alignment: Alignment
    transfer: Transfer
    models: Both[str]
    seen: Both[Seen]
    proof: Proof | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def proved(self) -> bool:
        return self.proof is not None and self.proof.holds

    @property
    def surely(self) -> bool:
        """Whether all outputs agree, inside too: what models begin with (norms of ones and zeros) may hold the proof
        though two layers have each other's partners.
        """
        return self.proof is not None and self.proof.holds and self.proof.agreeing == len(self.proof.outputs)

    def described(self) -> list[str]:
        """What was copied where, and what was not, a line each."""
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
        return lines


@dataclass(frozen=True)
class Recorded:
    """What a recorded model was run on, and gave.

    Attributes:
        step: its records, those of which the values were kept.
        run: runs a live model on the same, in the same mode, leaving no trace. Raises `UsageError` if that fails.
        telling: whether outputs that differ tell of wrong weights; where something random is drawn they do not.
        always: whether to run the model also where names and shapes leave nothing open.
    """

    step: Step
    run: Callable[[LiveModel], Step]
    telling: bool = True
    always: bool = True


# Below that confidence a pair is listed.
_SURE = 0.8

#: What not to trust, one try after another: names mislead, or layers run in another order, where outputs say so.
_TRUST: tuple[tuple[str, ...], ...] = ((), ("names",), ("execution",), ("names", "order"))


def assign_weight(*args: Any, **kwargs: Any) -> bool:
    """Copy the weights of one model into another: ``assign_weight(base_model, raw_model)``.

    Which parameter answers to which is found: from names, shapes, nesting and order. Fused matrices are taken apart or
    put together, matrices transposed. The first generation's form is ``assign_weight(layer, module,
    layer_map=LayerMap())``: a paddle layer and a torch module, and torch's weights go to paddle. Of any other pair the
    first is the base in that form, too. Parameters and buffers are carried over, dtype and device stay, tied parameters
    are written once, no memory is shared. Either all of it happens or nothing. One line says what was copied where.
    The base may be recorded: the path of a run folder (its first step), or of safetensors, as `start_from` takes.

    Args:
        layer_map: layers that answer to each other, as objects or paths; the rest is found around them.
        inputs: a pair of inputs as `auto_diff` takes them, in the order of the models. With it, both models are run
            (in eval mode, leaving no trace): the order in which layers run helps to pair them, what no name tells (the
            order of rows in a fused matrix) is decided by the outputs, and the largest output diff of each layer is
            printed as a proof.
        partial: carry over all that fits, and list the rest by path, instead of refusing where not everything fits.
            After an error the raw model is as it was all the same.

    Returns:
        True; or False, after printing where it failed in both trees, why, and what to try.

    Raises:
        UsageError: a model is of neither framework, or the arguments are of neither form.
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
    first, *rest = carried.described()
    swapped = "; the second argument is the source, as in PaDiff's first generation" if call.swapped else ""
    for line in (f"{first}{swapped}", *rest):
        print(f"[AutoDiff] {line}")
    print(f"[AutoDiff] {success_text(carried)}")
    return True


def _base(call: AssignCall) -> Any:
    """The model that the weights come from: a live one, or that of a run folder or of files."""
    base = call.models.reference
    if not isinstance(base, (str, os.PathLike)):
        return base
    if call.inputs is not None:
        raise UsageError(f"inputs need both models at hand, and {base} is a recorded one: leave inputs out")
    return open_stored(base, beside=LiveModel.of(call.models.candidate).info).model


def success_text(carried: Carried) -> str:
    """That the weights were carried over, and whether all of them were."""
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
    """As `assign_weight`, without printing.

    Args:
        base_model: a live model, or a recorded one.
        may_stay: pairs of layers, by path, that stay as they are where not all that they hold can be carried over.
        recorded: the step that a recorded base model ran.
        then: what else belongs to it: called at the end, the weights are put back if it raises.

    Raises:
        AssignError: the weights can't be carried over; nothing was changed.
    """
    raw = LiveModel.of(raw_model)
    models: Both[Model] = Both(base_model if isinstance(base_model, StoredModel) else LiveModel.of(base_model), raw)
    pairs = GivenMap.resolve(layer_map, models.map(lambda model: model.nodes))
    rules = ruled(models.map(lambda model: model.info.framework))
    given = Inputs.pair(inputs) if inputs is not None else None
    before = [(tensor, raw.framework.tensors.copy(tensor)) for _, tensor in raw.tensors()]

    def restore() -> None:
        for tensor, array in before:
            raw.framework.tensors.write(tensor, array)

    aligned = functools.partial(align, models.reference.info, raw.info, pairs, whole=rules)
    plan = functools.partial(plan_transfer, models, layer_map=pairs, partial=partial, may_stay=may_stay)
    try:
        carried = _Search(models, plan, aligned, given, restore, recorded).run()
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
    """Looks for the alignment to carry weights over by; with inputs at hand, both models' outputs decide."""

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

    def run(self) -> Carried:
        if self._inputs is None and not self._run_recorded():
            alignment = self._align()
            return Carried(alignment, self._write(alignment), self._names, self._seen)
        if self._inputs is not None:
            # What runs when tells more than any definition; outputs then prove the whole.
            steps = self._models.map(live).zip(self._inputs).map(lambda run: run_once(*run))
            self._reference_step, self._seen = steps.reference, steps.map(Seen.of)
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
            # No way fits: the error is about the best guess.
            self._write(self._align(seen=self._seen))
            raise AssertionError("a plan that failed before has succeeded")
        self._write(best.alignment)
        return best

    def _run_recorded(self) -> bool:
        """Run the raw model as the recorded one was run; whether it can be."""
        if self._recorded is None or (not self._recorded.always and self._align().sure):
            return False
        try:
            step = self._recorded.run(live(self._models.candidate))
        except UsageError:  # it takes other inputs, or more than was recorded
            return False
        seen = Both(self._recorded.step, step).map(Seen.of)
        self._reference_step, self._seen = self._recorded.step, seen.map(lambda side: replace(side, values=None))
        return True

    def _better(
        self, best: Carried | None, alignment: Alignment, without: tuple[str, ...], choices: Mapping[str, str]
    ) -> Carried | None:
        """The better one of what was found so far and of another try, by how many outputs agree."""
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
        """What the raw model computes now."""
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
            self._restore()  # what another try wrote, and this one leaves
        self._written = True
        raw = live(self._models.candidate)
        for tensor, array in transfer.writes:
            raw.framework.tensors.write(tensor, array)
        for call in transfer.calls:
            call()
        return transfer


def weak_pairs(alignment: Alignment) -> list[LayerPair]:
    """The layers with parameters that were paired on little evidence."""
    return [p for p in alignment.pairs if p.reference.parameters and p.confidence < _SURE and p.reason != "given"]


def _little(alignment: Alignment) -> list[str]:
    """What was paired on little evidence, in words."""
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
        hints[-1] += "start_from(..., partial=True)."
    else:
        hints[-1] += "assign_weight(base_model, raw_model, partial=True),"
        hints.append("       and then auto_diff(..., auto_init=False).")
    return "\n".join(
        ["Error occurred between:", *places, "", f"{what[:1].upper()}{what[1:]}.", "", *trees, ""]
        + (["Ambiguous:", *doubtful, ""] if doubtful else [])
        + hints
    )
