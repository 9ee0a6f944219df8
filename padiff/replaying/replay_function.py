"""``replay``: repeat the packed steps of a run with another model."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from padiff.compare import Policy
from padiff.dump.local import run_folder
from padiff.dump.remote_path import AnyPath
from padiff.errors import UsageError
from padiff.frameworks import framework_of
from padiff.model.live_model import LiveModel
from padiff.replaying.checks import opened
from padiff.replaying.perturbation import RUNS
from padiff.replaying.session import Replay


def replay(
    reference: str | Path,
    model: Any,
    dir_path: str | AnyPath,
    *,
    optimizer: Any = None,
    layer_map: Any = None,
    steps: Container[int] | None = None,
    policy: Policy | None = None,
    existing: str = "error",
    partial: bool = False,
    floors: int | bool = False,
    float64: bool = False,
) -> Replay:
    """Repeat the packed steps of a run with another model, and compare each step by itself.

    ``with padiff.replay("runs/torch", net, "runs/paddle", optimizer=optimizer) as replay: for step in replay: ...``

    Before each step, the model's weights and buffers, the optimizer's state and learning rates, the batch and the
    dropout masks are set to the reference's. So no error is inherited from earlier steps, and the report judges each
    step at the tolerance of a first step. The reference's framework need not be installed; its folder is only read. At
    the end, also after an error, model and optimizer are restored, with gradients cleared.

    Args:
        reference: the reference run, recorded with ``replay_every_n_steps``.
        model: the candidate: a torch Module or a paddle Layer, in its training mode.
        dir_path: run folder for the candidate's records.
        optimizer: the candidate's optimizer, or several. Without one, only forward and backward are repeated.
        layer_map: pairs of layers, in the form that `compare_runs` accepts.
        steps: numbers of the packed steps to repeat. Default: all.
        policy: decides which diffs pass. Default: `NoisePolicy`.
        existing: handling of an existing run in ``dir_path``: ``"error"`` (default) or ``"overwrite"``.
        partial: True to copy all weights that fit, and name the others (a head that only one model has); False to
            refuse if some do not fit.
        floors: number of additional repetitions that measure rounding errors (`True`: 8), with weights and inputs
            perturbed by units in the last place. The loop receives each step that many times more, and the report uses
            the measured limits.
        float64: True to repeat each step in float64, which shows which of the two sides is closer to the exact result.

    Raises:
        RunFolderError: a folder can't be read, or written to.
        UsageError: a pack is missing or does not fit this model, or an argument is wrong.
    """
    folder = run_folder(dir_path, "dir_path")
    processes = framework_of(LiveModel.from_model(model).model).environment.distributed()
    packed = opened(reference, folder, steps, processes)
    if existing not in ("error", "overwrite"):
        raise UsageError(f"existing is 'error' or 'overwrite', got {existing!r}")
    runs = runs_of(floors)
    if processes[1] > 1 and (runs or float64):
        raise UsageError(
            f"floors and float64 are measured in one process, and this is one of {processes[1]}: leave them away here"
        )
    listed = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    return Replay(packed, model, folder, listed, layer_map, policy, existing, partial, runs, float64)


def runs_of(floors: Any) -> int:
    """Return the number of repetitions that measure floors; 0 for none.

    Raises:
        UsageError: the value is not a number of runs.
    """
    runs = RUNS if floors is True else 0 if floors is False else floors
    if not isinstance(runs, int) or runs < 0:
        raise UsageError(f"floors is True, False or a number of runs of at least 1, got {floors!r}")
    return runs
