"""Scripts of first diffs: they fail as the runs do, say by how much, and pass once the fault is out of them."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from hard.children import run_child
from kit.forking import python_with_frameworks
from kit.records import planted, toy_folder

import padiff
from padiff.repro import write_repro
from padiff_cli.main import main

from . import nets
from .nets import train

BOTH = pytest.mark.parametrize("framework", ["torch", "paddle"])
# Fault -> what the candidate's script has of it, and what is right; of torch and of paddle.
FAULTS = {
    "eps": {"torch": ("eps=0.001", "eps=1e-05"), "paddle": ("epsilon=0.001", "epsilon=1e-05")},
    "axis": {"torch": ("dim=1", "dim=-1"), "paddle": ("axis=1", "axis=-1")},
    "attention": {"torch": ("/ 8.0", "/ 8.0**0.5"), "paddle": ("/ 8.0", "/ 8.0**0.5")},
    "gelu": {"torch": ("'tanh'", "'none'"), "paddle": ("approximate=True", "approximate=False")},
    "own_norm": {"torch": ("+ 0.01", "+ 1e-06"), "paddle": ("+ 0.01", "+ 1e-06")},
    "decay": {"torch": ("weight_decay=0.2", "weight_decay=0.01"), "paddle": ("weight_decay=0.2", "weight_decay=0.01")},
    "loss": {"torch": ("'sum'", "'mean'"), "paddle": ("'sum'", "'mean'")},
    "momentum": {"torch": ("momentum=0.9", "momentum=0.1"), "paddle": ("momentum=0.1", "momentum=0.9")},
    "detach": {"torch": (".detach()  #", "  #"), "paddle": (".detach()  #", "  #")},
    "parameter": {"torch": (".detach()  #", "  #"), "paddle": (".detach()  #", "  #")},
}
STAGES = {"decay": "update", "loss": "loss", "momentum": "weight", "detach": "backward", "parameter": "grad"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> str:
    return train("torch", tmp_path_factory.mktemp("runs") / "reference")


def ran(script: Path) -> tuple[int, str]:
    """The exit code of a script in this process, and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))
    return ended.value.code, out.getvalue()


def figure(printed: str, line: str) -> float:
    return float(re.search(rf"{line}: +([\d.e+-]+|inf)", printed)[1])


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("fault", FAULTS)
def test_scripts_fail_as_the_runs_do_and_pass_without_the_fault(fault, framework, reference, tmp_path):
    candidate = train(framework, tmp_path / "candidate", fault)
    found = write_repro(reference, candidate, tmp_path / "out")
    assert found.first.stage == STAGES.get(fault, "forward") and not found.reasons
    assert {name: path.name for name, path in found.scripts.items()} == {
        "reference": "reference_torch.py", "candidate": f"candidate_{framework}.py"
    }  # fmt: skip
    for path in found.scripts.values():
        assert not re.search(r"^\s*(import|from) padiff", path.read_text(), re.MULTILINE)
        code, printed = ran(path)
        # What it computes is what its run recorded, which is not what the other one recorded.
        assert code == 1 and printed.endswith("DIFFERS\n"), printed
        assert figure(printed, "against what this run recorded") < 1e-6
        assert figure(printed, "against itself in float64") < 1e-5
        other = figure(printed, "against what the other run recorded")
        limit = float(re.search(r"allowed ([\d.e+-]+)", printed)[1])
        assert other > limit
        assert figure(printed, "the other run against that float64") > limit
    wrong, right = FAULTS[fault][framework]
    script = found.scripts["candidate"]
    text = script.read_text()
    assert wrong in text
    script.write_text(text.replace(wrong, right))
    code, printed = ran(script)
    assert code == 0 and printed.endswith("agrees\n"), printed


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("fault", ["attention", "own_norm", "detach"])
def test_what_only_a_sketch_was_kept_of_is_computed_from_what_was_kept(fault, framework, tmp_path, monkeypatch):
    """Of large steps, what goes from function to function is a sketch."""
    rng = np.random.default_rng(1)
    monkeypatch.setattr(nets, "IDS", rng.integers(1, 12, size=(100, 6)).astype("int64"))
    monkeypatch.setattr(nets, "LABELS", rng.integers(0, 5, size=100).astype("int64"))
    runs = train("torch", tmp_path / "reference"), train(framework, tmp_path / "candidate", fault)
    found = write_repro(*runs, tmp_path / "out")
    for path in found.scripts.values():
        code, printed = ran(path)
        assert code == 1 and figure(printed, "against what this run recorded") < 1e-6, printed
    wrong, right = FAULTS[fault][framework]
    script = found.scripts["candidate"]
    assert wrong in script.read_text()
    script.write_text(script.read_text().replace(wrong, right))
    code, printed = ran(script)
    assert code == 0, printed


