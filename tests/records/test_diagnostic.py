"""The result in brief: its schema, its size, and the lines of code that it points at."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import textwrap

import pytest
from hard.children import run_padiff, run_script
from kit.schema import violations

import padiff
from padiff.records.both import Both
from padiff.records.compared import Cause
from padiff.records.diagnostic import (
    LARGEST,
    CodeLine,
    _changed_keyword,
    _is_without,
    _like_reference,
    _named_as_made,
    _span,
    _starts_otherwise,
    _unchecked,
    _with_number,
    _with_reference_part,
    brief_fault,
    diagnostic_schema,
)
from padiff.records.first_diff import FirstDiff
from padiff.records.report_data import Models
from padiff.system.construction import has_changed
from padiff.system.frames import Frame
from padiff.system.process import command_text

SCRIPT = """
import padiff, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8, eps=EPS)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.norm(self.fc(x)))

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=DECAY)
data = torch.randn(3, 16, 4)
with padiff.record(net, "RUN", every_n_steps=1, optimizer=optimizer) as rec:
    for x in data:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rec.try_dump()
"""
SETTINGS = {"reference": ("1e-5", "0.01"), "eps": ("1e-3", "0.01"), "decay": ("1e-5", "0.5"), "same": ("1e-5", "0.01")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("brief")
    for name, (eps, decay) in SETTINGS.items():
        source = SCRIPT.replace("EPS", eps).replace("DECAY", decay).replace("RUN", f"runs/{name}")
        (folder / f"{name}.py").write_text(source)
        done = run_script(folder, f"{name}.py")
        assert done.returncode == 0, textwrap.shorten(done.stderr[-2000:], 2000)
    return folder


def brief(folder, candidate="candidate", *more):
    return run_padiff(folder, "compare", "runs/reference", f"runs/{candidate}", "--brief", *more)


@pytest.mark.parametrize(
    ("candidate", "code", "marked"),
    [
        ("eps", "self.norm = nn.LayerNorm(8, eps=1e-3)", "eps=1e-3"),
        ("decay", "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.5)", "weight_decay=0.5"),
    ],
)
def test_a_setting_is_shown_where_it_is_written(folder, candidate, code, marked):
    done = brief(folder, candidate)
    assert done.returncode == 1 and len(done.stdout) <= LARGEST
    found = json.loads(done.stdout)
    assert found["outcome"] == "differ" and found["cause"]["proven"]
    span = [code.index(marked), code.index(marked) + len(marked)]
    line = 1 + (folder / f"{candidate}.py").read_text().splitlines().index(f"{' ' * 8 * code.startswith('self')}{code}")
    assert found["places"]["candidate"] == {"file": f"{candidate}.py", "line": line, "code": code, "span": span}
    assert found["places"]["reference"]["file"] == "reference.py" and found["places"]["reference"]["line"] == line
    assert violations(found, diagnostic_schema(), diagnostic_schema()) == []


def printed(folder, width=80, *more):
    environment = os.environ | {"COLUMNS": str(width), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return run_padiff(folder, "compare", "runs/reference", *more, env=environment).stdout


@pytest.mark.parametrize("width", [40, 60, 80, 140])
@pytest.mark.parametrize("candidate", ["eps", "decay", "same"])
def test_no_line_is_wider_than_the_terminal(folder, candidate, width):
    lines = printed(folder, width, f"runs/{candidate}").splitlines()
    assert lines and max(len(line) for line in lines if " fix " not in line and "padiff compare" not in line) <= width


def test_the_first_five_lines_name_the_file_and_the_line(folder):
    for candidate, line in (("eps", 9), ("decay", 17)):
        first = printed(folder, 80, f"runs/{candidate}").splitlines()[:5]
        assert any(re.match(rf"  --> {candidate}\.py:{line}\b", each) for each in first), first


def test_the_part_that_differs_is_marked_in_both_lines(folder):
    lines = printed(folder, 80, "runs/eps").splitlines()
    at = next(k for k, line in enumerate(lines) if "-->" in line)
    for code, mark, text in ((lines[at], lines[at + 1], "eps=1e-3"), (lines[at + 2], lines[at + 3], "eps=1e-5")):
        assert mark.strip() == "~" * len(text) and code[mark.index("~") :].startswith(text)


def test_a_match_says_how_far_the_reference_moved(folder):
    text = " ".join(printed(folder, 80, "runs/same").split())
    assert "MATCH" in text and "moved the reference's weights by" in text and "enough to show a fault" in text


def test_runs_that_match_have_no_fault(folder):
    found = json.loads(brief(folder, "same").stdout)
    assert found["outcome"] == "match" and found["step"] is None and found["faults"] == []
    assert violations(found, diagnostic_schema(), diagnostic_schema()) == []


def test_a_value_of_a_wrong_type_breaks_the_schema(folder):
    found = json.loads(brief(folder, "eps").stdout)
    for key, wrong in (("step", "0"), ("outcome", "maybe"), ("faults", [{}]), ("places", None), ("cause", {"kind": 1})):
        assert violations({**found, key: wrong}, diagnostic_schema(), diagnostic_schema()) != []


def test_a_file_that_has_changed_since_the_run_is_named(folder):
    stored = json.loads((folder / "runs" / "eps" / "run.json").read_text())["files"]
    source = (folder / "eps.py").read_bytes()
    assert stored == {"eps.py": hashlib.sha256(source).hexdigest()}
    note = "eps.py has changed since the candidate's run, whose line this is."
    assert json.loads(brief(folder, "eps").stdout)["notes"] == []
    try:
        (folder / "eps.py").write_bytes(b"# a remark\n" + source)
        assert json.loads(brief(folder, "eps").stdout)["notes"] == [note]
    finally:
        (folder / "eps.py").write_bytes(source)


@pytest.mark.parametrize(
    ("command", "is_named"),
    [
        ("eps.py", True),
        ("eps.py --lr 0.1 --out=runs/x", True),
        ("eps.py --lr 0.1; rm -rf .", False),
        ("eps.py $(id)", False),
        ("eps.py --out /etc/x", False),
        ("eps.py \x1b[2J", False),
        ("other.py", False),
        ("../eps.py", False),
        ("bash -c id", False),
        ("", False),
        (["eps.py"], False),
        ("eps.py " + "x" * 400, False),
    ],
)
def test_the_command_of_a_fix_is_named_if_the_script_lies_here_and_is_plain(folder, command, is_named):
    file = folder / "runs" / "eps" / "run.json"
    before = file.read_text()
    try:
        info = json.loads(before)
        info["recording"]["command"] = command
        file.write_text(json.dumps(info))
        found = json.loads(brief(folder, "eps").stdout)["next"]
        expected = [f"padiff fix runs/reference runs/eps -- {command}"] if is_named else []
        assert [each for each in found if each.startswith("padiff fix")] == expected
    finally:
        file.write_text(before)


def test_a_script_that_has_changed_names_no_command(folder):
    file, script = folder / "runs" / "eps" / "run.json", folder / "eps.py"
    before, source = file.read_text(), script.read_text()
    try:
        info = json.loads(before)
        info["recording"]["command"] = "eps.py"
        file.write_text(json.dumps(info))
        script.write_text(f"{source}# changed\n")
        assert not any("fix" in each for each in json.loads(brief(folder, "eps").stdout)["next"])
    finally:
        file.write_text(before)
        script.write_text(source)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train.py", "--lr", "1e-3"], "train.py --lr 1e-3"),
        (["train.py", "--api-token", "x"], ""),
        (["train.py", "--password=x"], ""),
        (["train.py", "/home/somebody/data"], ""),
        (["train.py", "--data=/home/somebody"], ""),
        (["train.py", "a b"], ""),
        (["-m", "train"], ""),
        ([], ""),
    ],
)
def test_a_run_keeps_no_command_with_paths_or_secrets(words, text):
    assert command_text(words) == text


@pytest.mark.parametrize(
    "name", ["../train.py", "/etc/passwd", "missing.py", "data.csv", "a\0.py", "folder.py", "same.py"]
)
def test_nothing_is_said_of_files_that_are_not_below_the_folder_or_not_there(tmp_path, monkeypatch, name):
    here = tmp_path / "here"
    (here / "folder.py").mkdir(parents=True)
    (here / "data.csv").write_text("1")
    (here / "same.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text("x = 1\n")
    monkeypatch.chdir(here)
    assert not has_changed(name, hashlib.sha256(b"x = 1\n").hexdigest() if name == "same.py" else "0" * 64)
    assert has_changed("same.py", "0" * 64)


def test_the_report_gives_the_same(folder):
    report = padiff.compare_runs(folder / "runs" / "reference", folder / "runs" / "eps")
    printed = json.loads(brief(folder, "eps").stdout)
    assert report.brief() == {**printed, "next": []}


def test_standard_output_is_taken_once(folder):
    done = brief(folder, "eps", "--json", "-")
    assert done.returncode == 2 and "--brief" in done.stderr


@pytest.mark.parametrize("lines", [[1], {"norm": 3}, {"norm": ["a.py", "x", "", ""]}, {"norm": ["a.py", 1]}])
def test_damaged_lines_are_a_clear_error(folder, lines):
    file = folder / "runs" / "same" / "run.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps({**json.loads(before), "lines": lines}))
        done = brief(folder, "same")
        assert done.returncode == 2 and "run.json" in done.stderr and "Traceback" not in done.stderr
    finally:
        file.write_text(before)


def test_a_fix_names_the_folder_and_the_model(folder):
    drawn = "net = Net()\nfor p in net.parameters(): nn.init.normal_(p, generator=torch.Generator().manual_seed(1))"
    source = SCRIPT.replace("EPS", "1e-5").replace("DECAY", "0.01").replace("RUN", "runs/other")
    (folder / "other.py").write_text(source.replace("net = Net()", drawn))
    done = run_script(folder, "other.py")
    assert done.returncode == 0, done.stderr
    text = printed(folder, 120, "runs/other")
    assert "padiff.start_from('runs/reference', net)" in text
    assert "--> other.py:16 " in text and "net = Net()" in text


def test_a_fix_names_several_models_that_have_the_names_of_their_variables(tmp_path):
    pytest.importorskip("torch")
    for seed in range(2):
        (tmp_path / f"train{seed}.py").write_text(TWO.replace("SEED", str(seed)))
        done = run_padiff(tmp_path, "run", "--dir", f"runs/{seed}", f"train{seed}.py")
        assert done.returncode == 0, done.stderr
    text = run_padiff(tmp_path, "compare", "runs/0", "runs/1").stdout
    assert 'padiff.start_from(\'runs/0\', {"enc": enc, "dec": dec})' in text
    assert "--> train1.py:5 " in text


TWO = """
import torch
from torch import nn
torch.manual_seed(SEED)
enc, dec = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
optimizer = torch.optim.SGD([*enc.parameters(), *dec.parameters()], lr=1e-2)
for x in torch.ones(3, 16, 4):
    dec(enc(x)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


SCALED = """
import argparse, padiff, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = args.temperature

    def forward(self, x):
        return self.norm(self.fc(x)) / self.scale

parser = argparse.ArgumentParser()
parser.add_argument("--temperature", type=float, default=1.0)
torch.manual_seed(0)
net = Net(parser.parse_args())
net.train()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
with padiff.record(net, "RUN", optimizer=optimizer) as rec:
    for x in torch.randn(3, 16, 4):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rec.try_dump()
"""
LATE = "        optimizer.step()\n        optimizer.zero_grad()\n"


@pytest.mark.parametrize(
    ("before", "after", "line", "cause", "fix"),
    [
        ("default=1.0", "default=2.0", "default=2.0)", "is 2 for the reference's 1", "default=1.0)"),
        (
            LATE,
            "\n".join(LATE.split("\n")[1::-1]) + "\n",
            "optimizer.zero_grad()",
            "clears its gradients",
            "step(); optimizer",
        ),
    ],
)
def test_a_fault_away_from_where_it_shows_is_shown_where_it_is(tmp_path, before, after, line, cause, fix):
    pytest.importorskip("torch")
    for name, changed in (("reference", before), ("candidate", after)):
        source = SCALED.replace(before, changed).replace("RUN", f"runs/{name}")
        (tmp_path / f"{name}.py").write_text(source)
        done = run_script(tmp_path, f"{name}.py")
        assert done.returncode == 0, done.stderr
    found = json.loads(brief(tmp_path, "candidate").stdout)
    assert cause in found["cause"]["text"]
    assert line in found["places"]["candidate"]["code"]
    assert fix in found["fix"]["text"] if fix else found["fix"] is None


def test_a_training_in_evaluation_mode_is_named(tmp_path):
    pytest.importorskip("torch")
    plain = SCALED.replace('with padiff.record(net, "RUN", optimizer=optimizer) as rec:', "if True:")
    plain = plain.replace("        rec.try_dump()\n", "")
    for name, mode in (("reference", "train"), ("candidate", "eval")):
        (tmp_path / f"{name}.py").write_text(plain.replace("net.train()", f"net.{mode}()"))
        done = run_padiff(tmp_path, "run", "--dir", f"runs/{name}", f"{name}.py")
        assert done.returncode == 0, done.stderr
    found = json.loads(brief(tmp_path, "candidate").stdout)
    assert found["cause"]["kind"] == "mode"
    assert found["cause"]["text"] == "the candidate's model trains in evaluation mode, the reference's in training mode"
    assert found["places"]["candidate"]["code"] == "net.eval()" and found["fix"]["text"] == "model.train()"


TWICE = """
import padiff, torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 1, 3)

    def forward(self, x):
        x = self.a(x)
        x = self.b(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=FIRST))
        return self.c(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=SECOND))

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
with padiff.record(net, "RUN", optimizer=optimizer) as rec:
    for x in torch.randn(2, 4, 1, 8, 8):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rec.try_dump()
"""


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [("True", "True", "lines 13 and 14"), ("True", "False", "line 13"), ("False", "True", "line 14")],
)
def test_a_call_that_is_made_twice_is_fixed_where_it_is_wrong(tmp_path, first, second, lines):
    pytest.importorskip("torch")
    for name, one, two in (("reference", "False", "False"), ("candidate", first, second)):
        source = TWICE.replace("FIRST", one).replace("SECOND", two).replace("RUN", f"runs/{name}")
        (tmp_path / f"{name}.py").write_text(source)
        done = run_script(tmp_path, f"{name}.py")
        assert done.returncode == 0, done.stderr
    text = printed(tmp_path, 120, "runs/candidate")
    assert f"fix     torch.nn.functional.interpolate(..., align_corners=False)  # {lines}\n" in text, text
    assert f"--> candidate.py:{13 if first == 'True' else 14} " in text


