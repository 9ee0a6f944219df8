"""Fixtures of the tests of comparing."""

from __future__ import annotations

import pytest

import padiff.compare.comparison


@pytest.fixture
def measured_here(monkeypatch) -> list[int]:
    """Steps of the pairs that this process measured itself, outside of any worker."""
    found: list[int] = []
    measure, at_once = padiff.compare.comparison.measure_pair, padiff.compare.comparison.measured_at_once

    def noted(pair, elementwise):
        found.append(pair.step)
        return measure(pair, elementwise)

    def noted_at_once(pairs):
        diffs = at_once(pairs)
        found.extend(diff.pair.step for diff in diffs.values())
        return diffs

    monkeypatch.setattr(padiff.compare.comparison, "measure_pair", noted)
    monkeypatch.setattr(padiff.compare.comparison, "measured_at_once", noted_at_once)
    return found
