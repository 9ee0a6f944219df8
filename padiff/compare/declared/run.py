"""All declared differences of two runs: trainers, precision, clipping, the loss and trained parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from padiff.align import Alignment
from padiff.align.call_order import outermost_calls
from padiff.compare.declared.layers import clip_fix, layer_differences, loss_fix, mode_differences
from padiff.compare.declared.optimizers import (
    GroupPair,
    Optimizers,
    group_pairs,
    manual_weight_decay,
    optimizer_differences,
    rate_differences,
    rate_of,
    rates_agree,
    same,
    site_pairs,
    tied_homes,
    without_manual_weight_decay,
)
from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.model import equivalents
from padiff.pair.joined_calls import inputs_agree
from padiff.records import (
    LOOP,
    Both,
    Difference,
    RunInfo,
    Step,
    is_functional,
    is_loss,
    is_of_loss,
    loss_role,
    setting_text,
    settings_at,
)
from padiff.records.step_diffs import StepDiffs
from padiff.records.step_schema import without_values

# Line that makes only the Trainer divide the loss; it belongs before ``trainer.train()``.
_DIVIDE_ONCE = "trainer.accelerator.gradient_accumulation_steps = 1"


@dataclass(frozen=True)
class TrainerSetting:
    """Argument of a trainer that changes the result.

    Attributes:
        name: name of the setting, without ``trainer.``.
        words: name in reports.
        stage: first stage of a step that shows the effect.
        note: effect of the setting, in words.
    """

    name: str
    words: str
    stage: str
    note: str


#: Settings in causal order; within a stage, the most informative settings come first.
TRAINER = (
    TrainerSetting(
        "micro_batch_size", "samples of a micro-batch", "input", "both trainers have to be given batches of one size"
    ),
    TrainerSetting(
        "label_shift",
        "labels are shifted",
        "loss",
        "transformers' language models shift the labels by themselves, PaddleFormers' are given labels that are: "
        "labels[t] = input_ids[t + 1]",
    ),
    TrainerSetting("label_smoothing", "label smoothing", "loss", "the loss is not the same function"),
    TrainerSetting(
        "loss_mean",
        "the loss is a mean",
        "loss",
        "the two are the same only where each micro-batch has as many labels that count",
    ),
    TrainerSetting(
        "loss_divided_by",
        "the loss of a micro-batch is divided by",
        "backward",
        "where it is the square of the accumulation, it is divided twice: transformers 5.2 to 5.5 divide, and have "
        "accelerate divide again",
    ),
    TrainerSetting("schedule", "the schedule of the learning rate", "update", "another schedule gives other rates"),
    TrainerSetting(
        "warmup_steps",
        "warm-up steps",
        "update",
        "from warmup_ratio, transformers rounds their number up, PaddleFormers down: give warmup_steps",
    ),
    TrainerSetting("steps", "steps of the whole training", "update", "schedules end there"),
)


def trainer_differences(settings: Both[Mapping[str, Any]]) -> Iterator[Difference]:
    """Yield the differences in trainer settings. None counts alone: the tensors show any effect."""
    for setting in TRAINER:
        values = settings.map(lambda side, name=setting.name: side.get(f"trainer.{name}"))  # type: ignore[misc]
        if None in (values.reference, values.candidate) or same(*values):
            continue
        fix = ""
        if setting.name == "loss_divided_by":
            twice = values.zip(settings).map(lambda side: side[0] == side[1].get("accumulation", 0) ** 2)
            if twice.reference == twice.candidate:
                continue  # the different accumulation explains the divisors
            fix = _DIVIDE_ONCE if twice.candidate else ""
        yield Difference(setting.words, values, setting.stage, "trainer", changes=False, fix=fix, note=setting.note)


_NO_CLIP = {"kind": "none"}
_LEFT_OVER = (
    "what a step does not clear, or an epoch that ends within a step leaves, is added to the next step's gradients: "
    "clear them, or have the number of batches in an epoch be a multiple of the accumulation"
)
#: Beginning of the names of numbers that the model is called with.
ARGUMENT = "argument."
#: Settings of the axis of the classes, which may differ between the runs.
OF_LAYOUT = ("axis",)
# Settings that only have an effect in some batches, so that tensors may not show a difference. A difference in any
# other setting shows in tensors, or has no effect: one side may ignore labels by number, the other by a mask.
_OF_LOSS = frozenset({"delta", "beta", "weight", "pos_weight"})


def clip_differences(
    settings: Both[Mapping[str, Any]], optimizers: Both[Optimizers], framework: str
) -> Iterator[Difference]:
    """Yield the differences in gradient clipping.

    A side without clipping alone is no difference: it may clip in user code; the gradients show any effect.
    """
    reference, candidate = settings.zip(optimizers).map(lambda side: _clip(*side))
    if reference is None or candidate is None:
        return
    clips = Both(reference, candidate)
    kinds = clips.map(lambda side: side["kind"])
    own_kinds = [kind for kind in kinds if "." in kind]
    if kinds.reference != kinds.candidate:
        if not own_kinds:
            yield _clipping("clip", clips.map(_clip_text), clips.reference, optimizers, framework, "none" not in kinds)
        return
    for name in ("limit", "norm_type", "lowest", "by_group"):
        values = clips.map(lambda side, name=name: side.get(name))  # type: ignore[misc]
        # An undeclared value is the default.
        if None in (values.reference, values.candidate) and name in ("limit", "norm_type"):
            continue
        if not same(*values):
            yield _clipping(f"clip {name}", values, clips.reference, optimizers, framework, not own_kinds)


def _clipping(
    name: str,
    values: Both[Any],
    clip: Mapping[str, Any],
    optimizers: Both[Optimizers],
    framework: str,
    changes: bool,
) -> Difference:
    rules = {group.rule for group in optimizers.candidate.groups}
    fix = clip_fix(framework, rules.pop() if len(rules) == 1 else "", str(clip["kind"]), clip.get("limit"))
    note = ""
    if name == "clip by_group":
        fix, note = "", "with several parameter groups, each is clipped by its own norm"
    return Difference(name, values, "grad", "clipping", changes=changes, fix=fix, note=note)


def _clip_text(clip: Mapping[str, Any]) -> str:
    if clip["kind"] == "none":
        return "none"
    limit = clip.get("limit")
    return f"by {str(clip['kind']).replace('_', ' ')}" + (
        f" {setting_text(limit)}" if isinstance(limit, (int, float)) else ""
    )


def _clip(settings: Mapping[str, Any], optimizers: Optimizers) -> Mapping[str, Any] | None:
    """Return a run's clipping; `None` if unknown."""
    called = _clip_of(settings, "clip.")
    clips = [_clip_of(settings, f"optimizer.{number}.clip.") for number in range(optimizers.count)]
    set_ = [_NO_CLIP if _is_none(clip) else clip for clip in clips if "kind" in clip]
    acting = [clip for clip in set_ if clip["kind"] != "none"]
    if "kind" in called and not _is_none(called):
        return None if acting else called
    if acting:
        return acting[0] if len(set_) == len(clips) and all(clip == acting[0] for clip in set_) else None
    # No clipping, if the calls were observed and no optimizer clips.
    return _NO_CLIP if "kind" in called else None


