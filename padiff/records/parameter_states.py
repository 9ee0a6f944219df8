"""State of an optimizer between two steps, under names that both frameworks share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.errors import UsageError

# Names of an optimizer's tensors for one parameter; each has the parameter's shape and axis order.
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
#: The parameter in float32, if the model has it in a lower precision.
MASTER_WEIGHT = "master_weight"

# Names of an optimizer's scalars for one parameter.
#: Number of steps that the optimizer has taken with the parameter.
STEPS = "steps"
#: NAdam's product of all momenta so far.
MU_PRODUCT = "mu_product"

#: Prefix of a name that an optimizer with an unknown update rule uses.
OWN = "own."

_WRONG = "an optimizer's state is a rule, parameters with tensors and numbers, and rates"


@dataclass(frozen=True)
class ParameterState:
    """State of an optimizer for one parameter.

    Attributes:
        tensors: tensors by the names above; each has the parameter's shape, in the axis order of its framework.
        numbers: scalars by the names above.
    """

    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rate:
    """Parameters that an optimizer updates with one learning rate.

    Attributes:
        value: the rate of the next step, including the factors of groups and parameters.
        parameters: sites of the parameters, ``layer/slot``.
    """

    value: float
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer between two steps.

    Attributes:
        rule: the update rule, as named by `padiff.frameworks.optimizing.OptimizerSettings`.
        parameters: state by site, ``layer/slot``; parameters that the optimizer has not updated yet are absent.
        rates: the learning rates of the next step.
    """

    rule: str
    parameters: Mapping[str, ParameterState] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()

    def rate(self, site: str) -> float | None:
        """Return the learning rate of a parameter; `None` if the optimizer does not update it."""
        return next((rate.value for rate in self.rates if site in rate.parameters), None)

    @property
    def sites(self) -> Iterator[str]:
        """Yield the sites of the parameters that the optimizer updates."""
        for rate in self.rates:
            yield from rate.parameters

    # -- in files ------------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all tensors by flat names, ``layer/slot:first_moment``."""
        return {
            f"{site}:{name}": array for site, state in self.parameters.items() for name, array in state.tensors.items()
        }

    def plain(self) -> dict[str, Any]:
        """Return everything except the tensors, as a value for JSON."""
        return {
            "rule": self.rule,
            "parameters": {
                site: {"tensors": [*state.tensors], "numbers": dict(state.numbers)}
                for site, state in self.parameters.items()
            },
            "rates": [{"value": rate.value, "parameters": [*rate.parameters]} for rate in self.rates],
        }

    @classmethod
    def from_plain(cls, plain: Any, arrays: Mapping[str, np.ndarray]) -> OptimizerState:
        """Return the state from the results of `plain` and `arrays`.

        Args:
            plain: the parsed JSON; it names the arrays to look up.
            arrays: tensors by flat name; further entries are ignored.

        Raises:
            UsageError: `plain` has another form, or a number that is not finite.
            KeyError: an array is missing.
        """
        try:
            loaded = cls(
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
        numbers = [number for state in loaded.parameters.values() for number in state.numbers.values()]
        if not all(math.isfinite(number) for number in (*numbers, *(rate.value for rate in loaded.rates))):
            raise UsageError(f"{_WRONG}: not all of its numbers are finite")
        return loaded


def rates_of(values: Iterable[tuple[str, float]]) -> tuple[Rate, ...]:
    """Return rates from the ``(site, rate)`` of each parameter."""
    together: dict[float, list[str]] = {}
    for site, value in values:
        together.setdefault(value, []).append(site)
    return tuple(Rate(value, tuple(sites)) for value, sites in together.items())
