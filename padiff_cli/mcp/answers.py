"""Arguments and answers of the tools, their JSON Schemas, and the bounds of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from padiff.system.terminal import printable

#: Largest size of an answer, in bytes of JSON.
LARGEST = 4096
# Characters of a text: the largest number with which an answer has room is used.
_LONGEST = (600, 300, 150, 60)

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1000)]
Step: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Arguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class Pair(_Arguments):
    """Two runs.

    Attributes:
        reference, candidate: paths of the run to trust and of the run in question.
    """

    reference: Text
    candidate: Text


class Place(Pair):
    """A layer in a step of two runs; the path of the layer in either model."""

    step: Step
    layer: Text


class Slice(_Arguments):
    """A part of the tensors of a layer, in one run.

    Attributes:
        run, step, layer: the run, the step and the layer's path.
        tensor: stage and name, as `explain` gives them: ``forward/output.0``; all tensors of the layer by default.
        slice: a slice of each axis: ``0,:4``.
    """

    run: Text
    step: Step
    layer: Text
    tensor: Text = ""
    slice: Text = ""


class Edit(Pair):
    """An edit of the candidate, in words or as ``argument=value``."""

    edit: Text


class TensorDiff(msgspec.Struct):
    """A tensor of a layer that was compared."""

    tensor: str
    outcome: str
    times_limit: float | None
    text: str


class Explained(msgspec.Struct):
    """The answer of `explain`: the layer's tensors in causal order, and the cause if the first diff is here.

    Attributes:
        first: the position of the first diff of the runs; empty if they match.
        is_first: True if it is in this layer and step.
        hidden, rest: number of tensors that have no room here, and the file that has all.
    """

    step: int
    reference_layer: str | None
    candidate_layer: str | None
    first: str
    is_first: bool
    cause: str
    code: dict[str, str]
    tensors: list[TensorDiff]
    hidden: int = 0
    rest: str = ""


class Values(msgspec.Struct):
    """A tensor's shape, its figures and the values of the slice; NaN and infinity are texts."""

    tensor: str
    dtype: str
    shape: list[int]
    kept: str
    minimum: float | str | None
    maximum: float | str | None
    mean: float | str | None
    l2: float | str | None
    values: list[Any]


class Tensors(msgspec.Struct):
    """The answer of `tensor`."""

    step: int
    layer: str
    tensors: list[Values]
    hidden: int = 0
    rest: str = ""


class Share(msgspec.Struct):
    """An edit that was computed with the recorded tensors.

    Attributes:
        text, fix: the cause that the edit removes, and its line of code.
        share: the share of the first difference that it explains, 0 to 1.
        remaining: the error that is left, as a multiple of the rounding noise.
        proven: True if only rounding is left, and not by chance.
    """

    text: str
    fix: str
    share: float
    remaining: float | None
    proven: bool


class WhatIf(msgspec.Struct):
    """The answer of `what_if`.

    Attributes:
        of: the difference that is explained.
        computed: the edits that match; empty if this edit cannot be computed.
        others: edits that explain more or were not asked for, the best first.
    """

    edit: str
    of: str
    computed: list[Share]
    others: list[Share]
    hidden: int = 0
    rest: str = ""


class Experiment(msgspec.Struct):
    """The answer of `next_experiment`: what to do, why, the command, and what its result decides."""

    do: str
    why: str
    command: str
    decides: str


def schema_of(kind: type) -> dict[str, Any]:
    """Return the JSON Schema of arguments or of an answer, with an object at its root."""
    (schema,), definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    root = dict(definitions.pop(schema["$ref"].rpartition("/")[2])) if "$ref" in schema else dict(schema)
    return {**root, "$defs": definitions} if definitions else root


def shortened(answer: Mapping[str, Any], lists: tuple[str, ...], rest: str) -> str:
    """Return an answer as JSON of at most `LARGEST` bytes.

    If there is no room, texts are cut, and then the last items of the longest list are left out, counted by ``hidden``.

    Args:
        answer: the answer.
        lists: names of the lists that may be cut.
        rest: path of the file with the whole answer, which is named if something is missing.
    """
    text = _json(answer, _LONGEST[0])
    if len(text) <= LARGEST and text == _json(answer, 10**9):
        return text
    for longest in _LONGEST:
        whole = {**answer, "rest": rest} if "rest" in answer else dict(answer)
        while True:
            text = _json(whole, longest)
            if len(text) <= LARGEST:
                return text
            name = max(lists, key=lambda each: len(whole[each]), default="")
            # A few items with whole texts say more than many with parts of them, but one has to be there.
            if not name or len(whole[name]) <= (1 if longest > _LONGEST[-1] else 0):
                break
            whole[name] = whole[name][:-1]
            whole["hidden"] = whole["hidden"] + 1
    return text


def escaped(value: Any) -> Any:
    """Return a value of JSON with all its texts printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): escaped(each) for key, each in value.items()}
    return [escaped(each) for each in value] if isinstance(value, (list, tuple)) else value


def _json(value: Any, longest: int) -> str:
    return json.dumps(_cut(value, longest), ensure_ascii=True, separators=(",", ":"))


def _cut(value: Any, longest: int, name: str = "") -> Any:
    if isinstance(value, str):
        return value if len(value) <= longest or name == "rest" else f"{value[: longest - 3]}..."
    if isinstance(value, Mapping):
        return {key: _cut(each, longest, key) for key, each in value.items()}
    return [_cut(each, longest) for each in value] if isinstance(value, (list, tuple)) else value
