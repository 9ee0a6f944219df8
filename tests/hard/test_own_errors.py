"""An error of padiff's own, wherever it is raised, changes nothing of a training and does not end it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import tempfile
from pathlib import Path
from types import CodeType

import numpy as np
import pytest
from kit.forking import python_with_frameworks

import padiff
from hard.children import run_child
from hard.own_errors import PlantedError, Planting, name_of, share
from padiff_hooks.training import TrainingRecorder

pytestmark = pytest.mark.filterwarnings("ignore")

SHARES = 3
X = np.random.default_rng(0).normal(size=(3, 6, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=(3, 6))


def is_listened_to(function):
    return function.__code__.co_filename == "<padiff>" or any(
        type(const).__module__.startswith("padiff") for const in function.__code__.co_consts
    )


class TorchLoop:
    """A loop with normalisation, dropout, clipping and a loss function."""

    def __init__(self):
        import torch

        self.torch = torch
        torch.manual_seed(0)
        n = torch.nn
        self.net = n.Sequential(n.Linear(5, 8), n.BatchNorm1d(8), n.ReLU(), n.Dropout(0.5), n.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)

    def step(self, number):
        torch = self.torch
        loss = torch.nn.functional.cross_entropy(self.net(torch.from_numpy(X[number])), torch.from_numpy(Y[number]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def evaluate(self, number):
        self.net.eval()
        with self.torch.no_grad():
            value = float(self.net(self.torch.from_numpy(X[number])).sum())
        self.net.train()
        return value

    def left(self):
        """Return how many hooks, modes and functions with other code are left."""
        hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in self.net.modules()]
        modes = self.torch.overrides._get_current_function_mode_stack()
        f, utils, tensor = self.torch.nn.functional, self.torch.nn.utils, self.torch.Tensor
        listened = map(is_listened_to, (f.dropout, f.cross_entropy, utils.clip_grad_norm_, tensor.backward))
        return sum(len(each) for pair in hooks for each in pair) + len(modes) + sum(listened)


class PaddleLoop:
    def __init__(self):
        import paddle

        self.paddle = paddle
        paddle.seed(0)
        n = paddle.nn
        self.net = n.Sequential(n.Linear(5, 8), n.BatchNorm1D(8), n.ReLU(), n.Dropout(0.5), n.Linear(8, 3))
        clip = n.ClipGradByGlobalNorm(1.0)
        self.optimizer = paddle.optimizer.Momentum(0.1, parameters=self.net.parameters(), grad_clip=clip)

    def step(self, number):
        paddle = self.paddle
        logits = self.net(paddle.to_tensor(X[number]))
        loss = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(Y[number]))
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return loss

    def evaluate(self, number):
        self.net.eval()
        with self.paddle.no_grad():
            value = float(self.net(self.paddle.to_tensor(X[number])).sum())
        self.net.train()
        return value

    def left(self):
        hooks = [(m._forward_post_hooks, m._forward_pre_hooks) for m in self.net.sublayers(include_self=True)]
        paddle, f = self.paddle, self.paddle.nn.functional
        functions = f.dropout, f.cross_entropy, paddle.Tensor.backward, paddle.optimizer.Momentum.step
        return sum(len(each) for pair in hooks for each in pair) + sum(map(is_listened_to, functions))


LOOPS = {"torch": TorchLoop, "paddle": PaddleLoop}


class Training:
    """Trains three steps, or until `begin` says so; by default with a replay pack every two steps."""

    def __init__(self, loop, folder, evaluates=False):
        self.loop, self.folder, self.count, self.evaluates = loop, folder, 0, evaluates

    def plain(self, begin=None):
        return self._train(contextlib.nullcontext(), self.loop(), begin)

    def recorded(self, begin=None, in_memory=False, **options):
        one = self.loop()
        self.count += 1
        folder = None if in_memory else self.folder / str(self.count)
        options = options or {"replay_every_n_steps": 2}
        return self._train(padiff.record(one.net, folder, optimizer=one.optimizer, **options), one, begin)

    def proxied(self, begin=None):
        """Train with a proxy, as people write it who come from `create_model`."""
        one = self.loop()
        self.count += 1
        look = sys.getprofile()
        sys.setprofile(None)  # an error of its making is the user's
        one.net = padiff.create_model(one.net)
        sys.setprofile(look)
        return self._train(contextlib.nullcontext(one.net), one, begin)

    def _train(self, recorder, one, begin):
        losses = []
        with recorder as rec:
            for number in itertools.count():
                if begin(number) if begin else number == len(X):
                    break
                loss = one.step(number % len(X))
                losses.append(float(loss))
                if rec is one.net:
                    rec.try_dump(per_step=2, dir_path=self.folder / f"{self.count}_{number}")
                elif rec is not None:
                    rec.log_loss(loss)
                    rec.try_dump()
                if self.evaluates:
                    losses.append(one.evaluate(number % len(X)))
        one.net = one.net.model if rec is one.net else one.net
        return losses, one.net[0].weight.numpy(**({"force": True} if self.loop is TorchLoop else {})), one.left()


OTHERWISE = {
    "sketches": {"detail": "sketch", "full_every_n_steps": 2},
    "some_layers": {"white_list": ["0", "4"], "every_n_steps": 2, "start_step": 4, "functions": False},
    "little_room": {"max_bytes": 40_000, "compression": "zlib", "pack": True, "existing": "overwrite"},
    "in_memory": {"in_memory": True, "black_list": ["1"]},
    "a_proxy": {},
}


def otherwise(framework, name, folder):
    """Return a training, and a call that records the training with other options."""
    training = Training(LOOPS[framework], folder, evaluates=name != "a_proxy")
    return training, functools.partial(training.recorded, **OTHERWISE[name]) if OTHERWISE[name] else training.proxied


@functools.cache
def called(framework: str) -> tuple[list[CodeType], dict[str, CodeType]]:
    """The functions that a training calls, and those of them that have to fail, by name."""
    planting = Planting("padiff")
    with tempfile.TemporaryDirectory() as folder:
        training = Training(LOOPS[framework], Path(folder))
        # The second time the user's source has been read.
        seen, codes = [(planting.functions(training.recorded), planting.enough(training.recorded)) for _ in "12"][1]
    return seen, {name_of(code): code for code in codes}


@functools.cache
def failing(name: str = "") -> dict[str, list[CodeType]]:
    """The functions that fail, by framework: those that the trainings of both call fail in one of them, by turns.

    With other options, those that a training without them does not call.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for framework in LOOPS:
            seen, found[framework] = called(framework)
            assert len(found[framework]) > 300
            if name:
                _, train = otherwise(framework, name, Path(folder, framework))
                others = [Planting("padiff").enough(train) for _ in "12"][1]
                found[framework] = {name_of(code): code for code in others if code not in seen}
                assert len(found[framework]) > 1
    common = set.intersection(*map(set, found.values()))
    turns = dict(zip(sorted(common), itertools.cycle(LOOPS)))
    return {
        framework: [code for name, code in codes.items() if turns.get(name, framework) == framework]
        for framework, codes in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", range(SHARES))
@pytest.mark.parametrize("framework", LOOPS)
def test_an_error_in_any_function_leaves_a_recorded_loop_as_it_is(framework, number, tmp_path):
    training = Training(LOOPS[framework], tmp_path)
    wrong = Planting("padiff").sweep(share(failing()[framework], number, SHARES), training.recorded, training.plain)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERWISE)
