"""How far the reference's own training moved in the compared steps."""

from __future__ import annotations

from dataclasses import dataclass

#: Multiple of the limits that weights have to move by, so that equal weights show something. Chosen: a fault of a tenth
#: of the movement is then beyond the limits.
ENOUGH = 10.0


@dataclass(frozen=True, slots=True)
class Movement:
    """How far the reference's weights and loss moved in the compared steps.

    A match of runs that hardly moved shows little: whatever is wrong with their gradients and updates stays below the
    limits.

    Attributes:
        weights: ``||w_last - w_first|| / ||w_first||`` over the trained parameters.
        limit: the smallest part of the movement that would show if it were wrong, in the same unit: the median limit of
            these parameters or of their updates in the last compared step, whichever is smaller.
        losses: the loss of the first and of the last compared step; `None` if it was not recorded in both.
    """

    weights: float
    limit: float
    losses: tuple[float, float] | None = None

    @property
    def enough(self) -> bool:
        """Return True if the weights moved far enough to show a fault."""
        return self.weights > 0 and self.weights >= ENOUGH * self.limit

    @property
    def sentence(self) -> str:
        """Return the movement in words."""
        text = f"the reference's weights by {self.weights:{'.2%' if self.weights < 0.01 else '.0%'}}"
        if self.losses is not None:
            text += ", its loss from {:.4g} to {:.4g}".format(*self.losses)
        if self.enough:
            return f"{text}: enough to show a fault"
        return f"{text}: less than {ENOUGH:.0f} times the {self.limit:.1g} allowed, so that the match shows little"
