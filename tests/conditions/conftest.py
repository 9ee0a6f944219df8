"""Every level of detail."""

from __future__ import annotations

import pytest

from .training import OPTIONS


@pytest.fixture
def level(request, kit):
    """Options of `padiff.record`: of the two levels each framework has one, and the other in about every other test."""
    other = len(request.function.__name__) % 2 == (kit.name == "torch")
    return OPTIONS[[*OPTIONS][other]]


@pytest.fixture(params=OPTIONS)
def options(request):
    """Options of `padiff.record`."""
    return OPTIONS[request.param]
