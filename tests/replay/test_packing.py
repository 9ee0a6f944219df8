"""What a recorder keeps in packs, and that the training is the same without."""

from __future__ import annotations

import random

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.frameworks import framework_of
from padiff.recorder.options import Schedule
from padiff.system.guard import RAISING
from replay.trainings import ACCUMULATED, SIDES, Paddle, Torch, images, train

ATTENTION = "scaled_dot_product_attention"


@pytest.fixture(params=["torch", "paddle"])
def side(request):
    return SIDES[request.param]


def test_the_training_is_the_same_to_the_bit(side, tmp_path):
    with_packs = train(side, tmp_path / "with", steps=4, packs=1)
    without = train(side, tmp_path / "without", steps=4)
    assert with_packs[0] == without[0]
    for one, other in zip((*with_packs[1], with_packs[2]), (*without[1], without[2])):
        assert (one == other).all()
    runs = padiff.open_run(tmp_path / "with"), padiff.open_run(tmp_path / "without")
    assert list(runs[0].packs) == [0, 1, 2, 3] and not runs[1].packs
    for number in range(4):
        one, other = (run.steps(number)[0] for run in runs)
        assert [r.site for r in one.records] == [r.site for r in other.records]
        assert all((a.value == b.value).all() for a, b in zip(one.records, other.records))


def test_hooks_are_gone_afterwards(side, tmp_path):
    functional = torch.nn.functional if side is Torch else paddle.nn.functional
    before = functional.dropout.__code__, getattr(functional, ATTENTION)
    net = side.ViT()
    train(side, tmp_path / "run", steps=2, packs=1, net=net)
    assert (functional.dropout.__code__, getattr(functional, ATTENTION)) == before
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_post_hooks")
    layers = net.modules() if side is Torch else net.sublayers(include_self=True)
    assert not any(getattr(layer, name, None) for layer in layers for name in hooks)
    with pytest.raises(ZeroDivisionError):
        train(side, tmp_path / "failing", packs=1, net=net, started=lambda *_: 1 / 0)
    assert (functional.dropout.__code__, getattr(functional, ATTENTION)) == before


def test_between_packs_nothing_is_listened_to(side, tmp_path):
    functional = torch.nn.functional if side is Torch else paddle.nn.functional
    original, seen = functional.dropout.__code__, []

    def look(step, net, optimizer):
        seen.append(functional.dropout.__code__ is original)

    train(side, tmp_path / "run", steps=6, packs=2, started=look, every_n_steps=1)
    assert seen[2:] == [False, True, False, True]


def test_what_a_pack_holds(side, tmp_path, capfd):
    kept = {}

    def keep(step, net, optimizer):
        kept[step] = {name: np.array(value.detach().numpy()) for name, value in net.state_dict().items()}

    train(side, tmp_path / "run", steps=3, packs=Schedule(steps=[0, 2]), started=keep, every_n_steps=100)
    assert "keeps a replay pack at chosen steps, each of 12.7 kB for weights and buffers" in capfd.readouterr().err
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 2] and list(run.packs) == [0, 2]
    for number in (0, 2):
        pack = run.packs[number]
        names = {".".join(p for p in (layer, slot) if p != "(root)"): s for (layer, slot), s in pack.weights.items()}
        assert names.keys() == kept[number].keys()
        assert all((names[name].read() == value).all() for name, value in kept[number].items())
        assert pack.framework == side.name and pack.learning_rates == ((pytest.approx(0.01 * 0.8**number),),)
        (state,) = pack.optimizers
        assert state.rule == "AdamW" and bool(state.parameters) == bool(number)
        assert all(held.numbers["steps"] == number for held in state.parameters.values())
        for micro, batch in enumerate(pack.batches):
            x, y = images(ACCUMULATED * number + micro)
            assert (batch.args[0].read() == x).all() and (batch.labels[0].read() == y).all()
        assert len(pack.batches) == ACCUMULATED and not pack.unseen and not pack.notes