def _clip_of(settings: Mapping[str, Any], family: str) -> dict[str, Any]:
    clip_settings = _of(settings, family)
    return clip_settings if isinstance(clip_settings.get("kind"), str) else {}


def _is_none(clip: Mapping[str, Any]) -> bool:
    limit = clip.get("limit")
    infinite = limit in ("inf", "nan") or (isinstance(limit, (int, float)) and not math.isfinite(limit))
    return clip["kind"] == "none" or infinite


def _of(settings: Mapping[str, Any], family: str) -> dict[str, Any]:
    return {name[len(family) :]: value for name, value in settings.items() if name.startswith(family)}


def argument_differences(settings: Both[Mapping[str, Any]]) -> Iterator[Difference]:
    """Yield the differences in the numbers that the model is called with, where both sides give them.

    A number may have no effect: the tensors show it.
    """
    arguments = settings.map(lambda side: _of(side, ARGUMENT))
    names = [(name, name) for name in arguments.reference if name in arguments.candidate]
    if not names and len(arguments.reference) == len(arguments.candidate) == 1:
        names = [(next(iter(arguments.reference)), next(iter(arguments.candidate)))]
    for name, other in names:
        values = Both(arguments.reference[name], arguments.candidate[other])
        if not same(*values):
            yield Difference(name, values, "forward", "argument", changes=False)


