"""Reading of run folders and stores. Files are not trusted: paths stay inside, nothing is unpickled."""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from padiff.dump.format import (
    FINISHED_FILE,
    FLOORS,
    PARAMS_FILE,
    REPORT_FILE,
    RUN_FILE,
    STEPS,
    names_of,
    neighbours_of,
    ranks_of,
    step_folder,
    tree_from_json,
)
from padiff.dump.medium import STEP_FILE, Explained, check_inside, is_whole, read_text, steps_in
from padiff.dump.pack import PACK_FILE, PackReader
from padiff.dump.safetensors import Fetching
from padiff.dump.step_files import FileReader, read_part
from padiff.dump.store import AnyPath, RemotePath, absolute, as_remote, is_location, local_only, run_folder
from padiff.dump.untrusted import as_int, open_plain, plain
from padiff.dump.weight_files import Packs, read_floors
from padiff.errors import PadiffError, RunFolderError
from padiff.records import Layer, Run, RunInfo, Step, run_card, run_line, run_text, settings_from_json
from padiff.records.declared import environment_from_json
from padiff.records.traces import Pack
from padiff.system.frames import Frame

# The rank's folder in a run of one process, and a packed step in it.
_ALONE = "rank_0"
_ALONE_PACKED = f"{os.sep}{_ALONE}{os.sep}{PACK_FILE}"
_STEP_NAME = re.compile(r"\d{8,}")


class _OnDisk(ABC):
    """Base class of runs on disk: path, description and texts."""

    path: AnyPath
    _info: RunInfo

    @abstractmethod
    def numbers(self) -> list[int]: ...

    @abstractmethod
    def steps(self, number: int) -> list[Step]: ...

    @abstractmethod
    def finished(self) -> bool: ...

    def __str__(self) -> str:
        return run_text(self)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        return run_card(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}: {run_line(self)}>"

    @property
    def name(self) -> str:
        return self._info.name or self.path.name

    @property
    def info(self) -> RunInfo:
        return self._info

    @property
    def packs(self) -> Mapping[int, Pack]:
        """Return the packs to replay steps, by step number; each is read on access."""
        return {}


class FolderRun(_OnDisk):
    """A `Run` in a folder. Steps that are written later appear too."""

    def __init__(self, path: str | AnyPath) -> None:
        self.path = Path(path) if isinstance(path, str) else path
        self._info = read_info(self.path / RUN_FILE)
        self._packed, self._files = PackReader(self.path), FileReader()
        self._packs = Packs(self.path)
        # As text: for a long run, creating Path objects would take as long as reading the steps.
        self._floors = os.path.join(str(path), FLOORS)
        self._steps = self.path / STEPS
        # The declared settings and the lines of code in `run.json` are final once the first step is written.
        self._info_fixed = bool(self.numbers())

    def numbers(self) -> list[int]:
        # Sorted by number, as text sorts 10 before 2.
        return sorted(int(name) for name in names_of(local_only(self._steps)) if _STEP_NAME.fullmatch(name))

    def steps(self, number: int) -> list[Step]:
        if not self._info_fixed:
            now = read_info(self.path / RUN_FILE)
            self._info = replace(self._info, settings=now.settings, lines=now.lines, files=now.files)
            self._info_fixed = True
        steps = self._ranks(number)
        floors = read_floors(self.path, number) if len(steps) == 1 and self._has_floors(number) else None
        return steps if floors is None else [replace(steps[0], floors=floors)]

    def _ranks(self, number: int) -> list[Step]:
        """Return a step of all ranks that wrote it."""
        name = step_folder(number)
        # Checking for one name is much faster than listing the folder.
        if self._info.world_size == 1 and os.path.lexists(f"{self._steps}{os.sep}{name}{_ALONE_PACKED}"):
            return [self._packed.read(self._steps / name / _ALONE)]  # checks that the file lies in the run
        return [self._read_rank(rank) for rank in self._folders(self._steps / name)]

    def _folders(self, folder: AnyPath) -> Sequence[Path]:
        ranks = ranks_of(local_only(folder))
        if not ranks:
            raise RunFolderError(f"{folder} holds no rank_N folder: the step is damaged. Record it again")
        for rank in ranks:
            check_inside(rank, self.path)
        return ranks

    def _read_rank(self, rank: Path) -> Step:
        return self._packed.read(rank) if _is_packed(rank) else self._read(rank)

    def _has_floors(self, number: int) -> bool:
        """Return True if a step may have floors; a cheap check."""
        return os.path.lexists(f"{self._floors}{os.sep}{step_folder(number)}")

    def _read(self, rank: Path) -> Step:
        _check_whole(rank)
        return self._files.read(rank)[0]

    def finished(self) -> bool:
        return (self.path / FINISHED_FILE).exists()

    @property
    def packs(self) -> Packs:
        return self._packs


