"""Every way in which a step is packed."""

from __future__ import annotations

import pytest

from .packs import STORAGES


@pytest.fixture(params=STORAGES, ids=list(STORAGES))
def storage(request):
    if request.param == "zstd":
        pytest.importorskip("zstandard")
    return STORAGES[request.param]
