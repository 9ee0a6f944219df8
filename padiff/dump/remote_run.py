"""Reading runs in a store."""

from __future__ import annotations

from padiff.dump.fetching import Fetching
from padiff.dump.format import FLOORS, RUN_FILE, STEPS, step_folder
from padiff.dump.in_store import STEP_FILE, is_whole, steps_in
from padiff.dump.pack import PackReader
from padiff.dump.read import FolderRun
from padiff.dump.remote_path import RemotePath
from padiff.errors import PadiffError, RunFolderError
from padiff.records import Step

#: Steps that are prefetched after the current one.
_AHEAD = 2
# Ranks that a message names.
_NAMED = 8


class StoreRun(FolderRun):
    """A `Run` in a store. A step counts once the objects of all ranks exist.

    Raises:
        RunFolderError: the place holds no run, or the store does not answer.
    """

    def __init__(self, path: RemotePath) -> None:
        self._place = path
        self._there: dict[int, dict[int, int]] = {}
        try:
            if not (path / RUN_FILE).exists():
                raise RunFolderError(f"there is no run {path}: it has no {RUN_FILE}{_hint(path)}")
            super().__init__(path)
            self._floored = set((path / FLOORS).names())
        except PadiffError:
            raise
        except OSError as error:
            raise _unread(path, error) from error
        self._fetching = Fetching(max(4, min(self._info.world_size, 64)))
        self._packed = PackReader(path, self._fetching)

    def numbers(self) -> list[int]:
        try:
            self._there = steps_in(self._place)
        except OSError as error:
            raise _unread(self._place, error) from error
        return self._whole()

    def _whole(self) -> list[int]:
        return sorted(n for n, sizes in self._there.items() if is_whole(sizes, self._info.world_size))

    def _ranks(self, number: int) -> list[Step]:
        if not is_whole(self._there.get(number, {}), self._info.world_size):
            self.numbers()
        sizes = self._there.get(number, {})
        if not is_whole(sizes, self._info.world_size):
            named = ", ".join(map(str, sorted(sizes)[:_NAMED])) or "none"
            raise RunFolderError(
                f"step {number} of {self._place} is not whole: of {self._info.world_size} ranks {named} put theirs"
            )
        later = [n for n in self._whole() if n >= number][: 1 + _AHEAD]
        self._fetching.expect(
            {self._rank(n, rank) / STEP_FILE: self._there[n][rank] for n in later for rank in sorted(self._there[n])}
        )
        return [self._packed.read(self._rank(number, rank)) for rank in sorted(sizes)]

    def _rank(self, number: int, rank: int) -> RemotePath:
        return self._place / STEPS / step_folder(number) / f"rank_{rank}"

    def _has_floors(self, number: int) -> bool:
        return step_folder(number) in self._floored

    def finished(self) -> bool:
        try:
            return super().finished()
        except OSError as error:
            raise _unread(self._place, error) from error


def _hint(path: RemotePath) -> str:
    if f"/{STEPS}/" in str(path):
        return f". In a store only whole runs are opened: give {str(path).partition(f'/{STEPS}/')[0]}"
    below = sorted({key.partition("/")[0] for key in path.store.list() if key.endswith(f"/{RUN_FILE}")})
    return f". Below it there are the runs {', '.join(below[:5])}" if below else ""


def _unread(path: RemotePath, error: OSError) -> RunFolderError:
    return RunFolderError(f"{path} can't be read ({error}). Check the address, the credentials and the network")
