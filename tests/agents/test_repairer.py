"""The benchmark of a repairer that only follows `padiff fix`: one port of it, and whether it sees a wrong claim."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hard.children import run_padiff

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def agents():
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("agents_benchmark", BENCHMARKS / "agents.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.padiff = run_padiff  # each is a process of its own that has the frameworks already
    yield module
    sys.path[:] = before
    del sys.modules[spec.name]


def planted(agents, name):
    return next(fault for fault in agents.PLANTED if fault.name == name)


@pytest.mark.timeout(900)  # ten trainings, each a process of its own
def test_a_repairer_that_follows_fix_ends_in_a_match_that_is_one(agents, tmp_path):
    result = agents.attempt(planted(agents, "plain/l2"), tmp_path)
    assert result.claims and result.restored and result.verified and not result.is_wrong
    assert (result.rounds, result.exceptions, result.other_data) == (1, 0, "equal")
    assert result.hidden_shows
    assert "| claims of success that are wrong | 0 |" in agents.summary([result])


@pytest.mark.timeout(900)
def test_a_wrong_claim_is_counted(agents, tmp_path):
    """A patched source that still has the fault trains otherwise on other data."""
    fault = planted(agents, "plain/l2")
    program = agents.PROGRAMS["plain"]
    other = agents._on_other_data(program, agents.planted_files(program, fault), tmp_path)
    assert other == "differ"
    claim = agents.Attempt(fault.name, claims=True, restored=False, other_data=other)
    assert claim.is_wrong
    assert "| claims of success that are wrong | 1 |" in agents.summary([claim])


def test_there_are_24_ports(agents):
    assert sum(fault.unseen for fault in agents.PLANTED) == 24
