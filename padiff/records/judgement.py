"""Judgements and problems of diffs: the judged figure, its limit, and the rule that set the limit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from padiff.records.frozen import fast_frozen_init


class Figure(Enum):
    """A quantity that is compared with a limit; the value is its name in reports."""

    REL_L2 = "rel_l2"
    L2 = "l2"
    MAX_ABS = "max_abs"
    MEAN_ABS = "mean_abs"
    #: Number of elements beyond an elementwise tolerance.
    MISMATCHED = "elements beyond"
    #: Without the few largest elements, or the worst samples.
    BULK = "rel_l2 of the bulk"
    #: Without elements whose gradients are rounding noise.
    WITHOUT_NOISE = "rel_l2 where gradients are no noise"
    #: Without elements that are off by a unit in the last place of their weight.
    BEYOND_LAST_PLACE = "rel_l2 beyond the last place of the weights"
    #: Relative difference in size between the candidate's tensor and the reference's.
    RATIO = "share by which it is larger or smaller"
    #: Shift of the mean, as a share of the root mean square.
    MEAN = "shift of the mean"
    #: For a gradient whose true value is zero, and that a fixed tolerance accepts.
    AROUND_ZERO = "rel_l2 of rounding noise around zero"
    #: Without the rows (tokens, samples) that chose otherwise on the two sides.
    OTHER_ROWS = "rel_l2 of the rows that chose alike"

    def __str__(self) -> str:
        return self.value

    # Sufficient, as a member equals only itself. Enum's own hash is computed in Python, several times for each diff.
    __hash__ = object.__hash__


#: Multiple of a measured floor above which a diff that passes is graded suspicious instead of noise. This value was
#: measured: see `padiff.compare.judge.limits.FLOORS`.
SUSPICIOUS = 10.0


class Grade(Enum):
    """Grade of a diff."""

    EQUAL = "equal to the bit"
    NOISE = "noise"
    #: Allowed, although larger than the measured rounding error.
    SUSPICIOUS = "suspicious"
    WRONG = "wrong"

    def __str__(self) -> str:
        return self.value


class Rule(Enum):
    """The rule that set a limit; the value gives the reason for the limit."""

    TOLERANCE = "a fixed tolerance was asked for"
    EQUAL = "integers and booleans have to be equal"
    ROUNDING = "rounding noise of the coarsest dtype up to this stage"
    SCALAR = "rounding noise of a scalar"
    INHERITED = "the step starts from weights or inputs that already differ, within their limits"
    OUTPUTS = "the outputs that enter the loss differ, within their limits"
    HANDED_ON = "the outputs before this one differ, within their limits"
    ACTIVATION = "the input of the activation differs, within its limit"
    HANDED_BACK = "rounding moved values across a kink (ReLU, max pooling), which changes this gradient"
    GROWN = "the same stage differed in the previous step, within its limit"
    MADE_OF = "the tensors that this gradient is computed from differ, within their limits"
    LAYER = "this gradient is rounding noise beside the layer's largest gradient"
    OF_GRADIENT = "the gradient or the optimizer's state differs, within its limit"
    NOISE_DRIVEN = "the gradient is rounding noise, so that its update may have any direction"
    UPDATES = "the updates of previous steps differ, within their limits"
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
    AVERAGE = "an average of another weight follows it by the same share"
    CHOICES = "rows (tokens, samples) choose otherwise, by scores that agree within rounding"
    WRITTEN_OTHERWISE = "losses and gradients agree: the loss is the same, written in another way"

    def __str__(self) -> str:
        return self.value

    __hash__ = object.__hash__  # see `Figure`


@fast_frozen_init
@dataclass(frozen=True, slots=True)
class Judgement:
    """A figure compared with its limit.

    Attributes:
        figure: the judged quantity.
        value: value of the figure.
        limit: largest allowed value.
        rule: the rule that set the limit.
    """

    figure: Figure
    value: float
    limit: float
    rule: Rule

    @property
    def excess(self) -> float:
        """Return the value as a multiple of its limit; infinity if the limit is 0 and the value is not."""
        if not self.limit:
            return 0.0 if self.value == 0 else float("inf")
        return self.value / self.limit


class Kind(Enum):
    """A reason why two tensors cannot be compared, or are wrong at any tolerance."""

    MISSING = "a side is missing"
    SHAPES = "the shapes differ"
    NONFINITE = "NaN or infinite on one side only"
    #: For runs with different numbers of processes.
    OWN_SAMPLES = "each process saw samples of its own"
    UNMEASURABLE = "a sketch does not tell"


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why two tensors could not be compared or are wrong at any tolerance; the text states it in words."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text
