"""Limits of each tensor of a step, given the whole step, the step before, and the earlier diffs."""

from __future__ import annotations

import math

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.block_facts import (
    apart_at_start,
    bulk_of,
    deviations_of,
    hiding_noise,
    largest_errors,
    of_parameters,
    outputs_of,
    statistics_apart,
    without_last_places,
    without_noise,
)
from padiff.compare.judge.drift import Drift, Start, numbers_of
from padiff.compare.judge.limits import Limit, value_of
from padiff.compare.judge.site_facts import (
    Scales,
    SiteFacts,
    largest_rms,
    may_have_kinks,
    only_scaled,
    rounding_gradients,
)
from padiff.compare.measure.pairs import few
from padiff.model import equivalents
from padiff.records import LOOP, ROOT, STAGES, Diff, Figure, Rule, is_below
from padiff.records.pair_table import Key
from padiff.records.step_diffs import (
    FIGURE_NUMBERS,
    FIGURES,
    RULE_NUMBERS,
    RULES,
    StepDiffs,
    without_floor,
    without_third,
)


class StepContext:
    """Facts about a step from its measured diffs. Arrays have an element for each diff.

    Args:
        factor: multiplier of all limits.
        before: drift at the step before.

    Attributes:
        diffs, factor, before: the arguments.
        dtype: the coarsest dtype of inputs, weights and outputs.
        facts: facts about the diffs' sites.
        bulk: errors without a few elements.
        updates, grads: indices of the last measured update, and gradient, of each parameter.
        grad_scales: largest root mean square of the reference's gradients of each diff's layer.
        noise: mask of the diffs of parameters whose gradients are rounding noise, or sketches that may contain it.
        update_scale: largest root mean square of the reference's updates.
        made_of: mask of the diffs of simple layers (`SiteFacts.simple`) whose output gradients have known errors, in
            steps where outputs differ: these and the largest error of an output limit the errors of their gradients.
        grad_errors: relative errors of the gradients within their limits, by parameter.
        deviations: norms of the running standard deviations, by layer.
        statistics: largest relative error of running statistics of layers that get no gradients.
        inherited: relative error at the start of the step, for outputs and for later stages.
        gain: allowed ratio of the outputs' error to the error at the start of the step.
        apart: distance at the start of the step, in units in the last place, for measured floors; `None` if the
            distance is larger than floors were measured for.
    """

    def __init__(self, diffs: StepDiffs, factor: float, before: Drift) -> None:
        self.diffs, self.factor, self.before = diffs, factor, before
        sites, rows = diffs.sites, diffs.rows
        self.facts = sites.fact(SiteFacts)
        self._dtypes, self._places = self.facts.coarsest, sites.places
        self.dtype = self._dtypes["forward"]
        self._errors, self.bulk = diffs.relative, bulk_of(diffs)
        grads = diffs.known_places("grad")
        grads = grads[~diffs.troubled[grads]] if diffs.problems else grads
        self.updates = self._by_key(self._places["update"][diffs.measured[self._places["update"]]])
        self.grads = self._by_key(grads)
        self.grad_scales = diffs.figure_fact(Scales).layers
        self.numbers = numbers_of(diffs, before.numbers)
        self.noise = of_parameters(diffs, rounding_gradients(diffs) | hiding_noise(diffs))
        self.update_scale = float(largest_rms(diffs, "update").max(initial=0.0))
        self.deviations = diffs.figure_fact(deviations_of)
        self.statistics = diffs.figure_fact(statistics_apart)
        self._weights = float(diffs.known_of_stage("weight", rows["reference_l2"] ** 2, 0.0).sum())
        start = diffs.figure_fact(apart_at_start)
        # Noise in a bias before a normalisation shows in outputs, and cancels out before the loss.
        later = apart_at_start(diffs, self.noise) if self.noise.any() else start
        if before.step < 0 and not diffs.number:  # one side keeps, or is given, what the other one has, rounded
            start, later = (each.beyond(limits.ROUNDING[self.dtype]) for each in (start, later))
        self.gain = limits.MORE_GAIN * before.gain
        unseen = before.unseen_in(diffs.number) if diffs.number is not None else 0.0
        unseen *= min(1.0, self.gain / limits.GAIN["forward"])
        self.inherited = {
            "forward": start.error(unseen),
            "later": later.error(unseen),
        }
        if before.step >= 0 and not before.known:
            self.inherited = dict.fromkeys(self.inherited, limits.MOST)
        self.input_drift = self._drift_of_inputs(start.weights)
        self.apart = self._units_apart()
        self._forward_error = self._largest_forward()
        self._kinked = may_have_kinks(diffs)
        self._kinks = self._largest_kink()
        self.outputs = outputs_of(diffs)
        self._came_back = largest_errors(diffs, "backward")
        outputs = diffs.of_stage("forward", largest_errors(diffs, "forward"))
        self._went_in = float(np.fmax.reduce(outputs, initial=0.0))
        self.made_of = self.facts.simple & (self._went_in > 0) & ~np.isnan(self._came_back)
        values, _ = self.grad_limits()
        allowed = grads[rows["l2"][grads] <= values[np.searchsorted(self._places["grad"], grads)]]
        self.grad_errors = {sites.keys[place]: float(self._errors[place]) for place in allowed.tolist()}

    def _by_key(self, places: np.ndarray) -> dict[Key, int]:
        """Return the last index of each parameter."""
        keys = self.diffs.sites.keys
        return {keys[place]: place for place in places.tolist()}

    def _drift_of_inputs(self, weights: float) -> float:
        """Return the relative error that an input may have, as an output of a model that has drifted as much as this.

        An input may come from another model that trains: a generator, a teacher, an actor. 0 in the first compared
        step, where no model has drifted yet. An input that was equal in the step before is more likely a batch.
        """
        if self.before.step < 0:
            return 0.0
        grown = limits.GROWTH * self.before.stages.get("forward", 0.0)
        drifted = max(limits.GAIN["forward"], self.gain) * min(weights, limits.MOST)
        most = limits.OF_UNEQUAL_INPUTS if self.before.inputs else limits.OF_EQUAL_INPUTS
        as_before = min(limits.GROWTH * self.before.inputs, limits.AT_MOST["forward"])
        return max(min(max(grown, drifted), most), as_before)

    def _units_apart(self) -> float | None:
        unit = 2 * limits.ROUNDING[self._dtypes["weight"]]
        apart = max(self.inherited["forward"] / unit, 1.0)
        return apart if apart <= limits.MOST_UNITS else None

    def _largest_forward(self) -> float:
        """Return the largest relative L2 error of an output that is within the limit of outputs."""
        errors = self._errors[self.diffs.known_places("forward")]
        limit = limits.DEEP * (
            self.allowed("forward") + max(limits.GAIN["forward"], self.gain) * self.inherited["later"]
        )
        return float(errors[errors <= limit].max(initial=0.0))

    def _largest_kink(self) -> float:
        """Return the largest relative L2 error of an activation gradient whose error lies in a few elements."""
        places = self.diffs.known_places("backward")
        bulk, l2, reference_norms = (
            self.bulk[places],
            self.diffs.rows["l2"][places],
            self.diffs.rows["reference_l2"][places],
        )
        most = self.relative("backward").value * reference_norms
        few = (bulk <= most) & (most < l2) & (l2 <= limits.FEW_AT_MOST * reference_norms)
        return float(self._errors[places[few]].max(initial=0.0))

    def start(self) -> Start:
        """Return the facts that the search for systematic errors needs."""
        return Start(self.factor, self.noise, self.inherited["forward"], self.before)

    def allowed(self, stage: str) -> float:
        """Return the relative L2 error that rounding explains."""
        return limits.allowed(self._dtypes[stage], stage)

    def relative(self, stage: str, stepped: float = 0.0) -> Limit:
        """Return the limit of a stage's relative error.

        Args:
            stepped: sum of the squared errors of earlier updates within the step.
        """
        rounding = self.allowed(stage)
        inherited = self.inherited["forward" if stage == "forward" else "later"]
        if stepped and stage != "update":
            inherited = min(inherited + math.sqrt(stepped / (self._weights or math.inf)), limits.MOST)
        gain = max(limits.GAIN[stage], self.gain) if stage in limits.APART else 0.0
        kinks = limits.KINKS.get(stage, 0.0) * math.sqrt(self._forward_error) if self._kinked else 0.0
        of_statistics = limits.GROWTH * self.statistics if limits.GAIN[stage] and stage != "forward" else 0.0
        more = gain * inherited + kinks + of_statistics
        # The share grows with the amplification of `MOST`, the largest drift; half precision comes near it in a few
        # steps.
        amplification = max(self.gain, limits.GAIN["forward"]) if limits.is_half(self._dtypes[stage]) else self.gain
        further = max(1.0, limits.MOST * amplification / limits.AT_MOST["forward"])
        if stage not in ("forward", "loss"):
            further = max(further, limits.FURTHER * self._forward_error / limits.AT_MOST["forward"])
        at_most = min(limits.AT_MOST.get(stage, rounding) * further, limits.APART.get(stage, rounding))
        # Beyond the largest drift, the error at the start is unknown.
        larger = at_most if inherited >= limits.MOST else min(rounding + more, at_most)
        return Limit(self.factor * max(rounding, larger), Rule.INHERITED if larger > rounding else Rule.ROUNDING)

    def grad_limits(self, stepped: float = 0.0) -> tuple[np.ndarray, list[Rule]]:
        """Return the L2 limit of each gradient, and the rule of each limit, in the order of their indices."""
        places, rows = self._places["grad"], self.diffs.rows
        reference = rows["reference_l2"][places]
        keys, numbers = self.diffs.sites.keys, self.numbers
        lately = np.array([numbers.get(keys[place], 0.0) for place in places.tolist()]) if numbers else 0.0
        of_layers = self.grad_scales[places] * np.sqrt(rows["size"][places])
        scale = np.fmax(of_layers, lately)
        # A few wrong elements of an activation gradient reach every gradient that is computed from it.
        limit = self.relative("grad", stepped)
        if self._kinks:
            limit = Limit(limit.value + 2 * self.factor * self._kinks, Rule.HANDED_BACK)
        made_of = limits.MADE_OF * (self._came_back[places] + self._went_in)
        is_made_of = self.made_of[places]
        values = np.where(is_made_of, self.factor * (self.allowed("grad") + made_of), limit.value)
        rules = [
            Rule.LAYER if of_layer else Rule.MADE_OF if by_inputs else limit.rule
            for of_layer, by_inputs in zip((of_layers > _SAME_NORM * reference).tolist(), is_made_of.tolist())
        ]
        most = values * np.fmax(reference, scale)
        scaled = only_scaled(rows[places]) & (rows["l2"][places] <= most)
        return np.where(scaled, values * reference, most), rules


