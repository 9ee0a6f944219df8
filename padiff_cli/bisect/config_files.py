"""Two configs as YAML, JSON or TOML, and configs with some keys of one and the others of the other."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from padiff.errors import UsageError

_Path = tuple[str | int, ...]
_MISSING = object()


@dataclass(frozen=True)
class _Scalar:
    """A scalar of YAML as it is written: other readers than PyYAML may read ``1e-3`` as a number."""

    tag: str
    value: str
    style: str | None

    def __str__(self) -> str:
        return self.value


class ConfigPair:
    """The good and the bad config.

    Args:
        good, bad: their files, of one format.

    Attributes:
        keys: the keys that differ, in the order of the files, with dots between the levels.
        suffix: the files' suffix.

    Raises:
        UsageError: a file can't be read, is no mapping, or nothing differs.
    """

    def __init__(self, good: str, bad: str) -> None:
        self.suffix = Path(good).suffix.lower()
        if self.suffix not in _READERS or Path(bad).suffix.lower() != self.suffix:
            raise UsageError(
                f"--config takes two files of one format, .yaml, .yml, .json or .toml; got {good} and {bad}"
            )
        self._good, self._bad = (_read(path, self.suffix) for path in (good, bad))
        paths = list(_differing(self._good, self._bad))
        counts = Counter(map(_dotted, paths))
        # Where a key has dots of its own, two paths may read alike.
        self._paths = {_dotted(path) if counts[_dotted(path)] == 1 else repr(path): path for path in paths}
        self.keys = tuple(self._paths)
        if not self.keys:
            raise UsageError(f"--config: {good} and {bad} hold the same")

    def text_with(self, keys: Collection[str]) -> str:
        """Return the good config with some keys of the bad one."""
        tree = self._good
        for key in self.keys:
            if key in keys:
                tree = _with(tree, self._paths[key], _at(self._bad, self._paths[key]))
        return _WRITERS[self.suffix](tree)

    def values_text(self, key: str) -> str:
        """Return a key's two values in words."""
        good, bad = self._values(key)
        return f"{key}: {good} against {bad}"

    def key_named_in(self, text: str) -> str | None:
        """Return the only key both values of which a text has; of several, the only one whose name it has, too."""
        words = {_plain(word) for word in re.findall(r"[\w.+-]+", text)}
        keys = [key for key in self.keys if all(_plain(value) in words for value in self._values(key))]
        if len(keys) > 1:
            keys = [key for key in keys if key.rpartition(".")[2].lower() in words]
        return keys[0] if len(keys) == 1 else None

    def _values(self, key: str) -> tuple[str, str]:
        good, bad = (_text(_at(tree, self._paths[key])) for tree in (self._good, self._bad))
        return good, bad


def _plain(word: str) -> str:
    """Return a word in lower case, and a number in one form."""
    try:
        return repr(float(word))
    except ValueError:
        return word.lower().rstrip(".")


def _read(path: str, suffix: str) -> Any:
    try:
        tree = _READERS[suffix](Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"--config: cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UsageError(f"--config: {path} has to hold a mapping, got {type(tree).__name__}")
    return tree


def _differing(good: Any, bad: Any, path: _Path = ()) -> Iterator[_Path]:
    """Yield the paths of the values that differ."""
    if isinstance(good, dict) and isinstance(bad, dict):
        for key in dict.fromkeys([*good, *bad]):
            yield from _differing(good.get(key, _MISSING), bad.get(key, _MISSING), (*path, key))
    elif isinstance(good, list) and isinstance(bad, list) and len(good) == len(bad):
        for number, (one, another) in enumerate(zip(good, bad)):
            yield from _differing(one, another, (*path, number))
    elif type(good) is not type(bad) or good != bad:
        yield path


def _at(tree: Any, path: _Path) -> Any:
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key, _MISSING)
        else:
            tree = tree[key]
    return tree


def _with(tree: Any, path: _Path, value: Any) -> Any:
    """Return a copy of a tree with another value at a path."""
    key, below = path[0], path[1:]
    if isinstance(tree, list):
        return [_with(each, below, value) if below and n == key else value if n == key else each
                for n, each in enumerate(tree)]  # fmt: skip
    copy = dict(tree)
    if below:
        copy[key] = _with(copy[key], below, value)
    elif value is _MISSING:
        del copy[key]
    else:
        copy[key] = value
    return copy


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path))


def _text(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    if isinstance(value, _Scalar):
        return value.value
    return json.dumps(value, default=str) if not isinstance(value, str) else value


# -- YAML -----------------------------------------------------------------------------------------------------------


def _read_yaml(text: str) -> Any:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    return {} if node is None else _from_node(node)


def _from_node(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {_Key.from_node(key): _from_node(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_from_node(each) for each in node.value]
    return _Scalar(node.tag, node.value, getattr(node, "style", None))


class _Key(str):
    """A key of a mapping of YAML, with its tag: the text ``1`` may be a number or not."""

    tag: str

    @classmethod
    def from_node(cls, node: yaml.Node) -> _Key:
        """Read a key.

        Raises:
            ValueError: it is no scalar.
        """
        if not isinstance(node, yaml.ScalarNode):
            raise ValueError(f"a key has to be a scalar, in line {node.start_mark.line + 1}")
        key = cls(node.value)
        key.tag = node.tag
        return key


def _to_node(tree: Any) -> yaml.Node:
    if isinstance(tree, dict):
        pairs = [(yaml.ScalarNode(key.tag, str(key)), _to_node(value)) for key, value in tree.items()]
        return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)
    if isinstance(tree, list):
        return yaml.SequenceNode("tag:yaml.org,2002:seq", [_to_node(each) for each in tree], flow_style=True)
    return yaml.ScalarNode(tree.tag, tree.value, style=tree.style)


def _write_yaml(tree: Any) -> str:
    text: str = yaml.serialize(_to_node(tree), Dumper=yaml.SafeDumper, allow_unicode=True)
    return text


# -- TOML -----------------------------------------------------------------------------------------------------------


def _read_toml(text: str) -> Any:
    if sys.version_info < (3, 11):
        raise ValueError("reading TOML needs Python 3.11; write the config as YAML or JSON")
    import tomllib

    return tomllib.loads(text)


def _write_toml(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    plain = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in tree.items() if isinstance(value, dict)}
    lines = [f"{json.dumps(key)} = {_toml(value)}" for key, value in plain.items()]
    head = [f"[{'.'.join(json.dumps(key) for key in path)}]"] if path else []
    parts = ["\n".join([*head, *lines])] if plain or not tables or not path else []
    return "\n".join([*parts, *(_write_toml(value, (*path, key)) for key, value in tables.items())]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    # Of what is left, dates and times have no quotes.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value.isoformat()


def _write_json(tree: Any) -> str:
    return json.dumps(tree, indent=1, ensure_ascii=False)


_READERS: Mapping[str, Callable[[str], Any]] = {
    ".yaml": _read_yaml, ".yml": _read_yaml, ".json": json.loads, ".toml": _read_toml
}  # fmt: skip
_WRITERS: Mapping[str, Callable[[Any], str]] = {
    ".yaml": _write_yaml, ".yml": _write_yaml, ".json": _write_json, ".toml": _write_toml
}  # fmt: skip