class SingleDump(_OnDisk):
    """A `Run` of one step: a single step folder or dump folder."""

    def __init__(self, path: Path, ranks: list[Path], files: Sequence[str]) -> None:
        self.path = path
        self._read = [_read_rank(rank, files) for rank in ranks]
        self._info = self._read[0][0]

    def numbers(self) -> list[int]:
        return [self._read[0][1].number]

    def steps(self, number: int) -> list[Step]:
        return [step for _, step in self._read]

    def finished(self) -> bool:
        return True


class DumpSeries(_OnDisk):
    """A `Run` of dump folders ``step_N/rank_R``, as a proxy model's ``try_dump`` writes them."""

    def __init__(self, path: Path, files: Sequence[str]) -> None:
        self.path = path
        self._files = files
        self._folders = {int(e.name[5:]): e for e in path.glob("step_*") if e.name[5:].isdecimal()}
        self._info = self.dump(min(self._folders)).info

    def numbers(self) -> list[int]:
        return sorted(self._folders)

    def dump(self, number: int) -> SingleDump:
        """Return the dump of one step."""
        folder = self._folders[number]
        return SingleDump(folder, ranks_of(folder) or [folder], self._files)

    def steps(self, number: int) -> list[Step]:
        # Numbered by the folder, as a dump does not know its step number.
        return [replace(step, number=number) for step in self.dump(number).steps(number)]

    def finished(self) -> bool:
        return True


def _is_packed(rank: Path) -> bool:
    return os.path.lexists(os.path.join(rank, PACK_FILE)) or PACK_FILE in names_of(rank)


def _check_whole(rank: Path) -> None:
    """Check that a rank's part of a recorded step has both of its JSON files.

    Raises:
        RunFolderError: one file is missing; with the other alone, the step would seem to lack some stages.
    """
    lost = {REPORT_FILE, PARAMS_FILE} - {*names_of(rank)}
    if len(lost) == 1:
        raise RunFolderError(
            f"{rank / lost.pop()} is missing: the step is damaged. Copy the run again, or record it again"
        )


def _read_rank(folder: Path, files: Sequence[str]) -> tuple[RunInfo, Step]:
    """Read one rank's folder of a step; a packed step needs the ``run.json`` of the run folder around it."""
    run = folder.resolve().parent.parent.parent
    if not _is_packed(folder):
        if set(files) == {REPORT_FILE, PARAMS_FILE} and (run / RUN_FILE).exists():
            _check_whole(folder)
        info, step = read_dump(folder, files)
        if step.settings and (run / RUN_FILE).exists():
            info = replace(info, settings=read_info(run / RUN_FILE).settings)
        return info, step
    if not (run / RUN_FILE).exists():
        raise RunFolderError(
            f"{folder} is a packed step, which is read in its run folder only: {run} has no {RUN_FILE}"
        )
    return read_info(run / RUN_FILE), PackReader(run).read(folder)


def read_info(run_file: AnyPath) -> RunInfo:
    """Read ``run.json``."""
    content = read_part(run_file)
    with Explained(run_file):
        return _info(content, tuple(layer for layer, _ in tree_from_json(content["tree"])))


def read_dump(folder: Path, files: Sequence[str] = (REPORT_FILE, PARAMS_FILE)) -> tuple[RunInfo, Step]:
    """Read one rank's dump folder; some of the JSON files may be absent.

    Raises:
        RunFolderError: none of the files exists, or one of them is damaged.
    """
    step, contents = FileReader().read(folder, files)
    path, content = contents[-1]
    with Explained(path):
        info = _info(content, tuple(layer for layer, _ in tree_from_json(content["tree"])))
    return replace(info, settings={}), step  # settings in a dump's JSON belong to the step


def _info(content: Mapping[str, Any], layers: tuple[Layer, ...]) -> RunInfo:
    return RunInfo(
        framework=str(content["framework"]["name"]),
        framework_version=str(content["framework"]["version"]),
        layers=layers,
        name=str(content.get("name", "")),
        world_size=as_int(content.get("world_size", 1)),
        layer_map=tuple(str(path) for path in content.get("layer_map", ())),
        recording=dict(plain(content.get("recording", {}))),
        environment=environment_from_json(content.get("environment", {})),
        settings=settings_from_json(plain(content.get("settings", {}))),
        identity=str(content.get("id", "")),
        lines=_lines(dict(plain(content.get("lines", {})))),
        files={str(file): str(digest) for file, digest in dict(plain(content.get("files", {}))).items()},
    )


