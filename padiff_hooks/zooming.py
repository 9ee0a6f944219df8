"""Requests to both recorders for full tensors of the layers around a sketch that is beyond its limit."""

from __future__ import annotations

from padiff.dump.prepare import Zoom, ask
from padiff.dump.store import AnyPath
from padiff.records import LOOP, Both, Diff, Report, Run

# Number of layers before and after the differing layer that are requested, too.
_AROUND = 2
# Largest number of layers before the differing layer that are requested.
_MOST_LAYERS = 24
# Upper estimate of the number of due steps that a recorder is ahead of its written steps.
_AHEAD = 4
#: Largest number of requests in one comparison: each costs the recorders a step of full tensors.
MOST = 8


class Zooming:
    """Sender of requests for full tensors of the layers around a first diff that was judged from sketches.

    There is at most one request for each place. A new request waits until the steps of the last one are recorded.

    Args:
        paths: the two run folders.
    """

    def __init__(self, paths: Both[AnyPath]) -> None:
        self._paths = paths
        self._places: set[tuple[str, str]] = set()
        self._until = -1

    def request(self, report: Report, runs: Both[Run]) -> Zoom | None:
        """Request full tensors if a step's report shows a new place to zoom into.

        Returns the candidate's request, or the reference's if the candidate was not asked, or `None`.
        """
        step = report.coverage.steps[0]
        first = next((diff for diff in report.diffs if not diff.passed), None)
        if first is None or not report.coverage.sketched or step <= self._until or len(self._places) >= MOST:
            return None
        if first.figures is not None and first.figures.basis == "tensors" and first.pair.anchor.layer != LOOP:
            return None  # the tensors are recorded already
        place = (first.pair.anchor.layer, first.pair.stage)
        if place in self._places:
            return None
        self._places.add(place)
        from_step = _ahead(runs)
        request = None
        for path, run, layers in zip(self._paths, runs, _around(report, first)):
            if layers and not run.finished():
                zoom = Zoom(from_step, frozenset(layers))
                request = zoom if ask(path, zoom) else request
        self._until = from_step if request is not None else self._until
        return request


def _block(layers: list[Both[str]], place: int, paths_of_diff: Both[str]) -> list[Both[str]]:
    """Return the layers of the differing block up to the diff, and the layer before them.

    The block is the differing layer if it has layers inside, or else the layer's parent. The layer before the block
    gives the block's inputs (of a residual, for example), which are needed to compute the block again.

    Args:
        layers: paths of all layers on both sides, in execution order.
        place: index of the differing layer.
        paths_of_diff: paths of the differing layer.
    """
    inside = [
        k for k, paths in enumerate(layers[:place]) if any(p.startswith(f"{at}.") for p, at in paths.zip(paths_of_diff))
    ]
    if not inside:
        # A layer without layers inside is the framework's: the user's code is in its parent.
        holders = paths_of_diff.map(lambda path: path.rpartition(".")[0])
        inside = [
            k
            for k, paths in enumerate(layers[:place])
            if any(p.startswith(f"{at}." if at else "") for p, at in paths.zip(holders))
        ]
    first = max(min(inside, default=place) - 1, place - _MOST_LAYERS, 0)
    return layers[first:place]


def _ahead(runs: Both[Run]) -> int:
    """Return the number of a step that neither recorder has begun yet, estimated from the written steps."""
    numbers = [run.numbers() for run in runs if not run.finished()]
    last = max((n[-1] for n in numbers if n), default=0)
    apart = max((n[-1] - n[-2] for n in numbers if len(n) > 1), default=1)
    return last + _AHEAD * apart


def _around(report: Report, first: Diff) -> Both[set[str]]:
    """Return the paths on both sides of the differing layer, its parents, and the layers that ran around it."""
    forward = [d.pair for d in report.diffs if d.pair.stage == "forward"]
    layers = list(
        dict.fromkeys(Both(p.reference.layer, p.candidate.layer) for p in forward if p.reference and p.candidate)
    )
    paths_of_diff = Both(first.pair.reference, first.pair.candidate).map(
        lambda record: record.layer if record else LOOP
    )
    here = [k for k, paths in enumerate(layers) if any(path == at for path, at in paths.zip(paths_of_diff))]
    place = here[0] if here else len(layers) - 1  # for the loss: the last layer
    above = [paths for paths in layers if any(at.startswith(f"{path}.") for path, at in paths.zip(paths_of_diff))]
    nearby = [
        *layers[max(0, place - _AROUND) : place + _AROUND + 1],
        *_block(layers, place, paths_of_diff),
        *above,
        paths_of_diff,
    ]
    return Both({paths.reference for paths in nearby} - {LOOP}, {paths.candidate for paths in nearby} - {LOOP})
