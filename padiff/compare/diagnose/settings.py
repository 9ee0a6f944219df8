"""Settings that two runs declare differently, and what trainers do otherwise, as the cause of a diff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.declared.layers import together
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.transforms import facts, recognised
from padiff.compare.diagnose.loss_calls import loss_calls
from padiff.compare.diagnose.place import Place
from padiff.compare.measure.operands import labels_by_call
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.model import equivalents
from padiff.records import (
    LOOP,
    STAGES,
    Both,
    Cause,
    Difference,
    FirstDiff,
    Pair,
    Record,
    Report,
    is_below,
    is_loss,
    is_of_loss,
)
from padiff.records.declared import OF_LAYERS

# The most differences that a sentence names.
_SAID = 3
# Causes of inputs that belong to another call.
_OTHER_BATCHES = frozenset({"other_batch", "sizes", "evaluation"})
# Settings that determine a layer's constant tables.
_OF_TABLES = frozenset({"rope_theta"})
# Settings that a layer's own code uses between its inner layers.
_OF_CODE = frozenset({"dropout", "p", "num_heads", "num_kv_heads", "scale", "norm_first"})
# Stages whose tensors a kind of difference changes.
_SHOWS = {
    "layer_setting": ("forward", "backward"),
    "mode": ("forward", "backward"),
    "argument": ("forward", "backward"),
    "loss_setting": ("loss",),
    "clipping": ("grad",),
    "trainable": ("grad", "update"),
    "tied": ("grad", "update"),
    "optimizer_setting": ("update",),
    "optimizer_state": ("update",),
    "learning_rate": ("update",),
    "left_over": ("grad",),
    # At other stages, differences of trainers are computed, or explain the learning rates.
    "trainer": ("backward",),
}


def settings_first(found: Sequence[tuple[int, Difference]], first: FirstDiff | None) -> FirstDiff | None:
    """Return the first diff: a difference of settings or the first tensor that differs, whichever comes first.

    At the same step and stage, the tensor goes first. Settings of the tensor's own layer, and the same difference in
    other layers, are ignored, as these settings explain the tensor's diff.

    Args:
        found: the differences of settings in the compared steps, with the step numbers.
        first: the first tensor that differs; `None` if none does.
    """
    pair = first.diff.pair if first is not None and first.diff is not None else None
    visible = {
        difference.name
        for _, difference in found
        if pair is not None and difference.kind in OF_LAYERS and _acts(difference, pair)
    }
    counting = [
        (number, STAGES.index(difference.stage), k)
        for k, (number, difference) in enumerate(found)
        if difference.changes and not (difference.kind in OF_LAYERS and difference.name in visible)
    ]
    earliest = min(counting, default=None)
    if earliest is None or (first is not None and (first.step, _place(first, found)) <= earliest[:2]):
        return first
    concurrent = [found[k][1] for number, stage, k in counting if (number, stage) == earliest[:2]]
    difference = found[earliest[2]][1]
    same_kind = [d for d in concurrent if d.kind == difference.kind]
    stated = same_kind if difference.kind not in OF_LAYERS else _of_one_layer(same_kind)
    return FirstDiff(
        earliest[0],
        difference.stage,
        difference.place.reference,
        difference.place.candidate,
        slot=difference.name,
        cause=as_computed(
            cause_of(stated), stated, first.cause if first is not None else None, first.step if first else 0
        ),
        statement=_statement(earliest[0], concurrent, first),
        parameters=difference.parameters,
    )


def shows(later: Report, earlier: Report) -> bool:
    """Return True if a step's first diff is the first tensor that shows the settings which an earlier report names.

    The settings and the tensor are then one fault, at the place of the tensor.
    """
    first, settings = later.first_diff, earlier.first_diff
    if first is None or first.diff is None or settings is None or settings.diff is not None:
        return False
    return settings_first([(settings.step, difference) for difference in earlier.settings_differ], first) is first


def _place(first: FirstDiff, found: Sequence[tuple[int, Difference]]) -> int:
    """Return the place of a first diff among the stages; after the forward for other batches beside another mode or
    model.

    Calls in evaluation mode are not recorded beside calls in training mode, and a model that one loop calls more often
    has other calls, so that other calls are compared then.
    """
    others = any(d.kind in ("mode", "model") and d.changes and number <= first.step for number, d in found)
    other_batches = first.stage == "input" and first.cause is not None and first.cause.kind in _OTHER_BATCHES
    return STAGES.index("backward" if others and other_batches else first.stage)


def as_computed(
    cause: Cause | None, differences: Sequence[Difference], computed: Cause | None, step: int
) -> Cause | None:
    """Return the cause that differences of settings give, marked as proven if a computed cause confirms the
    differences.

    Args:
        cause: the cause that the differences give.
        differences: the differences that the cause is about.
        computed: the cause that explains the first tensor that differs, at the step.
        step: the number of that step.
    """
    if cause is None or computed is None or not computed.proven:
        return cause
    if cause.kind == computed.kind == "micro_batches":
        return replace(computed, evidence="; ".join(text for text in (computed.evidence, cause.evidence) if text))
    kinds = computed.kind.split("+")
    if not all(any(_names(difference, kind) for kind in kinds) for difference in differences):
        return cause
    notes = f"{cause.evidence}; " * bool(cause.evidence)
    evidence = f"{notes}at step {step}, {computed.evidence}"
    return replace(cause, proven=True, evidence=evidence, fix=cause.fix or computed.fix, remaining=computed.remaining)


def _names(difference: Difference, kind: str) -> bool:
    """Return True if the kind of a computed cause is the difference's setting, e.g. ``adam_beta2`` for ``beta2``."""
    return kind == difference.kind or kind == difference.name or kind.endswith(f"_{difference.name}")