def test_an_error_in_any_function_leaves_a_loop_with_other_options_as_it_is(name, tmp_path):
    for framework, codes in failing(name).items():
        training, train = otherwise(framework, name, tmp_path / framework)
        wrong = Planting("padiff").sweep(codes, train, training.plain)
        assert not wrong, wrong


@pytest.mark.parametrize("framework", LOOPS)
def test_an_error_in_any_function_of_a_callbacks_beginning_leaves_a_training_as_it_is(framework, tmp_path, capfd):
    Training(LOOPS[framework], tmp_path).recorded()
    other = LOOPS[framework]()
    losses = [float(other.step(number)) for number in range(3)]
    options = {
        "every_n_steps": padiff.Schedule(every=2),
        "layer_map": {"0": "0"},
        "white_list": ["*"],
        "max_bytes": 1e6,
    }
    options |= {"reference": tmp_path / "1", "logdir": tmp_path / "logs", "detail": "auto", "full_every_n_steps": 2}

    def made():
        return TrainingRecorder(tmp_path / f"own-{len(wrong)}", **options)

    wrong: list[str] = []
    planting = Planting("padiff", "padiff_hooks")
    codes = planting.functions(made)
    assert len(codes) > 15
    for code in codes:
        capfd.readouterr()
        try:
            recorder = planting.fail(code, made)
            loop, mine = LOOPS[framework](), []
            recorder.start(loop.net, [loop.optimizer])
            for number in range(3):
                recorder.begin_batch()
                mine.append(float(loop.step(number)))
                recorder.end_batch()
                recorder.end_step()
            recorder.finish()
        except Exception as error:
            wrong.append(f"{name_of(code)}: {type(error).__name__} ended the training")
            continue
        said = capfd.readouterr().err
        if mine != losses or loop.left() or said.count("an error of padiff's own, PlantedError") != 1:
            wrong.append(f"{name_of(code)}: {said}")
    assert not wrong, "\n".join(wrong)
    with pytest.raises(PlantedError):
        planting.fail(codes[-1], lambda: TrainingRecorder(tmp_path / "own", **options, on_error="raise"))


