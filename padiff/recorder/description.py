"""The description of a run (`RunInfo`): settings, processes, environment; updated while the model changes."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from padiff.dump.medium import medium_of
from padiff.dump.store import AnyPath
from padiff.errors import UsageError
from padiff.frameworks.base import Framework
from padiff.frameworks.hooking import OptimizerSettings
from padiff.model.selection import Node
from padiff.recorder.layers import Layers
from padiff.recorder.options import Detail, Identity, Schedule
from padiff.records import ROOT, RunInfo
from padiff.records.declared import plain_setting, settings_delta
from padiff.system.construction import Built, buffer_key, construction_lines, package_of, source_digests, users_sources
from padiff.system.data_lines import data_lines, used_lines
from padiff.system.frames import Frame, names_of
from padiff.system.guard import Tolerated

#: The file in which Linux describes the processor.
CPU_FILE = "/proc/cpuinfo"

# Instruction sets by which math libraries select their kernels.
_INSTRUCTIONS = frozenset((
    "sse4_2", "avx", "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
    "svebf16", "sme",
))  # fmt: skip

_VARIABLES = re.compile(
    r"CUBLAS_WORKSPACE_CONFIG|CUBLASLT_WORKSPACE_SIZE|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    r"|PYTHONHASHSEED|CUDA_LAUNCH_BLOCKING|NCCL_ALGO|NCCL_PROTO|ATEN_CPU_CAPABILITY"
    r"|(FLAGS|OMP|MKL|KMP|OPENBLAS|GOTO|ONEDNN|DNNL|BLIS|VECLIB)_\w+"
)
# Values without private content: numbers, words, lists of these; no paths.
_PLAIN = re.compile(r"[\w.,:;=+ -]{0,80}")


def fingerprint(framework: Framework, nodes: Iterable[Node]) -> dict[str, Any]:
    """Return the current environment of a training.

    Args:
        nodes: the model's layers, whose tensors' devices are the devices of the training.
    """
    device, parameters = framework.tensors.device, framework.layers.parameters
    devices = {device(tensor) for node in nodes for _, tensor, _ in parameters(node.layer)}
    kinds = sorted({name.replace("cuda", "gpu") for name in devices})
    facts = {
        **_machine(),
        "device.kind": ", ".join(kinds) or "none",
        "framework.version": framework.version,
        **framework.environment.read(kinds),
        **framework.environment.autocast(),
        **_variables(),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _machine() -> dict[str, Any]:
    model, instructions = _processor(CPU_FILE)
    try:
        cores: int | None = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on Linux
        cores = os.cpu_count()
    with np.errstate(all="ignore"):
        flushed = bool(np.float32(1e-40) * np.float32(1) == 0)
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu.model": model,
        "cpu.instructions": instructions,
        "cpu.cores": cores,
        # Through `sys.modules`: an import of `padiff` would depend on packages above this one.
        "padiff": str(sys.modules["padiff"].__version__),
        "numpy": np.__version__,
        # No call returns this setting. It shows in arithmetic: denormal numbers become zero.
        "denormals.flushed": flushed,
    }


@cache
def _processor(path: str) -> tuple[str, str]:
    """Return model and instruction sets of the first processor. Cached: a running machine keeps its processors."""
    model, flags = platform.machine(), ""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in ("flags", "Features"):
                flags = " ".join(sorted(_INSTRUCTIONS.intersection(value.split())))
            elif not line.strip():
                break  # further processors: machines have hundreds
    return model, flags


def _variables() -> dict[str, str]:
    """Return the environment variables that matter; values that may be private become ``(set)``."""
    private = {platform.node(), *(os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME"))}
    private = {name for name in private if len(name) > 2}
    variables = {}
    for name, value in os.environ.items():
        if _VARIABLES.fullmatch(name):
            plain = _PLAIN.fullmatch(value) and not any(secret in value for secret in private)
            variables[f"env.{name}"] = value if plain else "(set)"
    return variables


# Number of steps after which every rank must have begun to record; ranks may reach their first step at different times.
_HANDED_ON = 2
_NAMED = 5

_WHOLE = (
    "A step is whole when all ranks have written it, so no step of this run can be read. Call record() on every rank, "
    "with one folder for all; or, to keep this process alone, give rank=0, world_size=1"
)


def own_place(framework: Framework, identity: Identity) -> tuple[int, int]:
    """Return rank and number of processes: from the options, else from the framework or its launcher.

    Raises:
        UsageError: the number of processes is below 1, or the rank is not below that number.
    """
    rank, world_size = framework.environment.distributed()
    world_size = world_size if identity.world_size is None else identity.world_size
    rank = rank if identity.rank is None else identity.rank
    if world_size < 1:
        raise UsageError(f"world_size is the number of processes, at least 1; got {world_size}")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank is the number of this process, from 0 to {world_size - 1}, for there "
            f"{'is 1 process' if world_size == 1 else f'are {world_size} processes'}; got {rank}. Give world_size, too"
        )
    return rank, world_size


class OtherRanks:
    """Check that the other processes of a training record, too.

    Args:
        framework: framework of the model. Its process group is read again later, as it may be created after the
            recorder.
        folder: folder of the run; `None` for a run in memory.
        rank, world_size: rank and number of processes of the recorder.
        given: True if the caller set the number of processes, which is then trusted.
    """

    def __init__(self, framework: Framework, folder: AnyPath | None, rank: int, world_size: int, given: bool) -> None:
        self._framework, self._folder, self._given = framework, folder, given
        self._rank, self._world_size = rank, world_size
        self._handed_on = 0

    def look_into(self, folder: AnyPath | None) -> None:
        """Set another folder of the run."""
        self._folder = folder

    def handed_on(self) -> str:
        """Count a step that was handed on; return a warning, or an empty text if there is none."""
        self._handed_on += 1
        if self._handed_on == 1:
            return self._grouped_later()
        return self._absent() if self._handed_on == _HANDED_ON else ""

    def ended(self) -> str:
        """Return a warning about missing ranks at the end of a run that was too short for `handed_on` to check; else an
        empty text.
        """
        return self._absent() if 0 < self._handed_on < _HANDED_ON else ""

    def _grouped_later(self) -> str:
        rank, world_size = self._framework.environment.distributed()
        if self._given or self._folder is None or self._world_size > 1 or world_size == 1:
            return ""
        return (
            f"record() was called before the process group was made, and took this process for the only one; it is "
            f"rank {rank} of {world_size}. Call record() after it, or give rank= and world_size="
        )

    def _absent(self) -> str:
        """Return a warning about ranks that record nothing; only the lowest recording rank returns one."""
        if self._folder is None or self._world_size == 1:
            return ""
        absent = medium_of(self._folder).absent_ranks(self._folder, self._world_size)
        if not absent or self._rank != min(set(range(self._world_size)) - set(absent), default=-1):
            return ""
        return (
            f"this is rank {self._rank} of {self._world_size}, and {_listed(absent)} "
            f"{'records' if len(absent) == 1 else 'record'} nothing into {self._folder}. {_WHOLE}"
        )


def _listed(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"


class Description:
    """The current `RunInfo` of a recording.

    Attributes:
        info: the current description.
        rank: rank of this process.
    """

    def __init__(
        self,
        framework: Framework,
        layers: Layers,
        schedule: Schedule,
        detail: Detail,
        identity: Identity,
        replay_of: str | None = None,
    ) -> None:
        self.rank, world_size = own_place(framework, identity)
        self._layers = layers
        self._autocast_known = False
        self.info = RunInfo(
            framework=framework.name,
            framework_version=framework.version,
            layers=layers.described(),
            name=identity.name,
            world_size=world_size,
            layer_map=layers.mapped,
            recording={
                "every_n_steps": schedule.described(),
                "layers": len(layers.chosen),
                **({"list": layers.listed} if layers.listed else {}),
                **detail.described(),
                **({"command": identity.command} if identity.command else {}),
                **({"replay_of": replay_of} if replay_of else {}),
            },
            environment=fingerprint(framework, layers.nodes),
        )

    def with_autocast(self, autocast: Mapping[str, Any]) -> bool:
        """Set the autocast state from the first recorded call; return True if the description has changed.

        Autocast is active inside of the loop only, so the state is not known before that call.
        """
        if self._autocast_known or not autocast:
            return False
        self._autocast_known = True
        environment = self.info.environment
        if all(environment.get(name) == value for name, value in autocast.items()):
            return False
        self.info = replace(self.info, environment={**environment, **autocast})
        return True

    def with_errors(self, lines: Sequence[str]) -> bool:
        """Set the sentences on internal errors of padiff; return True if the description has changed."""
        if list(lines) == self.info.recording.get("errors", []):
            return False
        self.info = replace(self.info, recording={**self.info.recording, "errors": list(lines)})
        return True

    def with_left_out(self, names: Sequence[str]) -> None:
        """Set the names of the copies of the model that are not recorded, and that the loop changes."""
        self.info = replace(self.info, recording={**self.info.recording, "copies_left_out": list(names)})

    def with_schedule(self, schedule: Schedule) -> None:
        """Set the schedule of recorded steps."""
        recording = {**self.info.recording, "every_n_steps": schedule.described()}
        self.info = replace(self.info, recording=recording)

    def with_settings(self, settings: Mapping[str, Any]) -> bool:
        """Set the settings of the training; return True if the description has changed."""
        if settings == self.info.settings:
            return False
        self.info = replace(self.info, settings=dict(settings))
        return True

    def with_lines(self, optimizers: Mapping[str, Any]) -> bool:
        """Set the lines of the user's code; return True if the description has changed.

        The lines are those that construct the layers and the optimizers, make the calls of the training, and give its
        batches.

        Args:
            optimizers: the optimizers, by key.
        """
        lines: dict[str, Frame] = {}
        files: dict[str, str] = {}
        with contextlib.suppress(Exception):  # source code of any kind: a recording does without
            root, *inner = self._layers.nodes
            built = [_built(node) for node in (root, *inner)]
            names = names_of({**optimizers, ROOT: root.layer})
            kinds = {key: type(each) for key, each in optimizers.items()}
            lines = construction_lines(built, kinds, names)
            children = {node.path for node in inner if "." not in node.path}
            sources = users_sources(built)
            if "@scheduler" in lines:
                lines = used_lines(sources, lines["@scheduler"], "@schedule") | lines
            lines = data_lines(sources, names.get(ROOT, set()) | children) | lines
            for key in [each for each in lines if each.startswith(buffer_key(""))]:
                lines |= used_lines(sources, lines[key], key)
            for key in [each for each in optimizers if each in lines]:
                lines |= used_lines(sources, lines[key], f"@{key}")  # of parameter groups
            files = source_digests(lines)
        if not lines:
            return False
        self.info = replace(self.info, lines=lines, files=files)
        return True

    def with_layers(self) -> None:
        """Update the description to the current layers."""
        layers = self._layers
        recording = {**self.info.recording, "layers": len(layers.chosen)}
        self.info = replace(self.info, layers=layers.described(), layer_map=layers.mapped, recording=recording)


def _built(node: Node) -> Built:
    kind = type(node.layer)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    names = tuple(base.__name__ for base in kind.__mro__)
    return Built(node.path, kind.__name__, package_of(kind), file if isinstance(file, str) else "", names)


# Settings read from calls stay valid until later calls show others, as not every step shows these calls.
_OF_CALLS = ("loss.", "clip.")


class DeclaredSettings:
    """Declared settings of one training.

    Args:
        layers: the model's layers; parameters are named by layer path and slot.
        optimizers: the hooked optimizers.

    Attributes:
        first: settings in the first recorded step, which are stored with the run; `None` before that step.
    """

    def __init__(self, framework: Framework, layers: Layers, optimizers: Sequence[Any]) -> None:
        self._framework, self._layers, self._optimizers = framework, layers, optimizers
        self._host: dict[str, Any] = {}
        self._stepped: list[Any] = []
        #: Ids of the optimizers that hold state before the first step that is seen.
        self._resumed: set[int] = set()
        self._stamps: dict[int, Any] = {}
        self._read: dict[int, dict[str, Any]] = {}
        self._rates: dict[tuple[int, int], Any] = {}
        self._calls: dict[str, Any] = {}
        self._known: tuple[Any, dict[str, Any]] | None = None
        self.first: dict[str, Any] | None = None

    def declare(self, settings: Mapping[str, Any]) -> None:
        """Add settings that a host (trainer) names; values that are not plain are ignored."""
        plain = {name: plain_setting(value) for name, value in settings.items()}
        self._host |= {name: value for name, value in plain.items() if value is not None}
        self._known = None

    def release(self) -> None:
        """Drop the optimizers, after the last step."""
        self._optimizers, self._stepped, self._stamps = (), [], {}

    def read(self) -> dict[str, Any]:
        """Return the settings that are known before anything runs."""
        for optimizer in self._optimizers:
            self._refresh(optimizer)
        return self._together()

    def before_step(self, optimizer: Any) -> None:
        """Read the settings of an optimizer that is about to step, if they may have changed."""
        if not any(optimizer is each for each in self._stepped):
            self._stepped.append(optimizer)
            self._known = None
            with Tolerated():
                if self._framework.optimizers.has_state(optimizer):
                    self._resumed.add(id(optimizer))
        self._refresh(optimizer)

    def _refresh(self, optimizer: Any) -> None:
        key = id(optimizer)
        # An error of an optimizer's settings must not stop the training: its settings then stay unknown.
        with Tolerated():
            stamp = self._framework.optimizers.settings_stamp(optimizer)
            if key in self._stamps and self._stamps[key] == stamp:
                return
            self._stamps[key] = stamp
            self._known = None
            self._read[key] = {}
            self._read[key] = self._flat(key, self._framework.optimizers.settings(optimizer))

    def of_step(self, captured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a step that differ from those of the first recorded step.

        Args:
            captured: settings that the capture of the step has read.
        """
        if self._known is None or self._known[0] != captured:
            self._take(captured)
            now = self._together()
            if self.first is None:
                self.first = now
            self._known = dict(captured), settings_delta(self.first, now)
        return self._known[1]

    def _take(self, captured: Mapping[str, Any]) -> None:
        plain = {name: plain_setting(value) for name, value in captured.items()}
        shown = tuple(family for family in _OF_CALLS if any(name.startswith(family) for name in plain))
        old = {n: v for n, v in self._calls.items() if n.startswith(_OF_CALLS) and not (shown and n.startswith(shown))}
        self._calls = old | {name: value for name, value in plain.items() if value is not None}

    def _together(self) -> dict[str, Any]:
        settings = dict(self._host)
        for number, optimizer in enumerate(self._acting()):
            read = self._read.get(id(optimizer), {})
            settings |= {f"optimizer.{number}.{name}": value for name, value in read.items()}
            if read and id(optimizer) in self._resumed:
                settings[f"optimizer.{number}.resumed"] = True
        return settings | self._calls

    def _acting(self) -> list[Any]:
        """Return the optimizers without those that have not stepped and whose parameters another one has stepped."""
        optimized = self._framework.optimizers.optimized
        with Tolerated():
            held = {id(parameter) for each in self._stepped for parameter in optimized(each)}
            return [
                each
                for each in self._optimizers
                if any(each is other for other in self._stepped) or not held.issuperset(map(id, optimized(each)))
            ]
        return list(self._optimizers)

    def optimizers(self) -> dict[str, Any]:
        """Return each optimizer, by the key of its settings."""
        return {f"optimizer.{key}": each for key, each in enumerate(self._acting())}

    def _flat(self, key: int, settings: OptimizerSettings) -> dict[str, Any]:
        sites = self._sites()
        flat: dict[str, Any] = {"rule": settings.rule}
        flat |= {name: plain_setting(value) for name, value in settings.others.items()}
        for number, group in enumerate(settings.groups):
            group_prefix = f"group.{number}"
            flat |= {f"{group_prefix}.{name}": plain_setting(value) for name, value in group.values.items()}
            if f"{group_prefix}.lr" in flat:
                # The first learning rate: that of each step is a record.
                flat[f"{group_prefix}.lr"] = self._rates.setdefault((key, number), flat[f"{group_prefix}.lr"])
            trained = [p for p in group.parameters if self._framework.tensors.trainable(p)]
            names = [sites.get(id(parameter)) for parameter in trained]
            flat[f"{group_prefix}.parameters"] = [name for name in names if name is not None]
            if None in names:
                flat[f"{group_prefix}.others"] = names.count(None)  # parameters of another model, or copies
        return {name: value for name, value in flat.items() if value is not None}

    def _sites(self) -> dict[int, str]:
        """Return the names of the parameters by identity, after the first path that reaches each."""
        names: dict[int, str] = {}
        for node in self._layers.nodes:
            for slot, tensor, role in self._framework.layers.parameters(node.layer):
                if role == "parameter":
                    names.setdefault(id(tensor), f"{node.path}/{slot}")
        return names


def optimizers_of(given: Any, framework: Framework) -> list[Any]:
    """Return the distinct optimizers to hook.

    Args:
        given: one optimizer, a list or tuple of optimizers, a mapping of optimizers, or `None`.

    Raises:
        UsageError: an object is no optimizer of the framework, or its steps cannot be observed.
    """
    if given is None:
        return []
    if isinstance(given, Mapping):
        listed = list(given.values())
    else:
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
    hooked: dict[int, Any] = {}
    for optimizer in listed:
        steppers = framework.optimizers.steppers(optimizer)
        if not steppers:
            raise UsageError(_refusal(optimizer, framework))
        hooked.update((id(stepper), stepper) for stepper in steppers)
    return list(hooked.values())


def _refusal(optimizer: Any, framework: Framework) -> str:
    got = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if framework.optimizers.is_optimizer(optimizer):
        return (
            f"optimizer: of {got} nothing can be seen: it was not initialised as an optimizer of {framework.name} "
            "(super().__init__), and holds none whose parameters are its own. Give the optimizer whose step() does the "
            "work, or none: gradients are then what backward left"
        )
    name = framework.name
    return f"optimizer: expected an optimizer of {name} (or a list of them) for a {name} model, got {got}"
