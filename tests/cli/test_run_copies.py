"""`padiff run`: copies of a model that the loop keeps are recorded with it: averages, target networks, teachers."""

from __future__ import annotations

from pathlib import Path

import pytest

import padiff
from cli.test_run_command import run

pytestmark = pytest.mark.slow

HEAD = {
    "torch": """
import copy, sys, numpy as np, torch
from torch import nn
import torch.nn.functional as F
tensor, no_grad, clear = torch.from_numpy, torch.no_grad, lambda optimizer: optimizer.zero_grad()
def put(tensor, values): tensor.data.copy_(values)
def adam(parameters): return torch.optim.Adam(list(parameters), lr=0.01)
def load(model, state): model.load_state_dict(state)
BatchNorm, laid_out = nn.BatchNorm1d, lambda matrix: matrix
""",
    "paddle": """
import copy, sys, numpy as np, paddle
from paddle import nn
import paddle.nn.functional as F
tensor, no_grad, clear = paddle.to_tensor, paddle.no_grad, lambda optimizer: optimizer.clear_grad()
def put(tensor, values): tensor.set_value(values)
def adam(parameters): return paddle.optimizer.Adam(0.01, parameters=list(parameters))
def load(model, state): model.set_state_dict(state)
BatchNorm, laid_out = nn.BatchNorm1D, lambda matrix: matrix.T.copy()
""",
}
COMMON = """
fault = sys.argv[1]
rng = np.random.default_rng(0)
def data(): return tensor(rng.standard_normal((12, 6)).astype("float32"))
def net(norm=False):
    own = np.random.default_rng(1)
    layers = nn.Sequential(nn.Linear(6, 8), *([BatchNorm(8)] if norm else []), nn.Tanh(), nn.Linear(8, 6))
    for layer in (layers[0], layers[-1]):
        out, into = (8, 6) if layer is layers[0] else (6, 8)
        matrix = own.standard_normal((out, into)).astype("float32") / 3
        put(layer.weight, tensor(laid_out(matrix)))
        put(layer.bias, tensor(np.zeros(layer.bias.shape, "float32")))
    return layers
"""
# A loop's text by kind; what is wrong in it is its argument.
DEEP = """
model = net(norm=True)
average = copy.deepcopy(model)
optimizer = adam(model.parameters())
decay = 0.99 if fault == "decay" else 0.9
for step in range(4):
    F.mse_loss(model(data()), data()).backward()
    optimizer.step()
    clear(optimizer)
    with no_grad():
        for old, new in zip(average.parameters(), model.parameters()):
            put(old, decay * old + (1 - decay) * new)
"""
SHADOW = """
class Average:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {name: value.clone().detach() for name, value in model.named_parameters()}
    def update(self):
        with no_grad():
            for name, value in self.model.named_parameters():
                self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * value
def train():
    model = net()
    optimizer, average = adam(model.parameters()), Average(model, 0.99 if fault == "decay" else 0.9)
    model.eval(), model.train()
    for step in range(4):
        F.mse_loss(model(data()), data()).backward()
        optimizer.step()
        clear(optimizer)
        average.update()
train()
"""
LISTED = SHADOW.replace(
    "{name: value.clone().detach() for name, value in model.named_parameters()}",
    "[value.clone().detach() for value in model.parameters()]",
).replace("for name, value in self.model.named_parameters()", "for name, value in enumerate(self.model.parameters())")
# The target is called first, without gradients.
TARGET = """
class Agent:
    def __init__(self):
        self.online, self.target = net(), net()
        load(self.target, self.online.state_dict())
        self.target.eval()
        self.optimizer = adam(self.online.parameters())
    def learn(self, step):
        x, y = data(), data()
        with no_grad():
            goal = y + 0.9 * self.target(x)
        F.mse_loss(self.online(x), goal).backward()
        self.optimizer.step()
        clear(self.optimizer)
        if step % 2 == (0 if fault == "period" else 1):
            load(self.target, self.online.state_dict())
agent = Agent()
for step in range(6):
    agent.learn(step)
"""
RECURRENT = """
class net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(6, 6), nn.Linear(6, 6)
    def forward(self, x):
        return self.head(self.gru(x[None])[0][0])
"""
LAST = TARGET.replace("self.online, self.target = net(), net()", "self.target, self.online = net(), net()").replace(
    """        with no_grad():
            goal = y + 0.9 * self.target(x)
        F.mse_loss(self.online(x), goal).backward()""",
    """        out = self.online(x)
        with no_grad():
            goal = y + 0.9 * self.target(x)
        F.mse_loss(out, goal).backward()""",
)
KINDS = {
    "deep": (DEEP, ["model", "average"], "decay", "has a decay of 0.99 for the reference's 0.9"),
    "shadow": (SHADOW, ["model", "shadow"], "decay", "has a decay of 0.99 for the reference's 0.9"),
    "listed": (LISTED, ["model", "shadow"], "decay", "has a decay of 0.99 for the reference's 0.9"),
    "target": (TARGET, ["online", "target"], "period", "average"),
}


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def recorded(folder: str, framework: str, text: str, fault: str = "") -> padiff.RunReader:
    Path("train.py").write_text(HEAD[framework] + COMMON + text)
    outcome = run("--dir", folder, "train.py", fault)
    assert outcome.returncode == 0, outcome.stderr
    return padiff.open_run(folder)


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_with_a_copy_is_named(kind, framework):
    text, names, fault, words = KINDS[kind]
    reference = recorded("a", framework, text)
    assert sorted(layer.path for layer in reference.info.layers if "." not in layer.path)[1:] == sorted(names)
    recorded("b", framework, text, fault)
    first = padiff.compare_runs("a", "b").first_diff
    assert (first.stage, first.candidate.partition(".")[0]) == ("weight", names[1])
    assert words in str(first.cause) and first.cause.proven


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [("target", LAST), ("deep", DEEP), ("shadow", LISTED)],
    ids=["called last", "deep", "held"],
)
def test_copies_of_two_frameworks_match(reference, candidate):
    recorded("a", "torch", KINDS[reference][0])
    recorded("b", "paddle", candidate)
    report = padiff.compare_runs("a", "b")
    assert report.passed, report.text()
    assert {f"{name}.0" for name in KINDS[reference][1]} <= {
        diff.pair.reference.layer for diff in report.diffs if diff.pair.complete
    }
    assert all(diff.pair.reference.layer == diff.pair.candidate.layer for diff in report.diffs if diff.pair.complete)


