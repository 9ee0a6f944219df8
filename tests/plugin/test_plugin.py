"""The pytest plugin, in sessions of pytest of its own: what a user's tests say, and whether they pass."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hard.children import run_child
from kit.forking import interpreter, python_with_frameworks

# Each starts pytest in a process of its own.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import copy
import numpy as np, paddle, torch

X = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 8)

def torch_net(epsilon=1e-5, drop=0.0):
    nn = torch.nn
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, eps=epsilon), nn.ReLU(), nn.Dropout(drop), nn.Linear(7, 3))

def paddle_net(epsilon=1e-5):
    nn = paddle.nn
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1D(7, epsilon=epsilon), nn.ReLU(), nn.Linear(7, 3))

def adams(one, other, beta2=0.999):
    return (
        torch.optim.Adam(one.parameters(), 1e-2),
        paddle.optimizer.Adam(1e-2, beta2=beta2, parameters=other.parameters()),
    )

CROSS_ENTROPIES = torch.nn.functional.cross_entropy, paddle.nn.functional.cross_entropy
"""

GOLDEN = """
def train(padiff, scale=1.0, steps=3, name="net"):
    torch.manual_seed(0)
    net = torch_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with padiff.golden(name, net, optimizer=optimizer) as rec:
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(net(torch.tensor(X)) * scale, torch.tensor(Y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()

def test_net(padiff):
    train(padiff)
"""


@dataclass(frozen=True)
class Outcome:
    """What a session of pytest came to: how many tests passed, failed, ..., and all that it printed."""

    counts: dict[str, int]
    text: str


@pytest.fixture
def session(tmp_path):
    """Runs tests in a session of pytest; returns its outcome."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Wide enough for whole lines. Other plugins that are installed take longer to import than a session takes.
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "COLUMNS": "400"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(body, *arguments):
        (tmp_path / "test_it.py").write_text(HEAD + body)
        command = [
            *python_with_frameworks(children=True),
            "-m",
            "pytest.__main__",
            "-p",
            "padiff_pytest",
            "-p",
            "no:cacheprovider",
        ]
        options = ["-W", "ignore", "-ra", f"--basetemp={tmp_path / 'temporary'}", *arguments]
        done = run_child([*command, *options], cwd=tmp_path, env=environment)
        print(done.stdout, done.stderr)  # shown where a test fails
        last = done.stdout.rstrip().rsplit("\n", 1)[-1]
        counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|error)", last)}
        return Outcome(counts, done.stdout + done.stderr)

    return run


SAME = """
def test_two_frameworks(padiff):
    one, other = torch_net(), paddle_net()
    report = padiff.assert_same(one, other, X, optimizers=adams(one, other))
    assert list(report.coverage.steps) == [0, 1, 2]
    assert {"loss", "grad", "update"} <= {diff.pair.stage for diff in report if diff.compared}

def test_labels_and_batches(padiff):
    one, other = torch_net(), paddle_net()
    batches = [X, torch.tensor(2 * X)]
    report = padiff.assert_same(
        one, other, batches, labels=Y, loss=CROSS_ENTROPIES, optimizers=adams(one, other)
    )
    assert list(report.coverage.steps) == [0, 1]

def test_one_framework_drops_alike(padiff):
    one = torch_net(drop=0.5)
    other = torch_net(drop=0.5)
    state = torch.get_rng_state()
    padiff.assert_same(one, other, X)
    assert torch.equal(state, torch.get_rng_state())

