"""PaDiff's proxy model, which records a model and writes dumps on request, and ``check_dataloader``."""

from __future__ import annotations

import itertools
import os
import shutil
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from padiff.check import tolerance_of
from padiff.compare import Tolerance
from padiff.compare.measure.operands import Arrays
from padiff.compare.measure.pairs import figures_of
from padiff.dump.format import ALONE, FOLDERS, PARAMS_FILE, REPORT_FILE
from padiff.dump.step_files import write_dump
from padiff.dump.store import absolute, local_folder
from padiff.errors import NothingToCompareError, PadiffError, UsageError
from padiff.frameworks import framework_of, framework_of_tensor
from padiff.model.selection import MODES, find_paths, select
from padiff.model.tree import describe, owning, walk
from padiff.recorder.capture import Capture
from padiff.recorder.layers import FixedLayers
from padiff.records import ROOT, UNSCALED, Both, RunInfo, Step
from padiff.system.guard import Failure, Guard, weakly
from padiff.system.terminal import say
from padiff.weights.carried_state import ruled_kinds, wholes

#: Default folder of dumps, below the current folder; see `set_dump_root_path`.
DEFAULT_ROOT = "padiff_dump"

# Context variables, replaced and never edited: each thread has its own values.
_ROOT: ContextVar[str] = ContextVar("padiff_dump_root", default=DEFAULT_ROOT)
_NAMED: ContextVar[tuple[tuple[str, weakref.ref[Any]], ...]] = ContextVar("padiff_names", default=())


def set_dump_root_path(path: str | Path) -> None:
    """Set the default parent folder for dumps of models created from now on."""
    _ROOT.set(str(absolute(local_folder(path, "path"))))


def get_dump_root_path() -> str:
    """Return the default parent folder for dumps of models."""
    return str(Path(_ROOT.get()).absolute())


def claim_name(name: str, owner: Any) -> str:
    """Return the name, with a number appended if a living model has it, so that two models never share a folder."""
    living = tuple((used, ref) for used, ref in _NAMED.get() if ref() is not None)
    names = {used for used, _ in living}
    free, number = name, 1
    while free in names:
        free, number = f"{name}_{number}", number + 1
    _NAMED.set((*living, (free, weakref.ref(owner))))
    return free


_REPORT = {stage: place for stage, place in FOLDERS.items() if place[0] == REPORT_FILE}
_PARAMS = {stage: place for stage, place in FOLDERS.items() if place[0] == PARAMS_FILE}


def create_model(model: Any, name: str | None = None, dump_freq: int = 1) -> ProxyModel:
    """Wrap a torch Module or a paddle Layer in a proxy that records its computation.

    Args:
        model: the model; a proxy is returned unchanged.
        name: name of the dump folder. Default: the class name, with a number appended if another living model has it.
        dump_freq: ``try_dump()`` writes at every `dump_freq`-th call.
    """
    return model if isinstance(model, ProxyModel) else ProxyModel(model, name, dump_freq)


