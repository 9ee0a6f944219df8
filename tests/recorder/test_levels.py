"""Levels of detail: the words, the rules, and what is then recorded in real trainings of both frameworks."""

from __future__ import annotations

import numpy as np
import pytest
from kit.frameworks import hook_count
from kit.nets import batch, cnn, mlp, one_step

import padiff
from padiff.errors import SelectionError, UsageError
from padiff.model.selection import Node
from padiff.recorder.levels import Levels
from padiff.recorder.options import Detail, Schedule
from padiff.sketches.sketch import sketch_of

NODES = [Node(path, None) for path in ("(root)", "encoder", "encoder.0", "encoder.1", "head")]


# -- words and rules ---------------------------------------------------------------------------------------------------

RULES = [
    ("auto", "head", "forward", "auto"),
    ("full", "head", "forward", "full"),
    ("sketch", "head", "forward", "sketch"),
    ("nothing", "head", "forward", "nothing"),
    ({}, "head", "grad", "auto"),
    ({"*": "sketch"}, "head", "grad", "sketch"),
    ({"backward": "nothing"}, "head", "backward", "nothing"),
    ({"backward": "nothing"}, "head", "forward", "auto"),
    ({"head": "sketch"}, "head", "update", "sketch"),
    ({"head": "sketch"}, "encoder.0", "update", "auto"),
    ({"encoder.*": "sketch"}, "encoder.1", "input", "sketch"),
    ({"encoder.*": "sketch"}, "encoder", "input", "auto"),
    ({"encoder*": "sketch"}, "encoder", "input", "sketch"),
    ({"encoder.*/grad": "nothing"}, "encoder.1", "grad", "nothing"),
    ({"encoder.*/grad": "nothing"}, "encoder.1", "update", "auto"),
    ({"encoder.*/grad": "nothing"}, "head", "grad", "auto"),
    ({"*/grad": "nothing", "*": "sketch"}, "head", "grad", "nothing"),
    ({"*/grad": "nothing", "*": "sketch"}, "head", "weight", "sketch"),
    ({"(root)": "sketch"}, "(root)", "forward", "sketch"),
    ({"[eh]*.0": "sketch"}, "encoder.0", "forward", "sketch"),
    # The last one that fits wins, whatever it is.
    ({"head": "sketch", "forward": "nothing"}, "head", "forward", "nothing"),
    ({"forward": "nothing", "head": "sketch"}, "head", "forward", "sketch"),
    ({"*": "nothing", "head": "sketch", "head/grad": "full"}, "head", "grad", "full"),
    ({"head/grad": "full", "*": "nothing", "head": "sketch"}, "head", "grad", "sketch"),
    # "*" is the level of everything else, wherever it stands.
    ({"head": "full", "*": "nothing"}, "head", "grad", "full"),
]


@pytest.mark.parametrize(("given", "path", "stage", "expected"), RULES)
def test_rules(given, path, stage, expected):
    detail = Detail.from_arguments(given)
    assert detail.level_of(path, stage) == expected
    levels = Levels(detail)
    automatic = "auto" in (detail.level, *detail.rules.values())
    expected = "sketch" if expected == "auto" else expected  # where there is no room
    assert [levels[path, stage] for _ in range(2)] == [expected] * 2
    full = "full" if expected == "sketch" else expected
    assert Levels(detail, full=True)[path, stage] == full
    assert Levels(detail, full=frozenset({path}))[path, stage] == full
    assert Levels(detail, full=frozenset({"another"}))[path, stage] == expected
    assert detail.automatic == automatic
    assert detail.sketches == (automatic or expected == "sketch" or "sketch" in str(given))


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ("sketc", "detail.*'sketc'.*sketch"),
        ("", "full, sketch, nothing|nothing, sketch, full"),
        ({"head": "sketches"}, r"detail\['head'\].*'sketches'.*sketch"),
        ({"*": "fulll"}, "'fulll'.*full"),
        ({"head/backwards": "full"}, r"detail\['head/backwards'\].*'backwards'.*backward"),
        ({"head": None}, "None"),
        (3, "got int"),
        (["sketch"], "got list"),
        (None, "got NoneType"),
    ],
)
def test_words_that_are_none(given, reported):
    with pytest.raises(UsageError, match=reported):
        Detail.from_arguments(given)


