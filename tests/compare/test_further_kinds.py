"""Further kinds of training: sampling through a model, inner loops, sharpness, structured losses, graphs, constants."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as f

from compare.test_other_kinds import BOTH, compared, descent, placed, recorded, tensor
from padiff.dump import open_run
from padiff.records import Both


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
    with pytest.warns(RuntimeWarning, match="no layer of the recorded model was called.* gradients and updates are"):
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
    assert [line.code for line in cause_of(fault).lines] == ["again = model(x)"] * 2


def sharp(way):
    """The fault is in the model: the weights that the loop writes by its gradients follow from it."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh() if way == "reference" else nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    weights = list(model.parameters())
    while True:
        x, y = tensor(rng, 8, 6), torch.randint(3, (8,), generator=rng)
        loss = f.cross_entropy(model(x), y)
        moves = [0.05 * g for g in torch.autograd.grad(loss, weights)]
        with torch.no_grad():
            torch._foreach_add_(weights, moves)
        f.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)
        optimizer.step()
        optimizer.zero_grad()
        rng = yield loss


def test_weights_that_the_loop_writes_by_gradients_are_no_further_fault(tmp_path):
    (fault,) = compared(tmp_path, sharp, "reference", "fault")
    assert placed(fault) == (0, "forward", "1") and not fault.independent


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
    assert cause_of(fault).proven and "is 2 for the reference's 3" in cause_of(fault).sentence, cause_of(fault).text


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
    assert late.first_diff.step == 2 and "only from step 3 on" in cause_of(late).sentence
    assert share.first_diff.step == 2 and cause_of(share).kind != "stale_gradient"


# -- gradients that the loop asks for and computes with -------------------------------------------------------------


def langevin(way):
    """Samples move along the gradient of the energy; the first call of the model comes before any gradient."""
    model = Energy()
    rate = 0.5 if way == "half" else 2.0

    def loss(rng):
        real, fake = tensor(rng, 6, 5), tensor(rng, 6, 5)
        for _ in range(2):
            fake = fake.detach().requires_grad_()
            if way == "reference":
                fake = fake - rate * torch.autograd.grad(model(fake).sum(), fake)[0].clamp(-0.05, 0.05)
            else:
                (slope,) = torch.autograd.grad([model(fake).sum()], [fake])
                slope = slope if way == "unlimited" else torch.clip(slope, -0.05, 0.05)
                fake = torch.add(fake, slope, alpha=-rate)
        return model(real).mean() - model(fake.detach()).mean()

    return descent(model, loss, 0.05)


def test_what_a_loop_computes_of_gradients_is_named(tmp_path):
    clean, half, unlimited = compared(tmp_path, langevin, "reference", "clean", "half", "unlimited", steps=2)
    assert clean.passed, clean.first_diff.message
    assert half.first_diff.stage == "input" and cause_of(half).proven
    assert "0.5 for the reference's 2" in cause_of(half).sentence
    assert unlimited.first_diff.stage == "input" and "clamp" in cause_of(unlimited).sentence


def adversarial(way):
    """Inputs that are made of normalised gradients have the rounding of outputs, not that of a batch."""
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    direction = tensor(torch.Generator().manual_seed(3), 6, 5)

    def loss(rng):
        x = tensor(rng, 6, 5)
        kept = model(x).detach().softmax(1)
        d = (direction / direction.norm(dim=1, keepdim=True)).requires_grad_()
        scores = model(x + 0.1 * d)
        if way == "reference":
            apart = f.kl_div(scores.log_softmax(1), kept, reduction="batchmean")
        else:
            apart = (kept * (kept.log() - scores.softmax(1).log())).sum(1).mean()
        (g,) = torch.autograd.grad(apart, d)
        g = g / (g.norm(dim=1, keepdim=True) + 1e-8)
        return model(x + (0.5 if way == "fault" else 1.5) * g).log_softmax(1)[:, 0].neg().mean()

    return descent(model, loss)


