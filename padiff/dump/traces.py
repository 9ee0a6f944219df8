"""Traces as JSON: the calls of a step, and where what was kept of their tensors lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import intern
from typing import Any, TypeVar

from padiff.dump.untrusted import plain, shape_of, whole
from padiff.errors import RunFolderError
from padiff.records import NO_TRACE, Operand, TensorSource, Trace, TracedCall, TracedTensor

_Thing = TypeVar("_Thing")

#: Where a tensor is: how it is kept, and the place; for one of which nothing was kept both are empty.
Place = tuple[str, Any]
NOWHERE: Place = ("", "")
#: ``source(kept_as, place, dtype, shape)``: the tensor source at a place.
SourceAt = Callable[[str, Any, str, tuple[int, ...]], TensorSource]


def trace_to_json(trace: Trace, places: Sequence[Place]) -> dict[str, Any]:
    """A trace, with the place of each of its tensors."""
    return {
        "functions": trace.functions,
        "tensors": [[t.dtype, list(t.shape), *place] for t, place in zip(trace.tensors, places)],
        "calls": [
            {
                "layer": call.layer,
                "type": call.layer_type,
                "call": call.call,
                **({"function": call.function, "nth": call.nth} if call.function else {}),
                "inputs": [[*operand] for operand in call.inputs],
                "outputs": [[*operand] for operand in call.outputs],
                **({"arguments": dict(call.arguments)} if call.arguments else {}),
                **({"parameters": list(call.parameters)} if call.parameters else {}),
                **({"stack": list(call.stack)} if call.stack else {}),
            }
            for call in trace.calls
        ],
    }


def trace_key(trace: Trace, places: Sequence[Place]) -> tuple[Any, ...]:
    """Equal for traces that are the same JSON."""
    if not trace.calls:
        return ()
    calls = [
        (
            c.layer,
            c.call,
            c.function,
            c.nth,
            c.inputs,
            c.outputs,
            c.arguments and repr(c.arguments),
            c.parameters,
            c.stack,
        )
        for c in trace.calls
    ]
    # A mapping without anything is not the same for a hash as none.
    calls = [call if call[6] else (*call[:6], "", *call[7:]) for call in calls]
    return tuple(calls), tuple([(t.dtype, t.shape, *place) for t, place in zip(trace.tensors, places)])


def trace_from_json(content: Any, source: SourceAt, where: object) -> Trace:
    """A trace, taken apart when it is looked at: most are not.

    Args:
        where: the file that it is in, for errors.
    """
    if not content:
        return NO_TRACE
    tensors = _Later(lambda: [_tensor(entry, source) for entry in content["tensors"]], where)
    calls = _Later(lambda: [_call(entry, len(content["tensors"])) for entry in content["calls"]], where)
    return Trace(tensors, calls, bool(content.get("functions")))


class _Later(Sequence[_Thing]):
    """A sequence that is made when it is looked at.

    Raises:
        RunFolderError: it is damaged.
    """

    def __init__(self, make: Callable[[], list[_Thing]], where: object) -> None:
        self._make, self._where = make, where
        self._made: list[_Thing] | None = None

    @property
    def _all(self) -> list[_Thing]:
        if self._made is None:
            try:
                self._made = self._make()
            except (
                KeyError,
                TypeError,
                ValueError,
                AttributeError,
                IndexError,
                OverflowError,
                RecursionError,
            ) as error:
                raise RunFolderError(
                    f"the trace in {self._where} is damaged: {type(error).__name__}: {error}. It was edited, or only "
                    "half copied"
                ) from error
        return self._made

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, key: Any) -> Any:
        return self._all[key]


def _tensor(entry: Any, source: SourceAt) -> TracedTensor:
    dtype, shape, kept_as, place = entry
    shape = shape_of(shape)
    found = source(str(kept_as), place, str(dtype), shape) if kept_as else None
    return TracedTensor(found, intern(str(dtype)), shape)


def _call(entry: Mapping[str, Any], tensors: int) -> TracedCall:
    return TracedCall(
        intern(str(entry["layer"])),
        whole(entry["call"]),
        intern(str(entry.get("function", ""))),
        whole(entry.get("nth", 0)),
        _operands(entry["inputs"], tensors),
        _operands(entry["outputs"], tensors),
        dict(plain(entry.get("arguments", {}))),
        tuple(str(site) for site in entry.get("parameters", ())),
        intern(str(entry.get("type", ""))),
        tuple(intern(str(line)) for line in entry.get("stack", ())),
    )


def _operands(entries: Any, tensors: int) -> tuple[Operand, ...]:
    found = tuple(Operand(intern(str(slot)), whole(number)) for slot, number in entries)
    if any(not 0 <= operand.tensor < tensors for operand in found):
        raise ValueError("a tensor that is not there")
    return found