def test_a_pattern_that_matches_no_layer():
    Detail.from_arguments({"encoder.*": "sketch", "backward": "nothing", "(root)/forward": "full"}).check_patterns(
        NODES
    )
    with pytest.raises(SelectionError, match=r"detail\['encodr\.0/grad'\].*encoder\.0"):
        Detail.from_arguments({"encodr.0/grad": "sketch"}).check_patterns(NODES)


def test_full_every_n_steps_is_given_once():
    detail = Detail("sketch", full_every_n_steps=3)
    assert Detail.from_arguments(detail) is detail
    assert Detail.from_arguments("sketch", 3) == detail
    with pytest.raises(UsageError, match="twice"):
        Detail.from_arguments(detail, 3)


def test_what_a_run_says_of_it():
    assert Detail.from_arguments("full").described() == {}
    assert Detail.from_arguments("auto").described() == {"detail": {"*": "auto"}}
    assert Detail.from_arguments({"head": "sketch"}, 5).described() == {
        "detail": {"*": "auto", "head": "sketch"},
        "full_every_n_steps": 5,
    }


# -- what is recorded --------------------------------------------------------------------------------------------------


def kinds(run, number=1):
    """How each record of a step was kept, by site; of a step like all others, which the first one is not."""
    (one,) = run.steps(number)
    return {r.site: "sketch" if r.sketch is not None else "full" for r in one.records}


def trained(kit, model, steps=2, optimizer=True, **options):
    """Train with every step recorded; the same model and data every time."""
    made = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=made if optimizer else None, **options) as rec:
        for k in range(steps):
            one_step(kit, model, made, *batch(kit, (8, 1, 6, 6), 5, seed=k), rec)
    return rec.run


def state_of(kit, seed=1):
    """A seeded model."""
    kit.seed(seed)
    return cnn(kit)


EXPECTED = [
    ("full", lambda path, stage: "full"),
    ("sketch", lambda path, stage: "sketch"),
    ({"*": "sketch", "backward": "nothing"}, lambda path, stage: "absent" if stage == "backward" else "sketch"),
    ({"5": "sketch"}, lambda path, stage: "sketch" if path == "5" else "full"),
    ({"[01]/grad": "nothing", "[01]/forward": "sketch"}, lambda path, stage: {
        ("0", "grad"): "absent", ("1", "grad"): "absent", ("0", "forward"): "sketch", ("1", "forward"): "sketch",
    }.get((path, stage), "full")),
    ({"*": "nothing", "weight": "full"}, lambda path, stage: "full" if stage == "weight" else "absent"),
    ({"weight": "nothing"}, lambda path, stage: "absent" if stage == "weight" else "full"),
    ({"weight": "nothing", "update": "sketch"}, lambda path, stage: {"weight": "absent", "update": "sketch"}.get(stage, "full")),  # noqa: E501
    ({"weight": "sketch"}, lambda path, stage: "sketch" if stage == "weight" else "full"),
    ({"update": "sketch", "grad": "nothing"}, lambda path, stage: {"update": "sketch", "grad": "absent"}.get(stage, "full")),  # noqa: E501
    ({"update": "nothing"}, lambda path, stage: "absent" if stage == "update" else "full"),
    ({"input": "sketch", "forward": "nothing"}, lambda path, stage: {"input": "sketch", "forward": "absent"}.get(stage, "full")),  # noqa: E501
]  # fmt: skip


def of_loop(record, expected):
    """The loop's numbers and labels are small, and always whole; but where nothing is kept, no labels are."""
    level = expected(record.layer, record.stage) if "()" in record.slot else "full"
    return level if level == "absent" or record.slot.endswith("logits") else "full"


