"""Conversion of nested inputs and outputs into slots and tensors."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from padiff.system.guard import reraise_from_signal_handler

# Deeper than any reasonable output; a structure that contains itself ends here instead of in a RecursionError.
_DEEPEST = 16


def flatten(value: Any, prefix: str, is_tensor: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield ``(slot, tensor)`` for every tensor of a nested value, in order.

    A lone tensor gets the slot ``<prefix>.0``, the same as the first item of a tuple, so that a layer that returns
    ``x`` and one that returns ``(x, extra)`` share a slot. Lists and tuples are numbered, mappings and dataclasses
    (HF's ModelOutput is a mapping) use their keys. Values that are no tensors are skipped.
    """
    if is_tensor(value):
        yield f"{prefix}.0", value
    else:
        yield from _items(value, prefix, is_tensor, 0)


def _items(value: Any, path: str, is_tensor: Callable[[Any], bool], depth: int) -> Iterator[tuple[str, Any]]:
    if is_tensor(value):
        yield path, value
    elif depth >= _DEEPEST:
        return
    else:
        for key, item in _children(value):
            yield from _items(item, f"{path}.{key}", is_tensor, depth + 1)


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    try:
        if isinstance(value, Mapping):
            return list(value.items())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # Not dataclasses.asdict, which makes deep copies: a tensor of a graph cannot be copied so.
            return [(entry.name, getattr(value, entry.name, None)) for entry in dataclasses.fields(value)]
    except MemoryError:
        raise
    except Exception as error:  # the user's code: the object cannot be inspected
        reraise_from_signal_handler(error)
    return ()


def replace_tensors(value: Any, prefix: str, is_tensor: Callable[[Any], bool], new: Callable[[str, Any], Any]) -> Any:
    """Return the nested value with every tensor replaced by ``new(slot, tensor)``; slots are those of `flatten`."""
    if is_tensor(value):
        return new(f"{prefix}.0", value)
    return _replaced(value, prefix, is_tensor, new, 0)


def _replaced(
    value: Any, path: str, is_tensor: Callable[[Any], bool], new: Callable[[str, Any], Any], depth: int
) -> Any:
    if is_tensor(value):
        return new(path, value)
    if depth >= _DEEPEST:
        return value
    items = {key: _replaced(item, f"{path}.{key}", is_tensor, new, depth + 1) for key, item in _children(value)}
    if all(items[key] is item for key, item in _children(value)):
        return value
    if isinstance(value, tuple):
        # A named tuple takes its fields as arguments, a plain tuple takes an iterable.
        return type(value)(*items.values()) if hasattr(value, "_fields") else tuple(items.values())
    if isinstance(value, list):
        return list(items.values())
    again = copy.copy(value)
    for key, item in items.items():
        if isinstance(again, MutableMapping):
            again[key] = item
        else:
            object.__setattr__(again, key, item)
    return again


def flatten_inputs(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], is_tensor: Callable[[Any], bool]
) -> Iterator[tuple[str, Any]]:
    """Yield ``(slot, tensor)`` for a call's arguments, with the parameter names of ``forward``: ``input.x``."""
    for name, value in _named(forward, args, kwargs):
        yield from _items(value, f"input.{name}", is_tensor, 0)


def numbers_of(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, float]]:
    """Yield name and value of a call's arguments that are floats: ``tau``. Whole numbers are sizes and switches."""
    for name, value in _named(forward, args, kwargs):
        if type(value) is float:
            yield name, value


def slots_of(forward: Callable[..., Any], count: int) -> list[str]:
    """Return the slots of the first `count` positional arguments if these are tensors; the names are those of
    `flatten_inputs`.
    """
    return [f"input.{name}" for name, _ in _named(forward, (None,) * count, {})]


def flatten_named(given: Mapping[str, Any], is_tensor: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield ``(slot, tensor)`` for every tensor of named values, in order: ``x``, ``tensors.0``."""
    for name, value in given.items():
        yield from _items(value, name, is_tensor, 0)


def _named(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    positional = _positional(forward) if args else ()
    for index, value in enumerate(args):
        yield (positional[index] if index < len(positional) else str(index)), value
    yield from kwargs.items()


#: Names of the positional parameters of functions: needed in every call of every layer.
_known: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _positional(forward: Callable[..., Any]) -> tuple[str, ...]:
    function = getattr(forward, "__func__", None)
    if function is None:  # set on the object itself, or not a method
        return _positional_of(forward)
    names = _known.get(function)
    if names is None:
        names = _known[function] = _positional_of(forward)
    return names


def _positional_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return ()
    return tuple([p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)])
