"""Language models, one with the sequence on the first axis and one with the batch; loops without an optimizer."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import paddle
import pytest
import torch

import padiff

LENGTH, TOKENS, WIDTH = 5, 11, 6


class SequenceFirst(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(TOKENS, WIDTH)
        self.rnn = torch.nn.LSTM(WIDTH, WIDTH, 2)
        self.out = torch.nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        state = torch.zeros(2, x.shape[1], WIDTH)
        return torch.log_softmax(self.out(self.rnn(self.emb(x), (state, state))[0]).view(-1, TOKENS), 1)


class BatchFirst(paddle.nn.Layer):
    def __init__(self, **options):
        super().__init__()
        self.table = paddle.nn.Embedding(TOKENS, WIDTH)
        self.lstm = paddle.nn.LSTM(WIDTH, WIDTH, 2, **options)
        self.head = paddle.nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        return self.head(self.lstm(self.table(x))[0])


def _ids(batch: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, TOKENS, (batch, 4 * LENGTH + 1))


def _reference(folder, batch, **options):
    torch.manual_seed(0)
    net, stream = SequenceFirst(), torch.tensor(_ids(batch)).t().contiguous()
    with padiff.record(net, folder, **options) as rec:
        for at in range(0, 4 * LENGTH, LENGTH):
            net.zero_grad()
            scores = net(stream[at : at + LENGTH])
            torch.nn.functional.nll_loss(scores, stream[at + 1 : at + LENGTH + 1].reshape(-1)).backward()
            for p in net.parameters():
                p.data.add_(p.grad, alpha=-2.0)
            rec.try_dump()
    return folder


def _candidate(folder, batch, rate=2.0, turned=False, shift=1, layer=None, **options):
    net, stream = BatchFirst(**(layer or {})), paddle.to_tensor(_ids(batch))
    padiff.start_from(folder.parent / "reference", net)
    optimizer = paddle.optimizer.SGD(rate, parameters=net.parameters())
    with padiff.record(net, folder, optimizer=optimizer, **options) as rec:
        for at in range(0, 4 * LENGTH, LENGTH):
            x, labels = stream[:, at : at + LENGTH], stream[:, at + shift : at + LENGTH + shift]
            x, labels = (x.t(), labels.t()) if turned else (x, labels)
            paddle.nn.functional.cross_entropy(net(x), labels).backward()
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()
    return folder


# As many samples as steps of the sequence, too: no shape tells then.
@pytest.mark.parametrize(("batch", "detail"), [(3, "full"), (3, "sketch"), (LENGTH, "full")])
def test_a_sequence_on_the_first_axis_matches_one_on_the_second(tmp_path, batch, detail):
    reference = _reference(tmp_path / "reference", batch, detail=detail)
    report = padiff.compare_runs(reference, _candidate(tmp_path / "candidate", batch, detail=detail))
    assert report.passed, report.first_diff
    stages = {(d.pair.anchor.layer, d.pair.stage) for d in report.diffs if d.pair.layout}
    assert {("(root)", "input"), ("(root)", "forward"), ("emb", "forward")} <= stages


def test_labels_of_another_place_are_found_whatever_the_axes(tmp_path):
    _reference(tmp_path / "reference", 3)
    report = padiff.compare_runs(tmp_path / "reference", _candidate(tmp_path / "candidate", 3, shift=0))
    first = report.first_diff
    wrong = int((_ids(3)[:, :LENGTH] != _ids(3)[:, 1 : LENGTH + 1]).sum())
    assert (first.step, first.stage, first.cause.kind) == (0, "loss", "labels")
    assert f"{wrong} of {3 * LENGTH} differ" in first.cause.sentence


@pytest.mark.parametrize(
    ("turned", "batch", "layer", "sentence", "fix"),
    [
        (True, 3, {}, "`lstm` takes the batch first, `rnn` the sequence: both get (5, 3, 6)", True),
        (True, LENGTH, {}, "`lstm` takes the batch first, `rnn` the sequence: both get (5, 5, 6)", True),
        (
            False,
            3,
            {"time_major": True},
            "`lstm` takes the sequence first, and gets the batch first: (3, 5, 6) for (5, 3, 6)",
            False,
        ),
    ],
)
def test_the_axis_that_a_recurrent_layer_takes_for_the_batch_is_named(tmp_path, turned, batch, layer, sentence, fix):
    _reference(tmp_path / "reference", batch)
    candidate = _candidate(tmp_path / "candidate", batch, turned=turned, layer=layer)
    first = padiff.compare_runs(tmp_path / "reference", candidate).first_diff
    assert (first.step, first.stage, first.cause.kind) == (0, "forward", "layer_setting")
    assert sentence in first.cause.sentence
    assert first.cause.fix == f"paddle.nn.LSTM(..., time_major={fix})"
    right = _candidate(tmp_path / "right", batch, turned=turned, layer={"time_major": fix})
    assert padiff.compare_runs(tmp_path / "reference", right).passed


def test_the_rate_of_a_loop_without_an_optimizer_is_read_from_its_updates(tmp_path):
    _reference(tmp_path / "reference", 3)
    first = padiff.compare_runs(tmp_path / "reference", _candidate(tmp_path / "candidate", 3, rate=0.5)).first_diff
    assert (first.stage, first.cause.kind, first.cause.proven) == ("update", "learning_rate", True)
    assert "the learning rates differ: 2 against 0.5" in first.cause.sentence


def test_a_loop_without_an_optimizer_is_recorded_where_no_compiler_is_loaded(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, torch\nnet = torch.nn.Linear(3, 2)\nassert 'torch._dynamo.convert_frame' not in sys.modules\n"
        "for i in range(3):\n    net.zero_grad()\n    net(torch.randn(4, 3)).square().mean().backward()\n"
        "    for p in net.parameters():\n        p.data -= 0.1 * p.grad\n"
    )
    command = [sys.executable, "-m", "padiff", "run", "--dir", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "recorded 3 steps" in done.stderr, done.stderr
    assert "error of padiff's own" not in done.stderr and "never closed" not in done.stderr
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2]