def fixes_all(differences: Sequence[Difference], kind: str) -> bool:
    """Return True if differences that have a fix name each part of a computed cause's kind."""
    fixed = [difference for difference in differences if difference.fix]
    return all(
        any(_names(each, part) or part.startswith(f"{each.name}_") for each in fixed) for part in kind.split("+")
    )


def before_the_first(differences: Sequence[Difference], step: int) -> FirstDiff | None:
    """Return the settings that differ before the first step is compared, as the first diff; `None` if none differ."""
    if not differences:
        return None
    first = differences[0]
    return FirstDiff(
        step,
        first.stage,
        first.place.reference,
        first.place.candidate,
        slot=first.name,
        cause=cause_of([d for d in differences if d.kind == first.kind]),
        statement="The runs are set differently, before any step is compared: "
        f"{', '.join(_texts(differences[:_SAID]))}. They do not compute the same.",
    )


def _of_one_layer(differences: Sequence[Difference]) -> list[Difference]:
    return [d for d in differences if d.layers == differences[0].layers]


def _statement(step: int, differences: Sequence[Difference], first: FirstDiff | None) -> str:
    """Return the sentences that say what is wrong.

    Args:
        step: the number of the step at which the settings differ.
        differences: all differences of settings at one step and stage.
        first: the first tensor that differs; `None` if none does.
    """
    difference = differences[0]
    if difference.kind in OF_LAYERS:
        here = _of_one_layer(differences)
        others = len({d.layers for d in differences}) - 1
        more = f", and {others} more layer{'s are' if others > 1 else ' is'}" if others else ""
        text = (
            f"layer {difference.about} is set differently: {', '.join(x.text_alone for x in here)}{_noted(here)}{more}"
        )
        compute = "The models do not compute the same"
    else:
        more_text = f", and {len(differences) - _SAID} more" if len(differences) > _SAID else ""
        here = list(differences[:_SAID])
        text = f"the runs are set differently from step {step} on, stage {difference.stage}: {', '.join(_texts(here))}"
        text += f"{_noted(here)}{more_text}"
        compute = "They do not compute the same"
    if first is None:
        later = "other inputs, or more steps, will show it"
        return f"No tensor differs beyond its limit, but {text}. {compute}; {later}."
    where = f" first at step {step}, stage {difference.stage}: {text}" if difference.kind in OF_LAYERS else f": {text}"
    return f"The runs differ{where}. {compute}. The first tensor that differs: {first.place_text}."


def _noted(differences: Sequence[Difference]) -> str:
    notes = "; ".join(dict.fromkeys(d.note for d in differences if d.note))
    return f" ({notes})" if notes else ""


def _texts(differences: Sequence[Difference]) -> list[str]:
    """Return the differences in words; if all belong to the same place, only the first text names the place."""
    alike = len({(d.about, d.parameters) for d in differences}) == 1
    return [d.text_alone if d.layers.reference or (k and alike) else d.text for k, d in enumerate(differences)]


