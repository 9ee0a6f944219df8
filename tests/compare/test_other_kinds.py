"""Kinds of training that are written in two ways: clean pairs match, and faults are placed and named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as f

import padiff
from padiff.compare import compare_runs
from padiff.dump import open_run

BOTH = pytest.mark.parametrize("options", [{}, {"detail": "sketch"}], ids=["full", "sketch"])


def recorded(folder, train, way, options, steps=3):
    """Record a training, which is a generator: it yields its model and optimizer, then each loss."""
    torch.manual_seed(0)
    loop = train(way)
    model, optimizer = next(loop)
    rng = torch.Generator().manual_seed(1)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            loop.send(rng)
            rec.try_dump()
    return folder


def compared(tmp_path, train, *ways, steps=3, **options):
    """Return the report of each further way against the first."""
    runs = [recorded(tmp_path / way, train, way, options, steps) for way in ways]
    return [compare_runs(runs[0], run) for run in runs[1:]]


def tensor(rng, *shape):
    return torch.randn(*shape, generator=rng)


def descent(model, loss, rate=0.1):
    """Return a training by SGD, a generator as `recorded` expects it; ``loss(rng)`` computes the loss of a batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
    rng = yield model, optimizer
    while True:
        value = loss(rng)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        rng = yield value


def placed(report):
    first = report.first_diff
    return first.step, first.stage, first.candidate


# -- buffers -------------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """A batch norm by hand: one author rebinds its buffers, the other writes into them, under other names."""

    def __init__(self, way):
        super().__init__()
        self.way, self.inner, self.weight = way, nn.Linear(6, 16), nn.Parameter(torch.ones(16))
        for name, start in zip(("rm", "rv") if way == "reference" else ("mean", "spread"), (0.0, 1.0)):
            self.register_buffer(name, torch.full((16,), start))

    def forward(self, x):
        x = self.inner(x)
        mean, var = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            if self.way == "reference":
                self.rm, self.rv = 0.9 * self.rm + 0.1 * mean, 0.9 * self.rv + 0.1 * var
            else:
                share = 0.9 if self.way == "fault" else 0.1
                self.mean.lerp_(mean, share)
                self.spread.lerp_(var, share)
        return (x - mean) / (var + 1e-5).sqrt() * self.weight


def statistics(way):
    model = Statistics(way)
    return descent(model, lambda rng: model(tensor(rng, 8, 6)).square().mean())


@BOTH
def test_buffers_with_other_names_are_compared_from_their_start(options, tmp_path):
    clean, fault = compared(tmp_path, statistics, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert not clean.coverage.reference_sites
    assert fault.first_diff.step == 1 and fault.first_diff.stage == "weight" and fault.first_diff.slot == "rm"


def test_a_buffer_that_forward_rebinds_is_recorded_with_the_value_before(tmp_path):
    run = open_run(recorded(tmp_path / "run", statistics, "reference", {}))
    values = [[r.value.tolist() for r in run.steps(k)[0].records if r.slot == "rm"] for k in range(2)]
    assert values[0] == [[0.0] * 16] and len(values[1]) == 1 and values[1] != values[0]


# -- gradients that the loop asks for ------------------------------------------------------------------------------


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x, t):
        return self.body(torch.cat([x, t], 1))


def equation(way):
    """A differential equation: one author asks for the gradients of both inputs at once, the other one by one."""
    model = Field()

    def loss(rng):
        x, t, edge = (tensor(rng, 10, 1).requires_grad_() for _ in range(3))
        u = model(x, t)
        if way == "reference":
            ux = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            ut = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        else:
            ux, ut = torch.autograd.grad(u.sum(), [x, t], create_graph=True)
        uxx = torch.autograd.grad(ux.sum(), x, create_graph=True)[0]
        residual, at_edge = (ut - 0.1 * uxx).square().mean(), model(edge, torch.zeros_like(edge)).square().mean()
        return residual + (1 if way == "fault" else 10) * at_edge

    return descent(model, loss, 0.01)