# Norms below this ratio are one norm, added up in two orders.
_SAME_NORM = 1 + 1e-6
_JUDGED = ("passed", "figure", "value", "limit", "rule")


class StepLimits:
    """Judge of a step's diffs, one after the other: the limit of a diff depends on the errors of earlier diffs.

    Methods identify a diff by its index among the step's diffs.
    """

    def __init__(self, diffs: StepDiffs, factor: float, before: Drift) -> None:
        self._diffs, self._factor, self._before = diffs, factor, before
        self.context = context = StepContext(diffs, factor, before)
        sites, rows, self._facts = diffs.sites, diffs.rows, context.facts
        self._step = diffs.number or 0
        self._derived = sites.derived.tolist()
        self._keys, self._stages, self._layers, self._shapes = sites.keys, sites.stages, sites.layers, sites.shapes
        # Lists, because reading an element of an array takes several times as long.
        floats = ("l2", "reference_l2", "spread", "floor")
        columns: list[list[float]] = [rows[name].tolist() for name in floats]
        self._l2, self._reference, self._spread, self._floor = columns
        self._size: list[int] = rows["size"].tolist()
        self._relative_l2: list[float] = diffs.relative.tolist()
        self._bulk: list[float] = context.bulk.tolist()
        has_floor = ~np.isnan(rows["floor"]) | (rows["code"] != 0)
        which: list[list[bool]] = [each.tolist() for each in (diffs.known, context.noise, context.made_of, has_floor)]
        self._known, self._noise, self._made_of, self._has_floor = which
        self._rows = rows.copy()
        #: The judgements: passed, numbers of the figures, values, limits, and numbers of the rules.
        self._passed, self._figures, self._values, self._limits, self._rules = (rows[name].tolist() for name in _JUDGED)
        #: Relative error that the growth of each stage's error since the step before explains.
        self._grown = {
            stage: min(limits.GROWTH * before.stages.get(stage, 0.0), limits.GROWN_AT_MOST) for stage in STAGES
        }
        #: Indices of the weights that passed.
        self._explained: dict[Key, int] = {}
        #: Error of each element of a layer's output that the error of the layer's bias explains, by layer.
        self._shifts: dict[str, float] = {}
        #: Layers with a parameter that has vanished into rounding noise.
        self._gone: set[str] = set()
        #: Sum of the squared errors of the updates judged so far: an optimizer may step before layers run again.
        self._stepped = 0.0
        #: Limit of the relative error of updates whose gradients are known.
        self._of_gradients = Limit(factor * context.allowed("update"), Rule.ROUNDING)
        #: Cached limit of each stage's relative error, and the value of `_stepped` that the limit is for.
        self._relatives: dict[str, tuple[float, Limit]] = {}
        self._grad_limits: dict[float, dict[int, Limit]] = {}
        #: True once a value has crossed a kink.
        self._crossed = False
        #: Largest relative L2 error of the outputs judged so far.
        self._handed_on = 0.0
        #: Largest relative L2 error of the activation gradients from the first one on that differs in a few elements
        #: only.
        self._handed_back = 0.0
        #: Norm of a gradient that vanishes beside the largest one of the step: that times the rounding of a rounding.
        largest = np.fmax.reduce(diffs.known_of_stage("backward", rows["reference_l2"], 0.0), initial=0.0)
        self._vanishing = limits.ROUNDING[context.dtype] ** 2 * float(largest)
        #: Shape and L2 error of the last output that passed.
        self._last: tuple[tuple[int, ...], float] = ((), 0.0)

    def judged(self) -> StepDiffs:
        """Return all diffs, judged."""
        rows, exact, troubled = self._rows, self._facts.exact, self._diffs.troubled
        as_they_are = (troubled | ~self._diffs.measured).tolist()
        for place, (leave, equal) in enumerate(zip(as_they_are, exact.tolist())):
            if leave:
                continue
            if equal:
                error = float(rows["max_abs"][place])
                self._set(place, error == 0, Figure.MAX_ABS, error, 0.0, Rule.EQUAL)
            else:
                self._judge(place)
        judged = self._passed, self._figures, self._values, self._limits, self._rules
        for name, column in zip(_JUDGED, judged):
            rows[name] = column
        return self._diffs.judged(rows)

    def _set(self, place: int, passed: bool, figure: Figure, value: float, limit: float, rule: Rule) -> None:
        self._passed[place], self._figures[place], self._rules[place] = (
            passed,
            FIGURE_NUMBERS[figure],
            RULE_NUMBERS[rule],
        )
        self._values[place], self._limits[place] = value, limit

    def _judge(self, place: int) -> None:
        stage, of_loop = self._stages[place], self._layers[place] == LOOP
        limit, explained = self._limit(place, stage, of_loop)
        if not explained and (not of_loop or stage == "loss"):
            as_output = self._facts.into_loss[place] or self._facts.fed_here[place]
            grown = self._grown["forward" if as_output else stage] * self._reference[place]
            if stage == "input" and not self._facts.fed_here[place] and self._l2[place] > limit.value:
                drifted = self.context.input_drift * self._reference[place]
                grown = drifted if self._l2[place] <= drifted else grown
            if grown > limit.value:
                limit = Limit(grown, Rule.GROWN)
        if self._has_floor[place]:
            limit = self._by_floor(place, stage, limit)
        figure = self._hold(place, stage, limit)
        passed = self._passed[place]
        if passed and self._known[place] and stage in ("forward", "backward"):
            self._hand_on(place, stage, figure)
        elif stage == "weight":
            self._after_weight(place, passed, limit, explained)
        elif stage == "update":
            if not of_loop and self._known[place] and math.isfinite(self._l2[place]):
                self._stepped += self._l2[place] ** 2
            if not passed:
                self._in_few(place, stage, limit.value)

    def _after_weight(self, place: int, passed: bool, limit: Limit, explained: bool) -> None:
        if passed:
            self._explained[self._keys[place]] = place
        else:
            passed = self._in_few(place, "weight", limit.value)
        if passed and self._noise[place] and self._facts.biases[place] and self._facts.simple[place]:
            # A softmax takes no gradient to a bias before it: there the bias is noise, and may be all of the output.
            self._shifts[self._layers[place]] = self._l2[place] / math.sqrt(max(self._size[place], 1))
        if not passed and explained and self._step - self._before.step == 1:
            self._rules[place] = RULE_NUMBERS[Rule.WRITTEN]
        elif passed and self._relative_l2[place] > limits.MOST and self._is_gone(place):
            self._gone.add(self._layers[place])

    def _hold(self, place: int, stage: str, limit: Limit) -> Figure:
        """Compare a diff with its limit, and return the figure that decided.

        A diff also passes if the bulk of its error is within the limit, and the whole error within a share of the
        tensor.
        """
        value, scale = self._l2[place], self._reference[place]
        # An estimate fails only if chance does not explain its error.
        most, figure = limit.value * (1 + limits.SURE * self._spread[place]), Figure.REL_L2
        passed = value <= most
        if not passed:
            few = limits.FEW_OF_UPDATES if stage == "update" else limits.FEW_AT_MOST
            if self._bulk[place] <= most < value <= few * scale:
                passed, figure, value = True, Figure.BULK, self._bulk[place]
                self._crossed = self._crossed or stage == "backward"
        if scale > 0:
            value, most = value / scale, most / scale
        else:
            figure = Figure.L2
        self._set(place, passed, figure, value, most, limit.rule)
        return figure

    def _by_floor(self, place: int, stage: str, modelled: Limit) -> Limit:
        """Return the limit by the measured floor, where the floor applies; otherwise the modelled limit.

        The floor does not apply if the step starts further apart than the measurement moved the step; nor to a gradient
        that is rounding noise, whose size differs on each side and in float64; nor after a value has crossed a kink,
        because everything computed from its gradient has a larger error than in runs without a crossing.
        """
        if stage in ("grad", "update") and self._noise[place]:
            without_third(self._rows, place)
            without_floor(self._rows, place)
            return modelled
        if math.isnan(self._floor[place]):
            return modelled
        if self.context.apart is None or self._crossed:
            without_floor(self._rows, place)
            return modelled
        return self._measured(place, stage, modelled)

    def _measured(self, place: int, stage: str, modelled: Limit) -> Limit:
        """Return the smaller of the limit by the measured floor and the modelled limit.

        The modelled limit is raised to `FLOORS_AT_LEAST` times the floor, within `AT_MOST` of the reference.
        """
        floor = self._factor * (self.context.apart or 1.0) * self._floor[place]
        most = self._factor * limits.AT_MOST[stage] * self._reference[place]
        least = Limit(min(limits.FLOORS_AT_LEAST * floor, most), Rule.MEASURED)
        return min(Limit(limits.FLOORS * floor, Rule.MEASURED), max(modelled, least, key=value_of), key=value_of)

    def _relative(self, stage: str) -> Limit:
        """Return the limit of a stage's relative error, cached for the updates judged so far."""
        stepped = self._stepped if stage != "update" else 0.0
        entry = self._relatives.get(stage)
        if entry is None or entry[0] != stepped:
            entry = self._relatives[stage] = stepped, self.context.relative(stage, stepped)
        return entry[1]

    def _limit(self, place: int, stage: str, of_loop: bool) -> tuple[Limit, bool]:
        """Return the limit of the error's L2 norm, and True if all its causes are known: then growth is no excuse."""
        reference = self._reference[place]
        if of_loop:
            return self._limit_of_loop(place, stage, reference), False
        if stage == "weight":
            return self._weight_limit(place)
        if stage == "grad":
            return self._grad_limit(place), self._made_of[place]
        if stage == "update":
            return self._update_limit(place), self._keys[place] in self.context.grads
        if stage != "backward" and self._size[place] == 1:
            reference = max(reference, self.context.numbers.get(self._keys[place], 0.0))
        as_output = stage == "forward" or self._facts.fed_here[place]
        relative = self._output_limit() if as_output else self._relative(stage)
        if self._derived[place] and not as_output:
            # A model outside of the run computes it: its drift is not known, and the error itself is no excuse.
            relative = Limit(self._factor * self.context.allowed("forward"), Rule.ROUNDING)
        if stage == "backward":
            # Earlier layers spread the error of a few elements, caused by a kink, over all of their elements.
            spread = min(limits.GROWTH * self._handed_back, self._factor * limits.AT_MOST["backward"])
            relative = Limit(spread, Rule.HANDED_BACK) if spread > relative.value else relative
        if stage == "forward" and self._layers[place] in self._facts.untaught:
            statistics = min(limits.GROWTH * self.context.statistics, limits.AT_MOST["forward"])
            relative = max(relative, Limit(self._factor * statistics, Rule.STATISTICS), key=value_of)
        if self._gone and stage in ("forward", "backward"):
            relative = max(relative, self._multiplied(self._layers[place]), key=value_of)
        limit = relative.times(reference)
        if stage == "backward" and not reference and self._l2[place]:
            # A softmax that is sure of its only choice leaves a zero on one side, and the product of two roundings.
            limit = max(limit, Limit(self._factor * self._vanishing, Rule.ROUNDING), key=value_of)
        if stage == "forward" and self._facts.activations[place] and self._shapes[place] == self._last[0]:
            # An activation that lets little through keeps the absolute error of its input.
            limit = max(limit, Limit(self._factor * limits.STEEPEST * self._last[1], Rule.ACTIVATION), key=value_of)
        shift = self._shifts.get(self._layers[place], 0.0) * math.sqrt(self._size[place]) if stage == "forward" else 0.0
        if 2 * shift > limit.value:
            limit = Limit(limit.value + self._factor * shift, Rule.INHERITED)
        return limit, False

    def _limit_of_loop(self, place: int, stage: str, reference: float) -> Limit:
        if stage == "update":
            return Limit(self._factor * limits.SCALAR * reference, Rule.SCALAR)
        if self._facts.into_loss[place]:
            # The input of a loss function is an output of a model.
            relative = self._output_limit()
            if self.context.statistics:
                relative = max(relative, self._relative("loss"), key=value_of)
            return relative.times(reference)
        # A loss may go to zero, where its size is no scale for its error.
        limit = self._relative(stage).times(max(reference, limits.LOSS_SCALE if stage == "loss" else 0.0))
        return self._loss_limit(place, limit) if self._facts.losses[place] else limit

    def _is_gone(self, place: int) -> bool:
        """Return True if next to nothing is left of a parameter's initial value."""
        began = self._before.began.get(self._keys[place], 0.0)
        return self._reference[place] < limits.GONE * began

    def _multiplied(self, layer: str) -> Limit:
        """Return the limit of values that a layer multiplies by a vanished parameter, of its own or of a container.

        The limit is 0 for layers without such a parameter. A scale that a step brought back to almost zero is rounding
        noise, and so are all products with the scale.
        """
        inside = any(layer == path or (path != ROOT and is_below(layer, path)) for path in self._gone)
        return Limit(self._factor * limits.MULTIPLIED * inside, Rule.INHERITED)

    def _output_limit(self) -> Limit:
        """Return the limit of an output's relative error, given the outputs before it."""
        relative = self._relative("forward")
        if limits.GROWTH * self._handed_on <= relative.value:
            return relative
        most = self._factor * limits.AT_MOST["forward"]
        if limits.is_half(self.context.dtype):
            most = max(most, limits.SLOWLY * self._handed_on)
        deeper = min(limits.DEEP * relative.value, most, limits.GROWTH * self._handed_on)
        return Limit(deeper, Rule.HANDED_ON) if deeper > relative.value else relative

    def _loss_limit(self, place: int, limit: Limit) -> Limit:
        """Return the limit of a loss, lowered to the error that the outputs' error explains.

        The explained error is the outputs' error times their gradient. The limit is not lowered if the outputs' error
        is unknown or large.
        """
        outputs = self.context.outputs
        if outputs is None or outputs.error > limits.AT_MOST["forward"]:
            return limit
        size = max(self._reference[place], limits.LOSS_SCALE)
        # A coarser dtype on one side rounds the loss by itself.
        sites = self._diffs.sites
        dtypes = [dtype for dtype in (side[place] for side in sites.dtypes) if dtype is not None]
        rounding = max(limits.ROUNDING.get(limits.coarse(dtype), 0.0) for dtype in dtypes)
        rounding_limit = max(limits.allowed(limits.coarse(sites.anchor_dtypes[place]), "loss"), rounding) * size
        error = max(outputs.error, self.context.statistics)
        output_limit = limits.LOSS_OF_OUTPUTS * max(outputs.first_order, error * size)
        return min(limit, Limit(self._factor * (rounding_limit + output_limit), Rule.OUTPUTS), key=value_of)

    def _grad_limit(self, place: int) -> Limit:
        limits_by_place = self._grad_limits.get(self._stepped)
        if limits_by_place is None:
            values, rules = self.context.grad_limits(self._stepped)
            places = self._diffs.sites.places["grad"].tolist()
            limits_by_place = self._grad_limits[self._stepped] = dict(zip(places, map(Limit, values.tolist(), rules)))
        return limits_by_place[place]

    def _noise_limit(self, place: int) -> float:
        # An update from noise has any direction, and at most the size of the reference's updates.
        return limits.UNRELATED * max(self._reference[place], self.context.update_scale * math.sqrt(self._size[place]))

    def _update_limit(self, place: int) -> Limit:
        key, reference = self._keys[place], self._reference[place]
        # An update may have the allowed relative error of its gradient.
        relative = self._of_gradients if key in self.context.grads else self._relative("update")
        of_gradient = limits.OF_GRADIENT * self._factor * self.context.grad_errors.get(key, 0.0)
        limit = Limit((relative.value + of_gradient) * reference, relative.rule)
        if self._noise[place]:
            limit = Limit(self._noise_limit(place), Rule.NOISE_DRIVEN)
        weight = self._explained.get(key)
        error = self._l2[weight] if weight is not None else None
        remembered = self._factor * self._before.remembered(key, self._step, error)
        if limit.rule is not Rule.NOISE_DRIVEN and of_gradient * reference + remembered > limit.value / 2:
            limit = Limit(limit.value, Rule.OF_GRADIENT)
        value = limit.value + remembered
        return Limit(value + self._rounded_weight(weight, value), limit.rule)

    def _rounded_weight(self, weight: int | None, error: float) -> float:
        """Return the error of an update due to rounding the weight to half precision.

        An update shows only in whole units of the weight's last place: if the sides differ by ``d``, one of
        ``unit / d`` elements goes to the next unit on one side.
        """
        if weight is None or not limits.is_half(self._diffs.sites.anchor_dtypes[weight]):
            return 0.0
        unit = 2 * limits.ROUNDING[self._diffs.sites.anchor_dtypes[weight]] * self._reference[weight]
        single = math.sqrt(min(few(self._size[weight]) / max(self._size[weight], 1), 1.0))
        return self._factor * (math.sqrt(error * unit) + unit * single)

    def _hand_on(self, place: int, stage: str, figure: Figure) -> None:
        """Remember the error of a passed output, or of its gradient: the next one is computed from it."""
        if stage == "forward" and figure is Figure.REL_L2:
            self._handed_on = max(self._handed_on, self._relative_l2[place])
            self._last = self._shapes[place], self._l2[place]
        elif stage == "backward" and (figure is Figure.BULK or self._handed_back):
            error = self._relative_l2[place]
            self._handed_back = max(self._handed_back, error if math.isfinite(error) else 0.0)

    def _in_few(self, place: int, stage: str, limit: float) -> bool:
        """Return True if a failed diff passes after all: its error lies in elements that rounding moves."""
        figure, rule = FIGURES[self._figures[place]], RULES[self._rules[place]]
        assert figure is not None and rule is not None
        diff = self._diffs[place].judged(False, figure, self._values[place], self._limits[place], rule)
        result = self._without_noise(diff, place, stage, limit)
        if not result.passed and stage == "update":
            weight = self._explained.get(self._keys[place])
            result = without_last_places(result, self._diffs[weight] if weight is not None else None, limit)
        judged = result.judgement
        if result.passed and judged is not None:
            self._set(place, True, judged.figure, judged.value, judged.limit, judged.rule)
        return result.passed

    def _without_noise(self, diff: Diff, place: int, stage: str, limit: float) -> Diff:
        """Return the diff, passed if its error lies in elements whose gradients are rounding noise."""
        key, context = self._keys[place], self.context
        steps = self._before.steps_before(self._step) if stage == "weight" else 1
        if not steps:
            return diff
        rounding = context.allowed("forward") * float(context.grad_scales[place])

        def most(count: int) -> float:
            return limits.UNRELATED * context.update_scale * math.sqrt(count) * self._factor * steps

        gradient = context.grads.get(key)
        another = stage == "update" and key in context.grad_errors
        gradient_diff = self._diffs[gradient] if gradient is not None else None
        return without_noise(diff, gradient_diff, limit, rounding, another, most)

    def _weight_limit(self, place: int) -> tuple[Limit, bool]:
        """Return the limit of a weight, and True if the step before explains all of the limit."""
        key, reference = self._keys[place], self._reference[place]
        number = self._before.steps_before(self._step)
        rounding_limit = self._relative("weight").times(reference)
        if not number:
            return rounding_limit, False
        limit = rounding_limit.value
        update = self.context.updates.get(key)
        size = self._reference[update] if update is not None else 0.0
        drifted, explained = self._before.weight_error(key, number, size, self._size[place])
        gap = number - self._before.step
        each = self._noise_limit(update) if update is not None and self._noise[place] else 0.0
        if explained and gap == 1:
            # Further operations on the weight on both sides (normalisation, clamping) may double the error.
            return Limit(limit + 2 * self._factor * drifted, Rule.UPDATES if drifted else rounding_limit.rule), True
        if explained:
            return Limit(limit + self._factor * (drifted + (gap - 1) * each), Rule.UPDATES), True
        ramp = (
            min(number, limits.DRIFT_STEPS)
            * limits.DRIFT_PER_STEP
            * self.context.allowed("forward")
            / limits.allowed("float32", "forward")
        )
        limit += self._factor * min(ramp, limits.DRIFT_AT_MOST) * reference
        if update is not None:
            # Adam's updates from noise shrink with time: in earlier steps these were as large as other updates.
            limit += self._factor * number * max(each, limits.OFF * self._larger(update))
        limit = max(limit, self._factor * drifted)
        slot, layer = equivalents.slot(key[1]), key[0]
        if slot in limits.RUNNING:
            # A mean near zero comes from values that are not near zero, and has their error.
            deviation = self.context.deviations.get(layer, 0.0) if slot == "running_mean" else 0.0
            limit += self._relative("forward").value * max(reference, deviation)
        if slot == "running_var":
            samples = self._facts.samples.get(layer, 0)
            if samples > 1:
                limit += limits.UNBIASED / (samples - 1) * reference
        if update is None and self._l2[place] > limit:
            # An average of a source has at most the source's error, however large this is: noise that Adam scales up.
            source = self._of_source(place)
            limit = max(limit, source, min(self._factor * source, limits.AT_MOST["forward"] * reference))
        return Limit(limit, Rule.STATISTICS if slot in limits.RUNNING else Rule.DRIFT), False

    def _of_source(self, place: int) -> float:
        """Return the L2 error of the weight that a weight without an optimizer may be a copy or an average of.

        The source has the same shape and slot, and a layer of the same last name: `k.0/bias` of `q.0/bias`. 0 if there
        is none.
        """
        (layer, slot), shape = self._keys[place], self._shapes[place]
        name = layer.rpartition(".")[2]
        return max(
            (
                max(self._l2[other], self._before.weights.get(key, 0.0))
                for other, key in enumerate(self._keys)
                if self._stages[other] == "weight"
                and (self._shapes[other], key[1], key[0].rpartition(".")[2]) == (shape, slot, name)
                and key in self.context.updates
                and math.isfinite(self._l2[other])
            ),
            default=0.0,
        )

    def _larger(self, place: int) -> float:
        """Return the larger norm of the two sides."""
        return max(self._reference[place], float(self._rows["candidate_l2"][place]))