def test_states_of_generators_are_kept_where_they_can_be_set(tmp_path):
    random.seed(5)
    np.random.seed(6)
    expected = random.getstate()[1], np.random.get_state()[1]
    train(Torch, tmp_path / "run", steps=1, packs=1)
    seeds = padiff.open_run(tmp_path / "run").packs[0].seeds
    assert tuple(seeds["python"].read()) == expected[0] and (seeds["numpy"].read()[:-1] == expected[1]).all()
    assert seeds["torch.cpu"].read().dtype == np.uint8


class Noted:
    """Hears of masks, or gives those that were heard of."""

    draws = False
    guard = RAISING

    def __init__(self, masks=()):
        self.masks, self._left = list(masks), list(masks)

    def is_active(self):
        return True

    def begins(self):
        pass

    def aside(self):
        import contextlib

        return contextlib.nullcontext()

    def ended(self, call, kept):
        if call is not None:
            self.masks.append((call, kept))

    def mask(self, call):
        known, kept = self._left.pop(0)
        assert known == call
        return kept


def torch_calls():
    F, gen = torch.nn.functional, torch.Generator().manual_seed(4)
    x = torch.randn(4, 6, 8, generator=gen)
    x[0] = 0  # of which an output tells nothing
    x.requires_grad_()
    q = torch.randn(2, 2, 5, 4, generator=gen).requires_grad_()
    k = torch.randn(2, 2, 11, 4, generator=gen)
    torch.manual_seed(7)
    attention = torch.nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
    y = x * 1
    lstm, gru = torch.nn.LSTM(8, 5, 3, dropout=0.4), torch.nn.GRU(8, 5, 2, False, True, 0.4, True)
    rnn = torch.nn.RNN(8, 5, 2, dropout=0.4)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [4, 4, 3, 2, 1, 1])
    return [x, q], lambda: [
        lstm(x)[0],
        torch.cat([state.flatten() for state in lstm(x)[1]]),
        gru(x)[0],
        rnn(x)[0],
        lstm(packed)[0].data,
        torch.nn.Dropout(0.2)(x),
        F.dropout(x.transpose(0, 1), 0.4),
        F.dropout(x, p=0.0),
        F.dropout(x, 1.0),
        F.dropout(x, 0.5, training=False),
        torch.nn.Dropout2d(0.5)(x[None].expand(3, 4, 6, 8)),
        torch.nn.Dropout(0.3, inplace=True)(y.clone()),
        F.alpha_dropout(x, 0.3, True),
        F.dropout(x.to(torch.bfloat16), 0.3).float(),
        attention(x, x, x)[0],
        attention(x, x, x, need_weights=False)[0],
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.25, is_causal=True),
        F.scaled_dot_product_attention(q, k, k, torch.ones(5, 11).tril().bool(), 0.25, scale=0.3),
        encoder(x),
    ]


