"""What several tests of pairing share."""

from __future__ import annotations

import pytest

from padiff.pair import plans as module
from padiff.pair.steps import pair_steps


@pytest.fixture
def counted(monkeypatch):
    """How often steps were paired from scratch."""
    calls = []
    monkeypatch.setattr(module, "pair_steps", lambda *given: calls.append(1) or pair_steps(*given))
    return calls
