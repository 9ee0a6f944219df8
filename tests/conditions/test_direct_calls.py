"""Loops that call ``forward`` themselves: ``net.forward(x)`` passes a layer's hooks by."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
from cli.test_run_command import call, run

import padiff

pytestmark = pytest.mark.slow

NETS = {
    "torch": """
import pickle, sys, torch
from torch import nn
torch.manual_seed(0)
def sgd(net): return torch.optim.SGD(net.parameters(), lr=0.05)
def randn(*shape): return torch.randn(*shape)
def clear(optimizer): optimizer.zero_grad()
""",
    "paddle": """
import pickle, sys, paddle
from paddle import nn
paddle.seed(0)
nn.Module = nn.Layer
def sgd(net): return paddle.optimizer.SGD(0.05, parameters=net.parameters())
def randn(*shape): return paddle.randn(shape)
def clear(optimizer): optimizer.clear_grad()
""",
}
LOOP = """
class Part(nn.Linear):
    def forward(self, x):
        return super().forward(x * 0.5)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = Part(3, 4), Part(4, 2), nn.Tanh()
    def forward(self, x):
        return self.b(self.act(self.a.forward(x)) * 0.7)
net = Net()
code = Net.forward.__code__
optimizer = sgd(net)
for i in range(3):
    x = randn(5, 3)
    loss = net.forward(x).square().mean()
    clear(optimizer)
    loss.backward()
    optimizer.step()
    print(float(loss).hex(), sorted(vars(net.a).keys()) == sorted(vars(Part(3, 4)).keys()))
"""
CALLED = LOOP.replace("net.forward(x)", "net(x)").replace("self.a.forward(x)", "self.a(x)")


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def sites(folder: str) -> list[list[str]]:
    opened = padiff.open_run(folder)
    return [sorted(record.site for step in opened.steps(n) for record in step.records) for n in opened.numbers()]


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_direct_calls_are_recorded_as_calls_are(framework):
    Path("direct.py").write_text(NETS[framework] + LOOP)
    Path("called.py").write_text(NETS[framework] + CALLED)
    unchanged = call("direct.py")
    assert unchanged.returncode == 0, unchanged.stderr
    recorded = run("--dir", "direct", "direct.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    assert run("--dir", "called", "called.py").returncode == 0
    assert sites("direct") == sites("called")
    compared = call("-m", "padiff", "compare", "direct", "called")
    assert compared.returncode == 0 and "equal to the bit" in compared.stdout, compared.stdout


def test_a_fault_beside_a_direct_call_is_named_with_its_line():
    Path("a.py").write_text(NETS["torch"] + LOOP)
    Path("b.py").write_text(NETS["torch"] + LOOP.replace("* 0.7", "* 0.8"))
    assert run("--dir", "a", "a.py").returncode == run("--dir", "b", "b.py").returncode == 0
    verdict = call("-m", "padiff", "compare", "a", "b").stdout
    line = next(k for k, text in enumerate((NETS["torch"] + LOOP).splitlines(), 1) if "* 0.7" in text)
    assert f"b.py:{line} " in verdict and "0.8" in verdict.split("-->")[0], verdict


def test_a_model_that_is_called_directly_stays_as_it_is(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("padiff.frameworks.interception._is_called_directly", lambda _: True)

    class Net(torch.nn.Linear):
        def forward(self, x, fail=False):
            if fail:
                raise KeyError("here")
            return super().forward(x)

    net, code = Net(3, 2), Net.forward.__code__
    with padiff.record(net, "run") as rec:
        assert vars(copy.deepcopy(net)).keys() == vars(net).keys()
        torch.save(net.state_dict(), io.BytesIO())
        pickle.dumps(net.state_dict())
        with pytest.raises(KeyError, match="here"):
            net.forward(torch.ones(1, 3), fail=True)
        net.forward(torch.ones(1, 3)).sum().backward()
        net(torch.ones(1, 3)).sum().backward()
        rec.try_dump()
    assert Net.forward.__code__ is code
    outputs = [
        r.site
        for step in padiff.open_run("run").steps(0)
        for r in step.records
        if r.slot == "output.0" and r.stage == "forward"
    ]
    assert outputs == ["(root)/forward/output.0#1", "(root)/forward/output.0#2"]  # the first one failed
