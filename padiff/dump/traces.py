"""JSON form of traces: the calls of a step, and the storage of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import intern
from typing import Any, TypeVar

from padiff.dump.untrusted import as_int, parse_json, plain, shape_of
from padiff.errors import RunFolderError
from padiff.records import NO_TRACE, Choice, Operand, TensorSource, Trace, TracedCall, TracedTensor
from padiff.records.dtypes import known_dtype
from padiff.system.frames import Frame

_Thing = TypeVar("_Thing")

#: Storage of a traced tensor: kind and position; both are empty if its values were not recorded.
Place = tuple[str, Any]
NOWHERE: Place = ("", "")
#: ``source(kept_as, place, dtype, shape)``: the tensor source at a place.
SourceAt = Callable[[str, Any, str, tuple[int, ...]], TensorSource]


def trace_to_json(trace: Trace, places: Sequence[Place]) -> dict[str, Any]:
    """Return a trace as JSON, with the storage of each of its tensors."""
    frames: dict[Frame, int] = {}
    calls = [_call_to_json(call, frames) for call in trace.calls]
    return {
        "functions": trace.functions,
        "tensors": [[t.dtype, list(t.shape), *place] for t, place in zip(trace.tensors, places)],
        "calls": calls,
        **({"frames": [[*frame] for frame in frames]} if frames else {}),
    }


def _call_to_json(call: TracedCall, frames: dict[Frame, int]) -> dict[str, Any]:
    """Return a call as JSON; its stack is a list of indices into ``frames``, to which new frames are added."""
    return {
        "layer": call.layer,
        "type": call.layer_type,
        "call": call.call,
        **({"function": call.function, "nth": call.nth} if call.function else {}),
        "inputs": [[*operand] for operand in call.inputs],
        "outputs": [[*operand] for operand in call.outputs],
        **({"arguments": dict(call.arguments)} if call.arguments else {}),
        **({"parameters": list(call.parameters)} if call.parameters else {}),
        **({"choice": [*call.choice]} if call.choice is not None else {}),
        **({"stack": [frames.setdefault(frame, len(frames)) for frame in call.stack]} if call.stack else {}),
    }


def trace_key(trace: Trace, places: Sequence[Place]) -> tuple[Any, ...]:
    """Return a key that is equal for traces with the same JSON."""
    if not trace.calls:
        return ()
    calls = [
        (c.layer, c.call, c.function, c.nth, c.inputs, c.outputs, _said(c.arguments), c.parameters, c.stack, c.choice)
        for c in trace.calls
    ]
    return tuple(calls), tuple([(t.dtype, t.shape, *place) for t, place in zip(trace.tensors, places)])


def _said(arguments: Mapping[str, Any]) -> str:
    return repr(arguments) if arguments else ""


def trace_from_json(content: Any, source: SourceAt, where: object) -> Trace:
    """Return the trace of its JSON; it is decoded on first access, as most traces are never read.

    Args:
        content: the JSON of the trace; `NO_TRACE` is returned if it is empty.
        source: creates the tensor source at a position.
        where: the file of the trace, for error messages.
    """
    return _read(lambda: content, bool(content.get("functions")), source, where) if content else NO_TRACE


def _read(content: Callable[[], Any], functions: bool, source: SourceAt, where: object) -> Trace:
    tensors = _Later(lambda: [_tensor(entry, source) for entry in content()["tensors"]], where)
    return Trace(tensors, _Later(lambda: _calls(content()), where), functions)


# The bytes before a trace in JSON, and its beginning. JSON strings can't contain them, as quotes are escaped there.
_NAME = b', "trace": '
_BEGINS = _NAME + b'{"functions": '


class StoredTrace:
    """A trace as JSON text, parsed on first access.

    Args:
        text: the JSON text.
        content: the parsed JSON, if already known; then ``text`` is not used.
    """

    def __init__(self, text: bytes, content: Any = None) -> None:
        self._text, self._content = text, content
        is_parsed = content is not None
        self._functions = bool(content.get("functions")) if is_parsed else text.startswith(b'{"functions": true')

    def read(self, source: SourceAt, where: object) -> Trace:
        """Return the trace of a step; see `trace_from_json`."""
        return _read(self._parsed, self._functions, source, where)

    def _parsed(self) -> Any:
        if self._content is None:
            self._content = parse_json(self._text)
            self._text = b""
        return self._content


def without_trace(text: bytes) -> tuple[Any, StoredTrace | None]:
    """Split JSON text into its parsed content, and its trace if it has one.

    The trace is not parsed yet if it is the last entry, as padiff writes it.

    Raises:
        ValueError: the text is no JSON, or holds too many values.
        AttributeError: the trace is no object.
    """
    begin = text.find(_BEGINS)
    if begin >= 0:
        trace = text[begin + len(_NAME) :].rstrip()
        return parse_json(text[:begin] + b"}"), StoredTrace(trace.removesuffix(b"}"))
    content = parse_json(text)
    trace = content.get("trace")
    return content, StoredTrace(b"", trace) if trace else None


class _Later(Sequence[_Thing]):
    """A sequence that is decoded on first access.

    Raises:
        RunFolderError: on first access, if the content is damaged.
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
    dtype = known_dtype(dtype, "a tensor of the trace")
    values = source(str(kept_as), place, dtype, shape) if kept_as else None
    return TracedTensor(values, dtype, shape)


def _calls(content: Mapping[str, Any]) -> list[TracedCall]:
    frames = [
        Frame(str(file), as_int(line), str(function), str(code))
        for file, line, function, code in content.get("frames", ())
    ]
    return [_call(entry, len(content["tensors"]), frames) for entry in content["calls"]]


def _call(entry: Mapping[str, Any], tensors: int, frames: Sequence[Frame]) -> TracedCall:
    return TracedCall(
        intern(str(entry["layer"])),
        as_int(entry["call"]),
        intern(str(entry.get("function", ""))),
        as_int(entry.get("nth", 0)),
        _operands(entry["inputs"], tensors),
        _operands(entry["outputs"], tensors),
        dict(plain(entry.get("arguments", {}))),
        tuple(str(site) for site in entry.get("parameters", ())),
        intern(str(entry.get("type", ""))),
        tuple([frames[as_int(number)] for number in entry.get("stack", ())]),
        _choice(entry.get("choice"), tensors),
    )


def _choice(entry: Any, tensors: int) -> Choice | None:
    if entry is None:
        return None
    choice = Choice(*map(as_int, entry))
    if min(choice) < 0 or choice.every < 1 or max(choice.scores, choice.places, choice.picked) >= tensors:
        raise ValueError("a choice of a tensor that is not there")
    return choice


def _operands(entries: Any, tensors: int) -> tuple[Operand, ...]:
    operands = tuple(Operand(intern(str(slot)), as_int(number)) for slot, number in entries)
    if any(not 0 <= operand.tensor < tensors for operand in operands):
        raise ValueError("a tensor that is not there")
    return operands
