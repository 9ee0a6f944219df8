"""What two runs declare differently, as where they part, and as the cause of a diff."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from padiff.compare.declared.fixes import together
from padiff.compare.diagnose.place import Place
from padiff.model import equivalents
from padiff.records import LOOP, STAGES, Both, Cause, Difference, FirstDiff, Pair, Record, is_below

# Differences that a sentence says.
_SAID = 3
_OF_LAYERS = ("layer_setting", "mode")
# Settings that a layer makes its tables of.
_OF_TABLES = frozenset({"rope_theta"})
# Settings by which a layer's own code computes between the layers inside of it.
_OF_CODE = frozenset({"dropout", "p", "num_heads", "num_kv_heads", "scale"})
# Where else than at its own stage a kind of difference shows.
_SHOWS = {
    "layer_setting": ("forward", "backward"),
    "mode": ("forward", "backward"),
    "loss_setting": ("loss",),
    "clipping": ("grad",),
    "trainable": ("grad", "update"),
    "tied": ("grad", "update"),
    "optimizer_setting": ("update",),
    "learning_rate": ("update",),
    "left_over": ("grad",),
    # What acts elsewhere is computed, or explains the learning rates.
    "trainer": ("backward",),
}


def settings_first(found: Sequence[tuple[int, Difference]], first: FirstDiff | None) -> FirstDiff | None:
    """The first diff, given what differs in the settings of the compared steps, with their numbers, and the first
    tensor that parts. A tensor goes before settings of its own step and stage, and before what explains it in its own
    layer, and in others that are set alike, whenever that is.
    """
    pair = first.diff.pair if first is not None and first.diff is not None else None
    shown = {one.name for _, one in found if pair is not None and one.kind in _OF_LAYERS and _acts(one, pair)}
    counting = [
        (number, STAGES.index(one.stage), k)
        for k, (number, one) in enumerate(found)
        if one.changes and not (one.kind in _OF_LAYERS and one.name in shown)
    ]
    place = min(counting, default=None)
    if place is None or (first is not None and (first.step, STAGES.index(first.stage)) <= place[:2]):
        return first
    together_ = [found[k][1] for number, stage, k in counting if (number, stage) == place[:2]]
    one = found[place[2]][1]
    same_kind = [other for other in together_ if other.kind == one.kind]
    said = same_kind if one.kind not in _OF_LAYERS else _of_one_layer(same_kind)
    return FirstDiff(
        place[0],
        one.stage,
        one.place.reference,
        one.place.candidate,
        slot=one.name,
        cause=as_computed(cause_of(said), said, first.cause if first is not None else None, first.step if first else 0),
        statement=_statement(place[0], together_, first),
        parameters=one.parameters,
    )


def as_computed(
    cause: Cause | None, differences: Sequence[Difference], computed: Cause | None, step: int
) -> Cause | None:
    """What is declared differently, proven where computing with it explains what was recorded.

    Args:
        differences: those that the cause is about.
        computed: what explains the first tensor that parts, at the step.
    """
    if cause is None or computed is None or not computed.proven:
        return cause
    if cause.kind == computed.kind == "micro_batches":
        return replace(computed, evidence="; ".join(text for text in (computed.evidence, cause.evidence) if text))
    kinds = computed.kind.split("+")
    if not all(any(_names(one, kind) for kind in kinds) for one in differences):
        return cause
    notes = f"{cause.evidence}; " * bool(cause.evidence)
    evidence = f"{notes}at step {step}, {computed.evidence}"
    return replace(cause, proven=True, evidence=evidence, fix=cause.fix or computed.fix)


def _names(difference: Difference, kind: str) -> bool:
    """Whether a computed cause's kind is the setting: ``adam_beta2`` is beta2."""
    return kind == difference.kind or kind == difference.name or kind.endswith(f"_{difference.name}")


def before_the_first(differences: Sequence[Difference], step: int) -> FirstDiff | None:
    """What two runs are set differently in, as where they part, before their first step is compared."""
    if not differences:
        return None
    one = differences[0]
    return FirstDiff(
        step,
        one.stage,
        one.place.reference,
        one.place.candidate,
        slot=one.name,
        cause=cause_of([other for other in differences if other.kind == one.kind]),
        statement="The runs are set differently, before any step is compared: "
        f"{', '.join(_texts(differences[:_SAID]))}. They do not compute the same.",
    )


