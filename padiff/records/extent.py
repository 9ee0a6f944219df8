"""Extent of a first diff: within its tensor, over its step, and over earlier steps."""

from __future__ import annotations

from dataclasses import dataclass

#: Plural nouns for the tensors of each stage.
NOUNS = {
    "input": "inputs",
    "weight": "weights and buffers",
    "forward": "outputs",
    "loss": "losses",
    "backward": "activation gradients",
    "grad": "gradients",
    "update": "updates",
}
#: Stages in which each tensor is computed from those before it in the order.
CAUSAL = frozenset({"forward", "backward"})


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """The part of a tensor that holds all of its error beyond the limit.

    Attributes:
        what: noun of the part: ``sample``, ``row``, ``column``, ``channel``, ``element``, or ``index of axis 2``.
        indices: the affected indices; empty for elements.
        count: number of affected indices.
        size: number of all indices.
    """

    what: str
    indices: tuple[int, ...]
    count: int
    size: int

    def __str__(self) -> str:
        if not self.indices:
            return f"only in {self.count:,} of its {self.size:,} {self.what}s"
        named = ", ".join(map(str, self.indices))
        noun, _, axis = self.what.partition(" ")
        plural = {"index": "indices"}.get(noun, f"{noun}s") if self.count > 1 else noun
        return f"only in {plural} {named}{f' {axis}' if axis else ''} of {self.size:,}"


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of a first diff: within its tensor, over its step, and over earlier steps.

    Attributes:
        stage: the diff's stage.
        within: the part of the tensor that differs; `None` if all of it differs, or if not known.
        differing, others: number of other tensors of the same stage and step that differ, and number of all others. For
            outputs and activation gradients only later ones count.
        only: the kinds of parameters that differ (``norms``, ``biases``, ``matrices``), if all parameters of these
            kinds differ and none of another kind.
        agreed: largest relative L2 error of the same tensor in the steps compared before; `None` without such a step.
        steps: number of the steps compared before.
    """

    stage: str
    within: TensorExtent | None = None
    differing: int = 0
    others: int = 0
    only: tuple[str, ...] = ()
    agreed: float | None = None
    steps: int = 0

    @property
    def text(self) -> str:
        """Return the extent in sentences; empty if nothing is known."""
        sentences = [f"It differs {self.within}."] if self.within is not None else []
        if self.others:
            sentences.append(f"{self._spread()}.")
        if self.agreed is not None:
            steps = "step" if self.steps == 1 else f"{self.steps:,} steps"
            sentences.append(
                f"In the {steps} compared before it agreed {f'to {self.agreed:.2g}' if self.agreed else 'exactly'}."
            )
        return " ".join(sentences)

    def _spread(self) -> str:
        """Return a clause that says which other tensors of the step differ."""
        noun, every = NOUNS[self.stage], self.differing == self.others
        if self.only:
            return f"{self.differing + 1:,} of {self.others + 1:,} {noun} differ: {' and '.join(self.only)}"
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
