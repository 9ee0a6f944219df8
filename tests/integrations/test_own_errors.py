"""An error of padiff's own in a callback, wherever it is raised, leaves a host's training as it is."""

from __future__ import annotations

import contextlib
import importlib
import io

import pytest
from hard.own_errors import Planting, name_of, share

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Lightning:
    needed = "lightning"

    def __init__(self):
        self.lit, self.integration = importlib.import_module("integrations.lit"), "padiff_lightning"

    def train(self, folder, callbacks):
        lit = self.lit
        module = lit.Lit()
        trainer = lit.pl.Trainer(max_epochs=1, **lit.QUIET, callbacks=[callbacks] if callbacks else [])
        trainer.fit(module, lit.loader(3))
        weights = [p.detach().numpy().tobytes() for p in module.parameters()]
        return [float(loss) for loss in module.losses], weights, lit.hooks(module, *trainer.optimizers)


class Hapi:
    needed = "paddle"

    def __init__(self):
        self.hapi, self.integration = importlib.import_module("integrations.hapi"), "padiff_hapi"

    def train(self, folder, callbacks):
        _, model = self.hapi.fit(None, data=self.hapi.Batches(3), callbacks=[callbacks] if callbacks else [])
        weights = [p.numpy().tobytes() for p in model.network.parameters()]
        return [], weights, self.hapi.hooks(model) + ("train_batch" in vars(model))


class Events:
    """transformers' Trainer and PaddleFormers'."""

    def __init__(self):
        self.kit = importlib.import_module(f"integrations.trainers.{self.kit_name}")

    def train(self, folder, callbacks):
        made = self.kit.trainer(
            folder / "out", [callbacks] if callbacks else [], max_steps=2, gradient_accumulation_steps=1
        )
        made.train()
        losses = [line["loss"] for line in made.state.log_history if "loss" in line]
        return losses, [w.tobytes() for w in self.kit.weights(made)], self.kit.hooks(made)


class Transformers(Events):
    needed, kit_name, integration = "transformers", "hf", "padiff_transformers"


class PaddleFormers(Events):
    needed, kit_name, integration = "paddleformers", "pf", "padiff_paddleformers"


SHARES = 2
# Functions are planted by one host only: the first has the errors of what all share.
HOSTS = {
    "lightning": (Lightning, ("padiff_hooks", "integrations/lightning")),
    "hapi": (Hapi, ("integrations/paddle_hapi",)),
    "transformers": (Transformers, ("padiff_hooks/trainers.py", "integrations/transformers")),
    "paddleformers": (PaddleFormers, ("integrations/paddleformers",)),
}


@pytest.mark.parametrize("number", range(SHARES))
@pytest.mark.parametrize("name", HOSTS)
def test_an_error_in_any_function_leaves_a_hosts_training_as_it_is(name, number, tmp_path):
    kind, folders = HOSTS[name]
    pytest.importorskip(kind.needed)
    host = kind()
    callback = importlib.import_module(host.integration).PaDiffCallback
    plain = host.train(tmp_path, None)
    host.train(tmp_path, callback(tmp_path / "reference", name="reference"))
    made = 0

    def compared(start=lambda train: train()):
        nonlocal made
        made += 1
        options = {"reference": tmp_path / "reference", "logdir": tmp_path / f"log-{made}"}
        ours = callback(tmp_path / str(made), **options)
        return start(lambda: host.train(tmp_path, ours))

    planting = Planting(*folders)
    compared()
    calls = compared(planting.enough if name == "lightning" else planting.calls)
    assert len(calls) >= {"lightning": 30}.get(name, 3)
    wrong = []
    for code in share(list(calls), number, SHARES):
        for call in sorted({1, calls[code]} if len(name_of(code)) % 4 == 0 else {1}):
            place = f"{name_of(code)}, call {call}"
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    after = compared(lambda train: planting.fail(code, train, call))  # noqa: B023
            except Exception as error:
                wrong.append(f"{place}: {type(error).__name__} ended the training: {error}")
                continue
            if after != plain:
                wrong.append(f"{place}: {'changed the training' if after[:2] != plain[:2] else 'left hooks on'}")
    assert not wrong, "\n".join(wrong)