def test_without_sources_no_text_of_the_code_is_in_the_run(tmp_path):
    pytest.importorskip("torch")
    for name, align in (("reference", "False"), ("candidate", "True")):
        source = TWICE.replace("FIRST", align).replace("SECOND", "False").replace("RUN", f"runs/{name}")
        source = source.replace("optimizer=optimizer)", f"optimizer=optimizer, sources={name == 'reference'})")
        (tmp_path / f"{name}.py").write_text(source)
        done = run_script(tmp_path, f"{name}.py")
        assert done.returncode == 0, done.stderr
    content = {
        name: b"".join(path.read_bytes() for path in (tmp_path / "runs" / name).rglob("*") if path.is_file())
        for name in ("reference", "candidate")
    }
    for text in (b"align_corners=", b"torch.optim.SGD(", b"self.b(F.interpolate"):
        assert text in content["reference"] and text not in content["candidate"]
    lines = printed(tmp_path, 120, "runs/candidate").splitlines()
    assert lines[0].startswith("DIFFER  step 0, forward: ") and "  --> candidate.py:13" in lines


def test_sources_is_true_or_false():
    torch = pytest.importorskip("torch")
    with pytest.raises(padiff.PadiffError, match="sources is True or False, got 'no'"):
        padiff.record(torch.nn.Linear(2, 2), sources="no")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("align_corners=FIRST", "align_corners=True"),
        ('mode="bilinear", align_corners=FIRST', 'mode="nearest"'),
        ("return self.c(F.interpolate(x", "return self.c(0.5 * F.interpolate(x"),
    ],
)
def test_the_line_that_a_fix_writes_mends_the_training(tmp_path, before, after):
    pytest.importorskip("torch")

    def run(name, source):
        source = source.replace("FIRST", "False").replace("SECOND", "False").replace("RUN", f"runs/{name}")
        (tmp_path / f"{name}.py").write_text(source)
        done = run_script(tmp_path, f"{name}.py")
        assert done.returncode == 0, done.stderr

    run("reference", TWICE)
    run("candidate", TWICE.replace(before, after, 1))
    fix = json.loads(brief(tmp_path).stdout)["fix"]
    lines = (tmp_path / "candidate.py").read_text().splitlines()
    assert fix["file"] == "candidate.py" and lines[fix["line"] - 1].strip() == fix["old"]
    lines[fix["line"] - 1] = lines[fix["line"] - 1].replace(fix["old"], fix["new"])
    run("mended", "\n".join(lines).replace("runs/candidate", "RUN"))
    assert brief(tmp_path, "mended").returncode == 0


