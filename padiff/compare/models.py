"""Both layer trees and their alignment, as a report holds them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from padiff.align import Alignment
from padiff.compare.declared.optimizers import groups_of
from padiff.errors import RunFolderError
from padiff.records import Both, Models, Partners, RunInfo, Step
from padiff.system.frames import Frame

#: Call stacks of layers, by path.
Stacks = Mapping[str, tuple[Frame, ...]]


def stacks_of(step: Step) -> Stacks:
    """Return the stack of each layer's first call, as far as the step's trace holds stacks."""
    stacks: dict[str, tuple[Frame, ...]] = {}
    if step.trace.functions:
        with contextlib.suppress(RunFolderError):  # a damaged trace: the judgement does not need the trace
            for call in step.trace.calls:
                if call.stack and not call.function:
                    stacks.setdefault(call.layer, call.stack)
    return stacks


def models_of(infos: Both[RunInfo], alignment: Alignment, stacks: Both[Stacks]) -> Models:
    """Return both layer trees, and a pair for each two aligned layers.

    Args:
        stacks: call stacks of the layers.
    """
    partners = [
        Partners(pair.reference.path, pair.candidate.path, pair.reason, pair.confidence) for pair in alignment.pairs
    ]
    partners += [
        Partners(reference.path, candidate.path, split.reason, split.confidence)
        for split in alignment.splits
        for reference in split.reference
        for candidate in split.candidate
    ]
    return Models(
        layers=infos.map(lambda info: info.layers),
        frameworks=infos.map(lambda info: f"{info.framework} {info.framework_version}".strip()),
        partners=tuple(partners),
        stacks=stacks,
        lines=infos.map(lambda info: info.lines),
        files=infos.map(lambda info: info.files),
        optimized=infos.map(lambda info: groups_of(info.settings)),
        command=str(infos.candidate.recording.get("command", "")),
    )
