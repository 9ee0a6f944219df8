"""Settings that a run declares, and differences between those of two runs and between their environments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from padiff.errors import UsageError
from padiff.records.both import Both
from padiff.records.compared import Cause
from padiff.records.recorded import STAGES, RunInfo
from padiff.records.traces import LOOP
from padiff.system.terminal import first_few

Settings = Mapping[str, Any]

# Maximum number of names that are accepted from a folder.
_MOST = 1_000_000


def settings_at(run: Settings, step: Settings) -> dict[str, Any]:
    """Return the settings that apply in a step: the run's, updated by the step's; `None` in a step removes a name."""
    return {name: value for name, value in {**run, **step}.items() if value is not None}


def settings_delta(run: Settings, now: Settings) -> dict[str, Any]:
    """Return the settings that a step has to store so that `settings_at` returns `now`."""
    changed = {name: value for name, value in now.items() if name not in run or not _same(run[name], value)}
    return changed | {name: None for name in run if name not in now}


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and bool(first == second)


def plain_setting(value: Any) -> Any:
    """Return a value as a plain value for settings; `None` if there is no plain value.

    Numbers of numpy and tensors of one element become plain numbers; NaN and infinities become words.
    """
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [plain_setting(item) for item in value]
        return items if all(item is not None and not isinstance(item, list) for item in items) else None
    if isinstance(value, int):
        return value if abs(value) < 2**63 else float(value)
    try:
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, (bool, int)):
            return number
        number = float(number) if isinstance(number, float) else None
    except Exception:  # a tensor of several elements, or one that has no value
        return None
    return number if number is None or math.isfinite(number) else str(number)


def settings_from_json(content: Any) -> dict[str, Any]:
    """Return the settings from the parsed JSON of a run folder.

    Raises:
        UsageError: the content is no mapping of names to plain values.
    """
    wrong = "settings are a mapping of names to numbers, words, switches, lists of them, or null"
    if not isinstance(content, Mapping) or len(content) > _MOST:
        raise UsageError(wrong)
    for value in content.values():
        items = value if isinstance(value, list) else [value]
        if not all(item is None or isinstance(item, (bool, int, float, str)) for item in items):
            raise UsageError(wrong)
    return {str(name): value for name, value in content.items()}


def setting_text(value: Any) -> str:
    """Return a setting's value in words."""
    if value is None:
        return "not set"
    return str(float(f"{value:.7g}")) if isinstance(value, float) else str(value)


