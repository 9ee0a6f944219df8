"""Killed with -9 at any moment: every step that is there reads whole, and the run goes on."""

from __future__ import annotations

import os
import shutil

import pytest
from kit.forking import python_with_frameworks

from .children import run_child
from .killing import ROOT, finish, kill_again_and_again, start, until_recording
from .writers import check_folder

LONG = pytest.mark.skipif("PADIFF_LONG" not in os.environ, reason="a minute long: set PADIFF_LONG=1")


@pytest.mark.parametrize("options", [{}, {"pack": True}], ids=["plain", "packed"])
def test_a_writer_killed_again_and_again(tmp_path, options):
    counts = kill_again_and_again("numpy", tmp_path / "run", 5, seed=len(options), **options)
    assert len(counts) == 5 and counts[-1] >= 1


@pytest.mark.parametrize(
    "kind", ["torch", "paddle", pytest.param("lightning", marks=LONG), pytest.param("hapi", marks=LONG)]
)
def test_a_training_killed_and_resumed(tmp_path, kind):
    kill_again_and_again(kind, tmp_path / "run", 1, seed=1)


def test_a_run_killed_while_it_is_overwritten_has_no_half_removed_steps(tmp_path):
    """Every moment of an overwriting: the process is stopped before each change that it makes to the folder."""
    run = tmp_path / "run"
    with start("numpy", run, "--last", "4") as process:
        assert process.communicate(timeout=60)[0].endswith("done\n")
    script = tmp_path / "dying.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "left = int(sys.argv[2])\n"
        "def look(event, args):\n"
        "    global left\n"
        "    if event in ('os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'shutil.rmtree') or (\n"
        "        event == 'open' and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)\n"
        "    ):\n"
        "        left -= 1\n"
        "        if left < 0:\n"
        "            os.kill(os.getpid(), 9)\n"
        "from tests.hard.writers import by_numpy\n"
        "sys.addaudithook(look)\n"
        "by_numpy(Path(sys.argv[1]), 'overwrite', 4, {})\n"
        "print('done')\n"
    )
    moments, copy = 0, tmp_path / "copy"
    for moment in (0, 1, 2, 3, 4, 5, 6, 9, 14):
        shutil.copytree(run, copy)
        command = [*python_with_frameworks(), str(script), str(copy), str(moment)]
        done = run_child(command, cwd=ROOT)
        assert done.returncode == -9, done.stderr[-1000:]
        assert check_folder(copy, "numpy") in ([0, 1, 2, 3], [], [0], [0, 1], [0, 1, 2])
        moments += 1
        if moment in (2, 6):
            finish("numpy", copy, existing="resume")
            assert not list(copy.rglob(".*"))
        shutil.rmtree(copy)
    assert moments == 9


def test_a_killed_process_lock_does_not_block_and_shows_nowhere(tmp_path, capsys):
    from padiff_cli.main import main

    with start("numpy", tmp_path / "run") as process:
        until_recording(process)
        process.kill()
        process.stdout.read()  # to its end, which comes with that of the process that writes
    assert (tmp_path / "run" / ".rank_0.lock").exists()
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert main(["show", str(tmp_path / "moved")]) == 0
    assert ".rank" not in capsys.readouterr().out
    finish("numpy", tmp_path / "moved")
