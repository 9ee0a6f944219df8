"""Fixtures for both frameworks and for every level of detail."""

from __future__ import annotations

import pytest

from .making import KITS, OPTIONS


@pytest.fixture(params=KITS, ids=lambda kit: kit.name)
def kit(request):
    request.param.seed(0)
    return request.param


@pytest.fixture(params=OPTIONS)
def options(request):
    """Options of `padiff.record`."""
    return OPTIONS[request.param]