@BOTH
def test_inputs_that_are_made_of_gradients_are_judged_like_outputs(options, tmp_path):
    clean, fault = compared(tmp_path, adversarial, "reference", "clean", "fault", steps=2, **options)
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.stage == "input" and "0.5 for the reference's 1.5" in cause_of(fault).sentence


# -- models that return other tensors of the same computation -------------------------------------------------------


class Scores(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.returns, self.body, self.head = returns, nn.Linear(5, 12), nn.Linear(12, 4)

    def forward(self, x, labels, mask):
        scores = self.head(self.body(x).tanh())
        if self.returns == "scores":
            return scores
        labels = labels.masked_fill(~mask, -100)
        return f.cross_entropy(scores, labels) + 0.01 * scores.logsumexp(-1).square().mean()


def language(way):
    model = Scores("loss" if way == "reference" else "scores")

    def loss(rng):
        x, labels = tensor(rng, 8, 5), torch.randint(0, 4, (8,), generator=rng)
        mask = torch.rand(8, generator=rng) < 0.7
        if way == "reference":
            return model(x, labels, mask)
        scores = model(x, labels, mask)
        each = f.cross_entropy(scores, torch.where(mask, labels, torch.full_like(labels, -100)), reduction="none")
        size = scores.logsumexp(1) ** 2
        return (each * mask).sum() / mask.sum() + (0.1 if way == "fault" else 0.01) * size.mean()

    return descent(model, loss)


class Field(nn.Module):
    def __init__(self, joined):
        super().__init__()
        self.joined, self.body, self.colour, self.density = joined, nn.Linear(5, 12), nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x):
        hidden = self.body(x).relu()
        colour, density = self.colour(hidden).sigmoid(), self.density(hidden)
        return torch.cat([colour, density], -1) if self.joined else (colour, density)


def rendered(way):
    model = Field(way != "reference")

    def loss(rng):
        x, target = tensor(rng, 6, 4, 5), tensor(rng, 6, 3)
        if way == "reference":
            colour, density = model(x)
        else:
            out = model(x)
            colour, density = out[..., :3], out[..., 3:]
        density = density if way == "fault" else density.relu()
        seen = 1 - torch.exp(-density)
        return (((seen * colour).sum(1) - target) ** 2).mean()

    return descent(model, loss)


@BOTH
@pytest.mark.parametrize(
    ("train", "words"),
    [(language, "0.1 for the reference's 0.01"), (rendered, "relu")],
    ids=["its loss or scores", "joined outputs"],
)
def test_a_model_may_return_other_tensors_of_the_same_computation(train, words, options, tmp_path):
    clean, fault = compared(tmp_path, train, "reference", "clean", "fault", steps=2, **options)
    assert clean.passed, clean.first_diff.message
    assert placed(fault) == (0, "loss", "(loop)")
    if not options:
        assert cause_of(fault).proven and words in cause_of(fault).sentence.lower()


def test_outputs_of_other_shapes_that_nobody_computes_are_shown(tmp_path):
    def train(way):
        model = nn.Linear(5, 4 if way == "reference" else 3)
        return descent(model, lambda rng: model(tensor(rng, 6, 5)).square().mean())

    (report,) = compared(tmp_path, train, "reference", "other")
    assert not report.passed


# -- several losses -------------------------------------------------------------------------------------------------


def losses(way):
    """The critic's loss comes first, then the actor's."""
    actor, critic = (
        nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)),
        nn.ModuleList([nn.Linear(7, 1), nn.Linear(7, 1)]),
    )
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    rng = yield model, optimizer
    while True:
        x, action, reward = tensor(rng, 6, 5), tensor(rng, 6, 2), tensor(rng, 6, 1)
        first = sum(f.mse_loss(q(torch.cat([x, action], 1)), reward) for q in critic)
        optimizer.zero_grad()
        first.backward()
        values = [q(torch.cat([x, actor(x)], 1)) for q in critic]
        loss = -(values[0] if way == "fault" else torch.min(*values)).mean()
        loss.backward()
        optimizer.step()
        rng = yield loss


