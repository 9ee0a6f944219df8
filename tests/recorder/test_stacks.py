"""Where layers and functions are called: the lines of the user's own code, in the first recorded step."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH

import padiff
from padiff.errors import RunFolderError
from padiff.report_formats import to_json

X = np.random.default_rng(5).normal(size=(6, 4)).astype(np.float32)


def net_of(kit):
    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.last = kit.Linear(4, 4), kit.ReLU(), kit.Linear(4, 3)

        def forward(self, x):
            hidden = self.act(self.first(x)) * 2
            return self.last(hidden)

    return Net()


def train(kit, model, folder, steps=2, **options):
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            model(kit.tensor(X)).sum().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run if folder is None else padiff.open_run(folder)


def stacks(run, number=0):
    return {(c.layer, c.function): c.stack for c in run.steps(number)[0].trace.calls}


def line_of(code: str, function) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(k for k, line in enumerate(lines) if code in line)


@pytest.mark.parametrize("kit", [TORCH, PADDLE], ids=["torch", "paddle"])
@pytest.mark.parametrize("options", [{}, {"pack": True}, {"detail": "sketch"}], ids=["plain", "packed", "sketches"])
def test_the_first_step_tells_where_each_layer_and_function_is_called(kit, tmp_path, options):
    found = stacks(train(kit, net_of(kit), tmp_path / "run", steps=3, **options))
    here = str(Path(__file__))
    outer, inner = found["first", ""][-2:]
    assert (outer.file, outer.function, outer.line) == (_short(here), "train", line_of("model(kit.tensor", train))
    assert (inner.file, inner.function) == (_short(here), "forward")
    assert inner.code == "hidden = self.act(self.first(x)) * 2" and inner.line == line_of("hidden = ", net_of)
    assert found["last", ""][-1].code == "return self.last(hidden)"
    assert found["(root)", ""][-1] == outer
    [multiplied] = [stack for (layer, function), stack in found.items() if function in ("mul", "scale")]
    assert multiplied[-1] == inner
    # Later steps keep no functions, and no stacks.
    assert not any(stacks(padiff.open_run(tmp_path / "run"), 2).values())


def _short(file: str) -> str:
    here = f"{Path.cwd()}/"
    return file.removeprefix(here)


def test_lines_of_padiff_and_of_the_frameworks_are_left_out_and_a_model_zoos_last_one_is_not(tmp_path, monkeypatch):
    zoo = tmp_path / "site-packages" / "zoo"
    zoo.mkdir(parents=True)
    (zoo / "__init__.py").write_text(
        "def run(layer, x):\n    return layer(x)\n\ndef outer(layer, x):\n    return run(layer, x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    import zoo as package

    class Net(TORCH.Layer):
        def __init__(self):
            super().__init__()
            self.only = TORCH.Linear(4, 4)

        def forward(self, x):
            return package.outer(self.only, x)

    try:
        stack = stacks(train(TORCH, Net(), None))["only", ""]
    finally:
        del sys.modules["zoo"]
    assert [frame.code for frame in stack[-2:]] == ["return package.outer(self.only, x)", "return layer(x)"]
    assert not [frame for frame in stack if "torch" in Path(frame.file).parts or "/padiff/" in frame.file]


def test_without_functions_there_are_no_stacks(tmp_path):
    assert not any(stacks(train(TORCH, net_of(TORCH), None, functions=False)).values())


def test_a_line_that_can_not_be_looked_up_is_no_reason_to_lose_the_trace(monkeypatch):
    def broken(framework):
        raise FileNotFoundError("there is no working directory any more")

    monkeypatch.setattr("padiff.recorder.tracer.code_frames", broken)
    found = stacks(train(TORCH, net_of(TORCH), None))
    assert ("first", "") in found and ("(root)", "mul") in found and not any(found.values())


def test_a_report_holds_the_stacks_of_both_sides_each_line_once(tmp_path):
    runs = [train(kit, net_of(kit), tmp_path / kit.name) for kit in (TORCH, PADDLE)]
    report = padiff.compare_runs(*(tmp_path / kit.name for kit in (TORCH, PADDLE)))
    del runs
    content = json.loads(json.dumps(to_json(report)))["models"]["stacks"]
    for side in ("reference", "candidate"):
        frames, layers = content[side]["frames"], content[side]["layers"]
        assert frames[layers["last"][-1]]["code"] == "return self.last(hidden)"
        assert len({json.dumps(frame) for frame in frames}) == len(frames)


def test_a_damaged_stack_is_reported(tmp_path):
    train(TORCH, net_of(TORCH), tmp_path / "run")
    path = tmp_path / "run/steps/00000000/rank_0/report.json"
    content = json.loads(path.read_text())
    content["trace"]["calls"][0]["stack"] = [10_000]
    path.write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match=r"the trace in .* is damaged"):
        list(padiff.open_run(tmp_path / "run").steps(0)[0].trace.calls)


def warn(kit, net):
    """Functions that warn of their caller: in Python, and in C."""
    if kit is PADDLE:
        return paddle.tensor.creation.to_tensor(net(kit.tensor(X)))  # paddleformers replaces `paddle.to_tensor`
    return torch.tensor(net(kit.tensor(X))), torch.zeros(2, 3, 4).T


@pytest.mark.parametrize("kit", [TORCH, PADDLE], ids=["torch", "paddle"])
def test_a_warning_names_the_users_line(kit, monkeypatch):
    net, places = net_of(kit), []
    code = warnings._showwarnmsg.__code__
    monkeypatch.setattr(paddle.tensor.creation, "_warned_in_tensor", False, raising=False)  # paddle warns once
    for recorded in (True, False) if kit is TORCH else (True,):  # paddle itself names its own line
        with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
            warnings.simplefilter("always")
            if recorded:
                stack.enter_context(padiff.record(net, None))
            warn(kit, net)
        caught = [each for each in caught if each.category is UserWarning]
        places.append({(each.filename, each.lineno) for each in caught})
    assert places[0] == places[-1]
    assert {file for file, _ in places[0]} == {__file__}
    assert warnings._showwarnmsg.__code__ is code
