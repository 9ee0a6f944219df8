"""What was judged of a diff, by which rule, and what is wrong with it whatever the rule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from padiff.records.frozen import quickly_made


class Figure(Enum):
    """What is held against a limit; the value is what reports call it."""

    REL_L2 = "rel_l2"
    L2 = "l2"
    MAX_ABS = "max_abs"
    MEAN_ABS = "mean_abs"
    #: How many elements are beyond an elementwise tolerance.
    MISMATCHED = "elements beyond"
    #: Without the few largest elements, or the worst samples.
    BULK = "rel_l2 of the bulk"
    #: Without elements whose gradients are rounding noise.
    WITHOUT_NOISE = "rel_l2 where gradients are no noise"
    #: Without elements that are off by a unit in the last place of their weight.
    BEYOND_LAST_PLACE = "rel_l2 beyond the last place of the weights"
    #: By how much of itself a tensor is larger, or smaller, than the reference's.
    RATIO = "share by which it is larger or smaller"
    #: Of a gradient whose true value is zero, which a fixed tolerance lets pass.
    AROUND_ZERO = "rel_l2 of rounding noise around zero"

    def __str__(self) -> str:
        return self.value

    # As a member is equal to itself alone; enum's hashes its name, in Python, several times for each diff.
    __hash__ = object.__hash__


#: Multiples of a measured floor from which on what passes is not taken for noise. Measured: see
#: `padiff.compare.judge.limits.FLOORS`.
SUSPICIOUS = 10.0


class Grade(Enum):
    """What a diff is."""

    EQUAL = "equal to the bit"
    NOISE = "noise"
    #: Allowed, though beyond what rounding was measured to make.
    SUSPICIOUS = "suspicious"
    WRONG = "wrong"

    def __str__(self) -> str:
        return self.value


class Rule(Enum):
    """Which rule allowed a limit; the value says why so much is right."""

    TOLERANCE = "a fixed tolerance was asked for"
    EQUAL = "integers and booleans have to be equal"
    ROUNDING = "rounding noise of the coarsest dtype up to this stage"
    SCALAR = "rounding noise of a scalar"
    INHERITED = "the weights or inputs that the step starts from differ already, by no more than was allowed"
    OUTPUTS = "the outputs that the loss is made of differ, by no more than was allowed"
    HANDED_ON = "the outputs before it differ, by no more than was allowed"
    ACTIVATION = "what goes into the activation differs, by no more than was allowed"
    HANDED_BACK = "rounding moved values across a kink (ReLU, max pooling), and this gradient is made of theirs"
    GROWN = "the same stage differed in the step before, by no more than was allowed"
    MADE_OF = "what the gradient is made of differs, by no more than was allowed"
    LAYER = "the layer's largest gradient, compared with which this one is rounding noise"
    OF_GRADIENT = "the gradient, or the optimizer's state, differs by no more than was allowed"
    NOISE_DRIVEN = "the gradient is rounding noise, so that its update may have any direction"
    UPDATES = "the updates of the steps before differ, by no more than was allowed"
    DRIFT = "steps before this one are not known: weights drift by a share of themselves, or of their updates, in each"
    GROUPS = "each parameter is stepped with the same rate: the groups stand in another order"
    STATISTICS = "running statistics follow the outputs; torch uses the unbiased variance, paddle the biased one"
    ELEMENTS = "all of it is in elements whose gradients are rounding noise"
    LAST_PLACE = "the update is a few units in the last place of the weight, which rounding moves it by"
    WRITTEN = "a weight has to be the weight of the step before plus its update: nothing else writes to it"
    SYSTEMATIC = "many tensors of the stage are off alike, which rounding never is"
    MEASURED = "measured: n runs moved by units in the last place"
    AROUND_ZERO = "the true gradient is zero, and what was computed is rounding noise"
    PREPARED = "loss functions are called with the same labels: one side prepares them in the model, one in the data"
    WRITTEN_OTHERWISE = "losses and gradients agree: the loss is the same, written in another way"

    def __str__(self) -> str:
        return self.value

    __hash__ = object.__hash__  # see `Figure`


@quickly_made
@dataclass(frozen=True, slots=True)
class Judgement:
    """A figure, held against its limit.

    Attributes:
        figure: what was judged.
        value: how large it is.
        limit: how large it may be.
        rule: which rule allows that.
    """

    figure: Figure
    value: float
    limit: float
    rule: Rule

    @property
    def excess(self) -> float:
        """The value as a multiple of its limit; infinite where the limit is 0 and the value is not."""
        if not self.limit:
            return 0.0 if self.value == 0 else float("inf")
        return self.value / self.limit


class Kind(Enum):
    """What keeps two tensors from being compared, or is wrong with them whatever the tolerance."""

    MISSING = "a side is missing"
    SHAPES = "the shapes differ"
    NONFINITE = "NaN or infinite on one side only"
    #: Of runs with different numbers of processes.
    OWN_SAMPLES = "each process saw samples of its own"
    UNMEASURABLE = "a sketch does not tell"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why two tensors could not be compared, or are wrong whatever the tolerance; its text says it in words."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text
