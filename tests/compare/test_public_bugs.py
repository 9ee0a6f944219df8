"""Bugs that trainings in public had: what a loss is given, by what it is divided, who writes the weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as f

import padiff
from padiff.compare import compare_runs
from padiff.dump import open_run


def recorded(folder, train, fault, steps=3, **options):
    """Record a training of `steps` steps, which is a generator: it yields its model and optimizer, then each loss."""
    torch.manual_seed(0)
    loop = train(fault, np.random.default_rng(0))
    model, optimizer = next(loop)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            next(loop)
            rec.try_dump()
    return folder


def cause(tmp_path, train, steps=3):
    runs = [recorded(tmp_path / f"{fault}", train, fault, steps) for fault in (False, True)]
    again = recorded(tmp_path / "again", train, False, steps)
    assert compare_runs(runs[0], again).passed
    return compare_runs(*runs).first_diff.cause


def tensor(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype("f"))


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def descent(model, loss):
    """Return a training by SGD: a generator as `recorded` expects it. `loss` computes the loss of a new batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    yield model, optimizer
    while True:
        yield step(optimizer, loss())


class Code(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        code = torch.tanh(self.encoder(x))
        return code, self.decoder(code)


def autoencoder(fault, rng):
    model = Code()

    def loss():
        x = tensor(rng, 8, 6)
        code, out = model(x)
        return f.mse_loss(code, out) if fault else f.mse_loss(out, x)

    return descent(model, loss)


def test_a_loss_of_other_outputs_is_named(tmp_path):
    found = cause(tmp_path, autoencoder)
    assert found.kind == "loss_source" and found.proven, found
    assert "the output of decoder as target" in found.sentence


def language_model(how):
    def train(fault, rng):
        model = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 20))

        def loss():
            ids = torch.from_numpy(rng.integers(0, 20, (3, 7)))
            out = model(ids)
            rows, labels = out[:, :-1], ids[:, 1:]
            if fault:
                rows, labels = {
                    "not shifted": (out, ids),
                    "the last, too": (out, torch.cat([ids[:, 1:], ids[:, :1]], 1)),
                    "without the first": (out[:, 1:-1], ids[:, 2:]),
                }[how]
            return f.cross_entropy(rows.flatten(0, 1), labels.flatten())

        return descent(model, loss)

    return train


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("not shifted", "loss_rows", "the label that the reference compares with that 1 place before it"),
        ("the last, too", "loss_rows", "3 rows, the last of each sequence, that the reference's leaves out"),
        ("without the first", "loss_rows", "3 rows, place 0 of each sequence, that the candidate's leaves out"),
    ],
)
def test_rows_and_labels_of_a_loss_are_named(tmp_path, how, kind, text):
    found = cause(tmp_path, language_model(how))
    assert found.kind == kind and found.proven and text in found.sentence, found


def summed(fault, rng):
    model = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 20))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    yield model, optimizer
    while True:
        ids = torch.from_numpy(rng.integers(0, 20, (3, 7)))
        labels = ids.masked_fill(torch.from_numpy(rng.random((3, 7)) < 0.4), -100)
        loss = f.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
        yield step(optimizer, loss / (len(ids) if fault else (labels != -100).sum()))