@pytest.mark.parametrize(
    ("candidate", "reference", "fits"),
    [
        ("h = F.relu(self.up(h))", "h = F.gelu(self.up(h))", True),
        ("return self.f(x) * 0.5", "return self.f(x)", True),
        ("nn.LeakyReLU(0.1),", "nn.ReLU(),", True),
        ("h = self.up(h) * 0.5", "h = self.down(h)", False),
        # Another variable, another author's line, brackets of another line, and nothing to change.
        ("h = F.relu(self.up(h))", "h = F.gelu(self.up(x))", False),
        ("h = relu(self.up(h))", "h = gelu(self.up(h))", False),
        ("out = self.net(batch)", "h = F.gelu(self.up(h), approximate='none')", False),
        ("h = F.relu(self.up(h))", "h = F.gelu(self.up(h),", False),
        ("h = F.relu(self.up(h))", "h = F.relu(self.up(h))", False),
    ],
)
def test_the_reference_s_line_is_a_fix_if_it_can_stand_there(candidate, reference, fits):
    assert _like_reference(candidate, reference) == (reference if fits else "")


@pytest.mark.parametrize(
    ("candidate", "reference", "is_without"),
    [
        ("h = F.gelu(self.up(h), approximate=True)", "h = F.gelu(self.up(h))", True),
        ("return self.head(x) / 0.9", "return self.head(x)", True),
        ("return self.head(x)", "return self.head(x) / 0.9", False),
        ("h = F.relu(x)", "h = F.gelu(x)", False),
        ("F.normalize(x, p=1, axis=-1)", "F.normalize(x, dim=-1)", False),
    ],
)
def test_a_line_without_an_operand_or_argument_is_known(candidate, reference, is_without):
    assert _is_without(candidate, reference) == is_without