@pytest.mark.slow
def test_a_scaled_loss_is_taken_off(reference, tmp_path):
    candidate = train("torch", tmp_path / "candidate", "detach", scale=1024.0)
    found = write_repro(reference, candidate, tmp_path / "out")
    assert found.first.stage == "backward"
    for path in found.scripts.values():
        code, printed = ran(path)
        assert code == 1 and figure(printed, "against what this run recorded") < 1e-6
        assert figure(printed, "against what the other run recorded") < 2


@pytest.mark.slow
@BOTH
def test_scripts_need_no_padiff(framework, tmp_path, reference):
    candidate = train(framework, tmp_path / "candidate", "eps")
    found = write_repro(reference, candidate, tmp_path / "out")
    blocked = "import runpy, sys; sys.modules['padiff'] = None; runpy.run_path(sys.argv[1])"
    # Paddle's in an interpreter that has the installed packages only; torch takes longer to import.
    python = [sys.executable, "-I", "-W", "ignore"] if framework == "paddle" else python_with_frameworks()
    done = run_child([*python, "-c", blocked, found.scripts["candidate"]], cwd="/")
    assert done.returncode == 1 and "DIFFERS" in done.stdout, done.stderr
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"python candidate_{framework}.py" in readme and "The runs differ first at step 0, stage forward" in readme
    version = {"torch": torch.__version__, "paddle": paddle.__version__}[framework]
    assert f"framework: {framework} {version}" in readme


def test_a_fault_in_code_that_no_call_shows_is_not_blamed_on_the_framework(reference, tmp_path, monkeypatch):
    """A hook doubles what a layer gives: the framework's own layer does not."""

    class Net(nets._Torch):
        def __init__(self, fault):
            super().__init__("")
            self.up.register_forward_hook(lambda *call: call[-1] * 1.5)

    monkeypatch.setattr(nets, "_Torch", Net)
    candidate = train("torch", tmp_path / "candidate")
    found = write_repro(reference, candidate, tmp_path / "out")
    code, printed = ran(found.scripts["candidate"])
    assert code == 0 and "What this run recorded is not what these lines give" in printed
    assert ran(found.scripts["reference"])[0] == 1


@pytest.mark.slow
@BOTH
def test_the_backward_of_the_loss_is_not_blamed_where_the_loop_scales_it(framework, reference, tmp_path):
    candidate = train(framework, tmp_path / "candidate", "scaled")
    found = write_repro(reference, candidate, tmp_path / "out")
    assert found.first.stage == "loss" and not found.reasons
    code, printed = ran(found.scripts["reference"])
    assert code == 1 and figure(printed, "against what this run recorded") < 1e-6
    assert figure(printed, "against what the other run recorded") == pytest.approx(0.5, rel=1e-5)
    code, printed = ran(found.scripts["candidate"])
    assert code == 0 and "What this run recorded is not what these lines give" in printed


# -- what there is no script for ---------------------------------------------------------------------------------------


def test_runs_that_match_need_none(tmp_path, reference, capsys):
    again = train("torch", tmp_path / "again")
    assert write_repro(reference, again, tmp_path / "out") is None and not (tmp_path / "out").exists()
    assert main(["repro", reference, again, "--out", str(tmp_path / "out")]) == 0
    assert "nothing to reproduce" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("site", "change", "reported"),
    [
        ("(root)/input/input.x", lambda v: v + 1, "the batches differ already.*padiff.batches"),
        ("body.0/weight/weight", lambda v: v * 2, "start from other weights.*padiff.start_from"),
        ("(loop)/update/learning_rate", lambda v: v * 2, "the learning rates differ"),
        ("body.0/forward/output.0", lambda v: v * 2, "was not recorded in this step .it has no trace"),
    ],
)
def test_it_says_why_there_is_no_script(site, change, reported, tmp_path):
    runs = toy_folder(tmp_path / "a"), toy_folder(tmp_path / "b", paddle=True, plant=planted(site, change))
    with pytest.raises(
        padiff.PadiffError, match=f"(?s)The runs differ first at step 0.*there is no script for it: .*{reported}"
    ):
        write_repro(*runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_sketches_say_what_to_record(tmp_path):
    runs = [train("torch", tmp_path / fault, fault, detail="sketch", functions=False) for fault in ("clean", "eps")]
    with pytest.raises(padiff.PadiffError, match=r'only a sketch was kept\. Record that step in full.*detail="full"'):
        write_repro(*runs, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "reported"), [("momentum", "step 1 was not recorded"), ("decay", None)])