def test_the_count_that_a_loss_is_divided_by_is_named(tmp_path):
    found = cause(tmp_path, summed)
    assert found.kind == "loss_scale" and found.proven, found
    assert "by 3, the number of samples" in found.sentence and "the number of labels that count" in found.sentence


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, state):
        hidden = torch.tanh(self.body(state))
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def advantages(fault, rng):
    """PPO: the ratio of the first update is one, up to the rounding of a difference of equal numbers."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    yield model, optimizer
    while True:
        state, action = tensor(rng, 16, 6), torch.from_numpy(rng.integers(0, 3, 16))
        reward, done = rng.standard_normal(16).astype("f"), (rng.random(16) < 0.3).astype("f")
        with torch.no_grad():
            scores, value = model(state)
            before = torch.distributions.Categorical(logits=scores).log_prob(action)
        ahead = np.roll(value.numpy(), -1) * (1 if fault else 1 - done)
        advantage = torch.from_numpy(reward + np.float32(0.99) * ahead - value.numpy())
        scores, value = model(state)
        ratio = (torch.distributions.Categorical(logits=scores).log_prob(action) - before).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        yield step(optimizer, policy + 0.5 * (value - advantage - 1).pow(2).mean())


def test_numbers_of_the_loop_that_go_into_a_loss_are_named_by_the_call(tmp_path):
    found = cause(tmp_path, advantages)
    assert found.kind == "loss_input" and found.proven and "what goes into" in found.sentence, found


def surrogate(fault, rng):
    policy, critic = nn.Linear(5, 3), nn.Linear(5, 1)

    def loss():
        states, rewards, on = tensor(rng, 8, 5), tensor(rng, 8), torch.from_numpy(rng.random(8) > 0.3).float()
        actions = torch.from_numpy(rng.integers(0, 3, 8))
        with torch.no_grad():
            values, before = critic(states)[:, 0], policy(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
            advantages = (
                rewards + 0.9 * on * (values.roll(-1) - values)
                if fault
                else (rewards + 0.9 * on * values.roll(-1) - values)
            )
            # Their mean is zero, and so is this part of the loss in an update's first step.
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-5)
        ratio = (policy(states).log_softmax(-1).gather(1, actions[:, None])[:, 0] - before).exp()
        gain = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return gain + f.smooth_l1_loss(critic(states)[:, 0], rewards)

    yield from descent(nn.ModuleList([policy, critic]), loss)


def test_a_term_that_is_zero_has_a_gradient_by_which_its_code_is_named(tmp_path):
    found = cause(tmp_path, surrogate)
    assert (
        "the candidate calls the first sub(), then the second mul(), then the first add() in the loop" in found.sentence
    )
    assert "the reference calls the second mul(), then the first add(), then the first sub()" in found.sentence
    assert found.proven, found


class Quantised(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.encoder, self.decoder, self.fault = nn.Linear(6, 4), nn.Linear(4, 6), fault
        self.codes = nn.Parameter(torch.arange(12.0).reshape(3, 4) / 12)

    def forward(self, x):
        z = self.encoder(x)
        nearest = self.codes[(z.detach()[:, None] - self.codes.detach()).square().sum(-1).argmin(1)]
        through = z + (nearest - z).detach()
        moved = through if self.fault else nearest
        return self.decoder(through), (moved - z.detach()).square().mean() + (moved.detach() - z).square().mean()


def quantised(fault, rng):
    model = Quantised(fault)

    def loss():
        x = tensor(rng, 8, 6)
        output, penalty = model(x)
        return f.mse_loss(output, x) + penalty

    return descent(model, loss)


def test_a_parameter_that_is_cut_off_on_each_way_to_the_loss_is_named(tmp_path):
    found = cause(tmp_path, quantised)
    assert "on the candidate, each way from `codes` to the loss passes detach()" in found.sentence, found
    assert "(nearest - z).detach()" in found.lines.candidate.code and not found.proven


def momentum_encoder(turned, rng):
    """Train a query encoder against a key encoder, which is called after it with `turned`, else before it."""
    query = [nn.Linear(6, 5), nn.Linear(5, 4)]
    key = [layer.requires_grad_(False) for layer in copy.deepcopy(query)]
    names = ("encoder", "head", "momentum_encoder", "momentum_head") if turned else ("q1", "q2", "k1", "k2")
    model = nn.ModuleDict(dict(zip(names, [*query, *key])))
    optimizer = torch.optim.SGD([p for layer in query for p in layer.parameters()], 0.1)
    yield model, optimizer

    def encoded(layers, x):
        return layers[1](layers[0](x).relu())

    while True:
        x, y = tensor(rng, 8, 6), tensor(rng, 8, 6)
        with torch.no_grad():
            for copied, layer in zip(key, query):
                copied.weight.mul_(0.9).add_(0.1 * layer.weight)
        calls = [(query, x), (key, y)]
        outputs = {id(layers): encoded(layers, data) for layers, data in (calls if turned else calls[::-1])}
        yield step(optimizer, f.mse_loss(outputs[id(query)], outputs[id(key)]))


def test_a_copy_that_no_optimizer_trains_is_paired_with_a_copy(tmp_path):
    runs = [recorded(tmp_path / f"{turned}", momentum_encoder, turned) for turned in (False, True)]
    report = compare_runs(*runs)
    assert report.passed, report.first_diff


class Momentum(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.q, self.inside = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), inside
        self.k = copy.deepcopy(self.q).requires_grad_(False)

    def average(self):
        with torch.no_grad():
            for mean, weight in zip(self.k.parameters(), self.q.parameters()):
                mean.mul_(0.9).add_(0.1 * weight)

    def forward(self, x, y):
        if self.inside:
            self.average()
        return self.q(x), self.k(y)


def momentum(inside, rng):
    model = Momentum(inside)

    def loss():
        if not inside:
            model.average()
        return f.mse_loss(*model(tensor(rng, 8, 6), tensor(rng, 8, 6)))

    return descent(model, loss)


def test_an_average_in_the_forward_is_no_proven_fault(tmp_path):
    found = cause(tmp_path, momentum, steps=5)
    assert found.kind == "average_order" and not found.proven
    assert "both train with the same average" in found.sentence


class Router(nn.Module):
    def __init__(self, scores):
        super().__init__()
        self.gate, self.expert, self.scores = nn.Linear(6, 3), nn.Linear(6, 3), scores

    def forward(self, x):
        scores = self.gate(x)
        shares = scores.softmax(-1)
        best, places = shares.topk(2, -1)
        routed = (self.expert(x).gather(-1, places) * best).sum(-1, keepdim=True)
        return routed, scores.flatten(0, 1) if self.scores else shares


class Routed(nn.Module):
    def __init__(self, scores):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(6, 6), Router(scores), nn.Linear(1, 2)

    def forward(self, x):
        routed, shares = self.router(self.first(x))
        return self.last(routed), shares


def routed(how):
    def train(fault, rng):
        model = Routed(fault)

        def loss():
            output, shares = model(tensor(rng, 4, 2, 6))
            shares = shares.softmax(-1) if fault and how == "softmax in the loss" else shares
            return output.square().mean() + shares.square().sum(-1).mean()

        return descent(model, loss)

    return train


@pytest.mark.parametrize("how", ["softmax in the loss", "no softmax"])
def test_an_output_of_a_block_in_another_form_is_no_difference(tmp_path, how):
    runs = [recorded(tmp_path / f"{fault}", routed(how), fault) for fault in (False, True)]
    report = compare_runs(*runs)
    assert report.passed is (how == "softmax in the loss"), report.first_diff
    if not report.passed:
        assert report.first_diff.cause.kind.startswith("softmax") and report.first_diff.cause.proven


class Conditional(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.first, self.shift, self.power = nn.Linear(6, 6), nn.Linear(6, 6), power

    def forward(self, x):
        x = self.first(x)
        if self.power is None:
            return f.layer_norm(x, (6,)) + self.shift(x)
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5) ** self.power + self.shift(x)


@pytest.mark.parametrize(
    ("power", "text"),
    [
        (1.0, "the root of the variance is missing in layer_norm()"),
        (2.0, "the variance is squared in layer_norm()"),
        (-0.5, "is multiplied by the root of the variance, and not divided by it"),
    ],
)
def test_another_power_of_the_variance_is_named(tmp_path, power, text):
    def train(fault, rng):
        model = Conditional(power if fault else None)
        return descent(model, lambda: f.mse_loss(model(tensor(rng, 8, 6)), tensor(rng, 8, 6)))

    found = cause(tmp_path, train)
    assert text in found.sentence and found.proven, found


def distilled(fault, rng):
    teacher, model = nn.Linear(6, 4), nn.Linear(6, 4)

    def loss():
        x = tensor(rng, 8, 6)
        with torch.no_grad():
            soft = f.softmax(3 * teacher(x) / (1 if fault else 2), 1)
        return f.kl_div(f.log_softmax(model(x) / 2, 1), soft, reduction="batchmean")

    return descent(model, loss)


def pixels(fault, rng):
    teacher, model = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def loss():
        x = tensor(rng, 2, 3, 5, 6)
        with torch.no_grad():
            soft = teacher(x)
        if not fault:
            return -(f.softmax(soft, 1) * f.log_softmax(model(x), 1)).sum() / 60
        soft = f.softmax(soft.reshape(-1, 4), 1)
        return -(soft * f.log_softmax(model(x).permute(0, 2, 3, 1).reshape(-1, 4), 1)).sum() / 6 / 10

    return descent(model, loss)


def test_a_softmax_of_rows_that_mix_channels_and_places_is_named(tmp_path):
    found = cause(tmp_path, pixels)
    assert "the channels are not moved last before a reshape to rows of 4" in found.sentence and found.proven, found


def test_another_temperature_of_targets_is_named(tmp_path):
    found = cause(tmp_path, distilled)
    assert "the temperature in div() in the loop is 1 for the reference's 2" in found.sentence and found.proven, found


def diffusion(how):
    def train(fault, rng):
        model = nn.Linear(9, 8)

        def loss():
            x, noise, share = rng.standard_normal((6, 8)), rng.standard_normal((6, 8)), rng.random((6, 1))
            kept, mixed = share**0.5, (1 - share) ** 0.5  # by numpy, whose calls no trace has
            if fault:
                kept, mixed = (kept, 1 - share) if how == "factor" else (share, mixed)
            mix = np.concatenate([kept * x + mixed * noise, share], 1)
            return f.mse_loss(model(torch.tensor(mix).float()), torch.tensor(noise).float())

        return descent(model, loss)

    return train


@pytest.mark.parametrize(("how", "text"), [("factor", "another factor"), ("schedule", "as by another schedule")])
def test_noise_that_is_mixed_in_otherwise_is_named(tmp_path, how, text):
    found = cause(tmp_path, diffusion(how))
    assert found.kind == "noise_mix" and found.proven and text in found.sentence, found


class Positions(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        angles = torch.outer(torch.arange(10).float(), 1 / 100 ** (torch.arange(3) / 3))
        both = [angles.sin(), angles.cos()]
        self.register_buffer("table", torch.cat(both, 1) if fault else torch.stack(both, -1).flatten(1))

    def forward(self, x):
        return self.inner(x + self.table)


def positions(fault, rng):
    model = Positions(fault)

    def loss():
        return model(tensor(rng, 4, 10, 6)).square().mean()

    return descent(model, loss)


def test_columns_of_a_table_in_another_order_are_named(tmp_path):
    found = cause(tmp_path, positions)
    assert found.kind == "weight_columns_permuted" and found.proven, found
    assert "the even ones before the odd ones" in found.sentence


class OnesRMSprop(torch.optim.Optimizer):
    """RMSprop whose averages begin at one, and whose epsilon is inside the root."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("average", torch.ones_like(parameter))
            average.lerp_(parameter.grad**2, 0.1)
            parameter -= 0.01 * parameter.grad / (average + 1e-3).sqrt()


