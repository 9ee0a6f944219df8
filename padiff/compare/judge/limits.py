"""Every number of the default policy, with its reason and where it comes from.

``Measured`` names what it was seen on. ``Chosen`` was set with room to spare, and holds on the clean pairs that
``benchmarks/noise.py`` trains; it prints how near each stage comes to its limit.
"""

from __future__ import annotations

from functools import lru_cache

from padiff.model import equivalents
from padiff.records import STAGES

# -- rounding ------------------------------------------------------------------------------------------------------

# Relative L2 error that two correct implementations may show in a step that starts from equal weights, by the
# coarsest dtype of the step. Measured: benchmarks/noise.py, torch / paddle pairs, with room to spare.
_ALLOWED = {
    #            input   weight  forward loss    backward grad   update
    "float64": (1e-12, 1e-12, 1e-10, 1e-10, 1e-9, 1e-9, 1e-6),
    "float32": (1e-6, 1e-6, 2e-5, 2e-5, 1e-2, 3e-2, 1e-2),
    "float16": (1e-3, 1e-3, 5e-3, 5e-3, 2e-2, 2e-2, 1e-1),
    "bfloat16": (8e-3, 8e-3, 4e-2, 4e-2, 1e-1, 1e-1, 3e-1),
}
_STAGE = {name: k for k, name in enumerate(STAGES)}
#: Dtypes, the finest first, with the relative error of rounding one number: half a unit in the last place.
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
COARSENESS = tuple(ROUNDING)
# What the halves of a complex number are.
_HALVES = {"complex64": "float32", "complex128": "float64"}
#: A learning rate is a Python float here and a float32 there. Chosen: ten times float32's rounding.
SCALAR = 1e-6
#: A loss that goes to zero has no scale of its own there; it is judged as if it were at least this. Chosen.
LOSS_SCALE = 1e-2
#: A loss may be off by so many times what its outputs are off: of their error's norm times that of the gradient that
#: came back to them, or as a share of itself. Measured: 0.5 and 0.6 times at most, in 2,100 steps of clean trainings.
LOSS_OF_OUTPUTS = 3.0

# -- what a step starts from ---------------------------------------------------------------------------------------

#: How much of the relative error that a step starts with (weights, inputs) may be found again at each stage. Measured:
#: benchmarks/noise.py; deep nets without normalisations amplify most.
GAIN = {"input": 0.0, "weight": 0.0, "forward": 100.0, "loss": 100.0, "backward": 300.0, "grad": 300.0, "update": 300.0}
#: However much is inherited, an error beyond this share is reported. Where layers were seen to amplify what a step
#: starts from, the share grows with that. Chosen.
AT_MOST = {"forward": 0.1, "loss": 0.1, "backward": 0.3, "grad": 0.3, "update": 0.5}
#: Where outputs themselves are that share apart, gradients and updates may be so many times as far as else; further
#: outputs, further gradients. Chosen.
FURTHER = 10.0
#: Up to tensors that have nothing in common but their size; of gradients, which go with a loss that may be ten times as
#: small on one side, not even that. Chosen.
APART = {"forward": 3.0, "loss": 3.0, "backward": 30.0, "grad": 30.0, "update": 3.0}
#: Relative error of all weights together beyond which runs do not drift any more: they are apart. Chosen.
MOST = 1e-2
#: How much larger than in the steps before the amplification may be. Chosen.
MORE_GAIN = 4.0
#: How much larger than in the step compared before the diffs of a stage may be: rounding that training amplifies. Up to
#: the last: two gradients of a converged training may have nothing left in common but their size. Chosen.
GROWTH, GROWN_AT_MOST = 5.0, 3.0
#: How much larger than it may be by itself an output's error may be for that of the outputs before it, which layers
#: hand on and amplify; in all, in a step. Chosen.
DEEP = 20.0
#: The steepest slope of an activation: GELU's and Swish's is 1.13, that of a ReLU 1.
STEEPEST = 1.2

# -- kinks ---------------------------------------------------------------------------------------------------------