class ProxyModel:
    """The wrapper that ``create_model`` returns. Other attributes and methods are the wrapped model's.

    Attributes:
        model: the wrapped model.
        name: name of the model.
        dump_path: default folder for dumps.
        framework: ``torch`` or ``paddle``.
    """

    def __init__(self, model: Any, name: str | None = None, dump_freq: int = 1) -> None:
        if isinstance(dump_freq, bool) or not isinstance(dump_freq, int) or dump_freq < 1:
            raise UsageError(f"dump_freq has to be a whole number of at least 1, got {dump_freq!r}")
        self._framework = framework_of(model)
        self.model = self._framework.layers.unwrap(model)
        self.name = claim_name(name or type(self.model).__name__, self)
        self.framework = self._framework.name
        self.dump_freq = dump_freq
        self.dump_path = str(Path(get_dump_root_path()) / self.name)
        self.step = 0
        self._nodes = walk(self.model, self._framework)
        self._white: list[tuple[Any, str]] = []
        self._black: list[tuple[Any, str]] = []
        self._layer_map: list[Any] = []
        self._capture: Capture | None = None
        self.guard = Guard(weakly(self._failed))

    # -- running -------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward and record it; the hooks are off again afterwards."""
        capture = self.guard.run(self._attach)
        try:
            return self.model(*args, **kwargs)
        finally:
            if capture is not None:
                self.guard.attempt(capture.detach)

    def _attach(self) -> Capture:
        capture = self._report
        capture.attach()
        return capture

    def backward(self, loss: Any) -> None:
        """Run backward from a loss, and record the loss."""
        self.guard.run(self._log_loss, loss)
        loss.backward()

    def _log_loss(self, loss: Any) -> None:
        self._report.log_loss(loss)

    def _failed(self, failure: Failure) -> None:
        say(
            f"Step {self.step} of {self.name} is not recorded: an error of padiff's own, {failure.text}. The training "
            "goes on",
            alarming=True,
        )

    @property
    def _report(self) -> Capture:
        if self._capture is None:
            layers = FixedLayers(self._framework, self._nodes, self.padiff_chosen)
            self._capture = Capture(self.step, layers, guard=self.guard)
        return self._capture

    def clear_report(self) -> None:
        """Discard the records so far."""
        if self._capture is not None:
            self._capture.finish()
            self._capture = None

    # -- dumping -------------------------------------------------------------------------------------------

    def try_dump(self, per_step: int | str | Path | None = None, dir_path: str | Path | None = None) -> bool:
        """End a step: write report and parameters if a dump is due, and clear the report in any case.

        Args:
            per_step: number of calls between two dumps. Default: the model's ``dump_freq``. A path is accepted as
                ``dir_path``. Calls are counted from 0: ``per_step=10`` dumps at steps 9, 19, ..., as documented, like
                ``every_n_steps=padiff.Schedule(every=10, first=9)`` of a recorder; ``dump_freq=10`` dumps at steps 0,
                10, ...
            dir_path: folder to write to. Default: ``<dump_path>/step_N/rank_R``.

        Returns:
            True if a dump was written.
        """
        if isinstance(per_step, (str, os.PathLike)):
            per_step, dir_path = None, per_step
        every = self.dump_freq if per_step is None else per_step
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"per_step has to be a whole number of at least 1, got {every!r}")
        # per_step: "once try_dump was called per_step times"; dump_freq: steps 0, N, 2 N, ...
        due = (self.step + 1) % every == 0 if per_step is not None else self.step % every == 0
        if due and not self.guard.tripped:
            try:
                self._dump(dir_path)
            except (PadiffError, OSError):  # a full disk, for example: the caller wants a dump
                raise
            except Exception as error:
                self.guard.catch(error)
        due = due and not self.guard.tripped
        if self.guard.tripped:
            self._capture = None
            self.guard.reset()
        self.guard.attempt(self.clear_report)
        self.guard.reset()
        self.step += 1
        return due

    def _dump(self, dir_path: str | Path | None) -> None:
        rank = self._framework.environment.distributed()[0]
        path = dir_path or Path(self.dump_path) / f"step_{self.step}" / f"rank_{rank}"
        self.dump_report(path)
        self.dump_params(path)

    def dump_report(self, dir_path: str | Path) -> None:
        """Write the records since the last `clear_report`: inputs, outputs, losses, activation gradients."""
        self._write(dir_path, self._report.peek(self._framework.environment.distributed()[0]), _REPORT)

    def dump_params(self, dir_path: str | Path) -> None:
        """Write the current weights and gradients."""
        self._write(dir_path, self._parameters(), _PARAMS)

    def dump_weights(self, dir_path: str | Path) -> None:
        """Write only the weights, next to the files that `dump_params` writes into the same folder."""
        self._write(dir_path, self._parameters(), {"weight": ALONE["weight"]})

    def dump_grads(self, dir_path: str | Path) -> None:
        """Write only the gradients, next to the files that `dump_params` writes into the same folder."""
        self._write(dir_path, self._parameters(), {"grad": ALONE["grad"]})

    def _parameters(self) -> Step:
        layers = FixedLayers(self._framework, self._nodes, self.padiff_chosen, self.padiff_owning)
        return Capture(self.step, layers).parameters_now()

    def _write(
        self, dir_path: str | Path, step: Step, places: Mapping[str, tuple[str, str]], info: RunInfo | None = None
    ) -> None:
        """Write to a temporary folder, then move the files into place; other files of the folder stay."""
        folder = local_folder(dir_path, "dir_path")
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted({name for place in places.values() for name in place})
        aside = folder / f".{names[0]}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            write_dump(aside, info or self._info, step, places)
            # Tensors first, so that a JSON file never names a missing file.
            for name in sorted(names, key=lambda name: name.endswith(".json")):
                target = folder / name
                if target.is_dir():
                    shutil.rmtree(target)
                (aside / name).replace(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    @property
    def _info(self) -> RunInfo:
        return RunInfo(
            framework=self._framework.name,
            framework_version=self._framework.version,
            layers=describe(self._nodes, self._framework, self.padiff_chosen),
            name=self.name,
            layer_map=tuple(path for item in self._layer_map for path in find_paths(self._nodes, item, "layer_map")),
        )

    # -- what is recorded ----------------------------------------------------------------------------------

    def update_black_list(self, layers: Iterable[Any], mode: str = "all") -> None:
        """Exclude layers from recording; without effect while there is a white list.

        Args:
            layers: layer objects, classes or path patterns of this model.
            mode: ``self`` for the layers alone, ``sublayers`` for the layers below, ``all`` for both (default).
        """
        self._change(black=[*self._black, *self._listed(layers, mode, "black list")])

    def update_white_list(self, layers: Iterable[Any], mode: str = "all") -> None:
        """Record these layers only; arguments as in `update_black_list`."""
        self._change(white=[*self._white, *self._listed(layers, mode, "white list")])

    def update_black_list_with_class(self, layer_class: Any, mode: str = "all") -> None:
        """Exclude all layers of a class, or of a list of classes, from recording."""
        self.update_black_list(layer_class if isinstance(layer_class, (list, tuple)) else [layer_class], mode)

    def update_white_list_with_class(self, layer_class: Any, mode: str = "all") -> None:
        """Record only the layers of a class, or of a list of classes."""
        self.update_white_list(layer_class if isinstance(layer_class, (list, tuple)) else [layer_class], mode)

    def set_layer_map(self, layers: Sequence[Any]) -> None:
        """Set the layers that correspond, in this order, to the layers of the other model's map.

        Layers below these are not recorded.
        """
        if isinstance(layers, Mapping) or not isinstance(layers, Iterable):
            raise UsageError(f"set_layer_map takes a list of this model's layers, got {type(layers).__name__}")
        mapped = list(layers)
        for layer in mapped:
            find_paths(self._nodes, layer, "set_layer_map")
        self._change(layer_map=mapped)

    def auto_layer_map(self, model_place: str) -> list[str]:
        """Set the layer map to composite layers (attention, recurrent) and layers with a rule, and print their paths.

        Args:
            model_place: ``"base"`` or ``"raw"``, the role of this model in the comparison.

        Returns:
            The paths of these layers.
        """
        if model_place not in ("base", "raw"):
            raise UsageError(f"auto_layer_map: model_place is 'base' or 'raw', got {model_place!r}")
        kinds = ruled_kinds(self.framework, model_place)
        layers = [layer for layer in self._info.layers if layer.path != ROOT]
        paths = list(wholes(layers, {layer.path for layer in layers if layer.type in kinds}))
        print(f"[AutoDiff] auto_layer_map of {self.name} ({model_place}): {', '.join(paths) or 'nothing found'}")
        self.set_layer_map(paths)
        return paths

    @staticmethod
    def _listed(layers: Iterable[Any], mode: str, where: str) -> list[tuple[Any, str]]:
        if mode not in MODES:
            raise UsageError(f"{where}: unknown mode {mode!r}; the modes are {', '.join(MODES)}")
        if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
            raise UsageError(f"{where}: expected a list of layers, classes or path patterns, got {layers!r}")
        return [(layer, mode) for layer in layers]

    def _change(
        self,
        white: list[tuple[Any, str]] | None = None,
        black: list[tuple[Any, str]] | None = None,
        layer_map: list[Any] | None = None,
    ) -> None:
        """Set new lists if they select at least one layer, and discard the records made under the old lists."""
        white = self._white if white is None else white
        black = self._black if black is None else black
        layer_map = self._layer_map if layer_map is None else layer_map
        select(
            self._nodes, None, black, layer_map
        )  # a wrong item of a black list is an error, even while a white list overrides it
        if not select(self._nodes, white or None, black or None, layer_map):
            raise UsageError("the white and black lists leave no layer to record")
        self._white, self._black, self._layer_map = white, black, layer_map
        self.clear_report()

    # -- for other packages ---------------------------------------------------------------------------------

    def padiff_dump(self, dir_path: str | Path, step: Step, layer_map: Sequence[str]) -> None:
        """Write a dump of a step that was recorded elsewhere, with the paths that correspond to another model's."""
        self.padiff_forget(dir_path)
        self._write(dir_path, step, {**_REPORT, **_PARAMS}, replace(self._info, layer_map=tuple(layer_map)))

    def padiff_forget(self, dir_path: str | Path) -> None:
        """Delete a dump; other files of the folder stay."""
        for name in {name for place in (_REPORT | _PARAMS | ALONE).values() for name in place}:
            target = Path(dir_path) / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    @property
    def padiff_model(self) -> Any:
        """Return the wrapped model."""
        return self.model

    @property
    def padiff_layer_map(self) -> list[Any]:
        """Return the layers of `set_layer_map`, in order."""
        return list(self._layer_map)

    @property
    def padiff_lists(self) -> tuple[list[Any] | None, list[Any] | None]:
        """Return the white list and the black list; `None` for an empty one."""
        return list(self._white) or None, list(self._black) or None

    @property
    def padiff_chosen(self) -> frozenset[str]:
        """Return the paths of the recorded layers."""
        return select(self._nodes, self._white or None, self._black or None, self._layer_map)

    @property
    def padiff_owning(self) -> frozenset[str]:
        """Return the paths of the layers whose parameters are recorded."""
        return owning(self._nodes, self._framework, self.padiff_chosen, self._layer_map)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __repr__(self) -> str:
        return f"ProxyModel({self.name!r}, {self.model!r})"


def check_dataloader(loader_0: Iterable[Any], loader_1: Iterable[Any], cfg: Mapping[str, Any] | None = None) -> bool:
    """Compare two data loaders batch by batch, and print the first difference.

    Args:
        loader_0, loader_1: iterables of batches: tensors of either framework, arrays, and lists, tuples or dicts of
            these.
        cfg: ``atol``, ``rtol`` and ``compare_mode`` as in `padiff.check_report`.

    Returns:
        True if all batches and the number of batches agree.

    Raises:
        NothingToCompareError: both loaders are empty, or a batch holds no tensor in either loader.
    """
    tolerance = tolerance_of(cfg)
    end = object()
    index = 0
    for first, second in itertools.zip_longest(loader_0, loader_1, fillvalue=end):
        if first is end or second is end:
            print(f"[AutoDiff] the {'first' if first is end else 'second'} data loader ends after {index} batches")
            return False
        arrays = Both(first, second).map(lambda batch: dict(_arrays(batch, "batch")))
        if not any(arrays):
            raise NothingToCompareError(f"check_dataloader: batch {index} holds no tensor in either data loader")
        counts = arrays.map(len)
        if counts.reference != counts.candidate:
            print(f"[AutoDiff] batch {index}: {counts.reference} against {counts.candidate} tensors")
            return False
        # Pair tensors by name, or by position if the names differ ("img", "image").
        names = arrays.reference if arrays.reference.keys() == arrays.candidate.keys() else arrays.candidate
        for (name, array), partner in zip(arrays.reference.items(), names):
            problem = _problem(array, arrays.candidate[partner], tolerance)
            if problem:
                print(f"[AutoDiff] batch {index}, {name} against {partner}: {problem}")
                return False
        index += 1
    if not index:
        raise NothingToCompareError("check_dataloader: no batch to compare, both data loaders are empty")
    return True


def _problem(reference: np.ndarray, candidate: np.ndarray, tolerance: Tolerance) -> str:
    if reference.shape != candidate.shape:
        return f"shapes differ: {list(reference.shape)} against {list(candidate.shape)}"
    figures = figures_of(Arrays(reference, candidate, UNSCALED), tolerance.elementwise)
    if figures.nonfinite:
        return f"{figures.nonfinite} values are NaN or infinite on one side only"
    if tolerance.passes(figures):
        return ""
    return f"max |diff| {figures.max_abs:.3g}, relative L2 {figures.rel_l2:.3g} ({tolerance.describe()})"


def _arrays(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _arrays(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from _arrays(item, f"{path}.{key}")
    elif value is not None and not isinstance(value, str):
        framework = framework_of_tensor(value)
        yield path, framework.tensors.copy(value) if framework is not None else np.asarray(value)