def own_optimizer(fault, rng):
    model = nn.Linear(6, 4)
    rule = torch.optim.RMSprop(model.parameters(), 0.01, 0.9, 1e-3) if fault else OnesRMSprop(model.parameters())
    yield model, rule
    while True:
        yield step(rule, model(tensor(rng, 8, 6)).square().mean())


def test_an_optimizer_of_the_users_own_against_one_of_the_library_is_named(tmp_path):
    found = cause(tmp_path, own_optimizer)
    assert found.sentence == "the optimizers are others: OnesRMSprop against RMSProp" and found.proven, found


def moved_weights(fault, rng):
    """Sharpness-aware minimisation; the fault leaves the weights where they were moved to."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    yield model, optimizer
    while True:
        x = tensor(rng, 8, 6)
        model(x).square().mean().backward()
        with torch.no_grad():
            moves = [0.05 * parameter.grad / parameter.grad.norm() for parameter in model.parameters()]
            for parameter, move in zip(model.parameters(), moves):
                parameter += move
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if not fault:
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves):
                    parameter -= move
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_weights_that_something_else_writes_are_named(tmp_path):
    found = cause(tmp_path, moved_weights, steps=4)
    assert found.kind == "weights_written" and not found.proven, found


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x, tau):
        return self.last(f.softmax(self.first(x) / tau, -1))


def annealed(fault, rng):
    model = Annealed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    yield model, optimizer
    for number in range(9):
        x = tensor(rng, 8, 6)
        yield step(optimizer, f.mse_loss(model(x, 1.0 if fault else 0.9**number), x))


def test_a_number_that_the_model_is_called_with_is_named(tmp_path):
    found = cause(tmp_path, annealed)
    assert found.kind == "argument" and "tau 0.9 against 1.0" in found.sentence, found
    settings = open_run(tmp_path / "False").steps(1)[0].settings
    assert settings["argument.tau"] == 0.9


class Turned(nn.Module):
    """Attention whose factors are of the sequence's places; the fault takes those of the heads."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.inner, self.outer = fault, nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        query, value = self.inner(x).view(*x.shape[:2], 2, 2, 4).unbind(2)
        if not self.fault:
            query = query.transpose(1, 2)
        angles = torch.outer(torch.arange(query.shape[2]).float(), torch.tensor([1.0, 0.5, 0.1, 0.01]))
        query = query * angles.cos().cumprod(-1)
        query = query.transpose(1, 2) if self.fault else query
        value = value.transpose(1, 2)
        weights = (query @ query.transpose(-1, -2)).softmax(-1)
        return self.outer((weights @ value).transpose(1, 2).reshape(x.shape))


