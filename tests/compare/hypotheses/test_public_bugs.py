"""Faults that people reported of their trainings, each in a few lines."""

from functools import partial

import numpy as np
import pytest
import torch

import padiff

F = torch.nn.functional


def recorded(models, optimizer, losses, is_whole=True):
    """Return the run of a training on losses, each of which is computed when it is asked for."""
    with padiff.record(models, optimizer=optimizer) as rec:
        for value in losses:
            if is_whole:
                value.backward()
            rec.log_loss(value.detach())
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


def trained(loss, rate=0.1, second=False):
    torch.manual_seed(0)
    net, other = (
        torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4)) for _ in range(2)
    )
    rng, optimizer = np.random.default_rng(3), torch.optim.SGD(net.parameters(), rate)

    def losses():
        for _ in range(2):
            x = torch.tensor(rng.normal(size=(12, 6)).astype("float32"))
            y = torch.tensor((rng.random((12, 1)) < 0.4).astype("float32"))
            yield loss(net, other, x, y)

    return recorded({"net": net, "other": other} if second else net, optimizer, losses())


def contrast(divided):
    def loss(net, other, x, y):
        z = net(x)
        one, rest = (z[:4] * z[4:8]).sum(1, keepdim=True), z[:4] @ z[8:].T
        logits = torch.cat([one, rest], 1) / 0.2 if divided else torch.cat([one, rest / 0.2], 1)
        return F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))

    return loss


def focal(power):
    def loss(net, other, x, y):
        p = net(x)[:, :1].sigmoid()
        weight = (1 - p) ** 2 if power else (1 - p) * 2
        return (-y * 0.25 * weight * p.log() - (1 - y) * 0.75 * p**2 * (1 - p).log()).mean()

    return loss