@pytest.mark.parametrize(("detail", "expected"), EXPECTED, ids=[str(detail) for detail, _ in EXPECTED])
@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "alone"])
def test_levels_by_stage_and_layer(kit, detail, expected, optimizer):
    everything = trained(kit, state_of(kit), optimizer=optimizer)
    run = trained(kit, state_of(kit), optimizer=optimizer, detail=detail)
    (full,), (some,) = everything.steps(1), run.steps(1)
    planned = {
        r.site: of_loop(r, expected) if r.layer == "(loop)" else expected(r.layer, r.stage) for r in full.records
    }
    assert kinds(run) == {site: level for site, level in planned.items() if level != "absent"}
    # What is kept is what a recording of everything has: the values to the bit, and sketches of them.
    known = {r.site: r for r in full.records}
    turned = {(layer.path, p.slot) for layer in run.info.layers for p in layer.parameters if p.layout == "in_out"}
    for one in some.records:
        reference = known[one.site]
        assert (one.shape, one.dtype) == (reference.shape, reference.dtype)
        if one.sketch is None:
            np.testing.assert_array_equal(one.value, reference.value, err_msg=one.site)
        else:
            made = sketch_of(reference.value, (one.layer, one.slot) in turned)
            assert one.sketch.row().tobytes() == made.row().tobytes(), one.site
            assert (one.sketch.size, one.sketch.transposed) == (made.size, made.transposed)


def test_a_tensor_that_several_layers_see_at_other_levels(kit):
    """The root's output is its last layer's; a dropout that is off hands its input on."""
    detail = {"(root)": "sketch", "5/forward": "full", "5/backward": "nothing"}
    found = kinds(trained(kit, state_of(kit), detail=detail))
    assert found["(root)/forward/output.0"] == "sketch"
    assert found["5/forward/output.0"] == "full"
    assert found["(root)/backward/output.0"] == "sketch"
    assert "5/backward/output.0" not in found
    assert found["4/backward/output.0"] == "full"


def test_nothing_of_forward_still_has_the_gradient(kit):
    found = kinds(trained(kit, state_of(kit), detail={"forward": "nothing", "backward": "sketch"}))
    assert "4/forward/output.0" not in found
    assert found["4/backward/output.0"] == "sketch"


@pytest.mark.parametrize("full", [2, Schedule(steps={0, 2, 4}), Schedule(every=2, first=0)], ids=str)
def test_full_every_n_steps(kit, full):
    run = trained(kit, state_of(kit), steps=5, detail={"*": "sketch", "grad": "nothing"}, full_every_n_steps=full)
    for number in range(5):
        found = {level for site, level in kinds(run, number).items() if not site.startswith("(loop)")}
        assert found == {"full" if number % 2 == 0 else "sketch"}, number
        assert not any("/grad/" in site for site in kinds(run, number))


def test_full_steps_among_the_due_ones(kit):
    run = trained(
        kit, state_of(kit), steps=7, every_n_steps=2, detail="sketch", full_every_n_steps=Schedule(steps=[3, 4])
    )
    assert run.numbers() == [0, 2, 4, 6]
    kept = [kinds(run, number)["0/forward/output.0"] for number in run.numbers()]
    assert kept == ["full", "sketch", "full", "sketch"]  # the first one: it is small


# -- the first step ----------------------------------------------------------------------------------------------------


def wide(kit):
    """The first layer's weight and output have more than 3,904 elements for 64 samples, the second one's have not."""
    kit.seed(1)
    return kit.Sequential(kit.Linear(64, 64), kit.Linear(64, 5))


def recorded_wide(kit, **options):
    model = wide(kit)
    made = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=made, **options) as rec:
        for k in range(3):
            one_step(kit, model, made, *batch(kit, (64, 64), 5, seed=k), rec)
    return rec.run


def test_the_first_step_has_small_tensors_whole(kit):
    run = recorded_wide(kit, detail={"*": "sketch", "backward": "nothing"}, every_n_steps=Schedule(steps=[1, 2]))
    everything = recorded_wide(kit)
    first, second = kinds(run, 1), kinds(run, 2)
    assert first.keys() == second.keys()
    assert not any("/backward/" in site for site in first)
    for stage in ("weight", "grad", "update"):
        assert (first[f"0/{stage}/weight"], first[f"0/{stage}/bias"]) == ("sketch", "full")
        assert first[f"1/{stage}/weight"] == "full"
    assert (first["0/forward/output.0"], first["1/forward/output.0"]) == ("sketch", "full")
    assert {level for site, level in second.items() if not site.startswith("(loop)")} == {"sketch"}
    exact = {r.site: r.value for r in everything.steps(1)[0].records}
    for record in run.steps(1)[0].records:
        if record.sketch is None:
            np.testing.assert_array_equal(record.value, exact[record.site], err_msg=record.site)
    (step,) = run.steps(1)
    # What the trace has of it, too.
    large = {tensor.source.sketched for tensor in step.trace.tensors if np.prod(tensor.shape) > 3904}
    small = {tensor.source.sketched for tensor in step.trace.tensors if np.prod(tensor.shape) <= 3904}
    assert (large, small) == ({True}, {False})


