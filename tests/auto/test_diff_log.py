"""The first generation's ``diff_log`` folder."""

from __future__ import annotations

import numpy as np
import paddle
import torch

from padiff import auto_diff

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def run(factor, **options):
    layer, module = paddle.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    losses = [lambda out: out.mean() * factor, lambda out: out.mean()]
    inputs = ({"input": paddle.to_tensor(X)}, {"input": torch.tensor(X)})
    return auto_diff(layer, module, inputs, auto_weights=True, loss_fn=losses, options={"atol": 1e-4, **options})


def test_gradients_that_differ_are_listed_and_the_file_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert not run(2.0)
    log = (tmp_path / "diff_log" / "grad_diff.log").read_text()
    assert "module: (root).weight (Linear)" in log
    assert "layer: (root).bias (Linear)" in log
    assert str(tmp_path / "diff_log" / "grad_diff.log") in capsys.readouterr().out
    assert not (tmp_path / "diff_log" / "weight_diff.log").exists()


def test_the_next_call_replaces_the_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(2.0)
    assert run(1.0)
    assert list((tmp_path / "diff_log").iterdir()) == []


def test_a_call_of_the_newer_generation_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs = (torch.tensor(X), paddle.to_tensor(X))
    losses = (lambda out: out.mean(), lambda out: out.mean() * 2)
    assert not auto_diff(torch.nn.Linear(6, 3), paddle.nn.Linear(6, 3), inputs, loss_fns=losses, atol=1e-4)
    assert list(tmp_path.iterdir()) == []