def turned(fault, rng):
    model = Turned(fault)

    def loss():
        return model(tensor(rng, 3, 5, 8)).square().mean()

    return descent(model, loss)


def test_a_call_that_gives_another_shape_is_named(tmp_path):
    found = cause(tmp_path, turned)
    assert found.kind == "call_shape" and "shape (2, 4) for the reference's (5, 4)" in found.sentence, found


def metric(fault, rng):
    model = nn.Linear(6, 5)

    def loss():
        parts = [model(tensor(rng, 8, 6)) for _ in range(3)]
        parts = parts if fault else [f.normalize(part, dim=1) for part in parts]
        return f.triplet_margin_loss(*parts)

    return descent(model, loss)


def test_embeddings_that_are_not_normalised_are_named(tmp_path):
    found = cause(tmp_path, metric)
    assert "goes into the loss as it is, the reference's divided by its norm" in found.sentence and found.proven, found


def masked(fault, rng):
    """The rows of a model without positions repeat."""
    model = nn.Sequential(nn.Embedding(9, 12), nn.Linear(12, 9))

    def loss():
        ids = torch.from_numpy(rng.integers(0, 8, (4, 7)))
        hidden = torch.from_numpy(rng.random((4, 7)) < 0.3)
        hidden[0, 0] = True
        out = model(ids.masked_fill(hidden, 8))
        rows, labels = (out.flatten(0, 1), ids.flatten()) if fault else (out[hidden], ids[hidden])
        return f.cross_entropy(rows, labels)

    return descent(model, loss)


