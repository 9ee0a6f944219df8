"""Trainings that go on from a checkpoint: with the optimizer's state, or without it."""

import numpy as np
import paddle
import pytest
import torch

import padiff


class Trainer:
    """One framework's half of a training that is saved and loaded."""

    def __init__(self, framework):
        self.framework = framework
        self.net, self.optimizer = self.made()
        for _ in range(5):
            self.step(self.net, self.optimizer)

    def made(self):
        if self.framework == "torch":
            torch.manual_seed(0)
            net = torch.nn.Linear(6, 3)
            return net, torch.optim.Adam(net.parameters(), 1e-2)
        net = paddle.nn.Linear(6, 3)
        torch.manual_seed(0)
        padiff.assign_weight(torch.nn.Linear(6, 3), net)
        return net, paddle.optimizer.Adam(1e-2, parameters=net.parameters())

    def step(self, net, optimizer, seed=0):
        x = np.random.default_rng(seed).standard_normal((8, 6)).astype("float32")
        tensor = torch.tensor if self.framework == "torch" else paddle.to_tensor
        (net(tensor(x)) ** 2).mean().backward()
        optimizer.step()
        (optimizer.zero_grad if self.framework == "torch" else optimizer.clear_grad)()

    def resumed(self, folder, with_state):
        net, optimizer = self.made()
        if self.framework == "torch":
            net.load_state_dict(self.net.state_dict())
            if with_state:
                optimizer.load_state_dict(self.optimizer.state_dict())
        else:
            for mine, saved in zip(net.parameters(), self.net.parameters()):
                mine.set_value(saved)
            if with_state:
                # Names of parameters are counted on in one process; a new process would begin anew.
                names = {old.name: new.name for old, new in zip(self.net.parameters(), net.parameters())}
                state = self.optimizer.state_dict()
                optimizer.set_state_dict(
                    {
                        next((k.replace(a, b, 1) for a, b in names.items() if k.startswith(a)), k): v
                        for k, v in state.items()
                    }
                )
        with padiff.record(net, folder, optimizer=optimizer) as rec:
            for seed in range(1, 4):
                self.step(net, optimizer, seed)
                rec.try_dump()
        return folder


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_an_optimizer_that_a_checkpoint_did_not_fill_is_named(tmp_path, framework):
    reference = Trainer("torch").resumed(tmp_path / "reference", True)
    trainer = Trainer(framework)
    assert padiff.compare_runs(reference, trainer.resumed(tmp_path / "right", True)).passed
    first = padiff.compare_runs(reference, trainer.resumed(tmp_path / "wrong", False)).first_diff
    assert (first.step, first.stage, first.cause.kind) == (0, "update", "optimizer_state"), first.message
    assert "Adam: state of earlier updates against none" in first.cause.sentence


def test_the_counts_that_a_first_closure_sees_are_no_state():
    net = torch.nn.Linear(6, 3)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(4, 6)).square().mean()
        loss.backward()
        return loss

    with padiff.record(net, optimizer=optimizer) as rec:
        optimizer.step(closure)
        rec.try_dump()
    assert not any(name.endswith(".resumed") for name in rec.run.info.settings)
