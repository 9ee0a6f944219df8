"""`padiff run`: real scripts of which no line changes, in processes of their own."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kit.forking import interpreter, python_with_frameworks

import padiff
from padiff_cli.main import main

pytestmark = pytest.mark.slow

TORCH = """
import sys, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
with torch.no_grad():
    net(torch.ones(2, 4))  # no training yet
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
{before}
for step in range(4):
    loss = torch.nn.functional.cross_entropy(net(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
    {after}
print(__name__, sys.argv, sys.path[0] == sys.argv[0].rpartition("/")[0])
if "fails" in sys.argv:
    raise KeyError("of the script")
sys.exit(5 if "five" in sys.argv else 0)
"""
PADDLE = """
import paddle
paddle.seed(0)
net = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 3))
optimizer = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
{before}
for step in range(4):
    loss = paddle.nn.functional.cross_entropy(net(paddle.randn([6, 4])), paddle.randint(0, 3, [6]))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    print(float(loss).hex())
    {after}
"""
LIGHTNING = """
import logging, warnings
warnings.simplefilter("ignore")
logging.getLogger("{package}").setLevel(logging.ERROR)
import torch
import {package} as pl
{before}
torch.manual_seed(0)
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        print(loss.item().hex())
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     accelerator="cpu", enable_model_summary=False, callbacks=[{callback}])
trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=6))
"""
HAPI = """
import numpy as np, paddle
{before}
paddle.seed(0)
data = np.random.RandomState(0).randn(24, 4).astype("float32")
class Data(paddle.io.Dataset):
    def __getitem__(self, index):
        return data[index], np.int64(index % 2)
    def __len__(self):
        return len(data)
net = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 2))
model = paddle.Model(net)
model.prepare(paddle.optimizer.SGD(parameters=net.parameters()), paddle.nn.CrossEntropyLoss())
net(paddle.ones([2, 4]))  # as in a training, before it
model.fit(Data(), batch_size=6, epochs=1, verbose=0, shuffle=False, callbacks=[{callback}])
for parameter in net.parameters():
    print(parameter.numpy().tobytes().hex())
"""
TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
{before}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, max_position_embeddings=16))
rows = [{{"input_ids": row, "labels": row}} for row in torch.randint(0, 32, (16, 8))]
args = TrainingArguments("out", use_cpu=True, max_steps=4, per_device_train_batch_size=2, report_to=[],
                         gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True)
Trainer(model, args, train_dataset=rows, callbacks=[{callback}]).train()
for parameter in model.parameters():
    print(parameter.detach().numpy().tobytes().hex())
"""
PADDLEFORMERS = """
import numpy as np, paddle
from paddleformers.trainer import Trainer, TrainingArguments
{before}
paddle.seed(0)
class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.a, self.b = paddle.nn.Linear(4, 8), paddle.nn.Linear(8, 3)
    def forward(self, x, labels=None):
        return paddle.nn.functional.cross_entropy(self.b(paddle.tanh(self.a(x))), labels),
data = np.random.RandomState(0).randn(24, 4).astype("float32")
rows = [{{"x": row, "labels": np.int64(n % 3)}} for n, row in enumerate(data)]
args = TrainingArguments(output_dir="out", device="cpu", max_steps=4, per_device_train_batch_size=4, report_to=[],
                         save_strategy="no", amp_master_grad=False, disable_tqdm=True)
net = Net()
Trainer(net, args=args, train_dataset=rows, callbacks=[{callback}]).train()
for parameter in net.parameters():
    print("weights", parameter.numpy().tobytes().hex())
"""
BY_HAND = {
    "before": "import padiff\nrec = padiff.record(net, 'hand', optimizer=optimizer).__enter__()",
    "after": "rec.try_dump()\n    if step == 3: rec.__exit__(None, None, None)",
}


def script(text: str, name: str = "train.py", package: str = "", integration: str = "", **given: str) -> Path:
    before = given.pop("before", f"from {integration} import PaDiffCallback" if integration else "")
    callback = "PaDiffCallback('hand')" if integration else ""
    Path(name).write_text(text.format(before=before, after=given.get("after", ""), package=package, callback=callback))
    return Path(name)