def test_without_functions_the_first_step_is_like_the_others(kit):
    run = recorded_wide(kit, detail="sketch", functions=False)
    assert kinds(run, 0) == kinds(run, 1)
    assert {level for site, level in kinds(run, 0).items() if not site.startswith("(loop)")} == {"sketch"}


def test_small_tensors_stop_where_there_is_no_room(kit):
    """Of a run with a limit they take an eighth; so does what a parameter's gradients of two backwards add up to."""
    x, y = batch(kit, (64, 64), 5)

    def twice(**options):
        model = wide(kit)
        with padiff.record(model, **options) as rec:
            for _ in range(2):
                kit.cross_entropy(model(x), y).backward()
            kit.zero(kit.sgd(model.parameters()))
            rec.try_dump()
        return rec.run

    limit = 40_000
    run, exact = twice(detail="sketch", max_bytes=limit), {r.site: r.value for r in twice().steps(0)[0].records}
    whole = {}
    for record in run.steps(0)[0].records:
        if record.sketch is None:
            np.testing.assert_allclose(record.value, exact[record.site], rtol=1e-5, err_msg=record.site)
            whole[record.source.identity] = record.value.nbytes
        else:
            known = sketch_of(exact[record.site], record.sketch.transposed)
            np.testing.assert_allclose(record.sketch.l2, known.l2, rtol=1e-5, err_msg=record.site)
    # The labels are whole, too; and the trace has some besides.
    assert 0.9 * limit / 8 <= sum(whole.values()) <= limit / 8 + 4 * 3904
    found = kinds(run, 0)
    assert (found["1/weight/weight"], found["0/grad/bias"]) == ("full", "sketch")
    # Without a limit all that is small is whole.
    assert kinds(twice(detail="sketch"), 0)["0/grad/bias"] == "full"


@pytest.mark.filterwarnings("ignore:Accumulating with FP16")
def test_a_bfloat16_parameters_update_is_a_difference_in_float32(kit):
    """A difference of two 16-bit neighbours would be rounded away."""

    class Weighted(kit.Layer):  # paddle has no product of bfloat16 matrices on the CPU
        def __init__(self):
            super().__init__()
            self.inner = kit.Linear(80, 80)

        def forward(self, x):
            return x * self.inner.weight

    runs = {}
    for detail in ("full", "sketch"):
        kit.seed(1)
        model = Weighted()
        model.to(dtype=__import__(kit.name).bfloat16)
        optimizer = kit.sgd(model.parameters(), 0.01)
        with padiff.record(model, optimizer=optimizer, detail=detail) as rec:
            model(kit.tensor(np.random.default_rng(0).normal(size=(80, 80)), "bfloat16")).sum().backward()
            optimizer.step()
            rec.try_dump()
        runs[detail] = {r.site: r for r in rec.run.steps(0)[0].records}
    for site, one in runs["sketch"].items():
        full = runs["full"][site]
        assert (one.dtype, one.shape) == (full.dtype, full.shape)
        if one.sketch is not None:
            made = sketch_of(full.value, one.sketch.transposed)
            assert one.sketch.row().tobytes() == made.row().tobytes(), site
    updates = [r for r in runs["sketch"].values() if r.stage == "update" and r.sketch is not None]
    assert {r.dtype for r in updates} == {"float32"}
    assert all(r.sketch.l2 > 0 for r in updates)


