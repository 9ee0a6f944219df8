"""Reading the YAML of a layer map, which may come from anybody: within bounds, as fast as it is parsed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from yaml.constructor import ConstructorError

#: A map of 300,000 pairs has 1.8 million events (a scalar, or the begin or end of a list or mapping).
MOST_EVENTS = 4_000_000
#: ``pairs``, its list, an item, the parts of one side: maps are nested four deep.
DEEPEST = 8

_PLAIN = frozenset({None, "!", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"})

# The parser in C, where PyYAML was built with it, is ten times faster.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str) -> tuple[Any, list[int]]:
    """The content of a document, and the line of each item of its ``pairs`` (or of its only list or mapping), from 1.

    It is built from the parser's events: PyYAML's own loaders call themselves for each level, and follow aliases.

    Raises:
        BeyondMapError: it is more than a layer map is: several documents, aliases, levels beyond `DEEPEST`, events
            beyond `MOST_EVENTS`.
        yaml.YAMLError: it is no YAML.
    """
    builder = _Builder()
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if number > MOST_EVENTS:
            raise _error(f"a layer map has at most {MOST_EVENTS:,} names, lists and mappings", event)
        builder.take(event)
    lines = builder.pair_lines if builder.pair_lines is not None else builder.top_lines
    return builder.content, lines


class BeyondMapError(yaml.MarkedYAMLError):
    """YAML that is more than a layer map is."""


class _Builder:
    """Builds plain values from events.

    Attributes:
        content: the document's value.
        top_lines: the line of each of its items, from 1.
        pair_lines: likewise of ``pairs``, where it is a mapping with that key.
    """

    def __init__(self) -> None:
        self.content: Any = None
        self.top_lines: list[int] = []
        self.pair_lines: list[int] | None = None
        self._documents = 0
        # What is open, outermost first: a list, or a mapping as keys and values by turns.
        self._open: list[tuple[list[Any], bool]] = []
        self._scalars: Any = yaml.SafeLoader("")

    def take(self, event: Any) -> None:
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
        """Note the line where an item begins; of a mapping's items the key is where it begins."""
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
