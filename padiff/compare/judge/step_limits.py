"""What each tensor of a step may be off by, given the whole step and the one before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from padiff.compare.judge import limits
from padiff.compare.judge.drift import Drift, inherited
from padiff.compare.judge.elements import without_last_places, without_noise
from padiff.compare.judge.kinks import may_have_kinks
from padiff.compare.judge.siblings import Key, by_stage, key_of
from padiff.compare.judge.step_figures import (
    bulk_of,
    coarsest_dtypes,
    deviations_of,
    dtypes_of,
    goes_into_loss,
    hides_noise,
    is_activation,
    is_exact,
    largest_errors,
    outputs_of,
    samples_of,
)
from padiff.compare.judge.systematic import Start
from padiff.compare.judge.verdict import Limit, value_of, verdict
from padiff.compare.judge.zero import Scales, is_rounding, largest_rms, level_of
from padiff.compare.measure.arrays import few
from padiff.model import equivalents
from padiff.records import LOOP, ROOT, Diff, Figure, Figures, Rule, is_below, is_loss


class StepLimits:
    """What has to be known of a whole step before one of its diffs can be judged."""

    def __init__(self, diffs: Sequence[Diff], factor: float, before: Drift) -> None:
        self._factor = factor
        self._before = before
        #: The places of the step's diffs, by stage.
        self._places = by_stage(diffs)
        of = {stage: [diffs[place] for place in places] for stage, places in self._places.items()}
        dtypes = dtypes_of(diffs)
        self._dtypes = coarsest_dtypes(dtypes)
        self._scales = Scales.of([*of["backward"], *of["grad"]])
        self._grad_scale = self._scales.layers
        self._updates = {key_of(d): d for d in of["update"] if d.figures is not None}
        #: The weights that passed, as they are judged.
        self._explained: dict[Key, Diff] = {}
        #: Layers that own a parameter which is nothing but rounding any more.
        self._gone: set[str] = set()
        self._update_scale = max(largest_rms(of["update"], "update").values(), default=0.0)
        self._samples = samples_of(of["forward"])
        self._deviations = deviations_of(of["weight"])
        grads = [d for d in of["grad"] if d.compared and d.figures is not None and not d.problem]
        level = level_of(dtypes)
        self._noise_driven = {key_of(d) for d in grads if is_rounding(d, self._scales, level) or hides_noise(d)}
        self._grads = {key_of(d): d for d in grads}
        #: Squared errors of the updates that were judged so far: an optimizer may have stepped before layers run again.
        self._stepped = 0.0
        self._relatives: dict[tuple[str, float], Limit] = {}
        self._weights = math.fsum(
            d.figures.reference_l2**2 for d in of["weight"] if d.figures is not None and d.compared
        )
        self._gain = limits.MORE_GAIN * before.gain
        unseen = before.unseen_in(diffs[0].pair.step) if diffs else 0.0
        unseen *= min(1.0, self._gain / limits.GAIN["forward"])
        begins = [*of["input"], *of["weight"]]
        # What noise drives (a bias before a normalisation) shows in outputs, and cancels out before the loss.
        self._inherited = {
            "forward": inherited(begins, unseen),
            "later": inherited([d for d in begins if key_of(d) not in self._noise_driven], unseen),
        }
        if before.step >= 0 and not before.known:
            self._inherited = dict.fromkeys(self._inherited, limits.MOST)
        #: How far apart the step starts, for floors that were measured; `None`: further than they were measured for.
        self._apart = self._units_apart()
        #: Whether a value was seen to have gone over a kink.
        self._crossed = False
        self._forward_error = self._largest_forward(of["forward"])
        #: Largest relative L2 error of the outputs that were judged so far, in the order in which they came.
        self._handed_on = 0.0
        #: The same of activation gradients, from the first one on that is off in a few elements only.
        self._handed_back = 0.0
        #: Of the last output that passed: its shape, and its error (L2).
        self._last: tuple[tuple[int, ...], float] = ((), 0.0)
        self._kinked = may_have_kinks(diffs, of["backward"])
        self._kinks = self._largest_kink(of["backward"])
        self._outputs = outputs_of([*of["forward"], *of["backward"]])
        self._came_back = largest_errors(of["backward"], "backward")
        self._went_in = max(largest_errors(of["forward"], "forward").values(), default=0.0)
        self._grad_errors = {
            key_of(d): d.figures.rel_l2
            for d in grads
            if d.figures is not None and d.figures.l2 <= self._grad_limit(d).value
        }

    def _units_apart(self) -> float | None:
        """How far apart the step starts, in units in the last place and at least 1; `None`: too far."""
        unit = 2 * limits.ROUNDING[self._dtypes["weight"]]
        apart = max(self._inherited["forward"] / unit, 1.0)
        return apart if apart <= limits.MOST_UNITS else None

    def start(self) -> Start:
        """What has to be known of the step to tell what is systematic."""
        start = self._inherited["forward"]
        return Start(self._factor, self._dtypes, self._noise_driven, start, self._before, self._places)

    def _largest_forward(self, outputs: Sequence[Diff]) -> float:
        """Largest relative L2 error of an output, as far as it is allowed."""
        errors = (d.figures.rel_l2 for d in outputs if d.figures is not None and d.compared)
        limit = limits.DEEP * (
            self._allowed("forward") + max(limits.GAIN["forward"], self._gain) * self._inherited["later"]
        )
        return max((error for error in errors if error <= limit), default=0.0)

    def _largest_kink(self, backward: Sequence[Diff]) -> float:
        """Largest relative L2 error of an activation gradient that is off in a few elements only."""
        limit, largest = self._relative("backward").value, 0.0
        for diff in backward:
            figures, bulk = diff.figures, bulk_of(diff)
            if figures is None or bulk is None or not diff.compared:
                continue
            own = figures.reference_l2
            if bulk <= limit * own < figures.l2 <= limits.FEW_AT_MOST * own:
                largest = max(largest, figures.rel_l2)
        return largest

    def _allowed(self, stage: str) -> float:
        return limits.allowed(self._dtypes[stage], stage)

    def _grad_limit(self, diff: Diff) -> Limit:
        assert diff.figures is not None
        reference = diff.figures.reference_l2
        scale = self._grad_scale.get(diff.pair.anchor.layer, 0.0) * math.sqrt(diff.figures.size)
        # The few elements of an activation gradient that are off are in every gradient that is made of it.
        limit = self._relative("grad")
        if self._kinks:
            limit = Limit(limit.value + 2 * self._factor * self._kinks, Rule.HANDED_BACK)
        if self._is_made_of(diff):
            made_of = limits.MADE_OF * (self._came_back[diff.pair.anchor.layer] + self._went_in)
            limit = Limit(self._factor * (self._allowed("grad") + made_of), Rule.MADE_OF)
        return Limit(limit.value * max(reference, scale), Rule.LAYER if scale > reference else limit.rule)

    def _is_made_of(self, diff: Diff) -> bool:
        """Whether what a gradient is made of is known: what came back to its layer, and what went through the model."""
        anchor = diff.pair.anchor
        simple = equivalents.group_of_kinds(anchor.layer_type.lower()) in limits.SIMPLE
        return simple and self._went_in > 0 and anchor.layer in self._came_back

    def _noise_limit(self, figures: Figures) -> float:
        # Of any direction, but not larger than the reference's updates are.
        return limits.UNRELATED * max(figures.reference_l2, self._update_scale * math.sqrt(figures.size))

    def _relative(self, stage: str) -> Limit:
        """What a stage may be off by, relative to its size; it goes with the updates that were judged so far alone."""
        key = stage, self._stepped if stage != "update" else 0.0
        found = self._relatives.get(key)
        if found is None:
            found = self._relatives[key] = self._relative_of(stage)
        return found

    def _relative_of(self, stage: str) -> Limit:
        own = self._allowed(stage)
        inherited = self._inherited["forward" if stage == "forward" else "later"]
        if self._stepped and stage != "update":
            inherited = min(inherited + math.sqrt(self._stepped / (self._weights or math.inf)), limits.MOST)
        gain = max(limits.GAIN[stage], self._gain) if stage in limits.APART else 0.0
        kinks = limits.KINKS.get(stage, 0.0) * math.sqrt(self._forward_error) if self._kinked else 0.0
        more = gain * inherited + kinks
        # Weights a hundredth apart are as far as drift goes. In half precision they come near it in a few steps.
        seen = max(self._gain, limits.GAIN["forward"]) if limits.is_half(self._dtypes[stage]) else self._gain
        further = max(1.0, limits.MOST * seen / limits.AT_MOST["forward"])
        if stage not in ("forward", "loss"):
            further = max(further, limits.FURTHER * self._forward_error / limits.AT_MOST["forward"])
        at_most = min(limits.AT_MOST.get(stage, own) * further, limits.APART.get(stage, own))
        # Of weights that are further apart than drift goes, nothing says how far.
        larger = at_most if inherited >= limits.MOST else min(own + more, at_most)
        return Limit(self._factor * max(own, larger), Rule.INHERITED if larger > own else Rule.ROUNDING)

    def judge(self, diff: Diff) -> Diff:
        figures, stage, anchor = diff.figures, diff.pair.stage, diff.pair.anchor
        if diff.problem or figures is None:
            return diff
        if is_exact(diff):
            return diff.judged(figures.max_abs == 0, Figure.MAX_ABS, figures.max_abs, 0.0, Rule.EQUAL)
        limit, explained = self._limit(diff, figures)
        if not explained and (anchor.layer != LOOP or stage == "loss"):
            before = self._before.stages.get("forward" if goes_into_loss(diff) else stage, 0.0)
            grown = min(limits.GROWTH * before, limits.GROWN_AT_MOST) * figures.reference_l2
            limit = Limit(grown, Rule.GROWN) if grown > limit.value else limit
        if figures.floor is not None or figures.third is not None:
            diff, limit = self._by_floor(diff, figures, limit)
        found = verdict(diff, limit)
        if stage == "weight" and found.passed:
            self._explained[key_of(diff)] = diff
        if found.passed and diff.compared:
            self._hand_on(found, figures)
        if stage == "backward" and found.judgement is not None and found.judgement.figure is Figure.BULK:
            self._crossed = True
        if stage == "update" and anchor.layer != LOOP and diff.compared and math.isfinite(figures.l2):
            self._stepped += figures.l2**2
        if not found.passed and stage in ("update", "weight"):
            found = self._without_noise(found, limit.value)
        if not found.passed and stage == "update":
            found = without_last_places(found, self._explained.get(key_of(diff)), limit.value)
        if stage == "weight" and found.passed and figures.rel_l2 > limits.MOST and self._is_gone(diff, figures):
            self._gone.add(anchor.layer)
        if not found.passed and stage == "weight" and explained and diff.pair.step - self._before.step == 1:
            judged = found.judgement
            assert judged is not None
            return found.judged(False, judged.figure, judged.value, judged.limit, Rule.WRITTEN)
        return found

    def _by_floor(self, diff: Diff, figures: Figures, modelled: Limit) -> tuple[Diff, Limit]:
        """The diff with its floor, as far as that says how far off it may be, and the limit by it.

        It does not where the step starts further apart than it was moved; nor of a gradient that is rounding noise,
        which has a size of its own on each side, and in float64, too; nor once a value went over a kink, as all that is
        made of its gradient is further off than in runs in which none did.
        """
        driven = diff.pair.stage in ("grad", "update") and key_of(diff) in self._noise_driven
        if driven:
            return replace(diff, figures=replace(figures, floor=None, third=None)), modelled
        if figures.floor is None:
            return diff, modelled
        if self._apart is None or self._crossed:
            return replace(diff, figures=replace(figures, floor=None)), modelled
        return diff, self._measured(diff, figures, modelled)

    def _measured(self, diff: Diff, figures: Figures, modelled: Limit) -> Limit:
        """The limit by the measured floor; the modelled one where that allows less, and no less than noise needs."""
        floor = self._factor * (self._apart or 1.0) * (figures.floor or 0.0)
        most = self._factor * limits.AT_MOST[diff.pair.stage] * figures.reference_l2
        least = Limit(min(limits.FLOORS_AT_LEAST * floor, most), Rule.MEASURED)
        return min(Limit(limits.FLOORS * floor, Rule.MEASURED), max(modelled, least, key=value_of), key=value_of)

    def _limit(self, diff: Diff, figures: Figures) -> tuple[Limit, bool]:
        """What the error's L2 norm may be, and whether all that can explain it is known: then growth is no excuse."""
        stage, reference = diff.pair.stage, figures.reference_l2
        if diff.pair.anchor.layer == LOOP:
            if stage == "update":
                return Limit(self._factor * limits.SCALAR * reference, Rule.SCALAR), False
            if goes_into_loss(diff):
                return self._output_limit().times(reference), False  # what goes in is an output
            # A scalar that should go to zero (a loss) has no scale of its own there.
            limit = self._relative(stage).times(max(reference, limits.LOSS_SCALE if stage == "loss" else 0.0))
            return (self._loss_limit(diff, limit) if is_loss(diff.pair.anchor) else limit), False
        if stage == "weight":
            return self._weight_limit(diff)
        if stage == "grad":
            return self._grad_limit(diff), self._is_made_of(diff)
        if stage == "update":
            return self._update_limit(diff, figures), key_of(diff) in self._grads
        relative = self._output_limit() if stage == "forward" else self._relative(stage)
        if stage == "backward":
            # What a kink made of a few elements, the layers before spread over all of theirs.
            spread = min(limits.GROWTH * self._handed_back, self._factor * limits.AT_MOST["backward"])
            relative = Limit(spread, Rule.HANDED_BACK) if spread > relative.value else relative
        if self._gone and stage in ("forward", "backward"):
            relative = max(relative, self._multiplied(diff.pair.anchor.layer), key=value_of)
        limit = relative.times(reference)
        if stage == "forward" and is_activation(diff.pair.anchor) and diff.pair.anchor.shape == self._last[0]:
            # Where it lets little through, that little is off by as much as what went in.
            limit = max(limit, Limit(self._factor * limits.STEEPEST * self._last[1], Rule.ACTIVATION), key=value_of)
        return limit, False

    def _is_gone(self, diff: Diff, figures: Figures) -> bool:
        """Whether next to nothing is left of what a parameter began with."""
        began = self._before.began.get(key_of(diff), 0.0)
        return figures.reference_l2 < limits.GONE * began

    def _multiplied(self, layer: str) -> Limit:
        """What the code of a layer may make of its own parameters, and of those of the layers around it: a scale that a
        step brought back to almost zero is rounding by then, and so is all that is multiplied by it.
        """
        inside = any(layer == path or (path != ROOT and is_below(layer, path)) for path in self._gone)
        return Limit(self._factor * limits.MULTIPLIED * inside, Rule.INHERITED)

    def _output_limit(self) -> Limit:
        """What an output may be off by, given those before it."""
        relative = self._relative("forward")
        deeper = min(
            limits.DEEP * relative.value, self._factor * limits.AT_MOST["forward"], limits.GROWTH * self._handed_on
        )
        return Limit(deeper, Rule.HANDED_ON) if deeper > relative.value else relative

    def _loss_limit(self, diff: Diff, limit: Limit) -> Limit:
        """A loss differs by what the outputs differ: by their error times the gradient that comes back to them."""
        outputs = self._outputs
        if outputs is None or outputs.error > limits.AT_MOST["forward"]:
            return limit
        assert diff.figures is not None
        size = max(diff.figures.reference_l2, limits.LOSS_SCALE)
        # Where one side keeps it in fewer digits than the other, that alone rounds it.
        dtypes = [limits.coarse(record.dtype) for record in diff.pair.sides if record is not None]
        rounding = max(limits.ROUNDING.get(dtype, 0.0) for dtype in dtypes)
        own = max(limits.allowed(limits.coarse(diff.pair.anchor.dtype), "loss"), rounding) * size
        made_of = limits.LOSS_OF_OUTPUTS * max(outputs.first_order, outputs.error * size)
        return min(limit, Limit(self._factor * (own + made_of), Rule.OUTPUTS), key=value_of)

    def _update_limit(self, diff: Diff, figures: Figures) -> Limit:
        key = key_of(diff)
        # What a gradient was allowed to be off by, its update may be, too.
        relative = self._relative("update")
        if key in self._grads:
            relative = Limit(self._factor * self._allowed("update"), Rule.ROUNDING)
        of_gradient = limits.OF_GRADIENT * self._factor * self._grad_errors.get(key, 0.0)
        limit = Limit((relative.value + of_gradient) * figures.reference_l2, relative.rule)
        if key in self._noise_driven:
            limit = Limit(self._noise_limit(figures), Rule.NOISE_DRIVEN)
        weight = self._explained.get(key)
        remembered = self._factor * self._before.remembered(key, diff.pair.step, weight.figures if weight else None)
        if limit.rule is not Rule.NOISE_DRIVEN and of_gradient * figures.reference_l2 + remembered > limit.value / 2:
            limit = Limit(limit.value, Rule.OF_GRADIENT)
        value = limit.value + remembered
        return Limit(value + self._rounded_weight(diff, value), limit.rule)

    def _rounded_weight(self, diff: Diff, error: float) -> float:
        """What rounding the weight to half precision makes of an update's error.

        An update shows only in whole units of the weight's last place: where the sides differ by ``d``, one of
        ``unit / d`` elements goes to the next unit on one side.
        """
        weight = self._explained.get(key_of(diff))
        if weight is None or weight.figures is None or not limits.is_half(weight.pair.anchor.dtype):
            return 0.0
        unit = 2 * limits.ROUNDING[weight.pair.anchor.dtype] * weight.figures.reference_l2
        single = math.sqrt(min(few(weight.figures.size) / max(weight.figures.size, 1), 1.0))
        return self._factor * (math.sqrt(error * unit) + unit * single)

    def _hand_on(self, diff: Diff, figures: Figures) -> None:
        """Remember how far off a passed output, or a gradient of one, is: the next one is made of it."""
        assert diff.judgement is not None
        stage, what = diff.pair.stage, diff.judgement.figure
        if stage == "forward" and what is Figure.REL_L2:
            self._handed_on = max(self._handed_on, figures.rel_l2)
            self._last = diff.pair.anchor.shape, figures.l2
        elif stage == "backward" and (what is Figure.BULK or self._handed_back) and math.isfinite(figures.rel_l2):
            self._handed_back = max(self._handed_back, figures.rel_l2)

    def _without_noise(self, diff: Diff, limit: float) -> Diff:
        """A diff that passes if it is all in elements whose gradients are rounding."""
        key, stage = key_of(diff), diff.pair.stage
        steps = self._before.steps_before(diff.pair.step) if stage == "weight" else 1
        if not steps:
            return diff
        rounding = self._allowed("forward") * self._grad_scale.get(diff.pair.anchor.layer, 0.0)

        def most(count: int) -> float:
            return limits.UNRELATED * self._update_scale * math.sqrt(count) * self._factor * steps

        another = stage == "update" and key in self._grad_errors
        return without_noise(diff, self._grads.get(key), limit, rounding, another, most)

    def _weight_limit(self, diff: Diff) -> tuple[Limit, bool]:
        """The limit, and whether the step before explains all of it."""
        figures = diff.figures
        assert figures is not None
        number = self._before.steps_before(diff.pair.step)
        own = self._relative("weight").times(figures.reference_l2)
        if not number:
            return own, False
        limit = own.value
        update = self._updates.get(key_of(diff))
        update_figures = update.figures if update is not None else None
        size = update_figures.reference_l2 if update_figures is not None else 0.0
        drifted, explained = self._before.weight_error(key_of(diff), number, size, figures.size)
        gap = number - self._before.step
        noise_driven = key_of(diff) in self._noise_driven and update_figures is not None
        if explained and gap == 1:
            # What both sides do to it besides (a norm that is kept, weights that are clamped) may double it.
            return Limit(limit + 2 * self._factor * drifted, Rule.UPDATES if drifted else own.rule), True
        if explained:
            each = self._noise_limit(update_figures) if noise_driven and update_figures is not None else 0.0
            return Limit(limit + self._factor * (drifted + (gap - 1) * each), Rule.UPDATES), True
        ramp = (
            min(number, limits.DRIFT_STEPS)
            * limits.DRIFT_PER_STEP
            * self._allowed("forward")
            / limits.allowed("float32", "forward")
        )
        limit += self._factor * min(ramp, limits.DRIFT_AT_MOST) * figures.reference_l2
        if update_figures is not None:
            # Adam's updates from noise shrink with time; those of the steps before were as large as the others'.
            each = self._noise_limit(update_figures) if noise_driven else 0.0
            size = max(update_figures.reference_l2, update_figures.candidate_l2)
            limit += self._factor * number * max(each, limits.OFF * size)
        limit = max(limit, self._factor * drifted)
        slot = equivalents.slot(diff.pair.anchor.slot)
        if slot in limits.RUNNING:
            # A mean near zero is made of values that are not: its error goes with theirs.
            deviation = self._deviations.get(diff.pair.anchor.layer, 0.0) if slot == "running_mean" else 0.0
            limit += self._relative("forward").value * max(figures.reference_l2, deviation)
        if slot == "running_var":
            samples = self._samples.get(diff.pair.anchor.layer, 0)
            if samples > 1:
                limit += limits.UNBIASED / (samples - 1) * figures.reference_l2
        return Limit(limit, Rule.STATISTICS if slot in limits.RUNNING else Rule.DRIFT), False