def test_a_fault_in_the_second_loss_is_named(tmp_path):
    (fault,) = compared(tmp_path, losses, "reference", "fault", steps=2)
    assert fault.first_diff.step == 0 and cause_of(fault).proven
    assert "the smaller of" in cause_of(fault).sentence


# -- numbers and operands -------------------------------------------------------------------------------------------


class Squashed(nn.Module):
    """An action and its log-probability, corrected for the tanh; only the loss takes the second output."""

    def __init__(self, way):
        super().__init__()
        self.way, self.net, self.value = way, nn.Linear(5, 4), nn.Linear(2, 1)

    def forward(self, x, noise):
        mean, log_std = self.net(x).chunk(2, -1)
        action = torch.tanh(mean + log_std.exp() * noise)
        log_prob = -0.5 * noise**2 - log_std
        if self.way == "uncorrected":
            return self.value(action), log_prob.sum(-1)
        return self.value(action), (
            log_prob - torch.log(1 - action**2 + (1e-3 if self.way == "epsilon" else 1e-6))
        ).sum(-1)


def squashed(way):
    model = Squashed(way)

    def loss(rng):
        value, log_prob = model(tensor(rng, 16, 5), 0.5 * tensor(rng, 16, 2))
        return (0.2 * log_prob - value.squeeze(1)).mean()

    return descent(model, loss)


def test_an_output_is_not_excused_by_what_depends_on_another_one(tmp_path):
    epsilon, uncorrected = compared(tmp_path, squashed, "reference", "epsilon", "uncorrected", steps=2)
    assert placed(epsilon)[1] == "forward" and epsilon.first_diff.slot == "output.1"
    assert cause_of(epsilon).proven and "is 0.001 for the reference's 1e-06" in cause_of(epsilon).sentence
    assert uncorrected.first_diff.slot == "output.1"
    assert "is multiplied" not in cause_of(uncorrected).sentence  # by a number next to zero


def encoded(way):
    net = nn.Linear(13, 4)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net
            self.register_buffer("steps", 2.0 ** torch.arange(3).float(), persistent=False)

        def forward(self, x):
            if way == "reference":
                turned = x[..., None] * self.steps
                return self.net(torch.cat([x, turned.sin().flatten(1), turned.cos().flatten(1)], -1)[:, :13])
            turned = torch.stack([x, x * 2, x * 4], -1)
            return self.net(torch.cat([x, turned.cos().flatten(1), turned.sin().flatten(1)], -1)[:, :13])

    model = Encoder()
    return descent(model, lambda rng: model(tensor(rng, 6, 2)).square().mean())


def test_a_product_with_a_number_is_not_held_against_one_with_a_tensor(tmp_path):
    (fault,) = compared(tmp_path, encoded, "reference", "fault")
    assert "though the same goes in" not in str(cause_of(fault))


def test_a_loss_that_overflows_on_one_side_is_shown(tmp_path):
    def train(way):
        model = nn.Linear(5, 3)
        factor = 1e30 if way == "fault" else 1.0
        return descent(model, lambda rng: (model(tensor(rng, 6, 5)) * factor).square().mean().sqrt().exp())

    (fault,) = compared(tmp_path, train, "reference", "fault")
    assert fault.first_diff.step == 0


# -- inner loops ----------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.weight, self.bias = (
            nn.Linear(5, 8),
            nn.Parameter(torch.randn(3, 8)),
            nn.Parameter(torch.zeros(3)),
        )

    def forward(self, x):
        return self.body(x).tanh()