@pytest.mark.parametrize("framework", LOOPS)
def test_a_step_with_an_error_is_left_out_and_the_others_are_recorded(framework, tmp_path, capfd):
    training = Training(LOOPS[framework], tmp_path)
    planting = Planting("padiff")
    training.recorded()
    functions = {name_of(code): code for code in planting.functions(training.recorded)}
    planting.fail(functions["padiff/recorder/calls.py:Calls.begin"], training.recorded)
    run = padiff.open_run(tmp_path / "3")
    assert run.numbers() == [1, 2]
    said = [line for line in capfd.readouterr().err.splitlines() if "error of padiff's own" in line]
    assert len(said) == 1
    assert said[0].startswith(
        "padiff: Step 0 is not recorded: an error of padiff's own, PlantedError: padiff/recorder/calls"
    )
    assert said[0].endswith("The training goes on")
    line = said[0].removeprefix("padiff: ").removesuffix(". The training goes on")
    assert run.info.recording["errors"] == [line]
    assert line in str(run)
    show = run_child([*python_with_frameworks(), "-m", "padiff", "show", str(tmp_path / "3")])
    assert line in " ".join(show.stdout.split())


@pytest.mark.parametrize("framework", LOOPS)
def test_an_error_of_packs_costs_packs_alone(framework, tmp_path, capfd):
    training = Training(LOOPS[framework], tmp_path)
    planting = Planting("padiff")
    training.recorded()
    functions = {name_of(code): code for code in planting.functions(training.recorded)}
    planting.fail(functions["padiff/recorder/packing.py:Packing.finish"], training.recorded)
    assert padiff.open_run(tmp_path / "3").numbers() == [1, 2]
    assert "Later steps are recorded without replay packs" in capfd.readouterr().err


def test_two_steps_in_a_row_with_an_error_stop_the_recording(kit, tmp_path, capfd, monkeypatch):
    from padiff.recorder.parameters import Parameters

    def broken(self):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Parameters, "snapshot", broken)
    loop = LOOPS[kit.name]()
    with padiff.record(loop.net, tmp_path / "run", optimizer=loop.optimizer) as rec:
        for number in range(len(X)):
            loop.step(number)
            rec.try_dump()
        assert not rec.active
    said = [line for line in capfd.readouterr().err.splitlines() if "error of padiff's own" in line]
    assert ["Step 0 is not recorded:" in said[0], "Step 1 is not recorded, and recording stops:" in said[1]] == [
        True
    ] * 2
    assert len(said) == 2
    run = padiff.open_run(tmp_path / "run")
    assert (run.numbers(), run.finished(), len(run.info.recording["errors"])) == ([], False, 2)
    assert not loop.left()


