"""The result in brief: its schema, its size, and the lines of code that it points at."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import padiff
from padiff.records.diagnostic import LARGEST, diagnostic_schema

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
        done = subprocess.run([sys.executable, f"{name}.py"], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, textwrap.shorten(done.stderr[-2000:], 2000)
    return folder


def brief(folder, candidate, *more):
    command = [sys.executable, "-m", "padiff", "compare", "runs/reference", f"runs/{candidate}", "--brief", *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def violations(value, schema, root):
    """Where a value breaks a JSON schema, of the words that padiff's schema uses."""
    if "$ref" in schema:
        return violations(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        found = [violations(value, each, root) for each in schema["anyOf"]]
        return [] if [] in found else found[0]
    if "enum" in schema:
        return [] if value in schema["enum"] else [value]
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "null": type(None), "array": list}
    if schema["type"] == "object":
        if (
            not isinstance(value, dict)
            or set(value) != set(schema["required"])
            or set(value) != {*schema["properties"]}
        ):
            return [value]
        return [bad for key, each in value.items() for bad in violations(each, schema["properties"][key], root)]
    if not isinstance(value, kinds[schema["type"]]):
        return [value]
    return [bad for each in value for bad in violations(each, schema["items"], root)] if "items" in schema else []


@pytest.mark.parametrize(
    ("candidate", "code"),
    [
        ("eps", "self.norm = nn.LayerNorm(8, eps=1e-3)"),
        ("decay", "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.5)"),
    ],
)
def test_a_setting_is_shown_where_it_is_written(folder, candidate, code):
    done = brief(folder, candidate)
    assert done.returncode == 1 and len(done.stdout) <= LARGEST
    found = json.loads(done.stdout)
    assert found["outcome"] == "differ" and found["cause"]["proven"]
    line = 1 + (folder / f"{candidate}.py").read_text().splitlines().index(f"{' ' * 8 * code.startswith('self')}{code}")
    assert found["places"]["candidate"] == {"file": f"{candidate}.py", "line": line, "code": code}
    assert found["places"]["reference"]["file"] == "reference.py" and found["places"]["reference"]["line"] == line
    assert violations(found, diagnostic_schema(), diagnostic_schema()) == []


def test_the_printed_report_ends_with_the_lines(folder):
    command = [sys.executable, "-m", "padiff", "compare", "runs/reference", "runs/eps"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    candidate, reference = done.stdout.splitlines()[-2:]
    assert candidate.split()[:3] == ["candidate", "-->", "eps.py:9"] and candidate.endswith("nn.LayerNorm(8, eps=1e-3)")
    assert reference.split()[:2] == ["reference", "reference.py:9"]


def test_runs_that_match_have_no_fault(folder):
    found = json.loads(brief(folder, "same").stdout)
    assert found["outcome"] == "match" and found["step"] is None and found["faults"] == []
    assert violations(found, diagnostic_schema(), diagnostic_schema()) == []


def test_a_value_of_a_wrong_type_breaks_the_schema(folder):
    found = json.loads(brief(folder, "eps").stdout)
    for key, wrong in (("step", "0"), ("outcome", "maybe"), ("faults", [{}]), ("places", None), ("cause", {"kind": 1})):
        assert violations({**found, key: wrong}, diagnostic_schema(), diagnostic_schema()) != []


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
