"""Further kinds of training: sampling through a model, inner loops, sharpness, structured losses, graphs, constants."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as f

from compare.test_other_kinds import BOTH, compared, descent, placed, recorded, tensor
from padiff.dump import open_run


def cause_of(report):
    return report.first_diff.cause


# -- calls that are joined in part ---------------------------------------------------------------------------------


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)[:, 0]


def energies(way):
    """Samples are made in two calls of the model; then one author calls it twice, the other with one batch of both."""
    model = Energy()

    def loss(rng):
        real, fake = tensor(rng, 6, 5), tensor(rng, 6, 5)
        for _ in range(2):
            fake.requires_grad_()
            fake = (fake - 0.1 * torch.autograd.grad(model(fake).sum(), fake)[0]).detach()
        if way == "reference":
            good, bad = model(real), model(fake)
        else:
            good, bad = model(torch.cat([real, fake])).split(6)
        weight = 0.01 if way == "fault" else 0.1
        return good.mean() - bad.mean() + weight * (good.square() + bad.square()).mean()

    return descent(model, loss, 0.05)


def test_the_last_calls_are_joined_and_the_first_are_not(tmp_path):
    clean, fault = compared(tmp_path, energies, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.stage == "loss"
    assert cause_of(fault).proven and "is 0.01 for the reference's 0.1" in cause_of(fault).sentence


# -- parameters that a call gets from outside ----------------------------------------------------------------------


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 12), nn.Linear(12, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def by_hand(weights, x):
    x = torch.tanh(f.linear(x, weights["a.weight"], weights["a.bias"]))
    return x @ weights["b.weight"].t() + weights["b.bias"]


def inner_loops(way):
    """Meta-learning: one author substitutes the parameters of the model, the other computes with a dictionary."""
    model = Curve()

    def loss(rng):
        total = 0.0
        for _ in range(2):
            x = tensor(rng, 8, 1)
            y, weights = torch.sin(x + 1), dict(model.named_parameters())
            for _ in range(2):
                made = torch.func.functional_call(model, weights, (x,)) if way == "reference" else by_hand(weights, x)
                grads = torch.autograd.grad(f.mse_loss(made, y), list(weights.values()), create_graph=True)
                rate = 0.3 if way == "fault" else 0.1
                weights = {name: w - rate * g for (name, w), g in zip(weights.items(), grads)}
            made = torch.func.functional_call(model, weights, (x,)) if way == "reference" else by_hand(weights, x)
            total = total + f.mse_loss(made, y)
        return total

    return descent(model, loss, 0.05)


@BOTH
def test_a_loop_that_computes_with_the_parameters_is_compared_by_gradients(options, tmp_path):
    with pytest.warns(RuntimeWarning, match="no layer of the recorded model was called"):
        clean, fault = compared(tmp_path, inner_loops, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.stage == "grad"
    assert cause_of(fault).kind != "micro_batches"


def test_substituted_parameters_are_no_parameters_of_the_model(tmp_path):
    run = open_run(recorded(tmp_path / "run", inner_loops, "reference", {}))
    sites = [(r.stage, r.layer, r.slot) for r in run.steps(0)[0].records]
    assert sites.count(("weight", "a", "weight")) == 1
    assert ("grad", "a", "weight") in sites and ("update", "b", "bias") in sites


# -- two passes in a step ------------------------------------------------------------------------------------------


def sharpness(way):
    """The weights are moved along the gradient, and back: by `backward`, or by gradients that are asked for."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    weights, rho = list(model.parameters()), 0.5 if way == "fault" else 0.05
    while True:
        x, y = tensor(rng, 8, 6), torch.randint(3, (8,), generator=rng)
        if way == "reference":
            loss = f.cross_entropy(model(x), y)
            loss.backward()
            grads = [w.grad.clone() for w in weights]
            optimizer.zero_grad()
        else:
            loss = f.nll_loss(model(x).log_softmax(1), y)
            grads = torch.autograd.grad(loss, weights)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        before = [w.detach().clone() for w in weights]
        with torch.no_grad():
            for w, g in zip(weights, grads):
                w.add_(g * (rho / norm))
        again = model(x)
        (f.cross_entropy(again, y) if way == "reference" else f.nll_loss(again.log_softmax(1), y)).backward()
        with torch.no_grad():
            for w, old in zip(weights, before):
                w.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
        rng = yield loss


