"""Layer maps: pairs of layers as written by a person."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from padiff.errors import UsageError
from padiff.frameworks import framework_of
from padiff.model.selection import Node
from padiff.model.tree import walk
from padiff.records import Both

#: A map of 300,000 pairs has 1.8 million events (a scalar, or the begin or end of a list or mapping).
MOST_EVENTS = 4_000_000
#: Maximum depth of nesting; maps need four levels: ``pairs``, its list, an item, the parts of one side.
DEEPEST = 8

_PLAIN = frozenset({None, "!", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"})

# The parser in C, if PyYAML has it, is ten times faster.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str) -> tuple[Any, list[int]]:
    """Return the content of a document, and the line of each item of ``pairs`` (or of the only list or mapping), from
    1.

    The content is built from the parser's events: PyYAML's own loaders recurse for each level, and follow aliases.

    Raises:
        BeyondMapError: the document has more than a layer map: several documents, aliases, levels beyond `DEEPEST`,
            events beyond `MOST_EVENTS`.
        yaml.YAMLError: the text is no YAML.
    """
    builder = _Builder()
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if number > MOST_EVENTS:
            raise _error(f"a layer map has at most {MOST_EVENTS:,} names, lists and mappings", event)
        builder.add(event)
    lines = builder.pair_lines if builder.pair_lines is not None else builder.top_lines
    return builder.content, lines


class BeyondMapError(yaml.MarkedYAMLError):
    """Raised for YAML that exceeds the form or the bounds of a layer map."""


class _Builder:
    """Builder of plain values from parser events.

    Attributes:
        content: the document's value.
        top_lines: line of each item of the document, from 1.
        pair_lines: line of each item of ``pairs``, from 1; `None` if the document has no such key.
    """

    def __init__(self) -> None:
        self.content: Any = None
        self.top_lines: list[int] = []
        self.pair_lines: list[int] | None = None
        self._documents = 0
        # Open collections, outermost first: a list's items, or a mapping's keys and values in turn; True for a mapping.
        self._open: list[tuple[list[Any], bool]] = []
        self._scalars: Any = yaml.SafeLoader("")

    def add(self, event: Any) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise _error("a layer map is one document, here begins a second", event)
        elif isinstance(event, yaml.AliasEvent):
            raise _error("a layer map has no aliases (*name): write the paths out", event)
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(self._open) == DEEPEST:
                raise _error(f"a layer map is nested at most {DEEPEST} deep", event)
            if event.tag not in _PLAIN:
                mark: Any = event.start_mark
                raise ConstructorError(None, None, f"there is no constructor for {event.tag!r}", mark)
            self._see_item(event)
            self._open.append(([], isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.CollectionEndEvent):
            items, mapping = self._open.pop()
            self._give(_mapping(items, event) if mapping else items)
        elif isinstance(event, yaml.ScalarEvent):
            self._see_item(event)
            self._give(self._scalar(event))

    def _see_item(self, event: Any) -> None:
        """Store the line where an item begins; a mapping's item begins at its key."""
        if not self._open or len(self._open) > 2:
            return
        items, mapping = self._open[-1]
        if mapping and len(items) % 2:
            if len(self._open) == 1 and items[-1] == "pairs":
                self.pair_lines = []
            return
        line = event.start_mark.line + 1
        if len(self._open) == 1:
            self.top_lines.append(line)
        elif self.pair_lines is not None and self._open[0][1] and self._open[0][0][-1] == "pairs":
            self.pair_lines.append(line)

    def _give(self, value: Any) -> None:
        if self._open:
            self._open[-1][0].append(value)
        else:
            self.content = value

    def _scalar(self, event: Any) -> Any:
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._scalars.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag == "tag:yaml.org,2002:str":
            return event.value
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        return self._scalars.construct_object(node)


def _mapping(items: list[Any], event: Any) -> dict[Any, Any]:
    try:
        return dict(_by_two(items))
    except TypeError:
        raise _error("a list or a mapping can't be a key", event) from None


