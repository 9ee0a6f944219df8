"""Compiled regions: recorded and run again eagerly, without a change of what is compiled or trained."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path

import pytest

import padiff
from padiff.dump import open_run
from padiff.system.guard import Guard

torch = pytest.importorskip("torch")
regions = importlib.import_module("padiff.frameworks.torch.regions")

FOLDER = str(Path(__file__).parents[2] / "benchmarks" / "compiled")
sys.path.insert(0, FOLDER)
compilers = importlib.import_module("compilers")
SEEN = runpy.run_path(f"{FOLDER}/seen.py")
sys.path.remove(FOLDER)
PROGRAMS, FAULTS = SEEN["PROGRAMS"], SEEN["FAULTS"]
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"))


@pytest.fixture(autouse=True)
def _forgotten():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def trained(program, backend, folder=None, every=1, steps=5):
    """The losses, and the number of graphs and of graph breaks that dynamo counted."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, loss_of = program(lambda code: torch.compile(code, backend=backend))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    recording = contextlib.nullcontext()
    if folder is not None:
        recording = padiff.record(model, folder, optimizer=optimizer, every_n_steps=every)
    with recording as rec:
        for k in range(steps):
            loss = loss_of(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if rec is not None:
                rec.end_step()
    return losses, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@functools.cache
def plain(program):
    return trained(PROGRAMS[program], "aot_eager")


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """The run of a program that is not compiled; each is made once."""

    @functools.cache
    def made(program):
        folder = tmp_path_factory.mktemp("eager") / "run"
        compilers.train(PROGRAMS[program], None, str(folder))
        return folder

    return made


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("program", [*PROGRAMS])
def test_recording_changes_neither_the_training_nor_what_is_compiled(program, every, tmp_path):
    assert trained(PROGRAMS[program], "aot_eager", tmp_path / "run", every) == plain(program)
    assert open_run(str(tmp_path / "run")).steps(0)[0].regions


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.parametrize("program", [*PROGRAMS])
def test_clean_compilers_match(program, backend, eager, tmp_path):
    compilers.train(PROGRAMS[program], backend, str(tmp_path / "b"))
    report = padiff.compare_runs(eager(program), tmp_path / "b")
    assert report.passed, report.text()
    regions = open_run(str(tmp_path / "b")).steps(0)[0].regions
    assert all(region.outputs and region.gradients and not region.note for region in regions)
    assert any("with rounding only" in line for line in report.regions)
    if backend == "inductor":
        assert any(name.startswith("cpp_fused") for region in regions for name in region.kernels)


@pytest.mark.parametrize("name", [*FAULTS])
def test_faults_of_a_compiler_are_placed(name, eager, tmp_path):
    fault = FAULTS[name]
    compilers.train(PROGRAMS[fault.program], compilers.compiler(fault.edit, fault.backward), str(tmp_path / "b"))
    report = padiff.compare_runs(eager(fault.program), tmp_path / "b")
    first = report.first_diff
    assert first is not None and first.cause.kind == "compiled" and first.cause.proven
    [wrong, *_] = [region for region in open_run(str(tmp_path / "b")).steps(0)[0].regions if region.failed]
    assert wrong.number == fault.region
    assert re.search(fault.operation, wrong.wrong.name) and re.search(fault.layer, wrong.wrong.layer)
    assert f"computes {wrong.wrong.name}" in first.cause.sentence
    assert first.cause.lines.candidate.file.endswith("seen.py")


def test_the_errors_are_those_that_torch_computes(tmp_path):
    """Of one layer with a wrong GELU: both errors by hand, from the definition in float64."""
    layer = torch.nn.GELU()
    x = torch.linspace(-4, 4, 101)
    model = torch.compile(layer, backend=compilers.compiler(FAULTS["gelu by tanh"].edit))
    with padiff.record(model) as rec, torch.no_grad():
        model(x)
        rec.end_step()
    [region] = rec.run.steps(0)[0].regions
    exact = x.double() * 0.5 * (1 + torch.erf(x.double() / 2**0.5))
    tanh = torch.nn.functional.gelu(x, approximate="tanh")
    [output] = region.outputs
    assert output.error == pytest.approx(float((tanh.double() - exact).norm() / exact.norm()), rel=1e-4)
    assert output.eager == pytest.approx(float((layer(x).double() - exact).norm() / exact.norm()), rel=1e-4)
    assert region.operations == ("gelu",) and not output.passed


def dropouts(compiled):
    layers = [
        torch.nn.Linear(8, 16),
        torch.nn.Dropout(0.5),
        torch.nn.GELU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16, 4),
    ]
    model = compiled(torch.nn.Sequential(*layers))
    return model, lambda m, k: m(torch.ones(6, 8)).pow(2).sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_a_region_that_draws_the_random_numbers_of_eager_code_is_run_again(backend, tmp_path):
    config = importlib.import_module("torch._inductor.config")
    with config.patch(fallback_random=backend == "inductor"):
        losses = compilers.train(dropouts, backend, str(tmp_path / "a"))
        state = torch.get_rng_state()
        assert losses == compilers.train(dropouts, backend)
    assert torch.equal(state, torch.get_rng_state())
    [region] = open_run(str(tmp_path / "a")).steps(0)[0].regions
    assert region.note == "" and region.failed is None
    assert region.outputs and region.gradients
    # Masks are those of the run: another one would be an error of the size of 1.
    assert 0 < region.outputs[0].eager < 1e-6


