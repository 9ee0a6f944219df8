"""What holds for all tests: one thread each, little for the garbage collector to look at, a tier without frameworks."""

from __future__ import annotations

import gc
import os
import sys

import pytest

# As many tests run side by side as there are cores. The processes that tests start inherit it.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

FRAMEWORKS = ("torch", "paddle", "lightning", "pytorch_lightning", "tensorflow")


class WithoutFrameworks:
    """Skips what imports a framework: a file of tests while it is collected, a test while it runs."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in FRAMEWORKS:
            pytest.skip("needs a framework", allow_module_level=True)


@pytest.fixture(params=["torch", "paddle"])
def kit(request: pytest.FixtureRequest) -> object:
    """The calls of one framework, and of the other."""
    from kit.frameworks import KITS

    KITS[request.param].seed(0)
    return KITS[request.param]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-frameworks", action="store_true", help="skip what imports one: a part of `make quick`")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-frameworks"):
        sys.meta_path.insert(0, WithoutFrameworks())


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the frameworks have a million objects, and each collection would look at all of them


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.config.getoption("--no-frameworks"):
        assert not [name for name in FRAMEWORKS if name in sys.modules], "a framework was imported all the same"
