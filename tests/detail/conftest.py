"""One fixture for both frameworks."""

from __future__ import annotations

import pytest
from recording.kits import KITS


@pytest.fixture(params=KITS, ids=lambda kit: kit.name)
def kit(request):
    request.param.seed(0)
    return request.param
