"""What the package says of itself: the README, the metadata and what is really imported agree."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from hard.children import run_child
from kit.records import planted, toy_folder

ROOT = Path(__file__).resolve().parents[2]

# What not every use needs; importing it takes time, and may fail on a machine where it was never needed.
HEAVY = ("tensorboard", "scipy", "loky", "rich", "sklearn", "safetensors")
LOADED = f"\nimport sys; print('loaded:', *(name for name in {HEAVY!r} if name in sys.modules))"


def project() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> list[str]:
    return [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]


def test_the_readme_lists_what_is_installed():
    text = " ".join((ROOT / "README.md").read_text().split())
    listed = re.search(r"It brings ([\w, -]+?), but no framework", text)[1]
    assert re.split(", | and ", listed) == names(project()["dependencies"])
    rows = dict(re.findall(r"\| `pip install '\.\[(\w+)\]'` \| ([\w, -]+)", text))
    extras = project()["optional-dependencies"]
    assert {name: re.split(", | and ", row.split(", for")[0].strip()) for name, row in rows.items()} == {
        name: names(extra) for name, extra in extras.items() if name not in ("test", "lint", "docs")
    }


def test_the_demo_s_extra_is_those_of_the_frameworks_and_its_data():
    extras = project()["optional-dependencies"]
    parts = [item for name in ("torch", "paddle", "lightning") for item in extras[name]]
    assert extras["demo"] == [*parts, "scikit-learn>=1.4"]


def test_every_requirement_is_pinned_for_the_tests():
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = project()["optional-dependencies"]
    wanted = {name for extra in [project()["dependencies"], *extras.values()] for name in names(extra)}
    assert not wanted - pinned


def test_the_licence_and_the_changelog_are_there():
    assert "Apache License\n                           Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    version = re.search(r'__version__ = "(.+)"', (ROOT / "padiff" / "__init__.py").read_text())[1]
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()


def loaded(codes: list[str], folder: Path) -> list[str]:
    """Which of the packages a process has imported after each of some pieces of code."""
    paths = [str(ROOT / part) for part in ("", "integrations/lightning", "integrations/paddle_hapi")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = run_child([sys.executable, "-c", "".join(code + LOADED for code in codes)], cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("loaded:").strip() for line in done.stdout.splitlines() if line.startswith("loaded:")]


def command(*arguments: str) -> str:
    return f"""
from padiff_cli.main import main
try:
    code = main({json.dumps(arguments)})
except SystemExit as end:
    code = end.code
assert code in (0, 1), code
"""


# torch's own optimizers import a compiler, which takes as long as torch itself.
RECORD = """
import torch, padiff
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.Optimizer(model.parameters(), {"lr": 0.1})
with padiff.record(model, %s, optimizer=optimizer) as rec:
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs", "codes"),
    [
        (
            "",
            [
                "import padiff; from padiff import *",
                "\nimport padiff_hooks.training",
                "\npadiff.compare_runs('a', 'b').first_diff.message",
                RECORD % "'recorded'",
                RECORD % "'packed', pack=True, compression='zlib'",
                command("--help"),
            ],
        ),
        (
            "rich",
            [
                command("show", "a"),
                command("compare", "a", "b", "--json", "out.json", "--junit", "out.xml"),
                command("compare", "a", "b", "--html", "out.html"),
                command("doctor", "a"),
            ],
        ),
        ("tensorboard rich", [command("compare", "a", "b", "--logdir", "tb")]),
    ],
    ids=["nothing", "rich", "tensorboard"],
)
def test_what_not_every_use_needs_is_imported_by_what_needs_it(needs, codes, tmp_path):
    """One after the other: what one of them imports that it should not, those after it have, too."""
    toy_folder(tmp_path / "a", [0, 1])
    toy_folder(tmp_path / "b", [0, 1], paddle=True, plant=planted("body.0/forward/output.0", lambda v: v + 1, at=1))
    assert loaded(codes, tmp_path) == [needs] * len(codes)
