"""Measuring the pairs of a step on several cores: threads, since numpy leaves the others free while it counts."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from padiff.compare.sketched import is_sketched
from padiff.errors import UsageError
from padiff.records import Diff, Pair

# Smaller pairs are nearly all Python, which one thread runs at a time: several only get in each other's way.
_LARGE = 1 << 15


def workers_of(workers: int | None) -> int:
    """How many threads to use; by default as many as there are cores for this process, and one where there are two.

    Two threads were measured to be no faster than one on two cores: they wait for each other in numpy's matrix
    products, for the interpreter, and for pages to be mapped. Two processes would not.

    Raises:
        UsageError: no number of at least 1.
    """
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cores if cores > 2 else 1
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UsageError(f"workers is how many threads measure, at least 1, got {workers!r}")
    return workers


def measured(pairs: Sequence[Pair], measure: Callable[[Pair], Diff], workers: int) -> list[Diff]:
    """Measure all pairs, in their order; the same whatever the number of threads, which end with the call."""
    large = [k for k, pair in enumerate(pairs) if _size(pair) >= _LARGE] if workers > 1 else []
    if len(large) < 2:
        return [measure(pair) for pair in pairs]
    # The largest first, so that no thread is left with one of them at the end.
    large.sort(key=lambda k: -_size(pairs[k]))
    alone = set(range(len(pairs))).difference(large)
    found: dict[int, Diff] = {}
    errors: dict[int, BaseException] = {}
    waiting = deque(large)

    def work(numbers: deque[int]) -> None:
        while True:
            try:
                k = numbers.popleft()
            except IndexError:
                return
            # Of several errors the first pair's is raised, as by one thread.
            if not errors or k < min(errors.copy()):
                try:
                    found[k] = measure(pairs[k])
                except Exception as error:
                    errors[k] = error

    with ThreadPoolExecutor(min(workers, len(large)) - 1, "padiff-measure") as pool:
        try:
            helpers = [pool.submit(work, waiting) for _ in range(min(workers, len(large)) - 1)]
            work(deque(sorted(alone)))
            work(waiting)
            for helper in helpers:
                helper.result()
        finally:
            waiting.clear()  # interrupted: what has begun is finished, nothing else
    if errors:
        raise errors[min(errors)]
    return [found[k] for k in range(len(pairs))]


def _size(pair: Pair) -> int:
    return 0 if is_sketched(pair) else math.prod(pair.anchor.shape)
