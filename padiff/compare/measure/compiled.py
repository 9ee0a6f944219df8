"""Loading of the compiled measurement (extra ``fast``, numba), if the amount of work makes up for the load time.

Its figures equal those of `padiff.compare.measure.sums` to 1e-12: only the order of the sums differs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

Kernel: TypeAlias = Callable[
    [np.ndarray, np.ndarray, float, float], tuple[float, float, float, float, float, float, int, float]
]

# Elements that numpy measures in a process before the kernel is loaded. Measured: importing numba and loading its
# cached code takes 0.3 s of processor time, and numpy takes 1.3 ns longer for each element. So the whole measurement
# never takes more than twice as long as the better choice, however much work follows.
_PAYS = 250_000_000
#: Smallest number of elements for the kernel. Smaller tensors take equally long either way; numpy always measures them,
#: so that their figures do not depend on installed packages.
LEAST = 1 << 15

_TAKEN = (np.dtype(np.float32), np.dtype(np.float64))


class _Compiled:
    """Kernel of this process, and the number of elements measured without it."""

    def __init__(self) -> None:
        self.seen = 0
        self.kernel: Kernel | None = None
        self.tried = False
        self._lock = threading.Lock()

    def load(self) -> Kernel | None:
        with self._lock:
            if not self.tried:
                self.kernel = _loaded()
                self.tried = True
        return self.kernel


_compiled = _Compiled()


def load() -> Kernel | None:
    """Load the kernel now, regardless of the amount of work, and return it; `None` if numba is missing or fails."""
    return _compiled.load()


def kernel_for(reference: np.ndarray, candidate: np.ndarray) -> Kernel | None:
    """Return the kernel for two arrays, or `None` if numpy must measure them: kernel unavailable, not worth loading, or
    unsuited.
    """
    if reference.size < LEAST or reference.dtype != candidate.dtype or reference.dtype not in _TAKEN:
        return None
    if not (reference.flags.aligned and candidate.flags.aligned):
        return None
    if _compiled.kernel is None and not _compiled.tried:
        _compiled.seen += reference.size
        return None if _compiled.seen < _PAYS else _compiled.load()
    return _compiled.kernel


def _loaded() -> Kernel | None:
    try:
        from padiff.compare.measure.kernel import one_pass

        # Compiled for read-only arrays, as those of files are: one version for each dtype.
        def kernel(
            reference: np.ndarray, candidate: np.ndarray, max_abs: float, max_rel: float
        ) -> tuple[float, float, float, float, float, float, int, float]:
            return one_pass(_read_only(reference), _read_only(candidate), max_abs, max_rel)  # type: ignore[no-any-return]

        probe = np.ones(1, np.float32)
        return kernel if kernel(probe, probe, 0.0, 0.0)[1] == 1.0 else None
    except Exception:  # numba is missing, does not fit this numpy, or has no cache folder: numpy measures
        return None


def _read_only(array: np.ndarray) -> np.ndarray:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
