"""What holds for all tests: one thread each, and little for the garbage collector to look at."""

from __future__ import annotations

import gc
import os

# As many tests run side by side as there are cores. The processes that tests start inherit it.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the frameworks have a million objects, and each collection would look at all of them