def call(*command: object, imported: bool = True, **environment: str):
    """Run a script, in a process that has the frameworks already, or one where what is found is what it imports."""
    python = python_with_frameworks() if imported else [sys.executable]
    return subprocess.run(
        [*python, "-W", "ignore", *map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )


def run(*arguments: object, imported: bool = True, **environment: str):
    return call("-m", "padiff", "run", *arguments, imported=imported, **environment)


def printed(done) -> list[str]:
    """What a script says of its numbers; hosts say other things, and when."""
    return [line for line in done.stdout.splitlines() if line.startswith(("0x", "-0x", "weights")) or line.isalnum()]


def values(folder: str):
    opened = padiff.open_run(folder)
    return {
        (number, record.site): record.value
        for number in opened.numbers()
        for step in opened.steps(number)
        for record in step.records
    }


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


CASES = [
    ("torch", TORCH, "", "", "a plain loop: Sequential, which SGD trains (torch)"),
    ("paddle", PADDLE, "", "", "a plain loop: Sequential, which AdamW trains (paddle)"),
    ("pytorch_lightning", LIGHTNING, "pytorch_lightning", "padiff_lightning", "Lightning's Trainer: Lit"),
    ("lightning", LIGHTNING, "lightning.pytorch", "padiff_lightning", "Lightning's Trainer: Lit"),
    ("paddle", HAPI, "", "padiff_hapi", "paddle.Model: Sequential"),
    ("transformers", TRANSFORMERS, "", "padiff_transformers", "transformers' Trainer: LlamaForCausalLM"),
    ("paddleformers", PADDLEFORMERS, "", "padiff_paddleformers", "PaddleFormers' Trainer: Net"),
]


NAMES = ["torch", "paddle", "pytorch_lightning", "lightning", "hapi", "transformers", "paddleformers"]
# The script that fails is one in which the framework is found as it is imported; hosts are found so in all.
# torch's own optimizers import a compiler, which takes as long as torch itself.
DESCENT = """
class Descent(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= self.defaults["lr"] * parameter.grad
optimizer = Descent(net.parameters(), dict(lr=0.1))
"""


# Hosts save checkpoints, which are the same to the byte.
SAVES = {
    "enable_checkpointing=False": "default_root_dir='out'",
    "verbose=0": "verbose=0, save_dir='out'",
    'save_strategy="no"': "save_steps=2",
    'output_dir="out"': 'output_dir="out", logging_dir="logs"',  # otherwise named after the second
}


def saved_files():
    """Return the files that a script saved, with their hashes, and remove them."""
    # PaddleFormers writes the names of tensors, which paddle counts, also those that the recorder makes.
    files = [path for path in sorted(Path("out").rglob("*")) if path.is_file() and "model_state" not in path.parts]
    hashes = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    shutil.rmtree("out", ignore_errors=True)
    return hashes


@pytest.mark.parametrize(("needed", "text", "package", "integration", "attached"), CASES, ids=NAMES)
def test_an_unchanged_script_is_recorded_as_one_that_records_by_itself(needed, text, package, integration, attached):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    for before, after in SAVES.items():
        text = text.replace(before, after)
    unchanged, saved = call(script(text, package=package)), saved_files()
    by_hand = {"integration": integration} if integration else BY_HAND
    hand, _ = call(script(text, "hand.py", package, **by_hand)), saved_files()
    recorded = run("--dir", "auto", "train.py")
    assert saved_files() == saved and bool(saved) == bool(integration)
    assert (unchanged.returncode, hand.returncode, recorded.returncode) == (0, 0, 0), hand.stderr + recorded.stderr
    assert f"padiff: recording {attached}, every step, into auto\n" in recorded.stderr
    assert printed(unchanged) == printed(recorded) and len(printed(unchanged)) >= 4
    found, expected = values("auto"), values("hand")
    assert found.keys() == expected.keys() and {step for step, _ in found} == {0, 1, 2, 3}
    for key, value in found.items():
        np.testing.assert_array_equal(value, expected[key], err_msg=str(key))
    assert padiff.open_run("auto").info.settings == padiff.open_run("hand").info.settings
    report = padiff.compare_runs("hand", "auto")
    assert report.outcome == "match", str(report)
    assert padiff.open_run("auto").finished()


def test_a_script_sees_its_own_arguments_and_ends_as_without(tmp_path):
    script(TORCH)
    path = tmp_path / "train.py"
    arguments = [path, "five", "--every", "2", "--", "-x"]
    unchanged, recorded = call(*arguments), run("--every", "3", *arguments)
    assert unchanged.returncode == recorded.returncode == 5
    assert unchanged.stdout == recorded.stdout and "'--every', '2', '--', '-x'] True" in recorded.stdout
    assert padiff.open_run("runs/train").numbers() == [0, 3]


def test_an_exception_leaves_as_without(tmp_path):
    """Also of a script that looks for a framework before it imports it, as transformers does."""
    look = "import importlib.util\nassert importlib.util.find_spec('torch')\n"
    sgd = next(line for line in TORCH.splitlines() if line.startswith("optimizer ="))
    text = script(look + TORCH.replace(sgd, DESCENT.replace("{", "{{").replace("}", "}}"))).read_text()
    # In an interpreter of its own, whose traceback is nobody else's, and which has not imported torch.
    recorded, unchanged = run("train.py", "fails", imported=False), call("train.py", "fails")
    assert unchanged.returncode == recorded.returncode == 1
    assert unchanged.stdout == recorded.stdout
    raising = '    raise KeyError("of the script")'
    line = text.splitlines().index(raising) + 1
    assert [line for line in recorded.stderr.splitlines() if "padiff: " not in line] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line {line}, in <module>',
        raising,
        "KeyError: 'of the script'",
    ]
    opened = padiff.open_run("runs/train")
    assert opened.numbers() == [0, 1, 2, 3] and not opened.finished()


