"""What is kept by default: full tensors within a budget, then sketches; nothing that relies on more is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kit.trainings import STEPS, X, Y, optimizer_of, paddle_net, torch_net, trained

import padiff
from padiff.recorder import session
from padiff.recorder.levels import FULL_BYTES
from padiff.records import LOOP

MAKE = {
    "torch": optimizer_of("torch", "SGD", {"lr": 0.1}),
    "paddle": optimizer_of("paddle", "SGD", {"learning_rate": 0.1}),
}
FRAMEWORKS = ("torch", "paddle")


def sketched(run):
    return [sum(r.source.sketched for r in run.steps(number)[0].records) for number in run.numbers()]


def files(folder, number):
    return sorted(path.suffix for path in (folder / "steps" / f"{number:08d}" / "rank_0").iterdir())


@pytest.fixture
def budget(monkeypatch):
    return lambda size: monkeypatch.setattr(session, "FULL_BYTES", size)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_small_runs_are_kept_in_full(framework):
    run = trained(framework, MAKE[framework], steps=6)
    assert FULL_BYTES == 200_000_000 and sketched(run) == [0] * 6
    assert run.info.recording["detail"] == {"*": "auto"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_full_steps_take_no_more_than_the_budget(framework, steps, budget, tmp_path, capsys):
    full = trained(framework, MAKE[framework], steps=1, detail="full").steps(0)[0]
    sources = [r.source for r in full.records] + [t.source for t in full.trace.tensors if t.source is not None]
    arrays = {id(a): a.nbytes for source in sources for a in source.arrays}
    budget(sum(arrays.values()) * steps + 100)
    run = trained(framework, MAKE[framework], steps=6)
    kept = [count == 0 for count in sketched(run)]
    assert kept == [True] * steps + [False] * (6 - steps)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_of_both_kinds_of_steps_compares_with_one_that_has_all(framework, budget, tmp_path):
    reference = trained(framework, MAKE[framework], steps=6, detail="full")
    budget(6_000)
    run = trained(framework, MAKE[framework], steps=6)
    assert 0 < sum(count == 0 for count in sketched(run)) < 6
    for pair in ((reference, run), (run, reference), (run, run)):
        report = padiff.compare_runs(*pair)
        assert report.passed and report.coverage.share == 1.0 and report.coverage.steps == tuple(range(6))


def _rate(at):
    def each(step, net, optimizer):
        if step == at:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.param_groups[0]["lr"] = 0.11
            else:
                optimizer.set_lr(0.11)

    return each


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("at", range(6))
def test_a_fault_is_placed_whichever_step_it_is_in(framework, at, budget):
    reference = trained(framework, MAKE[framework], steps=6, detail="full")
    budget(6_000)
    first = padiff.compare_runs(reference, trained(framework, MAKE[framework], steps=6, each=_rate(at))).first_diff
    assert (first.step, first.stage) == (at, "update")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_of_a_model_that_is_too_large_the_first_weights_are_kept(framework, budget, tmp_path, capsys):
    budget(1)
    net = torch_net() if framework == "torch" else paddle_net()
    optimizer, folder = MAKE[framework](net), tmp_path / "run"
    tensor = torch.tensor if framework == "torch" else __import__("paddle").to_tensor
    before = [np.asarray(p.detach().numpy() if framework == "torch" else p.numpy()).copy() for p in net.parameters()]
    with padiff.record(net, folder, optimizer=optimizer, functions=False) as rec:
        for step in range(2):
            ((net(tensor(X[step])) - tensor(Y[step])) ** 2).mean().backward()
            optimizer.step()
            rec.try_dump()
    first, second = (padiff.open_run(folder).steps(number)[0] for number in (0, 1))
    kept = [r.value for r in first.records if r.stage == "weight"]
    assert all(np.array_equal(one, other) for one, other in zip(kept, before)) and len(kept) == len(before)
    others = [r for r in first.records if r.stage not in ("weight", "loss") and r.layer != LOOP]
    assert others and all(r.source.sketched for r in others)
    assert all(r.source.sketched for r in second.records if r.stage == "weight")
    other = torch_net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    padiff.start_from(folder, other)
    reference = [p.detach().numpy() for p in other.parameters()]
    candidate = [value.T if framework == "paddle" and value.ndim == 2 else value for value in before]
    assert all(np.array_equal(one, other) for one, other in zip(reference, candidate))
    assert "the first recorded step, as far as it fits" in capsys.readouterr().err


def test_steps_are_files_until_they_have_sketches_and_the_size_is_said(budget, tmp_path, capsys):
    budget(6_000)
    trained("torch", MAKE["torch"], steps=6, folder=tmp_path / "run")
    said = capsys.readouterr().err
    assert said.startswith("padiff: a step takes ") and 'recorded steps, then sketches (detail="full"' in said
    run = padiff.open_run(tmp_path / "run")
    packed = [".safetensors" in files(tmp_path / "run", number) for number in run.numbers()]
    assert packed == [count > 0 for count in sketched(run)] and True in packed and False in packed
    assert padiff.compare_runs(tmp_path / "run", trained("torch", MAKE["torch"], steps=6)).passed


@pytest.mark.parametrize(
    ("options", "full"),
    [({"detail": "full"}, 6), ({"pack": False}, 6), ({"full_every_n_steps": 5}, 4), ({"detail": "sketch"}, 0)],
)
def test_a_word_changes_it(options, full, budget, tmp_path):
    budget(6_000)
    trained("torch", MAKE["torch"], steps=6, folder=tmp_path / "run", functions=False, **options)
    assert sketched(padiff.open_run(tmp_path / "run")).count(0) == full


def test_a_run_that_is_resumed_counts_what_it_has(budget, tmp_path):
    budget(6_000)
    folder = tmp_path / "run"
    trained("torch", MAKE["torch"], steps=STEPS, folder=folder, functions=False)
    trained("torch", MAKE["torch"], steps=2, first=STEPS, folder=folder, functions=False, existing="resume")
    counts = sketched(padiff.open_run(folder))
    assert all(counts[STEPS:])
