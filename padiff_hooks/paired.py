"""Two run folders that may still grow, compared as steps arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from padiff.compare import Policy, RunComparison
from padiff.dump import open_run
from padiff.dump.format import RUN_FILE
from padiff.dump.zoom import Zoom
from padiff.errors import RunFolderError
from padiff.layer_map import LayerMap
from padiff.records import Report, Run
from padiff_hooks.zooming import Zooming


class PairedRuns:
    """Compares each step of two runs once, as soon as both sides of it exist.

    Either run may start later, pause, or end early.

    Args:
        reference, candidate: run folders; they need not exist yet.
        layer_map: layers that answer to each other, as `padiff.layer_map.LayerMap.of` takes them.
        policy: when a diff passes. Default: `padiff.NoisePolicy`.
        done: steps that were compared before (a restart).
        zoom: whether recorders that still record sketches are asked for full tensors where one is beyond its limit.

    Attributes:
        asked: what the last report made the recorders be asked for, or `None`.
    """

    def __init__(
        self,
        reference: str | Path,
        candidate: str | Path,
        *,
        layer_map: LayerMap | Mapping[Any, Any] | Iterable[Any] | str | None = None,
        policy: Policy | None = None,
        done: Collection[int] = (),
        zoom: bool = True,
    ) -> None:
        self._paths = (Path(reference), Path(candidate))
        self._map = LayerMap.of(layer_map)
        self._policy = policy
        self._done = set(done)
        self._comparison: RunComparison | None = None
        self._zooming = Zooming(self._paths) if zoom else None
        self.asked: Zoom | None = None

    @property
    def started(self) -> tuple[bool, bool]:
        """Which of the two runs is there."""
        return (self._paths[0] / RUN_FILE).exists(), (self._paths[1] / RUN_FILE).exists()

    @property
    def runs(self) -> tuple[Run, Run] | None:
        """The two runs, once both are there."""
        comparison = self._opened()
        return (comparison.reference, comparison.candidate) if comparison is not None else None

    def poll(self) -> Iterator[Report]:
        """Yield a report for each step that both runs have by now and that was not compared before.

        Raises:
            RunFolderError: a step can't be read.
            UsageError: the layer map does not fit the runs.
        """
        comparison = self._opened()
        if comparison is None:
            return
        for number in comparison.common():
            if number not in self._done:
                try:
                    report = comparison.compare(number)
                except RunFolderError:
                    # A recorder that has to stay within max_bytes may take a step away while it is being read.
                    if number in comparison.common():
                        raise
                    continue
                self._done.add(number)
                if self._zooming is not None:
                    self.asked = self._zooming.look(report, (comparison.reference, comparison.candidate))
                yield report

    def finished(self) -> bool:
        """Whether both runs have ended and every common step is compared."""
        comparison = self._opened()
        if comparison is None or not (comparison.reference.finished() and comparison.candidate.finished()):
            return False
        return all(number in self._done for number in comparison.common())

    def _opened(self) -> RunComparison | None:
        if self._comparison is None and all(self.started):
            runs = [open_run(path) for path in self._paths]
            self._comparison = RunComparison(runs[0], runs[1], self._map, self._policy)
        return self._comparison
