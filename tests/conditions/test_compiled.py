"""Compiled models: recorded from outside and with a warning; what is compiled is the same as without recording."""

from __future__ import annotations

import warnings
from functools import cache

import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH

import padiff

from .loops import Frozen
from .training import OPTIONS, assert_neutral, counts, train

BACKEND = "aot_eager"  # traces and guards as the default does, and needs no C++ compiler


def forget():
    """Nothing compiled is left from one training to the next."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def _forgotten():
    forget()
    yield
    forget()


def net(kit):
    class Block(kit.Net):
        def build(self):
            self.inner, self.act = kit.Linear(8, 8), kit.ReLU()

        def forward(self, x):
            return self.act(self.inner(x))

    class Net(kit.Net):
        def build(self):
            self.first, self.body, self.last = kit.Linear(4, 8), Block(), kit.Linear(8, 3)

        def forward(self, x):
            return self.last(self.body(self.first(x)))

    return Net()


class Compiled(Frozen):
    """Compiled in one way or another; the fault is a learning rate a tenth too large."""

    steps = 12  # torch gives up compiling after 8 times
    whole = False

    def build(self):
        return net(self.kit)

    def optimize(self):
        self.call = self.compile()
        return [self.kit.sgd(self.model.parameters(), 0.11 if self.fault else 0.1)]

    def compile(self):
        return self.model

    def loss(self, number):
        x, y = self.batch(number)
        return self.kit.cross_entropy(self.call(x), y)


def compiled(module):
    return torch.compile(module, backend=BACKEND, fullgraph=True)


class Wrapped(Compiled):
    whole = True

    def compile(self):
        self.model = compiled(self.model)
        return self.model


class InPlace(Compiled):
    whole = True

    def compile(self):
        self.model.compile(backend=BACKEND, fullgraph=True)
        return self.model


class WrappedPart(Compiled):
    def compile(self):
        self.model.body = compiled(self.model.body)
        return self.model


class PartInPlace(Compiled):
    def compile(self):
        self.model.body.compile(backend=BACKEND, fullgraph=True)
        return self.model


class Function(Compiled):
    """What is compiled calls the model, and the recorder can't know it."""

    def compile(self):
        return compiled(lambda x: self.model(x))


class Static(Compiled):
    """paddle's to_static, of the whole graph."""

    whole = True

    def compile(self):
        return paddle.jit.to_static(self.model, full_graph=True)


class StaticPart(Compiled):
    def compile(self):
        paddle.jit.to_static(self.model.body, full_graph=True)
        return self.model


class Symbolic(Compiled):
    """paddle's to_static as it is by default: it follows the bytecode and calls hooks."""

    steps = 2  # paddle follows what the hooks do, too, which takes seconds the first time

    def compile(self):
        return paddle.jit.to_static(self.model, full_graph=False)


class StaticFunction(Compiled):
    def compile(self):
        def call(x):
            return self.model(x)

        return paddle.jit.to_static(call, full_graph=True)


WHOLE = ((TORCH, Wrapped), (TORCH, InPlace), (PADDLE, Static))
PART = ((TORCH, WrappedPart), (TORCH, PartInPlace), (PADDLE, StaticPart))
FUNCTION = ((TORCH, Function), (PADDLE, StaticFunction))
WARNS = "compiled is recorded from outside"

# The frameworks' own, while they compile.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Tensor do not have 'place' interface",
    "ignore:.*script_method",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