def test_steps_that_were_left_out_say_what_to_record(fault, reported, tmp_path):
    runs = [train("torch", tmp_path / name, name, every_n_steps=2) for name in ("clean", fault)]
    if reported is None:  # the first step has all that it takes
        assert len(write_repro(*runs, tmp_path / "out").scripts) == 2
    else:
        with pytest.raises(padiff.PadiffError, match=f"{reported}.*every_n_steps=1"):
            write_repro(*runs, tmp_path / "out")


@pytest.mark.slow
def test_the_command_writes_tells_and_refuses(tmp_path, reference, capsys):
    candidate, out = train("torch", tmp_path / "candidate", "gelu"), str(tmp_path / "out")
    assert main(["repro", reference, candidate, "--out", out]) == 1
    reported = capsys.readouterr().out
    assert "The runs differ first at step 0, stage forward, layer act (GELU)" in reported
    assert "candidate_torch.py" in reported
    assert main(["repro", reference, candidate, "--out", out]) == 2
    assert "--overwrite replaces them" in capsys.readouterr().err
    assert main(["repro", reference, candidate, "--out", out, "--overwrite"]) == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    assert main(["repro", reference, candidate, "--out", str(tmp_path / "mine"), "--overwrite"]) == 2
    assert (tmp_path / "mine" / "file").read_text() == "x"


@pytest.mark.slow
def test_names_are_no_code(tmp_path):
    """A layer may be called anything; in a script it is a word in a comment."""
    evil = 'a"""\nraise SystemExit(7)\n#\\'

    def run(folder, eps):
        net = torch.nn.Sequential()
        net.add_module(evil, torch.nn.LayerNorm(4, eps=eps))
        with padiff.record(net, folder, existing="overwrite") as rec:
            net(torch.tensor(np.arange(8, dtype="float32").reshape(2, 4))).sum().backward()
            rec.try_dump()
        return folder

    found = write_repro(run(tmp_path / "a", 1e-5), run(tmp_path / "b", 1e-1), tmp_path / "out")
    for script in found.scripts.values():
        assert ran(script)[0] == 1
    assert "raise SystemExit(7)\n" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["argument", "slot", "loss", "rule"])
def test_a_run_folder_puts_no_code_into_a_script(where, tmp_path):
    """Whoever sends a run folder could: a script is made to be run."""
    code = "__import__('os').system('true')or dim"
    fault = {"loss": "loss", "rule": "decay"}.get(where, "axis")
    runs = [Path(train("torch", tmp_path / name, name)) for name in ("clean", fault)]
    for run in runs:
        for file in [run / "run.json", *run.glob("steps/*/rank_0/*.json")]:
            text = file.read_text()
            quoted = json.dumps(code)[1:-1]
            if where == "argument":
                text = re.sub(r'"dim": ?(-?1)', f'"{quoted}": \\1', text)
            elif where == "slot":
                text = re.sub(r'\["input", ?', f'["{quoted}", ', text)
            elif where == "loss":
                text = text.replace('"loss.ignore_index"', f'"loss.{quoted}"')
            elif where == "rule":
                text = text.replace('"AdamW"', f'"{quoted}"')
            file.write_text(text)
    try:
        found = write_repro(*runs, tmp_path / "out")
    except padiff.PadiffError:
        return  # the better end
    for script in found.scripts.values():
        # In words and in names of recorded things it may stand, not where it would run.
        tree = ast.parse(script.read_text())
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "__import__" not in called


@pytest.mark.slow
def test_autocast_is_that_of_the_run(tmp_path):
    def run(folder, eps):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
        net[2].register_forward_hook(lambda *call: call[-1] * (1 + eps))
        x = torch.randn(4, 16)
        with padiff.record(net, folder, existing="overwrite") as rec:
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(x).float().pow(2).mean()
            loss.backward()
            rec.try_dump()
        return folder

    found = write_repro(run(tmp_path / "a", 0.0), run(tmp_path / "b", 0.5), tmp_path / "out")
    code, printed = ran(found.scripts["reference"])
    assert code == 1 and figure(printed, "against what this run recorded") == 0
    assert 1e-4 < figure(printed, "against itself in float64") < 1e-2  # of bfloat16
