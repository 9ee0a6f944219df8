"""How a recording ends, and what is said of it: the line at the end, steps that nobody ended, a full memory, Ctrl-C."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.frameworks import hook_count
from kit.nets import batch, mlp, one_step, recorded

import padiff
from padiff.compare import RunComparison
from padiff.recorder.output import MemoryRun


def train(kit, steps, folder=None, dump=True, **options):
    """Train a small net for some steps; the recorder."""
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            one_step(kit, model, optimizer, x, y)
            if dump:
                rec.try_dump()
    return rec


# -- the line at the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"pack": True}, {"detail": "sketch"}], ids=["files", "packed", "sketches"])
def test_a_recording_says_how_much_it_left_and_where(kit, tmp_path, capfd, options):
    folder = tmp_path / "run"
    train(kit, 12, folder, every_n_steps=4, **options)
    size = sum(path.stat().st_size for path in (folder / "steps").rglob("*") if path.is_file())
    *before, last = capfd.readouterr().err.splitlines()
    assert last == f"padiff: recorded 3 steps, {size / 1000:.1f} kB, in {folder}"
    assert [line.startswith("padiff: a step takes ") for line in before] == ([] if "detail" in options else [True])


def test_a_resume_says_what_it_added(kit, tmp_path, capfd):
    train(kit, 3, tmp_path / "run")
    train(kit, 1, tmp_path / "run", existing="resume", start_step=3)
    assert capfd.readouterr().err.splitlines()[-1].startswith("padiff: recorded 1 step, ")


def test_a_recording_that_left_nothing_says_so(kit, tmp_path, capfd):
    train(kit, 3, tmp_path / "run", every_n_steps=padiff.Schedule(every=1, first=100))
    assert capfd.readouterr().err.startswith(f"padiff: recorded no step in {tmp_path / 'run'}: none was due")


def test_nothing_is_said_in_memory_after_an_error_or_where_it_is_switched_off(kit, tmp_path, capfd, monkeypatch):
    train(kit, 2)
    with pytest.raises(ZeroDivisionError), padiff.record(mlp(kit), tmp_path / "left"):
        raise ZeroDivisionError
    monkeypatch.setenv("PADIFF_QUIET", "on")
    train(kit, 2, tmp_path / "quiet")
    assert capfd.readouterr().err == ""


# -- steps that nobody ended ---------------------------------------------------------------------------------------


def test_forgetting_to_end_steps_is_said_when_the_recording_ends(kit):
    with pytest.warns(RuntimeWarning, match=r"try_dump\(\) was never called, so 4 optimizer steps are recorded as one"):
        rec = train(kit, 4, dump=False)
    assert rec.run.numbers() == [0]
    assert {site for site in recorded(rec) if site.startswith("0/update/weight")} == {
        f"0/update/weight{call}" for call in ("", "#1", "#2", "#3")
    }


def test_forgetting_to_end_steps_is_said_early_and_once(kit):
    with pytest.warns(RuntimeWarning) as reported:
        train(kit, 25, dump=False)
    said = [str(w.message) for w in reported if "try_dump()" in str(w.message)]
    assert len(said) == 2
    assert said[0].startswith("padiff: an optimizer stepped 10 times, and try_dump() was not called")


def test_one_step_and_several_steps_of_a_critic_are_nobodys_mistake(kit):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(kit, 1, dump=False)
        model = mlp(kit)
        optimizer = kit.sgd(model.parameters())
        x, y = batch(kit)
        with padiff.record(model, optimizer=optimizer) as rec:
            for _ in range(3):
                for _ in range(5):
                    one_step(kit, model, optimizer, x, y)
                rec.try_dump()
    assert rec.run.numbers() == [0, 1, 2]


# -- a run in memory -----------------------------------------------------------------------------------------------


def test_a_run_in_memory_is_bounded_and_says_so_once(kit):
    whole = train(kit, 2)
    each = sum(value.nbytes for value in recorded(whole, 1).values())
    with pytest.warns(RuntimeWarning, match="this run is kept in memory") as reported:
        rec = train(kit, 12, max_bytes=4 * each)
    said = [str(w.message) for w in reported if "kept in memory" in str(w.message)]
    assert len(said) == 1 and "step 1 was let go" in said[0]
    assert rec.run.numbers()[0] == 0 and rec.run.numbers()[-1] == 11
    # Outputs that are seen at two sites are held once, weights before and after an update are.
    assert 3 <= len(rec.run.numbers()) <= 8 and rec.run.dropped == list(range(1, 1 + len(rec.run.dropped)))
    assert len(rec.run.dropped) + len(rec.run.numbers()) == 12


def test_without_a_bound_of_ones_own_there_is_one_gigabyte(kit):
    assert train(kit, 1).run.max_bytes == 1_000_000_000
    assert MemoryRun(train(kit, 1).info).max_bytes == 1_000_000_000


# -- what print shows ----------------------------------------------------------------------------------------------


def test_a_printed_run_is_what_it_holds(kit, tmp_path):
    rec = train(kit, 3, tmp_path / "run")
    for run in (padiff.open_run(tmp_path / "run"), train(kit, 3).run):
        lines = str(run).splitlines()
        # 4 * 8 + 8 + 8 * 3 + 3 parameters.
        assert f"{kit.name} " in lines[0] and "Sequential, 4 layers, 67 parameters, 3 recorded steps" in lines[0]
        assert lines[1] == "steps: 0, 1, 2"
        assert lines[2].startswith("step 0, rank 0: 4 weight, 1 input, 4 forward, ")
        assert [line.split()[0] for line in lines[3:7]] == ["(root)", "0", "1", "2"]
        assert [line.split(", ")[0] for line in lines[7:]] == [
            "optimizer.0: rule SGD",
            lines[8].split(", ")[0],
            "run: training True",
            "loss: function cross_entropy",
            "clip: kind none",
        ]
        assert lines[8].startswith("optimizer.0.group.0: ")
        assert "Sequential, 4 layers" in repr(run) and len(repr(run)) < 250
    assert repr(rec) == (
        f"<Recorder closed Sequential ({kit.name}) into {tmp_path / 'run'}, every 1 steps: step 3 is under way, "
        "3 recorded>"
    )


def test_a_printed_recorder_says_what_it_is_doing(kit, tmp_path):
    model = mlp(kit)
    with padiff.record(model, tmp_path / "run", every_n_steps=2) as rec:
        assert str(rec) == (
            f"recording Sequential ({kit.name}) into {tmp_path / 'run'}, every 2 steps: step 0 is under way, 0 recorded"
        )
        model(batch(kit)[0])
        rec.try_dump()
        rec.flush()
        assert str(rec).endswith("step 1 is under way, 1 recorded")


def test_a_printed_alignment_lists_its_pairs(kit):
    alignment = RunComparison(train(kit, 1).run, train(kit, 1).run).alignment
    lines = str(alignment).splitlines()
    assert lines[0] == repr(alignment)[1:-1]
    assert repr(alignment).startswith("<Alignment: 4 layers paired, 0 left of the reference and 0 of the candidate")
    assert [line.split()[:2] for line in lines[1:]] == [[path, path] for path in ("(root)", "0", "1", "2")]


# -- lazy layers ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "no optimizer"])
def test_lazy_layers_are_recorded_in_full_from_their_first_step_on(given):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LazyLinear(6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 3)
    with padiff.record(model, optimizer=optimizer if given else None) as rec:
        loss = (model(x) ** 2).mean()
        before = model[0].weight.detach().clone()
        loss.backward()
        gradient = model[0].weight.grad.clone()
        optimizer.step()
        rec.try_dump()
    found = recorded(rec)
    np.testing.assert_array_equal(found["0/weight/weight"], before.numpy())
    np.testing.assert_array_equal(found["0/grad/weight"], gradient.numpy())
    np.testing.assert_array_equal(found["0/update/weight"], (model[0].weight.detach() - before).numpy())


# -- Ctrl-C in a hook of backward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "no optimizer"])
def test_ctrl_c_in_a_hook_of_backward_is_a_keyboard_interrupt(kit, given, monkeypatch):
    """paddle makes an OSError of whatever a hook raises. The signal comes while a gradient is being copied."""
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit)
    caught = None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with padiff.record(model, optimizer=optimizer if given else None) as rec:
            see = rec._capture._observer.activations.see_gradient

            def interrupted(*args):
                monkeypatch.undo()
                signal.raise_signal(signal.SIGINT)
                return see(*args)

            monkeypatch.setattr(rec._capture._observer.activations, "see_gradient", interrupted)
            for _ in range(2):
                one_step(kit, model, optimizer, x, y, rec)
    except BaseException as error:
        caught = error
    finally:
        signal.signal(signal.SIGINT, before)
    assert type(caught) is KeyboardInterrupt
    assert rec.step == 0 and hook_count(kit, model, optimizer) == 0


def test_the_folder_of_an_interrupted_recording_is_whole(kit, tmp_path):
    with pytest.raises(KeyboardInterrupt), padiff.record(mlp(kit), tmp_path / "run"):
        raise KeyboardInterrupt
    assert padiff.open_run(tmp_path / "run").numbers() == [] and Path(tmp_path / "run" / "run.json").exists()