def cause_of(differences: Sequence[Difference]) -> Cause | None:
    """Return differences of one kind as one cause; `None` without differences."""
    if not differences:
        return None
    first = differences[0].cause()
    if len(differences) == 1:
        return first
    more = f", and {len(differences) - _SAID} more" if len(differences) > _SAID else ""
    sentence = f"{differences[0].said}: {', '.join(_texts(differences[:_SAID]))}{more}"
    notes = "; ".join(dict.fromkeys(d.note for d in differences if d.note))
    return replace(first, sentence=sentence, evidence=notes, fix=together([d.fix for d in differences]))


def cause_in_settings(pair: Pair, differences: Sequence[Difference]) -> Cause | None:
    """Return the differences of settings that explain a diff, as a cause; `None` if none does."""
    acting = [d for d in differences if _acts(d, pair)]
    counting = [d for d in acting if d.changes] or acting
    if not counting:
        return None
    return cause_of([d for d in counting if d.kind == counting[0].kind])


def cause_around(place: Place, differences: Sequence[Difference]) -> Cause | None:
    """Return the settings of the layer around a diff, or the numbers that the model is called with, as its cause, if
    the diff comes from a layer's own code between its inner layers; else `None`.
    """
    record = place.diff.pair.reference
    if record is None or not place.last_agreeing:
        return None
    around = [
        d
        for d in differences
        if d.kind == "layer_setting"
        and d.name in _OF_CODE
        and any(
            # The order of the inner layers shows in the first of them already.
            is_below(record.layer, path) and (d.name == "norm_first" or is_below(place.last_agreeing, path))
            for path in d.layers.reference
        )
    ]
    nearest = max((d.layers.reference[0] for d in around), key=len, default="")
    found = cause_of([d for d in around if d.layers.reference[0] == nearest])
    return found or cause_of([d for d in differences if d.kind == "argument"])


def _acts(difference: Difference, pair: Pair) -> bool:
    stage, kind = pair.stage, difference.kind
    if kind in OF_LAYERS and stage == "weight":
        running = equivalents.slot(pair.anchor.slot).startswith("running_")
        shows = kind == "mode" or difference.name == "momentum" if running else difference.name in _OF_TABLES
        return shows and _at(difference.layers, pair)
    if stage not in _SHOWS.get(kind, ()) or (kind == "layer_setting" and difference.name == "momentum"):
        return False
    if kind in OF_LAYERS:
        return _at(difference.layers, pair)
    if kind == "trainer":
        return pair.complete and stage == difference.stage
    if pair.anchor.layer == LOOP:
        return kind == ("learning_rate" if stage == "update" else "loss_setting")
    if not pair.complete and kind != "trainable":
        return False
    return not difference.parameters.reference or any(
        record is not None and _site(record) in sites for record, sites in zip(pair.sides, difference.parameters)
    )


def _at(layers: Both[tuple[str, ...]], pair: Pair) -> bool:
    return any(record is not None and record.layer in paths for record, paths in zip(pair.sides, layers))


def _site(record: Record) -> str:
    return f"{record.layer}/{record.slot}"


# The largest relative error of a computed loss. Chosen: far beyond rounding, and below the effect of other counts.
_NEAR = 1e-4
# The fewest tokens of a sequence whose labels show a shift.
_SHORTEST = 3
_OVER_TOKENS = "over the tokens of a step"


def trainer_cause(scene: DiffContext) -> Cause | None:
    """Return the cause of a first diff that is a loss, labels of a loss, or the gradient norm that clipping measured.

    `None` if the recorded values do not show the cause.
    """
    pair = scene.diff.pair
    if pair.stage == "grad" and pair.complete and is_of_loss(pair.anchor):
        return _norm(scene)
    # A model may return its loss as an output.
    gives_loss = pair.stage == "forward" and pair.anchor.shape == ()
    if not (pair.stage == "loss" or gives_loss) or not pair.complete:
        return None
    try:
        return _unshifted(scene) or (_mean(scene) if is_loss(pair.anchor) else None)
    except (RunFolderError, SketchOnlyError):
        return None


