"""Trainings in a process of their own: ``python -m integrations.trainers.child hf|pf FOLDER NAME ...``.

A name is ``clean`` or a fault's; each is recorded below FOLDER, and what came of it is printed as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .table import FAULTS, Fault

CLEAN = Fault("", 0, "", ())


def of_transformers(folder: Path, name: str) -> None:
    from padiff_transformers import PaDiffCallback

    from . import hf

    fault = FAULTS.get(name, CLEAN)
    count = {key: value for key, value in fault.data.items() if key == "count"}
    callback = PaDiffCallback(folder / f"hf_{name}")
    hf.trainer(folder / "out", [callback], how=fault.of_reference or "means", data=count, **fault.both).train()
    if fault.of_candidate:
        callback = PaDiffCallback(folder / f"pf_{name}")
        hf.trainer(folder / "out", [callback], how=fault.of_candidate, data=count, **fault.both).train()


def of_paddleformers(folder: Path, name: str) -> None:
    from padiff_paddleformers import PaDiffCallback

    from . import pf

    fault = FAULTS.get(name, CLEAN)
    start = folder / (f"hf_{name}" if (folder / f"hf_{name}").exists() else "hf_clean")
    callback = PaDiffCallback(folder / f"pf_{name}", start_from=start)
    options = {**fault.both, **fault.arguments, "config": fault.model, "data": fault.data}
    pf.trainer(folder / "out", [callback], how=fault.how, **options).train()


def main(side: str, folder: str, *names: str) -> None:
    train = of_transformers if side == "hf" else of_paddleformers
    for name in names:
        train(Path(folder), name)
        print(json.dumps({"trained": name}))


if __name__ == "__main__":
    main(*sys.argv[1:])