@pytest.mark.parametrize(
    ("candidate", "reference", "fix"),
    [
        ("StepDecay(lr, step_size=3, gamma=0.5)", "StepLR(opt, step_size=2, gamma=0.5)",
         "StepDecay(lr, step_size=2, gamma=0.5)"),
        ("MultiStepDecay(lr, milestones=[2, 3])", "MultiStepLR(opt, milestones=[2, 4])",
         "MultiStepDecay(lr, milestones=[2, 4])"),
        # Another argument, and one that is no number.
        ("StepDecay(lr, step_size=3)", "StepLR(opt, gamma=2)", ""),
        ("StepDecay(lr, step_size=3)", "StepLR(opt, step_size=config.size)", ""),
    ],
)  # fmt: skip
def test_the_reference_s_argument_of_a_schedule_is_a_fix(candidate, reference, fix):
    code = {"file": "a.py", "line": 1}
    lines = [
        CodeLine(**code, code=line, span=_span(line, other, words, ""))
        for line, other, words in (
            (candidate, reference, candidate.partition("=")[0].split()[-1]),
            (reference, candidate, reference.partition("=")[0].split()[-1]),
        )
    ]
    assert _with_reference_part(*lines, Models(Both((), ()), Both("torch", "paddle"))) == fix


@pytest.mark.parametrize(
    ("candidate", "name"),
    [
        ("scheduler = StepDecay(lr, step_size=3, gamma=0.5)", "step_size"),
        ("scheduler = StepDecay(lr, step_size=3, gamma=0.1)", ""),
        ("scheduler = StepDecay(lr, step_size=3, gamma=5e-1)", "step_size"),
        ("scheduler = StepDecay(lr, step_size=2.0, gamma=5e-1, weight_decay=1)", ""),
        ("scheduler = StepDecay(lr, step_size=2, verbose=1)", ""),
    ],
)
def test_the_argument_of_a_schedule_that_differs_is_known(candidate, name):
    reference = Frame("a.py", 1, "", "scheduler = StepLR(opt, step_size=2, gamma=0.5)")
    assert _changed_keyword(Both(reference, Frame("b.py", 1, "", candidate))) == name


