"""Traces in run folders: what comes back, in both formats, and what is damaged."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from kit.records import info as info_of
from kit.records import memory_run, root

import padiff
from padiff.dump.format import REPORT_FILE
from padiff.errors import PadiffError
from padiff.records import LOOP, NO_TRACE, Step
from padiff_cli.doctor.run_check import check_run

X = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
FORMATS = {
    "files": {},
    "packed": {"pack": True},
    "compressed": {"pack": True, "compression": "zlib"},
    "sketches": {"detail": "sketch"},
    "mixed": {"detail": {"*": "sketch", "first": "full"}},
}


def net_of(kit):
    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.last = kit.Linear(4, 4), kit.Linear(4, 3)

        def forward(self, x):
            return self.last(kit.relu(self.first(x)).reshape([5, 2, 2]).reshape([5, 4]) + x * 0.5)

    return Net()


def trained(kit, folder=None, x=X, steps=3, **options):
    kit.seed(0)
    model = net_of(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            model(kit.tensor(x)).sum().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run if folder is None else padiff.open_run(folder)


@pytest.fixture(params=FORMATS)
def options(request):
    return FORMATS[request.param]


def test_what_is_read_is_what_was_recorded(kit, options, tmp_path):
    held, run = trained(kit, **options), trained(kit, tmp_path / "run", **options)
    for number in held.numbers():
        one, other = (each.steps(number)[0].trace for each in (held, run))
        assert list(one.calls) == list(other.calls)
        assert one.functions == other.functions == (number < (1 if "detail" in options else 2))
        assert len(one.tensors) == len(other.tensors) > 0
        for a, b in zip(one.tensors, other.tensors):
            assert (a.dtype, a.shape, a.source.sketched) == (b.dtype, b.shape, b.source.sketched)
            if a.source.sketched:
                np.testing.assert_array_equal(a.source.row, b.source.row)
            else:
                np.testing.assert_array_equal(a.source.read(), b.source.read())


def test_an_output_is_stored_once(kit, options, tmp_path):
    step = trained(kit, tmp_path / "run", **options).steps(1)[0]
    (record,) = (r for r in step.records if r.site == "first/forward/output.0")
    (call,) = (c for c in step.trace.calls if c.layer == "first")
    assert step.trace.tensors[call.outputs[0].tensor].source.identity == record.source.identity


def test_large_tensors_are_sketched_beside_full_ones(kit, tmp_path):
    large = np.random.default_rng(0).normal(size=(5000, 4)).astype(np.float32)

    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.last = kit.Linear(4, 4), kit.Linear(4, 3)

        def forward(self, x):
            return self.last(self.first(x) + 1)

    with padiff.record(Net_ := Net(), tmp_path / "run") as rec:
        Net_(kit.tensor(large)).sum().backward()
        rec.try_dump()
    step = padiff.open_run(tmp_path / "run").steps(0)[0]
    assert not any(r.source.sketched for r in step.records)
    assert (tmp_path / "run/steps/00000000/rank_0/tensors/sketches.npy").exists()
    (call,) = (c for c in step.trace.calls if c.function and c.layer != LOOP)
    tensor = step.trace.tensors[call.outputs[0].tensor]
    output = next(r for r in step.records if r.site == "first/forward/output.0").value
    assert tensor.source.sketch.l2 == pytest.approx(np.linalg.norm(output + 1), rel=0.1)


def test_steps_of_one_structure_share_it(kit, tmp_path):
    trained(kit, tmp_path / "run", steps=6, detail="sketch")
    # One with functions, one without.
    assert len(list((tmp_path / "run" / "structures").iterdir())) == 2


def test_a_moved_step_without_a_trace_has_none(kit, tmp_path):
    run = trained(kit, tmp_path / "run")
    for number in run.numbers():
        path = tmp_path / f"run/steps/{number:08d}/rank_0/{REPORT_FILE}"
        content = json.loads(path.read_text())
        assert content.pop("trace")
        path.write_text(json.dumps(content))
    run = padiff.open_run(tmp_path / "run")
    assert all(run.steps(number)[0].trace is NO_TRACE for number in run.numbers())
    report = padiff.compare_runs(run, trained(kit))
    assert report.passed, report.first_diff.message


def test_a_step_made_by_hand_has_none():
    run = memory_run(info_of(root(0)), Step(0, ()))
    assert run.steps(0)[0].trace is NO_TRACE


def forged(change):
    def forge(folder):
        path = folder / f"steps/00000000/rank_0/{REPORT_FILE}"
        content = json.loads(path.read_text())
        change(content["trace"])
        path.write_text(json.dumps(content))

    return forge


def lost(folder):
    for path in (folder / "steps/00000000/rank_0/tensors").glob("trace-*.npy"):
        path.unlink()


DAMAGES = {
    "a number": forged(lambda trace: trace["calls"][0]["inputs"].append(["x", 9999])),
    "below zero": forged(lambda trace: trace["calls"][0]["inputs"].append(["x", -1])),
    "no operand": forged(lambda trace: trace["calls"][0]["inputs"].append("x")),
    "no calls": forged(lambda trace: trace.pop("calls")),
    "kept as": forged(lambda trace: trace["tensors"][0].__setitem__(2, "elsewhere")),
    "a shape": forged(lambda trace: trace["tensors"][0].__setitem__(1, [-1])),
    "a sketch": forged(lambda trace: trace["tensors"][0].__setitem__(slice(2, 4), ["sketch", 99])),
    "outside": forged(lambda trace: trace["tensors"][0].__setitem__(slice(2, 4), ["file", "../../run.json"])),
    "text": forged(lambda trace: trace.__setitem__("tensors", "text")),
    "deep": forged(
        lambda trace: trace["calls"][0].__setitem__("arguments", {"x": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]})
    ),
    "lost": lost,
}


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    """A run in a folder, and the same in memory."""
    from kit.frameworks import TORCH  # not above: it imports both frameworks

    folder = tmp_path_factory.mktemp("undamaged") / "run"
    trained(TORCH, folder)
    return folder, trained(TORCH)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_trace_is_reported_and_the_rest_is_compared(undamaged, damage, tmp_path):
    folder, same = undamaged
    shutil.copytree(folder, tmp_path / "run")
    DAMAGES[damage](tmp_path / "run")
    run = padiff.open_run(tmp_path / "run")
    with pytest.raises(PadiffError):
        found = run.steps(0)[0].trace
        list(found.calls)
        [tensor.source.read() for tensor in found.tensors]
    health = check_run(run, tmp_path / "run")
    assert len(health.damaged) == 1
    assert "step 0" in health.damaged[0]
    # Where everything agrees nobody looks at it.
    assert padiff.compare_runs(run, same).passed


def test_a_diff_is_reported_even_where_its_trace_is_damaged(kit, tmp_path):
    trained(kit, tmp_path / "run")
    forged(lambda trace: trace.__setitem__("calls", [{}]))(tmp_path / "run")
    kit.seed(0)
    model = net_of(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    model.last.register_forward_post_hook(lambda *given: given[-1] * 2) if kit.name == "paddle" else (
        model.last.register_forward_hook(lambda *given: given[-1] * 2)
    )
    with padiff.record(model, tmp_path / "other", optimizer=optimizer) as rec:
        model(kit.tensor(X)).sum().backward()
        optimizer.step()
        kit.zero(optimizer)
        rec.try_dump()
    first = padiff.compare_runs(tmp_path / "run", tmp_path / "other").first_diff
    assert (first.reference, first.slot, first.inside, first.call) == ("last", "output.0", None, "")
    assert "output is 2 times the reference's" in first.cause.sentence


def test_many_structures_hold_their_traces_in_the_steps(kit, tmp_path):
    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.last = kit.Linear(4, 3)

        def forward(self, x):
            return self.last(x + 1)

    model = Net()
    with padiff.record(model, tmp_path / "run", pack=True) as rec:
        for count in range(1, 25):
            model(kit.tensor(np.ones((count, 4)))).sum().backward()
            rec.try_dump()
    run = padiff.open_run(tmp_path / "run")
    for number in run.numbers():
        (call,) = (c for c in run.steps(number)[0].trace.calls if c.layer == "last")
        tensor = run.steps(number)[0].trace.tensors[call.inputs[0].tensor]
        np.testing.assert_array_equal(tensor.source.read(), np.full((number + 1, 4), 2.0))