def _norm(scene: DiffContext) -> Cause | None:
    figures = scene.diff.figures
    if figures is None or not figures.reference_l2:
        return None
    ratio = figures.candidate_l2 / figures.reference_l2
    text = (
        f"before they are clipped, all gradients together are {ratio:.5g} times the reference's: clipping to a norm "
        "hides what they are multiplied by"
    )
    number = recognised(ratio, facts(scene))
    return Cause("gradient_scale", f"{text}; {number.text}" if number is not None else text)


def _declared(scene: DiffContext, name: str) -> Difference | None:
    return next(
        (difference for difference in scene.declared if difference.kind == "trainer" and difference.name == name), None
    )


def _unshifted(scene: DiffContext) -> Cause | None:
    """Return a cause if the labels of one side are the other side's labels shifted by one token; else `None`."""
    sides = scene.sides(scene.number)
    if sides is None:
        return None
    reference, candidate = sides.map(lambda step: labels_by_call(step.records))
    # Token ids: integers in rows, as many as there are labels.
    token_ids = [d.pair.anchor for d in scene.step if d.pair.stage == "input" and d.pair.anchor.dtype.startswith("int")]
    sizes = {math.prod(record.shape) for record in reference.values()}
    lengths = {record.shape[-1] for record in token_ids if len(record.shape) == 2 and math.prod(record.shape) in sizes}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    ways = set()
    for call in reference.keys() & candidate.keys():
        reference_labels, candidate_labels = reference[call].value.ravel(), candidate[call].value.ravel()
        if reference_labels.size != candidate_labels.size or reference_labels.size % length or length < _SHORTEST:
            return None
        ways.add(_way(reference_labels.reshape(-1, length), candidate_labels.reshape(-1, length)))
    if len(ways) != 1 or None in ways:
        return None
    (behind,) = ways
    later, fix = ("candidate", "labels[:, :-1] = labels[:, 1:]; labels[:, -1] = -100")
    if behind == "reference":
        later, fix = "reference", ""
    text = (
        f"the {later}'s labels are not shifted: its loss is of the tokens that go in, the other's of the tokens that "
        "follow them"
    )
    declared = _declared(scene, "labels are shifted")
    note = f"; {declared.note}" if declared is not None else ""
    return Cause("labels_shifted", text, True, f"moved on by one place, all labels are the same{note}", fix)


def _way(reference: np.ndarray, candidate: np.ndarray) -> str | None:
    """Return the side whose labels are one place behind the other's; `None` if neither is."""
    if np.array_equal(reference, candidate):
        return None
    for behind, labels, other_labels in (("candidate", candidate, reference), ("reference", reference, candidate)):
        if _alike(labels[:, 1:], other_labels[:, :-1]):
            return behind
    return None


def _alike(first: np.ndarray, second: np.ndarray) -> bool:
    counted = (first >= 0) | (second >= 0)
    return bool(counted.any() and (first == second)[counted].all())


def _mean(scene: DiffContext) -> Cause | None:
    """Return a cause if one trainer averages the loss over the tokens of a step, the other over each micro-batch."""
    difference = _declared(scene, "the loss is a mean")
    sides = scene.sides(scene.number)
    if difference is None or sides is None:
        return None
    losses = sides.map(lambda step: [float(np.ravel(r.value)[0]) for r in step.records if is_loss(r)])
    calls = sides.zip(scene.runs).map(lambda side: loss_calls(side[0], side[1].info))
    counts: Both[list[int]] = calls.map(
        lambda some: [
            int((call.inputs["labels"] >= 0).sum()) for call in some if call.inputs and "labels" in call.inputs
        ]
    )
    if not counts.reference or counts.reference != counts.candidate:
        return None
    tokens = counts.reference
    if any(len(side) != len(tokens) for side in losses) or not all(tokens):
        return None
    shares = [sum(tokens) / (len(tokens) * count) for count in tokens]
    factor = [1 / share for share in shares] if difference.values.candidate == _OVER_TOKENS else shares
    proven = np.allclose(np.multiply(losses.reference, factor), losses.candidate, rtol=_NEAR, atol=0)
    cause = difference.cause()
    evidence = f"the micro-batches have {', '.join(map(str, tokens))} labels that count"
    if proven:
        evidence += ", and counted as the candidate counts, the reference's losses are the candidate's"
    return Cause(cause.kind, cause.sentence, bool(proven), f"{evidence}; {difference.note}", cause.fix)
