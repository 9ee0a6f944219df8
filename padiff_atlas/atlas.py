"""Asking both frameworks all probes, and what came out."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.errors import UsageError
from padiff.model.selection import nearest
from padiff.records import Both
from padiff_atlas import sides
from padiff_atlas.measure import Gap, Outputs, gap
from padiff_atlas.probe import Group, Probe
from padiff_atlas.sides import Side
from padiff_atlas.ways import answer

#: Names in a call that make its arguments, or take its result apart, and are not what it is about.
_AUXILIARY = frozenset({"tensor", "to_tensor", "unique", "astype", "float", "empty", "create_parameter"})


@dataclass(frozen=True, slots=True)
class Mended:
    """A call that should agree with the other side's.

    Attributes:
        side: ``paddle`` or ``torch``, whose call it is.
        call: its text.
        agrees: whether it does.
        rel_l2: how far it is from the other side's; `None` where it raises or gives other shapes.
    """

    side: str
    call: str
    agrees: bool
    rel_l2: float | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a probe found.

    Attributes:
        group: the name of its group.
        probe: the probe.
        operations: the layers and functions that it is about, as the two sides call them.
        gap: how far the two calls are apart, called alike.
        mended: the calls that should agree.
        agrees: which side agrees with the formula: ``torch``, ``paddle``, ``both``, ``neither``; empty without one.
    """

    group: str
    probe: Probe
    operations: tuple[str, ...]
    gap: Gap
    mended: tuple[Mended, ...]
    agrees: str

    @property
    def differs(self) -> bool:
        return self.gap.kind != "same"


@dataclass(frozen=True, slots=True)
class Atlas:
    """What all probes found, and of which versions."""

    versions: Both[str]
    found: tuple[Found, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        """Probes whose mended call does not agree, by name."""
        return tuple(f.probe.name for f in self.found if not all(mended.agrees for mended in f.mended))


def chosen(groups: Sequence[Group], only: Sequence[str]) -> list[Group]:
    """The groups that are asked for; all of them where none is named.

    Raises:
        UsageError: there is no group of that name.
    """
    names = [group.name for group in groups]
    for name in only:
        if name not in names:
            raise UsageError(f"no group of probes is called {name!r}. {nearest(name, names)}")
    return [group for group in groups if not only or group.name in only]


def survey(groups: Sequence[Group]) -> Atlas:
    """Ask both frameworks; random states and settings are as before afterwards.

    Raises:
        UsageError: a framework is not installed.
    """
    both = sides.load()
    with sides.kept(both):
        found = tuple(ask(both, group, probe) for group in groups for probe in group.probes)
    return Atlas(both.map(lambda side: side.version), found)


def ask(both: Both[Side], group: Group, probe: Probe) -> Found:
    """One probe, within `sides.kept`."""
    torch, layer = _asked(both, both.reference, probe, probe.torch, group.inputs, None)
    paddle, _ = _asked(both, both.candidate, probe, probe.paddle, group.inputs, layer)
    mended = []
    if probe.mended:
        outputs, _ = _asked(both, both.candidate, probe, probe.mended, group.inputs, layer)
        mended.append(_mended("paddle", probe.mended, gap(torch, outputs, probe.tolerance)))
    if probe.mended_torch:
        outputs, _ = _asked(both, both.reference, probe, probe.mended_torch, group.inputs, None)
        mended.append(_mended("torch", probe.mended_torch, gap(outputs, paddle, probe.tolerance)))
    return Found(
        group.name,
        probe,
        probe.operations or tuple(_operations(probe, group.inputs)),
        gap(torch, paddle, probe.tolerance),
        tuple(mended),
        _agreeing(probe, group.inputs, Both(torch, paddle)),
    )


def _asked(
    both: Both[Side], side: Side, probe: Probe, text: str, inputs: Mapping[str, Any], like: Any
) -> tuple[Outputs, Any]:
    sides.seed(both, 0)
    try:
        given = answer(side, probe, text, inputs, like)
    except Exception as error:  # that one side refuses a call is a difference, too
        return error, None
    return given.outputs, given.layer


def _mended(side: str, call: str, found: Gap) -> Mended:
    return Mended(side, call, found.kind == "same" and found.rel_l2 is not None, found.rel_l2)


def _agreeing(probe: Probe, inputs: Mapping[str, Any], outputs: Both[Outputs]) -> str:
    if not probe.formula:
        return ""
    import scipy.special as special

    names = {"np": np, "special": special} | {
        name: value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value
        for name, value in inputs.items()
    }
    right = np.asarray(eval(probe.formula, names), dtype=np.float64)
    agree = outputs.map(lambda side: gap([right], side, probe.tolerance).kind == "same")
    if agree.reference == agree.candidate:
        return "both" if agree.reference else "neither"
    return "torch" if agree.reference else "paddle"


def _operations(probe: Probe, inputs: Mapping[str, Any]) -> Iterator[str]:
    """The functions and layers of the frameworks that the two calls name, each once."""
    seen = set()
    for text in (probe.torch, probe.paddle):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            root = node.func.value
            while isinstance(root, ast.Attribute):
                root = root.value
            known = isinstance(root, ast.Name) and root.id in {"torch", "paddle", "nn", "F", "init", *inputs}
            name = node.func.attr.lower()
            if known and name not in _AUXILIARY | seen:
                seen.add(name)
                yield name
