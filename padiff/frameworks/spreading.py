"""Parameters and other tensors that are spread over processes, each of which holds a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from padiff.records.parts import Part


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter of which this process holds a part, or nothing; while its layer is called it may stand elsewhere.

    Attributes:
        slot: its name within the layer.
        shape: of the whole parameter.
        dtype: of the part.
        trainable: whether an optimizer may change it.
        stepped: the tensor that the optimizer steps; it is kept as long as this is.
        within: where in that tensor the part is, from an element on so many; `None`: the tensor is this parameter.
        local: gives the part as a plain tensor, and which part it is; the tensor is `None` where nothing is held.
        gradient: gives the part's gradient as it is now, `None` where there is none.
        number: which of the parameters inside of that tensor it is.
        heard: whether a hook on `stepped` hears the parameter's own gradient in backward.
    """

    slot: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    stepped: Any
    within: tuple[int, int] | None
    local: Callable[[], tuple[Any, Part | None]]
    gradient: Callable[[], Any]
    number: int = -1
    heard: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Equal for two of one parameter, as long as both are kept."""
        return id(self.stepped), self.number


class Spreading(Protocol):
    """What of tensors this process holds."""

    def look(self, model: Any) -> None:
        """Look for parameters that stand elsewhere than on their layers. Given the model as the training calls it."""

    def held(self, layer: Any) -> Sequence[Held]:
        """Of the parameters of a layer, those that stand elsewhere than on it while it is called, as far as `look` has
        found them.
        """

    def is_spread(self, tensor: Any) -> bool:
        """Whether a tensor is spread over processes by its own kind. Cheap."""

    def local(self, tensor: Any) -> tuple[Any, Part | None]:
        """What of a tensor this process holds, as a plain tensor, and which part of the whole that is; of any other
        tensor, itself.

        Raises:
            UncopiedError: it can't be said which part it is.
        """
