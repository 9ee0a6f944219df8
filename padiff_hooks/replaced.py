"""Noticing that a run folder holds another recording than it did."""

from __future__ import annotations

import os
from typing import Any

from padiff.dump import open_run
from padiff.dump.format import RUN_FILE
from padiff.dump.read import read_info
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.errors import RunFolderError


class Recording:
    """A run folder as it was opened; looking whether it is that still costs a file status.

    Args:
        path: the run folder.

    Attributes:
        run: what it holds.
        latest: the latest step that was read of it; whoever reads it sets it.
    """

    def __init__(self, path: AnyPath) -> None:
        self._run_file = path / RUN_FILE
        self._stamp = self._stamped()  # before it is read: what is replaced in between is looked at again
        self.run = open_run(path)
        self.latest = -1
        self._replaced = False

    def is_replaced(self) -> bool:
        """Whether the folder holds another recording by now. One that is gone is not replaced yet."""
        if self._replaced:
            return True
        stamp = self._stamped()
        if stamp is None:
            return False
        if stamp != self._stamp:
            try:
                self._replaced = self._is_other()
            except RunFolderError:
                if self._run_file.exists():
                    raise
                return False  # it was removed just now
            self._stamp = stamp
        return self._replaced

    def _is_other(self) -> bool:
        info, before = read_info(self._run_file), self.run.info
        if info.identity or before.identity:
            return info.identity != before.identity
        # Of an older padiff, which names no recording: of another model, or with steps that go back.
        return [layer.path for layer in info.layers] != [layer.path for layer in before.layers] or (
            max(self.run.numbers(), default=-1) < self.latest
        )

    def _stamped(self) -> Any:
        try:
            if isinstance(self._run_file, RemotePath):
                return self._run_file.store.version(self._run_file.key)
            status = os.stat(self._run_file)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino
