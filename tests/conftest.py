"""What holds for all tests: one thread each, files in memory, little garbage to look for, a tier without frameworks."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
from hard.children import WATCHES

from padiff.system.guard import Strictness

# An error in the search for a cause ends the test. A user sees it beside the verdict.
Strictness.raises = True

# While tests are collected: importing the frameworks makes a million objects and no garbage, which took half the time.
gc.disable()

# As many tests run side by side as there are cores. The processes that tests start inherit it.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# Texts are compared with English ones, whatever language the machine is set to.
os.environ["PADIFF_LANG"] = "en"

# The tests write a hundred thousand small files. On a disk that takes a third of their time: they lie in memory where
# there is room.
MEMORY = "/dev/shm"
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

FRAMEWORKS = ("torch", "paddle", "lightning", "pytorch_lightning", "tensorflow", "transformers", "paddleformers")


class WithoutFrameworks:
    """Skips what imports a framework: a file of tests while it is collected, a test while it runs."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in FRAMEWORKS:
            pytest.skip("needs a framework", allow_module_level=True)


def kits(*names: str) -> tuple[object, ...]:
    from kit.frameworks import KITS  # not above: it imports both frameworks

    for name in names:
        KITS[name].seed(0)
    return tuple(KITS[name] for name in names)


@pytest.fixture(params=["torch", "paddle"])
def kit(request: pytest.FixtureRequest) -> object:
    """The calls of one framework, and of the other."""
    (kit,) = kits(request.param)
    return kit


@pytest.fixture
def rng() -> object:
    import numpy as np  # after the number of threads is said, as all that has threads

    return np.random.default_rng(0)


CROSSED = [("torch", "paddle"), ("paddle", "torch")]


@pytest.fixture(params=CROSSED, ids="->".join)
def pair(request: pytest.FixtureRequest) -> object:
    """Kits of the base and of the raw model: each framework on each side."""
    return kits(*request.param)


@pytest.fixture(params=[("torch", "torch"), *CROSSED], ids="->".join)
def every_pair(request: pytest.FixtureRequest) -> object:
    """Like `pair`, and two models of one framework, for what asks whether the frameworks differ."""
    return kits(*request.param)


@pytest.fixture(autouse=True)
def _own_folder(request: pytest.FixtureRequest) -> None:
    """Dumps that are given no path go below the test's own folder; and all random numbers begin anew."""
    if request.path.parent.name in ("auto", "proxy", "weights"):
        import padiff

        kits("torch", "paddle")
        folder = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").chdir(folder)
        padiff.set_dump_root_path(folder / "dumps")


@pytest.fixture(autouse=True)
def unexpected_warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Warnings of padiff's that no test expects. Tests expect them as those of `warnings`."""
    from padiff.system import terminal

    texts: list[str] = []
    original = terminal.say

    def say(text: str, alarming: bool = False, lines: bool = False) -> None:
        if not alarming:
            original(text, alarming, lines)
            return
        try:
            warnings.warn_explicit(f"padiff: {text}", RuntimeWarning, "padiff", 0)
        except RuntimeWarning:
            texts.append(text)

    monkeypatch.setattr(terminal, "say", say)
    yield texts
    assert not texts, "padiff warned of what no test expects"


@pytest.fixture
def frozen() -> None:
    """For tests in which something collects again and again."""
    settle()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-frameworks", action="store_true", help="skip what imports one: a part of `make quick`")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-frameworks"):
        sys.meta_path.insert(0, WithoutFrameworks())


def settle() -> None:
    """Free what is garbage, and have no later collection look at what is not: that would take a second each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    settle()  # the frameworks have a million objects
    gc.set_threshold(20_000, 20, 20)  # a tenth of the tests' time otherwise; a test of what leaks collects by itself
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        settle()  # a file's tests import compilers, trainers, solvers, and these collect, too
    # Five minutes later this process would end, and with it whatever test runs by then.
    assert not [t for t in threading.enumerate() if t.name == WATCHES], "end_with_parent() is for child processes"
    if item.config.getoption("--no-frameworks"):
        assert not [name for name in FRAMEWORKS if name in sys.modules], "a framework was imported all the same"