def test_a_loss_of_all_places_for_the_masked_ones_is_named(tmp_path):
    found = cause(tmp_path, masked)
    assert found.kind == "loss_rows" and "rows that the reference's leaves out" in found.sentence, found


def boxes(fault, rng):
    model = nn.Linear(6, 4)

    def loss():
        target = tensor(rng, 8, 4) / (1 if fault else torch.tensor([0.1, 0.1, 0.2, 0.2]))
        return f.smooth_l1_loss(model(tensor(rng, 8, 6)), target)

    return descent(model, loss)


def test_factors_of_the_columns_of_targets_are_named(tmp_path):
    found = cause(tmp_path, boxes)
    assert "are 0.1, 0.1, 0.2, 0.2 times the reference's, column by column" in found.sentence and found.proven, found


def decoder(fault, rng):
    model = nn.Sequential(nn.Embedding(21, 12), nn.Linear(12, 20))

    def loss():
        ids = torch.from_numpy(rng.integers(0, 20, (4, 7)))
        given = ids if fault else torch.cat([torch.full((4, 1), 20), ids[:, :-1]], 1)
        return f.cross_entropy(model(given).flatten(0, 1), ids.flatten())

    return descent(model, loss)


def test_sequences_that_are_shifted_with_another_end_are_named(tmp_path):
    found = cause(tmp_path, decoder)
    assert found.kind == "input_moved" and found.proven, found
    assert "shifted by one along axis 1, back: its last values are others" in found.sentence