def paddle_calls():
    F = paddle.nn.functional
    values = np.random.RandomState(4).randn(4, 6, 8).astype("float32")
    values[0] = 0
    x = paddle.to_tensor(values, stop_gradient=False)
    q = paddle.to_tensor(np.random.RandomState(5).randn(2, 5, 2, 4).astype("float32"), stop_gradient=False)
    paddle.seed(7)
    attention, encoder = paddle.nn.MultiHeadAttention(8, 2, 0.3), paddle.nn.TransformerEncoderLayer(8, 2, 16, 0.1)
    lstm, gru = paddle.nn.LSTM(8, 5, 3, dropout=0.4, time_major=True), paddle.nn.GRU(8, 5, 2, "bidirect", dropout=0.4)
    rnn, lengths = paddle.nn.SimpleRNN(8, 5, 2, dropout=0.4), paddle.to_tensor([6, 4, 3, 1])
    # paddle keeps what a backward needs in the network, for its last call.
    other, cut = paddle.nn.LSTM(8, 5, 2, dropout=0.4), paddle.nn.GRU(8, 5, 2, dropout=0.4)
    return [x, q], lambda: [
        lstm(x)[0],
        paddle.concat([state.flatten() for state in other(x)[1]]),
        gru(x)[0],
        cut(x, sequence_length=lengths)[0],
        rnn(x)[0],
        paddle.nn.Dropout(0.2)(x),
        F.dropout(x.transpose([1, 0, 2]), 0.4),
        F.dropout(x, p=0.0),
        F.dropout(x, 1.0),
        F.dropout(x, 0.5, training=False),
        F.dropout(x, 0.4, axis=1),
        F.dropout(x, 0.4, mode="downscale_in_infer"),
        paddle.nn.Dropout2D(0.5)(x.unsqueeze(0).expand([3, 4, 6, 8])),
        F.alpha_dropout(x, 0.3),
        F.dropout(x.astype("float64"), 0.3).astype("float32"),
        attention(x, x, x),
        F.scaled_dot_product_attention(q, q, q, None, 0.25, True),
        encoder(x),
    ]


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_masks_are_seen_and_fed(framework):
    """Expected is what the framework gives by itself: while masks are seen, and where its own are fed."""
    side = SIDES[framework]

    def run(wrap=None, observer=None):
        inputs, calls = (torch_calls if side is Torch else paddle_calls)()
        side.seed(9)
        handle = getattr(masks, wrap)(observer) if wrap else None
        try:
            outputs = calls()
        finally:
            if handle is not None:
                handle.remove()
        sum(output.sum() for output in outputs).backward()
        results = [*outputs, *(tensor.grad for tensor in inputs)]
        return [tensor.detach().numpy().copy() for tensor in results], side.drawn()

    masks = framework_of(side.ViT()).masks
    plain, noted = run(), Noted()
    seen = run("see", noted)
    assert all((a == b).all() for a, b in zip((*plain[0], plain[1]), (*seen[0], seen[1])))
    assert all(kept is not None and kept.shape == call.shape for call, kept in noted.masks)
    dropped = {call.rate: 1 - kept.mean() for call, kept in noted.masks if call.function == "dropout"}
    assert all(abs(share - rate) < 0.3 for rate, share in dropped.items()), dropped
    fed = run("feed", Noted(noted.masks))
    exact = 0
    for one, other in zip(plain[0], fed[0]):
        assert np.abs(one - other).max() <= 2e-6 * max(np.abs(one).max(), 1)
        exact += bool((one == other).all())
    assert exact >= 8


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_draws_that_are_not_heard_are_named(framework, tmp_path):
    if framework == "torch":

        class Path(torch.nn.Module):
            def forward(self, x):
                return x * torch.rand(len(x), 1).round()

        net = torch.nn.Sequential(torch.nn.Linear(4, 4), Path(), torch.nn.Dropout(0.5), torch.nn.LSTM(4, 4, 2))
        net[3].dropout = 0.5
        call, loss, opt = (lambda: net(torch.ones(3, 4))[0]), torch.nn.functional.mse_loss, Torch.momentum(net)
        target = torch.zeros(3, 4)
    else:

        class Path(paddle.nn.Layer):
            def forward(self, x):
                return x * paddle.rand([x.shape[0], 1]).round()

        net = paddle.nn.Sequential(paddle.nn.Linear(4, 4), Path(), paddle.nn.Dropout(0.5))
        net.add_sublayer("3", paddle.nn.LSTM(4, 4, 2, dropout=0.5, time_major=False))
        net.forward = lambda x: net[3](net[2](net[1](net[0](x))).unsqueeze(0))
        call, loss, opt = (lambda: net(paddle.ones([3, 4]))[0]), paddle.nn.functional.mse_loss, Paddle.momentum(net)
        target = paddle.zeros([1, 3, 4])
    with padiff.record(net, tmp_path / "run", optimizer=opt, replay_every_n_steps=1) as rec:
        loss(call(), target).backward()
        opt.step()
        rec.try_dump()
    pack = padiff.open_run(tmp_path / "run").packs[0]
    assert [(drawn.layer, drawn.what) for drawn in pack.unseen] == [("1", "Path")]
    assert [mask.layer for mask in pack.masks] == ["2", "3"]


