"""``check_dataloader``: do two data loaders give the same batches?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from padiff.check import tolerance_of
from padiff.compare import Tolerance
from padiff.compare.measure.arrays import figures_of
from padiff.errors import NothingToCompareError
from padiff.frameworks import framework_of_tensor


def check_dataloader(loader_0: Iterable[Any], loader_1: Iterable[Any], cfg: Mapping[str, Any] | None = None) -> bool:
    """Compare two data loaders batch by batch, prints the first difference.

    Args:
        loader_0, loader_1: anything that gives batches: tensors of either framework, arrays, and lists, tuples or
            dicts of them.
        cfg: ``atol``, ``rtol`` and ``compare_mode`` as in `padiff.check_report`.

    Returns:
        Whether all batches agree, in number too.

    Raises:
        NothingToCompareError: neither loader gives a batch, or their batches hold no tensor.
    """
    tolerance = tolerance_of(cfg)
    first, second = iter(loader_0), iter(loader_1)
    end = object()
    index = 0
    while True:
        batches = (next(first, end), next(second, end))
        if batches[0] is end or batches[1] is end:
            if batches[0] is batches[1]:
                if not index:
                    raise NothingToCompareError("check_dataloader: no batch to compare, both data loaders are empty")
                return True
            print(f"[AutoDiff] the {'first' if batches[0] is end else 'second'} data loader ends after {index} batches")
            return False
        sides = [dict(_arrays(batch, "batch")) for batch in batches]
        if not sides[0] and not sides[1]:
            raise NothingToCompareError(f"check_dataloader: batch {index} holds no tensor in either data loader")
        if len(sides[0]) != len(sides[1]):
            print(f"[AutoDiff] batch {index}: {len(sides[0])} against {len(sides[1])} tensors")
            return False
        # By name; where the two call them differently ("img", "image"), by position.
        others = list(sides[0] if sides[0].keys() == sides[1].keys() else sides[1])
        for name, other in zip(sides[0], others):
            problem = _problem(sides[0][name], sides[1][other], tolerance)
            if problem:
                print(f"[AutoDiff] batch {index}, {name} against {other}: {problem}")
                return False
        index += 1


def _problem(left: np.ndarray, right: np.ndarray, tolerance: Tolerance) -> str:
    if left.shape != right.shape:
        return f"shapes differ: {list(left.shape)} against {list(right.shape)}"
    figures = figures_of(left, right, tolerance.elementwise)
    if figures.nonfinite:
        return f"{figures.nonfinite} values are NaN or infinite on one side only"
    if tolerance.passes(figures):
        return ""
    return f"max |diff| {figures.max_abs:.3g}, relative L2 {figures.rel_l2:.3g} ({tolerance.describe()})"


def _arrays(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _arrays(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from _arrays(item, f"{path}.{key}")
    elif value is not None and not isinstance(value, str):
        framework = framework_of_tensor(value)
        yield path, framework.tensors.copy(value) if framework is not None else np.asarray(value)