def test_a_copy_that_one_loop_lacks_is_no_difference():
    recorded("a", "torch", DEEP)
    recorded("b", "torch", DEEP.partition("    with no_grad")[0].replace("average = ", "_ = None and "))
    assert padiff.compare_runs("a", "b").first_diff is None
    assert padiff.compare_runs("b", "a").first_diff is None


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_recurrent_copy_that_is_called_first_is_recorded_whole(framework):
    """Paddle's recurrent layers hold their cells' parameters a second time."""
    reader = recorded(
        "a", framework, RECURRENT.replace("Module", "Module" if framework == "torch" else "Layer") + TARGET
    )
    called = [record.layer for step in reader.steps(0) for record in step.records if record.stage == "forward"]
    assert called.index("target.gru") < called.index("target") < called.index("online.gru")


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        (
            TARGET,
            "load(self.target, self.online.state_dict())\nagent",
            "self.target = copy.deepcopy(self.online)\nagent",
        ),
        (
            SHADOW,
            "self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * value\ndef",
            "self.shadow = {**self.shadow, name: self.decay * self.shadow[name] + (1 - self.decay) * value}\ndef",
        ),
    ],
    ids=["a layer", "a dict"],
)
def test_a_copy_that_the_loop_makes_anew_is_followed(text, before, after, framework):
    recorded("a", framework, text)
    assert before in text
    recorded("b", framework, text.replace(before, after))
    report = padiff.compare_runs("a", "b")
    assert report.passed and report.coverage.share > 0.95, report.text()
