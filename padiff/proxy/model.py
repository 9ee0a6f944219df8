"""The proxy model: a model that records itself, and dumps when asked to."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from padiff.dump.format import ALONE, FOLDERS, PARAMS_FILE, REPORT_FILE
from padiff.dump.local import local_folder
from padiff.dump.step_files import write_dump
from padiff.errors import PadiffError, UsageError
from padiff.frameworks import framework_of
from padiff.model.selection import MODES, find_paths, select
from padiff.model.tree import describe, owning, walk
from padiff.proxy.dump_root import claim_name, get_dump_root_path
from padiff.recorder.capture import Capture
from padiff.recorder.layers import FixedLayers
from padiff.records import ROOT, RunInfo, Step
from padiff.system.guard import Failure, Guard, weakly
from padiff.system.switches import say
from padiff.weights.special_init import ruled_kinds, wholes

_REPORT = {stage: place for stage, place in FOLDERS.items() if place[0] == REPORT_FILE}
_PARAMS = {stage: place for stage, place in FOLDERS.items() if place[0] == PARAMS_FILE}


def create_model(model: Any, name: str | None = None, dump_freq: int = 1) -> ProxyModel:
    """Wrap a torch Module or a paddle Layer so that it records what it computes.

    Args:
        model: the model; a proxy is handed back as it is.
        name: of its dumps' folder. Default: its class name, with a number where another living model has it.
        dump_freq: every how many calls ``try_dump()`` writes.
    """
    return model if isinstance(model, ProxyModel) else ProxyModel(model, name, dump_freq)


class ProxyModel:
    """What ``create_model`` makes. Calls, attributes and methods it has not itself are the wrapped model's.

    Attributes:
        model: the wrapped model.
        name, dump_path: its name, and the folder for dumps that no path is given for.
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
        """Forget what was recorded so far."""
        if self._capture is not None:
            self._capture.finish()
            self._capture = None

    # -- dumping -------------------------------------------------------------------------------------------

    def try_dump(self, per_step: int | str | Path | None = None, dir_path: str | Path | None = None) -> bool:
        """End a step: every ``per_step``-th call dumps report and parameters; each clears the report.

        Args:
            per_step: every how many calls. Default: the model's ``dump_freq``. A path is taken as ``dir_path``.
                Calls are counted from 0: with 10 it is steps 9, 19, ..., as the documents have it, which is
                ``every_n_steps=padiff.Schedule(every=10, first=9)`` of a recorder. ``dump_freq=10`` is 0, 10, ...
            dir_path: where to. Default: ``<dump_path>/step_N/rank_R``.

        Returns:
            Whether it dumped.
        """
        if isinstance(per_step, (str, Path)):
            per_step, dir_path = None, per_step
        every = self.dump_freq if per_step is None else per_step
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"per_step has to be a whole number of at least 1, got {every!r}")
        # per_step: "once try_dump was called per_step times"; dump_freq: steps 0, N, 2 N, ...
        due = (self.step + 1) % every == 0 if per_step is not None else self.step % every == 0
        if due and not self.guard.tripped:
            try:
                self._dump(dir_path)
            except (PadiffError, OSError):  # a full disk, say: this call is there to dump
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
        """Write what was recorded since the last `clear_report`: inputs, outputs, losses, activation gradients."""
        self._write(dir_path, self._report.peek(self._framework.environment.distributed()[0]), _REPORT)

    def dump_params(self, dir_path: str | Path) -> None:
        """Write weights and gradients as they are now."""
        self._write(dir_path, self._parameters(), _PARAMS)

    def dump_weights(self, dir_path: str | Path) -> None:
        """Write the weights alone, beside (not over) what `dump_params` wrote into the same folder."""
        self._write(dir_path, self._parameters(), {"weight": ALONE["weight"]})

    def dump_grads(self, dir_path: str | Path) -> None:
        """Write the gradients alone, beside (not over) what `dump_params` wrote into the same folder."""
        self._write(dir_path, self._parameters(), {"grad": ALONE["grad"]})

    def _parameters(self) -> Step:
        layers = FixedLayers(self._framework, self._nodes, self.padiff_chosen, self.padiff_owning)
        return Capture(self.step, layers).parameters_now()

    def _write(
        self, dir_path: str | Path, step: Step, places: Mapping[str, tuple[str, str]], info: RunInfo | None = None
    ) -> None:
        """Write aside, then put in place; other files of the folder are left alone."""
        folder = local_folder(dir_path, "dir_path")
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted({name for place in places.values() for name in place})
        aside = folder / f".{names[0]}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            write_dump(aside, info or self._info, step, places)
            # Tensors first: a JSON file never names a file that is not there yet.
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
        """Leave layers out; void while there is a white list.

        Args:
            layers: layer objects, classes or path patterns of this model.
            mode: ``self`` the layers alone, ``sublayers`` those below them, ``all`` both (default).
        """
        self._change(black=[*self._black, *self._listed(layers, mode, "black list")])

    def update_white_list(self, layers: Iterable[Any], mode: str = "all") -> None:
        """Record these layers only; else as `update_black_list`."""
        self._change(white=[*self._white, *self._listed(layers, mode, "white list")])

    def update_black_list_with_class(self, layer_class: Any, mode: str = "all") -> None:
        """Leave out all layers of a class, or of a list of classes."""
        self.update_black_list(layer_class if isinstance(layer_class, (list, tuple)) else [layer_class], mode)

    def update_white_list_with_class(self, layer_class: Any, mode: str = "all") -> None:
        """Record the layers of a class, or of a list of classes, only."""
        self.update_white_list(layer_class if isinstance(layer_class, (list, tuple)) else [layer_class], mode)

    def set_layer_map(self, layers: Sequence[Any]) -> None:
        """Say which layers answer, in this order, to those of the other model's map; what is below them is left out."""
        if isinstance(layers, Mapping) or not isinstance(layers, Iterable):
            raise UsageError(f"set_layer_map takes a list of this model's layers, got {type(layers).__name__}")
        found = list(layers)
        for layer in found:
            find_paths(self._nodes, layer, "set_layer_map")
        self._change(layer_map=found)

    def auto_layer_map(self, model_place: str) -> list[str]:
        """Set the layer map to the layers that a rule for carrying weights over is about, and print them.

        Args:
            model_place: ``"base"`` or ``"raw"``: which part this model has in the comparison.
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
        """Take new lists over, if they can be meant; what was recorded under the old ones is forgotten."""
        white = self._white if white is None else white
        black = self._black if black is None else black
        layer_map = self._layer_map if layer_map is None else layer_map
        select(self._nodes, None, black, layer_map)  # a bad item of a black list is an error, void or not
        if not select(self._nodes, white or None, black or None, layer_map):
            raise UsageError("the white and black lists leave no layer to record")
        self._white, self._black, self._layer_map = white, black, layer_map
        self.clear_report()

    # -- for the other rooms -------------------------------------------------------------------------------

    def padiff_dump(self, dir_path: str | Path, step: Step, layer_map: Sequence[str]) -> None:
        """Write a step of this model, recorded elsewhere, with the paths that answer to another model's."""
        self.padiff_forget(dir_path)
        self._write(dir_path, step, {**_REPORT, **_PARAMS}, replace(self._info, layer_map=tuple(layer_map)))

    def padiff_forget(self, dir_path: str | Path) -> None:
        """Take a dump away; other files of the folder stay."""
        for name in {name for place in (_REPORT | _PARAMS | ALONE).values() for name in place}:
            target = Path(dir_path) / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    @property
    def padiff_model(self) -> Any:
        """The wrapped model."""
        return self.model

    @property
    def padiff_layer_map(self) -> list[Any]:
        """Layers of `set_layer_map`, in order."""
        return list(self._layer_map)

    @property
    def padiff_lists(self) -> tuple[list[Any] | None, list[Any] | None]:
        """White and black list, `None` for one that is empty."""
        return list(self._white) or None, list(self._black) or None

    @property
    def padiff_chosen(self) -> frozenset[str]:
        """Paths of the layers that are recorded."""
        return select(self._nodes, self._white or None, self._black or None, self._layer_map)

    @property
    def padiff_owning(self) -> frozenset[str]:
        """Paths of the layers whose parameters are recorded."""
        return owning(self._nodes, self._framework, self.padiff_chosen, self._layer_map)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __repr__(self) -> str:
        return f"ProxyModel({self.name!r}, {self.model!r})"
