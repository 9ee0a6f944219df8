"""Layer maps: which layer answers to which, as given by a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from padiff.errors import UsageError


@dataclass(frozen=True)
class LayerMap:
    """Pairs of layer paths, the reference's first.

    A pair whose one side is `None` says that the layer answers to nothing, so that no partner is sought for it.
    """

    pairs: tuple[tuple[str | None, str | None], ...] = ()

    @classmethod
    def of(cls, value: LayerMap | Mapping[Any, Any] | Iterable[Any] | str | Path | None) -> LayerMap:
        """A layer map from what a call may give: a map, a mapping, pairs, or the path of a YAML file.

        Raises:
            UsageError: the value, or an item of it, can't be read as pairs of paths.
        """
        if value is None:
            return cls()
        if isinstance(value, LayerMap):
            return value
        if isinstance(value, (str, Path)):
            return cls.read(value)
        items = value.items() if isinstance(value, Mapping) else value
        return cls(tuple(_pair(item) for item in items))

    @classmethod
    def read(cls, path: str | Path) -> LayerMap:
        """Read what ``padiff map`` writes: YAML with ``pairs``, each with ``reference`` and ``candidate``.

        Raises:
            UsageError: the file is missing or of another form.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the layer map {path}: {error}") from error
        except yaml.YAMLError as error:
            raise UsageError(f"the layer map {path} is no YAML: {error}") from error
        if isinstance(content, Mapping) and "pairs" in content:
            content = content["pairs"] or ()
        if not isinstance(content, (list, tuple, Mapping)):
            raise UsageError(
                f"the layer map {path} holds {type(content).__name__}; expected 'pairs:' with a list of "
                "'reference: PATH' and 'candidate: PATH', as `padiff map` writes it"
            )
        return cls.of(content)

    def __iter__(self) -> Iterator[tuple[str | None, str | None]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


def _pair(item: Any) -> tuple[str | None, str | None]:
    if isinstance(item, Mapping) and {"reference", "candidate"} <= set(item):
        item = (item["reference"], item["candidate"])
    if (
        not isinstance(item, (list, tuple))
        or len(item) != 2
        or not all(side is None or isinstance(side, str) for side in item)
        or item[0] is item[1] is None
    ):
        raise UsageError(
            f"layer map: expected a pair of layer paths (reference, candidate), got {item!r}; "
            "`padiff map REFERENCE CANDIDATE` writes a map to start from"
        )
    return item[0], item[1]
