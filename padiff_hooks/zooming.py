"""Zooming in: where a sketch is beyond its limit, both recorders are asked for full tensors around it."""

from __future__ import annotations

from padiff.dump.remote_path import AnyPath
from padiff.dump.zoom import Zoom, ask
from padiff.records import LOOP, Both, Diff, Report, Run

# Layers that ran so many places before or after the one that differs are looked at, too.
_AROUND = 2
# Layers before the one that differs that are looked at, at most.
_MOST_LAYERS = 24
# Due steps that a recorder may be ahead of what it has written, and then some.
_AHEAD = 4
#: Requests that are made in one comparison, at most: each costs the recorders a step of full tensors.
MOST = 8


class Zooming:
    """Asks for full tensors of the layers around a first diff that was judged from sketches.

    One request at a time, and one for each place: another one is made when the steps asked for are there.

    Args:
        paths: the two run folders.
    """

    def __init__(self, paths: Both[AnyPath]) -> None:
        self._paths = paths
        self._places: set[tuple[str, str]] = set()
        self._until = -1

    def look(self, report: Report, runs: Both[Run]) -> Zoom | None:
        """Ask, if a step's report gives reason to; returns what the candidate was asked for, or the reference."""
        step = report.coverage.steps[0]
        first = next((diff for diff in report.diffs if not diff.passed), None)
        if first is None or not report.coverage.sketched or step <= self._until or len(self._places) >= MOST:
            return None
        if first.figures is not None and first.figures.basis == "tensors" and first.pair.anchor.layer != LOOP:
            return None  # its tensors are there
        place = (first.pair.anchor.layer, first.pair.stage)
        if place in self._places:
            return None
        self._places.add(place)
        from_step = _ahead(runs)
        asked = None
        for path, run, layers in zip(self._paths, runs, _around(report, first)):
            if layers and not run.finished():
                zoom = Zoom(from_step, frozenset(layers))
                asked = zoom if ask(path, zoom) else asked
        self._until = from_step if asked is not None else self._until
        return asked


def _block(layers: list[Both[str]], place: int, own: Both[str]) -> list[Both[str]]:
    """The layers that the code runs which the diff may come from, up to its place, and the one before them: what goes
    into that code (a residual, say) is what it is computed again from.
    """
    inside = [k for k, paths in enumerate(layers[:place]) if any(p.startswith(f"{at}.") for p, at in paths.zip(own))]
    if not inside:
        # A layer of the framework: the code is of the layer that holds it.
        holders = own.map(lambda path: path.rpartition(".")[0])
        inside = [
            k
            for k, paths in enumerate(layers[:place])
            if any(p.startswith(f"{at}." if at else "") for p, at in paths.zip(holders))
        ]
    first = max(min(inside, default=place) - 1, place - _MOST_LAYERS, 0)
    return layers[first:place]


def _ahead(runs: Both[Run]) -> int:
    """A step that neither recorder has begun: those at work are as far as what they wrote, and a little further."""
    numbers = [run.numbers() for run in runs if not run.finished()]
    last = max((n[-1] for n in numbers if n), default=0)
    apart = max((n[-1] - n[-2] for n in numbers if len(n) > 1), default=1)
    return last + _AHEAD * apart


def _around(report: Report, first: Diff) -> Both[set[str]]:
    """Paths, on either side, of the layer that differs, of those that hold it, and of those that ran around it."""
    forward = [d.pair for d in report.diffs if d.pair.stage == "forward"]
    layers = list(
        dict.fromkeys(Both(p.reference.layer, p.candidate.layer) for p in forward if p.reference and p.candidate)
    )
    own = Both(first.pair.reference, first.pair.candidate).map(lambda record: record.layer if record else LOOP)
    here = [k for k, paths in enumerate(layers) if any(path == at for path, at in paths.zip(own))]
    place = here[0] if here else len(layers) - 1  # the loss: what comes last
    above = [paths for paths in layers if any(at.startswith(f"{path}.") for path, at in paths.zip(own))]
    found = [*layers[max(0, place - _AROUND) : place + _AROUND + 1], *_block(layers, place, own), *above, own]
    return Both({paths.reference for paths in found} - {LOOP}, {paths.candidate for paths in found} - {LOOP})