def test_a_run_says_how_it_was_recorded(kit, tmp_path):
    model = mlp(kit)
    with padiff.record(model, tmp_path / "run", detail={"*": "sketch", "0": "full"}, full_every_n_steps=4) as rec:
        model(batch(kit)[0])
        rec.try_dump()
    recording = padiff.open_run(tmp_path / "run").info.recording
    assert recording["detail"] == {"*": "sketch", "0": "full"}
    assert recording["full_every_n_steps"] == 4


def test_in_memory_and_in_a_folder_are_the_same(kit, tmp_path):
    """The folder's writer makes sketches on a thread of its own, in other groups."""
    memory = trained(kit, state_of(kit), steps=2, detail={"*": "sketch", "5": "full"})
    model = state_of(kit)
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, tmp_path / "run", optimizer=optimizer, detail={"*": "sketch", "5": "full"}) as rec:
        for k in range(2):
            one_step(kit, model, optimizer, *batch(kit, (8, 1, 6, 6), 5, seed=k), rec)
    folder = padiff.open_run(tmp_path / "run")
    for number in (0, 1):
        (reference,), (candidate,) = memory.steps(number), folder.steps(number)
        assert len(reference.records) == len(candidate.records) > 30
        for one, other in zip(reference.records, candidate.records):
            assert one.site == other.site
            values = [r.value if r.sketch is None else r.sketch.row() for r in (one, other)]
            np.testing.assert_array_equal(values[0], values[1], err_msg=one.site)


def test_a_pattern_that_fits_no_layer_is_reported_at_once(kit):
    with pytest.raises(SelectionError, match="detail"):
        padiff.record(mlp(kit), detail={"nothere.*": "sketch"})
    with pytest.raises(UsageError, match="level of detail"):
        padiff.record(mlp(kit), detail="all")


# -- neutral -----------------------------------------------------------------------------------------------------------


def result(kit, folder=None, optimizer=True, **options):
    kit.seed(7)
    model = cnn(kit)
    made = kit.adam(model.parameters())
    batches = [batch(kit, (8, 1, 6, 6), 5, seed=k) for k in range(5)]
    losses, gradients = [], []

    def step(rec=None):
        x, y = batches[len(losses)]
        loss = kit.cross_entropy(model(x), y)
        loss.backward()
        gradients.append([kit.numpy(p.grad) for p in model.parameters() if p.grad is not None])
        made.step()
        kit.zero(made)
        losses.append(kit.numpy(loss))
        if rec is not None:
            rec.log_loss(loss)
            rec.try_dump()

    if folder is None:
        for _ in batches:
            step()
    else:
        with padiff.record(model, folder, optimizer=made if optimizer else None, **options) as rec:
            for _ in batches:
                step(rec)
    assert hook_count(kit, model, made) == 0
    return losses, gradients, kit.state(model), kit.drawn()


OPTIONS = [
    {"detail": "sketch"},
    {"detail": "sketch", "full_every_n_steps": 2},
    {"detail": {"*": "nothing", "weight": "sketch"}, "optimizer": False},
    {"detail": {"*": "sketch", "backward": "full", "0": "nothing"}, "compression": "zlib", "max_bytes": 10**7},
    {"pack": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[str(one) for one in OPTIONS])
def test_the_training_is_the_same_to_the_bit(kit, tmp_path, options):
    plain, recorded = result(kit), result(kit, tmp_path / "run", **options)
    for reference, candidate in zip(plain[:2], recorded[:2]):
        assert len(reference) == len(candidate) == 5
    np.testing.assert_array_equal(np.stack(plain[0]), np.stack(recorded[0]))
    for reference, candidate in zip(plain[1], recorded[1]):
        for one, other in zip(reference, candidate):
            np.testing.assert_array_equal(one, other)
    assert plain[2].keys() == recorded[2].keys()
    for name, value in plain[2].items():
        np.testing.assert_array_equal(value, recorded[2][name], err_msg=name)
    np.testing.assert_array_equal(plain[3], recorded[3])


def test_hooks_are_gone_after_an_error(kit, tmp_path):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    with pytest.raises(ZeroDivisionError), padiff.record(model, tmp_path / "run", optimizer=optimizer, detail="sketch"):
        kit.cross_entropy(model(batch(kit)[0]), batch(kit)[1]).backward()
        raise ZeroDivisionError
    assert hook_count(kit, model, optimizer) == 0
