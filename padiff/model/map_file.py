"""Bounded, fast reading of the YAML of a layer map, which is untrusted input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from yaml.constructor import ConstructorError

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
