"""Reading run folders. Nothing in a folder is trusted: paths stay inside, nothing is unpickled, sizes are checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from padiff.dump.format import (
    FINISHED_FILE,
    PARAMS_FILE,
    REPORT_FILE,
    RUN_FILE,
    SCHEMA_VERSION,
    STEPS,
    from_stored,
    step_folder,
    tree_from_json,
)
from padiff.errors import RunFolderError, TensorFileError
from padiff.records import LOOP, STAGES, Layer, Record, RunInfo, Step

_STEP_NAME = re.compile(r"\d{8,}")


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor source: one ``.npy`` file, read when asked."""

    folder: Path
    file: str
    dtype: str
    shape: tuple[int, ...]
    site: str

    def read(self) -> np.ndarray:
        """The tensor, memory-mapped where it is not small.

        Raises:
            TensorFileError: missing, truncated, pickled, outside of the folder, or not of the recorded shape.
        """
        path = self._inside()
        try:
            small = path.stat().st_size < 1 << 16
            array = np.load(path, mmap_mode=None if small else "r", allow_pickle=False)
        except FileNotFoundError:
            raise self._error("is missing", "copy the whole run folder, or record the run again") from None
        except (OSError, ValueError, EOFError, SyntaxError) as error:
            if "pickle" in str(error).lower():
                raise self._error("holds pickled objects, which are never loaded", "record the run again") from error
            raise self._error(f"is damaged ({error})", "copy it again from where it was recorded") from error
        if not isinstance(array, np.ndarray) or array.shape != self.shape:
            got = getattr(array, "shape", type(array).__name__)
            raise self._error(f"has shape {got}, but {self.shape} was recorded", "the file was changed") from None
        return from_stored(array, self.dtype)

    def _inside(self) -> Path:
        if "\\" in self.file or PurePosixPath(self.file).is_absolute() or ".." in PurePosixPath(self.file).parts:
            raise self._error("leaves the run folder, and is not read", "do not use this run folder")
        path = self.folder / self.file
        root = self.folder.resolve()
        if root not in path.resolve().parents:
            raise self._error("leaves the run folder by a link, and is not read", "do not use this run folder")
        return path

    def _error(self, what: str, remedy: str) -> TensorFileError:
        return TensorFileError(f"{self.folder / self.file} (the tensor of {self.site}) {what}: {remedy}")


class FolderRun:
    """A `Run` in a folder. Steps that come to be while it is open are seen."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._info = read_info(self.path / RUN_FILE)

    @property
    def name(self) -> str:
        return self._info.name or self.path.name

    @property
    def info(self) -> RunInfo:
        return self._info

    def numbers(self) -> list[int]:
        steps = self.path / STEPS
        try:
            # By number: as text, 10 would come before 2.
            return sorted(int(e.name) for e in steps.iterdir() if _STEP_NAME.fullmatch(e.name))
        except FileNotFoundError:
            return []

    def steps(self, number: int) -> list[Step]:
        folder = self.path / STEPS / step_folder(number)
        ranks = sorted(
            (e for e in folder.glob("rank_*") if e.name[5:].isdigit()), key=lambda entry: int(entry.name[5:])
        )
        if not ranks:
            raise RunFolderError(f"{folder} holds no rank_N folder: the step is damaged. Record it again")
        return [read_dump(rank)[1] for rank in ranks]

    def finished(self) -> bool:
        return (self.path / FINISHED_FILE).exists()


class SingleDump:
    """A `Run` of one step: a step's folder or a dump folder, looked at alone."""

    def __init__(self, path: Path, ranks: list[Path], info: RunInfo | None = None) -> None:
        self.path = path
        self._read = [read_dump(rank) for rank in ranks]
        self._info = info or self._read[0][0]

    @property
    def name(self) -> str:
        return self._info.name or self.path.name

    @property
    def info(self) -> RunInfo:
        return self._info

    def numbers(self) -> list[int]:
        return [self._read[0][1].number]

    def steps(self, number: int) -> list[Step]:
        return [step for _, step in self._read]

    def finished(self) -> bool:
        return True


