from __future__ import annotations

import json

import pytest

from padiff import Schedule
from padiff.errors import UsageError


def due(schedule: Schedule) -> list[int]:
    return [step for step in range(12) if schedule.due(step)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), list(range(12))),
        (Schedule(every=5), [0, 5, 10]),
        (Schedule(every=3, first=2), [2, 5, 8, 11]),
        (Schedule(every=3, first=2, last=8), [2, 5, 8]),
        (Schedule(last=0), [0]),
        (Schedule(steps=[7, 1]), [1, 7]),
        (Schedule(every=5, steps={1, 7, 11}, first=2, last=10), [7]),
        (Schedule(steps=()), []),
    ],
)
def test_the_steps_that_are_due(schedule, expected):
    assert due(schedule) == expected


def test_a_number_is_every_so_many_steps_and_a_schedule_stays_itself():
    assert Schedule.from_argument(4) == Schedule(every=4)
    own = Schedule(steps=[3])
    assert Schedule.from_argument(own) is own


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", True, None])
def test_an_interval_that_cannot_be_meant_is_refused(every):
    with pytest.raises(UsageError, match=r"every_n_steps has to be a whole number of at least 1, got"):
        Schedule.from_argument(every)


def test_bounds_that_cannot_be_meant_are_refused():
    with pytest.raises(UsageError, match=r"needs 0 <= first <= last, got first=5, last=4"):
        Schedule(first=5, last=4)
    with pytest.raises(UsageError, match=r"got first=-1, last=None"):
        Schedule(first=-1)
    with pytest.raises(UsageError, match=r"steps to record are whole numbers of at least 0, got -2"):
        Schedule(steps=[1, -2])


def test_a_schedule_does_not_change_with_the_list_it_was_made_of():
    steps = [1]
    schedule = Schedule(steps=steps)
    steps.append(2)
    assert due(schedule) == [1]


@pytest.mark.parametrize(
    ("schedule", "reported"),
    [
        (Schedule(), 1),
        (Schedule(every=7), 7),
        (Schedule(every=7, first=3), {"every": 7, "first": 3, "last": None}),
        (Schedule(last=9), {"every": 1, "first": 0, "last": 9}),
        (Schedule(steps=[9, 4]), [4, 9]),
        (Schedule(steps=[]), []),
        (Schedule(steps=range(5, 1000)), {"steps": 995, "first": 5}),
    ],
)
def test_what_a_run_says_of_it(schedule, reported):
    assert schedule.described() == reported
    assert json.loads(json.dumps(schedule.described())) == reported
