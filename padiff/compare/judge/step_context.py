"""What has to be known of a whole step, and of the one before it, before one of its diffs can be judged."""

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
from padiff.records.sites import Key
from padiff.records.step_diffs import StepDiffs


class StepContext:
    """What is known of a step from its measured diffs. Arrays have an element for each.

    Args:
        factor: all limits are multiplied by it.
        before: the step before.

    Attributes:
        diffs, factor, before, facts: likewise; and of the diffs' sites.
        bulk: errors without a few elements.
        updates, grads: the place of each parameter's update, and gradient, as far as they have figures.
        noise: which are of parameters whose gradients are rounding.
        made_of: which gradients are made of what is known: of what came back to the layer, and went through the model.
        grad_errors: relative errors of gradients, as far as they are allowed.
        update_scale: largest root mean square of an update.
        inherited: relative error that the step starts with, for outputs and for what is later.
        gain: how many times larger outputs may be off than what the step starts from.
        apart: how far apart the step starts, in units in the last place, for floors that were measured; `None`: further
            than they were measured for.
    """

    def __init__(self, diffs: StepDiffs, factor: float, before: Drift) -> None:
        self.diffs, self.factor, self.before = diffs, factor, before
        sites, rows = diffs.sites, diffs.rows
        self.facts, known = sites.fact(SiteFacts), diffs.block.fact(BlockFacts)
        number = diffs.in_block
        self._dtypes, self._places = self.facts.coarsest, sites.places
        self._errors, self.bulk = diffs.relative, known.bulk[number]
        grads = diffs.known_places("grad")
        grads = grads[~diffs.troubled[grads]] if diffs.problems else grads
        self.updates = self._by_key(self._places["update"][diffs.measured[self._places["update"]]])
        self.grads = self._by_key(grads)
        self.grad_scales, self.noise = known.grad_scales[number], known.noise[number]
        self.update_scale = known.update_scale[number]
        self.deviations = deviations_of(diffs)
        self._weights = known.weights[number]
        self.gain = limits.MORE_GAIN * before.gain
        unseen = before.unseen_in(diffs.number) if diffs.number is not None else 0.0
        unseen *= min(1.0, self.gain / limits.GAIN["forward"])
        self.inherited = {"forward": known.start[number].error(unseen), "later": known.later[number].error(unseen)}
        if before.step >= 0 and not before.known:
            self.inherited = dict.fromkeys(self.inherited, limits.MOST)
        self.apart = self._units_apart()
        self._forward_error = self._largest_forward()
        self._kinked = known.kinked[number]
        self._kinks = self._largest_kink()
        self.outputs = outputs_of(diffs)
        self._came_back, self._went_in = known.came_back[number], float(known.went_in[number])
        self.made_of = known.made_of[number]
        values, _ = self.grad_limits()
        allowed = grads[rows["l2"][grads] <= values[np.searchsorted(self._places["grad"], grads)]]
        self.grad_errors = {sites.keys[place]: float(self._errors[place]) for place in allowed.tolist()}

    def _by_key(self, places: np.ndarray) -> dict[Key, int]:
        """The last place of each parameter."""
        keys = self.diffs.sites.keys
        return {keys[place]: place for place in places.tolist()}

    def _units_apart(self) -> float | None:
        unit = 2 * limits.ROUNDING[self._dtypes["weight"]]
        apart = max(self.inherited["forward"] / unit, 1.0)
        return apart if apart <= limits.MOST_UNITS else None

    def _largest_forward(self) -> float:
        """Largest relative L2 error of an output, as far as it is allowed."""
        errors = self._errors[self.diffs.known_places("forward")]
        limit = limits.DEEP * (
            self.allowed("forward") + max(limits.GAIN["forward"], self.gain) * self.inherited["later"]
        )
        return float(errors[errors <= limit].max(initial=0.0))

    def _largest_kink(self) -> float:
        """Largest relative L2 error of an activation gradient that is off in a few elements only."""
        places = self.diffs.known_places("backward")
        bulk, l2, own = self.bulk[places], self.diffs.rows["l2"][places], self.diffs.rows["reference_l2"][places]
        most = self.relative("backward").value * own
        few = (bulk <= most) & (most < l2) & (l2 <= limits.FEW_AT_MOST * own)
        return float(self._errors[places[few]].max(initial=0.0))

    def start(self) -> Start:
        """What has to be known of the step to tell what is systematic."""
        return Start(self.factor, self.noise, self.inherited["forward"], self.before)

    def allowed(self, stage: str) -> float:
        """Relative L2 error that rounding explains."""
        return limits.allowed(self._dtypes[stage], stage)

    def relative(self, stage: str, stepped: float = 0.0) -> Limit:
        """What a stage may be off by, relative to its size.

        Args:
            stepped: squared errors of the updates before it, within the step.
        """
        own = self.allowed(stage)
        inherited = self.inherited["forward" if stage == "forward" else "later"]
        if stepped and stage != "update":
            inherited = min(inherited + math.sqrt(stepped / (self._weights or math.inf)), limits.MOST)
        gain = max(limits.GAIN[stage], self.gain) if stage in limits.APART else 0.0
        kinks = limits.KINKS.get(stage, 0.0) * math.sqrt(self._forward_error) if self._kinked else 0.0
        more = gain * inherited + kinks
        # Weights a hundredth apart are as far as drift goes. In half precision they come near it in a few steps.
        seen = max(self.gain, limits.GAIN["forward"]) if limits.is_half(self._dtypes[stage]) else self.gain
        further = max(1.0, limits.MOST * seen / limits.AT_MOST["forward"])
        if stage not in ("forward", "loss"):
            further = max(further, limits.FURTHER * self._forward_error / limits.AT_MOST["forward"])
        at_most = min(limits.AT_MOST.get(stage, own) * further, limits.APART.get(stage, own))
        # Of weights that are further apart than drift goes, nothing says how far.
        larger = at_most if inherited >= limits.MOST else min(own + more, at_most)
        return Limit(self.factor * max(own, larger), Rule.INHERITED if larger > own else Rule.ROUNDING)

    def grad_limits(self, stepped: float = 0.0) -> tuple[np.ndarray, list[Rule]]:
        """What each gradient may be off by (L2), and which rule allows it; in the order of their places."""
        places, rows = self._places["grad"], self.diffs.rows
        reference = rows["reference_l2"][places]
        scale = self.grad_scales[places] * np.sqrt(rows["size"][places])
        # The few elements of an activation gradient that are off are in every gradient that is made of it.
        limit = self.relative("grad", stepped)
        if self._kinks:
            limit = Limit(limit.value + 2 * self.factor * self._kinks, Rule.HANDED_BACK)
        made_of = limits.MADE_OF * (self._came_back[places] + self._went_in)
        known = self.made_of[places]
        values = np.where(known, self.factor * (self.allowed("grad") + made_of), limit.value)
        rules = [
            Rule.LAYER if of_layer else Rule.MADE_OF if made else limit.rule
            for of_layer, made in zip((scale > reference).tolist(), known.tolist())
        ]
        return values * np.fmax(reference, scale), rules