def adapting(way):
    """Two inner steps on a head; the second one's gradients follow from the first one's weights."""
    model = Adapted()

    def loss(rng):
        x, y, query, target = tensor(rng, 6, 5), tensor(rng, 6, 3), tensor(rng, 6, 5), tensor(rng, 6, 3)
        w, b = model.weight, model.bias
        for _ in range(2):
            value = (f.linear(model(x), w, b) - y).square().mean()
            grads = torch.autograd.grad(value * (18 if way == "summed" else 1), [w, b], create_graph=True)
            if way == "reference":
                w, b = (p - 0.2 * g for p, g in zip((w, b), grads))
                continue
            grads = [g.clamp(-0.05, 0.05) for g in grads] if way == "clipped" else grads
            w, b = w + (0.2 if way == "ascends" else -0.2) * grads[0], b - 0.2 * grads[1]
        return (f.linear(model(query), w, b) - target).square().mean()

    return descent(model, loss)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ascends", "the sign of"),
        ("clipped", "clamp() in the loop is left out"),
        ("summed", "is 18 for the reference's 1"),
    ],
)
def test_what_an_inner_loop_does_otherwise_is_named(fault, words, tmp_path):
    clean, report = compared(tmp_path, adapting, "reference", "clean", fault, steps=1)
    assert clean.passed, clean.first_diff.message
    assert report.first_diff.stage == "loss"
    assert cause_of(report).proven and words in cause_of(report).sentence


# -- a loss behind another optimizer's step ------------------------------------------------------------------------


def temperature(way):
    """Entropy as in SAC: the loss of the temperature is computed when the policy's optimizer has stepped."""
    model = nn.ModuleDict({"policy": nn.Linear(4, 3)})
    model.log_alpha = nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD(model["policy"].parameters(), 0.1), torch.optim.SGD([model.log_alpha], 0.1)]
    rng = yield model, optimizers
    while True:
        entropy = model["policy"](tensor(rng, 8, 4)).log_softmax(1).square().sum(1)
        loss = (model.log_alpha.exp().detach() * entropy).mean()
        loss.backward()
        optimizers[0].step()
        of_alpha = model.log_alpha * (entropy - 2.0).detach().mean()
        (of_alpha if way == "fault" else -of_alpha).backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        rng = yield loss


