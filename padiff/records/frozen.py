"""Fast construction of frozen dataclasses that are created by the million."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def fast_frozen_init(cls: _Class) -> _Class:
    """Replace the ``__init__`` of a frozen dataclass with slots by one as fast as that of an unfrozen dataclass.

    The ``__init__`` that `dataclasses` generates calls ``object.__setattr__`` for each field, which takes two thirds of
    the time of creating a value. The replacement gives the object a mutable class with the same slots while it sets the
    fields, and then the frozen class. The class is unchanged otherwise. Subclasses need an ``__init__`` of their own,
    as dataclasses have.
    """
    initialized = [entry for entry in fields(cls) if entry.init]
    layout = {name: vars(cls)[name] for name in ("__slots__", "__orig_bases__") if name in vars(cls)}
    names = {"_open": type(f"_Open{cls.__name__}", cls.__bases__, layout), "_closed": cls}
    names |= {"_set_class": object.__dict__["__class__"].__set__}
    parameters = ", ".join(_parameter(entry, names) for entry in initialized)
    lines = [
        f"def __init__(self, {parameters}):",
        "    _set_class(self, _open)",
        *(f"    self.{entry.name} = {entry.name}" for entry in initialized),
        "    self.__class__ = _closed",
    ]
    if hasattr(cls, "__post_init__"):
        lines.append("    self.__post_init__()")
    namespace: dict[str, Any] = {}
    exec("\n".join(lines), names, namespace)  # as `dataclasses` does
    init = namespace["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {**{entry.name: entry.type for entry in initialized}, "return": None}
    cls.__init__ = init  # type: ignore[misc]
    return cls


def _parameter(field: Field[Any], names: dict[str, Any]) -> str:
    """Return the source text of one parameter of the generated ``__init__``, and add its default to `names`."""
    assert field.default_factory is MISSING, f"{field.name} has a default that is made"
    if field.default is MISSING:
        return field.name
    names[f"_default_{field.name}"] = field.default
    return f"{field.name}=_default_{field.name}"