def _by_two(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(items[::2], items[1::2])


def _error(what: str, event: Any) -> BeyondMapError:
    return BeyondMapError(problem=what, problem_mark=event.start_mark)


_EXPECTED = "expected 'pairs:' with a list of '- {reference: PATH, candidate: PATH}', as `padiff map` writes it"


class GivenMap:
    """Pairs of layers that correspond to each other, the reference's (base's) first.

    Layers are given by path or, if both models are live, as objects; objects may come in either order. A list on one
    side names the layers that are the parts of the other side's layer, in order: ``("attn.qkv", ["attn.q", "attn.k",
    "attn.v"])``. A pair with `None` on one side states that the layer has no partner.

    Example:
        ``LayerMap({"encoder.attn": "enc.attention"})``, or ``layer_map.map = {layer.attn: module.attn}``.
    """

    def __init__(self, pairs: Mapping[Any, Any] | Iterable[Any] = ()) -> None:
        items = pairs.items() if isinstance(pairs, Mapping) else pairs
        self.pairs: tuple[tuple[Any, Any], ...] = tuple(_pair(item) for item in items)

    def named(self) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Return the pairs with each side as a tuple: one layer, several parts, or empty."""
        return [(_several(first), _several(second)) for first, second in self.pairs]

    @property
    def map(self) -> dict[Any, Any]:
        """Return the pairs as a dictionary."""
        return dict(self.pairs)

    @map.setter
    def map(self, pairs: Mapping[Any, Any]) -> None:
        self.pairs = GivenMap(pairs).pairs

    def ignore(self, layer: Any) -> None:
        """Add an entry that a layer has no partner; the layers below it are still compared."""
        self.pairs += ((layer, None),)

    def ignore_recursivly(self, layer: Any) -> None:
        """Add entries that a layer and all layers below it have no partner. (The spelling is that of existing user
        code.)
        """
        self.pairs += tuple((node.layer, None) for node in walk(layer, framework_of(layer)))

    def ignore_class(self, layer: Any, layer_class: type) -> None:
        """Add entries that all layers of a class, in a layer and below it, have no partner."""
        nodes = walk(layer, framework_of(layer))
        self.pairs += tuple((node.layer, None) for node in nodes if isinstance(node.layer, layer_class))

    @classmethod
    def resolve(cls, value: Any, nodes: Both[Sequence[Node]]) -> GivenMap:
        """Return the map of two live models with every object replaced by its path, the base's (reference's) first.

        Raises:
            UsageError: a layer is in neither model, or both layers of a pair are in one.
        """
        pairs = []
        for pair in cls.from_value(value):
            first, second = (_sides(side, nodes) for side in pair)
            if first[0] == second[0] is not None:
                raise UsageError(f"layer map: {first[1]} and {second[1]} are both layers of the {first[0]} model")
            swapped = first[0] == "raw" or second[0] == "base"
            pairs.append((second[1], first[1]) if swapped else (first[1], second[1]))
        return cls(pairs)

    @classmethod
    def from_value(cls, value: GivenMap | Mapping[Any, Any] | Iterable[Any] | str | Path | None) -> GivenMap:
        """Return a layer map from an argument of a public call: a map, a mapping, pairs, or the path of a YAML file.

        Raises:
            UsageError: the value, or an item of it, cannot be read as pairs of paths.
        """
        if value is None:
            return cls()
        if isinstance(value, GivenMap):
            return value
        if isinstance(value, (str, os.PathLike)):
            return cls.read(value)
        items = value.items() if isinstance(value, Mapping) else value
        if not isinstance(items, Iterable):
            raise UsageError(f"layer map: expected pairs of layer paths, a mapping or a YAML file, got {value!r}")
        return cls(items)

    @classmethod
    def read(cls, path: str | Path) -> GivenMap:
        """Return the map from a file that ``padiff map`` wrote: YAML with ``pairs``, each with ``reference`` and
        ``candidate``.

        Raises:
            UsageError: the file is missing or has another form.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            content, lines = read_yaml(text)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the layer map {path}: {error}") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}, line {mark.line + 1}, column {mark.column + 1}," if mark is not None else str(path)
            what = getattr(error, "problem", None) or str(error)
            wrong = "can't be read" if isinstance(error, BeyondMapError) else "is no YAML"
            raise UsageError(f"the layer map {where} {wrong}: {what}; {_EXPECTED}") from error
        if isinstance(content, Mapping) and "pairs" in content:
            content = content["pairs"] or ()
        if not isinstance(content, (list, tuple, Mapping)):
            raise UsageError(f"the layer map {path} holds {type(content).__name__}; {_EXPECTED}")
        items = list(content.items() if isinstance(content, Mapping) else content)
        for item, line in zip(items, lines):
            try:
                _pair(item)
            except UsageError as error:
                raise UsageError(f"{path}, line {line}: {error}; {_EXPECTED}") from None
        return cls(items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenMap) and self.pairs == other.pairs

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.pairs)!r})"

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


def _several(side: Any) -> tuple[Any, ...]:
    if side is None:
        return ()
    return side if isinstance(side, tuple) else (side,)


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, Mapping) and {"reference", "candidate"} <= set(item):
        item = (item["reference"], item["candidate"])
    plain = (bool, int, float, bytes, dict)
    sides = [_side_of(side) for side in item] if isinstance(item, (list, tuple)) and len(item) == 2 else []
    several = [isinstance(side, tuple) for side in sides]
    if (
        not sides
        or any(isinstance(part, plain) for side in sides for part in _several(side))
        or all(several)
        or any(isinstance(side, tuple) and len(side) < 2 for side in sides)
        or (any(several) and None in sides)
        or sides[0] is sides[1] is None
    ):
        raise UsageError(
            f"layer map: expected a pair of layer paths (reference, candidate), got {item!r}; "
            "`padiff map REFERENCE CANDIDATE` writes a map to start from"
        )
    return sides[0], sides[1]


def _side_of(side: Any) -> Any:
    """Return a list of a layer's parts as a tuple; a list of one part as that part."""
    if not isinstance(side, (list, tuple)) or not side:
        return side
    return tuple(side) if len(side) > 1 else side[0]


def _sides(side: Any, nodes: Both[Sequence[Node]]) -> tuple[str | None, Any]:
    """Return the model that a side of a pair belongs to (`None` for paths), and its path or paths."""
    if not isinstance(side, tuple):
        return _side(side, nodes)
    parts = [_side(layer, nodes) for layer in side]
    models = {model for model, _ in parts if model is not None}
    if len(models) > 1:
        raise UsageError(f"layer map: {', '.join(str(path) for _, path in parts)} are layers of both models")
    return next(iter(models), None), tuple(path for _, path in parts)


def _side(layer: Any, nodes: Both[Sequence[Node]]) -> tuple[str | None, str | None]:
    """Return the model that a layer belongs to (`None` for a path), and its path."""
    if layer is None or isinstance(layer, str):
        return None, layer
    for model, model_nodes in zip(("base", "raw"), nodes):
        for node in model_nodes:
            if node.layer is layer:
                return model, node.path
    raise UsageError(f"layer map: {type(layer).__name__} is a layer of neither model; give layers of these very models")