def test_a_loss_behind_the_step_of_another_optimizer_is_traced(tmp_path):
    clean, fault = compared(tmp_path, temperature, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[:2] == (0, "grad")
    assert cause_of(fault).proven and "the sign of what mul() in the loop gives is flipped" in cause_of(fault).sentence


# -- weights that are moved along the gradient of a loss that differs ----------------------------------------------


def moved(way):
    """Sharpness-aware minimisation, of which the loss has another weight: it comes before the weights that it moves."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    weights, share = list(model.parameters()), 0.1 if way == "fault" else 0.5
    while True:
        x, y = tensor(rng, 8, 6), tensor(rng, 8, 3)
        before = [w.detach().clone() for w in weights]
        for again in (False, True):
            optimizer.zero_grad()
            out = model(x)
            loss = (out - y).square().mean() + share * out.abs().mean()
            loss.backward()
            with torch.no_grad():
                for w, old in zip(weights, before):
                    w.copy_(old if again else w + 0.05 * w.grad)
        optimizer.step()
        rng = yield loss


def test_the_loss_of_a_first_backward_comes_before_the_weights_that_it_moves(tmp_path):
    clean, fault = compared(tmp_path, moved, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[:2] == (0, "backward")
    assert cause_of(fault).proven and "0.1 for the reference's 0.5" in cause_of(fault).sentence


# -- a policy that is still equal to its reference -----------------------------------------------------------------


def preferring(way):
    """Preferences: at first the log-ratios of both models are zero, whatever they are summed over."""
    policy = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    model = nn.ModuleDict({"policy": policy, "frozen": copy.deepcopy(policy).requires_grad_(False)})

    def score(ids, frozen):
        values = (
            model["frozen" if frozen else "policy"](ids).log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        )
        places = torch.arange(1, ids.shape[1])
        keep = (
            (places < ids[:, :1] + 2).float() if way == "mask" else ((places < ids[:, :1] + 2) & (places >= 2)).float()
        )
        total = (values * keep).sum(1)
        return total / keep.sum(1) if way == "mean" else total

    def loss(rng):
        good, bad = torch.randint(1, 9, (2, 4, 7), generator=rng)
        if way == "reference":
            ratios = (score(good, False) - score(bad, False)) - (score(good, True) - score(bad, True))
            return -f.logsigmoid(0.1 * ratios).mean()
        anchors = [score(ids, True) for ids in (good, bad)]
        ratios = [0.1 * (score(ids, False) - anchor) for ids, anchor in zip((good, bad), anchors)]
        return f.softplus(ratios[1] - ratios[0]).mean()

    return descent(model, loss)


@pytest.mark.parametrize(("fault", "word"), [("mask", "ge()"), ("mean", "div()")])
def test_a_loss_of_two_models_that_are_equal_is_told_by_its_slopes(fault, word, tmp_path):
    clean, fault = compared(tmp_path, preferring, "reference", "clean", fault)
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[:2] == (0, "backward")
    assert cause_of(fault).kind != "unknown" and word in cause_of(fault).sentence, fault.first_diff.message


# -- distances that two outputs of a model are ---------------------------------------------------------------------


class Triples(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.inner, self.way = nn.Linear(5, 8), way

    def forward(self, x, others):
        x, others = self.inner(x), self.inner(others)
        if self.way == "clean":
            return x.abs().sum(1), others.abs().sum(2)
        p = 2 if self.way == "fault" else 1
        return x.norm(p=p, dim=1), others.norm(p=p, dim=2)


def triples(way):
    model = Triples(way)

    def loss(rng):
        good, bad = model(tensor(rng, 6, 5), tensor(rng, 6, 3, 5))
        return f.softplus(good - 4).mean() + f.softplus(4 - bad).mean()

    return descent(model, loss)


def test_outputs_that_move_the_loss_to_either_side_are_no_other_form(tmp_path):
    clean, fault = compared(tmp_path, triples, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.stage == "forward"
    assert "norm(p=2" in cause_of(fault).sentence and "norm(p=1" in cause_of(fault).sentence


# -- one function of logits, another one of logarithms -------------------------------------------------------------


def scored(way):
    """A fault of the model is no fault of the loss, which two authors write with another function."""
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU() if way != "fault" else nn.Tanh(), nn.Linear(8, 3))

    def loss(rng):
        x, y = tensor(rng, 6, 5), torch.randint(3, (6,), generator=rng)
        return f.nll_loss(model(x).log_softmax(1), y) if way == "reference" else f.cross_entropy(model(x), y)

    return descent(model, loss)


def test_a_loss_function_of_another_form_is_no_second_fault(tmp_path):
    clean, fault = compared(tmp_path, scored, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.stage == "forward"
    assert not fault.independent


# -- a term that one mask keeps ------------------------------------------------------------------------------------


def censored(way):
    """A mask of one column that is shifted along it keeps nothing, as if its term were missing."""
    model = nn.Linear(5, 4)

    def loss(rng):
        x, index = tensor(rng, 12, 5), torch.randint(4, (12, 1), generator=rng)
        event = (torch.rand(12, 1, generator=rng) < 0.6).float()
        hazard = model(x).sigmoid().gather(1, index)
        dead, alive = -hazard.log(), -(1 - hazard).log()
        return (event * dead).mean() if way == "fault" else (event * dead + (1 - event) * alive).mean()

    return descent(model, loss)


def test_a_mask_of_one_column_is_not_shifted(tmp_path):
    clean, fault = compared(tmp_path, censored, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert cause_of(fault).proven and "shifted" not in cause_of(fault).sentence
    assert "not added" in cause_of(fault).sentence


# -- gradients that only one loop projects -------------------------------------------------------------------------


def projected(way):
    """A dictionary of unit atoms: what a gradient has along its atom is taken out before the step."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng, atoms = (yield model, optimizer), model[2].weight
    while True:
        x = tensor(rng, 8, 6)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if way != "fault":
            with torch.no_grad():
                atoms.grad -= (atoms.grad * atoms).sum(0, keepdim=True) * atoms
        optimizer.step()
        rng = yield loss


def test_a_projection_of_one_loop_alone_is_named(tmp_path):
    clean, fault = compared(tmp_path, projected, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert placed(fault) == (0, "grad", "2")
    assert not cause_of(fault).proven and cause_of(fault).kind == "gradient_code"
    assert (
        "only the reference changes this gradient" in cause_of(fault).sentence and "sub()" in cause_of(fault).sentence
    )


# -- masks that one loop writes the other way round ------------------------------------------------------------------


class Normalised(nn.Module):
    """Frames less their mean: of the valid frames, which one author masks in, and the other one masks out."""

    def __init__(self, way):
        super().__init__()
        self.way, self.out = way, nn.Linear(6, 3)

    def forward(self, x, count):
        place = torch.arange(x.shape[1])
        if self.way == "reference":
            pad = place[None] >= count[:, None]
            x = x.masked_fill(pad[..., None], 0.0)
            x = x - x.sum(1, keepdim=True) / count[:, None, None]
            return self.out(x.masked_fill(pad[..., None], 0.0))
        valid = (place[None] < count[:, None]).float().unsqueeze(-1)
        x = x * valid
        mean = x.mean(1, keepdim=True) if self.way == "fault" else x.sum(1, keepdim=True) / count[:, None, None]
        return self.out((x - mean) * valid)


def masked(way):
    model = Normalised(way)
    return descent(model, lambda rng: model(tensor(rng, 4, 7, 6), torch.tensor([7, 5, 4, 6])).square().mean())


def test_an_inverted_mask_is_no_difference_of_the_code(tmp_path):
    clean, fault = compared(tmp_path, masked, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert "mean(" in cause_of(fault).sentence and "sum(" in cause_of(fault).sentence
    assert "<" not in cause_of(fault).sentence and "lt()" not in cause_of(fault).sentence, cause_of(fault).sentence


# -- a scale that zeros hide ----------------------------------------------------------------------------------------


class Low(nn.Module):
    """A low rank beside a frozen layer; its second matrix begins at zero, so that all gradients show one scale."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.base = scale, nn.Linear(6, 5).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.zeros(2, 5))

    def forward(self, x):
        return self.base(x) + (x @ self.a @ self.b) * self.scale


def adapted_only(way):
    model = Low(8.0 if way == "fault" else 2.0)
    return descent(model, lambda rng: (model(tensor(rng, 8, 6)) - 1).square().mean())


def test_a_scale_of_zeros_is_named_where_all_gradients_have_it(tmp_path):
    clean, fault = compared(tmp_path, adapted_only, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    cause = cause_of(fault)
    assert cause.proven and "scales by 8 for the reference's 2" in cause.sentence, cause
    assert cause.values == Both(2.0, 8.0) and "self.scale" in cause.lines.candidate.code


# -- shapes that are written otherwise --------------------------------------------------------------------------------


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(1, 4)

    def forward(self, places):
        return self.out(torch.sin(places.unsqueeze(-1).float()))


def packed(way):
    """Places of packed tokens are viewed as rows: of floats with both sizes, or of integers with -1 for a size."""
    model = Angles()

    def places():
        if way == "reference":
            return torch.tensor([*range(5), *range(7)]).float().view(2, 6)
        return torch.tensor([*range(12)] if way == "fault" else [*range(5), *range(7)]).view(-1, 6)

    return descent(model, lambda rng: (model(places()) - tensor(rng, 2, 6, 4)).square().mean())


def test_a_size_that_is_not_written_is_no_other_argument(tmp_path):
    clean, fault = compared(tmp_path, packed, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert "view(2, 6) against" not in cause_of(fault).sentence, cause_of(fault)


# -- a loss that is divided after its sum ------------------------------------------------------------------------------


def summed(way):
    """A sum over the labels that count, divided in the loop, is the mean: also where the places are wrong before."""
    model = nn.Embedding(12, 3)

    def loss(rng):
        places = torch.arange(8) + (way == "fault")
        y = torch.randint(3, (8,), generator=rng).masked_fill(torch.arange(8) > 4, -100)
        if way == "reference":
            return f.cross_entropy(model(places), y)
        return f.cross_entropy(model(places), y, reduction="sum") / (y != -100).sum()

    return descent(model, loss)


def test_a_sum_that_the_loop_divides_is_no_second_fault(tmp_path):
    clean, fault = compared(tmp_path, summed, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert fault.first_diff.stage in ("input", "forward")
    assert not fault.independent, [str(each.cause) for each in fault.independent]
