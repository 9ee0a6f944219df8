"""Entry point of the processes in which `padiff doctor` runs a user's script, as ``python SCRIPT ARGS`` would."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run ``script_child.py PARENT SCRIPT ARGS``; PARENT is the id of the process that started this one."""
    parent, script, *args = sys.argv[1:]
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    # At the end, so that a padiff that the script itself would import comes first.
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from padiff.system.process import exit_with_parent
    from padiff_cli.doctor.model_finder import DoctorFinder

    exit_with_parent(int(parent))
    DoctorFinder()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