def test_errors_are_raised_where_that_is_asked_for(kit, tmp_path, monkeypatch):
    from padiff.recorder.parameters import Parameters

    def broken(self):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Parameters, "snapshot", broken)
    loop = LOOPS[kit.name]()
    with pytest.raises(ZeroDivisionError), padiff.record(loop.net, tmp_path / "run", on_error="raise"):
        loop.step(0)
    assert not loop.left()


def test_an_error_before_recording_begins_is_said_and_the_training_goes_on(kit, tmp_path, capfd, monkeypatch):
    from padiff.recorder import session

    def broken(*_):
        raise ZeroDivisionError("planted")

    other = LOOPS[kit.name]()
    losses = [float(other.step(number)) for number in range(len(X))]
    loop = LOOPS[kit.name]()
    monkeypatch.setattr(session, "Layers", broken)
    with padiff.record(loop.net, tmp_path / "run", optimizer=loop.optimizer, start_step=7) as rec:
        mine = []
        for number in range(len(X)):
            loss = loop.step(number)
            rec.log_loss(loss)
            rec.log_batch(X[number])
            mine.append(float(loss))
            assert not rec.try_dump()
    assert mine == losses
    assert (rec.step, rec.run, rec.due, rec.active) == (10, None, False, False)
    assert str(rec) == "recording nothing: step 10 is under way"
    assert "Nothing is recorded: an error of padiff's own, ZeroDivisionError: planted" in capfd.readouterr().err


def test_the_exception_of_a_users_signal_handler_reaches_the_user(kit, monkeypatch):
    import signal

    from padiff.recorder.parameters import Parameters

    class TimeUpError(Exception):
        pass

    def handler(number, frame):
        raise TimeUpError

    before = Parameters.snapshot

    def interrupted(self):
        signal.raise_signal(signal.SIGALRM)
        before(self)

    monkeypatch.setattr(Parameters, "snapshot", interrupted)
    old = signal.signal(signal.SIGALRM, handler)
    try:
        loop = LOOPS[kit.name]()
        with pytest.raises(TimeUpError), padiff.record(loop.net):
            loop.step(0)
    finally:
        signal.signal(signal.SIGALRM, old)


def test_the_exception_of_a_users_signal_handler_is_not_taken_for_a_tensor_that_cannot_be_copied(kit, monkeypatch):
    import signal

    from padiff.frameworks import framework_of

    class TimeUpError(Exception):
        pass

    def handler(number, frame):
        raise TimeUpError

    loop = LOOPS[kit.name]()
    monkeypatch.setattr(framework_of(loop.net).tensors, "copy", lambda *_: signal.raise_signal(signal.SIGALRM))
    old = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeUpError), padiff.record(loop.net, detail="full"):
            loop.step(0)
    finally:
        signal.signal(signal.SIGALRM, old)


def test_the_sweep_sees_an_error_that_is_not_stopped(tmp_path, monkeypatch):
    from padiff.system.guard import Guard

    def let_through(self, error):
        raise error

    monkeypatch.setattr(Guard, "catch", let_through)
    training = Training(TorchLoop, tmp_path)
    planting = Planting("padiff")
    functions = {name_of(code): code for code in planting.functions(training.recorded)}
    wrong = planting.sweep([functions["padiff/recorder/calls.py:Calls.begin"]], training.recorded, training.plain)
    assert wrong == "['padiff/recorder/calls.py:Calls.begin']: PlantedError ended the training"


def test_the_sweep_sees_a_training_that_is_changed(tmp_path):
    training = Training(TorchLoop, tmp_path)
    planting = Planting("padiff")
    functions = {name_of(code): code for code in planting.functions(training.recorded)}
    for expected in (
        lambda begin: ([loss + 1e-9 for loss in training.plain(begin)[0]], *training.plain(begin)[1:]),
        lambda begin: (training.plain(begin)[0], training.plain(begin)[1] + 1e-6, 0),
    ):
        wrong = planting.sweep([functions["padiff/recorder/calls.py:Calls.begin"]], training.recorded, expected)
        assert "changed the training" in wrong