#: Where rounding moves a value across the kink of a ReLU, or to another maximum of a pool, a whole element of the
#: gradient changes. The share of such elements goes with the error of forward, their L2 error with its root. Measured:
#: benchmarks/noise.py.
KINKS = {"backward": 4.0, "grad": 4.0}
#: An error looks like that of few elements if the bulk has at most such a share of it, or if its mean is so much
#: smaller beside its root mean square than the tensor's own. Chosen.
FEW_LOOK, SPARSE = 0.5, 0.6
#: A gradient whose bulk agrees may be off by this share in its few other elements, an update of a small tensor further.
#: Chosen.
FEW_AT_MOST, FEW_OF_UPDATES = 0.5, 1.0
#: Share of itself by which an update may be off, besides, for each step since the last one that was compared: in nets
#: with ReLUs, rounding moves a value across a kink in some step, and what follows drifts apart. Measured: over gaps of
#: 2, 3, 5, 10 and 15 steps, weights of clean twins were off by 0.05, 0.12, 0.22, 2.7 and 4.5 updates more than the step
#: before the gap says.
UNSEEN_KINKS = 0.2

#: What is multiplied by a parameter that is nothing but rounding any more (a layer scale of 1e-6 that a first step of
#: 1e-6 took away) has nothing in common but its size: it may be off by so much of itself. Chosen.
MULTIPLIED = 2.0
#: And it is nothing but rounding if so little is left of what it began with. Measured: a ten-millionth after Adam's
#: first step.
GONE = 1e-3

# -- gradients and updates -----------------------------------------------------------------------------------------

#: A parameter's gradient is made of what goes into its layer and of what comes back to it: its relative error is at
#: most so many times theirs together. Measured: 2.7 times at most, where it is above 3 %, over 138 clean trainings.
MADE_OF = 4.0
#: Layers of which that is true; an attention or a recurrent layer computes more in between.
SIMPLE = frozenset({"linear", "conv", "norm", "embedding"})
#: Units in the last place of its weight that an element's update may be off by. Each side rounds three times, by half a
#: unit at most: what the decay leaves of one, the weight times that, and the step. Measured: 3, of a BatchNorm's weight
#: just below one in a warm-up that begins at a learning rate of 1e-6.
LAST_PLACES = 3
#: An update may be off by so many times what its own gradient is off: an adaptive optimizer divides by the gradient.
#: Chosen.
OF_GRADIENT = 5.0
#: An element's gradient that differs by this share of itself is another one. Chosen.
ANOTHER = 0.1
#: Two unrelated vectors of one norm are sqrt(2) of it apart, of norms that differ somewhat up to this: the size of an
#: update that rounding noise drove.
UNRELATED = 2.5
#: Noise differs by at least these shares of itself from one side to the other: where it is known what the gradient is a
#: sum of, and where only the layer's other gradients say how large it could be. Chosen.
DIFFERENT, CLEARLY = 0.02, 0.1

# -- weights -------------------------------------------------------------------------------------------------------

#: Where steps before are not known, weights may drift by this much of their norm with every step, up to the end of the
#: ramp, and by that share at most. Measured: benchmarks/noise.py, recording every 5th step.
DRIFT_PER_STEP, DRIFT_STEPS, DRIFT_AT_MOST = 1e-3, 100, 0.1
#: Where a weight's updates between two compared steps are not known, they are off by this share of the later one's.
#: Chosen.
OFF = 1e-2
#: torch feeds a running variance the unbiased, paddle the biased estimate: ``n / (n - 1)`` apart, with this factor of
#: room.
UNBIASED = 1.05
#: A BatchNorm's statistics of the training so far. What training computes does not come from them.
RUNNING = frozenset({"running_mean", "running_var"})

# -- losses --------------------------------------------------------------------------------------------------------

#: Another label makes another gradient of its row of logits: of a share of all rows, the gradient is off by the root of
#: that share, times what is left of it where the model is sure of neither class. Chosen.
OF_LABELS = 0.3
#: Gradients were clipped where their norm before is so many times what is left of it. Chosen: beyond rounding, and what
#: torch adds to the norm (1e-6).
CLIPPED = 1.01

