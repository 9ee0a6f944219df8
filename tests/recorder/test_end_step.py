"""Steps that end where the caller says: without an optimizer, a loss, or gradients."""

from __future__ import annotations

import pytest

import padiff
from padiff.recorder.session import Recorder

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "enable_grad"])
@pytest.mark.parametrize("training", [True, False])
def test_each_call_ends_a_step(context, training):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()).train(training)
    outputs = []
    with padiff.record(net) as rec, getattr(torch, context)():
        assert isinstance(rec, Recorder)
        for k in range(3):
            outputs += [net(torch.full((2, 3), float(k))), net(torch.full((1, 3), -1.0))]
            assert rec.end_step()
    assert rec.run.numbers() == [0, 1, 2]
    for number in range(3):
        [step] = rec.run.steps(number)
        values = [r.value for r in step.records if (r.layer, r.stage) == ("1", "forward")]
        assert len(values) == 2
        for value, output in zip(values, outputs[2 * number : 2 * number + 2]):
            assert (value == output.detach().numpy()).all()


def test_only_due_steps_are_written():
    net = torch.nn.Linear(2, 2).eval()
    written = []
    with padiff.record(net, every_n_steps=2) as rec, torch.no_grad():
        for _ in range(4):
            net(torch.ones(1, 2))
            written.append(rec.end_step())
    assert written == [True, False, True, False] and rec.run.numbers() == [0, 2]


def test_what_follows_the_last_end_is_no_step():
    net = torch.nn.Linear(2, 2)
    with padiff.record(net) as rec, torch.no_grad():
        net(torch.ones(1, 2))
        rec.end_step()
        net(torch.ones(1, 2))
    assert rec.run.numbers() == [0]


def test_both_names_end_steps_of_one_run():
    net = torch.nn.Linear(2, 2)
    with padiff.record(net) as rec:
        net(torch.ones(1, 2))
        rec.end_step()
        net(torch.ones(1, 2))
        rec.try_dump()
    assert rec.run.numbers() == [0, 1]
