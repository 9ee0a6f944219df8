"""The examples run, and print what their READMEs show: the same lines, with numbers of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from hard.children import run_child
from kit.forking import interpreter, python_with_frameworks

EXAMPLES = Path(__file__).parents[2] / "examples"
# Each starts processes that import a framework.
pytestmark = pytest.mark.slow

#: Those that start processes which import a framework each.
SLOW = {
    "two_environments": (),
    "vit_port": ("lightning",),
    "hf_and_paddleformers": ("transformers", "paddleformers"),
    "lightning": ("lightning",),
}
#: What each is to find: of the fault that its first lines name.
FOUND = {
    "own_loops": ["eps 1e-05 against 0.001"],
    "lightning": ["stopped after 1 of 10 steps", "weight decay is 0.1 in the candidate for the reference's 0.01"],
    "hapi": ["running statistics take 0.9 of each batch's, the reference's 0.1"],
    "two_environments": ["step 0, stage forward, layer 2 (GELU)", "approximate none against tanh"],
    "vit_port": ["MATCH   452 tensors in 2 steps"],
    "hf_and_paddleformers": ["layer model.layers.0.input_layernorm", "eps 0.001 against 1e-05"],
    "gan": ["Adam for critic.0/weight", "beta1 0.5 against 0.9"],
    "amp_and_accumulation": [
        "float32 against amp:\nMATCH   186 tensors in 3 steps",
        "outputs of 4 of 4 layers: dtype float32 against bfloat16",
        "the reference divides by 4, the candidate by 16 = 4 times 4",
    ],
    "ddp": ["one against two:\nMATCH   42 tensors in 3 steps", "ranks 0 and 1 were given the same batch in step 0"],
    "auto_diff": ["num_heads"],
    "proxy_dumps": ["check_params: False, first at step 9", "weight decay is 0 in the candidate"],
}
ALL = {path.parent.name for path in EXAMPLES.glob("*/README.md")}
# Figures, and what stands for them where one is left out.
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def shown(name: str) -> list[str]:
    """The output in an example's README: the lines of its block below the command."""
    (block,) = re.findall(r"^```\n\$ .*?\n(.*?)^```$", (EXAMPLES / name / "README.md").read_text(), re.M | re.S)
    return [line for line in block.splitlines() if line and line != "..."]


def masked(text: str) -> str:
    """A line without its numbers. Where a match is least close differs from processor to processor."""
    return _NUMBER.sub("#", re.sub(r"closest \S+, step", "closest PLACE, step", text))


def test_each_example_is_tried():
    assert {*FOUND, "golden_in_ci", "notebook"} == ALL
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == ALL


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in sorted(FOUND)]
)
def test_an_example_prints_what_its_page_shows(name, tmp_path):
    missing = [package for package in SLOW.get(name, ()) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    folder = tmp_path / "runs"
    # The processes that an example starts have the frameworks already, too; those of two environments one of them.
    python = interpreter(apart=name == "two_environments")
    start = "import runpy, sys; sys.executable, *sys.argv = sys.argv[1:]; runpy.run_path('main.py', {}, '__main__')"
    command = [*python_with_frameworks(), "-W", "ignore", "-c", start, str(python), "main.py", str(folder)]
    done = run_child(command, cwd=EXAMPLES / name, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout + done.stderr
    for words in FOUND[name]:
        assert words in printed
    printed = printed.replace(str(folder), "runs").replace(f"{EXAMPLES / name}{os.sep}", "")
    lines = {masked(line) for line in printed.splitlines()}
    assert [line for line in shown(name) if masked(line) not in lines] == []


def test_the_golden_run_holds_and_a_change_is_found(tmp_path):
    folder = tmp_path / "golden_in_ci"
    shutil.copytree(EXAMPLES / "golden_in_ci", folder)
    command = [
        *python_with_frameworks(),
        "-m",
        "pytest.__main__",
        "-q",
        "-p",
        "padiff_pytest",
        "-p",
        "no:cacheprovider",
    ]
    done = run_child(command, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
    test = folder / "test_training.py"
    test.write_text(test.read_text().replace("weight_decay=0.01", "weight_decay=0.1"))
    done = run_child(command, cwd=folder, timeout=120)
    assert done.returncode == 1 and "weight decay" in done.stdout
    lines = {masked(line) for line in done.stdout.splitlines()}
    assert [line for line in shown("golden_in_ci") if masked(line) not in lines] == []


def test_the_notebook_shows_what_its_cells_give():
    spec = importlib.util.spec_from_file_location("make_notebook", EXAMPLES / "notebook" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cells = [c for c in json.loads(module.NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    assert sources == list(module.CELLS)
    outputs = module.run(sources)
    assert [[_plain(o) for o in one] for one in outputs] == [[_plain(o) for o in cell["outputs"]] for cell in cells]
    assert "eps 1e-05 against 0.001" in "".join(outputs[-2][0]["text"])
    assert any("text/html" in o.get("data", {}) for one in outputs for o in one)


def _plain(output: dict) -> str:
    """The first line of what an output says, up to its figures; of a card that of its text."""
    return masked("".join(output.get("text") or output["data"]["text/plain"]).partition("\n")[0])