@pytest.mark.parametrize(
    ("candidate", "reference", "words", "call", "marked"),
    [
        # The argument that differs, of several that the cause may mean.
        ("f(a, eps=1) + f(b, eps=2)", "f(a, eps=1) + f(b, eps=3)", "eps is 2", "", "eps=2"),
        # An argument with one text that means another thing in another framework.
        ("nn.BN(4, momentum=0.1)", "nn.bn(4, momentum=0.1)", "momentum", "", "momentum=0.1"),
        # The call lacks the argument that the other has.
        ("o = SGD(p, momentum=0.9)", "o = SGD(p, momentum=0.9, nesterov=True)", "no nesterov momentum", "",
         "SGD(p, momentum=0.9)"),
        # The call of the layer, among others, which has no argument that the other side gives.
        ("nn.Sequential(nn.Conv2d(1, 2), nn.BatchNorm2d(2))", "momentum=0.1,", "momentum", " BatchNorm2D(",
         "nn.BatchNorm2d(2)"),
        # The call that differs, of several of its name.
        ("relu(a) + relu(b * 2)", "relu(a) + relu(b)", "", "the second relu()", "relu(b * 2)"),
        # Nothing is named: the part that differs.
        ("Compose([A(), Normalize(0.5, 0.225)])", "Compose([A(), Normalize(0.5, 0.25)])", "input", "", "0.225"),
        ('"norm_eps": 1e-3,', '"norm_eps": 1e-5,', "", "", "1e-3"),
        ("a = b + c", "c = b - a", "", "", None),
        # Both ends of the part that differs, if most of the line is the same.
        ("return lr * (it + 1) / warm", "return lr * it / warm", "", "", "(it + 1)"),
        ("return self.norm(x) + self.down(h)", "return x + self.down(h)", "", "", "self.norm(x)"),
        ("a = b", "a = b", "", "", None),
    ],
)  # fmt: skip
def test_the_part_of_a_line_that_is_at_fault_is_marked(candidate, reference, words, call, marked):
    span = _span(candidate, reference, words, call)
    assert (span if span is None else candidate[span[0] : span[1]]) == marked