def distilled(of_teacher):
    def loss(net, other, x, y):
        out = net(x)
        with torch.no_grad():
            teacher = other(x)
        given = teacher if of_teacher else out
        soft = F.kl_div((given / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
        return 4 * soft + F.cross_entropy(out, x[:, :4].argmax(1))

    return loss


def divergence(by_hand):
    def loss(net, other, x, y):
        targets = x[:, :4].softmax(1)
        if by_hand:
            return (targets * (targets.log() - net(x).log_softmax(1))).mean()
        return F.kl_div(net(x).softmax(1), targets, reduction="none").mean()

    return loss


def adversarial(cut):
    def loss(net, other, x, y):
        fake = net(x)
        given = torch.cat([fake, x[:, :2]], 1)
        score = other(given.detach() if cut else given)
        return ((score - 1) ** 2).mean() + (fake - 0.5).abs().mean()

    return loss


def masked(kept):
    def loss(net, other, x, y):
        out = net(x)
        each = (out - x[:, :4]).abs().sum(1)
        mask = torch.from_numpy((np.arange(12) < kept).astype("float32"))
        return out.square().mean() + 0.5 * (each * mask).mean()

    return loss


def ramped(weight):
    def loss(net, other, x, y):
        out = net(x)
        return out.square().mean() + weight * (out - x[:, :4]).abs().sum(1).mean()

    return loss


def weighted(reduced):
    def loss(net, other, x, y):
        out = net(x)
        return out.square().mean() + 0.1 * reduced(out * torch.linspace(1.0, 2.0, 4)).mean()

    return loss


def positions(first):
    def loss(net, other, x, y):
        return net(x * torch.linspace(first, 2.0, 6)[None]).square().mean()

    return loss


@pytest.mark.parametrize(
    ("losses", "second", "kind", "words"),
    [
        ((contrast(True), contrast(False)), False, "scale", "is applied to all but one part: what sum() in the loop"),
        (
            (focal(True), focal(False)),
            False,
            "power",
            "the candidate multiplies by 2, the reference takes a power of 2",
        ),
        ((divergence(True), divergence(False)), False, "log_softmax_missing", "the divergence is of probabilities"),
        ((distilled(False), distilled(True)), True, "loss_input", "as the reference does: it is given other tensors"),
        (
            (ramped(0.0), ramped(0.1)),
            False,
            "loss_term_weight",
            "(the second mean() in the loop) is 0.1 for the reference's 0",
        ),
        ((masked(0), masked(12)), False, "loss_input", "as the candidate does: it is given other tensors"),
        (
            (weighted(lambda each: each.sum(1)), weighted(lambda each: each.mean(1))),
            False,
            "reduction",
            "the mean for the reference's sum (sum() in the loop)",
        ),
        (
            (weighted(lambda each: each.sum(1)), weighted(lambda each: each.sum())),
            False,
            "reduction",
            "sum() in the loop takes 48 numbers together for the reference's 4",
        ),
        ((positions(1.0), positions(0.5)), False, "other_numbers", "what linspace() in the loop gives has other"),
    ],
)
def test_a_fault_in_a_loss_is_proven(losses, second, kind, words):
    reference, candidate = (trained(loss, second=second) for loss in losses)
    cause = padiff.compare_runs(reference, candidate).first_diff.cause
    assert (cause.kind, cause.proven) == (kind, True), cause.text
    assert words in cause.sentence


def clipped(around):
    def loss(net, other, x, y):
        value, old = net(x)[:, 0], other(x)[:, 0].detach()
        near = old + ((value - old) if around else value).clamp(-0.9, 0.9)
        return torch.maximum((value - y[:, 0]) ** 2, (near - y[:, 0]) ** 2).mean()

    return loss


def surrogate(axis):
    def loss(net, other, x, y):
        new, old = net(x).log_softmax(1), other(x).log_softmax(1)[:, 0].detach()
        chosen = new * torch.tensor([1.0, 0.0, 0.0, 0.0])
        ratio = ((chosen.sum() if axis is None else chosen.sum(axis)) - old).exp()
        return torch.maximum(-x[:, 0] * ratio, -x[:, 0] * ratio.clamp(0.8, 1.2)).mean() + 0.1 * new.exp().mean()

    return loss


@pytest.mark.parametrize("losses", [(clipped(True), clipped(False)), (surrogate(1), surrogate(None))])
def test_what_a_choice_hides_is_not_called_proven(losses):
    """Both sides choose, and any number beyond a limit gives what the candidate's code gives."""
    cause = padiff.compare_runs(*(trained(loss, second=True) for loss in losses)).first_diff.cause
    assert cause is None or not cause.proven, cause.text


def linear(loss, steps, is_whole=True):
    """Return the run of a linear layer; ``loss(net, step)`` has a backward where the training is whole."""
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    return recorded(net, optimizer, (loss(net, step) for step in range(steps)), is_whole)


def test_a_step_without_a_backward_is_named():
    runs = (linear(lambda net, _: net(torch.ones(3, 6)).square().mean(), 2, is_whole) for is_whole in (True, False))
    cause = padiff.compare_runs(*runs).first_diff.cause
    assert cause.proven and "the candidate's loop runs no backward" in cause.sentence, cause.text


@pytest.mark.parametrize(("limited", "side"), [((True, False), "reference"), ((False, True), "candidate")])
def test_a_limit_that_has_an_effect_after_the_steps_whose_code_is_known_is_named(limited, side):
    def loss(net, step, is_limited):
        x = torch.tensor(np.random.default_rng(step).normal(size=(8, 6)).astype("float32"))
        out = net(x * (9.0 if step == 4 else 1.0))
        return (out.clamp(-3.0, 3.0) if is_limited else out).square().mean()

    runs = (linear(partial(loss, is_limited=each), 5) for each in limited)
    first = padiff.compare_runs(*runs).first_diff
    assert first.step == 4 and not first.cause.proven, first.message
    assert f"only the {side} limits what `(root)` gives" in first.cause.sentence, first.message


def test_a_detach_before_another_model_is_named_where_its_twin_has_one_elsewhere():
    first = padiff.compare_runs(
        trained(adversarial(False), second=True), trained(adversarial(True), second=True)
    ).first_diff
    assert first.stage == "backward" and first.cause.kind == "detached", first.message
    assert "detach() in `(loop)` of the candidate" in first.cause.sentence


def test_a_tiny_decay_that_only_small_gradients_show_is_no_difference():
    def run(scale):
        torch.manual_seed(0)
        net = torch.nn.Linear(6, 4)
        optimizer = torch.optim.RMSprop(net.parameters(), 1e-4, weight_decay=1e-8, momentum=0.9)
        with padiff.record(net, optimizer=optimizer) as rec:
            for seed in range(3):
                x = torch.tensor(np.random.default_rng(seed).normal(size=(8, 6)).astype("float32"))
                (net(x) ** 2).mean().backward()
                for parameter in net.parameters():
                    parameter.grad *= scale
                optimizer.step()
                optimizer.zero_grad()
                rec.try_dump()
        return rec.run

    report = padiff.compare_runs(run(1.0), run(1e-3))
    assert report.first_diff.stage == "grad"
    assert not any("decay" in str(fault.cause) for fault in (report.first_diff, *report.independent))


def test_a_part_of_a_table_is_named_by_what_picks_it():
    class Positioned(torch.nn.Module):
        def __init__(self, of_one):
            super().__init__()
            torch.manual_seed(0)
            self.of_one, self.into, self.out = of_one, torch.nn.Linear(3, 8), torch.nn.Linear(8, 2)
            self.register_buffer("table", torch.randn(1, 9, 8))

        def forward(self, x):
            x = self.into(x)
            return self.out(torch.tanh(x + (self.table[:, x.shape[1]] if self.of_one else self.table[:, : x.shape[1]])))

    def run(of_one):
        net = Positioned(of_one)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with padiff.record(net, optimizer=optimizer) as rec:
            net(torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))).square().mean().backward()
            optimizer.step()
            rec.try_dump()
        return rec.run

    cause = padiff.compare_runs(run(False), run(True)).first_diff.cause
    assert "for the reference's [':', ':5'] (getitem()" in cause.sentence, cause.text