def open_run(path: str | Path) -> FolderRun | SingleDump:
    """Open a run folder, one step's folder of it, or a dump folder (one that holds the JSON files itself).

    Raises:
        RunFolderError: the path is none of these, or of another schema version; the message says what is there.
    """
    path = Path(path)
    if not path.exists():
        raise RunFolderError(f"there is no run folder {path}")
    if not path.is_dir():
        raise RunFolderError(f"{path} is a file; expected a run folder (one that holds {RUN_FILE})")
    if (path / RUN_FILE).exists():
        return FolderRun(path)
    if (path / REPORT_FILE).exists() or (path / PARAMS_FILE).exists():
        return SingleDump(path, [path])
    ranks = sorted((e for e in path.glob("rank_*") if e.name[5:].isdigit()), key=lambda entry: int(entry.name[5:]))
    if ranks:
        return SingleDump(path, ranks)
    hint = ""
    if (path / STEPS).is_dir():
        hint = f" It has a folder '{STEPS}', so it was a run folder: its {RUN_FILE} is lost."
    below = sorted(str(entry.parent.name) for entry in path.glob(f"*/{RUN_FILE}"))
    if below:
        hint = f" Below it there are run folders: {', '.join(below[:5])}."
    raise RunFolderError(f"{path} is no run folder: it holds neither {RUN_FILE} nor {REPORT_FILE}.{hint}")


def read_info(run_file: Path) -> RunInfo:
    """Read ``run.json``."""
    content = _read_json(run_file)
    with _Explained(run_file):
        return _info(content, tuple(layer for layer, _ in tree_from_json(content["tree"])))


def read_dump(folder: Path) -> tuple[RunInfo, Step]:
    """Read one rank's dump folder; one of the two JSON files may be absent.

    Raises:
        RunFolderError: neither file is there, or one of them is damaged.
    """
    records: list[Record] = []
    content: Any = None
    layers: tuple[Layer, ...] = ()
    for name in (REPORT_FILE, PARAMS_FILE):
        path = folder / name
        if not path.exists():
            continue
        content = _read_json(path)
        with _Explained(path):
            nodes = list(tree_from_json(content["tree"]))
            layers = tuple(layer for layer, _ in nodes)
            nodes += [(Layer(LOOP, "", ""), list(content.get("loop", {}).get("records", ())))]
            records += [record for layer, entries in nodes for record in _records(folder, layer, entries)]
    if content is None:
        raise RunFolderError(f"{folder} holds neither {REPORT_FILE} nor {PARAMS_FILE}: it is no dump folder")
    with _Explained(path):
        step = Step(
            number=int(content["step"]),
            records=tuple(sorted(records, key=lambda record: record.order)),
            rank=int(content.get("rank", 0)),
            loss_scale=float(content.get("loss_scale", 1.0)),
            micro_batches=int(content.get("micro_batches", 1)),
            notes=tuple(str(note) for note in content.get("notes", ())),
        )
        return _info(content, layers), step


def _info(content: Mapping[str, Any], layers: tuple[Layer, ...]) -> RunInfo:
    return RunInfo(
        framework=str(content["framework"]["name"]),
        framework_version=str(content["framework"]["version"]),
        layers=layers,
        name=str(content.get("name", "")),
        world_size=int(content.get("world_size", 1)),
        layer_map=tuple(str(path) for path in content.get("layer_map", ())),
        recording=dict(content.get("recording", {})),
    )


def _records(folder: Path, layer: Layer, entries: list[dict[str, Any]]) -> Iterator[Record]:
    for entry in entries:
        stage, slot, call = str(entry["stage"]), str(entry["slot"]), int(entry["call"])
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}")
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        source = TensorFile(folder, str(entry["file"]), dtype, shape, f"{layer.path}/{stage}/{slot}")
        yield Record(layer.path, stage, slot, source, dtype, shape, call, int(entry["order"]), layer.type)


def _read_json(path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: {path.parent} is no run folder, or a part of one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged, it is no JSON ({error}). Copy the run again") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise RunFolderError(
            f"{path} has schema version {version!r}; this padiff reads {SCHEMA_VERSION}. "
            "Use the padiff that recorded it, or record the run again"
        )
    return content


class _Explained:
    """Turns the errors of picking a damaged JSON apart into one that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError, OverflowError)):
            raise RunFolderError(
                f"{self._path} is damaged: {type(error).__name__}: {error}. It was edited, or only half copied"
            ) from error
