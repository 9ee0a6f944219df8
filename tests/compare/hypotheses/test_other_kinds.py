"""Trainings of other kinds: returns of an agent, teachers, flows, queues, curricula, attention over itself."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest
import torch
from torch.nn import functional

import padiff

T, N, WIDTH = 6, 4, 6
RNG = np.random.default_rng(5)
X = torch.tensor(RNG.normal(size=(T + 1, N, WIDTH)), dtype=torch.float32)
REWARDS = torch.tensor(RNG.normal(size=(T, N)), dtype=torch.float32)
DONES = torch.tensor(RNG.random((T, N)) < 0.3, dtype=torch.float32)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.value, self.other = (torch.nn.Linear(WIDTH, n) for n in (WIDTH, 1, WIDTH))

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.value(h).squeeze(-1), self.other(h)


def run(loss, net=Net, steps=2, **options):
    """A training with a loss of the model's outputs and the step."""
    model = net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for step in range(steps):
            value = loss(*model(X), step) if isinstance(model, Net) else loss(model, step)
            optimizer.zero_grad()
            value.backward()
            rec.log_loss(value)
            optimizer.step()
            rec.try_dump()
    return rec.run


def first_of(reference, candidate):
    return padiff.compare_runs(reference, candidate).first_diff


# -- losses written in other ways --------------------------------------------------------------------------------------


def returns(values, _, step):
    with torch.no_grad():
        v = values.detach()
        total, last = torch.zeros(T, N), v[-1]
        for t in reversed(range(T)):
            last = REWARDS[t] + 0.99 * (1 - DONES[t]) * last
            total[t] = last
    return ((values[:-1] - total) ** 2).mean()


def returns_otherwise(gamma=0.99, cut=True, ignored=False):
    def loss(values, _, step):
        last = values[-1].detach() if cut else values[-1]
        rows = []
        for t in range(T - 1, -1, -1):
            live = 1.0 if ignored else 1 - DONES[t]
            last = REWARDS[t] + gamma * live * last
            rows.insert(0, last)
        return functional.mse_loss(values[:-1], torch.stack(rows))

    return loss


def test_a_list_and_a_tensor_that_is_written_are_one_loss():
    assert padiff.compare_runs(run(returns), run(returns_otherwise())).outcome == "match"


def test_another_discount_is_read_from_all_turns_of_a_loop():
    cause = first_of(run(returns), run(returns_otherwise(gamma=0.9))).cause
    assert cause.proven and "the number is 0.9 for the reference's 0.99" in cause.sentence


def test_a_mask_that_is_not_used_is_named():
    cause = first_of(run(returns), run(returns_otherwise(ignored=True))).cause
    assert (cause.kind, cause.proven) == ("mask_missing", True) and "as if all were 0" in cause.sentence


def test_a_target_that_is_not_detached_is_named():
    first = first_of(run(returns), run(returns_otherwise(cut=False)))
    assert (first.stage, first.cause.kind, first.cause.proven) == ("backward", "detached", True)
    assert first.cause.sentence.startswith("the candidate does not detach")
    turned = first_of(run(returns_otherwise(cut=False)), run(returns)).cause
    assert (turned.kind, turned.proven) == ("detached", True) and turned.sentence.startswith("the reference")


def distilled(t=4.0, squared=True, by_hand=False):
    def loss(_, logits, step):
        logits, soft = logits[0], logits[1].detach()
        weight = t * t if squared else t
        if by_hand:
            p, log_p = functional.softmax(soft / t, -1), functional.log_softmax(soft / t, -1)
            return weight * (p * (log_p - functional.log_softmax(logits / t, -1))).sum(-1).mean()
        pair = functional.log_softmax(logits / t, 1), functional.softmax(soft / t, 1)
        return weight * functional.kl_div(*pair, reduction="batchmean")

    return loss


def test_a_number_that_several_calls_have_is_read():
    cause = first_of(run(distilled()), run(distilled(2.0, by_hand=True))).cause
    assert cause.proven and "the temperature of the softmaxes in the loss" in cause.sentence
    assert cause.sentence.endswith("is 2 for the reference's 4")


