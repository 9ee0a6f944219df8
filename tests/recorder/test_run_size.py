"""The line that says how large a run becomes: held against what is on disk in the end."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from kit.frameworks import KITS
from kit.nets import mlp

import padiff
from padiff.recorder.options import Schedule

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_LINE = re.compile(r"a step takes (\S+ \S+), expect (\S+ \S+) for (all )?([\d,]+) recorded step")


def said_bytes(text):
    number, unit = text.split()
    return float(number) * _UNITS[unit]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "steps").rglob("*") if path.is_file())


def folder_bytes_of(folder: Path, step: int) -> int:
    return sum(path.stat().st_size for path in (folder / "steps" / f"{step:08d}").rglob("*") if path.is_file())


def train(kit, folder, steps, end=None, width=128, **options):
    model = mlp(kit, (64, width, 10))
    optimizer = kit.sgd(model.parameters())
    data = np.random.default_rng(0)
    recorder = padiff.record(model, folder, optimizer=optimizer, **options)
    recorder.expect_end(end)
    with recorder as rec:
        for _ in range(steps):
            x, y = kit.tensor(data.normal(size=(32, 64))), kit.tensor(data.integers(0, 10, 32), "int64")
            kit.cross_entropy(model(x), y).backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()


OPTIONS = ({}, {"every_n_steps": 2}, {"full_every_n_steps": 5}, {"detail": {"0": "full", "*": "auto"}})


@pytest.mark.parametrize(
    ("name", "budget", "options"),
    [(("torch", "paddle")[(row + column) % 2], budget, options)
     for row, budget in enumerate((200e6, 700e3)) for column, options in enumerate(OPTIONS)],
)  # fmt: skip
def test_it_is_the_size_of_the_run_where_the_number_of_steps_is_known(
    name, budget, options, tmp_path, capsys, monkeypatch
):
    """Any two of the frameworks, the budgets and the options together."""
    monkeypatch.setattr("padiff.recorder.session.FULL_BYTES", budget)
    train(KITS[name], tmp_path / "run", 60, end=60, **options)
    said = capsys.readouterr().err
    step, size, every, count = _LINE.search(said).groups()
    recorded = 60 // options.get("every_n_steps", 1)
    assert every and int(count) == recorded == len(padiff.open_run(tmp_path / "run").numbers())
    assert said_bytes(size) == pytest.approx(folder_bytes(tmp_path / "run"), rel=0.15)
    if budget > 1e8:
        assert said_bytes(step) * recorded == pytest.approx(said_bytes(size), rel=0.02)
        assert "sketches" not in said.split("\n")[0]


def test_it_is_said_for_a_thousand_steps_where_their_number_is_not_known(kit, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("padiff.recorder.session.FULL_BYTES", 700e3)
    train(kit, tmp_path / "run", 60)
    _, size, every, count = _LINE.search(capsys.readouterr().err).groups()
    assert every is None and count == "1,000"
    folders = sorted((tmp_path / "run" / "steps").iterdir())
    last = sum(path.stat().st_size for path in folders[-1].rglob("*") if path.is_file())
    assert said_bytes(size) == pytest.approx(folder_bytes(tmp_path / "run") + 940 * last, rel=0.15)


def test_full_tensors_stay_within_the_budget_if_the_first_step_holds_sketches(kit, tmp_path, monkeypatch):
    # A step in full has the weights, 0.61 MB, three times: the first step has room for the weights alone.
    monkeypatch.setattr("padiff.recorder.session.FULL_BYTES", 1.5e6)
    train(kit, tmp_path / "run", 4, width=2048)
    sizes = [folder_bytes_of(tmp_path / "run", step) for step in range(4)]
    assert 0.61e6 < sizes[0] < 1.5e6
    assert max(sizes[1:]) < 30e3


def test_no_number_of_steps_is_said_that_nobody_trains(kit, tmp_path, capsys):
    train(kit, tmp_path / "run", 1)
    line = capsys.readouterr().err.splitlines()[0]
    assert line.endswith('full tensors up to 200.0 MB, then sketches (detail="full" keeps all tensors)')
    assert not re.search(r"\d,\d{3},\d{3}", line) and len(line.split()) <= 25


def test_with_full_detail_the_whole_run_is_said(kit, tmp_path, capsys):
    train(kit, tmp_path / "run", 10, end=10, detail="full")
    line = capsys.readouterr().err.splitlines()[0]
    size = re.fullmatch(r"padiff: each recorded step takes \S+ \S+, expect (\S+ \S+) for all 10", line).group(1)
    assert said_bytes(size) == pytest.approx(folder_bytes(tmp_path / "run"), rel=0.15)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(),
        Schedule(every=3),
        Schedule(every=3, first=2),
        Schedule(every=7, first=5, last=20),
        Schedule(last=4),
        Schedule(steps=[1, 5, 9, 40]),
    ],
    ids=str,
)
@pytest.mark.parametrize("begin", [0, 1, 4, 30])
@pytest.mark.parametrize("length", [0, 1, 7, 30])
def test_due_steps_are_counted(schedule, begin, length):
    assert schedule.count(begin, begin + length) == sum(map(schedule.due, range(begin, begin + length)))
