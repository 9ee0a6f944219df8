"""Groups of all probes, one module for each kind of operation."""

from padiff_atlas.probe import Group
from padiff_atlas.probes.activations import ACTIVATIONS
from padiff_atlas.probes.arithmetic import ARITHMETIC
from padiff_atlas.probes.images import IMAGES
from padiff_atlas.probes.indexing import INDEXING
from padiff_atlas.probes.initialisation import INITIALISATION
from padiff_atlas.probes.layers import DROPOUT, NORMS, POOLING
from padiff_atlas.probes.losses import LOSSES
from padiff_atlas.probes.optimizers import CLIPPING, OPTIMIZERS
from padiff_atlas.probes.reductions import REDUCTIONS
from padiff_atlas.probes.schedules import SCHEDULES
from padiff_atlas.probes.sequences import ATTENTION, EMBEDDINGS, RECURRENT

GROUPS: tuple[Group, ...] = (
    LOSSES, ACTIVATIONS, NORMS, POOLING, DROPOUT, ATTENTION, EMBEDDINGS, RECURRENT, IMAGES,
    OPTIMIZERS, SCHEDULES, CLIPPING, INITIALISATION, REDUCTIONS, ARITHMETIC, INDEXING,
)  # fmt: skip