def dice(fault, rng):
    model = nn.Conv2d(1, 1, 3, padding=1)

    def loss():
        shape, axes = (3, 1, 6, 6), (0, 1, 2, 3) if fault else (1, 2, 3)
        share, target = torch.sigmoid(model(tensor(rng, *shape))), (tensor(rng, *shape) > 0).float()
        both, each = (share * target).sum(axes), share.sum(axes) + target.sum(axes)
        return (1 - (2 * both + 1) / (each + 1)).mean()

    return descent(model, loss)


def test_many_calls_that_differ_in_one_argument_are_said_in_short(tmp_path):
    found = cause(tmp_path, dice)
    assert "axis is [0, 1, 2, 3] for the reference's [1, 2, 3]" in found.sentence and found.proven, found
    assert len(found.sentence) < 200


def q_learning(fault, rng):
    """The fault takes the network itself for its targets, which is the target network up to the first update."""
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    yield model, optimizer
    while True:
        state, reward, then = tensor(rng, 16, 6), tensor(rng, 16), tensor(rng, 16, 6)
        action = torch.from_numpy(rng.integers(0, 3, 16))
        with torch.no_grad():
            wanted = reward + 0.99 * (model if fault else target)(then).max(1).values
        yield step(optimizer, f.smooth_l1_loss(model(state).gather(1, action[:, None]).squeeze(1), wanted))


def test_targets_of_the_network_itself_are_found_at_the_loss(tmp_path):
    """A call without gradients is no micro-batch, and not compared with the reference's call."""
    found = cause(tmp_path, q_learning)
    assert found.kind == "labels", found
    assert (
        "the candidate calls the model 1 time without gradients, as for a target, the reference 0 times"
        in found.sentence
    )
    assert open_run(tmp_path / "True").steps(1)[0].micro_batches == 1


class Mixture(nn.Module):
    """A density of two normals; one author returns what the other one computes in the loss."""

    def __init__(self, form, axis):
        super().__init__()
        self.body, self.head, self.form, self.axis = nn.Linear(5, 12), nn.Linear(12, 6), form, axis

    def forward(self, x):
        mean, spread, weight = self.head(torch.tanh(self.body(x))).split(2, -1)
        return mean, torch.exp(spread) if self.form else spread, torch.log_softmax(weight, self.axis)


