"""Numbers of the default policy, each with its reason and its source, and the limit that follows."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from padiff.model import equivalents
from padiff.records import STAGES, Rule

# -- rounding ------------------------------------------------------------------------------------------------------

# Relative L2 error that two correct implementations may show in a step that starts from equal weights, by the
# coarsest dtype of the step. Measured: benchmarks/noise.py, torch / paddle pairs, with a margin.
_ALLOWED = {
    #            input   weight  forward loss    backward grad   update
    "float64": (1e-12, 1e-12, 1e-10, 1e-10, 1e-9, 1e-9, 1e-6),
    "float32": (1e-6, 1e-6, 2e-5, 2e-5, 1e-2, 3e-2, 1e-2),
    "float16": (1e-3, 1e-3, 5e-3, 5e-3, 2e-2, 2e-2, 1e-1),
    "bfloat16": (8e-3, 8e-3, 4e-2, 4e-2, 1e-1, 1e-1, 3e-1),
}
_STAGE = {name: k for k, name in enumerate(STAGES)}
#: Dtypes, the finest first, with the relative error of rounding one number (half a unit in the last place).
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
COARSENESS = tuple(ROUNDING)
# Real dtypes of the halves of complex numbers.
_HALVES = {"complex64": "float32", "complex128": "float64"}
#: Relative error of a learning rate, which is a Python float on one side and a float32 on the other. Chosen: about ten
#: times float32's rounding.
SCALAR = 1e-6
#: Smallest scale by which a loss is judged, because a loss near zero is no scale for its own error. Chosen.
LOSS_SCALE = 1e-2
#: A loss may have this multiple of its outputs' error: of the norm of the error times the norm of the outputs'
#: gradient, or of the relative error. Measured: 0.5 and 0.6 times at most, in 2,100 steps of clean trainings.
LOSS_OF_OUTPUTS = 3.0

# -- error at the start of a step ----------------------------------------------------------------------------------

#: Factor from the relative error at the start of a step (weights, inputs) to the error allowed at each stage. Measured:
#: benchmarks/noise.py; deep nets without normalisations amplify most.
GAIN = {"input": 0.0, "weight": 0.0, "forward": 100.0, "loss": 100.0, "backward": 300.0, "grad": 300.0, "update": 300.0}
#: Relative error from which on a diff is reported, whatever the error at the start of the step. If layers amplify that
#: error, the share grows with the amplification. Chosen.
AT_MOST = {"forward": 0.1, "loss": 0.1, "backward": 0.3, "grad": 0.3, "update": 0.5}
#: If outputs differ by the share `AT_MOST`, gradients and updates may differ by this multiple of their shares; the
#: multiple is proportional to the outputs' error. Chosen.
FURTHER = 10.0
#: Largest relative error that is ever allowed: that of unrelated tensors of similar size. Gradients may also differ in
#: size, because a loss may be ten times smaller on one side, and a channel's gradient vanish on one. Chosen; a clean
#: pair of a training that amplifies rounding measured 40.
APART = {"forward": 3.0, "loss": 3.0, "backward": 100.0, "grad": 100.0, "update": 3.0}
#: Largest relative error of an input that drift explains, if the inputs were equal in the step before, and if not;
#: later ones grow as other stages do. Chosen: an input that another model makes follows its drift from rounding on,
#: and another batch, or the same prepared otherwise, differs by more.
OF_EQUAL_INPUTS, OF_UNEQUAL_INPUTS = 1e-3, 1e-2
#: Largest relative error of all weights together that counts as drift. Chosen.
MOST = 1e-2
#: Factor by which the amplification may exceed that of earlier steps. Chosen.
MORE_GAIN = 4.0
#: Factor by which the errors of a stage may exceed those in the step compared before, because training amplifies
#: rounding; and the largest relative error explained in this way: two gradients of a converged training may have only
#: their size in common. Chosen.
GROWTH, GROWN_AT_MOST = 5.0, 3.0
#: Most steps since the compared one before for which the common ratio of gradients may grow. Chosen.
MOST_GAP = 8
#: Largest factor, within a step, by which the errors of earlier outputs, amplified by later layers, raise the limit of
#: an output. Chosen.
DEEP = 20.0
#: In half precision, factor by which a layer may enlarge the error of outputs that is beyond `AT_MOST` already.
#: Measured: 1.2, of convolutions with BatchNorms, twenty deep.
SLOWLY = 1.5
#: Steepest slope of an activation: 1.13 for GELU and Swish, 1 for ReLU.
STEEPEST = 1.2

# -- kinks ---------------------------------------------------------------------------------------------------------

#: Factor from the root of the outputs' error to the error of gradients. If rounding moves a value across the kink of a
#: ReLU, or to another maximum of a pool, a whole element of the gradient changes. The share of such elements is
#: proportional to the outputs' error, their L2 error to its root. Measured: benchmarks/noise.py.
KINKS = {"backward": 4.0, "grad": 4.0}
#: An error lies in few elements if the bulk has at most the first share of the error, or if the ratio of the error's
#: mean to its root mean square is at most the second share of the tensor's ratio. Chosen.
FEW_LOOK, SPARSE = 0.5, 0.6
#: Largest relative error of a gradient, and of an update, whose bulk agrees. Chosen.
FEW_AT_MOST, FEW_OF_UPDATES = 0.5, 1.0
#: Additional relative error of an update for each step since the last compared one: in nets with ReLUs, rounding moves
#: a value across a kink in some step, and later steps drift apart. Measured: over gaps of 2, 3, 5, 10 and 15 steps,
#: weights of clean twins differed by 0.05, 0.12, 0.22, 2.7 and 4.5 updates more than the step before the gap explains.
UNSEEN_KINKS = 0.2

#: Allowed relative error of values that are multiplied by a parameter that has vanished into rounding noise (a layer
#: scale of 1e-6 after a first update of 1e-6): such values have only their size in common. Chosen.
MULTIPLIED = 2.0
#: Share of its initial norm below which a parameter has vanished. Measured: a ten-millionth after Adam's first step.
GONE = 1e-3

# -- gradients and updates -----------------------------------------------------------------------------------------

#: A parameter's gradient is computed from its layer's inputs and output gradients: its relative error is at most this
#: multiple of the sum of their errors. Measured: 2.7 times at most, for errors above 3 %, over 138 clean trainings.
MADE_OF = 4.0
#: Groups of layers to which `MADE_OF` applies; attention and recurrent layers compute more in between.
SIMPLE = frozenset({"linear", "conv", "norm", "embedding"})
#: Allowed error of an element's update, in units in the last place of the weight. Each side rounds three times, by half
#: a unit at most: the decay factor, the decayed weight, and the step. Measured: 3, for a BatchNorm's weight just below
#: one in a warm-up that begins at a learning rate of 1e-6.
LAST_PLACES = 3
#: Allowed multiple of the gradient's error for an update, because an adaptive optimizer divides by the gradient.
#: Chosen.
OF_GRADIENT = 5.0
#: Relative error from which on an element's gradient counts as a different one. Chosen.
ANOTHER = 0.1
#: Allowed relative error of updates that are driven by rounding noise. Two unrelated vectors of the same norm differ by
#: sqrt(2) of the norm, vectors of somewhat different norms by up to this multiple.
UNRELATED = 2.5
#: Least relative difference of rounding noise between the sides: for gradients that are sums of known terms, and for
#: gradients whose scale is estimated from the layer's other gradients. Chosen.
DIFFERENT, CLEARLY = 0.02, 0.1

# -- weights -------------------------------------------------------------------------------------------------------

#: Allowed drift of weights if earlier steps are unknown: share of the norm for each step, number of steps that count,
#: and largest share. Measured: benchmarks/noise.py, recording every 5th step.
DRIFT_PER_STEP, DRIFT_STEPS, DRIFT_AT_MOST = 1e-3, 100, 0.1
#: Allowed error of a weight's unknown updates between two compared steps, as a share of the later update. Chosen.
OFF = 1e-2
#: Margin for running variances: torch uses the unbiased estimate, paddle the biased one; these differ by the factor
#: ``n / (n - 1)``.
UNBIASED = 1.05
#: Running statistics of a BatchNorm, which do not influence the results of a training step.
RUNNING = frozenset({"running_mean", "running_var"})

# -- losses --------------------------------------------------------------------------------------------------------

#: A different label changes the gradient of its row of logits. If a share of all rows has different labels, the
#: relative error of the gradient is the root of the share, times this factor for an unsure model. Chosen.
OF_LABELS = 0.3
#: Least ratio of the norms before and after that proves clipping. Chosen: beyond rounding, and beyond the 1e-6 that
#: torch adds to the norm.
CLIPPED = 1.01

# -- systematic errors ---------------------------------------------------------------------------------------------

#: Share of an error that a ratio must explain; share of the tensors that must have a common ratio; and allowed relative
#: deviation of each tensor's ratio. Measured: benchmarks/noise.py: where rounding caused a common ratio beyond
#: `ratio_floor`, the ratio was at most 0.55 of the error.
MOSTLY, MOST_OF_THEM, ALIKE = 0.9, 0.75, 0.25
#: Number of roundings of one number (a clipping norm, a scale) that explain a common ratio, and the least ratio: torch
#: adds 1e-6 to the norm for clipping. Measured: 0.0074 in bfloat16 (two roundings), 2e-6 in float32.
ROUNDINGS, LEAST_RATIO = 4.0, 1e-3
#: Allowed multiple of the last output's error for the gradient of a loss. Measured: 2.2 times.
OF_OUTPUTS = 4.0
#: Allowed multiple of the typical error of a stage's gradients for the norm of all gradients, in a step that does not
#: start equal; clipping turns the norm's error into a ratio of all gradients. Measured: 5 times.
OF_NORM = 15.0
#: Least number of elements of a witness of a systematic error, and least number of witnesses.
WITNESS, FEWEST = 16, 3
#: Standard deviations by which a common growth of weights must exceed chance. Measured: 2.6 in 850 steps of 150 clean
#: trainings in bfloat16; 7 to 320 with a missing weight decay.
DECAY_SURE = 10.0
#: Relative error of a ratio of two norms, because sums of squares are added up in float32 over short pieces.
NORMS = 1e-7
#: Margin for the growth of weights whose updates are all larger by a common share. Chosen.
OF_GROWTH = 3.0
#: Relative error of the updates of early steps, if an optimizer computes its bias correction in float32: ``1 - 0.999``
#: is off by 1.3e-5, and its root by half of that.
BIAS_CORRECTION = 6.5e-6
#: Largest typical relative error of updates in an uncompared step; and factor of the root of the outputs' error, which
#: is added because a value may have crossed a kink (with one wholly different element of the smallest output).
#: Measured: 5e-4 at most over gaps of 3 steps without a crossing, 0.03 with one.
TYPICALLY_OFF, TYPICAL_KINKS = 1e-3, 1.0

# -- measured floors -----------------------------------------------------------------------------------------------

#: Allowed multiple of a tensor's measured floor: the error that appears when the step is repeated with values moved
#: by one unit in the last place (`padiff.records.recorded`). Measured: benchmarks/floors.py; of 8,000 tensors in clean
#: replays of 56 pairs of torch and paddle models the largest was 1.6 times its floor (outputs 1.2); in
#: 37 clean replays of trainings 1.7; of 520 in larger models (4096 inputs, an LSTM of 256, a transformer) 3.3.
FLOORS = 50.0
#: Least floor, in units in the last place of the tensor: even if a move changes nothing (an exact operation, an equal
#: sum), the other framework may round differently. Chosen.
LEAST_FLOOR = 1.0
#: Least floor of a gradient that the optimizer receives, as a share of the gradient: torch adds 1e-6 to the norm for
#: clipping, which a move does not show. Measured: 12 times the floor without it, where one side clips by hand at a norm
#: of 1.
GRAD_FLOOR = 2e-6
#: Least floor of an update, as a share of the update: settings of the optimizer are not moved, and the relative error
#: of 1 - beta2 in float32 is 3e-5 for 0.999 and 3e-4 for 0.9999. Measured: updates of torch's and paddle's AdamW from
#: equal gradients are 2e-6 apart.
UPDATE_FLOOR = 2e-5
#: Multiple of the measured floor that is allowed even if the modelled limit is smaller. Chosen.
FLOORS_AT_LEAST = 8.0
#: Largest distance at the start of a step, in units in the last place, for which measured floors apply.
MOST_UNITS = 16

# -- estimates -----------------------------------------------------------------------------------------------------

#: Standard deviations by which an estimate has to exceed its limit: chance does so once in 700 times.
SURE = 3.0

#: Limit of single scores, and of single rows, as a multiple of the limit of a whole tensor. Chosen.
SINGLE = 8.0


def allowed(dtype: str, stage: str) -> float:
    """Return the relative L2 error that rounding explains in a step that starts from equal weights."""
    return _ALLOWED.get(dtype, _ALLOWED["float32"])[_STAGE[stage]]


def is_half(dtype: str) -> bool:
    """Return True if a dtype has half of float32's bits."""
    return dtype in ("float16", "bfloat16")


def ratio_floor(dtype: str) -> float:
    """Return the largest common ratio, less 1, of a stage's tensors that rounding explains."""
    return max(LEAST_RATIO, ROUNDINGS * ROUNDING.get(dtype, ROUNDING["float32"]))


def coarse(dtype: str) -> str:
    """Return the real dtype of a dtype's numbers: that of the halves of a complex number, or the dtype itself."""
    return _HALVES.get(dtype, dtype)


@lru_cache(maxsize=4096)
def is_running(slot: str) -> bool:
    """Return True if a slot is a running statistic."""
    return equivalents.slot(slot) in RUNNING


class Limit(NamedTuple):
    """Largest allowed error, and the rule that allows it."""

    value: float
    rule: Rule

    def times(self, scale: float) -> Limit:
        """Return the limit multiplied by a scale."""
        return Limit(self.value * scale, self.rule)


def value_of(limit: Limit) -> float:
    """Return the limit's value, as a sort key."""
    return limit.value