def _lines(content: Mapping[str, Any]) -> dict[str, Frame]:
    return {
        str(key): Frame(str(file), as_int(line), str(function), str(code))
        for key, (file, line, function, code) in content.items()
    }


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


def open_run(
    path: str | AnyPath, files: Sequence[str] = (REPORT_FILE, PARAMS_FILE)
) -> FolderRun | SingleDump | DumpSeries:
    """Open a run folder, one step's folder of it, a dump folder (one that holds the JSON files itself), or a folder of
    dump folders ``step_N``.

    Args:
        path: the folder, or the url of a run in a store.
        files: the JSON files of a dump folder to read, as far as they exist.

    Raises:
        RunFolderError: the path is none of these, or has another schema version.
        UsageError: the value is no path, or has an unsupported url scheme (``ftp://``).
    """
    place = run_folder(path, "run")
    remote = as_remote(place)
    return _open_folder(local_only(place), files) if remote is None else StoreRun(remote)


def opened(run: str | AnyPath | Run) -> Run:
    """Return a run, opened if its path is given."""
    return open_run(run) if is_location(run) else cast(Run, run)


def file_digests(path: str | AnyPath, most: int) -> dict[str, str]:
    """Return the SHA-256 of each file of a run's folder by its name; all files of a step are one.

    A link counts as its target's name, which is not followed; hidden files do not count, as nothing of a run is read
    from them. Of a run in a store only the description counts: its other objects would have to be fetched.

    Args:
        path: the run.
        most: the largest number of names; where there are more, all steps are one.
    """
    remote = as_remote(run_folder(path, "run"))
    if remote is not None:
        return {RUN_FILE: hashlib.sha256(read_text(remote / RUN_FILE)).hexdigest()}
    place = local_only(run_folder(path, "run"))
    groups: dict[str, list[str]] = {}
    for folder, folders, names in os.walk(place):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in sorted(name for name in (*names, *links) if not name.startswith(".")):
            file = Path(folder, name)
            inner = file.relative_to(place)
            groups.setdefault("/".join(inner.parts[:2]), []).append(f"{inner} {_file_digest(file)}")
    if len(groups) > most:
        rows = sorted(groups.items())
        groups = {}
        for name, lines in rows:
            groups.setdefault(name.partition("/")[0], []).extend(lines)
    return {name: lines[0].rpartition(" ")[2] if lines[0].startswith(f"{name} ") else _joined(lines)
            for name, lines in sorted(groups.items())[:most]}  # fmt: skip


def _joined(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _file_digest(path: Path) -> str:
    if path.is_symlink():
        return _joined([os.readlink(path)])
    content = hashlib.sha256()
    try:
        with open_plain(path) as file:
            while piece := file.read(1 << 20):
                content.update(piece)
    except ValueError:
        return _joined(["no plain file"])
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error})") from error
    return content.hexdigest()


def _open_folder(path: Path, files: Sequence[str]) -> FolderRun | SingleDump | DumpSeries:
    if not path.exists():
        raise RunFolderError(f"there is no run folder {path}{neighbours_of(path)}")
    if not path.is_dir():
        raise RunFolderError(f"{path} is a file; expected a run folder (one that holds {RUN_FILE})")
    path = absolute(path)
    names_of(path)  # raises a clear error if this user has no permission to read the folder
    if (path / RUN_FILE).exists():
        return FolderRun(path)
    if any((path / name).exists() for name in (*files, REPORT_FILE, PARAMS_FILE, PACK_FILE)):
        return SingleDump(path, [path], files)
    if ranks_of(path):
        return SingleDump(path, ranks_of(path), files)
    if any(entry.name[5:].isdecimal() for entry in path.glob("step_*")):
        return DumpSeries(path, files)
    hint = ""
    if (path / STEPS).is_dir():
        hint = f" It has a folder '{STEPS}', so it was a run folder: its {RUN_FILE} is lost."
    below = sorted(str(entry.parent.name) for entry in path.glob(f"*/{RUN_FILE}"))
    if below:
        hint = f" Below it there are run folders: {', '.join(below[:5])}."
    raise RunFolderError(f"{path} is no run folder: it holds neither {RUN_FILE} nor {REPORT_FILE}.{hint}")
