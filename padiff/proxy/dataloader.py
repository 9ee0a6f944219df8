"""``check_dataloader``: compare the batches of two data loaders."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from padiff.check import tolerance_of
from padiff.compare import Tolerance
from padiff.compare.measure.arrays import figures_of
from padiff.compare.measure.operands import Arrays
from padiff.errors import NothingToCompareError
from padiff.frameworks import framework_of_tensor
from padiff.records import UNSCALED, Both


def check_dataloader(loader_0: Iterable[Any], loader_1: Iterable[Any], cfg: Mapping[str, Any] | None = None) -> bool:
    """Compare two data loaders batch by batch, and print the first difference.

    Args:
        loader_0, loader_1: iterables of batches: tensors of either framework, arrays, and lists, tuples or dicts of
            these.
        cfg: ``atol``, ``rtol`` and ``compare_mode`` as in `padiff.check_report`.

    Returns:
        True if all batches and the number of batches agree.

    Raises:
        NothingToCompareError: both loaders are empty, or a batch holds no tensor in either loader.
    """
    tolerance = tolerance_of(cfg)
    end = object()
    index = 0
    for first, second in itertools.zip_longest(loader_0, loader_1, fillvalue=end):
        if first is end or second is end:
            print(f"[AutoDiff] the {'first' if first is end else 'second'} data loader ends after {index} batches")
            return False
        arrays = Both(first, second).map(lambda batch: dict(_arrays(batch, "batch")))
        if not any(arrays):
            raise NothingToCompareError(f"check_dataloader: batch {index} holds no tensor in either data loader")
        counts = arrays.map(len)
        if counts.reference != counts.candidate:
            print(f"[AutoDiff] batch {index}: {counts.reference} against {counts.candidate} tensors")
            return False
        # Pair tensors by name, or by position if the names differ ("img", "image").
        names = arrays.reference if arrays.reference.keys() == arrays.candidate.keys() else arrays.candidate
        for (name, array), partner in zip(arrays.reference.items(), names):
            problem = _problem(array, arrays.candidate[partner], tolerance)
            if problem:
                print(f"[AutoDiff] batch {index}, {name} against {partner}: {problem}")
                return False
        index += 1
    if not index:
        raise NothingToCompareError("check_dataloader: no batch to compare, both data loaders are empty")
    return True


def _problem(reference: np.ndarray, candidate: np.ndarray, tolerance: Tolerance) -> str:
    if reference.shape != candidate.shape:
        return f"shapes differ: {list(reference.shape)} against {list(candidate.shape)}"
    figures = figures_of(Arrays(reference, candidate, UNSCALED), tolerance.elementwise)
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
