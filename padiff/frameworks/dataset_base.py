"""The base class of both frameworks' datasets; see `padiff.frameworks.base.Data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Items:
    """The two methods of a dataset, over a sequence. Subclasses also derive from the framework's dataset class."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]
