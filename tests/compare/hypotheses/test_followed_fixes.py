"""Fixes of optimizers, followed to the letter: with the fix, the runs match."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest
import torch

import padiff

DATA = np.random.default_rng(0).normal(size=(5, 8, 6)).astype("float32")


def _torch(folder, optimizer_of, start=None):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.5)
    optimizer = optimizer_of(torch, net)
    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for batch in DATA:
            (net(torch.tensor(batch)) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return folder


def _paddle(folder, optimizer_of, start):
    net = paddle.nn.Sequential(paddle.nn.Linear(6, 6), paddle.nn.Linear(6, 3))
    padiff.start_from(start, net)
    optimizer = optimizer_of(paddle, net)
    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for batch in DATA:
            (net(paddle.to_tensor(batch)) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()
    return folder


def _groups(net, **first):
    """Weights with settings of their own, and biases without."""
    parameters = list(net.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], **first},
        {"params": [p for p in parameters if p.ndim < 2]},
    ]


def _layers(net, **first):
    return [{"params": net[0].parameters(), **first}, {"params": net[1].parameters()}]


def _followed(fix: str, settings: dict, framework):
    """The candidate's optimizer, with the class and the arguments of the fix in the place of its own."""
    head, text = re.fullmatch(r"(?:torch\.optim|paddle\.optimizer)\.(\w+)\((.*)\)", fix).groups()

    def make(module, net):
        optimizers = torch.optim if module is torch else paddle.optimizer
        names = {"call": lambda *given, **arguments: (given, arguments), "candidate_model": net}
        given, new = eval(f"call({text})", names)
        arguments = {**{key: value for key, value in settings.items() if key != "class"}, **new}
        parameters = arguments.pop("parameters", next((each for each in given if each is not ...), net.parameters()))
        if parameters and isinstance(parameters, list) and parameters[-1] is ...:
            named = dict(net.named_parameters())
            groups = [{**each, "params": [named.pop(name) for name in each["params"]]} for each in parameters[:-1]]
            parameters = [*groups, {"params": list(named.values())}]
        cls = getattr(optimizers, head)
        return cls(parameters, **arguments) if module is torch else cls(parameters=parameters, **arguments)

    return make


def _made(settings):
    def make(module, net):
        arguments = {key: value for key, value in settings.items() if key != "class"}
        if module is torch:
            return getattr(torch.optim, settings["class"])(net.parameters(), **arguments)
        return getattr(paddle.optimizer, settings["class"])(parameters=net.parameters(), **arguments)

    return make


REFERENCES = {
    "decay on weights": lambda t, n: t.optim.AdamW(_groups(n, weight_decay=0.3), lr=5e-3, weight_decay=0.0),
    "decay in SGD": lambda t, n: t.optim.SGD(n.parameters(), lr=0.1, weight_decay=0.1),
    "a layer's own rate": lambda t, n: t.optim.SGD(_layers(n, lr=0.01), lr=0.1),
    "decoupled": lambda t, n: t.optim.AdamW(n.parameters(), lr=0.01, weight_decay=0.1),
    "decoupled, epsilon": lambda t, n: t.optim.AdamW(n.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3),
    "coupled": lambda t, n: t.optim.Adam(n.parameters(), lr=0.01, weight_decay=0.1),
    "momentum": lambda t, n: t.optim.SGD(n.parameters(), lr=0.1, momentum=0.8),
    "Nesterov": lambda t, n: t.optim.SGD(n.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "betas": lambda t, n: t.optim.Adam(n.parameters(), lr=0.01, betas=(0.8, 0.95)),
    "a smoothing": lambda t, n: t.optim.RMSprop(n.parameters(), lr=1e-3, alpha=0.9, eps=1e-12),
}
PADDLE = [
    ("decay on weights", {"class": "AdamW", "learning_rate": 5e-3, "weight_decay": 0.3}),
    ("decay on weights", {"class": "AdamW", "learning_rate": 5e-3, "weight_decay": 0.0}),
    ("decay on weights", {"class": "Adam", "learning_rate": 5e-3}),
    ("decay in SGD", {"class": "SGD", "learning_rate": 0.1}),
    ("a layer's own rate", {"class": "SGD", "learning_rate": 0.1}),
    ("decoupled", {"class": "Adam", "learning_rate": 0.01, "weight_decay": 0.1}),
    ("decoupled", {"class": "AdamW", "learning_rate": 0.01, "weight_decay": 0.01}),
    ("decoupled, epsilon", {"class": "Adam", "learning_rate": 0.01, "weight_decay": 0.1}),
    ("coupled", {"class": "AdamW", "learning_rate": 0.01, "weight_decay": 0.1}),
    ("momentum", {"class": "SGD", "learning_rate": 0.1}),
    ("Nesterov", {"class": "Momentum", "learning_rate": 0.1, "momentum": 0.9}),
    ("betas", {"class": "Adam", "learning_rate": 0.01}),
    ("a smoothing", {"class": "RMSProp", "learning_rate": 1e-3, "rho": 0.95, "epsilon": 1e-12}),
]
TORCH = [
    ("decay on weights", {"class": "AdamW", "lr": 5e-3, "weight_decay": 0.3}),
    ("decay on weights", {"class": "Adam", "lr": 5e-3}),
    ("a layer's own rate", {"class": "SGD", "lr": 0.1}),
    ("decoupled", {"class": "Adam", "lr": 0.01, "weight_decay": 0.1}),
    ("decoupled, epsilon", {"class": "Adam", "lr": 0.01, "weight_decay": 0.1}),
    ("coupled", {"class": "AdamW", "lr": 0.01, "weight_decay": 0.1}),
    ("betas", {"class": "Adam", "lr": 0.01}),
    ("a smoothing", {"class": "RMSprop", "lr": 1e-3, "eps": 1e-12}),
]
CASES = [*((_paddle, *case) for case in PADDLE), *((_torch, *case) for case in TORCH)]


@pytest.mark.parametrize(
    ("train", "reference", "settings"), CASES, ids=[f"{c[0].__name__[1:]}: {c[1]}, {c[2]['class']}" for c in CASES]
)
def test_with_the_fix_the_runs_match(train, reference, settings, tmp_path):
    right = _torch(tmp_path / "reference", REFERENCES[reference])
    wrong = train(tmp_path / "candidate", _made(settings), right)
    first = padiff.compare_runs(right, wrong).first_diff
    assert first is not None
    assert first.cause.fix, first.message
    fixed = train(tmp_path / "fixed", _followed(first.cause.fix, settings, train), right)
    report = padiff.compare_runs(right, fixed)
    assert report.passed, f"{first.cause.fix}\n{report.first_diff.message}"


def test_no_epsilon_is_copied_to_another_place(tmp_path):
    """torch adds it to the root, paddle below the root."""
    right = _torch(tmp_path / "reference", lambda t, n: t.optim.RMSprop(n.parameters(), lr=1e-3, alpha=0.95, eps=1e-6))
    wrong = {"class": "RMSProp", "learning_rate": 1e-3, "rho": 0.99, "epsilon": 1e-12}
    for settings in (wrong, {**wrong, "rho": 0.95}):
        folder = tmp_path / str(settings["rho"])
        first = padiff.compare_runs(right, _paddle(folder, _made(settings), right)).first_diff
        assert first is None or "epsilon" not in first.cause.fix, first.message


def test_a_fix_that_leaves_an_epsilon_below_the_root_is_not_shown(tmp_path, monkeypatch):
    """With another smoothing alone, paddle's epsilon, which is as large as the gradients' squares, stays."""
    monkeypatch.setitem(globals(), "DATA", 1e-3 * DATA)
    right = _torch(tmp_path / "reference", lambda t, n: t.optim.RMSprop(n.parameters(), lr=1e-3, alpha=0.99))
    wrong = {"class": "RMSProp", "learning_rate": 1e-3, "rho": 0.95, "epsilon": 1e-6}
    first = padiff.compare_runs(right, _paddle(tmp_path / "wrong", _made(wrong), right)).first_diff
    assert first is not None and "alpha" in first.cause.sentence and "epsilon" in first.cause.sentence
    assert first.cause.proven
    assert first.cause.fix == ""
    half = _paddle(tmp_path / "half", _made({**wrong, "rho": 0.99}), right)
    assert not padiff.compare_runs(right, half).passed