# -- what is systematic --------------------------------------------------------------------------------------------

#: An error is one ratio if so much of it is; and a ratio is common to tensors if it goes through such a share of them,
#: in each to within this share of itself. Measured: benchmarks/noise.py: where rounding made more than `ratio_floor` of
#: a common ratio, it was at most 0.55 of the error.
MOSTLY, MOST_OF_THEM, ALIKE = 0.9, 0.75, 0.25
#: Roundings of one number that a common ratio may come from (a norm that clips, a scale), and the least ratio: torch
#: adds 1e-6 to the norm that it clips by. Measured: 0.0074 in bfloat16 (two roundings), 2e-6 in float32.
ROUNDINGS, LEAST_RATIO = 4.0, 1e-3
#: A loss's gradient may be off by so many times what the last output is off. Measured: 2.2 times.
OF_OUTPUTS = 4.0
#: A norm of all gradients may be off by so many times what gradients of outputs are typically off, in a step that does
#: not start equal; clipping makes it a ratio of all of them. Measured: 5 times.
OF_NORM = 15.0
#: Elements that a tensor has to have, and tensors that there have to be, to be witnesses of what is common.
WITNESS, FEWEST = 16, 3
#: Standard deviations by which weights have to be larger by one share. Measured: 2.6 in 850 steps of 150 clean
#: trainings in bfloat16; where weight decay was missing, 7 to 320.
DECAY_SURE = 10.0
#: To what a ratio of two norms is known: sums of squares are added up in float32 over short pieces.
NORMS = 1e-7
#: Updates that are all larger by a share let weights grow by that share more. Chosen: some room.
OF_GROWTH = 3.0
#: Share of an update by which most are off, at most, in a step that was not compared; and so many times the root of
#: what outputs are off, beside one element of the smallest output that is wholly different, as a value may have crossed
#: a kink. Measured: where none had, 5e-4 at most over gaps of 3 steps; where one had, 0.03.
TYPICALLY_OFF, TYPICAL_KINKS = 1e-3, 1.0

# -- measured floors -----------------------------------------------------------------------------------------------

#: Where a step was run again, moved by units in the last place (`padiff.records.floors`), a tensor may be off by so
#: many times what that made of it, for a move by one unit. Measured: benchmarks/floors.py; of 8,000 tensors in clean
#: replays of 56 pairs of torch and paddle models the largest was 1.6 times its floor (outputs 1.2); in
#: 37 clean replays of trainings 1.7; of 520 in larger models (4096 inputs, an LSTM of 256, a transformer) 3.3.
FLOORS = 50.0
#: A measured floor is not below so many units in the last place of the tensor: where a move changes nothing (an exact
#: operation, a sum that comes out alike) the other framework may still round otherwise. Chosen.
LEAST_FLOOR = 1.0
#: A gradient's floor is at least this share of it, as the optimizer takes it: torch adds 1e-6 to the norm that it clips
#: by, which moves no last place. Measured: 12 times the floor without it, where one side clips by hand at a norm of 1.
GRAD_FLOOR = 2e-6
#: An update's floor is at least this share of it: what an optimizer computes with is not moved, and 1 - beta2 in
#: float32 is off by 3e-5 of itself for 0.999, by 3e-4 for 0.9999. Measured: updates of torch's and paddle's AdamW from
#: equal gradients are 2e-6 apart.
UPDATE_FLOOR = 2e-5
#: However little the modelled limits allow, so many times the measured floor are allowed. Chosen.
FLOORS_AT_LEAST = 8.0
#: Floors are measured for moves by one unit, and by so many; of a step that starts further apart they say nothing.
MOST_UNITS = 16

# -- estimates -----------------------------------------------------------------------------------------------------

#: Standard deviations by which an estimate has to be beyond its limit: chance reaches it once in 700 times.
SURE = 3.0


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
