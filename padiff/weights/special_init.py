"""Rules of the user's own for carrying a layer's weights over: ``add_special_init``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.known import FRAMEWORKS
from padiff.model import equivalents
from padiff.records import ROOT, Both, Layer

#: ``init(base_layer, raw_layer)`` copies the base layer's weights into the raw layer.
Init = Callable[[Any, Any], None]
#: Framework and class name of the layer that weights are copied from, and of the one that they are copied to.
Key = Both[tuple[str, str]]

# Replaced, never edited: who reads it sees one whole state of it, and a thread's registrations are its own.
_RULES: ContextVar[MappingProxyType[Key, Init]] = ContextVar("padiff_special_init", default=MappingProxyType({}))


def add_special_init(*args: Any, **kwargs: Any) -> None:
    """Register how the weights of one class of layers are carried to another.

    ``add_special_init(base_framework, base_model_name, raw_framework, raw_model_name, func)`` with
    ``func(base_layer, raw_layer)``, or, as the first generation has it,
    ``add_special_init(paddle_name, torch_name, func)`` with ``func(paddle_layer, torch_module)``, which copies from
    torch to paddle. Frameworks are ``"torch"`` and ``"paddle"``, names are class names. A rule applies wherever
    layers of these two classes answer to each other, and comes before the built-in ones.

    Raises:
        UsageError: another number of arguments, an unknown framework, or ``func`` is not callable.
    """
    key, func = _key(args, kwargs)
    if not callable(func):
        raise UsageError(f"add_special_init: func has to be a function of two layers, got {func!r}")
    _RULES.set(MappingProxyType({**_RULES.get(), key: func}))


def special_init(frameworks: Both[str], layers: Both[Any]) -> Init | None:
    """The user's rule for copying the reference's layer into the candidate's, or `None`."""
    rules = _RULES.get()
    for reference in type(layers.reference).__mro__:
        for candidate in type(layers.candidate).__mro__:
            rule = rules.get(frameworks.zip(Both(reference.__name__, candidate.__name__)))
            if rule is not None:
                return rule
    return None


def ruled(frameworks: Both[str]) -> frozenset[tuple[str, str]]:
    """Class names (reference's, candidate's) of the user's rules between two frameworks."""
    sides = ((key.reference, key.candidate) for key in _RULES.get())
    return frozenset((a, b) for (one, a), (other, b) in sides if Both(one, other) == frameworks)


def ruled_either_way(frameworks: Both[str]) -> frozenset[tuple[str, str]]:
    """Class names of the user's rules between two frameworks, in that order, whichever of them a rule copies from."""
    return ruled(frameworks) | {names[::-1] for names in ruled(frameworks.swapped())}


def wholes(layers: Iterable[Layer], ruled: Collection[str]) -> dict[str, str]:
    """Path and kind of the layers to map: those that the frameworks lay out differently inside, and those of rules.

    Of two that are inside of each other the outer one.

    Args:
        ruled: paths of the layers that the user's rules are about.
    """
    found: dict[str, str] = {}
    for layer in layers:
        if any(path == ROOT or layer.path.startswith(f"{path}.") for path in found):
            continue
        if layer.path in ruled:
            found[layer.path] = layer.type
        elif equivalents.is_composite(layer.kind):
            found[layer.path] = equivalents.kind(layer)
    return found


def ruled_kinds(framework: str, place: str) -> frozenset[str]:
    """Class names of a framework that the user's rules are about, for the base or the raw model."""
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
    # Positions fill what no keyword names, in order: people write add_special_init(paddle_name=..., func) too.
    rest = iter(args)
    given = {name: kwargs[name] if name in kwargs else next(rest) for name in names}
    if names is first:
        func = given["func"]

        def torch_to_paddle(module: Any, layer: Any) -> None:
            func(layer, module)

        if not callable(func):
            raise UsageError(f"add_special_init: func has to be a function of two layers, got {func!r}")
        return Both(("torch", given["torch_name"]), ("paddle", given["paddle_name"])), torch_to_paddle
    for name in ("base_framework", "raw_framework"):
        if given[name] not in FRAMEWORKS:
            raise UsageError(f"add_special_init: {name} is 'torch' or 'paddle', got {given[name]!r}")
    base, raw = ((given[f"{model}_framework"], given[f"{model}_model_name"]) for model in ("base", "raw"))
    return Both(base, raw), given["func"]
