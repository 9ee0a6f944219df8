"""A training that ends early: by an exception, by Ctrl-C; and one that goes on in the same folder."""

from __future__ import annotations

import signal

import pytest
from hard.children import started
from kit.forking import python_with_frameworks
from kit.frameworks import hook_count

import padiff

from .loops import Clipping
from .training import OPTIONS, Training, counts, train

SCRIPT = """
import sys
from hard.children import end_with_parent
end_with_parent()
from conditions.loops import Clipping
from kit.frameworks import KITS
from conditions.training import counts
from kit.frameworks import hook_count
import padiff

kit = KITS[sys.argv[1]]
training = Clipping(kit)
training.step(0, lambda loss: None)
ended = 0
try:
    with padiff.record(training.model, sys.argv[2], optimizer=training.optimizers) as rec:
        for number in range(1, 2000):
            training.step(number, rec.log_loss)
            rec.try_dump()
            ended = number
            if number == 3:
                rec.flush()
                print("running", flush=True)
except (KeyboardInterrupt, OSError):  # paddle makes the other of one that comes within a hook of its backward
    assert hook_count(kit, training.model, *training.optimizers) == 0
    print("interrupted", ended, flush=True)
    raise
"""


def test_ctrl_c_leaves_no_hooks_and_whole_steps_and_a_folder_to_go_on_with(kit, tmp_path):
    folder = tmp_path / "run"
    command = [*python_with_frameworks(taken_down=True), "-W", "ignore", "-c", SCRIPT, kit.name, str(folder)]
    with started(command) as process:
        assert process.stdout.readline() == "running\n", process.communicate()[1]
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in error
    assert out.startswith("interrupted"), error
    run = padiff.open_run(folder)
    assert not run.finished()
    numbers = run.numbers()
    # All that were ended before are there: what was queued is written on the way out. One more was perhaps being ended.
    ended = int(out.split()[1])
    assert numbers in (list(range(ended)), list(range(ended + 1)))
    for number in numbers:
        assert sum(counts(run, number).values()) == 4 + 4 + 4 + 4 + 4 + 1 + 1 + 1
    assert not [left for left in (folder / "steps").iterdir() if left.name.startswith(".")]
    resumed = train(Clipping(kit), folder, existing="resume", start_step=numbers[-1] + 1).run
    assert resumed.numbers() == list(range(numbers[-1] + 1 + Clipping.steps))
    assert resumed.finished()


@pytest.mark.parametrize(
    ("error", "detail"),
    [(ZeroDivisionError, "full"), (KeyboardInterrupt, "sketch"), (SystemExit, "full"), (GeneratorExit, "sketch")],
)
@pytest.mark.parametrize("where", ["before backward", "after backward", "after the optimizer"])
def test_whatever_ends_the_loop_takes_the_hooks_off(kit, error, where, detail, tmp_path):
    options = OPTIONS[detail]

    class Ending(Clipping):
        def update(self):
            if self.now and where == "after backward":
                raise error
            super().update()
            if self.now:
                raise error

        def step(self, number, log):
            self.now = number == 2
            if self.now and where == "before backward":
                self.loss(number)
                raise error
            return super().step(number, log)

    training = Ending(kit)
    with pytest.raises(error):
        train(training, tmp_path / "run", options)
    assert hook_count(kit, training.model, *training.optimizers) == 0
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 1]
    assert not run.finished()
    # The model trains on as one that was never recorded, and can be recorded again.
    plain = Training.__new__(Clipping)
    plain.__init__(kit)
    for number in (0, 1):
        plain.step(number, lambda loss: None)
    if where == "before backward":
        training.now = False
        assert Clipping.step(training, 3, lambda loss: None) == plain.step(3, lambda loss: None)
    with padiff.record(training.model, tmp_path / "second", optimizer=training.optimizers, **options) as rec:
        Clipping.loss(training, 0)
    assert rec.step == 1


class Second(Clipping):
    """The second half of a training, from a checkpoint; the fault begins with the wrong batch."""

    steps = 2

    def __init__(self, kit, state, fault=False):
        super().__init__(kit)
        self.wrong = fault
        kit.load(self.model, state)

    def step(self, number, log):
        return super().step(number + (0 if self.wrong else 2), log)


class First(Clipping):
    steps = 2


def test_a_training_that_is_resumed_is_the_run_of_one_that_never_stopped(kit, options, tmp_path):
    whole = train(Clipping(kit), tmp_path / "whole", options)
    for fault in (False, True):
        folder = tmp_path / f"run{fault}"
        state = train(First(kit), folder, options).state
        second = train(Second(kit, state, fault), folder, options, existing="resume", start_step=2)
        assert (second.losses == whole.losses[2:]) is not fault
        report = padiff.compare_runs(tmp_path / "whole", folder)
        assert list(report.coverage.steps) == [0, 1, 2, 3]
        assert report.passed is not fault
    assert (report.first_diff.step, report.first_diff.stage) == (2, "input"), report.first_diff.message
