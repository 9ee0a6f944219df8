"""Creation of recorders: plain ones, or the doctor's in a process started by `padiff doctor`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from padiff.dump.remote_path import AnyPath
from padiff.errors import PadiffError
from padiff.recorder.doctor_recorder import VARIABLE, DoctorRecorder
from padiff.recorder.failures import Failures
from padiff.recorder.options import Identity, RecordOptions, Scope, Target, check_names, group
from padiff.recorder.session import InertRecorder, Recorder
from padiff.system.guard import Failure
from padiff.system.switches import say

if TYPE_CHECKING:
    from typing_extensions import Unpack


def record(model: Any, dir_path: str | AnyPath | None = None, **options: Unpack[RecordOptions]) -> Recorder:
    """Record a training loop: ``with padiff.record(model, "runs/torch", optimizer=optimizer) as rec: ...``

    Args:
        model: a torch Module, a paddle Layer, or the result of ``create_model``, whose lists and layer map are the
            defaults of this call. Several models of one loop are a mapping of names to models.
        dir_path: the run folder, or a location in a store (``s3://bucket/run``); None keeps the steps in memory, as
            ``rec.run``.
        options: see `padiff.recorder.options.RecordOptions`.

    Raises:
        UsageError: the model belongs to neither framework, an item of a list matches no layer, or an argument is wrong.
        OptionError: an option does not exist.
    """
    try:
        check_names(options, RecordOptions)
        return recorder_of(model, dir_path, **options)
    except PadiffError:
        raise
    except Exception as error:
        if options.get("on_error") == "raise":
            raise
        say(Failures().add(None, Failure.from_error(error)), alarming=True)
        return InertRecorder(options.get("start_step", 0))


def recorder_of(
    model: Any, dir_path: str | AnyPath | None = None, replay_of: str | None = None, **options: Any
) -> Recorder:
    """Return a recorder; see `record`.

    Args:
        replay_of: identity of the run whose packed steps are replayed; None for a training.
    """
    # A replay always gets a plain recorder: the doctor's would write the records to another folder.
    if replay_of is None:
        for leave in list(Recorder.leaving):
            leave()
    else:
        options.setdefault("detail", "full")  # a replayed step is compared in full, one step at a time
    kind = DoctorRecorder if VARIABLE in os.environ and replay_of is None else Recorder
    target = group(Target, options, dir_path=dir_path)
    return kind(model, group(Scope, options), target, group(Identity, options), replay_of)