def test_calls_that_keep_axes_otherwise_are_the_same():
    def loss(scale, keep):
        def made(_, z, step):
            scores = (z[0] * z[1]).sum(-1, keepdim=True) if keep else (z[0] * z[1]).sum(-1).unsqueeze(-1)
            return functional.cross_entropy(torch.cat([scores, z[2]], 1) / scale, torch.zeros(N, dtype=torch.long))

        return made

    cause = first_of(run(loss(0.5, True)), run(loss(0.2, False))).cause
    assert cause.proven and "0.2 for the reference's 0.5" in cause.sentence and "sum()" not in cause.sentence


def test_another_output_that_goes_in_is_named():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.online, self.target = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.target.requires_grad_(False)

    def loss(wrong):
        def made(model, step):
            online, target = model.online(X[0]), model.target(X[1])
            return (online * (online.detach() if wrong else target)).sum(1).square().mean()

        return made

    cause = first_of(run(loss(False), Two), run(loss(True), Two)).cause
    assert (cause.kind, cause.proven) == ("call_input", True) and "for what `target` gives" in cause.sentence


def test_a_branch_that_is_not_taken_is_not_told_by_an_edit_of_it():
    def loss(both):
        def made(_, z, step):
            straight, crossed = (z[0] - z[1]).square().mean(-1), (z[0] - 3 * z[2]).square().mean(-1)
            return (torch.minimum(straight, crossed) if both else straight).mean()

        return made

    cause = first_of(run(loss(True)), run(loss(False))).cause
    assert (cause.kind, cause.proven) == ("choice_missing", True) and "which explains it as well" not in cause.sentence


def test_parts_in_another_order_are_named():
    def loss(turned):
        def made(_, z, step):
            parts = (z[0], 2 * z[1], z[2]) if not turned else (z[2], z[0], 2 * z[1])
            return (torch.cat(parts, 1) * torch.arange(3 * WIDTH)).square().mean()

        return made

    cause = first_of(run(loss(False)), run(loss(True))).cause
    assert cause.proven and "the parts are in the order 2, 0, 1 (cat() in the loop)" in cause.sentence


def test_a_number_that_is_made_otherwise_is_read():
    def loss(number, full):
        def made(_, z, step):
            column = torch.full((N, 1), number) if full else number * torch.ones(N, 1)
            return (torch.cat([z[0], column], 1) @ torch.ones(WIDTH + 1, 3)).square().mean()

        return made

    assert first_of(run(loss(0.5, False)), run(loss(0.5, True))) is None
    cause = first_of(run(loss(0.5, True)), run(loss(0.25, False))).cause
    assert cause.proven and "is 0.25 for the reference's 0.5" in cause.sentence


def test_a_weight_of_positive_targets_that_is_missing_is_named():
    targets = (REWARDS > 0).float()

    def loss(weight):
        def made(values, _, step):
            entropy = functional.binary_cross_entropy_with_logits
            return entropy(values[:-1], targets, pos_weight=None if weight is None else torch.tensor(weight))

        return made

    cause = first_of(run(loss(3.0)), run(loss(None))).cause
    assert (cause.kind, cause.proven) == ("loss_weight", True) and "pos_weight" in cause.sentence


def test_a_constant_of_a_loss_is_named_and_not_proven():
    def loss(constant):
        return lambda _, z, step: ((z**2).mean() + 0.5 * math.log(2 * math.pi)) if constant else (z**2).mean()

    cause = first_of(run(loss(True)), run(loss(False))).cause
    assert (cause.kind, cause.proven) == ("loss_term_missing", False)


def test_a_factor_of_one_sides_code_goes_before_a_bare_ratio():
    def loss(divided):
        return lambda _, z, step: (z**2).mean() / 6 if divided else (z**2).mean()

    cause = first_of(run(loss(False)), run(loss(True))).cause
    assert cause.proven and "not scaled by 6" in cause.sentence and "which explains it as well" not in cause.sentence


# -- a schedule of weights ---------------------------------------------------------------------------------------------


def curriculum(weight):
    def loss(values, z, step):
        return values.square().mean() + weight(step) * z.abs().mean()

    return loss


def test_a_weight_of_a_term_that_follows_another_schedule_is_named():
    reference = run(curriculum(lambda step: min(1.0, 0.25 * (step + 1))), steps=4)
    first = first_of(reference, run(curriculum(lambda step: min(0.5, 0.25 * (step + 1))), steps=4))
    assert (first.step, first.cause.kind, first.cause.proven) == (2, "loss_term_weight", True)
    assert "is 2 times that of the first step, in the reference 3 times" in first.cause.sentence