def test_what_is_trained_is_what_a_loop_trains(padiff):
    one, other = torch_net(), paddle_net()
    by_hand = copy.deepcopy(one)
    padiff.assert_same(one, other, X, steps=2, optimizers=adams(one, other), detail="sketch")
    optimizer = torch.optim.Adam(by_hand.parameters(), 1e-2)
    for _ in range(2):
        (by_hand(torch.tensor(X)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for value, expected in zip(one.state_dict().values(), by_hand.state_dict().values()):
        assert torch.equal(value, expected)
    assert all(p.grad is None or not p.grad.any() for p in one.parameters())
    assert not any(layer._forward_hooks for layer in one.modules())

def test_all_else_is_the_package(padiff):
    assert padiff.Tolerance(atol=1.0).atol == 1.0
"""


def test_trainings_that_match_pass(session):
    assert session(SAME).counts == {"passed": 5}


FAULTS = """
def test_epsilon(padiff):
    padiff.assert_same(torch_net(), paddle_net(epsilon=1e-2), X)

def test_beta(padiff):
    one, other = torch_net(), paddle_net()
    padiff.assert_same(one, other, X, optimizers=adams(one, other, beta2=0.9))

def test_start(padiff):
    padiff.assert_same(torch_net(), paddle_net(), X, start_equal=False)

def test_other_shapes(padiff):
    padiff.assert_same(torch_net(), paddle.nn.Linear(5, 9), X)
"""


def test_a_fault_fails_with_the_verdict_at_the_test_s_own_line(session):
    result = session(FAULTS)
    assert result.counts == {"failed": 4}
    text = result.text
    assert re.search(r"E +AssertionError: DIFFER step 0, forward: 1: ", text)
    assert "eps 1e-05 against 0.01" in text
    assert "Adam: beta2 0.999 against 0.9" in text
    assert re.search(r"DIFFER step 0, weight: 0\.weight", text)
    assert "the candidate can't start equal" in text
    assert "[7, 5] against [5, 9]" in text
    # Tracebacks: the test and nothing of padiff.
    assert set(re.findall(r"^(\S+\.py):\d+: ", text, re.MULTILINE)) == {"test_it.py"}
    assert "FAILED test_it.py::test_epsilon - AssertionError: DIFFER step 0, forward: 1" in text


MISUSES = {
    "padiff.assert_same(one, other, X.astype('float64'))": "give array.astype('float32')",
    "padiff.assert_same(one, other, 3)": "expected a numpy array or a tensor",
    "padiff.assert_same(one, other, (X, X))": "forward takes",
    "padiff.assert_same(one, other, [X, X], steps=3)": "inputs is a list of 2, one for each step, but steps=3",
    "padiff.assert_same(one, other, X, steps=0)": "steps has to be a whole number of at least 1, got 0",
    "padiff.assert_same(one, one, X)": "the two models are one model",
    "padiff.assert_same(one, other, X, optimizers=adams(one, other)[::-1])": "expected an optimizer of torch",
    "padiff.assert_same(one, other, X, optimizers=adams(one, other)[0])": "optimizers has to be a pair",
    "padiff.assert_same(one, other, X, labels=Y)": "labels: nothing takes them",
    "padiff.assert_same(one, other, X, loss=CROSS_ENTROPIES)": "Give labels=",
    "padiff.assert_same(one, other, X, loss=lambda output: output)": "a torch tensor of one element, got [8, 3]",
    "padiff.assert_same(one, other, X, start_equal=1)": "start_equal is True or False, got 1",
    "padiff.assert_same(one, 'paddle', X)": "expected a torch.nn.Module or a paddle.nn.Layer",
    "padiff.golden('../net', one)": "letters, digits",
    "padiff.golden('net', one, detial='full')": "'detial'",
    "padiff.golden('net', one, existing='overwrite')": "existing= is none of its options",
}


def test_misuse_is_a_clear_error_that_changes_nothing(session):
    lines = "\n".join(
        f"    try:\n        {call}\n"
        f"    except (ValueError, TypeError) as error:\n        print('SAID', {number}, error)"
        for number, call in enumerate(MISUSES)
    )
    body = f"""
def test_misuse(padiff):
    one, other = torch_net(), paddle_net()
    before = copy.deepcopy(one.state_dict())
{lines}
    for name in ("0.weight", "0.bias", "4.weight"):
        assert torch.equal(before[name], one.state_dict()[name])
"""
    result = session(body, "-s")
    said = {int(number): text for number, text in re.findall(r"SAID (\d+) (.*)", result.text)}
    for number, (call, expected) in enumerate(MISUSES.items()):
        assert expected in said.get(number, "nothing"), (call, said.get(number))


@pytest.mark.slow
def test_a_golden_run_is_asked_for_written_and_compared_with(session, tmp_path):
    folder = tmp_path / "golden" / "test_it" / "net"
    result = session(GOLDEN)
    assert result.counts == {"failed": 1}
    assert "there is no golden run 'net'" in result.text
    assert "pytest --padiff-update test_it.py::test_net" in result.text
    assert not folder.exists()

    result = session(GOLDEN, "--padiff-update")
    assert result.counts == {"passed": 1}
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    assert f"{folder}: written, {size / 1e6:.2f} MB in {len(files)} files" in result.text
    assert size < 100_000

    kept = {path: path.read_bytes() for path in files}
    # Comparing with one run in several tests is fine.
    others = "\ndef test_scaled(padiff):\n    train(padiff, scale=2.0)\n"
    others += "\ndef test_short(padiff):\n    train(padiff, steps=2)\n"
    result = session(GOLDEN + others)
    assert result.counts == {"passed": 1, "failed": 2}
    # By hand: twice the logits is a relative error of 1.
    assert re.search(r"E +AssertionError: DIFFER step 0, loss: .*logits: ", result.text)
    assert "the number in mul() in the loop is 2 for the reference's 1" in result.text
    assert re.search(r"E +size +[\d,]+ times the limit: relative error 1,", result.text)
    assert "The golden run has 3 steps (0 to 2), the one of now 2 steps (0 to 1)." in result.text
    assert {path: path.read_bytes() for path in files} == kept

    assert session(GOLDEN.replace("scale=1.0", "scale=2.0"), "--padiff-update").counts == {"passed": 1}
    assert session(GOLDEN.replace("scale=1.0", "scale=2.0")).counts == {"passed": 1}


def test_a_test_that_fails_by_itself_writes_nothing(session, tmp_path):
    failing = GOLDEN.replace("rec.try_dump()", "raise KeyError('mine')")
    failing += "\ndef test_nothing(padiff):\n    train(padiff, steps=0, name='nothing')\n"
    result = session(failing, "--padiff-update")
    assert result.counts == {"failed": 2}
    assert "KeyError: 'mine'" in result.text
    assert "golden: no step was recorded" in result.text
    assert not (tmp_path / "golden").exists()


def test_two_tests_don_t_write_one_golden_run(session):
    again = "\ndef test_again(padiff):\n    train(padiff)\n"
    twice = "\ndef test_twice(padiff):\n    train(padiff, name='other')\n    train(padiff, name='other')\n"
    result = session(GOLDEN + again + twice, "--padiff-update")
    assert result.counts == {"passed": 1, "failed": 2}
    assert "test_it.py::test_net and test_it.py::test_again both write" in result.text
    assert "golden: this test writes 'other' twice" in result.text


def test_a_run_that_a_host_recorded(session, tmp_path):
    body = GOLDEN.replace("padiff.golden(name, net,", "padiff.record(net, 'runs/now', existing='overwrite',")
    body += "    padiff.golden_run('net', 'runs/now')\n"
    result = session(body)
    assert result.counts == {"failed": 1}
    assert "there is no golden run 'net'" in result.text
    assert session(body, "--padiff-update").counts == {"passed": 1}
    assert (tmp_path / "runs" / "now" / "run.json").exists()
    result = session(body.replace("scale=1.0", "scale=2.0"))
    assert result.counts == {"failed": 1}
    assert "AssertionError: DIFFER step 0, loss: " in result.text


@pytest.mark.slow
def test_under_xdist(session, tmp_path):
    pytest.importorskip("xdist")
    workers = ("-p", "xdist", "--dist", "load", "--tx", f"2*popen//python={interpreter()}")  # as with -n 2
    two = GOLDEN + "\ndef test_other(padiff):\n    train(padiff, name='other')\n"
    # Whichever process comes second to a golden run, with another test, is refused.
    clash = "\ndef test_clash(padiff):\n    train(padiff)\n"
    result = session(two + clash, *workers, "--padiff-update")
    assert result.counts == {"passed": 2, "failed": 1}
    assert result.text.count(" MB in ") == 2
    assert "both write" in result.text
    assert session(two, *workers).counts == {"passed": 2}


def test_an_error_of_the_model_s_own_code_is_shown_from_there_on(session):
    body = """
class Broken(torch.nn.Linear):
    def forward(self, x):
        raise ArithmeticError("mine")

def test_broken(padiff):
    padiff.assert_same(Broken(5, 3), paddle.nn.Linear(5, 3), X, start_equal=False)
"""
    result = session(body)
    assert result.counts == {"failed": 1}
    assert "E       ArithmeticError: mine" in result.text
    places = re.findall(r"^(\S+\.py):\d+: ", result.text, re.MULTILINE)
    assert not [place for place in places if "padiff_pytest" in place]
    assert places[0] == places[-1] == "test_it.py"


def test_the_entry_point_is_the_plugin_once(tmp_path):
    """As an installed package has it, with or without naming it by hand."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "padiff_pytest" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ((name, target),) = project["project"]["entry-points"]["pytest11"].items()
    installed = tmp_path / "installed" / "padiff_again-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: padiff-again\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{name} = {target}\n")
    (tmp_path / "test_it.py").write_text("def test_it(padiff):\n    assert padiff.Tolerance(atol=1.0).atol == 1.0\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(installed.parent), *sys.path[1:]])
    for named in ([], ["-p", "padiff_pytest"]):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *named, "test_it.py"]
        done = run_child(command, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_session_that_does_not_ask_imports_no_framework(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it():\n    assert not {'torch', 'paddle', 'numpy', 'padiff'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "padiff_pytest", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_child([*command, "test_it.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout


COMMAND = """
import os, sys
from pathlib import Path
from padiff_pytest.command import DriftWarning

SCRIPT = '''
import os, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
if os.environ.get("KIND") == "halves":
    plain = nn.functional.linear
    nn.functional.linear = lambda x, w, b=None: plain(x[..., ::2], w[:, ::2]) + plain(x[..., 1::2], w[:, 1::2]) + b
for _ in range(2):
    loss = (net(torch.randn(8, 6)) * (1.0001 if os.environ.get("KIND") == "fault" else 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
'''

def test_command(padiff):
    Path("train.py").write_text(SCRIPT)
    os.environ["KIND"] = Path("kind").read_text()
    padiff.golden_command("net", sys.executable, "train.py")
"""


def test_a_command_is_sorted_against_its_golden_run(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = tmp_path / "kind"
    kind.write_text("")
    assert session(COMMAND).counts == {"failed": 1}  # there is none yet
    outcome = session(COMMAND, "--padiff-update")
    assert outcome.counts == {"passed": 1} and "golden/test_it/net: written" in outcome.text
    assert session(COMMAND, "-W", "error").counts == {"passed": 1}
    kind.write_text("fault")
    outcome = session(COMMAND, "--padiff-bless")
    assert outcome.counts == {"failed": 1}
    assert "first beyond" in outcome.text and "DIFFER" in outcome.text
    assert not (tmp_path / "golden/test_it/net/proof.json").exists()
    kind.write_text("halves")
    outcome = session(COMMAND, "-W", "always::padiff_pytest.command.DriftWarning")
    assert outcome.counts == {"passed": 1} and "net: drift; first to move" in outcome.text
    assert session(COMMAND, "-W", "error::padiff_pytest.command.DriftWarning").counts == {"failed": 1}
    assert "blessed; the proof is" in session(COMMAND, "--padiff-bless").text
    assert (tmp_path / "golden/test_it/net/proof.json").is_file()
    assert session(COMMAND, "-W", "error").counts == {"passed": 1}