def mixtures(fault, rng):
    model = Mixture(fault == "plain", 0 if fault == "axis" else 1)

    def loss():
        mean, spread, weight = model(tensor(rng, 9, 5))
        log = torch.log(spread) if fault == "plain" else spread
        off = (tensor(rng, 9, 1) - mean) * torch.exp(-log)
        return -torch.logsumexp(weight - 0.5 * off**2 - log, 1).mean()

    yield from descent(model, loss)


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_an_output_in_the_form_that_its_loss_takes_is_no_difference(tmp_path, detail):
    runs = {fault: recorded(tmp_path / fault, mixtures, fault, detail=detail) for fault in ("plain", "log", "axis")}
    report = compare_runs(runs["plain"], runs["log"])
    assert report.passed, report.first_diff
    first = compare_runs(runs["plain"], runs["axis"]).first_diff
    assert first.slot == "output.2"
    assert (first.cause.kind, first.cause.proven) == ("softmax_axis", True)


class Rotation(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.body, self.out, self.form = nn.Linear(4, 9), nn.Linear(3, 3), form

    def forward(self, x):
        turn = self.body(x).view(-1, 3, 3)
        logits = self.out(torch.einsum("bi,bij->bj", x[:, :3], turn))
        return (torch.log_softmax(logits, 1) if self.form else logits), turn


def regularised(fault, rng):
    model, form = Rotation(fault == "plain"), fault == "plain"

    def loss():
        scores, turn = model(tensor(rng, 8, 4))
        labels, eye = torch.from_numpy(rng.integers(0, 3, 8)), torch.eye(3)
        gram = turn @ (turn.transpose(1, 2) - eye) if fault == "inside" else turn @ turn.transpose(1, 2) - eye
        norm = torch.norm(gram, dim=(1, 2)) if form else torch.linalg.matrix_norm(gram)
        total = f.nll_loss(scores, labels) if form else f.cross_entropy(scores, labels)
        if form:
            total += 0.01 * norm.mean()
            return total
        return total + 0.01 * norm.mean()

    yield from descent(model, loss)


def test_a_term_that_is_added_in_place_is_a_part_of_the_loss(tmp_path):
    runs = {fault: recorded(tmp_path / fault, regularised, fault) for fault in ("plain", "other", "inside")}
    report = compare_runs(runs["plain"], runs["other"])
    assert report.passed, report.first_diff
    first = compare_runs(runs["plain"], runs["inside"]).first_diff
    assert (first.stage, first.slot, first.cause.proven) == ("loss", "loss", True)
    assert "calls sub(), then matmul() in the loop, where the reference calls matmul(), then sub()" in (
        first.cause.sentence
    )


def actor_critic(fault, rng):
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))

    def loss():
        out, returns = model(tensor(rng, 12, 5)), tensor(rng, 12)
        actions, value = torch.from_numpy(rng.integers(0, 3, 12)), out[:, 3:]
        advantage = returns - (value.detach() if fault else value.detach().squeeze(1))
        log = torch.log_softmax(out[:, :3], 1)[range(12), actions]
        return f.mse_loss(value.squeeze(1), returns) - (advantage * log).mean()

    return descent(model, loss)


def test_numbers_that_are_broadcast_against_a_column_are_named(tmp_path):
    found = cause(tmp_path, actor_critic)
    assert found.kind == "loss_shapes" and found.proven, found
    assert "with shape (12, 1) against what comes in with shape (12,)" in found.sentence


def contrast(fault, rng):
    model = nn.Linear(6, 4)

    def loss():
        a, b = (model(tensor(rng, 8, 6)) for _ in range(2))
        a, b = ((z / z.norm(), z) if fault else (f.normalize(z, dim=-1), z) for z in (a, b))
        scores = a[0] @ b[0].t() / 0.1 - 1e9 * torch.eye(8)
        return f.cross_entropy(scores, (torch.arange(8) + 1) % 8)

    return descent(model, loss)