def test_switches_come_from_the_environment_and_an_option_outdoes_them():
    script(TORCH)
    run("--every", "2", "train.py", PADIFF_RUN_DIR="there", PADIFF_RUN_EVERY="3", PADIFF_RUN_NAME="named")
    opened = padiff.open_run("there")
    assert opened.numbers() == [0, 2] and opened.name == "named"
    wrong = run("train.py", PADIFF_RUN_EVERY="often")
    assert wrong.returncode == 2 and "PADIFF_RUN_EVERY has to be a number, got 'often'" in wrong.stderr
    assert not wrong.stdout  # the script did not begin


def test_a_module_runs_as_python_m_does():
    Path("package").mkdir()
    script(TORCH.replace("lr=0.1", "lr=0.2"), "package/train.py")
    done = run("--dir", "auto", "-m", "package.train", "five")
    assert done.returncode == 5 and padiff.open_run("auto").numbers() == [0, 1, 2, 3]


def test_a_reference_is_compared_with_while_it_trains():
    script(TORCH)
    run("--dir", "reference", "train.py")
    same = run("--dir", "same", "--reference", "reference", "train.py")
    assert (
        same.returncode == 0 and "compared 4 steps with reference: they match, largest relative L2 0\n" in same.stderr
    )
    script(TORCH.replace("lr=0.1", "lr=0.3"))
    for on_diff, printed_of in (("stop", 1), ("raise", 1)):
        done = run("--dir", on_diff, "--reference", "reference", "--on-diff", on_diff, "train.py")
        assert done.returncode == 1 and len(done.stdout.splitlines()) <= printed_of, done.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print('0x1')", "train.py is not recorded: it imported neither torch nor paddle"),
        ("import torch; print('0x1')", "train.py is not recorded: it made no step with an optimizer"),
    ],
)
def test_a_script_that_does_not_train_is_named(text, why):
    Path("train.py").write_text(text)
    unchanged, recorded = call("train.py"), run("train.py", imported="torch" in text)
    assert why in recorded.stderr and "Traceback" not in recorded.stderr
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout)
    assert not Path("runs/train").exists()


def test_a_script_that_records_by_itself_is_left_alone():
    script(TORCH, **BY_HAND)
    done = run("train.py")
    assert done.returncode == 0 and "train.py records by itself" in done.stderr
    assert padiff.open_run("hand").numbers() == [0, 1, 2, 3] and not Path("runs").exists()


def test_two_processes_of_torchrun_record_one_run(tmp_path):
    text = TORCH.replace("import sys, torch", "import sys, torch\ntorch.distributed.init_process_group('gloo')")
    # Rank 0 begins the run before rank 1 looks for its folder.
    late = "import time; time.sleep(2.0 * torch.distributed.get_rank())"
    script(text.replace("optimizer =", f"net = torch.nn.parallel.DistributedDataParallel(net)\n{late}\noptimizer ="))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "padiff", "run"]
    done = call(*launch, "--dir", "auto", "train.py", PYTHON_EXEC=str(interpreter()))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("padiff: recording a plain loop: Sequential") == 1
    opened = padiff.open_run("auto")
    assert opened.numbers() == [0, 1, 2, 3] and [step.rank for step in opened.steps(0)] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["missing.py"], "there is no script missing.py"),
        (["--on-diff", "stop", "train.py"], "on_diff='stop' needs a reference run"),
        (["--dir", "held", "train.py"], "held holds a run already"),
    ],
)
def test_misuse_is_reported_before_the_script_begins(arguments, reported, capsys):
    Path("train.py").write_text("raise SystemExit('it began')")
    Path("held").mkdir()
    Path("held/run.json").write_text("{}")
    assert main(["run", *arguments]) == 2
    assert reported in capsys.readouterr().err
