"""Rules of the user for copying the weights of a layer: ``add_special_init``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.conventions import FRAMEWORKS
from padiff.model import equivalents
from padiff.records import ROOT, Both, Layer

#: ``init(base_layer, raw_layer)`` copies the base layer's weights into the raw layer.
Init = Callable[[Any, Any], None]
#: Framework and class name of the source layer and of the target layer.
Key = Both[tuple[str, str]]

# Replaced, never edited: readers see a consistent mapping, and each thread has its own registrations.
_RULES: ContextVar[MappingProxyType[Key, Init]] = ContextVar("padiff_special_init", default=MappingProxyType({}))


def add_special_init(*args: Any, **kwargs: Any) -> None:
    """Register a function that copies the weights of one class of layers to another.

    The form is ``add_special_init(base_framework, base_model_name, raw_framework, raw_model_name, func)`` with
    ``func(base_layer, raw_layer)``. The first generation's form is ``add_special_init(paddle_name, torch_name, func)``
    with ``func(paddle_layer, torch_module)``, which copies from torch to paddle. Frameworks are ``"torch"`` and
    ``"paddle"``, names are class names. A rule applies to all pairs of layers of these two classes, and has priority
    over the built-in rules.

    Raises:
        UsageError: a wrong number of arguments, an unknown framework, or ``func`` is not callable.
    """
    key, func = _key(args, kwargs)
    if not callable(func):
        raise UsageError(f"add_special_init: func has to be a function of two layers, got {func!r}")
    _RULES.set(MappingProxyType({**_RULES.get(), key: func}))


def special_init(frameworks: Both[str], layers: Both[Any]) -> Init | None:
    """Return the user's rule for copying the reference layer into the candidate layer, or `None`."""
    rules = _RULES.get()
    for reference in type(layers.reference).__mro__:
        for candidate in type(layers.candidate).__mro__:
            rule = rules.get(frameworks.zip(Both(reference.__name__, candidate.__name__)))
            if rule is not None:
                return rule
    return None


def ruled(frameworks: Both[str]) -> frozenset[tuple[str, str]]:
    """Return the class names (reference, candidate) of the user's rules between two frameworks."""
    sides = ((key.reference, key.candidate) for key in _RULES.get())
    return frozenset((a, b) for (source, a), (target, b) in sides if Both(source, target) == frameworks)


def ruled_either_way(frameworks: Both[str]) -> frozenset[tuple[str, str]]:
    """Return the class names of the user's rules between two frameworks, in this order, for both copy directions."""
    return ruled(frameworks) | {names[::-1] for names in ruled(frameworks.swapped())}


def wholes(layers: Iterable[Layer], ruled: Collection[str]) -> dict[str, str]:
    """Return the path and kind of each layer to map: composite layers (attention, recurrent) and layers with a rule.

    Layers inside such a layer are not listed.

    Args:
        ruled: paths of the layers with a rule of the user.
    """
    kinds: dict[str, str] = {}
    for layer in layers:
        if any(path == ROOT or layer.path.startswith(f"{path}.") for path in kinds):
            continue
        if layer.path in ruled:
            kinds[layer.path] = layer.type
        elif equivalents.is_composite(layer.kind):
            kinds[layer.path] = equivalents.kind(layer)
    return kinds


def ruled_kinds(framework: str, place: str) -> frozenset[str]:
    """Return the class names in the user's rules for one framework, for the base or the raw model."""
    sides = (key.reference if place == "base" else key.candidate for key in _RULES.get())
    return frozenset(name for of, name in sides if of == framework)


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, Init]:
    first = ("paddle_name", "torch_name", "func")
    second = ("base_framework", "base_model_name", "raw_framework", "raw_model_name", "func")
    names = first if len(args) + len(kwargs) == len(first) else second
    unknown = [name for name in kwargs if name not in names]
    if unknown or len(args) + len(kwargs) != len(names):
        raise UsageError(
            f"add_special_init takes ({', '.join(second)}), or ({', '.join(first)}); "
            f"got {len(args)} arguments" + (f" and {', '.join(kwargs)}" if kwargs else "")
        )
    # Positional arguments fill the names without a keyword, in order, as in add_special_init(paddle_name=..., func).
    positional = iter(args)
    values = {name: kwargs[name] if name in kwargs else next(positional) for name in names}
    if names is first:
        func = values["func"]

        def torch_to_paddle(module: Any, layer: Any) -> None:
            func(layer, module)

        if not callable(func):
            raise UsageError(f"add_special_init: func has to be a function of two layers, got {func!r}")
        return Both(("torch", values["torch_name"]), ("paddle", values["paddle_name"])), torch_to_paddle
    for name in ("base_framework", "raw_framework"):
        if values[name] not in FRAMEWORKS:
            raise UsageError(f"add_special_init: {name} is 'torch' or 'paddle', got {values[name]!r}")
    base, raw = ((values[f"{model}_framework"], values[f"{model}_model_name"]) for model in ("base", "raw"))
    return Both(base, raw), values["func"]