@BOTH
def test_gradients_that_are_asked_for_twice_are_no_further_gradients(options, tmp_path):
    clean, fault = compared(tmp_path, equation, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.stage == "loss"  # the one backward's, though the loop calls the model twice
    cause = fault.first_diff.cause
    assert cause.kind == "loss_term_weight" and cause.proven and "is 1 for the reference's 10" in cause.sentence


# -- layers around the same contents -------------------------------------------------------------------------------


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        left, right = x.chunk(2, 1)
        scale, shift = self.net(left).chunk(2, 1)
        return torch.cat([left, right * scale.tanh().exp() + shift], 1).flip(1), scale.tanh().sum(1)


class Flow(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        nets = [Coupling() for _ in range(2)]
        self.steps = nn.ModuleList(nets if way == "reference" else [step.net for step in nets])

    def forward(self, x):
        total = 0
        for number, step in enumerate(self.steps):
            if self.way == "reference":
                x, more = step(x)
            else:
                scale, shift = step(x[:, :3]).split(3, 1)
                x = torch.cat([x[:, :3], x[:, 3:] * scale.tanh().exp() + shift], 1).flip(1)
                more = scale.tanh().sum(1)
            total = total if self.way == "fault" and number else total + more
        return x, total


def flow(way):
    model = Flow(way)

    def loss(rng):
        x, total = model(tensor(rng, 8, 6))
        return (x.square().sum(1) / 2 - total).mean()

    return descent(model, loss, 0.01)


@BOTH
def test_wrappers_around_the_same_contents_are_paired_by_kind(options, tmp_path):
    clean, fault = compared(tmp_path, flow, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(fault) == (0, "forward", "(root)") and fault.first_diff.slot == "output.1"
    assert "add()" in fault.first_diff.cause.sentence


class Towers(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.items = nn.EmbeddingBag(12, 8, mode="mean") if way == "reference" else nn.Embedding(12, 8)
        self.tower = nn.Linear(8, 4)

    def forward(self, ids):
        items = self.items(ids)
        if self.way != "reference":
            items = items.sum(1) if self.way == "fault" else items.mean(1)
        return self.tower(items)


def towers(way):
    model = Towers(way)
    return descent(model, lambda rng: model(torch.randint(12, (8, 5), generator=rng)).square().mean())


@BOTH
def test_layers_of_two_kinds_with_outputs_of_other_shapes_are_no_place(options, tmp_path):
    clean, fault = compared(tmp_path, towers, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(fault) == (0, "forward", "tower")


class OwnBias(nn.Module):
    """A bias that the layer adds, or that the model adds after it."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.body = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3, bias=way == "reference")
        if way == "reference":
            self.head.bias.data = torch.tensor([0.5, 0.7, 0.9])
        else:
            self.offset = nn.Parameter(torch.tensor([0.5, 0.7, 0.9]))

    def forward(self, x):
        x = self.head(torch.relu(self.body(x)))
        return x if self.way == "reference" else x + self.offset * (2 if self.way == "fault" else 1)


def own_bias(way):
    model = OwnBias(way)
    return descent(model, lambda rng: model(tensor(rng, 8, 6)).square().mean())


@BOTH
def test_a_bias_that_the_model_adds_is_that_of_the_layer(options, tmp_path):
    clean, fault = compared(tmp_path, own_bias, "reference", "clean", "fault", **options)
    assert clean.passed, clean.text()
    assert not fault.passed
    assert placed(fault)[:2] == (0, "forward")


# -- calls on parts of a batch -------------------------------------------------------------------------------------


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x):
        z = torch.tanh(self.body(x))
        return z, self.head(z)


def views(way):
    """Two views of one sample: one author calls the model on each, the other on both in one batch."""
    model = Views()

    def loss(rng):
        x, y = tensor(rng, 5, 6), tensor(rng, 5, 6)
        if way == "reference":
            (z1, p1), (z2, p2) = model(x), model(y)
        else:
            z, p = model(torch.cat([x, y]))
            (z1, z2), (p1, p2) = z.chunk(2), p.chunk(2)
        ends = (z1, z2) if way == "not detached" else (z1.detach(), z2.detach())
        value = f.mse_loss(p1, ends[1]) + f.mse_loss(p2, ends[0])
        return f.mse_loss(p1, ends[1]) if way == "one direction" else value

    return descent(model, loss)


@BOTH
def test_calls_on_parts_of_a_batch_are_compared_with_one_call_of_all(options, tmp_path):
    clean, detached, one = compared(tmp_path, views, "reference", "clean", "not detached", "one direction", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(one)[:2] == (0, "loss")
    assert detached.first_diff.step == 0 and detached.first_diff.stage in ("backward", "grad")
    assert "has no partner" not in one.first_diff.message


def test_the_rows_of_the_calls_are_compared(tmp_path):
    (clean,) = compared(tmp_path, views, "reference", "clean")
    outputs = [d for d in clean.diffs if d.pair.stage == "forward" and d.pair.step == 0 and d.pair.complete]
    assert {d.pair.reference.shape for d in outputs} == {(10, 8)}


def batches(way):
    """A batch at once or as two micro-batches, and two terms of a loss with one backward or with one for each."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    while True:
        x, labels = tensor(rng, 10, 6), torch.randint(4, (10,), generator=rng)
        optimizer.zero_grad()
        if way in ("halves", "not divided", "uneven"):
            middle = 8 if way == "uneven" else 5
            for part in (slice(0, middle), slice(middle, 10)):
                z = model(x[part])
                value = f.cross_entropy(z, labels[part]) + 0.1 * z.square().mean()
                (value if way == "not divided" else value / 2).backward()
        else:
            z = model(x)
            value, penalty = f.cross_entropy(z, labels), 0.1 * z.square().mean()
            if way in ("two backwards", "another weight"):
                value.backward(retain_graph=True)
                (3 * penalty if way == "another weight" else penalty).backward()
            else:
                (value + penalty).backward()
        optimizer.step()
        rng = yield value


@BOTH
def test_a_batch_in_parts_and_a_loss_in_terms_match_the_whole(options, tmp_path):
    ways = ("reference", "halves", "two backwards", "not divided", "another weight", "uneven")
    halves, terms, undivided, weight, uneven = compared(tmp_path, batches, *ways, **options)
    for clean in (halves, terms):
        assert clean.passed, clean.first_diff.message
    assert placed(undivided)[:2] == (0, "backward")
    assert "2 micro-batches are accumulated: the candidate does not divide" in undivided.first_diff.message
    assert placed(uneven)[:2] == (0, "backward") and uneven.first_diff.cause.proven
    assert "is a mean over its own samples (8 and 2) in the candidate" in uneven.first_diff.message
    assert placed(weight)[:2] == (0, "loss")
    assert "has no partner" not in weight.first_diff.message


# -- losses inside of the model ------------------------------------------------------------------------------------


class Tasks(nn.Module):
    """Two tasks with learnt weights. The model returns its loss, and is called with its labels."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.second = way, nn.Linear(6, 4), nn.Linear(6, 2)
        if way == "reference":
            self.weights = nn.Parameter(torch.tensor([0.3, -0.2]))
        else:
            self.log_first, self.log_second = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-0.2))

    def forward(self, x, labels, values):
        first, second = f.cross_entropy(self.first(x), labels), f.mse_loss(self.second(x), values)
        a, b = self.weights if self.way == "reference" else (self.log_first, self.log_second)
        return (-a).exp() * first + (1.0 if self.way == "fault" else 0.5) * (-b).exp() * second + (a + b) / 2


def tasks(way):
    model = Tasks(way)

    def loss(rng):
        return model(tensor(rng, 8, 6), torch.randint(4, (8,), generator=rng), tensor(rng, 8, 2))

    return descent(model, loss)


@BOTH
def test_a_term_that_the_model_weighs_is_named_and_a_vector_answers_to_its_numbers(options, tmp_path):
    clean, fault = compared(tmp_path, tasks, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert not clean.coverage.reference_parameters
    cause = fault.first_diff.cause
    assert cause.kind == "loss_term_weight" and "mse_loss()" in cause.sentence
    assert cause.proven


# -- edits that are named as the code has them ---------------------------------------------------------------------


class Rays(nn.Module):
    """Compositing along rays: what is seen through is a product, or the exponential of a sum."""

    def __init__(self, way):
        super().__init__()
        self.way, self.density = way, nn.Linear(4, 1)

    def forward(self, x):
        depth = f.softplus(self.density(x)).squeeze(-1)
        alpha = 1 - torch.exp(-depth)
        if self.way == "reference":
            through = torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1).cumprod(1)[:, :-1]
        else:
            total = depth.cumsum(1)
            through = torch.exp(-total if self.way == "fault" else depth - total)
        return alpha * through


def rays(way):
    model = Rays(way)
    return descent(model, lambda rng: model(tensor(rng, 6, 7, 4)).square().mean())


def test_an_edit_of_a_call_that_the_candidate_does_not_make_is_no_proof(tmp_path):
    clean, fault = compared(tmp_path, rays, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    cause = fault.first_diff.cause
    assert not (cause.proven and "cat()" in cause.sentence), cause


def weighed(way):
    """Weights of samples that are limited: the limit of the reference is not reached."""
    model = nn.Linear(6, 4)

    def loss(rng):
        x, share = tensor(rng, 8, 6), torch.rand(8, generator=rng)
        error = model(x).square().mean(1)
        ratio = share / (1.2 - share)
        limit = 0.5 if way == "fault" else 50.0
        limited = ratio.clamp(max=50.0) if way == "reference" else torch.minimum(ratio, torch.full_like(ratio, limit))
        return (limited * error).mean()

    return descent(model, loss)


def test_another_limit_is_named_where_both_sides_limit(tmp_path):
    clean, fault = compared(tmp_path, weighed, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    cause = fault.first_diff.cause
    assert cause.kind == "limit" and cause.proven and "is 0.5 for the reference's 50" in cause.sentence, cause


def margins(way):
    """An angular margin: by the angle, or by the sum of two angles."""
    model, scale = nn.Linear(6, 5), 4 if way == "scale" else 8
    margin = 0.3 if way == "margin" else 0.5

    def loss(rng):
        cos, labels = model(tensor(rng, 8, 6)).tanh() * 0.9, torch.randint(5, (8,), generator=rng)
        own = f.one_hot(labels, 5).bool()
        if way == "clean":
            wider = cos * math.cos(margin) - (1 - cos.square()).sqrt() * math.sin(margin)
        else:
            wider = torch.cos(torch.acos(cos) + margin)
        return f.cross_entropy(scale * torch.where(own, wider, cos), labels)

    return descent(model, loss)


def test_margins_and_temperatures_of_a_loss_are_named(tmp_path):
    clean, margin, scale = compared(tmp_path, margins, "reference", "clean", "margin", "scale")
    assert clean.passed, clean.first_diff.message
    assert margin.first_diff.cause.proven and "is 0.3 for the reference's 0.5" in margin.first_diff.cause.sentence
    assert scale.first_diff.cause.proven and "is 4 for the reference's 8" in scale.first_diff.cause.sentence
    assert "attention" not in scale.first_diff.cause.sentence


def overlaps(way):
    model = nn.Linear(6, 5)

    def loss(rng):
        share, target = model(tensor(rng, 8, 6)).sigmoid(), (tensor(rng, 8, 5) > 0).float()
        below = (share + target if way == "fault" else share * share + target * target).sum(1)
        return (1 - (2 * (share * target).sum(1) + 1e-3) / (below + 1e-3)).mean()

    return descent(model, loss)


def test_a_square_that_is_left_out_is_no_absolute_error(tmp_path):
    (fault,) = compared(tmp_path, overlaps, "reference", "fault")
    cause = fault.first_diff.cause
    assert "absolute error" not in cause.sentence and "square" in cause.sentence, cause


# -- optimizers, frequencies and divisors ---------------------------------------------------------------------------


class OwnAdam(torch.optim.Optimizer):
    """Adam by hand; the fault leaves out the correction of one moment."""

    def __init__(self, parameters, way):
        super().__init__(parameters, {"lr": 0.01})
        self.way = way

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(n=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["n"] += 1
            state["m"].lerp_(p.grad, 0.1)
            state["v"].lerp_(p.grad.square(), 0.01)
            second = 1 if self.way == "fault" else 1 - 0.99 ** state["n"]
            p -= 0.01 * state["m"] / (1 - 0.9 ** state["n"]) / ((state["v"] / second).sqrt() + 1e-8)


def own_adam(way):
    model = nn.Linear(6, 4)
    optimizer = OwnAdam(model.parameters(), way)
    rng = yield model, optimizer
    while True:
        loss = model(tensor(rng, 8, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rng = yield loss


def test_one_moment_without_bias_correction_is_named(tmp_path):
    (fault,) = compared(tmp_path, own_adam, "reference", "fault")
    cause = fault.first_diff.cause
    assert cause.proven and "second moment is not bias-corrected" in cause.sentence, cause


class Encoded(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.inner = way, nn.Linear(8, 4)

    def forward(self, x):
        rate = 1.0 if self.way == "fault" else math.pi
        if self.way == "reference":
            parts = [function(2.0**k * math.pi * x) for k in range(2) for function in (torch.sin, torch.cos)]
            return self.inner(torch.cat(parts, 1))
        angles = x[:, None] * (2.0 ** torch.arange(2) * rate)[:, None]
        return self.inner(torch.stack([angles.sin(), angles.cos()], 2).flatten(1))


def encoded(way):
    model = Encoded(way)
    return descent(model, lambda rng: model(tensor(rng, 8, 2)).square().mean())


def test_frequencies_with_another_factor_are_named(tmp_path):
    clean, fault = compared(tmp_path, encoded, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.cause.kind == "frequency" and "1 / pi" in fault.first_diff.cause.sentence


def accumulated(way):
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    while True:
        optimizer.zero_grad()
        for _ in range(2):
            loss = (model(tensor(rng, 8, 6)) - 1).square().mean(1).mean() / (3 if way == "fault" else 2)
            loss.backward()
        optimizer.step()
        rng = yield loss


def test_another_divisor_of_micro_batches_is_proven_where_both_sides_code_has_it(tmp_path):
    (fault,) = compared(tmp_path, accumulated, "reference", "fault")
    cause = fault.first_diff.cause
    assert cause.proven and "is 3 for the reference's 2" in cause.sentence, cause


class Queue(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.inner, self.number = way, nn.Linear(6, 4), 0
        self.register_buffer("queue", torch.randn(12, 4))

    def forward(self, x):
        z = f.normalize(self.inner(x), dim=1)
        with torch.no_grad():
            self.queue[self.number : self.number + 3] = z * (1.5 if self.way == "fault" else 1)
            self.number = (self.number + 3) % 12
        return z


def queue(way):
    model = Queue(way)
    return descent(model, lambda rng: (model(tensor(rng, 3, 6)) - 1).square().mean())


def test_rows_that_are_written_with_another_scale_are_named(tmp_path):
    (fault,) = compared(tmp_path, queue, "reference", "fault")
    cause = fault.first_diff.cause
    assert cause.kind == "rows_scaled" and "is 1.5 times" in cause.sentence and not cause.proven


def test_another_share_of_an_average_by_hand_is_named(tmp_path):
    (fault,) = compared(tmp_path, statistics, "reference", "fault")
    cause = fault.first_diff.cause
    assert cause.kind == "buffer_share" and "`rm` moves 9 times as far" in cause.sentence, cause