def test_a_batch_may_be_said(side, tmp_path):
    net = side.ViT()
    optimizer = side.momentum(net)
    x, y = images(0)
    with padiff.record(net, tmp_path / "run", optimizer=optimizer, replay_every_n_steps=1) as rec:
        for labels in ((side.tensor(y), 3), None):
            rec.log_batch({"x": side.tensor(x), "flags": [True, None]}, labels)
            out = net(side.tensor(x))
            (out**2).sum().backward()  # no loss function of the framework's
            optimizer.step()
            rec.try_dump()
        rec.log_batch(side.tensor(x))
    said, unknown = (padiff.open_run(tmp_path / "run").packs[k].batches for k in (0, 1))
    assert said[0].kwargs["flags"] == [True, None] and (said[0].kwargs["x"].read() == x).all() and not said[0].args
    assert (said[0].labels[0].read() == y).all() and said[0].labels[1] == 3
    assert len(said) == 1 and unknown[0].labels is None


def test_parts_of_a_model_that_are_called_are_no_batch(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = Torch.momentum(net)
    with padiff.record(net, tmp_path / "run", optimizer=optimizer, replay_every_n_steps=1) as rec:
        torch.nn.functional.mse_loss(net[1](net[0](torch.ones(2, 4))), torch.ones(2, 4)).backward()
        optimizer.step()
        rec.try_dump()
    pack = padiff.open_run(tmp_path / "run").packs[0]
    assert not pack.batches and "rec.log_batch(inputs, labels)" in pack.notes[0]


def test_in_memory_there_are_packs_too(side):
    net = side.ViT()
    optimizer = side.adamw(net)
    x, y = images(0)
    with padiff.record(net, optimizer=optimizer, replay_every_n_steps=1) as rec:
        side.cross_entropy(net(side.tensor(x)), side.tensor(y)).backward()
        side.update(net, optimizer)
        rec.try_dump()
    assert list(rec.run.packs) == [0] and len(rec.run.packs[0].masks) == 5


def test_a_wrong_schedule_is_refused():
    for wrong in (0, -1, 1.5, "500", True):
        with pytest.raises(padiff.PadiffError):
            padiff.record(torch.nn.Linear(2, 2), replay_every_n_steps=wrong)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:padiff.*nested tensors:RuntimeWarning")
def test_what_can_not_be_copied_is_a_note_and_the_training_goes_on(tmp_path):
    class Nested(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, parts):
            return self.linear(torch.cat(list(parts.unbind())))

    net = Nested()
    optimizer = Torch.momentum(net)
    parts = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    with padiff.record(net, tmp_path / "run", optimizer=optimizer, replay_every_n_steps=1) as rec:
        torch.nn.functional.mse_loss(net(parts), torch.ones(5, 4)).backward()
        Torch.update(net, optimizer, clip=0)
        rec.try_dump()
    pack = padiff.open_run(tmp_path / "run").packs[0]
    assert any("what the model is called with is not kept" in note for note in pack.notes), pack.notes
    assert len(pack.weights) == 2


@pytest.fixture
def compiling():
    """Nothing that was compiled is left: where something is, no functions are heard."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.compile.*:RuntimeWarning")
@pytest.mark.usefixtures("compiling")
def test_what_is_compiled_is_left_alone(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    plain = torch.nn.Sequential(*net)
    original = torch.nn.functional.dropout.__code__
    compiled = torch.compile(plain, backend="eager")
    optimizer = Torch.momentum(compiled)
    with padiff.record(compiled, tmp_path / "run", optimizer=optimizer, replay_every_n_steps=1) as rec:
        for _ in range(2):
            torch.nn.functional.mse_loss(compiled(torch.ones(5, 4)), torch.ones(5, 2)).backward()
            assert torch.nn.functional.dropout.__code__ is original
            Torch.update(compiled, optimizer, clip=0)
            rec.try_dump()
    pack = padiff.open_run(tmp_path / "run").packs[1]
    assert not pack.masks and pack.unseen  # named, as it can't be seen
