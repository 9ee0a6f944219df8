"""Every level of detail."""

from __future__ import annotations

import pytest

from .training import OPTIONS


@pytest.fixture(params=OPTIONS)
def options(request):
    """Options of `padiff.record`."""
    return OPTIONS[request.param]
