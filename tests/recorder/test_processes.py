"""A process that records as one of several: what launchers say, and ranks that record nothing are named."""

import re
import warnings

import pytest
import torch

import padiff
from padiff.errors import NothingToCompareError, UsageError
from padiff.frameworks import framework_of
from padiff_cli.main import main

LAUNCHED = {"torch": ("RANK", "WORLD_SIZE"), "paddle": ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")}


def recorded(folder, steps=2, **options):
    net = torch.nn.Linear(4, 4)
    with padiff.record(net, folder, **options) as rec:
        for _ in range(steps):
            net(torch.ones(2, 4)).sum().backward()
            rec.try_dump()
    return folder


def a_model(framework):
    if framework == "torch":
        return torch.nn.Linear(2, 2)
    import paddle

    return paddle.nn.Linear(2, 2)


@pytest.mark.parametrize("framework", LAUNCHED)
def test_before_the_process_group_is_made_the_launcher_has_said_the_rank(framework, monkeypatch):
    environment = framework_of(a_model(framework)).environment
    rank, world_size = LAUNCHED[framework]
    monkeypatch.setenv(rank, "2")
    monkeypatch.setenv(world_size, "4")
    assert environment.distributed() == (2, 4)
    monkeypatch.setenv(rank, "4")  # of no such launcher
    assert environment.distributed() == (0, 1)
    monkeypatch.setenv(rank, "two")
    assert environment.distributed() == (0, 1)
    monkeypatch.delenv(rank)  # the number of processes alone says nothing
    assert environment.distributed() == (0, 1)


def test_ranks_that_record_nothing_are_named_at_the_second_step(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(RuntimeWarning, match=r"this is rank 0 of 4, and ranks 1, 2, 3 record nothing into .*run"):
        recorded(tmp_path / "run")


def test_a_run_of_one_step_says_it_at_its_end(tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded(tmp_path / "run", steps=1, rank=1, world_size=2)
    assert "this is rank 1 of 2, and rank 0 records nothing into" in capsys.readouterr().err


def test_the_lowest_rank_that_is_there_says_it_and_all_ranks_together_say_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nets = [torch.nn.Linear(4, 4) for _ in range(2)]
        recorders = [padiff.record(net, tmp_path / "run", rank=r, world_size=2) for r, net in enumerate(nets)]
        with recorders[0], recorders[1]:
            for _ in range(3):
                for net, rec in zip(nets, recorders):
                    net(torch.ones(2, 4)).sum().backward()
                    rec.try_dump()
        assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2]

    nets = [torch.nn.Linear(4, 4) for _ in range(2)]
    recorders = [padiff.record(net, tmp_path / "lacks", rank=r, world_size=4) for r, net in enumerate(nets)]
    with recorders[0], recorders[1], warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for net, rec in zip(nets, recorders):
                net(torch.ones(2, 4)).sum().backward()
                rec.try_dump()
    assert [re.search(r"this is (rank \d of \d), and (.*?) record", str(w.message)).groups() for w in caught] == [
        ("rank 0 of 4", "ranks 2, 3")
    ]


def test_one_process_can_be_kept_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = padiff.open_run(recorded(tmp_path / "run", rank=0, world_size=1))
    assert run.numbers() == [0, 1]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"world_size": -5}, "at least 1; got -5"),
        ({"rank": 2, "world_size": 2}, "from 0 to 1, for there are 2 processes; got 2"),
        ({"rank": -1, "world_size": 2}, "got -1"),
        ({"rank": 1}, "for there is 1 process; got 1. Give world_size, too"),
    ],
)
def test_there_is_no_such_rank(tmp_path, place, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        recorded(tmp_path / "run", **place)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def lacking(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return recorded(tmp_path / "lacking", rank=0, world_size=4)


def test_doctor_calls_a_finished_run_that_lacks_ranks_damaged(lacking, capsys):
    assert main(["doctor", str(lacking)]) == 1
    said = capsys.readouterr().out
    assert "step 1 can't be read: of 4 ranks only 0 wrote it" in said and "was being written" not in said


def test_comparing_says_which_ranks_are_missing(lacking, tmp_path):
    with pytest.raises(NothingToCompareError, match="of the 4 ranks of lacking only rank 0 wrote step 0"):
        padiff.compare_runs(lacking, recorded(tmp_path / "other"))
