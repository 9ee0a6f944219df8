"""What PaDiffCallback does in PaddleFormers' Trainer, as facts: ``python -m integrations.trainers.pf_cases FOLDER``.

One process for all, as importing PaddleFormers changes paddle, and takes seconds. The facts are printed as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import paddle

import padiff
from padiff.dump.weight_files import read_floors
from padiff.errors import RunsDifferError
from padiff_paddleformers import PaDiffCallback

from . import pf


def _train(folder: Path, *callbacks: Any, **options: Any) -> tuple[Any, list[float]]:
    log = pf.Log()
    made = pf.trainer(folder / "out", [*callbacks, log], **options)
    made.train()
    return made, log.losses


def neutral(folder: Path) -> dict[str, Any]:
    plain, expected = _train(folder)
    made, found = _train(folder, PaDiffCallback(folder / "run", every_n_steps=2))
    same = all(np.array_equal(a, b) for a, b in zip(pf.weights(plain), pf.weights(made)))
    run = padiff.open_run(folder / "run")
    (step,) = run.steps(2)
    losses = [float(r.value) for r in step.records if r.slot == "loss" and r.stage == "loss"]
    facts = {"same": same and expected == found, "logged": found, "hooks": pf.hooks(made), "numbers": run.numbers()}
    return {**facts, "losses": losses, "scale": step.loss_scale, "finished": run.finished()}


class Raising(pf.TrainerCallback):
    def __init__(self, event: str) -> None:
        self.event, self.left = event, True

    def __getattribute__(self, name: str) -> Any:
        return self.fail if name == object.__getattribute__(self, "event") else object.__getattribute__(self, name)

    def fail(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 1 and self.left:
            self.left = False
            raise KeyError("in a callback")


def exceptions(folder: Path) -> dict[str, Any]:
    facts = {}
    for event in ("on_load_data_end", "on_substep_end", "on_optimizer_begin", "on_optimizer_end", "on_step_end"):
        made = pf.trainer(folder / "out", [PaDiffCallback(folder / event), Raising(event)])
        raised, left = False, -1
        try:
            made.train()
        except KeyError:
            raised, left = True, pf.hooks(made)
        made.train()
        facts[event] = [raised, left, pf.hooks(made), padiff.open_run(folder / event).finished()]
    return facts


def added_later(folder: Path) -> dict[str, Any]:
    """A Trainer that was given the callback later, and fails between two steps; another recorder takes the model."""
    made = pf.trainer(folder / "out", [Raising("on_log")])
    made.add_callback(PaDiffCallback(folder / "run"))
    raised = False
    try:
        made.train()
    except KeyError:
        raised = True
    left = pf.hooks(made) - ("training_step" in vars(made))
    again, _ = _train(folder, PaDiffCallback(folder / "again"), model=made.model)
    finished = padiff.open_run(folder / "again").finished()
    return {"raised": raised, "hooks": [left, pf.hooks(again)], "finished": finished}


def differing(folder: Path) -> dict[str, Any]:
    _train(folder, PaDiffCallback(folder / "reference"))
    callback = PaDiffCallback(folder / "stopped", reference=folder / "reference", on_diff="stop")
    with redirect_stderr(StringIO()) as reported:
        stopped, _ = _train(folder, callback, max_grad_norm=0.5)
    made = pf.trainer(
        folder / "out",
        [PaDiffCallback(folder / "raised", reference=folder / "reference", on_diff="raise")],
        adam_beta2=0.9,
    )
    raised = ""
    try:
        made.train()
    except RunsDifferError as error:
        raised = str(error)
    said = [" ".join(reported.getvalue().split())]
    first = callback.first_diff
    return {
        "stopped": stopped.state.global_step, "stage": first.stage if first else "", "said": said, "raised": raised,
        "hooks": [pf.hooks(stopped), pf.hooks(made)],
    }  # fmt: skip


def replayed(folder: Path) -> dict[str, Any]:
    _train(folder, PaDiffCallback(folder / "reference", replay_every_n_steps=2))
    callback = PaDiffCallback(folder / "run", replay=folder / "reference")
    made = pf.trainer(folder / "out", [callback], data={"order": 5})
    before = pf.weights(made)
    made.train()
    report = callback.report
    back = all(np.array_equal(a, b) for a, b in zip(before, pf.weights(made)))
    return {"passed": bool(report and report.passed), "steps": list(report.coverage.steps) if report else [],
            "back": back, "hooks": pf.hooks(made), "text": str(report)[-400:]}  # fmt: skip


def measured(folder: Path) -> dict[str, Any]:
    """Floors, of each of three steps in four more: two epochs of six."""
    _train(folder, PaDiffCallback(folder / "reference", replay_every_n_steps=2))
    callback = PaDiffCallback(folder / "run", replay=folder / "reference", floors=2, float64=True)
    made, _ = _train(folder, callback, data={"order": 5}, num_train_epochs=2)
    floors = [read_floors(folder / "run", number) for number in (0, 2, 4)]
    return {"passed": bool(callback.report and callback.report.passed), "text": str(callback.report)[-400:],
            "units": [list(found.units) for found in floors if found], "hooks": pf.hooks(made),
            "exact": [len(found.exact) for found in floors if found],
            "notes": [note for found in floors if found for note in found.notes]}  # fmt: skip


def carried(folder: Path) -> dict[str, Any]:
    """Epochs of five batches, of which two make a step."""
    _train(folder, PaDiffCallback(folder / "run"), num_train_epochs=2, data={"count": 10})
    run = padiff.open_run(folder / "run")
    steps = [run.steps(number)[0] for number in run.numbers()]
    return {
        "micro_batches": [step.micro_batches for step in steps],
        "left_over": [step.settings.get("gradients.left_over") for step in steps],
    }


def main(folder: str) -> None:
    cases = (neutral, exceptions, added_later, differing, replayed, measured, carried)
    facts = {}
    for case in cases:
        own = Path(folder) / case.__name__
        own.mkdir()
        facts[case.__name__] = case(own)
    assert paddle.get_device() == "cpu"
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
