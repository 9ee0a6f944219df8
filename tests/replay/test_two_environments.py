"""The reference's framework is not importable where its steps are done again."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from hard.children import run_child
from kit.forking import python_with_frameworks

ONLY = """
import sys, warnings
warnings.filterwarnings("ignore")
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import padiff
"""

TORCH = """
import torch, torch.nn.functional as F
torch.manual_seed({seed})
net = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.Dropout(0.2),
    torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr={rate}, weight_decay=0.01)
def loss_function(out, labels):
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())
def random_batch():
    return torch.randn(4, 5, 6), torch.randint(0, 3, (4, 5))
def clear():
    optimizer.zero_grad()
"""

PADDLE = """
import paddle, paddle.nn.functional as F
paddle.seed({seed})
net = paddle.nn.Sequential(
    paddle.nn.Linear(6, 8), paddle.nn.Dropout(0.2),
    paddle.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1), paddle.nn.Linear(8, 3))
optimizer = paddle.optimizer.AdamW(parameters=net.parameters(), learning_rate={rate}, weight_decay=0.01)
def loss_function(out, labels):
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())
def random_batch():
    return paddle.randn([4, 5, 6]), paddle.randint(0, 3, [4, 5])
def clear():
    optimizer.clear_grad()
"""

TRAIN = """
with padiff.record(net, {folder!r}, optimizer=optimizer, every_n_steps=100, replay_every_n_steps=3) as rec:
    for _ in range(4):
        inputs, labels = random_batch()
        loss = loss_function(net(inputs), labels)
        loss.backward(); optimizer.step(); clear()
        rec.try_dump()
"""

REPLAY = """
with padiff.replay({reference!r}, net, {folder!r}, optimizer=optimizer) as replay:
    for step in replay:
        loss = loss_function(net(*step.inputs), *step.labels)
        loss.backward(); optimizer.step(); clear()
print(replay.report)
assert {other!r} not in sys.modules and replay.report.coverage.steps == (0, 3)
sys.exit(0 if replay.report.passed else 1)
"""

SIDES = {"torch": TORCH, "paddle": PADDLE}


def ran(place: Path, framework: str, body: str, **values: object) -> CompletedProcess[str]:
    other = next(name for name in SIDES if name != framework)
    text = (ONLY + SIDES[framework] + body).format(absent=(other,), other=other, **values)
    script = place / f"of_{framework}.py"
    script.write_text(text)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return run_child([*python_with_frameworks(only=framework), script], env=environment, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("torch", "paddle"), ("paddle", "torch")])
def test_a_port_is_replayed_without_the_other_framework(tmp_path, source, target):
    first = ran(tmp_path, source, TRAIN, folder=str(tmp_path / "there"), seed=1, rate=0.01)
    assert first.returncode == 0, first.stderr
    (tmp_path / "there").rename(tmp_path / "here")
    second = ran(
        tmp_path, target, REPLAY, reference=str(tmp_path / "here"), folder=str(tmp_path / "again"), seed=2, rate=0.5
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert "MATCH  " in second.stdout


EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 6


def example(place: Path, framework: str, name: str, *arguments: object) -> CompletedProcess[str]:
    """An example, where the other framework can't be imported."""
    other = next(each for each in SIDES if each != framework)
    script = place / f"{name}_alone.py"
    run = "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    script.write_text(ONLY.format(absent=(other,)) + run)
    root = Path(__file__).parents[2]
    packages = [root, *(root / "integrations" / each for each in ("lightning", "paddle_hapi"))]
    paths = os.pathsep.join([*map(str, packages), os.environ.get("PYTHONPATH", "")])
    command = [*python_with_frameworks(only=framework), script, EXAMPLES / "vit_port" / f"{name}.py", *arguments]
    return run_child([str(word) for word in command], env={**os.environ, "PYTHONPATH": paths}, timeout=240)


@pytest.mark.parametrize("name", ["train_lightning", "replay_hapi"])
def test_a_port_takes_few_lines(name):
    """Lines that are there for padiff: what names it, and what is done with it."""
    code = (EXAMPLES / "vit_port" / f"{name}.py").read_text().split('"""')[2]
    lines = [line for line in code.splitlines() if any(word in line.lower() for word in ("padiff", "callback", "sys."))]
    assert 0 < len(lines) <= MOST_LINES, lines
    assert not any(word in code for word in ("state_dict", "np.save", "load(", "layer_map", "eval()"))


@pytest.mark.slow
def test_a_vit_is_ported_from_lightning_to_hapi(tmp_path):
    first = example(tmp_path, "torch", "train_lightning", tmp_path / "there")
    assert first.returncode == 0, first.stderr
    (tmp_path / "there").rename(tmp_path / "moved")
    second = example(tmp_path, "paddle", "replay_hapi", tmp_path / "moved", tmp_path / "here")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "MATCH  " in second.stdout
    assert "can't be fed" not in second.stderr and "has no mask" not in second.stderr
