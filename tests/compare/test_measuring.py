"""What is wrong with a step shows when that step is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.records import sketched_run, toy_info, toy_run, write_run

from padiff import compare_runs
from padiff.dump.storage import Storage
from padiff.errors import RunFolderError

STEPS = 12


def sketched(path: Path, paddle: bool) -> Path:
    run = sketched_run(toy_run(range(STEPS), paddle))
    return write_run(
        path, toy_info(paddle), [run.steps(number)[0] for number in run.numbers()], storage=Storage(pack=True)
    )


@pytest.mark.parametrize("number", [1, 2, 9])
@pytest.mark.parametrize("harm", ["cut off", "gone"])
def test_what_is_wrong_with_a_later_step_shows_when_it_is_compared(number, harm, tmp_path):
    a, b = sketched(tmp_path / "a", False), sketched(tmp_path / "b", True)
    file = b / f"steps/{number:08d}/rank_0/step.safetensors"
    if harm == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
    seen: list[int] = []
    with pytest.raises(RunFolderError, match=f"{number:08d}"):
        compare_runs(a, b, each=lambda report: seen.append(report.coverage.steps[0]), workers=1)
    assert seen == list(range(number))
