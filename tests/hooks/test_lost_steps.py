"""A step that a rank did not write is not compared: whoever compares, follows or looks says which rank's and which."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from kit.records import info, linear, record, root, step

import padiff
from padiff.dump import RunWriter, open_run
from padiff.dump.prepare import missing_steps
from padiff.dump.remote_write import StoreWriter
from padiff.dump.storage import Storage
from padiff.dump.store import run_folder
from padiff_cli.main import main
from padiff_hooks.live import LiveComparison

STEPS = 5


def write(folder, lost, ended=True):
    """Three ranks, one after the other; a rank writes all steps but those that are lost to it."""
    about = info(root(1), linear("fc", 2, 2), world_size=3)
    place = run_folder(folder, "run")
    writer_of = RunWriter if isinstance(place, Path) else StoreWriter
    writers = [writer_of(place, about, rank=rank, storage=Storage(pack=True)) for rank in range(3)]
    for number in range(STEPS):
        for rank, writer in enumerate(writers):
            if number not in lost.get(rank, ()):
                weights = [
                    record("fc", "weight", slot, np.ones(size)) for slot, size in (("weight", (2, 2)), ("bias", 2))
                ]
                writer.add_step(step(number, weights, rank=rank))
                writer.flush()
    for writer in writers if ended else ():
        writer.close()
    return writers


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("lost")
    write(base / "whole", {})
    write(base / "some", {1: (2,), 2: (2, 4)})
    return base


@pytest.mark.parametrize("order", [("whole", "some"), ("some", "whole")])
def test_comparing_says_which_rank_lost_which_steps(order, runs, capsys, tmp_path):
    paths = [str(runs / name) for name in order]
    report = padiff.compare_runs(*paths)
    side = "candidate" if order[1] == "some" else "reference"
    one = f"rank 1 of the {side} did not write step 2, so nothing of it is compared"
    two = f"rank 2 of the {side} did not write steps 2 and 4, so nothing of them is compared"
    assert report.coverage.lost == (one, two) and report.passed
    assert [list(report.coverage.steps), report.outcome] == [[0, 1, 3], "match"]
    assert main(["compare", *paths, "--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"R{one[1:]}." in said and f"R{two[1:]}." in said
    assert said.startswith("MATCH 18 tensors in 3 steps, 100% of what was recorded")
    assert json.loads((tmp_path / "out.json").read_text())["coverage"]["lost"] == [one, two]
    assert two in (tmp_path / "out.md").read_text()


def test_a_whole_run_says_nothing_of_it(runs):
    report = padiff.compare_runs(runs / "whole", runs / "whole")
    assert report.coverage.lost == () and "did not write" not in str(report)


def test_who_follows_two_runs_says_it_once_and_at_the_end(runs, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    paths = [str(runs / name) for name in ("whole", "some")]
    assert main(["watch", *paths, "--logdir", str(tmp_path / "tb")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    line = f"ank 2 of {paths[1]} did not write steps 2 and 4"
    assert said.count(f"r{line}") == 1 and said.count(f"R{line}") == 1
    live = LiveComparison(*map(Path, paths), "warn", None, None)
    live.start(True, None, None)
    for _ in range(2):
        live.compare()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        live.say()
    assert sum(f"r{line}" in str(one.message) for one in warned) == 1
    assert f"r{line}" in live.summary() and "they match" in live.summary()


def test_a_rank_that_is_slower_has_lost_nothing_until_it_has_ended(tmp_path):
    writers = write(tmp_path / "run", {2: (3, 4)}, ended=False)
    run = open_run(tmp_path / "run")
    assert run.numbers() == [0, 1, 2] and missing_steps(run) == {}
    writers[2].close()
    assert missing_steps(run) == {2: [3, 4]}
    for writer in writers[:2]:
        writer.close()
    assert missing_steps(run) == {2: [3, 4]}


def test_a_rank_that_has_not_begun_has_lost_nothing_while_others_record(tmp_path):
    writers = write(tmp_path / "run", {2: range(STEPS)}, ended=False)
    writers[2].close(finished=False)
    run = open_run(tmp_path / "run")
    assert missing_steps(run) == {}
    for writer in writers[:2]:
        writer.close()
    assert missing_steps(run) == {2: [*range(STEPS)]}


def test_a_later_step_shows_what_is_lost_while_all_record(tmp_path):
    writers = write(tmp_path / "run", {1: (2,)}, ended=False)
    assert missing_steps(open_run(tmp_path / "run")) == {1: [2]}
    for writer in writers:
        writer.close()


def test_of_a_number_of_ranks_that_nobody_has_some_are_named(runs, tmp_path):
    write(tmp_path / "run", {0: (1,)})
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**about, "world_size": 10**9}))
    report = padiff.compare_runs(tmp_path / "run", tmp_path / "run")
    assert len(report.coverage.lost[0]) < 200 and "9 ranks" not in report.coverage.lost[0]


def test_of_a_store_the_same_is_said_once_the_run_has_ended():
    pytest.importorskip("fsspec")
    writers = write("memory://lost/run", {1: (2,), 2: (4,)}, ended=False)
    run = open_run("memory://lost/run")
    assert missing_steps(run) == {1: [2]}
    for writer in writers:
        writer.close()
    assert missing_steps(run) == {1: [2], 2: [4]}
    assert "rank 2 of the reference did not write step 4" in str(padiff.compare_runs(run, run))


def test_a_callback_without_a_reference_says_it_when_it_ends(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from padiff_hooks.training import TrainingRecorder

    nets = [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    recorders = [TrainingRecorder(tmp_path / "run") for _ in nets]
    for rank, (recorder, net, optimizer) in enumerate(zip(recorders, nets, optimizers)):
        recorder.start(net, [optimizer], rank=rank, world_size=2)
    for number in range(3):
        for rank in (0, 1) if number < 2 else (0,):
            recorders[rank].begin_batch()
            nets[rank](torch.ones(1, 2)).sum().backward()
            optimizers[rank].step()
            recorders[rank].end_batch()
            recorders[rank].end_step()
    recorders[1].finish()
    assert "did not write" not in capsys.readouterr().err
    recorders[0].finish()
    assert f"padiff: rank 1 of {tmp_path / 'run'} did not write step 2" in capsys.readouterr().err
