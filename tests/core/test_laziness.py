"""Comparing needs neither framework, so nothing here may import one: each case runs in a process of its own."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.records import toy_folder

import padiff

FRAMEWORKS = ("torch", "paddle", "lightning", "tensorflow")
TELL = f"\nimport sys; print('found:', [m for m in {FRAMEWORKS!r} if m in sys.modules])"


def found_after(code: str, path: Path | None = None) -> str:
    """Which frameworks a process has imported after some code."""
    done = subprocess.run([sys.executable, "-c", code + TELL], capture_output=True, text=True, timeout=120, cwd=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    toy_folder(tmp_path / "torch", [0])
    toy_folder(tmp_path / "paddle", [0], paddle=True)
    for name in ("torch", "paddle"):  # a module that an import would find, so that the test can fail without either
        assert (tmp_path / name).is_dir()
    return tmp_path


def command(*arguments: str) -> str:
    return f"from padiff_cli.main import main; assert main({list(arguments)!r}) == 0"


def test_importing_padiff_imports_no_framework_and_does_not_change_how_numpy_prints():
    code = """
import numpy
before = numpy.get_printoptions()
import padiff
from padiff import *
from padiff.checker import check_grads, check_weights
import padiff_atlas, padiff_atlas.probes
from padiff.compare.diagnose.known_differences import known_difference
assert known_difference("AvgPool2D")
assert numpy.get_printoptions() == before
"""
    assert found_after(code) == "found: []"


def test_the_command_line_imports_no_framework(runs):
    commands = [
        ("compare", "./torch", "./paddle", "--logdir", "tb"),
        ("watch", "./torch", "./paddle", "--logdir", "tb"),
        ("show", "./torch"),
        ("map", "./torch", "./paddle"),
    ]
    # Where layers have a clear partner no solver is imported, which takes longer than to compare.
    code = "import padiff, sys; sys.path.pop(0); padiff.compare_runs('./torch', './paddle')\n"
    code += "assert 'scipy' not in sys.modules\n" + "\n".join(command(*arguments) for arguments in commands)
    assert found_after(code, runs) == "found: []"


def test_runs_that_match_need_neither_what_explains_nor_what_records(runs):
    toy_folder(runs / "faster", [0], rate=0.3)
    code = """
import sys, padiff
assert padiff.compare_runs('./torch', './paddle')
lazy = {'padiff.compare.diagnose.first', 'padiff.compare.diagnose.settings', 'padiff.recorder.session'}
assert not lazy & {*sys.modules}, lazy & {*sys.modules}
assert not padiff.compare_runs('./torch', './faster')
assert lazy - {*sys.modules} == {'padiff.recorder.session'}
from padiff.recorder import Recorder, record
assert Recorder is padiff.Recorder and record is padiff.record
"""
    assert found_after(code, runs) == "found: []"


def test_this_test_can_fail(tmp_path):
    (tmp_path / "paddle.py").write_text("")
    assert found_after("import padiff, paddle", tmp_path) == "found: ['paddle']"


@pytest.mark.parametrize("name", padiff.__all__)
def test_every_public_name_is_there(name):
    assert getattr(padiff, name) is not None and name in dir(padiff)


def test_the_public_names_are_those_that_type_checkers_read():
    stub = Path(padiff.__file__).with_suffix(".pyi").read_text()
    assert {"__version__", *re.findall(r"^from \S+ import (\w+) as \1$", stub, re.MULTILINE)} == {*padiff.__all__}
    assert {"record", "compare_runs", "auto_diff", "LayerMap"} < {*padiff.__all__}


LAZY = ("padiff.compare", "padiff.compare.diagnose", "padiff.recorder")


@pytest.mark.parametrize("package", [importlib.import_module(name) for name in LAZY], ids=LAZY)
def test_every_name_of_a_package_is_where_it_is_said_to_be(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name and not inspect.ismodule(getattr(package, name))


@pytest.mark.parametrize("name", ["padiff", *LAZY])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'compare_all'"):
        _ = importlib.import_module(name).compare_all