@pytest.mark.parametrize("nth", [0, 1])
def test_a_fault_in_a_region_with_dropout_is_placed(nth, tmp_path):
    def faulty(*args, **kwargs):
        return torch.nn.functional.dropout(*args, **kwargs) * 1.0001

    compilers.train(dropouts, compilers.compiler(compilers.replaced("dropout", faulty, nth)), str(tmp_path / "a"))
    [region] = open_run(str(tmp_path / "a")).steps(0)[0].regions
    assert region.failed is not None and region.wrong is not None
    assert (region.wrong.name, region.wrong.layer) == ("dropout", str(1 + 2 * nth))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_region_that_draws_other_random_numbers_is_said_not_to_be_run_again(tmp_path):
    losses = compilers.train(dropouts, "inductor", str(tmp_path / "a"))
    assert losses == compilers.train(dropouts, "inductor")
    [region] = open_run(str(tmp_path / "a")).steps(0)[0].regions
    assert region.note == "it draws random numbers" and not region.measured
    compilers.train(dropouts, None, str(tmp_path / "b"))
    for sides, side, fix in (("ab", "reference", ""), ("ba", "candidate", "fallback_random = True")):
        first = padiff.compare_runs(*(str(tmp_path / each) for each in sides)).first_diff
        assert first.cause.kind == "compiled_random_numbers" and side in first.cause.sentence
        assert first.cause.fix.endswith(fix)


class Loop(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.again, self.out = (torch.nn.Linear(*shape) for shape in ((3, 6), (6, 6), (6, 2)))

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 6)
        for k in range(x.shape[1]):
            state = torch.tanh(self.into(x[:, k]) + self.again(state))
        return self.out(state)


@pytest.mark.parametrize("nth", [0, 2, 4])
def test_an_operation_before_branches_that_agree_is_placed(nth, tmp_path):
    # The other branch, `into` of the next turn, does not depend on what differs.
    def program(compiled):
        model = compiled(Loop())
        x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
        return model, lambda m, k: m(x).square().sum()

    edit = compilers.replaced("tanh", lambda x: torch.tanh(x) * 1.001, nth)
    compilers.train(program, compilers.compiler(edit), str(tmp_path / "a"))
    [region] = open_run(str(tmp_path / "a")).steps(0)[0].regions
    assert region.wrong is not None and region.wrong.name == "tanh"


def test_buffers_that_a_region_changes_stay_as_the_training_left_them(tmp_path):
    def program(compiled):
        model = compiled(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        program.model = model
        return model, lambda m, k: m(torch.randn(8, 4, generator=torch.Generator().manual_seed(k))).pow(2).sum()

    def state(folder):
        compilers.train(program, "aot_eager", folder)
        return {name: each.clone() for name, each in program.model.state_dict().items()}

    plain, recorded = state(None), state(str(tmp_path / "a"))
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)
    [region] = open_run(str(tmp_path / "a")).steps(0)[0].regions
    assert region.measured and not region.failed


def test_regions_are_read_again_from_both_kinds_of_steps(tmp_path):
    for pack in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.compile(torch.nn.Linear(3, 2), backend="eager")
        with padiff.record(model, tmp_path / str(pack), pack=pack) as rec:
            model(torch.ones(2, 3)).sum().backward()
            rec.end_step()
    both = [open_run(str(tmp_path / str(pack))).steps(0)[0].regions for pack in (False, True)]
    assert both[0] == both[1] and both[0][0].outputs and both[0][0].gradients


def test_a_compiler_that_fails_in_the_search_costs_nothing(eager, tmp_path):
    """The compiler refuses each part: the region is reported, without the operation."""
    seen = []

    def backend(gm, inputs):
        if seen:
            raise RuntimeError("no parts")
        seen.append(gm)
        FAULTS["gelu by tanh"].edit(gm)
        return gm.forward

    compilers.train(PROGRAMS["whole"], backend, str(tmp_path / "b"))
    report = padiff.compare_runs(eager("whole"), tmp_path / "b")
    assert report.first_diff.cause.kind == "compiled" and "compiled region 0" in report.first_diff.cause.sentence


def test_nothing_stays_in_dynamo_when_recording_has_ended():
    model = torch.compile(torch.nn.Linear(3, 2), backend="eager")
    from torch._dynamo.output_graph import OutputGraph

    before = vars(OutputGraph)["call_user_compiler"]
    with padiff.record(model) as rec:
        model(torch.ones(2, 3))
        rec.end_step()
    assert vars(OutputGraph)["call_user_compiler"] is before


def test_a_graph_that_holds_its_parameters_is_not_run_again():
    """As torch made them before 2.5: the optimizer changes the parameters in the step."""
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    graph = regions._Graph(module, lambda gm, inputs: gm.forward, (), module.forward)
    recorder = regions.Regions({}, lambda: "", Guard())
    regions._Wrapped(graph).call(torch.ones(1, 3))
    [region] = recorder.rerun()
    assert region.note == "its parameters are no inputs of its graph" and not region.measured
