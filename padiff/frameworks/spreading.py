"""The protocol of sharded tensors: tensors of which each process holds a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from padiff.records.parts import Part


@dataclass(frozen=True, slots=True)
class Held:
    """A sharded parameter: this process holds a part of it, or nothing.

    The layer may have another tensor in place of the parameter during its call.

    Attributes:
        slot: the parameter's name within the layer.
        shape: the shape of the whole parameter.
        dtype: the dtype of the part.
        trainable: True if an optimizer may change the parameter.
        stepped: the tensor that the optimizer steps; kept alive by this object.
        within: the first element and the number of elements of the part in the flattened `stepped`; `None` if
            `stepped` is the parameter itself.
        local: returns the part as a plain tensor, and its position in the whole; both are `None` if this process holds
            nothing.
        gradient: returns the current gradient of the part, or `None`.
        number: the index of the parameter among those inside `stepped`; -1 if `stepped` is the parameter itself.
        heard: True if a hook on `stepped` receives the parameter's own gradient in backward.
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
        """A key of the parameter: equal for two objects of the same parameter, as long as both are alive."""
        return id(self.stepped), self.number


class Spreading(Protocol):
    """Access to this process's parts of sharded tensors."""

    def find_shards(self, model: Any) -> None:
        """Find the sharded parameters of a model, given with the wrappers that the training calls."""

    def held(self, layer: Any) -> Sequence[Held]:
        """Return the sharded parameters of a layer that `look` found, which the layer replaces while it is called."""

    def is_spread(self, tensor: Any) -> bool:
        """Return True if the tensor's own class says that it is sharded (such as torch's ``DTensor``). Cheap."""

    def local(self, tensor: Any) -> tuple[Any, Part | None]:
        """Return this process's part as a plain tensor, and its position in the whole.

        A tensor that is not sharded is returned itself, with `None`.

        Raises:
            UncopiedError: the position of the part is unknown.
        """
