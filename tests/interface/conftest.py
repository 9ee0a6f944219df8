"""Every test starts from the same random state, and dumps without a path go below its own folder."""

from __future__ import annotations

import contextvars

import numpy as np
import pytest
from kit.frameworks import KITS

import padiff


@pytest.fixture(autouse=True)
def _same_start(tmp_path, monkeypatch):
    for kit in KITS.values():
        kit.seed(0)
    monkeypatch.chdir(tmp_path)
    padiff.set_dump_root_path(tmp_path / "dumps")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(
    params=[("torch", "torch"), ("paddle", "paddle"), ("torch", "paddle"), ("paddle", "torch")],
    ids="->".join,
)
def pair(request):
    """Kits of the base and of the raw model."""
    return KITS[request.param[0]], KITS[request.param[1]]


@pytest.fixture(params=[("torch", "paddle"), ("paddle", "torch")], ids="->".join)
def crossed(request):
    return KITS[request.param[0]], KITS[request.param[1]]


@pytest.fixture
def isolated():
    """Calls a function in a context of its own, so that what it registers is gone afterwards."""
    return contextvars.copy_context().run
