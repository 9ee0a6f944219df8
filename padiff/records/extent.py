"""How far a diff reaches, as a value."""

from __future__ import annotations

from dataclasses import dataclass

#: What the tensors of a stage are called, where there are several.
NOUNS = {
    "input": "inputs",
    "weight": "weights and buffers",
    "forward": "outputs",
    "loss": "losses",
    "backward": "activation gradients",
    "grad": "gradients",
    "update": "updates",
}
#: The stages in which a tensor's place in the order says what it is made of.
CAUSAL = frozenset({"forward", "backward"})


@dataclass(frozen=True, slots=True)
class Within:
    """Which part of a tensor holds all of its error that is beyond the limit.

    Attributes:
        what: ``sample``, ``row``, ``column``, ``channel``, ``element``, or ``index of axis 2``.
        indices: which ones; of elements none are named.
        count: how many they are.
        size: how many there are.
    """

    what: str
    indices: tuple[int, ...]
    count: int
    size: int

    def __str__(self) -> str:
        if not self.indices:
            return f"only in {self.count:,} of its {self.size:,} {self.what}s"
        named = ", ".join(map(str, self.indices))
        noun, _, rest = self.what.partition(" ")
        plural = {"index": "indices"}.get(noun, f"{noun}s") if self.count > 1 else noun
        return f"only in {plural} {named}{f' {rest}' if rest else ''} of {self.size:,}"


@dataclass(frozen=True, slots=True)
class Extent:
    """How far a first diff reaches: within its tensor, over its step, and back in time.

    Attributes:
        stage: the diff's stage.
        within: the part of the tensor that differs; `None` where it is all of it, or not known.
        differing, others: how many tensors of the same stage and step differ besides it, of how many: of outputs and
            activation gradients those after it, else all others.
        only: the kinds of parameters that differ (``norms``, ``biases``, ``matrices``), where they are all of these
            kinds and none of another.
        agreed: how far off it was at most in the steps compared before (relative L2); `None` without such a step.
        steps: how many steps these are.
    """

    stage: str
    within: Within | None = None
    differing: int = 0
    others: int = 0
    only: tuple[str, ...] = ()
    agreed: float | None = None
    steps: int = 0

    @property
    def text(self) -> str:
        """All of it, a sentence each; empty where there is nothing to say."""
        found = [f"It differs {self.within}."] if self.within is not None else []
        if self.others:
            found.append(f"{self._spread()}.")
        if self.agreed is not None:
            steps = "step" if self.steps == 1 else f"{self.steps:,} steps"
            found.append(
                f"In the {steps} compared before it agreed {f'to {self.agreed:.2g}' if self.agreed else 'exactly'}."
            )
        return " ".join(found)

    def _spread(self) -> str:
        """Which other tensors of the step differ."""
        noun, every = NOUNS[self.stage], self.differing == self.others
        if self.only:
            return f"Only {' and '.join(self.only)} differ ({self.differing + 1:,} of {self.others + 1:,} {noun})"
        if self.stage not in CAUSAL:
            return (
                f"{_all(self.others + 1) if every else f'{self.differing + 1:,} of {self.others + 1:,}'} {noun} differ"
            )
        if self.others == 1:
            return f"The {noun[:-1]} after it {'differs too' if every else 'does not differ'}"
        if not self.differing:
            return f"None of the {self.others:,} {noun} after it differs"
        return (
            f"{_all(self.others) if every else f'{self.differing:,} of the {self.others:,}'} {noun} after it differ too"
        )


def _all(count: int) -> str:
    return "Both" if count == 2 else f"All {count:,}"