@pytest.mark.parametrize(
    ("sentence", "fix", "code", "new"),
    [
        (
            "beta2 0.98 against 0.999",
            "paddle.optimizer.AdamW(..., beta2=0.98)",
            "beta2: float = 0.999",
            "beta2: float = 0.98",
        ),
        (
            "beta2 is 0.999 in the candidate for the reference's 0.98",
            "A(..., beta2=0.98)",
            "b = .9, 0.999",
            "b = .9, 0.98",
        ),
        (
            "weight decay 0.001 against 0.1",
            "weight_attr=paddle.ParamAttr(regularizer=L2Decay(0.001))",
            "attr(1e-1)",
            "attr(0.001)",
        ),
        # paddle's own momentum is 1 minus the common one
        ("momentum 0.2 against 0.8", "paddle.nn.BatchNorm1D(..., momentum=0.8)", "momentum = 0.8", ""),
        ("eps 1e-05 against 0.001", "L(..., epsilon=1e-05)", "norm(0.001, 1e-3)", ""),
        ("eps 1e-05 against 0.001", "L(..., epsilon=1e-05)", "norm(cfg)", ""),
    ],
)
def test_the_line_that_defines_a_value_gets_the_reference_s(sentence, fix, code, new):
    assert _with_number(CodeLine("a.py", 1, code, None), Cause("optimizer_setting", sentence, fix=fix)) == new


