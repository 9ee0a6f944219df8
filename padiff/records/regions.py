"""Regions of compiled code in a step, each held against the same code run eagerly on the region's own inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from padiff.system.frames import Frame

# Most entries of each list of a region.
MOST = 40


@dataclass(frozen=True, slots=True)
class RegionTensor:
    """A tensor that leaves a region: an output, or the gradient of an input.

    Attributes:
        name: name of the tensor in the graph.
        dtype, shape: dtype and shape of the tensor.
        norm: L2 norm of the tensor.
        error: relative L2 error of the compiled code, against the same code in float64 on the same inputs.
        eager: the same error of the eager code.
        limit: largest error of compiled code that is rounding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    norm: float
    error: float
    eager: float
    limit: float

    @property
    def passed(self) -> bool:
        """Return True if the compiled code differs from eager code by rounding only."""
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class RegionOperation:
    """The first operation of a region that its compiler computes otherwise than eager code.

    Attributes:
        name: name of the operation (``gelu``).
        layer: path of the layer whose code calls it, as the compiler names it; may be empty.
        frame: line of code that calls it; `None` if not known.
        error, eager: relative L2 errors of its output, as in `RegionTensor`; those of gradients if only these differ.
    """

    name: str
    layer: str
    frame: Frame | None
    error: float
    eager: float


@dataclass(frozen=True, slots=True)
class Region:
    """A call of a region of compiled code.

    Attributes:
        number: number of the region among those that the step called, counted from 0.
        calls: number of its calls in the step; the first one is run again.
        compiler: name of the compiler's backend.
        layers: paths of the layers whose code is in the region.
        operations: operations of the region's graph, in order.
        kernels: kernels that the compiler made of the operations, as far as it names them.
        frame: first line of code in the region; `None` if not known.
        inputs: number of tensors that enter the region.
        outputs, gradients: tensors that leave it in forward and in backward, as far as they could be measured.
        wrong: the operation that is computed otherwise; `None` if none is, or if it was not found.
        note: why something could not be measured; else empty.
    """

    number: int
    calls: int = 1
    compiler: str = ""
    layers: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    frame: Frame | None = None
    inputs: int = 0
    outputs: tuple[RegionTensor, ...] = ()
    gradients: tuple[RegionTensor, ...] = ()
    wrong: RegionOperation | None = None
    note: str = ""

    @property
    def failed(self) -> RegionTensor | None:
        """Return the first tensor beyond rounding; `None` if there is none."""
        return next((each for each in (*self.outputs, *self.gradients) if not each.passed), None)

    @property
    def measured(self) -> bool:
        """Return True if anything of the region was measured."""
        return bool(self.outputs or self.gradients)


def regions_to_json(regions: Iterable[Region]) -> list[dict[str, Any]]:
    """Return the JSON entries of a step's compiled regions. Numbers that are not finite are texts."""
    return [_plain(asdict(region)) for region in regions]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def regions_from_json(entries: Iterable[Any]) -> tuple[Region, ...]:
    """Undo `regions_to_json`.

    Raises:
        ValueError, TypeError, KeyError, OverflowError, AttributeError: an entry is malformed.
    """
    return tuple(
        Region(
            number=int(each["number"]),
            calls=int(each["calls"]),
            compiler=str(each["compiler"]),
            layers=_texts(each["layers"]),
            operations=_texts(each["operations"]),
            kernels=_texts(each["kernels"]),
            frame=_frame(each["frame"]),
            inputs=int(each["inputs"]),
            outputs=_tensors(each["outputs"]),
            gradients=_tensors(each["gradients"]),
            wrong=None if each["wrong"] is None else _operation(each["wrong"]),
            note=str(each["note"]),
        )
        for each in entries
    )


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(str(each) for each in [*values][:MOST])


def _frame(value: Any) -> Frame | None:
    if value is None:
        return None
    file, line, function, code = value
    return Frame(str(file), int(line), str(function), str(code))


def _tensors(entries: Iterable[Any]) -> tuple[RegionTensor, ...]:
    return tuple(
        RegionTensor(
            str(each["name"]),
            str(each["dtype"]),
            tuple(int(length) for length in each["shape"]),
            *(float(each[name]) for name in ("norm", "error", "eager", "limit")),
        )
        for each in entries
    )


def _operation(each: Any) -> RegionOperation:
    return RegionOperation(
        str(each["name"]), str(each["layer"]), _frame(each["frame"]), float(each["error"]), float(each["eager"])
    )
