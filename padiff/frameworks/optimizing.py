"""The protocol of optimizers, and values that describe their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from padiff.frameworks.hooking import Handle
from padiff.records.parameter_states import OptimizerState
from padiff.system.guard import RAISING, Guard

#: ``consumed(parameters, gradients)``: called with the gradients that the optimizer uses; `None` stands for a missing
#: gradient. Two lists, not a list of pairs: pairs of many parameters would keep the garbage collector busy.
OnConsumed = Callable[[Sequence[Any], Sequence[Any]], None]


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters with the same settings in an optimizer, and these settings.

    Attributes:
        values: the settings, under the names that both frameworks share (`padiff.frameworks.settings`).
        parameters: the tensors.
    """

    values: Mapping[str, Any]
    parameters: Sequence[Any]


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of an optimizer.

    Attributes:
        rule: the update rule, under the name that both frameworks share; the full name of the class if it is not the
            framework's own.
        groups: the parameters, grouped by their settings.
        others: settings of the whole optimizer: ``clip.kind``, ``schedule``.
    """

    rule: str
    groups: Sequence[OptimizerGroup]
    others: Mapping[str, Any] = field(default_factory=dict)


class Optimizers(Protocol):
    """Operations on the optimizers of a framework."""

    def is_optimizer(self, value: Any) -> bool: ...

    def steppers(self, optimizer: Any) -> list[Any]:
        """Return the objects to `hook` for an optimizer: itself, or the inner optimizers that a wrapper calls.

        The list is empty if the value is no optimizer, or an optimizer that can't be hooked.
        """

    def hook(
        self,
        optimizer: Any,
        consumed: OnConsumed,
        stepped: Callable[[], None],
        clipping: Callable[[Any], None] = lambda norm: None,
        guard: Guard = RAISING,
    ) -> list[Handle]:
        """Call ``consumed`` with the gradients that the optimizer uses, and ``stepped`` after its step.

        If the optimizer itself clips by the norm of all gradients, ``clipping`` is called with that norm before
        clipping, as a tensor. ``guard`` stops errors of the callbacks, and of reading the optimizer for them.
        """

    def optimized(self, optimizer: Any) -> Sequence[Any]:
        """Return the parameters that an optimizer may change."""

    def learning_rates(self, optimizer: Any) -> list[float]:
        """Return the learning rate of each of the optimizer's parameter groups."""

    def settings(self, optimizer: Any) -> OptimizerSettings:
        """Return the current settings of an optimizer, as far as they are readable."""

    def settings_stamp(self, optimizer: Any) -> Any:
        """Return a value that changes when `settings` may have changed, except for learning rates. Cheap."""

    def state(self, optimizer: Any, names: Mapping[int, str]) -> OptimizerState:
        """Return a copy of an optimizer's state.

        Args:
            names: ``id`` of a parameter -> its site in the model, ``layer/slot``; other parameters are omitted.

        Raises:
            UsageError: the state has values that `OptimizerState` can't describe.
        """

    def set_state(self, optimizer: Any, names: Mapping[int, str], new: OptimizerState) -> Callable[[], None]:
        """Set an optimizer's state: moments, counts of steps, learning rates. An error leaves the old state.

        A parameter that is missing in the state becomes like a parameter that was never stepped. Tensors are in the
        layout of this optimizer's framework. Set the model's weights first: an optimizer that keeps master weights
        copies them from the model if the state has none.

        Returns:
            A function that restores the old state.

        Raises:
            UsageError: the state does not fit; nothing was changed.
        """

    def in_float64(self, optimizer: Any) -> Callable[[], None]:
        """Prepare an optimizer for parameters that `Tensors.in_float64` has made float64; call `set_state` afterwards.

        Returns:
            A function that undoes the preparation, but not the change of the state.
        """

    def step(self, optimizer: Any) -> None:
        """Step an optimizer once, then clear its gradients."""