def test_a_schedule_is_told_from_sketches_by_the_outputs_of_the_term():
    reference = run(curriculum(lambda step: min(1.0, 0.25 * (step + 1))), steps=4, detail="sketch")
    candidate = run(curriculum(lambda step: min(0.5, 0.25 * (step + 1))), steps=4, detail="sketch")
    cause = first_of(reference, candidate).cause
    assert "weight of the terms of the loss" in cause.sentence and not cause.proven


# -- rows of buffers, and averages that take in buffers ----------------------------------------------------------------


class Queue(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.target.requires_grad_(False)
        self.register_buffer("queue", torch.randn(3 * N, WIDTH))


def queued(source="target", moves=True, writes=True):
    def loss(model, step):
        outputs = {"online": model.online(X[step]), "target": model.target(X[step + 1])}
        at = N * step if moves else 0
        value = (outputs["online"] @ model.queue.clone().T).square().mean()
        if writes:
            model.queue[at : at + N] = outputs[source].detach()
        return value

    return loss


@pytest.mark.parametrize(
    ("fault", "step", "kind", "words"),
    [
        (
            {"source": "online"},
            1,
            "rows_source",
            "writes what `online` gives into `queue`, the reference what `target`",
        ),
        ({"moves": False}, 2, "rows_place", "writes rows 0 to 3 of `queue`, the reference rows 4 to 7"),
        ({"writes": False}, 1, "rows_missing", "the candidate writes nothing into `queue`"),
    ],
)
def test_rows_of_a_queue(fault, step, kind, words):
    first = first_of(run(queued(), Queue, 3), run(queued(**fault), Queue, 3))
    assert (first.step, first.stage, first.cause.kind, first.cause.proven) == (step, "weight", kind, True)
    assert words in first.cause.sentence


class Encoders(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        for name in ("online", "target"):
            setattr(self, name, paddle.nn.Sequential(paddle.nn.Linear(WIDTH, 12), paddle.nn.BatchNorm1D(12)))


def averaged(buffers, first=False):
    """Train one of two encoders, whose copy follows it.

    Args:
        buffers: True to average the running statistics, too.
        first: True to average before the copy is called, False after the optimizer's step.
    """
    paddle.seed(3)
    model = Encoders()
    model.target.set_state_dict(model.online.state_dict())
    for parameter in model.target.parameters():
        parameter.stop_gradient = True
    optimizer = paddle.optimizer.SGD(0.05, parameters=model.online.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        for step in range(3):
            x, y = (paddle.to_tensor(X[step + k].numpy()) for k in range(2))
            output = model.online(y)
            if first:
                average(model, buffers)
            with paddle.no_grad():
                target = model.target(x)
            loss = (output - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            if not first:
                average(model, buffers)
            rec.try_dump()
    return rec.run


@paddle.no_grad()
def average(model, buffers):
    for (name, copy), source in zip(model.target.named_parameters(), model.online.parameters()):
        if buffers or not name.endswith(("_mean", "_variance")):
            copy.set_value(0.9 * copy + 0.1 * source)


@pytest.mark.parametrize("first", [False, True])
def test_an_average_of_all_parameters_takes_in_paddles_statistics(first):
    plain, taken_in = averaged(False, first), averaged(True, first)
    for sides, side in (((plain, taken_in), "candidate"), ((taken_in, plain), "reference")):
        cause = first_of(*sides).cause
        assert (cause.kind, cause.proven) == ("average_buffers", True)
        assert cause.sentence.startswith(f"the {side}'s average of `online.1` takes in the running statistics")


def test_statistics_of_another_batch_are_no_known_difference_of_the_frameworks():
    values = [RNG.normal(size=(8, WIDTH)).astype("float32") for _ in range(3)]
    theirs = torch.nn.Sequential(torch.nn.Linear(WIDTH, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 1))
    with padiff.record(theirs) as rec:
        for x in values:
            theirs(torch.tensor(x)).square().mean().backward()
            rec.try_dump()
    ours = paddle.nn.Sequential(paddle.nn.Linear(WIDTH, 12), paddle.nn.BatchNorm1D(12), paddle.nn.Linear(12, 1))
    for layer, source in zip((ours[0], ours[2]), (theirs[0], theirs[2])):
        layer.weight.set_value(source.weight.detach().numpy().T.copy())
        layer.bias.set_value(source.bias.detach().numpy())
    with padiff.record(ours) as again:
        for x in values:
            ours(paddle.to_tensor(x)).square().mean().backward()
            with paddle.no_grad():
                ours[1]._mean.set_value(ours[1]._mean + 0.01 * paddle.arange(12, dtype="float32"))
            again.try_dump()
    first = first_of(rec.run, again.run)
    assert (first.stage, first.slot) == ("weight", "running_mean") and first.cause.kind != "known_difference"


# -- layers ------------------------------------------------------------------------------------------------------------


class OwnAttention(torch.nn.Module):
    def __init__(self, scale, rate):
        super().__init__()
        self.scale, self.rate = scale, rate
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (t.reshape(N, 5, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = functional.dropout((q @ k.mT * self.scale).softmax(-1), self.rate)
        return self.out((weights @ v).transpose(1, 2).reshape(N, 5, 8))


class Attending(torch.nn.Module):
    def __init__(self, scale=None, rate=0.0):
        super().__init__()
        torch.manual_seed(0)
        theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.own = scale is not None
        self.attention = OwnAttention(scale, rate) if self.own else theirs
        if self.own:
            self.attention.qkv.load_state_dict({"weight": theirs.in_proj_weight, "bias": theirs.in_proj_bias})
            self.attention.out.load_state_dict(theirs.out_proj.state_dict())

    def forward(self, x):
        return self.attention(x) if self.own else self.attention(x, x, x)[0]


@pytest.mark.parametrize(
    ("scale", "rate", "kind", "words"),
    [
        (8**-0.5, 0.0, "", "is 0.353553 (1 / sqrt(8)) for the reference's 0.5"),
        (0.5, 0.3, "dropout_added", "the reference drops nothing of"),
    ],
)
def test_an_attention_over_itself_lacks_no_key_and_value(scale, rate, kind, words):
    tokens = torch.tensor(RNG.normal(size=(N, 5, 8)), dtype=torch.float32)

    def loss(model, step):
        return model(tokens).square().mean()

    cause = first_of(run(loss, Attending), run(loss, lambda: Attending(scale, rate))).cause
    assert cause.proven and words in cause.sentence and kind in cause.kind


def test_a_key_and_a_value_that_are_the_query_are_not_lacking():
    tokens = torch.tensor(RNG.normal(size=(N, 5, 8)), dtype=torch.float32)

    def loss(model, step):
        return model(tokens).square().mean()

    def noisy():
        model = Attending(0.5)
        model.attention.out.register_forward_hook(lambda layer, x, y: y + 0.1 * torch.rand_like(y))
        return model

    first = first_of(run(loss, Attending), run(loss, noisy))
    assert first.inside is True and first.cause.kind != "lone_input"


def test_a_scale_and_a_shift_of_other_names_are_not_crossed():
    class First(torch.nn.Module):
        def __init__(self, names=("scale", "shift")):
            super().__init__()
            torch.manual_seed(0)
            self.names, self.inner = names, torch.nn.Linear(WIDTH, WIDTH)
            for name, value in zip(names, (0.3, 0.7)):
                setattr(self, name, torch.nn.Parameter(torch.full((WIDTH,), value)))

        def forward(self, x):
            scale, shift = (getattr(self, name) for name in self.names)
            return self.inner((x + shift) * scale.exp())

    def loss(model, step):
        return model(X[0]).square().mean()

    runs = run(loss, First), run(loss, lambda: First(("log_scale", "bias")))
    assert first_of(*runs) is None


def test_parameters_of_one_layer_that_are_layers_elsewhere_are_paired():
    class LowRank(torch.nn.Module):
        def __init__(self, own):
            super().__init__()
            torch.manual_seed(0)
            base, down = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2, bias=False)
            self.own = own
            if own:
                self.w, self.c, self.low = (
                    torch.nn.Parameter(p.detach()) for p in (base.weight, base.bias, down.weight)
                )
            else:
                self.base, self.down = base, down

        def forward(self, x):
            if self.own:
                return x @ self.w.T + self.c + (x @ self.low.T) @ self.low
            return self.base(x) + self.down(x) @ self.down.weight

    def model(own):
        return torch.nn.Sequential(LowRank(own), torch.nn.Linear(WIDTH, 1))

    def loss(model, step):
        return model(X[0]).square().mean()

    assert first_of(run(loss, lambda: model(False)), run(loss, lambda: model(True))) is None
