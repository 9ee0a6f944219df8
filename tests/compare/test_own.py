"""What each process of a training has for itself, or must not have in common with others, in every recorded step."""

import math
from dataclasses import replace

import numpy as np
import pytest
from kit.records import as_sketch, info, record

from padiff.compare.rank_draws import bits, certain
from padiff.compare.replicas import RankFault, check_replicas
from padiff.records import LOOP, Layer, Parameter, Step
from padiff.records.recorded import Part

KINDS = ("full", "sketch")


def seen(about, steps, kind="full"):
    """What is found of steps: of each a list of every rank's records."""
    made = []
    for number, ranks in enumerate(steps):
        kept = [[as_sketch(r) if kind == "sketch" and r.shape else r for r in records] for records in ranks]
        made.append([Step(number, tuple(records), rank=rank) for rank, records in enumerate(kept)])
    return check_replicas(replace(about, world_size=len(steps[0])), made)


def short(found):
    return [(one.kind, one.step, one.ranks, one.sites) for one in found]


# -- samples

NET = info(Layer("(root)", "Net", "custom"))


def inputs(*values, slot="input.x"):
    return [record("(root)", "input", f"input.{k}", value) for k, value in enumerate(values)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_the_same_batch_is_found_in_whatever_step_it_is(kind, dtype):
    def batch(number, rank):
        data = np.random.default_rng((number, 1 if number == 3 and rank == 2 else rank))
        made = data.normal(size=(4, 9)) if dtype is np.float32 else data.integers(0, 50, (4, 9))
        return inputs(made.astype(dtype), np.ones((4, 9), np.int64))

    steps = [[batch(number, rank) for rank in range(3)] for number in range(5)]
    assert short(seen(NET, steps, kind)) == [(RankFault.SAME_BATCH, 3, (1, 2), ())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "value",
    [
        np.zeros((4, 8), np.float32),
        np.full((3, 3), 2.5, np.float32),
        np.zeros((0, 8), np.float32),
        np.array([0, 1, 1, 0, 1]),
        np.float32(0.731),
        np.full((2, 2), np.nan, np.float32),
    ],
    ids=["zeros", "constant", "no element", "five bits", "one number", "not a number"],
)
def test_what_is_always_the_same_or_may_be_by_chance_is_no_batch(kind, value):
    assert seen(NET, [[inputs(value), inputs(value)] for _ in range(3)], kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_what_goes_in_has_to_be_the_same(kind):
    places = np.arange(40).reshape(4, 10)
    ids = [np.random.default_rng(rank).integers(0, 99, (4, 10)) for rank in range(2)]
    assert seen(NET, [[inputs(places, own) for own in ids]], kind) == []
    found = seen(NET, [[inputs(places, ids[0]) for _ in range(2)]], kind)
    assert short(found) == [(RankFault.SAME_BATCH, 0, (0, 1), ())]


# -- masks

DROPS = info(*(Layer(f"drop{k}", "Dropout", "dropout", settings={"p": 0.2}) for k in range(3)))


def dropped(number, seeds, size=2000, relu=False, values=None):
    """What ranks record of three layers of dropout, and of what goes into them."""
    ranks = []
    for rank, seed in enumerate(seeds):
        draw = np.random.default_rng((number, seed))
        data = np.random.default_rng((number, rank if values is None else values[rank], 9))
        records = []
        for k in range(3):
            x = data.normal(size=size)
            x = np.maximum(x, 0) if relu else x
            records.append(record(f"fc{k}", "forward", "output.0", x))
            records.append(record(f"drop{k}", "forward", "output.0", np.where(draw.random(size) < 0.8, x / 0.8, 0)))
        ranks.append(records)
    return ranks


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("size", [100, 2000, 9000])
def test_equal_masks_are_found_in_whatever_step_they_are(relu, size):
    steps = [dropped(number, [1, 2, 2 if number == 3 else 3], size, relu) for number in range(5)]
    expected = (RankFault.SAME_MASKS, 3, (1, 2), ("drop0", "drop1", "drop2"))
    assert short(seen(DROPS, steps)) == [expected]


def test_shares_of_zeros_that_agree_in_all_layers_for_some_steps_are_found_in_sketches():
    steps = [dropped(number, [1, 4, 2 if number < 2 else 4]) for number in range(6)]
    expected = (RankFault.SAME_MASKS, 2, (1, 2), ("drop0", "drop1", "drop2"))
    assert short(seen(DROPS, steps, "sketch")) == [expected]
    # One step tells less than what is asked for: 3 layers of 6 bits.
    assert seen(DROPS, steps[:3], "sketch") == []


def test_sketches_of_masks_that_each_drew_never_agree_for_long():
    steps = [dropped(number, [100 * number + rank for rank in range(12)], 300) for number in range(60)]
    assert seen(DROPS, steps, "sketch") == []


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_that_are_not_dropped_ones_tell_nothing(kind):
    zeros, some = np.zeros(2000), np.where(np.arange(2000) % 3, 1.0, 0.0)
    for value in (zeros, np.ones(2000), np.zeros(0)):
        own = [record(f"drop{k}", "forward", "output.0", value * (k + 1)) for k in range(3)]
        assert seen(DROPS, [[own, own] for _ in range(4)], kind) == []
    # A third of zeros is not what dropout makes at 0.2: padding, of other values.
    ranks = [[record(f"drop{k}", "forward", "output.0", some * (k + rank + 1)) for k in range(3)] for rank in range(2)]
    assert seen(DROPS, [ranks for _ in range(6)], kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_partners_hold_alike_is_no_mask_of_one_seed(kind):
    steps = [dropped(number, [5, 5], values=[0, 0]) for number in range(5)]
    assert seen(DROPS, steps, kind) == []


def test_dropped_channels_are_not_counted_as_elements():
    about = info(Layer("drop", "Dropout2d", "dropout2d", settings={"p": 0.5}))
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(30):  # four of eight channels, often the same number
        ranks = []
        for _ in range(2):
            kept = np.isin(np.arange(8), rng.permutation(8)[:4])
            ranks.append([record("drop", "forward", "output.0", rng.normal(size=(8, 25)) * kept[:, None])])
        steps.append(ranks)
    assert seen(about, steps, "sketch") == []


def test_chances_are_those_of_binomials():
    # Masks of 10 elements at one half agree once in 2 ** 10, by definition.
    np.testing.assert_allclose(bits(10, 0.0, 0.5), 10.0)
    assert bits(10, 0.5, 0.5) == 0.0
    # 2,016 pairs of 64 ranks, in three places, in the fourth step.
    np.testing.assert_allclose(certain(3, 64, 3), 14 + math.log2(2016 * 3) + 4)


# -- learning rates

OWNED = info(
    Layer(
        "fc", "Linear", "linear", parameters=(Parameter("weight", (4,), "float32"), Parameter("bias", (2,), "float32"))
    )
)


def rated(rates, slots=("weight", "bias"), part=True):
    """Ranks that hold shards, with their rates."""
    ranks = []
    for rank, rate in enumerate(rates):
        own = slots[rank] if isinstance(slots[0], tuple) else slots
        records = [
            replace(record("fc", "weight", slot, np.arange(2) + rank), part=Part((8,), (2 * rank,), "shard"))
            for slot in own
        ]
        ranks.append([*records, record(LOOP, "update", "learning_rate", np.float64(rate))])
    return ranks


def test_a_rank_with_a_rate_of_its_own_is_named_though_no_update_can_be_held_against_another():
    (found,) = seen(OWNED, [rated([0.1] * 4), rated([0.1, 0.1, 0.2, 0.1])])
    assert short([found]) == [(RankFault.OWN_RATE, 1, (0, 2), ())] and found.kind.fault
    assert "Rank 2's learning rate differs from rank 0's since step 1 (learning rate 0.2 against 0.1)" in str(found)


def test_stages_of_a_pipeline_may_have_rates_of_their_own():
    assert seen(OWNED, [rated([0.1, 0.2], slots=(("weight",), ("bias",)))]) == []
    assert len(seen(OWNED, [rated([0.1, 0.2], slots=(("weight", "bias"), ("weight",)))])) == 1


# -- buffers


def buffers(number, rank, begin=0.0, dtype="float32"):
    value = np.full(3, begin * rank + number * (rank + 1), np.float32).astype(dtype)
    return [record("norm", "weight", "mean", value)]


def norm(dtype="float32"):
    mean = Parameter("mean", (3,), dtype, role="buffer", trainable=False)
    return info(Layer("norm", "Normed", "normed", parameters=(mean,)))


def test_a_buffer_that_begins_equal_and_departs_is_worth_knowing():
    (found,) = seen(norm(), [[buffers(number, rank) for rank in range(3)] for number in range(4)])
    assert short([found]) == [(RankFault.OWN_BUFFERS, 1, (0, 1, 2), ("norm/mean",))] and not found.kind.fault


@pytest.mark.parametrize(
    ("begin", "dtype"), [(1.0, "float32"), (0.0, "int64")], ids=["other from the start", "a count"]
)
def test_other_buffers_are_each_ranks_own(begin, dtype):
    assert seen(norm(dtype), [[buffers(n, rank, begin, dtype) for rank in range(3)] for n in range(4)]) == []


def test_what_is_equal_everywhere_is_no_news():
    assert seen(norm(), [[buffers(number, 0) for _ in range(3)] for number in range(4)]) == []


# -- norms of shards


def clipped(number, limit=None, own=(), ranks=4, given=None):
    """Gradients in shards: the norm of all is clipped, or of those ranks of their own."""
    whole = np.random.default_rng(number).normal(size=(ranks, 50)) * np.arange(1, ranks + 1)[:, None]
    factor = np.full(ranks, 1.0 if limit is None else min(1.0, limit / np.linalg.norm(whole)))
    for rank in own:
        factor[rank] = min(1.0, limit / (np.linalg.norm(whole[rank]) + 1e-6))
    found = []
    for rank in range(ranks):
        part = Part((50 * ranks,), (50 * rank,), "shard")
        value = (whole[rank] * factor[rank]).astype(np.float32)
        records = [replace(record("fc", "grad", "weight", value), part=part)]
        if given is not None:
            records.append(record(LOOP, "grad", "clip_grad_norm().0", np.float32(given[rank])))
        found.append(records)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_each_rank_clips_by_its_own_norm(kind):
    (found,) = seen(OWNED, [clipped(n, 3.0, range(4)) for n in range(2)], kind)
    assert short([found]) == [(RankFault.OWN_NORM, 0, (0, 1, 2, 3), ())] and found.kind.fault
    assert "have the norm 3 together, and those of all ranks 6" in str(found)


def test_two_ranks_have_to_agree_twice():
    steps = [clipped(n, 3.0, range(2), ranks=2) for n in range(2)]
    assert short(seen(OWNED, steps)) == [(RankFault.OWN_NORM, 0, (0, 1), ())]
    assert seen(OWNED, steps[:1]) == []


@pytest.mark.parametrize("own", [(2,), (1, 3)])
def test_where_the_limit_is_known_the_rank_is(own):
    about = replace(OWNED, settings={"clip.kind": "global_norm", "clip.limit": 3.0, "clip.norm_type": 2.0})
    (found,) = seen(about, [clipped(0, 3.0), clipped(1, 3.0, own)])
    assert short([found]) == [(RankFault.OWN_NORM, 1, own, ())]


def test_norms_that_clipping_gave_tell_it():
    (found,) = seen(OWNED, [clipped(0, given=[1.0, 2.0, 3.0, 4.0])])
    assert found.kind is RankFault.OWN_NORM and "the norms that clipping gave differ" in str(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [None, 3.0, 1000.0])
def test_one_norm_of_all_shards_is_well(limit, kind):
    about = OWNED if limit is None else replace(OWNED, settings={"clip.kind": "global_norm", "clip.limit": limit})
    for given in (None, [7.5] * 4):
        assert seen(about, [clipped(n, limit, given=given) for n in range(4)], kind) == []


def test_gradients_of_zero_and_replicas_of_one_shard_have_equal_norms_rightly():
    steps = [[[replace(r, source=record("", "", "", np.zeros(50)).source) for r in own] for own in clipped(0)]] * 3
    assert seen(OWNED, steps) == []
    # A mesh of two axes: ranks 0 and 2 hold the first half, 1 and 3 the other.
    halves = [[clipped(0)[rank % 2] for rank in range(4)] for _ in range(3)]
    assert seen(OWNED, halves) == []


def test_one_rank_may_have_all_of_the_gradient():
    about = replace(OWNED, settings={"clip.kind": "global_norm", "clip.limit": 3.0})
    ranks = clipped(0)
    for own in ranks[1:]:
        own[0] = replace(own[0], source=record("", "", "", np.zeros(50)).source)
    value = ranks[0][0].value
    ranks[0][0] = replace(ranks[0][0], source=record("", "", "", value * 3 / np.linalg.norm(value)).source)
    assert seen(about, [ranks] * 3) == []
