"""Exit of worker processes when their parent process ends.

The children of a killed process get no notice, and would run or wait for their next task for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

# Seconds between two checks.
_LOOK = 1.0
# Number of prctl's option, from <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """Start a thread that exits this process as soon as its parent has ended, even if the parent was killed.

    Args:
        parent: the parent's process id, passed by the parent because it may have ended already.
    """
    if os.name == "posix":
        threading.Thread(target=_watch, args=(parent,), name="padiff-parent", daemon=True).start()


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends, also after this process runs another program.

    Only Linux does; elsewhere the process goes on without its parent.

    Args:
        parent: the parent's process id, passed by the parent because it may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)
