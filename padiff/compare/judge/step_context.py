"""Facts about a whole step, and the step before it, that the judgement of each diff needs."""

from __future__ import annotations

import math

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.block_facts import BlockFacts
from padiff.compare.judge.drift import Drift
from padiff.compare.judge.limit import Limit
from padiff.compare.judge.site_facts import SiteFacts
from padiff.compare.judge.step_figures import deviations_of, outputs_of
from padiff.compare.judge.systematic import Start
from padiff.records import Rule
from padiff.records.pair_schema import Key
from padiff.records.step_diffs import StepDiffs


class StepContext:
    """Facts about a step from its measured diffs. Arrays have an element for each diff.

    Args:
        factor: multiplier of all limits.
        before: drift at the step before.

    Attributes:
        diffs, factor, before: the arguments.
        facts: facts about the diffs' sites.
        bulk: errors without a few elements.
        updates, grads: indices of the last measured update, and gradient, of each parameter.
        noise, made_of, update_scale: see `BlockFacts`.
        grad_errors: relative errors of the gradients within their limits, by parameter.
        inherited: relative error at the start of the step, for outputs and for later stages.
        gain: allowed ratio of the outputs' error to the error at the start of the step.
        apart: distance at the start of the step, in units in the last place, for measured floors; `None` if the
            distance is larger than floors were measured for.
    """

    def __init__(self, diffs: StepDiffs, factor: float, before: Drift) -> None:
        self.diffs, self.factor, self.before = diffs, factor, before
        sites, rows = diffs.sites, diffs.rows
        self.facts, block_facts = sites.fact(SiteFacts), diffs.block.fact(BlockFacts)
        number = diffs.in_block
        self._dtypes, self._places = self.facts.coarsest, sites.places
        self._errors, self.bulk = diffs.relative, block_facts.bulk[number]
        grads = diffs.known_places("grad")
        grads = grads[~diffs.troubled[grads]] if diffs.problems else grads
        self.updates = self._by_key(self._places["update"][diffs.measured[self._places["update"]]])
        self.grads = self._by_key(grads)
        self.grad_scales, self.noise = block_facts.grad_scales[number], block_facts.noise[number]
        self.update_scale = block_facts.update_scale[number]
        self.deviations = deviations_of(diffs)
        self._weights = block_facts.weights[number]
        self.gain = limits.MORE_GAIN * before.gain
        unseen = before.unseen_in(diffs.number) if diffs.number is not None else 0.0
        unseen *= min(1.0, self.gain / limits.GAIN["forward"])
        self.inherited = {
            "forward": block_facts.start[number].error(unseen),
            "later": block_facts.later[number].error(unseen),
        }
        if before.step >= 0 and not before.known:
            self.inherited = dict.fromkeys(self.inherited, limits.MOST)
        self.input_drift = self._drift_of_inputs(block_facts.start[number].weights)
        self.apart = self._units_apart()
        self._forward_error = self._largest_forward()
        self._kinked = block_facts.kinked[number]
        self._kinks = self._largest_kink()
        self.outputs = outputs_of(diffs)
        self._came_back, self._went_in = block_facts.came_back[number], float(block_facts.went_in[number])
        self.made_of = block_facts.made_of[number]
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
        more = gain * inherited + kinks
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
        scale = self.grad_scales[places] * np.sqrt(rows["size"][places])
        # A few wrong elements of an activation gradient reach every gradient that is computed from it.
        limit = self.relative("grad", stepped)
        if self._kinks:
            limit = Limit(limit.value + 2 * self.factor * self._kinks, Rule.HANDED_BACK)
        made_of = limits.MADE_OF * (self._came_back[places] + self._went_in)
        is_made_of = self.made_of[places]
        values = np.where(is_made_of, self.factor * (self.allowed("grad") + made_of), limit.value)
        rules = [
            Rule.LAYER if of_layer else Rule.MADE_OF if by_inputs else limit.rule
            for of_layer, by_inputs in zip((scale > reference).tolist(), is_made_of.tolist())
        ]
        return values * np.fmax(reference, scale), rules