@BOTH
def test_losses_are_paired_by_the_functions_that_gave_them(options, tmp_path):
    clean, fault = compared(tmp_path, sharpness, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(fault) == (0, "forward", "0")
    assert cause_of(fault).kind == "weights_between_calls" and not cause_of(fault).proven


# -- structured losses ---------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 4)
        self.moves, self.start = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.out(x)


def paths(way):
    """The loss of all paths against one; the reference reads scores by an index of tensors and numbers."""
    model = Tagger()

    def loss(rng):
        x, tags = tensor(rng, 6, 5, 5), torch.randint(4, (6, 5), generator=rng)
        scores, rows = model(x), torch.arange(6)
        if way == "reference":
            gold = model.start[tags[:, 0]] + scores[rows, 0, tags[:, 0]]
            for k in range(1, 5):
                gold = gold + model.moves[tags[:, k - 1], tags[:, k]] + scores[rows, k, tags[:, k]]
        else:
            hot = f.one_hot(tags, 4).float()
            gold = (scores * hot).sum((1, 2)) + hot[:, 0] @ model.start
            gold = gold + torch.einsum("bti,ij,btj->bt", hot[:, :-1], model.moves, hot[:, 1:]).sum(1)
        total = scores[:, 0] + (0 if way == "start" else model.start)
        for k in range(1, 5):
            step = total[:, :, None] + model.moves
            step = step.amax(1) if way == "best" else torch.logsumexp(step, 1)
            total = step + scores[:, k]
        return (torch.logsumexp(total, 1) - gold).mean()

    return descent(model, loss, 0.05)


def test_a_loss_over_paths_is_computed_again(tmp_path):
    clean, start, best = compared(tmp_path, paths, "reference", "clean", "start", "best")
    assert clean.passed, clean.first_diff.message
    assert cause_of(start).proven and "does not add (root)/start" in cause_of(start).sentence
    assert cause_of(best).kind == "reduction_form" and cause_of(best).proven, cause_of(best).text
    assert "the max for the reference's logsumexp" in cause_of(best).sentence
    assert "in all 4 turns of the loop" in cause_of(best).sentence


def picked_rows(way):
    """The loss is of the rows of a training mask, or of all."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))

    def loss(rng):
        x, y = tensor(rng, 12, 6), torch.randint(4, (12,), generator=rng)
        mask = torch.tensor([k % 3 > 0 for k in range(12)])
        out = model(x)
        if way == "reference":
            return f.cross_entropy(out[mask], y[mask])
        rows = -out.log_softmax(1).gather(1, y[:, None])[:, 0]
        return rows.mean() if way == "fault" else rows.index_select(0, mask.nonzero()[:, 0]).mean()

    return descent(model, loss)


def test_rows_that_only_one_loss_picks_are_named(tmp_path):
    clean, fault = compared(tmp_path, picked_rows, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert cause_of(fault).kind == "rows_missing" and cause_of(fault).proven
    assert "takes all 12 rows for its loss, the reference the 8 that" in cause_of(fault).sentence


def survival(way):
    """Who is at risk is compared in one author's code, which of the events count in the other's: two other choices."""
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))

    def loss(rng):
        x, times, events = tensor(rng, 10, 5), torch.randperm(10, generator=rng).float(), torch.ones(10)
        events[::3] = 0
        risk = model(x)[:, 0]
        if way == "reference":
            order = times.argsort(descending=True)
            counts = torch.where(events > 0, events, 0 * events)
            rows = (torch.logcumsumexp(risk[order], 0) - risk[order]) * counts[order]
        else:
            at_risk = (times[None] >= times[:, None]).float()
            rows = ((at_risk * risk.exp()[None]).sum(1).log() - risk) * events
        return rows.sum() / (10 if way == "fault" else events.sum())

    return descent(model, loss)


def test_comparisons_of_other_sizes_are_no_pair_of_choices(tmp_path):
    clean, fault = compared(tmp_path, survival, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert cause_of(fault).kind != "choice", cause_of(fault).text
    assert cause_of(fault).proven and "10" in cause_of(fault).sentence


# -- the code of layers --------------------------------------------------------------------------------------------


class Messages(nn.Module):
    """One author gives a layer both rows of the edges in one tensor, the other in two."""

    def __init__(self, way):
        super().__init__()
        self.inner, self.slope = nn.Linear(4, 4), 0.01 if way == "fault" else 0.2

    def forward(self, x, edges):
        return self.passed(x, edges[0], edges[1])

    def passed(self, x, source, goal):
        x = f.leaky_relu(self.inner(x), self.slope)
        return torch.zeros_like(x).index_add(0, goal, x[source])


class MessagesOfTwo(Messages):
    def forward(self, x, source, goal):
        return self.passed(x, source, goal)


class Graph(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.layer = way, (Messages if way == "reference" else MessagesOfTwo)(way)

    def forward(self, x, edges):
        return self.layer(x, edges) if self.way == "reference" else self.layer(x, edges[0], edges[1])


def graph(way):
    model = Graph(way)

    def loss(rng):
        return model(tensor(rng, 9, 4), torch.randint(9, (2, 20), generator=rng)).square().mean()

    return descent(model, loss)


def test_inputs_that_one_side_takes_in_parts_are_no_difference(tmp_path):
    clean, fault = compared(tmp_path, graph, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.slot == "output.0" and cause_of(fault).kind == "activation" and cause_of(fault).proven
    assert "slope 0.01" in cause_of(fault).sentence


class Places(nn.Module):
    """Attention with fewer keys than queries, and a table of distances."""

    def __init__(self, way):
        super().__init__()
        self.way, self.q, self.k, self.out = way, nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 3)
        self.table = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        q = self.q(x).view(2, 5, 4, 2).transpose(1, 2)
        k = self.k(x).view(2, 5, 2, 2).transpose(1, 2)
        k = k.repeat(1, 2, 1, 1) if self.way == "groups" else k.repeat_interleave(2, 1)
        places = torch.arange(5)
        rows, columns = places[:, None].expand(5, 5), places[None].expand(5, 5)
        bias = self.table[columns, rows] if self.way == "indices" else self.table[rows, columns]
        if self.way == "reference":
            slopes = torch.tensor([2.0**-k for k in range(1, 5)])
            bias = bias + slopes[:, None, None] * (columns - rows)
        else:
            base = 4.0 if self.way == "numbers" else 2.0
            bias = bias + torch.tensor(
                [[[base**-k * (j - i) for j in range(5)] for i in range(5)] for k in range(1, 5)]
            )
        scores = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        return self.out((scores @ q).sum(-1).transpose(1, 2))


def attention(way):
    model = Places(way)
    return descent(model, lambda rng: model(tensor(rng, 2, 5, 8)).square().mean())


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("groups", "repeat_order", "repeats all parts as a whole (0, 1, 0, 1)"),
        ("indices", "indices_exchanged", "the two indices of `(root)/table` are exchanged"),
        ("numbers", "other_numbers", "the first is 0.25 for the reference's 0.5"),
    ],
)
def test_what_the_code_of_an_attention_does_otherwise_is_proven(fault, kind, words, tmp_path):
    clean, report = compared(tmp_path, attention, "reference", "clean", fault)
    assert clean.passed, clean.first_diff.message
    assert cause_of(report).kind == kind and cause_of(report).proven, cause_of(report).text
    assert words in cause_of(report).sentence


# -- gradients -----------------------------------------------------------------------------------------------------


def limited(way):
    """A loss scale by hand; gradients of matrices are limited by their own norm."""
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer

    def limit():
        for p in model.parameters():
            if p.ndim > 1:
                p.grad.mul_((0.2 / p.grad.norm()).clamp(max=1))

    while True:
        loss = model(tensor(rng, 8, 6)).square().mean()
        optimizer.zero_grad()
        (loss * 256).backward()
        if way == "fault":
            limit()
        for p in model.parameters():
            p.grad.div_(256)
        if way != "fault":
            limit()
        optimizer.step()
        rng = yield loss


def test_a_loss_scale_in_some_gradients_is_clipping_before_unscaling(tmp_path):
    clean, fault = compared(tmp_path, limited, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert "a loss scale, in gradients that the candidate clips before it undoes the scale" in cause_of(fault).sentence
    assert not cause_of(fault).proven


def weighted(way):
    """Positive targets weigh 3 times: by an argument, or by hand."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def loss(rng):
        z, y = model(tensor(rng, 16, 6))[:, 0], (torch.rand(16, generator=rng) < 0.4).float()
        if way == "reference":
            return f.binary_cross_entropy_with_logits(z, y, pos_weight=torch.tensor(3.0))
        weight = 2.0 if way == "fault" else 3.0
        return (weight * y * f.softplus(-z) + (1 - y) * f.softplus(z)).mean()

    return descent(model, loss)


@BOTH
def test_the_arithmetic_of_a_function_is_no_code_of_the_loop(options, tmp_path):
    clean, fault = compared(tmp_path, weighted, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.stage == "loss"
    assert not cause_of(fault).proven or "weigh" in cause_of(fault).sentence, cause_of(fault).text


def thawing(way):
    """A layer is trained from the third step on, or from the fourth on; gradients are put into place by hand."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng, step = (yield model, optimizer), 0
    while True:
        step += 1
        model[0].requires_grad_(step > (3 if way == "late" else 2))
        trained = [p for p in model.parameters() if p.requires_grad]
        first, second = model(tensor(rng, 8, 5)).square().mean(), model(tensor(rng, 8, 5)).mean()
        u, v = (torch.autograd.grad(loss, trained, retain_graph=True) for loss in (first, second))
        share = 0.9 if way == "share" and step > 2 else 1.0
        for p, a, b in zip(trained, u, v):
            p.grad = share * (a + b)
        optimizer.step()
        optimizer.zero_grad()
        rng = yield first


@BOTH
def test_a_gradient_that_the_step_before_lacks_is_not_left_over_from_it(options, tmp_path):
    late, share = compared(tmp_path, thawing, "reference", "late", "share", steps=5, **options)
    assert late.first_diff.step == 2 and "frozen" in cause_of(late).sentence
    assert share.first_diff.step == 2 and cause_of(share).kind != "stale_gradient"