def loss_differences(settings: Both[Mapping[str, Any]], framework: str) -> Iterator[Difference]:
    """Yield the differences in the settings of losses.

    Two functions may be one loss, and so may two reductions, up to a factor in the loop: the tensors show the effect.
    """
    losses = _in_one_order(settings.map(lambda side: _in_one_name(_of(side, "loss."))))
    for name, value in losses.reference.items():
        # With several losses, each setting has the loss's number as a prefix.
        number, _, setting = name.rpartition(".")
        if name not in losses.candidate or setting in OF_LAYOUT or same(value, losses.candidate[name]):
            continue
        if setting == "reduction" and "none" in (value, losses.candidate[name]):
            continue  # the loop takes the mean, or the sum
        function_key = f"{number}.function" if number else "function"
        function = losses.map(lambda side, function_key=function_key: side.get(function_key))  # type: ignore[misc]
        alike = function.reference is not None and function.reference == function.candidate
        about = f"the loss {function.reference}" if alike else "the loss"
        yield Difference(
            setting,
            Both(value, losses.candidate[name]),
            "loss",
            "loss_setting",
            about=about,
            changes=alike and setting in _OF_LOSS and not number,
            fix=loss_fix(framework, str(function.reference), {setting: value}) if alike else "",
        )


def _in_one_name(losses: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of losses, with the Huber loss of delta 1 as the smooth L1 loss of beta 1, which it is."""
    named = dict(losses)
    for name, value in losses.items():
        prefix = name.removesuffix("function")
        if name != prefix and value == "huber_loss" and losses.get(f"{prefix}delta", 1.0) == 1.0:
            named[name] = "smooth_l1_loss"
            named[f"{prefix}beta"] = named.pop(f"{prefix}delta", 1.0)
    return named


def _in_one_order(losses: Both[dict[str, Any]]) -> Both[dict[str, Any]]:
    """Return the settings of losses, with the candidate's under the numbers of the reference's of the same function."""
    functions = losses.map(lambda side: {n.removesuffix(".function"): v for n, v in side.items() if "." in n})
    functions = functions.map(lambda side: {number: v for number, v in side.items() if number.isdigit()})
    waiting, numbers = dict(functions.candidate), {}
    for number, function in functions.reference.items():
        partner = next((k for k, theirs in waiting.items() if theirs == function), None)
        if partner is not None:
            numbers[partner] = number
            del waiting[partner]
    free = [number for number in functions.candidate if number not in numbers.values()]
    numbers |= dict(zip(waiting, free))
    ordered = {}
    for name, value in losses.candidate.items():
        number, dot, setting = name.partition(".")
        ordered[f"{numbers.get(number, number)}{dot}{setting}"] = value
    return Both(losses.reference, ordered)


def loop_differences(settings: Both[Mapping[str, Any]]) -> Iterator[Difference]:
    """Yield the differences in the number of batches per step, as hosts report.

    Batches that are larger by the same factor are equivalent: the tensors show the effect.
    """
    batches = settings.map(lambda side: side.get("accumulation"))
    if None not in (batches.reference, batches.candidate) and not same(*batches):
        note = "gradients of so many batches make a step"
        yield Difference("accumulation", batches, "input", "accumulation", changes=False, note=note)
    left_over = settings.map(lambda side: side.get("gradients.left_over", "none"))
    if left_over.reference != left_over.candidate:
        yield Difference("gradients left over", left_over, "grad", "left_over", changes=False, note=_LEFT_OVER)
    yield from trainer_differences(settings)


def micro_batch_differences(steps: Both[Step]) -> Iterator[Difference]:
    """Yield a difference if one run has more micro-batches per step, of the same size, and so other samples.

    Calls of the model without a loss do not count: each micro-batch must have its loss.
    """
    counts = steps.map(lambda step: step.micro_batches)
    if counts.reference == counts.candidate:
        return
    losses = steps.map(_losses)
    shapes = steps.map(
        lambda step: [r.shape for r in without_values(step.records) if r.stage == "input" and not r.call]
    )
    stepped = steps.map(lambda step: any(r.stage == "update" for r in without_values(step.records)))
    if losses != counts or shapes.reference != shapes.candidate or not shapes.reference or not all(stepped):
        return
    left_over = next((str(x) for x in steps.map(lambda step: step.settings.get("gradients.left_over")) if x), "")
    note = f"gradients {left_over} are left over" if left_over else "all of them have one size"
    yield Difference("micro-batches", counts, "input", "micro_batches", note=note)


def model_differences(steps: Both[Step], alignment: Alignment) -> Iterator[Difference]:
    """Yield a difference if one loop calls another model with the same inputs: a network for its target, for example.

    Both loops make as many calls, one model is called more often in each, and the inputs of these calls agree.
    """
    counts = steps.map(lambda step: Counter(path for path, _ in outermost_calls(without_values(step.records))))
    totals = counts.map(lambda side: sum(side.values()))
    if totals.reference != totals.candidate or len(counts.reference) + len(counts.candidate) < 3:
        return
    names = {pair.candidate.path: pair.reference.path for pair in alignment.pairs}
    theirs = Counter({names.get(path, ""): count for path, count in counts.candidate.items()})
    more, fewer = counts.reference - theirs, theirs - counts.reference
    if [*more.values()] != [1] or [*fewer.values()] != [1] or "" in fewer:
        return
    (reference,), (other,) = more, fewer
    candidate = next(path for path, name in names.items() if name == other)
    if not _same_inputs(steps, reference, candidate):
        return
    text = _names(reference, next((path for path, name in names.items() if name == reference), reference))
    values = Both(text, _names(other, candidate))
    note = "both loops make as many calls, and the inputs of these calls agree"
    yield Difference("model", values, "forward", "model", layers=Both((reference,), (candidate,)), note=note)


def _names(reference: str, candidate: str) -> str:
    """Return the names of a model in both runs as text."""
    return reference if reference == candidate else f"{reference} ({candidate})"


def _same_inputs(steps: Both[Step], reference: str, candidate: str) -> bool:
    """Return True if the inputs of a call of one layer agree with those of a call of another layer."""
    calls = steps.zip(Both(reference, candidate)).map(
        lambda side: [
            [r for r in side[0].records if r.stage == "input" and (r.layer, r.call) == call]
            for call in sorted(outermost_calls(side[0].records))
            if call[0] == side[1]
        ]
    )
    return any(
        len(first) == len(second) and all(map(inputs_agree, first, second))
        for first in calls.reference
        for second in calls.candidate
    )


def _losses(step: Step) -> int:
    """Return the number of a step's losses: the logged losses, otherwise the results of loss functions."""
    logged = sum(is_loss(record) for record in without_values(step.records))
    results = (
        r for r in without_values(step.records) if is_of_loss(r) and r.stage == "loss" and loss_role(r.slot) == "0"
    )
    return logged or sum(1 for _ in results)


#: Parameters that may be trained in one run only: the site in either run, and True for the run that trains it.
Doubtful = list[tuple[Both[str], Both[bool]]]


def doubtful_sites(sites: list[Both[str]], infos: Both[RunInfo], optimizers: Both[Optimizers]) -> Doubtful:
    """Return the parameters that only one run trains, by the runs' declarations."""
    frozen = infos.map(_frozen)
    # With several processes, each one's optimizer may have only some of the parameters.
    declared = optimizers.zip(infos).map(lambda side: side[0] if side[1].world_size == 1 else Optimizers())
    sides = frozen.zip(declared)
    trained = [pair.zip(sides).map(lambda side: _is_trained(side[0], *side[1])) for pair in sites]
    return [(pair, either) for pair, either in zip(sites, trained) if either.reference != either.candidate]


def trained_differences(doubtful: Doubtful, steps: Both[Step]) -> Iterator[Difference]:
    """Yield the parameters that only one run trains, if the step shows gradients in that run only."""
    if not doubtful:
        return
    moved = steps.map(_moved)
    groups: dict[bool, Both[list[str]]] = {}
    for pair, trained in doubtful:
        shown = moved.zip(pair).map(lambda side: side[1] in side[0])
        if shown == trained:
            members = groups.setdefault(trained.reference, Both([], []))
            members.reference.append(pair.reference)
            members.candidate.append(pair.candidate)
    for trained_here, members in groups.items():
        words = Both("trained", "frozen, or in no optimizer").swapped(not trained_here)
        yield Difference("training", words, "grad", "trainable", parameters=members.map(tuple))


def _is_trained(site: str, frozen: Collection[str], optimizers: Optimizers) -> bool:
    if optimizers.whole:
        return site in optimizers.by_site
    return site not in frozen


def _frozen(info: RunInfo) -> set[str]:
    return {f"{x.path}/{p.slot}" for x in info.layers for p in x.parameters if not p.trainable}


def _moved(step: Step) -> set[str]:
    return {
        f"{record.layer}/{record.slot}" for record in without_values(step.records) if record.stage in ("grad", "update")
    }


def tied_differences(alignment: Alignment, infos: Both[RunInfo]) -> Iterator[Difference]:
    """Yield the parameters that are one tensor in one run and two in the other."""
    homes = infos.map(tied_homes)
    if not any(homes):
        return
    layers = alignment.pairs
    partners_by_path = {pair.reference.path: pair.candidate for pair in layers}
    back = {pair.candidate.path: pair.reference for pair in layers}
    reported = set()
    for ties, others, partners, swap in (
        (homes.reference, homes.candidate, partners_by_path, False),
        (homes.candidate, homes.reference, back, True),
    ):
        for site, home in ties.items():
            answers = [_answer(name, partners) for name in (site, home)]
            if None in answers or len({others.get(str(name), name) for name in answers}) == 1:
                continue
            sites = Both((site, home), tuple(map(str, answers))).swapped(swap)
            if frozenset(sites.reference) in reported:
                continue
            reported.add(frozenset(sites.reference))
            yield Difference("kept", Both("one tensor", "two tensors").swapped(swap), "grad", "tied", parameters=sites)


def _answer(site: str, partners: Mapping[str, Any]) -> str | None:
    """Return the other run's name of a parameter, if its layer has a partner with such a parameter."""
    path, _, slot = site.rpartition("/")
    layer = partners.get(path)
    if layer is None:
        return None
    names = [p.slot for p in layer.parameters if p.role == "parameter"]
    return next((f"{layer.path}/{n}" for n in names if equivalents.slot(n) == equivalents.slot(slot)), None)


_NOTE = "the coarser one rounds each output, and so much is allowed of all stages"


def precision_differences(alignment: Alignment, steps: Both[Step]) -> Iterator[Difference]:
    """Yield the floating dtypes of outputs that differ between paired layers.

    The difference alone does not count: both may be intended, and tensors are judged by the coarser dtype.
    """
    dtypes = steps.map(_dtypes)
    pairs = [
        Both(dtypes.reference[pair.reference.path], dtypes.candidate[pair.candidate.path])
        for pair in alignment.pairs
        if pair.reference.path in dtypes.reference and pair.candidate.path in dtypes.candidate
    ]
    dtype_counts = Counter(tuple(pair) for pair in pairs if pair.reference != pair.candidate)
    for (reference, candidate), count in dtype_counts.most_common():
        yield Difference(
            "dtype",
            Both(reference, candidate),
            "forward",
            "precision",
            about=f"outputs of {count} of {len(pairs)} layers",
            changes=False,
            note=_NOTE,
        )


def _dtypes(step: Step) -> dict[str, str]:
    """Return the dtype of each layer's first output, if it is a floating dtype."""
    by_layer: dict[str, str] = {}
    for record in without_values(step.records):
        if record.stage == "forward" and record.layer != LOOP and not is_functional(record.slot):
            by_layer.setdefault(record.layer, coarse(record.dtype))
    return {path: dtype for path, dtype in by_layer.items() if dtype in ROUNDING}


class Declared:
    """Declared differences of two runs in the compared steps."""

    def __init__(self) -> None:
        self._key: Any = None
        self._lasting: tuple[Difference, ...] = ()
        self._groups: list[GroupPair] = []
        self._optimizers: Both[Optimizers] = Both(Optimizers(), Optimizers())
        self._doubtful: Doubtful = []
        self._first: dict[Any, Difference] = {}
        self._of_step: dict[int, tuple[Difference, ...]] = {}
        self._made_up: dict[Any, int] = {}
        self._rates: dict[int, float] = {}
        #: A difference that lasts from a step on, with that step.
        self._lasts: tuple[int, Difference] | None = None
        #: True for each side that made calls in evaluation mode in the step before.
        self._evaluated = Both(False, False)

    @property
    def all(self) -> tuple[Difference, ...]:
        """All differences, each with the first step that shows it, in causal order."""
        return tuple(sorted(self._first.values(), key=lambda difference: difference.order))

    def at(self, step: int) -> tuple[Difference, ...]:
        """Return the differences in a compared step."""
        differences = self._of_step.get(step, ())
        if self._lasts is not None and step >= self._lasts[0]:
            differences = (*differences, self._lasts[1])
        return without_manual_weight_decay(differences, self._made_up) if self._made_up else differences

    def add_lasting(self, step: int, difference: Difference) -> None:
        """Add a difference that calls of a step show: what they change lasts. The first one counts."""
        self._lasts = self._lasts or (step, difference)

    def in_steps(self, steps: Iterable[int], concerns: Callable[[Difference], bool]) -> list[tuple[int, Difference]]:
        """Return the differences in these steps that pass the filter, each with the first step that shows it."""
        first_by_key: dict[Any, tuple[int, Difference]] = {}
        looked: set[int] = set()
        for number in steps:
            differences = self.at(number)
            if id(differences) not in looked:  # most steps share one tuple
                looked.add(id(differences))
                for difference in differences:
                    first_by_key.setdefault(difference.key, (number, difference))
        return [(number, difference) for number, difference in first_by_key.values() if concerns(difference)]

    def hold_against(self, ranks: Sequence[StepDiffs]) -> None:
        """Check against the tensors of a step, of each rank, if differences in weight decay are compensated by hand."""
        rate, number = rate_of(ranks), next((diffs.number for diffs in ranks if diffs), None)
        if rate is not None and number is not None:
            self._rates[number] = rate
        unresolved = [
            difference for difference in self._lasting if difference.changes and difference.key not in self._made_up
        ]
        diffs = [diff for rank in ranks for diff in rank] if unresolved else []
        for difference in unresolved:
            if number is not None and manual_weight_decay(difference, diffs, self._rates):
                self._made_up[difference.key] = number

    def rates_agree(self, steps: Both[Step]) -> bool:
        """Return True if all parameters have the same learning rate in both runs in a compared step, whatever
        their group.
        """
        return rates_agree(self._groups, self._optimizers, steps)

    def add_step(
        self,
        infos: Both[RunInfo],
        steps: Both[Step],
        alignment: Alignment,
        called: Both[Collection[str]],
    ) -> None:
        """Add the declared differences of a step.

        Args:
            called: paths of the layers that each run was seen to call.
        """
        number, frameworks = steps.reference.number, infos.map(lambda info: info.framework)
        # Most steps have the same settings as the step before, but for numbers that the model is called with.
        sides = infos.zip(steps).map(lambda side: (_lasting(side[0].settings), _lasting(side[1].settings)))
        key = id(alignment), *sides, *map(len, called)
        if key != self._key:
            self._key = key
            settings = infos.zip(steps).map(lambda side: settings_at(side[0].settings, side[1].settings))
            self._take(settings, infos, alignment, called, steps)
            self._lasting = self._dated(self._lasting, number)
        of_step = [
            *map(self._explained, rate_differences(self._groups, self._optimizers, steps, frameworks)),
            *trained_differences(self._doubtful, steps),
            *micro_batch_differences(steps),
            *model_differences(steps, alignment),
            *argument_differences(infos.zip(steps).map(lambda side: _arguments(side[0].settings, side[1].settings))),
        ]
        self._evaluated = steps.map(lambda step: bool(step.evaluations))
        # Equal steps share one tuple, because there may be many.
        self._of_step[number] = (*self._lasting, *self._dated(of_step, number)) if of_step else self._lasting

    def _explained(self, rate: Difference) -> Difference:
        """Return a difference in learning rates, extended by the trainer settings that cause it."""
        made_by = [
            difference
            for difference in self._lasting
            if difference.kind == "trainer" and difference.stage == rate.stage
        ]
        texts = [f"{difference.text_alone}: {difference.note}" for difference in made_by]
        return replace(rate, note="; ".join([rate.note, *texts] if rate.note else texts)) if texts else rate

    def _dated(self, differences: Iterable[Difference], number: int) -> tuple[Difference, ...]:
        dated = []
        for difference in differences:
            first = self._first.get(difference.key)
            if first is None or (difference.changes and not first.changes):  # a layer that was not called before
                self._first[difference.key] = first = replace(difference, step=number)
            dated.append(first)
        return tuple(dated)

    def _since(self, modes: Iterable[Difference], steps: Both[Step]) -> Iterator[Difference]:
        """Yield differences of modes, with the step from which on they exist if the modes agreed before."""
        for difference in modes:
            if not self._of_step:
                yield difference
                continue
            side = "candidate" if difference.values.candidate == "eval" else "reference"
            note = f"from step {steps.reference.number} on the {side} is in evaluation mode"
            if getattr(self._evaluated, side) or getattr(steps, side).evaluations:
                note += ", not switched back after the validation that ended before it"
            yield replace(difference, note=note)

    def _take(
        self,
        settings: Both[Mapping[str, Any]],
        infos: Both[RunInfo],
        alignment: Alignment,
        called: Both[Collection[str]],
        steps: Both[Step],
    ) -> None:
        frameworks = infos.map(lambda info: info.framework)
        self._optimizers = settings.map(Optimizers.from_settings)
        sites = site_pairs(alignment, infos)
        self._groups = group_pairs(self._optimizers, sites)
        self._doubtful = doubtful_sites(sites, infos, self._optimizers)
        self._lasting = (
            *layer_differences(alignment, settings, called, frameworks.candidate),
            *self._since(mode_differences(alignment, settings, called), steps),
            *precision_differences(alignment, steps),
            *loop_differences(settings),
            *loss_differences(settings, frameworks.candidate),
            *clip_differences(settings, self._optimizers, frameworks.candidate),
            *tied_differences(alignment, infos),
            *optimizer_differences(self._groups, frameworks),
        )


def _lasting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that usually hold for many steps."""
    return {name: value for name, value in settings.items() if not name.startswith(ARGUMENT)}


def _arguments(run: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a step that are numbers which the model is called with."""
    named = [{name: value for name, value in side.items() if name.startswith(ARGUMENT)} for side in (run, step)]
    return settings_at(*named) if any(named) else {}


def at_the_start(infos: Both[RunInfo], alignment: Alignment) -> tuple[Difference, ...]:
    """Return the declared differences known before any step, which hold for all trained parameters under every
    alignment.
    """
    frameworks, settings = infos.map(lambda info: info.framework), infos.map(lambda info: info.settings)
    optimizers = settings.map(Optimizers.from_settings)
    groups = group_pairs(optimizers, site_pairs(alignment, infos))
    declared = [
        *clip_differences(settings, optimizers, frameworks.candidate),
        *optimizer_differences(groups, frameworks),
    ]
    return tuple(difference for difference in declared if difference.changes and not difference.parameters.reference)
