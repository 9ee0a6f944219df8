"""Names of TensorBoard tags, and the choice of the tags that are written.

TensorBoard sorts groups and tags by their names. ``0_verdict`` is the first group: at most ten cards, which show if and
where the runs differ. Each of the other groups shows one figure of one stage, with a card for each layer. The name of a
card begins with the layer's number in execution order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from padiff.errors import UsageError
from padiff.records import LOOP, STAGES

#: Values of ``tags``: a curve for each layer and stage; curves for the ten worst layers of each stage only; or all
#: scalars, with norms of each run and maxima.
TAGS = LAYERS, WORST, ALL = ("layers", "worst", "all")
VERDICT = "0_verdict"
#: Largest number of cards in the group `VERDICT`.
CARDS = 10
LOSS, RATE = f"{VERDICT}/loss", f"{VERDICT}/learning_rate"
PICTURE, FIRST_DIFF = f"{VERDICT}/heat_map", f"{VERDICT}/first_diff"
#: Number of layers of a stage that have curves with ``tags="worst"``.
KEPT = 10
# Number of these curves that are reserved for layers that exceed their limits later.
_SPARE = 5


def check_tags(tags: object) -> str:
    """Return a value of the option ``tags`` unchanged if it is valid.

    Raises:
        UsageError: the value is none of `TAGS`.
    """
    if not isinstance(tags, str) or tags not in TAGS:
        choices = ", ".join(f'"{choice}"' for choice in TAGS)
        raise UsageError(f"tags says which curves go to TensorBoard, one of {choices}; got {tags!r}")
    return tags


def times_tag(stage: str) -> str:
    """Return the tag of the ratio of a stage's worst diff to its limit."""
    return f"{VERDICT}/times_allowed/{stage}"


class Numbered:
    """Numbers of layers from 0: in the order in which their first forward calls end, then layers without an output."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def learn(self, found: Iterable[tuple[str, str]]) -> None:
        """Number the new layers of a step.

        Args:
            found: stage and layer of each record, in order.
        """
        places = list(found)
        if all(layer in self._numbers for _, layer in places):
            return
        for _, layer in sorted(places, key=lambda place: place[0] != "forward"):
            if layer != LOOP:
                self._numbers.setdefault(layer, len(self._numbers))

    @property
    def layers(self) -> Sequence[str]:
        """Return all layers in the order of their numbers."""
        return list(self._numbers)

    def tag(self, layer: str) -> str:
        """Return a layer's name in a tag, such as ``007 layer1.conv``."""
        number = self._numbers.get(layer)
        return layer if number is None else f"{number:03d} {layer}"


class Stages:
    """Stages that have a card.

    Loss, learning rate, picture and text leave room for six of seven stages. Stages beyond their limits come first,
    bit-equal stages (mostly the inputs) last. A stage without a card is counted in the card of the next stage.
    """

    def __init__(self) -> None:
        self._cards: list[str] = []

    def scalars(self, times: dict[str, float]) -> list[tuple[str, float]]:
        """Return the scalars of a step: the tag and the value of each card.

        Args:
            times: ratio of the worst diff to its limit, by stage.
        """
        for stage in sorted(times, key=lambda name: (times[name] <= 1, not times[name], name == "input")):
            if stage not in self._cards and len(self._cards) < CARDS - len((LOSS, RATE, PICTURE, FIRST_DIFF)):
                self._cards.append(stage)
        shown: dict[str, float] = {}
        for stage, value in times.items():
            later = [name for name in STAGES[STAGES.index(stage) :] if name in self._cards] or self._cards
            shown[later[0]] = max(shown.get(later[0], 0.0), value)
        return [(times_tag(stage), value) for stage, value in shown.items()]


class Worst:
    """Layers that have curves with ``tags="worst"``, ten for each stage.

    The first layers are the worst of the first step, the others the first that exceed their limits later.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[str]] = {}

    def keep(self, stage: str, layers: Iterable[str]) -> None:
        """Add layers that got curves in an earlier process."""
        self._kept.setdefault(stage, []).extend(layers)

    def choose(self, times: dict[tuple[str, str], float]) -> dict[str, list[str]]:
        """Choose the layers of each stage that get curves from a step on, and return the new ones by stage.

        Args:
            times: ratio of the layer's worst diff to its limit, by stage and layer.
        """
        new: dict[str, list[str]] = {}
        for stage in dict.fromkeys(stage for stage, _ in times):
            chosen = self._kept.setdefault(stage, [])
            free = [layer for layer_stage, layer in times if layer_stage == stage and layer not in chosen]
            free.sort(key=lambda layer: -times[stage, layer])
            beyond = [layer for layer in free if times[stage, layer] > 1]
            calm = [layer for layer in free if times[stage, layer] <= 1][: max(KEPT - _SPARE - len(beyond), 0)]
            additions = [*beyond, *([] if chosen else calm)][: KEPT - len(chosen)]
            if additions:
                chosen.extend(additions)
                new[stage] = additions
        return new

    def __contains__(self, place: tuple[str, str]) -> bool:
        """Return True if a place (stage, layer) has a curve."""
        stage, layer = place
        return layer in self._kept.get(stage, ())