_NOTHING: Both[tuple[str, ...]] = Both((), ())
# Maximum number of parameters and layers that a sentence names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that two runs declare differently.

    Attributes:
        name: name of the setting, e.g. ``beta2``; the same in both frameworks.
        values: the value of each run; `None` if a run has no such setting.
        stage: the stage of a step in which the setting acts.
        kind: kind of the cause: ``optimizer_setting``, ``optimizer_state``, ``learning_rate``, ``clipping``,
            ``loss_setting``, ``layer_setting``, ``argument``, ``mode``, ``trainable``, ``tied``, ``accumulation``,
            ``micro_batches``, ``left_over``, ``trainer``, ``precision``, ``model``.
        about: the object that has the setting, in words: ``AdamW``, ``the loss``, ``layer norm1 (LayerNorm) against ln
            (LayerNorm)``.
        changes: True if the two runs cannot compute the same because of the difference.
        fix: the line of code that fixes the difference, in the candidate's framework. May be empty.
        parameters: the parameters that are affected, by ``layer/slot``; empty: all trained parameters.
        layers: the layers that are affected, by path.
        step: the first step that shows the difference.
        note: a sentence that explains the difference. May be empty.
    """

    name: str
    values: Both[Any]
    stage: str
    kind: str
    about: str = ""
    changes: bool = True
    fix: str = ""
    parameters: Both[tuple[str, ...]] = _NOTHING
    layers: Both[tuple[str, ...]] = _NOTHING
    step: int = 0
    note: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for the same difference in different steps."""
        return self.name, *map(str, self.values), self.about, self.parameters, self.layers

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key of the causal order: step, then stage."""
        return self.step, STAGES.index(self.stage)

    @property
    def said(self) -> str:
        """Return the sentence for differences of this kind."""
        return _SAID[self.kind]

    @property
    def text_alone(self) -> str:
        """Return the two values in words, without the object that has the setting."""
        values = self.values.map(setting_text)
        # The sentence of the kind names the learning rate already.
        name = "" if self.kind == "learning_rate" else f"{_WORDS.get(self.name, self.name)} "
        return f"{name}{values.reference} against {values.candidate}"

    @property
    def text(self) -> str:
        """Return the two values and the object that has the setting, in words."""
        where = self.about
        if self.parameters.reference:
            where += f"{' ' if where else ''}for {first_few(self.parameters.reference, _NAMED)}"
        return f"{where}: {self.text_alone}" if where else self.text_alone

    def cause(self) -> Cause:
        """Return the difference as the cause of a diff."""
        text = self.text_alone if self.layers.reference else self.text
        rates = self.values.map(lambda value: [value]) if self.kind == "learning_rate" else None
        # Without what the note says of how the other framework counts, the values contradict the fix.
        note = f" ({self.note})" if self.layers.reference and self.note and self.fix.startswith("paddle.") else ""
        return Cause(
            self.kind, f"{self.said}: {text}{note}", evidence="" if note else self.note, fix=self.fix, values=rates
        )

    @property
    def place(self) -> Both[str | None]:
        """Return the layers at which to report the difference; the loop if no layer is affected by itself."""
        if self.layers.reference or self.layers.candidate:
            return self.layers.map(lambda paths: paths[0] if paths else None)
        if self.parameters.reference or self.parameters.candidate:
            return self.parameters.map(lambda sites: sites[0].rpartition("/")[0] if sites else None)
        return Both(LOOP, LOOP)


#: Kinds of differences that belong to a layer.
OF_LAYERS = ("layer_setting", "mode")
#: Names that are printed as words.
_WORDS = {"weight_decay": "weight decay", "kept": "kept as"}
_SAID = {
    "optimizer_setting": "the optimizers are set differently",
    "optimizer_state": "one optimizer goes on, the other one begins anew",
    "learning_rate": "the learning rates differ",
    "clipping": "gradients are clipped differently",
    "loss_setting": "the losses are set differently",
    "layer_setting": "the layers are set differently",
    "argument": "the model is called with other numbers",
    "precision": "one run computes in another precision",
    "mode": "one run trains where the other evaluates",
    "trainer": "the trainers are set differently",
    "left_over": "a step of one run begins with gradients that are no part of it",
    "model": "one run calls another model with the same inputs",
    "micro_batches": "a step is made of more micro-batches in one run than in the other",
    "accumulation": "steps are made of different numbers of batches",
    "trainable": "one run trains what the other does not",
    "tied": "one run shares a parameter that the other has twice",
}


# Prefixes of names that can change numbers, the most informative first; all other names sort after these.
_NUMERIC = (
    "autocast.dtype", "autocast.level", "tf32.", "matmul.", "dtype.default", "device.kind", "deterministic.", "cudnn.",
    "threads.", "denormals.", "attention.", "onednn.", "cpu.capability", "cpu.instructions", "device.names",
    "framework.", "env.CUBLAS", "env.NVIDIA", "env.TORCH",
)  # fmt: skip
# Names that matter on a GPU only, and names that are comparable within one framework only: paddle sets OMP_NUM_THREADS
# itself, and oneDNN is another set of kernels in each framework. `threads.intra_op` holds the resulting thread count.
_GPU_ONLY = ("tf32.", "cudnn.", "matmul.reduced", "env.CUBLAS", "env.NVIDIA", "env.TORCH", "env.CUDA", "env.NCCL")
_ONE_FRAMEWORK = (
    "framework.", "cpu.capability", "onednn.", "env.FLAGS_", "env.OMP_", "env.MKL_", "env.KMP_", "env.ATEN",
)  # fmt: skip


def differences(reference: RunInfo, candidate: RunInfo) -> tuple[str, ...]:
    """Return the differences between two runs' environments in words, those that can change numbers first.

    Names that only one framework has are skipped, and so are settings of GPUs if neither run used a GPU.
    """
    of_reference, of_candidate = reference.environment, candidate.environment
    if not of_reference or not of_candidate:
        silent = [side for side, content in (("reference", of_reference), ("candidate", of_candidate)) if not content]
        return (f"not known of the {silent[0]} run: it was recorded without",) if len(silent) == 1 else ()
    on_gpu = any("gpu" in str(env.get("device.kind")) for env in (of_reference, of_candidate))
    names = [
        name
        for name in {*of_reference, *of_candidate}
        if not (name.startswith(_GPU_ONLY) and not on_gpu)
        if not (name.startswith(_ONE_FRAMEWORK) and reference.framework != candidate.framework)
        # The absence of a variable is information: the variable was not set.
        if name.startswith("env.") or (name in of_reference and name in of_candidate)
        if of_reference.get(name) != of_candidate.get(name)
    ]
    return tuple(
        f"{name} {environment_text(of_reference.get(name))} against {environment_text(of_candidate.get(name))}"
        for name in sorted(names, key=_rank)
    )


def cautions(environment: Mapping[str, Any]) -> list[str]:
    """Return sentences about settings that make runs hard to repeat or to compare to the last digit."""
    notes = []
    on_gpu = "gpu" in str(environment.get("device.kind"))
    tf32 = [name for name in ("tf32.matmul", "tf32.cudnn") if on_gpu and environment.get(name)]
    if tf32:
        notes.append(f"TF32 is on ({', '.join(tf32)}): products have 10 bits of mantissa, relative errors of 1e-3")
    if environment.get("autocast.dtype", "off") != "off":
        notes.append(f"autocast computes in {environment['autocast.dtype']}")
    if on_gpu and not environment.get("deterministic.algorithms") and not environment.get("cudnn.deterministic"):
        notes.append("no deterministic algorithms are asked for: on a GPU two equal trainings may differ")
    if on_gpu and environment.get("cudnn.benchmark"):
        notes.append("cuDNN chooses its algorithms by their speed (benchmark): two equal trainings may differ")
    threads = environment.get("threads.intra_op")
    if isinstance(threads, int) and threads > 1:
        notes.append(f"{threads} threads share an operation: sums have another order than with another number of them")
    if environment.get("denormals.flushed"):
        notes.append("denormal numbers are flushed to zero")
    return notes


def _rank(name: str) -> tuple[int, str]:
    return next((i for i, prefix in enumerate(_NUMERIC) if name.startswith(prefix)), len(_NUMERIC)), name


def environment_text(value: Any) -> str:
    """Return a value of an environment in words."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value != "" else "empty"


def environment_from_json(content: Any) -> dict[str, Any]:
    """Return the environment from the parsed JSON of a run folder.

    Raises:
        UsageError: the content is no mapping of names to plain values.
    """
    if not isinstance(content, Mapping) or not all(
        isinstance(value, (str, int, float, bool)) for value in content.values()
    ):
        raise UsageError("an environment is a mapping of names to numbers, words and switches")
    return {str(name): value for name, value in content.items()}