@pytest.mark.parametrize(
    ("sentence", "fix", "code", "new"),
    [
        (
            "clips gradients to a norm of 0.5, the reference to 1",
            "clip_grad_norm_(m.parameters(), 1)",
            "max_norm=0.5",
            "1",
        ),
        ("take 0.9 of a batch, the reference 0.1", "nn.BatchNorm1D(..., momentum=0.9)", "momentum=0.1", "0.9"),
        ("momentum 0.1 against 0.9", "nn.BatchNorm1D(..., momentum=0.9)", "momentum=0.1", "0.9"),
        ("momentum 0.2 against 0.8", "nn.BatchNorm1D(..., momentum=0.8)", "momentum=0.8", ""),
        ("clips to a norm of 0.5, the reference to 1", "clip_grad_norm_(m.parameters(), 1)", "lr=0.25", ""),
    ],
)
def test_the_marked_number_gets_the_reference_s(sentence, fix, code, new):
    line = CodeLine("a.py", 1, f"f(2, {code})", [5, 5 + len(code)])
    found = _with_number(line, Cause("clip_limit", sentence, fix=fix))
    assert found == (f"f(2, {code.partition('=')[0]}={new})" if new else "")


@pytest.mark.parametrize(
    ("code", "numbers", "new"),
    [
        ("(a[:-1] - b).sum()", "1 for the reference's 0.5", ""),
        ("2 * a.sum()", "2 for the reference's 3", "3 * a.sum()"),
    ],
)
def test_a_weight_of_1_is_no_number_of_the_line(code, numbers, new):
    cause = Cause("loss_term_weight", f"the weight of a term is {numbers}", proven=True)
    assert _with_number(CodeLine("a.py", 1, code, None), cause) == new


@pytest.mark.parametrize(
    ("code", "numbers", "new"),
    [
        ("a[..., 0].exp()", "0 for the reference's 1 (it is left out)", ""),
        ("w.pow(2)", "2 for the reference's 3", ""),
        ("w.abs() ** 3", "3 for the reference's 2", "w.abs() ** 2"),
    ],
)
def test_a_number_that_is_left_out_or_an_even_power_is_no_fix(code, numbers, new):
    cause = Cause("scale", f"the number in sub() in `(root)` is {numbers}", proven=True)
    assert _with_number(CodeLine("a.py", 1, code, None), cause) == new


@pytest.mark.parametrize(
    ("fix", "code", "named"),
    [
        (
            "paddle.optimizer.AdamW(..., beta2=0.98)",
            "opt = Opt(rate, parameters=net.parameters())",
            "Opt(..., beta2=0.98)",
        ),
        ("torch.optim.AdamW(..., eps=1e-08)", "return optim.AdamW(p, lr=lr)", "optim.AdamW(..., eps=1e-08)"),
        # another class, and a function of the user's
        (
            "torch.optim.Adam(..., weight_decay=0.1)",
            "opt = torch.optim.AdamW(p)",
            "torch.optim.Adam(..., weight_decay=0.1)",
        ),
        (
            "paddle.optimizer.Momentum(..., momentum=0.9)",
            "opt = Opt(p)",
            "paddle.optimizer.Momentum(..., momentum=0.9)",
        ),
        ("torch.optim.AdamW(..., eps=1e-08)", "opt = make(p)", "torch.optim.AdamW(..., eps=1e-08)"),
    ],
)
def test_a_fix_calls_a_class_as_the_candidate_does(fix, code, named):
    lines = Both({}, {"optimizer.0": Frame("a.py", 1, "", code)})
    first = FirstDiff(0, "update", None, None, "weight")
    assert _named_as_made(fix, first, Models(Both((), ()), Both("", ""), lines=lines)) == named


