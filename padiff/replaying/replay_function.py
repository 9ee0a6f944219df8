"""``replay``: the packed steps of a run again with another model, each from where the recorded run was."""

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
from padiff.replaying.moving import RUNS
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
    """Do the packed steps of a run again with another model, and compare each by itself.

    ``with padiff.replay("runs/torch", net, "runs/paddle", optimizer=optimizer) as replay: for step in replay: ...``
    Before each step, the model's weights and buffers, the optimizer's state and learning rates, the batch and what
    dropout drops are the reference's. So nothing is inherited from the steps before, and the report judges each at the
    tolerance of a first step. The reference's framework need not be installed; its folder is only read. Afterwards,
    also after an error, the model and the optimizer are what they were, with gradients cleared.

    Args:
        reference: the run to trust, recorded with ``replay_every_n_steps``.
        model: the candidate: a torch Module or a paddle Layer, in the mode that it trains in.
        dir_path: the run folder that the candidate is recorded into.
        optimizer: the candidate's optimizer, or several. Without one, forward and backward alone are done.
        layer_map: layers that answer to each other, as `compare_runs` takes them.
        steps: which of the packed steps. Default: all.
        policy: when a diff passes. Default: `NoisePolicy`.
        existing: what to do with a run that ``dir_path`` holds: ``"error"`` (default) or ``"overwrite"``.
        partial: carry all that fits, and leave and name the rest (a head that only one side has), instead of refusing
            where not everything fits.
        floors: whether to measure what rounding makes of each tensor: the loop is given each step so many times more
            (`True`: 8 times) with weights and inputs moved by units in the last place, and the report judges by it.
        float64: whether to do each step once more in float64, as the third side that tells which of the two is farther
            from it.

    Raises:
        RunFolderError: a folder can't be read, or written to.
        UsageError: the run has no such pack, or one that this model can't be given; an argument is wrong.
    """
    place = run_folder(dir_path, "dir_path")
    processes = framework_of(LiveModel.of(model).model).environment.distributed()
    found = opened(reference, place, steps, processes)
    if existing not in ("error", "overwrite"):
        raise UsageError(f"existing is 'error' or 'overwrite', got {existing!r}")
    runs = runs_of(floors)
    if processes[1] > 1 and (runs or float64):
        raise UsageError(
            f"floors and float64 are measured in one process, and this is one of {processes[1]}: leave them away here"
        )
    listed = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    return Replay(found, model, place, listed, layer_map, policy, existing, partial, runs, float64)


def runs_of(floors: Any) -> int:
    """How often a step is done once more to measure its floors; 0: they are not measured.

    Raises:
        UsageError: that is no number of runs.
    """
    runs = RUNS if floors is True else 0 if floors is False else floors
    if not isinstance(runs, int) or runs < 0:
        raise UsageError(f"floors is True, False or a number of runs of at least 1, got {floors!r}")
    return runs
