"""Optimizers, and what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from padiff.frameworks.hooking import Handle
from padiff.records.optimizer_state import OptimizerState
from padiff.system.guard import RAISING, Guard

#: ``consumed(parameters, gradients)``: called with both as the optimizer consumes them; `None` where there is no
#: gradient. Not with pairs: those of many parameters would keep the garbage collector busy.
OnConsumed = Callable[[Sequence[Any], Sequence[Any]], None]


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that an optimizer treats alike, and how.

    Attributes:
        values: names and values, under the names that both frameworks share (`padiff.frameworks.settings`).
        parameters: the tensors.
    """

    values: Mapping[str, Any]
    parameters: Sequence[Any]


@dataclass(frozen=True)
class OptimizerSettings:
    """What an optimizer is set to.

    Attributes:
        rule: the update rule, under the name that both frameworks share; the class's full name where it is none of
            the framework's own.
        groups: its parameters, by what holds for them.
        others: what holds for all of it: ``clip.kind``, ``schedule``.
    """

    rule: str
    groups: Sequence[OptimizerGroup]
    others: Mapping[str, Any] = field(default_factory=dict)


class Optimizers(Protocol):
    """Optimizers, and what they do."""

    def is_optimizer(self, value: Any) -> bool: ...

    def steppers(self, optimizer: Any) -> list[Any]:
        """What to hook of an optimizer (`hook`): itself, or those inside that it hands its work to.

        Empty where it is no optimizer, or one of which nothing can be seen.
        """

    def hook(
        self,
        optimizer: Any,
        consumed: OnConsumed,
        stepped: Callable[[], None],
        clipping: Callable[[Any], None] = lambda norm: None,
        guard: Guard = RAISING,
    ) -> list[Handle]:
        """Call ``consumed`` with the gradients as the optimizer uses them, ``stepped`` once it has.

        ``clipping`` is called with the norm of all gradients before an optimizer clips by it itself, as a tensor.
        ``guard`` stops errors of the callbacks, and of what is read of the optimizer for them.
        """

    def optimized(self, optimizer: Any) -> Sequence[Any]:
        """The parameters that an optimizer may change."""

    def learning_rates(self, optimizer: Any) -> list[float]:
        """The learning rate of each of the optimizer's parameter groups."""

    def settings(self, optimizer: Any) -> OptimizerSettings:
        """What an optimizer is set to now, as far as it can be seen."""

    def settings_stamp(self, optimizer: Any) -> Any:
        """A value that is another one once `settings` may be others; learning rates do not count. Cheap."""

    def state(self, optimizer: Any, names: Mapping[int, str]) -> OptimizerState:
        """What an optimizer holds now, as copies.

        Args:
            names: ``id`` of a parameter -> its site in the model, ``layer/slot``; of others nothing is said.

        Raises:
            UsageError: it holds what can't be described so.
        """

    def set_state(self, optimizer: Any, names: Mapping[int, str], new: OptimizerState) -> Callable[[], None]:
        """Give an optimizer a state, all of it or none: moments, counts of steps, learning rates.

        A parameter that the state does not know is as if it had never been stepped. Tensors are in the order of this
        optimizer's framework. Set the weights before: where the optimizer keeps them in more digits than the model,
        and the state has none, it takes the model's.

        Returns:
            What puts the optimizer back as it was.

        Raises:
            UsageError: the state does not fit; nothing was changed.
        """

    def in_float64(self, optimizer: Any) -> Callable[[], None]:
        """Have an optimizer step parameters that `Tensors.in_float64` has made float64; give it a state afterwards.

        Returns:
            What puts it back; the state that it has then is to be put back besides.
        """

    def step(self, optimizer: Any) -> None:
        """One step of an optimizer, and its gradients cleared."""
