"""Fixtures of the tests of comparing."""

from __future__ import annotations

import pytest

import padiff.compare.measuring


@pytest.fixture
def measured_here(monkeypatch) -> list[int]:
    """Steps of the pairs that this process measured itself, outside of any worker."""
    found: list[int] = []
    measure, measure_all = padiff.compare.measuring.measure_pair, padiff.compare.measuring.measured

    def noted(pair, elementwise):
        found.append(pair.step)
        return measure(pair, elementwise)

    def noted_all(pairs, *rest):
        found.extend(pair.step for pair in pairs)
        return measure_all(pairs, *rest)

    monkeypatch.setattr(padiff.compare.measuring, "measure_pair", noted)
    monkeypatch.setattr(padiff.compare.measuring, "measured", noted_all)
    return found
