"""Detection of a run folder that was replaced by a new recording."""

from __future__ import annotations

from typing import Any

from padiff.dump import open_run
from padiff.dump.format import RUN_FILE
from padiff.dump.medium import medium_of
from padiff.dump.read import read_info
from padiff.dump.store import AnyPath
from padiff.errors import RunFolderError


class Recording:
    """An opened run folder that can be checked for replacement at the cost of one file status.

    Args:
        path: the run folder.

    Attributes:
        run: the run in the folder.
        latest: number of the latest step that was read; the reader sets this attribute.
    """

    def __init__(self, path: AnyPath) -> None:
        self._run_file = path / RUN_FILE
        self._stamp = self._stamped()  # before reading, so that a replacement during the read is noticed
        self.run = open_run(path)
        self.latest = -1
        self._replaced = False

    def is_replaced(self) -> bool:
        """Return True if the folder holds another recording now; a removed folder is not replaced yet."""
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
                return False  # the file was removed between the two calls
            self._stamp = stamp
        return self._replaced

    def _is_other(self) -> bool:
        info, before = read_info(self._run_file), self.run.info
        if info.identity or before.identity:
            return info.identity != before.identity
        # An older padiff wrote no identity: compare the models, and check whether step numbers went back.
        return [layer.path for layer in info.layers] != [layer.path for layer in before.layers] or (
            max(self.run.numbers(), default=-1) < self.latest
        )

    def _stamped(self) -> Any:
        try:
            return medium_of(self._run_file).stamp(self._run_file)
        except OSError:
            return None
