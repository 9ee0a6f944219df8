"""The batches of trainings that a host runs."""

from __future__ import annotations

import numpy as np
import pytest

import padiff

from . import hapi, lit

DATA = hapi.Batches()


@pytest.mark.parametrize("packs", [{}, {"replay_every_n_steps": 2}], ids=["records", "packs"])
@pytest.mark.parametrize("host", ["lightning", "hapi"])
def test_they_are_the_loaders_in_order(host, packs, tmp_path):
    if host == "lightning":
        lit.fit(tmp_path / "run", options=packs, accumulate_grad_batches=2)
    else:
        hapi.fit(tmp_path / "run", options=packs, accumulate_grad_batches=2)
    for framework in ("torch", "paddle"):
        batches = padiff.batches(tmp_path / "run", framework=framework)
        assert [(b.step, b.micro_batch) for b in batches] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        for number, (x, y) in enumerate(batches):
            rows = slice(8 * number, 8 * number + 8)
            np.testing.assert_array_equal(np.asarray(x), DATA.x[rows])
            np.testing.assert_array_equal(np.asarray(y).ravel(), DATA.y[rows].ravel())
