"""Ending with the process that started this one.

A killed process says nothing to those that it started, and they would go on, or wait for their next task, for ever.
"""

from __future__ import annotations

import os
import threading
import time

# Seconds between two looks.
_LOOK = 1.0


def follow(parent: int) -> None:
    """From now on, end with the process that started this one, however that ended.

    Args:
        parent: its number, as it knows it itself: it may be gone already.
    """
    if os.name == "posix":
        threading.Thread(target=_watch, args=(parent,), name="padiff-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)
