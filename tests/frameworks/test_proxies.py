"""paddle under torch's name (`paddle.enable_compat`): a proxy is not torch."""

from __future__ import annotations

import subprocess

import paddle
import pytest
from kit.forking import python_with_frameworks

pytestmark = pytest.mark.skipif(not hasattr(paddle, "enable_compat"), reason="this paddle takes no other name")

TRAINING = """
import sys
import paddle
{before}
paddle.enable_compat()
import padiff, torch, torch.nn.functional as F
assert torch.nn.Layer is paddle.nn.Layer

net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=net.parameters())
with padiff.record(net, sys.argv[1], optimizer=optimizer, every_n_steps=1) as recorder:
    for _ in range(2):
        loss = F.mse_loss(net(paddle.ones([2, 8])), paddle.ones([2, 4]))
        loss.backward(); optimizer.step(); optimizer.clear_grad(); recorder.try_dump()
from padiff.frameworks import framework_of
print(recorder.info.framework, padiff.open_run(sys.argv[1]).numbers())
print(framework_of(net).layers.layout(net[0], "weight"), framework_of(paddle.nn.Linear(2, 2)).name)
{after}
"""
MODEL = "import torch as real; model = real.nn.Linear(3, 2)"
USED = f"{MODEL}; import padiff.frameworks as f; assert f.framework_of(model).name == 'torch'"
KNOWN = "assert framework_of(model).name == 'torch'"
ABSENT = "assert not any(name == 'torch._C' for name in sys.modules), 'real torch was imported'"
ORDERS = {
    "paddle alone": ("paddle", "", ABSENT),
    "padiff before": ("paddle", "import padiff.recorder.factory", ABSENT),
    "torch before": ("", MODEL, KNOWN),
    "torch used before": ("", USED, KNOWN),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_training_with_paddle_under_torchs_name_is_paddles(order, tmp_path):
    only, before, after = ORDERS[order]
    code = TRAINING.format(before=before, after=after)
    command = [*python_with_frameworks(only=only), "-W", "ignore", "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["paddle [0, 1]", "out_in paddle"], done.stderr


SCRIPT = """
import paddle
paddle.enable_compat()
import torch

net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=net.parameters())
for _ in range(2):
    loss = torch.nn.CrossEntropyLoss()(net(torch.ones([2, 8])), torch.zeros([2], dtype="int64"))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
"""


def test_padiff_run_records_a_script_with_paddle_under_torchs_name(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    python, run = python_with_frameworks(only="paddle"), tmp_path / "run"
    command = [*python, "-m", "padiff", "run", "--dir", str(run), str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "recorded 2 steps" in done.stderr, done.stderr
