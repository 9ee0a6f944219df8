"""Folders that several ranks write a part of each."""

from __future__ import annotations

import threading

import pytest

from padiff.dump.medium import incomplete_steps, medium_of, write_part


def _absent(run):
    return medium_of(run).absent_ranks(run, 3)


@pytest.mark.parametrize("look", [_absent, incomplete_steps], ids=["absent", "incomplete"])
def test_who_looks_while_ranks_write_sees_no_error(tmp_path, look):
    """A folder is renamed between the moment it is found and the moment it is looked into."""
    (tmp_path / "steps").mkdir()
    for rank in range(2):
        (tmp_path / f".rank_{rank}.lock").touch()

    def writes(rank):
        for number in range(1000):
            write_part(tmp_path / "steps" / f"{number:08d}", rank, 2, lambda part: (part / "values").touch())

    threads = [threading.Thread(target=writes, args=(rank,)) for rank in range(2)]
    seen = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(look(tmp_path))
    for thread in threads:
        thread.join()
    assert seen and look(tmp_path) in ([2], {})
    if look is not incomplete_steps:
        assert all(absent == [2] for absent in seen)


def test_a_rank_is_there_once_it_has_a_lock_or_a_part_of_a_step(tmp_path):
    (tmp_path / "steps" / "00000003" / "rank_0").mkdir(parents=True)
    (tmp_path / "steps" / ".00000004.partial" / "rank_1").mkdir(parents=True)
    (tmp_path / "steps" / ".00000004.partial" / ".rank_2").mkdir()
    (tmp_path / ".rank_4.lock").touch()
    assert medium_of(tmp_path).absent_ranks(tmp_path, 6) == [3, 5]
    assert incomplete_steps(tmp_path) == {4: [1]}
    assert medium_of(tmp_path).absent_ranks(tmp_path / "nowhere", 2) == [0, 1]