def _of_one_layer(differences: Sequence[Difference]) -> list[Difference]:
    return [one for one in differences if one.layers == differences[0].layers]


def _statement(step: int, differences: Sequence[Difference], first: FirstDiff | None) -> str:
    """What is wrong, given all that counts at one stage, and the first tensor that parts, if one does."""
    one = differences[0]
    if one.kind in _OF_LAYERS:
        here = _of_one_layer(differences)
        others = len({other.layers for other in differences}) - 1
        more = f", and {others} more layer{'s are' if others > 1 else ' is'}" if others else ""
        said = f"layer {one.about} is set differently: {', '.join(x.text_alone for x in here)}{_noted(here)}{more}"
        compute = "The models do not compute the same"
    else:
        rest = f", and {len(differences) - _SAID} more" if len(differences) > _SAID else ""
        here = list(differences[:_SAID])
        said = f"the runs are set differently from step {step} on, stage {one.stage}: {', '.join(_texts(here))}"
        said += f"{_noted(here)}{rest}"
        compute = "They do not compute the same"
    if first is None:
        later = "other inputs, or more steps, will show it"
        return f"No tensor parts by more than is allowed, but {said}. {compute}; {later}."
    where = f"at step {step}, stage {one.stage}: {said}" if one.kind in _OF_LAYERS else f"as {said}"
    return f"The runs part {where}. {compute}. The first tensor that parts: {first.place_text}."


def _noted(differences: Sequence[Difference]) -> str:
    notes = "; ".join(dict.fromkeys(one.note for one in differences if one.note))
    return f" ({notes})" if notes else ""


def _texts(differences: Sequence[Difference]) -> list[str]:
    """What differs, in words; whose it is, is said once where all are of one."""
    alike = len({(one.about, one.parameters) for one in differences}) == 1
    return [one.text_alone if one.layers.reference or (k and alike) else one.text for k, one in enumerate(differences)]


def cause_of(differences: Sequence[Difference]) -> Cause | None:
    """Differences of one kind as one cause."""
    if not differences:
        return None
    first = differences[0].cause()
    if len(differences) == 1:
        return first
    more = f", and {len(differences) - _SAID} more" if len(differences) > _SAID else ""
    sentence = f"{differences[0].said}: {', '.join(_texts(differences[:_SAID]))}{more}"
    notes = "; ".join(dict.fromkeys(one.note for one in differences if one.note))
    return Cause(first.kind, sentence, evidence=notes, fix=together([one.fix for one in differences]))


def cause_in_settings(pair: Pair, differences: Sequence[Difference]) -> Cause | None:
    """How what the runs declare differently explains a diff; else `None`."""
    acting = [one for one in differences if _acts(one, pair)]
    counting = [one for one in acting if one.changes] or acting
    if not counting:
        return None
    return cause_of([one for one in counting if one.kind == counting[0].kind])


def cause_around(place: Place, differences: Sequence[Difference]) -> Cause | None:
    """How the settings of a layer explain a diff that comes from its own code between two layers inside of it."""
    record = place.diff.pair.reference
    if record is None or not place.last_agreeing:
        return None
    around = [
        one
        for one in differences
        if one.kind == "layer_setting"
        and one.name in _OF_CODE
        and any(is_below(record.layer, path) and is_below(place.last_agreeing, path) for path in one.layers.reference)
    ]
    nearest = max((one.layers.reference[0] for one in around), key=len, default="")
    return cause_of([one for one in around if one.layers.reference[0] == nearest])


def _acts(difference: Difference, pair: Pair) -> bool:
    stage, kind = pair.stage, difference.kind
    if kind in _OF_LAYERS and stage == "weight":
        running = equivalents.slot(pair.anchor.slot).startswith("running_")
        shows = kind == "mode" or difference.name == "momentum" if running else difference.name in _OF_TABLES
        return shows and _at(difference.layers, pair)
    if stage not in _SHOWS.get(kind, ()) or (kind == "layer_setting" and difference.name == "momentum"):
        return False
    if kind in _OF_LAYERS:
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