def test_a_norm_over_all_axes_is_named_beside_masks_of_huge_numbers(tmp_path):
    found = cause(tmp_path, contrast)
    assert found.kind == "axis" and found.proven, found
    assert "is over all axes for the reference's 1" in found.sentence


class Attention(nn.Module):
    """Attention over the edges that end at a node; the fault takes it over those that begin there."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.lin, self.score = fault, nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x, edges):
        source, target = edges
        h = self.lin(x)
        e = torch.exp(torch.tanh(self.score(h)[source] + 2 * self.score(h)[target]))
        group = source if self.fault else target
        e = e / torch.zeros(len(x), 1).index_add(0, group, e)[group]
        return torch.zeros_like(h).index_add(0, target, e * h[source])


def graph(fault, rng):
    model, edges = Attention(fault), torch.from_numpy(rng.integers(0, 9, (2, 40)))
    return descent(model, lambda: f.cross_entropy(model(tensor(rng, 9, 5), edges), torch.arange(9) % 4))


def test_a_softmax_over_the_edges_of_the_other_end_is_named(tmp_path):
    found = cause(tmp_path, graph)
    assert found.kind == "indices_exchanged" and found.proven, found
    assert "rows are taken by the index of" in found.sentence


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, x, state):
        out, state = self.rnn(x, state)
        return self.head(out), state


def truncated(fault, rng):
    model, kept = Reader(), [torch.zeros(1, 5, 8)]

    def loss():
        scores, state = model(tensor(rng, 6, 5, 4), torch.zeros(1, 5, 8) if fault else kept[0])
        kept[0] = state.detach()
        return f.cross_entropy(scores.flatten(0, 1), torch.from_numpy(rng.integers(0, 3, 30)))

    return descent(model, loss)


def test_a_state_that_is_not_handed_on_is_named(tmp_path):
    found = cause(tmp_path, truncated)
    assert found.proven and "begins from zeros" in found.sentence, found
    assert "from what step 0 gave" in found.sentence


def penalised(fault, rng):
    """Two losses in each step; the first one has a penalty of the gradients of each sample."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    yield model, optimizer
    while True:
        real, fake = tensor(rng, 6, 2, 4, 4), tensor(rng, 6, 2, 4, 4)
        optimizer.zero_grad()
        mixed = (0.5 * (real + fake)).requires_grad_()
        slopes = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)[0]
        slopes = slopes if fault else slopes.view(6, -1)
        penalty = ((slopes.norm(2, dim=1) - 1) ** 2).mean()
        (model(fake).mean() - model(real).mean() + 10 * penalty).backward()
        (0.1 * model(fake + real).mean()).backward()
        optimizer.step()
        yield


def test_a_penalty_of_the_first_of_two_losses_is_named(tmp_path):
    found = cause(tmp_path, penalised)
    assert found.proven and "view() in the loop" in found.sentence, found


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(0.5 * torch.randn(3, 6)), nn.Parameter(torch.zeros(3))

    def forward(self, x, fast=None):
        w, b = fast or (self.w, self.b)
        return f.linear(torch.tanh(x), w, b)


def adapted(fault, rng):
    model = Learner()

    def loss():
        x, y = tensor(rng, 16, 6), torch.from_numpy(rng.integers(0, 3, 16))
        inner = f.cross_entropy(model(x[:8]), y[:8])
        slopes = torch.autograd.grad(inner, [*model.parameters()], create_graph=not fault)
        fast = [p - 0.5 * g for p, g in zip(model.parameters(), slopes)]
        return f.cross_entropy(model(x[8:], fast), y[8:])

    return descent(model, loss)


def test_gradients_that_one_side_asks_for_without_their_graph_are_named(tmp_path):
    found = cause(tmp_path, adapted)
    assert found.kind == "second_order" and "asks for gradients without create_graph=True" in found.sentence, found
    assert found.fix == "create_graph=True"
