"""The update rule of an optimizer from its declared settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from padiff.compare.declared.optimizers import Group
from padiff.compare.diagnose.hypotheses.fitting import residual_of
from padiff.compare.diagnose.hypotheses.rules import RULES, History, Rule, updates
from padiff.frameworks.optimizer_catalog import epsilon_of

_NAMES = {"rho": "alpha", "initial_accumulator_value": "initial"}
# Settings that no rule here supports, with the value at which they have no effect.
_NOTHING = {"maximize": False, "rescale_grad": 1.0, "lr_decay": 0.0, "decay.l1": 0.0, "decay.own": 0.0}
# Forms that no setting declares: each framework's code has one of the two.
_EITHER = ("single", "rate_inside", "uncorrected_eps")


@dataclass(frozen=True)
class DeclaredRule:
    """A rule with the settings that a run declares for a parameter group.

    Attributes:
        rule: the rule.
        settings: the rule's settings; ``rate`` is a factor of the recorded learning rates.
        group: index of the recorded learning rate that the rule uses.
    """

    rule: Rule
    settings: Mapping[str, float]
    group: int

    @classmethod
    def from_group(cls, group: Group, framework: str) -> DeclaredRule | None:
        """Return the rule of a parameter group, or `None` if no rule here supports its settings."""
        values = group.values
        rule = next((candidate for candidate in RULES if candidate.name == group.rule), None)
        if rule is None or any(values.get(name, usual) != usual for name, usual in _NOTHING.items()):
            return None
        settings = dict(rule.defaults)
        for name, value in values.items():
            common = _NAMES.get(name, name)
            if common in settings and isinstance(value, (bool, int, float)):
                settings[common] = float(value)
        coupled, decoupled = (group.setting(f"decay.{form}") for form in ("coupled", "decoupled"))
        if coupled and decoupled:
            return None
        if "weight_decay" in settings:
            settings["weight_decay"] = coupled + decoupled
        elif coupled or decoupled:
            return None
        if "decoupled" in settings:
            settings["decoupled"] = float(bool(decoupled))
        elif bool(decoupled) != (rule.name in ("Lamb", "Lion")) and coupled + decoupled:
            return None
        place = epsilon_of(framework, rule.name)
        if "inside" in settings:
            settings["inside"] = float(place is not None and place.inside)
        settings["rate"] = group.setting("lr_factor", 1.0)
        number = values.get("rate", 0)
        return cls(rule, settings, number if isinstance(number, int) else 0)

    def updates(self, history: History, noise: np.ndarray) -> np.ndarray:
        """Return the updates of the rule, in the undeclared forms that fit the recorded updates best."""
        ways = [name for name in _EITHER if name in self.settings]
        best: Sequence[float] = ()
        residual = np.inf
        for way in product((0.0, 1.0), repeat=len(ways)):
            off = residual_of(self.rule, {**self.settings, **dict(zip(ways, way))}, history, noise)
            if off < residual or not best:
                best, residual = way, off
        with np.errstate(all="ignore"):
            return updates(self.rule, history, {**self.settings, **dict(zip(ways, best))})
