"""Warning about compiled layers, whose sublayers can't be recorded."""

from __future__ import annotations

from collections.abc import Iterable

from padiff.system.warn import warn


def warn_of_compiled(paths: Iterable[str], by: str, instead: str) -> None:
    """Warn about compiled layers; name only the outermost of nested ones.

    Args:
        paths: dotted paths from the model, outermost first; the path of the model itself is empty.
        by: the name of the compiler.
        instead: how to train without the compiler.
    """
    outer: list[str] = []
    for path in paths:
        if not any(not above or f"{path}.".startswith(f"{above}.") for above in outer):
            outer.append(path)
    if not outer:
        return
    named = ", ".join(path or "the model itself" for path in outer[:5]) + (", ..." if len(outer) > 5 else "")
    warn(
        f"what {by} compiled is recorded from outside ({named}): its inputs, outputs, weights, gradients and "
        f"updates, but not the outputs of the layers inside, of which compiled code leaves no trace. To see those, "
        f"record a run without: {instead}"
    )
