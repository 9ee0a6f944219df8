"""What TensorBoard's tags are called, and which of them are written.

TensorBoard sorts groups and tags by their names. ``0_verdict`` is the first group: at most ten cards, which say whether
the runs part and where. The groups after it are one figure of one stage each, with a card for each layer, which bears
its number in execution order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from padiff.errors import UsageError
from padiff.records import LOOP, STAGES

#: What ``tags`` may be: a curve for each layer and stage; for the ten worst layers of each stage only; or all that is
#: known, norms of each run and maxima too.
TAGS = LAYERS, WORST, ALL = ("layers", "worst", "all")
VERDICT = "0_verdict"
#: Cards of the group `VERDICT`, at most.
CARDS = 10
LOSS, RATE = f"{VERDICT}/loss", f"{VERDICT}/learning_rate"
PICTURE, FIRST_DIFF = f"{VERDICT}/heat_map", f"{VERDICT}/first_diff"
#: Layers of a stage that have curves with ``tags="worst"``.
KEPT = 10
# Of these so many are kept for layers that go beyond their limits later.
_SPARE = 5


def check_tags(tags: object, name: str = "tags") -> str:
    """The tags that were asked for.

    Raises:
        UsageError: it is none of `TAGS`.
    """
    if not isinstance(tags, str) or tags not in TAGS:
        said = ", ".join(f'"{one}"' for one in TAGS)
        raise UsageError(f"{name} says which curves go to TensorBoard, one of {said}; got {tags!r}")
    return tags


def times_tag(stage: str) -> str:
    """The tag of how many times the allowed a stage's worst diff is."""
    return f"{VERDICT}/times_allowed/{stage}"


class Numbered:
    """Layers, numbered from 0 as they are run: as the first step's forward calls end, then those without an output."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def learn(self, found: Iterable[tuple[str, str]]) -> None:
        """Number the layers of a step's records that have no number: stage and layer of each, in their order."""
        some = list(found)
        if all(layer in self._numbers for _, layer in some):
            return
        for _, layer in sorted(some, key=lambda one: one[0] != "forward"):
            if layer != LOOP:
                self._numbers.setdefault(layer, len(self._numbers))

    @property
    def layers(self) -> Sequence[str]:
        """All layers, in their order."""
        return list(self._numbers)

    def name(self, layer: str) -> str:
        """A layer's name in a tag."""
        number = self._numbers.get(layer)
        return layer if number is None else f"{number:03d} {layer}"


class Stages:
    """The stages that have a card of their own.

    Beside loss, learning rate, picture and text there is room for six of seven: what is beyond its limit comes first,
    what is bit-equal last, as inputs mostly are. A stage without a card counts in the next one's.
    """

    def __init__(self) -> None:
        self._cards: list[str] = []

    def scalars(self, times: dict[str, float]) -> list[tuple[str, float]]:
        """The scalars of a step: how many times the allowed the worst diff of each stage is."""
        for stage in sorted(times, key=lambda one: (times[one] <= 1, not times[one], one == "input")):
            if stage not in self._cards and len(self._cards) < CARDS - len((LOSS, RATE, PICTURE, FIRST_DIFF)):
                self._cards.append(stage)
        shown: dict[str, float] = {}
        for stage, value in times.items():
            later = [one for one in STAGES[STAGES.index(stage) :] if one in self._cards] or self._cards
            shown[later[0]] = max(shown.get(later[0], 0.0), value)
        return [(times_tag(stage), value) for stage, value in shown.items()]


class Worst:
    """The layers that have curves with ``tags="worst"``: of each stage the worst of the first step, then those that go
    beyond their limits first, ten in all."""

    def __init__(self) -> None:
        self._kept: dict[str, list[str]] = {}

    def keep(self, stage: str, layers: Iterable[str]) -> None:
        """Layers that have curves since an earlier process."""
        self._kept.setdefault(stage, []).extend(layers)

    def choose(self, times: dict[tuple[str, str], float]) -> dict[str, list[str]]:
        """Choose by how many times the allowed the layers of each stage are; returns what is new, by stage."""
        new: dict[str, list[str]] = {}
        for stage in dict.fromkeys(stage for stage, _ in times):
            kept = self._kept.setdefault(stage, [])
            free = [layer for one, layer in times if one == stage and layer not in kept]
            free.sort(key=lambda layer: -times[stage, layer])
            beyond = [layer for layer in free if times[stage, layer] > 1]
            calm = [layer for layer in free if times[stage, layer] <= 1][: max(KEPT - _SPARE - len(beyond), 0)]
            found = [*beyond, *([] if kept else calm)][: KEPT - len(kept)]
            if found:
                kept.extend(found)
                new[stage] = found
        return new

    def __contains__(self, place: tuple[str, str]) -> bool:
        """Whether a layer of a stage (stage, layer) has a curve."""
        stage, layer = place
        return layer in self._kept.get(stage, ())