@pytest.mark.parametrize(
    ("candidate", "reference", "frameworks", "text"),
    [
        ("if flip and i % 3:", "if flip and i % 2:", "torch", "if flip and i % 2:"),
        (
            "x = self.emb(ids)",
            "x = self.emb(ids) * math.sqrt(self.emb.dim)",
            "torch",
            "x = self.emb(ids) * math.sqrt(self.emb.dim)",
        ),
        ("std = raw.std(0) + 1e-1", "std = raw.std(0) + 1e-3", "paddle", "std = raw.std(0) + 1e-3"),
        ("y = F.relu(x)", "y = F.gelu(x)", "paddle", ""),
        ("if flip and i % 3:", "if turn and i % 2:", "torch", ""),
    ],
)
def test_the_reference_s_line_is_shown_as_not_checked_if_one_part_differs(candidate, reference, frameworks, text):
    models = Models(Both((), ()), Both("torch", frameworks))
    lines = [CodeLine("a.py", 1, code, None) for code in (candidate, reference)]
    assert _unchecked(*lines, models) == text


def test_a_number_is_not_taken_over_without_its_sign():
    models = Models(Both((), ()), Both("torch", "torch"))
    codes = "tokens[mask == 0] = 0", "labels = ids.masked_fill(mask == 0, -100)"
    lines = [CodeLine("a.py", 1, code, None) for code in codes]
    assert _unchecked(*lines, models, is_data=True) == ""


def test_the_line_that_averages_is_shown_for_another_decay():
    lines = Both(
        {"@average": Frame("a.py", 9, "", "update(net, ema, 0.9)"), "net": Frame("a.py", 2, "", "net = Net()")},
        {"@average": Frame("b.py", 8, "", "ema_step(net, copy, 0.99)"), "net": Frame("b.py", 3, "", "net = make()")},
    )
    first = FirstDiff(1, "weight", "net", "net", "weight", cause=Cause("average_decay", "another decay", proven=True))
    fault = brief_fault(first, Models(Both((), ()), Both("torch", "torch"), lines=lines))
    assert (fault.places.candidate.line, fault.fix.new) == (8, "ema_step(net, copy, 0.9)")


def test_a_number_of_lines_that_make_the_data_is_taken_over_from_the_other_framework():
    models = Models(Both((), ()), Both("torch", "paddle"))
    lines = [
        CodeLine("a.py", 1, code, None) for code in ("feats = raw / (raw.std(0) + 1e-1)", "x = x / (x.std(0) + 1e-3)")
    ]
    assert _unchecked(*lines, models, is_data=True) == "feats = raw / (raw.std(0) + 1e-3)"
    assert _unchecked(*lines, models) == ""


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("kld = -0.5 * (1 + x).sum()", ""),
        ("return bce + 1.0 * kld", "return bce + 0.2 * kld"),
        ("kl_weight: float = 1.0", "kl_weight: float = 0.2"),
        ('"kl_weight": 1,', '"kl_weight": 0.2,'),
    ],
)
def test_a_weight_of_a_loss_is_a_factor_or_a_value_and_no_summand(code, fix):
    cause = Cause("loss_term_weight", "the weight of a term of the loss is 1 for the reference's 0.2", True)
    assert _with_number(CodeLine("train.py", 1, code, None), cause) == fix


@pytest.mark.parametrize(("rate", "differs"), [("3e-3", False), ("2e-3", True)])
def test_optimizers_start_otherwise_where_the_candidate_has_a_number_of_its_own(rate, differs):
    lines = ("AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.95))", f'add_argument("--lr", default={rate})')
    assert _starts_otherwise(Both(*(Frame("train.py", 1, "", line) for line in lines))) is differs