def named(ways):
    return pytest.mark.parametrize(("kit", "way"), ways, ids=[way.__name__.lower() for _, way in ways])


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@cache
def plain(kit, way):
    """What a training leaves that is not recorded, and how many graphs were compiled for it."""
    forget()
    return train(way(kit)), graphs()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What a recorded training leaves, how many graphs were compiled for it, what was warned of. Each is done once."""

    @cache
    def done(kit, way, options, every=1, fault=False):
        folder = tmp_path_factory.mktemp("compiled")
        forget()
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            result = train(way(kit, fault), folder / "run", dict(options), every_n_steps=every)
        return result, graphs(), [str(each.message) for each in reported if issubclass(each.category, RuntimeWarning)]

    return lambda kit, way, options, *more: done(kit, way, tuple(options.items()), *more)


# What is compiled does not depend on what is kept of tensors: each level of detail with one schedule.
EVERY = pytest.mark.parametrize(("every", "options"), [(1, OPTIONS["full"]), (2, OPTIONS["sketch"])], ids=["1", "2"])
FULL = pytest.mark.parametrize("options", [OPTIONS["full"]], ids=["full"])


@named((*WHOLE, *PART))
@EVERY
def test_the_training_is_the_same_to_the_bit_and_is_compiled_as_often(kit, way, every, options, recorded):
    before, compiled_before = plain(kit, way)
    after, compiled_after, reported = recorded(kit, way, options, every)
    assert_neutral(before, after)
    assert any(WARNS in text for text in reported)
    if kit is TORCH:
        # Once more at most: with the hooks that keep still inside, and without.
        assert 0 < compiled_before <= compiled_after <= compiled_before + (every > 1)


@named((*WHOLE, *PART))
@FULL
def test_a_compiled_layer_is_recorded_from_outside_at_every_step(kit, way, options, recorded):
    result, _, reported = recorded(kit, way, options)
    assert ("(the model itself)" if way.whole else "(body)") in next(text for text in reported if WARNS in text)
    layers, run = 1 if way.whole else 4, result.run
    for number in run.numbers():
        found = counts(run, number)
        assert found == {
            "input": 1, "weight": 6, "forward": layers, "loss": 1, "backward": layers, "grad": 6, "update": 6, "rate": 1
        }, number  # fmt: skip
    assert [layer.path for layer in run.info.layers] == ["(root)", "first", "body", "body.inner", "body.act", "last"]


@named((*WHOLE, *PART))
@FULL
def test_a_compiled_run_matches_a_plain_one_but_for_a_mistake(kit, way, options, recorded):
    uncompiled = recorded(TORCH, Compiled, options)[0].run
    (right, _, _), (wrong, _, reported) = recorded(kit, way, options), recorded(kit, way, options, 1, True)
    assert any(WARNS in text for text in reported)
    report = padiff.compare_runs(uncompiled, right.run)
    assert report.passed, report.first_diff.message
    assert not report.coverage.candidate_parameters
    # What could not be seen is reported by name.
    unseen = {"body.inner", "body.act", *(("first", "last", "body") if way.whole else ())}
    assert {name.removeprefix("candidate: ") for name in report.coverage.uncalled} == unseen
    first = padiff.compare_runs(uncompiled, wrong.run).first_diff
    assert (first.step, first.stage) == (0, "update"), first.message


class Late:
    """Recorded once all is compiled."""

    def optimize(self):
        optimizers = super().optimize()
        self.loss(0)
        return optimizers


LATE = {way: type(f"Late{way.__name__}", (Late, way), {}) for _, way in (*WHOLE, *PART, *FUNCTION)}


@named((*WHOLE, *PART[1:], *FUNCTION))
@pytest.mark.parametrize("options", [OPTIONS["sketch"]], ids=["sketch"])
def test_recording_begins_after_compiling(kit, way, options, recorded):
    """What was compiled before the hooks came is not compiled again, and hooks that are taken off leave no trace."""
    before, compiled_before = plain(kit, LATE[way])
    after, compiled_after, _ = recorded(kit, LATE[way], options)
    assert_neutral(before, after)
    assert compiled_after == compiled_before or kit is PADDLE
    assert counts(after.run, 3)["grad"] == 6


@named(FUNCTION)
@EVERY
def test_a_model_inside_a_compiled_function_trains_the_same(kit, way, every, options, recorded):
    assert_neutral(plain(kit, way)[0], recorded(kit, way, options, every)[0])


@named(FUNCTION)
@FULL
def test_a_model_inside_a_compiled_function_is_reported(kit, way, options, recorded):
    assert any("no layer of the recorded model was called" in text for text in recorded(kit, way, options)[2])


@FULL
@pytest.mark.slow
@pytest.mark.usefixtures("frozen")  # paddle collects with each function that it compiles
def test_paddles_default_to_static_is_recorded_through(options, recorded):
    run = recorded(PADDLE, Symbolic, options)[0]
    assert_neutral(plain(PADDLE, Symbolic)[0], run)
    for number in run.run.numbers():
        assert counts(run.run, number)["forward"] == counts(run.run, number)["backward"] == 6
    report = padiff.compare_runs(recorded(TORCH, Compiled, options)[0].run, run.run)
    assert report.passed, report.first_diff.message


def test_without_compiling_as_the_warning_advises_all_layers_are_recorded(options, tmp_path):
    with torch.compiler.set_stance("force_eager"), pytest.warns(RuntimeWarning, match=WARNS):
        run = train(Wrapped(TORCH), tmp_path / "run", options).run
    assert counts(run, 0)["forward"] == counts(run, 0)["backward"] == 6
