"""Before a CUDA graph is captured, what is on its way from the device is written."""

from __future__ import annotations

import pytest
import torch

import padiff
from padiff.frameworks.torch import calls, tensors


class Graph:
    """Stands for the class of torch's graphs on a machine without a device."""

    def capture_begin(self, pool=None):
        return "begun"


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph()


def _stepped(rec, net, optimizer):
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    rec.try_dump()


def test_finished_steps_are_written_before_a_capture(graph, monkeypatch):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    plain, flushed = Graph.capture_begin.__code__, []
    with padiff.record(net, optimizer=optimizer, every_n_steps=2) as rec:
        monkeypatch.setattr(type(rec), "flush", lambda recorder: flushed.append(recorder.step))
        for number in range(3):
            _stepped(rec, net, optimizer)
            assert graph.capture_begin() == "begun"
            assert flushed == list(range(1, number + 2))  # in steps that are not due, too
    assert Graph.capture_begin.__code__ is plain
    assert graph.capture_begin() == "begun"
    assert len(flushed) == 3


def test_an_error_before_a_capture_stays_padiffs(graph, monkeypatch):
    net = torch.nn.Linear(3, 2)
    with padiff.record(net, optimizer=torch.optim.SGD(net.parameters(), 0.1)) as rec:

        def fail(_):
            raise ArithmeticError("planted")

        monkeypatch.setattr(type(rec), "flush", fail)
        assert graph.capture_begin() == "begun"


def test_nothing_of_a_captured_step_is_recorded(monkeypatch):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with padiff.record(net, optimizer=optimizer) as rec:
        _stepped(rec, net, optimizer)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert calls.building()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(tensors.UncopiedError, match="CUDA graph"):
            tensors.fetch([torch.ones(2)])
        monkeypatch.undo()
        optimizer.zero_grad()
        _stepped(rec, net, optimizer)
    second = rec.run.steps(1)[0]
    assert [record.call for record in second.records if record.stage in ("forward", "update")] == [0] * 4
