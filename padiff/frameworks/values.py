"""The protocol of tensors: reading, copying and setting their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from padiff.frameworks.watching import Watch
from padiff.sketches.cuts import Cut, Form
from padiff.sketches.rows import Empty


class UncopiedError(Exception):
    """Raised for a tensor whose values can't be copied; the text gives the reason."""


class Tensors(Protocol):
    """Operations on tensors. Attributes that both frameworks share (``grad``, ``element_size()``) are used directly."""

    #: The class of tensors, for `isinstance` checks on hot paths.
    TYPE: type

    def is_tensor(self, value: Any) -> bool: ...

    def trainable(self, tensor: Any) -> bool: ...

    def all_trainable(self, tensors: Sequence[Any]) -> list[bool]:
        """Return `trainable` of each tensor."""

    def dtype(self, tensor: Any) -> str: ...

    def shape(self, tensor: Any) -> tuple[int, ...]: ...

    def device(self, tensor: Any) -> str:
        """Return the kind of device: ``cpu`` or ``gpu`` in paddle, the device type (such as ``cuda``) in torch."""

    def copy(self, tensor: Any, empty: Empty = np.empty) -> np.ndarray:
        """Return a copy of the tensor's values that shares no memory; bfloat16 stays bfloat16.

        ``empty`` allocates the array to copy into.

        Raises:
            UncopiedError: this kind of tensor can't be copied.
        """

    def sample(self, tensor: Any, transposed: bool = False) -> Any:
        """Return a flat copy of the elements that a sketch uses (`padiff.sketches.cuts.sample`).

        The copy of a CPU tensor is an array. For another device it is a tensor on that device, to be moved by `fetch`.
        ``transposed`` samples the transpose of a matrix.
        """

    def elements(self, tensor: Any, chosen: np.ndarray) -> Any:
        """Return a copy of the elements at these flat row-major indices: an array, or a tensor as in `sample`."""

    def live(self, tensor: Any) -> np.ndarray | None:
        """Return the tensor's own memory as an array if it is plain CPU memory, else `None`.

        Read the array at once, or only while `memory` stays the same: training code may free a tensor's memory.
        """

    def cut(self, tensor: Any, transposed: bool = False) -> Cut | None:
        """Return the position of the `sample` in the tensor's memory if it is plain CPU memory, else `None`.

        The position is valid as long as the array of `live`. ``transposed`` samples the transpose of a matrix.
        """

    def form(self, dtype: str, shape: tuple[int, ...]) -> Form | None:
        """Return the memory layout of a contiguous CPU tensor of this dtype and shape; `None` if it is unsupported."""

    def address(self, tensor: Any, form: Form) -> int:
        """Return the address of a tensor's memory if it is contiguous on the CPU and of this form; else 0.

        Call this only for tensors that the framework itself has just written, or is about to read.
        """

    def locator(self, forms: Sequence[Form]) -> Callable[[Sequence[Any]], list[int] | None]:
        """Return a function that computes the `address` of each of a list of tensors, or `None` if one of them is 0.

        The list has one tensor per form.
        """

    #: True if `pieces` can return views of tensors on another device, so that many samples are copied together.
    JOINS: bool

    def pieces(self, tensor: Any, transposed: bool = False) -> Sequence[Any]:
        """Return views of a tensor on another device that, concatenated, are its `sample`; empty if there are none.

        The views are valid while `memory` stays the same.
        """

    def join(self, pieces: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the concatenated copy of each tensor's pieces, with one copy operation per dtype and device."""

    def memory(self, tensor: Any) -> Any:
        """Return a value that changes when the tensor's memory, or its layout in the memory, changes."""

    def watch(self, tensors: Sequence[Any]) -> Watch:
        """Return a watch that detects changes of memory, dtype, shape, layout and trainability of many tensors."""

    def same_values(self, tensor: Any, other: Any) -> bool:
        """Return True if two tensors cover the same memory in the same order, so that only their shapes may differ."""

    #: `version_of` for hot paths; raises an error if the tensor has no version.
    WRITTEN: Callable[[Any], int]

    def version_of(self, tensor: Any) -> int:
        """Return a number that changes when the tensor is written in place; -1 if the tensor has no such number."""

    def fetch(self, tensors: Sequence[Any]) -> Callable[[], list[np.ndarray]]:
        """Begin to copy tensors from their device to the CPU; return a function that waits for the arrays."""

    def write(self, tensor: Any, array: np.ndarray) -> None:
        """Set a parameter's or buffer's values in place; its dtype and device stay, no graph is recorded."""

    def like(self, tensor: Any, array: np.ndarray) -> Any:
        """Return a new tensor with these values, with the dtype and device of ``tensor``, that requires no gradient."""

    def leaf(self, tensor: Any, array: np.ndarray) -> Any:
        """Return a tensor as `like` does, but requiring a gradient if its dtype allows it."""

    def gradients(self, outputs: Sequence[Any], inputs: Sequence[Any], seeds: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of inputs, from the gradients ``seeds`` of outputs; `None` for an unreached input.

        The ``grad`` of parameters stays unchanged.
        """

    def make(self, array: np.ndarray, near: Any) -> Any:
        """Return a new tensor with an array's values and dtype, on the device of ``near``, in its own memory."""

    def in_float64(self, tensors: Sequence[Any]) -> Callable[[], None]:
        """Convert floating-point parameters and buffers to float64 in place, and make float64 the default dtype.

        Returns:
            A function that restores the tensors to the bit, whatever was written to them since, and the default dtype.
            Clear the gradients before both calls.
        """

    def rows(self, tensor: Any, axis: int | None) -> Any:
        """Return a tensor as a matrix whose rows run along an axis; `None`: one row of all elements."""

    def ranked(self, scores: Any, count: int, largest: bool) -> tuple[Any, Any]:
        """Return the largest (or smallest) scores of each row in order, and their places in the row."""

    def along(self, tensor: Any, places: Any) -> Any:
        """Return the elements at some places of each row of a matrix."""

    def without_grad(self) -> AbstractContextManager[Any]:
        """Return a context that records no graph."""
