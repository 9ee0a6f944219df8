"""The atlas of the installed versions, made once."""

from __future__ import annotations

import pytest

from padiff.compare.diagnose.known_differences import Atlas
from padiff_atlas.atlas import survey
from padiff_atlas.probes import GROUPS


@pytest.fixture(scope="session")
def atlas() -> Atlas:
    pytest.importorskip("torch")
    pytest.importorskip("paddle")
    return survey(GROUPS)


@pytest.fixture(scope="session")
def rows(atlas: Atlas) -> dict:
    return {row.name: row for row in atlas.rows}
