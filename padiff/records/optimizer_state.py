"""What an optimizer holds between two steps, under names that both frameworks share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.errors import UsageError

# What an optimizer holds of a parameter, in tensors of the parameter's own shape and order.
FIRST_MOMENT = "first_moment"
SECOND_MOMENT = "second_moment"
MAX_SECOND_MOMENT = "max_second_moment"
INFINITY_NORM = "infinity_norm"
#: SGD's and RMSProp's buffer, in units of a gradient: the learning rate is no factor of it.
MOMENTUM = "momentum"
SQUARE_SUM = "square_sum"
SQUARE_AVERAGE = "square_average"
GRADIENT_AVERAGE = "gradient_average"
UPDATE_AVERAGE = "update_average"
PREVIOUS_GRADIENT = "previous_gradient"
STEP_SIZE = "step_size"
#: The parameter in float32, where the model has it in fewer digits.
MASTER_WEIGHT = "master_weight"

# What it holds in single numbers.
#: How many steps it has done with the parameter.
STEPS = "steps"
#: NAdam's product of all momenta so far.
MU_PRODUCT = "mu_product"

#: In front of a name that is the optimizer's own: one of a rule that padiff does not know.
OWN = "own."

_WRONG = "an optimizer's state is a rule, parameters with tensors and numbers, and rates"


@dataclass(frozen=True)
class ParameterState:
    """What an optimizer holds of one parameter.

    Attributes:
        tensors: by the names above; each of the parameter's shape, in the order of its framework.
        numbers: likewise.
    """

    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rate:
    """Parameters that an optimizer steps at one learning rate.

    Attributes:
        value: the rate that the next step uses, with the factors of groups and parameters.
        parameters: their sites, ``layer/slot``.
    """

    value: float
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer holds between two steps.

    Attributes:
        rule: the update rule, as `padiff.frameworks.optimizing.OptimizerSettings` names it.
        parameters: by site, ``layer/slot``; a parameter that it has not stepped yet is not there.
        rates: the learning rates of the next step.
    """

    rule: str
    parameters: Mapping[str, ParameterState] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()

    def rate(self, site: str) -> float | None:
        """The learning rate of a parameter; `None` where the optimizer does not step it."""
        return next((rate.value for rate in self.rates if site in rate.parameters), None)

    @property
    def sites(self) -> Iterator[str]:
        """The parameters that it steps."""
        for rate in self.rates:
            yield from rate.parameters

    # -- in files ------------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """All tensors by flat names, ``layer/slot:first_moment``."""
        return {
            f"{site}:{name}": array for site, state in self.parameters.items() for name, array in state.tensors.items()
        }

    def plain(self) -> dict[str, Any]:
        """The rest of it, as JSON has it."""
        return {
            "rule": self.rule,
            "parameters": {
                site: {"tensors": [*state.tensors], "numbers": dict(state.numbers)}
                for site, state in self.parameters.items()
            },
            "rates": [{"value": rate.value, "parameters": [*rate.parameters]} for rate in self.rates],
        }

    @classmethod
    def of(cls, plain: Any, arrays: Mapping[str, np.ndarray]) -> OptimizerState:
        """From what `plain` and `arrays` gave; of the arrays, those that it names are looked up.

        Raises:
            UsageError: it is of another form.
            KeyError: an array is missing.
        """
        try:
            found = cls(
                str(plain["rule"]),
                {
                    str(site): ParameterState(
                        {str(name): arrays[f"{site}:{name}"] for name in state["tensors"]},
                        {str(name): float(number) for name, number in state["numbers"].items()},
                    )
                    for site, state in plain["parameters"].items()
                },
                tuple(Rate(float(r["value"]), tuple(map(str, r["parameters"]))) for r in plain["rates"]),
            )
        except (TypeError, AttributeError, ValueError, LookupError) as error:
            if isinstance(error, KeyError) and ":" in str(error):
                raise
            raise UsageError(f"{_WRONG} ({error!r})") from None
        numbers = [number for state in found.parameters.values() for number in state.numbers.values()]
        if not all(math.isfinite(number) for number in (*numbers, *(rate.value for rate in found.rates))):
            raise UsageError(f"{_WRONG}: not all of its numbers are finite")
        return found


def rates_of(values: Iterable[tuple[str, float]]) -> tuple[Rate, ...]:
    """Rates from ``(site, rate)`` of each parameter."""
    together: dict[float, list[str]] = {}
    for site, value in values:
        together.setdefault(value, []).append(site)
    return tuple(Rate(value, tuple(sites)) for value, sites in together.items())
