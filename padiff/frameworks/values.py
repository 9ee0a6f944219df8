"""The values of tensors, and how they are copied and set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from padiff.frameworks.watching import Watch
from padiff.sketches.cuts import Cut, Form
from padiff.sketches.rows import Empty


class UncopiedError(Exception):
    """A tensor has no values that could be copied; the text says why."""


class Tensors(Protocol):
    """Values, and what tensors are. What both frameworks call alike (``grad``, ``element_size()``) is asked of them."""

    #: The class of them, for those who ask in every call.
    TYPE: type

    def is_tensor(self, value: Any) -> bool: ...

    def trainable(self, tensor: Any) -> bool: ...

    def all_trainable(self, tensors: Sequence[Any]) -> list[bool]:
        """`trainable` of many, in one go."""

    def dtype(self, tensor: Any) -> str: ...

    def shape(self, tensor: Any) -> tuple[int, ...]: ...

    def device(self, tensor: Any) -> str:
        """``cpu`` or ``gpu`` (or what torch calls another kind)."""

    def copy(self, tensor: Any, empty: Empty = np.empty) -> np.ndarray:
        """A copy of the tensor's values that nothing else can write to; bfloat16 stays bfloat16.

        ``empty`` makes the array to copy into.

        Raises:
            UncopiedError: of this kind of tensor there is no copy.
        """

    def sample(self, tensor: Any, transposed: bool = False) -> Any:
        """A copy of the elements that a sketch looks at (`padiff.sketches.cuts.sample`), flat.

        On the CPU an array; on another device a tensor that is still there, and that `fetch` brings over.
        ``transposed`` looks at a matrix transposed.
        """

    def elements(self, tensor: Any, chosen: np.ndarray) -> Any:
        """A copy of some elements of a tensor, by their places row by row; on its device, as `sample` has it."""

    def live(self, tensor: Any) -> np.ndarray | None:
        """The tensor's own memory as an array, where it is plain memory of the CPU, else `None`.

        To be read at once, or for as long as `memory` stays the same: training code may free what is below a tensor.
        """

    def cut(self, tensor: Any, transposed: bool = False) -> Cut | None:
        """Where the sample that is sketched lies in the tensor's memory, where that is plain memory of the CPU.

        Holds for as long as `live` does. ``transposed`` looks at a matrix transposed.
        """

    def form(self, dtype: str, shape: tuple[int, ...]) -> Form | None:
        """How a tensor of this dtype and shape lies in contiguous memory of the CPU; `None`: not to be said."""

    def address(self, tensor: Any, form: Form) -> int:
        """Where the memory of a tensor begins, if it is contiguous on the CPU and of this form; else 0.

        For tensors that the framework itself has just written, or is about to read.
        """

    def locator(self, forms: Sequence[Form]) -> Callable[[Sequence[Any]], list[int] | None]:
        """What finds the `address` of each of as many tensors, in one go; `None` where one has none."""

    #: Whether there are views of tensors on another device, to be copied together.
    JOINS: bool

    def pieces(self, tensor: Any, transposed: bool = False) -> Sequence[Any]:
        """Views of a tensor on another device which one after the other are its `sample`; none where it is no such
        views.

        Good for as long as `memory` stays the same.
        """

    def join(self, pieces: Sequence[Sequence[Any]]) -> list[Any]:
        """Copies of pieces, those of one tensor one after the other: as few copies are made as there are dtypes."""

    def memory(self, tensor: Any) -> Any:
        """Where the tensor's memory is, and how the tensor lies in it; another value once one of these is another."""

    def watch(self, tensors: Sequence[Any]) -> Watch:
        """What sees whether many tensors have the memory, the dtype and the shape that they had, lie in it as they did,
        and are as trainable; of all of them in one go.
        """

    def same_values(self, tensor: Any, other: Any) -> bool:
        """Whether two tensors have one memory, and all of it in the same order: views of other shapes."""

    #: `version_of`, for those who ask in every call; raises an error where there is no such number.
    WRITTEN: Callable[[Any], int]

    def version_of(self, tensor: Any) -> int:
        """A number that changes when the tensor is written in place; -1 where there is none."""

    def fetch(self, tensors: Sequence[Any]) -> Callable[[], list[np.ndarray]]:
        """Begin to bring tensors over from their device, all at once; what is returned waits for them."""

    def write(self, tensor: Any, array: np.ndarray) -> None:
        """Set a parameter's or buffer's values in place; its dtype and device stay, no graph is recorded."""

    def like(self, tensor: Any, array: np.ndarray) -> Any:
        """A new tensor with these values, of another one's dtype and device, that takes part in no backward."""

    def leaf(self, tensor: Any, array: np.ndarray) -> Any:
        """As `like`, but a gradient can be had of it where its dtype has any."""

    def gradients(self, outputs: Sequence[Any], inputs: Sequence[Any], seeds: Sequence[Any]) -> Sequence[Any]:
        """The gradients of inputs, given those of outputs; `None` where none reaches one. Parameters keep theirs."""

    def make(self, array: np.ndarray, near: Any) -> Any:
        """A new tensor with an array's values and dtype, on the device of another tensor; it has its own memory."""

    def in_float64(self, tensors: Sequence[Any]) -> Callable[[], None]:
        """Make parameters and buffers float64, those of another floating dtype, each the same object as before; what is
        made without a dtype is float64, too.

        Returns:
            What puts all of it back as it was, to the bit, whatever was written to them meanwhile. Their gradients have
            to be cleared before both.
        """

    def without_grad(self) -> AbstractContextManager[Any]:
        """No graph is recorded."""
