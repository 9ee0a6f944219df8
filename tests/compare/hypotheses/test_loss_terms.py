"""Losses of several terms, written by hand: a term that is missing, added, weighed or divided differently."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from kit.frameworks import PADDLE, TORCH
from kit.nets import learn

import padiff

ROWS, INPUTS, LATENT, COLUMNS = 16, 12, 5, 10
RNG = np.random.default_rng(3)
X, Y = RNG.uniform(size=(ROWS, INPUTS)), RNG.normal(size=(ROWS, COLUMNS))
NOISE = RNG.normal(size=(ROWS, LATENT))


def functional(kit):
    if kit.name == "torch":
        import torch.nn.functional as module
    else:
        import paddle.nn.functional as module
    return module


def plain(kit):
    """A model that gives one tensor of 10 columns."""
    return kit.Sequential(kit.Linear(INPUTS, 16), kit.Tanh(), kit.Linear(16, COLUMNS))


def autoencoder(kit):
    """A model that uses two of its three outputs itself."""

    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = kit.Linear(INPUTS, 2 * LATENT), kit.Linear(LATENT, INPUTS)

        def forward(self, x, noise):
            z = self.encoder(x)
            mean, logs = z[:, :LATENT], z[:, LATENT:]
            return self.decoder(mean + noise * (0.5 * logs).exp()), mean, logs

    return Net()


def towers(kit):
    """A model of two towers, whose outputs are compared with each other."""

    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.image, self.text = kit.Linear(INPUTS, LATENT), kit.Linear(COLUMNS, LATENT)

        def forward(self, x, y):
            return self.image(x), self.text(y)

    return Net()


def run(kit, make, inputs, loss, log=True, **options):
    model, rng, turned = make(kit), np.random.default_rng(0), kit.name == "paddle"
    state = {}
    for name, value in kit.state(model).items():
        shape = np.shape(value)[::-1] if turned else np.shape(value)
        values = rng.normal(0, 0.4, shape).astype("float32")
        state[name] = values.T if turned else values
    kit.load(model, state)
    optimizer = kit.sgd(model.parameters(), 0.05)
    tensors = [kit.tensor(values) for values in inputs]
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for number in range(2):
            outputs = model(*tensors)
            value = loss(kit, model, outputs) if isinstance(loss, Decayed) else loss(kit, outputs, number)
            learn(kit, optimizer, value, rec, log)
    return rec.run


def kl(mean, logs):
    return -0.5 * (1 + logs - mean**2 - logs.exp())


def kl_otherwise(mean, logs):
    return (mean * mean + logs.exp() - 1 - logs) / 2


def of_targets(kit, z, by):
    return by(z - kit.tensor(Y))


def elbo(weight, divided=lambda k: k.sum(1).mean(), term=kl):
    def loss(kit, outputs, number):
        made, mean, logs = outputs
        return functional(kit).mse_loss(made, kit.tensor(X)) + weight * divided(term(mean, logs))

    return loss


def elbo_by_hand(weight):
    def loss(kit, outputs, number):
        made, mean, logs = outputs
        return weight * kl_otherwise(mean, logs).sum(-1).mean() + ((kit.tensor(X) - made) ** 2).mean()

    return loss


def with_penalty(weight, penalty=lambda z: z.exp().mean()):
    return lambda kit, z, number: of_targets(kit, z, lambda e: (e**2).mean()) + weight * penalty(z)


class Decayed(NamedTuple):
    """A loss with the squares of the parameters, as their norms or as sums, added in place where that is possible."""

    weight: float
    norms: bool

    def __call__(self, kit, model, z):
        loss = of_targets(kit, z, lambda e: (e**2).mean())
        squares = [p.norm() ** 2 if self.norms else (p * p).sum() for p in model.parameters()]
        if self.norms:
            loss += self.weight * sum(squares)
            return loss
        return loss + self.weight * sum(squares)


def contrastive(both):
    def loss(kit, outputs, number):
        image, text = outputs
        scores, labels = image @ text.T, kit.tensor(np.arange(ROWS), "int64")
        entropy = functional(kit).cross_entropy
        return (entropy(scores, labels) + entropy(scores.T, labels)) / 2 if both else entropy(scores, labels)

    return loss


def by(reduced):
    return lambda kit, z, number: of_targets(kit, z, lambda e: reduced(e**2))


OF_ONE, OF_LATENTS, OF_TOWERS = (plain, (X,)), (autoencoder, (X, NOISE)), (towers, (X, Y))

# The model, both losses, the kind of the cause, and words of its sentence.
FAULTS = {
    "a weight that is as a mean over samples": (
        OF_ONE, with_penalty(0.01), with_penalty(0.1), "loss_term_weight", "is 0.1 for the reference's 0.01",
    ),
    "a weight of what the model uses itself": (
        OF_LATENTS, elbo(0.4), elbo(0.25), "loss_term_weight", "is 0.25 for the reference's 0.4",
    ),
    "a weight, in other words": (
        OF_LATENTS, elbo(0.4), elbo_by_hand(0.25), "loss_term_weight", "is 0.25 for the reference's 0.4",
    ),
    "a mean for a sum of each sample": (
        OF_LATENTS, elbo(1.0), elbo(1.0, lambda k: k.mean()), "reduction",
        "is divided by all 80 places, in the reference by the 16 samples of the batch",
    ),
    "no mean over samples": (
        OF_LATENTS, elbo(0.1), elbo(0.1, lambda k: k.sum()), "reduction",
        "is the sum for the mean: it is not divided by the 16 samples of the batch",
    ),
    "a term left out": (OF_LATENTS, elbo(0.4), elbo(0.0), "loss_term", "0 for the reference's 0.4|does not add"),
    "one half of a symmetric loss": (
        OF_TOWERS, contrastive(True), contrastive(False), "loss_term_missing",
        "the candidate does not add the second cross_entropy() in the loop to its loss",
    ),
    "a term too many": (
        OF_TOWERS, contrastive(False), contrastive(True), "loss_term_added",
        "the reference does not add the second cross_entropy() in the loop to its loss",
    ),
    "a mean over all places": (
        OF_ONE, by(lambda e: e.sum() / ROWS), by(lambda e: e.mean()), "reduction",
        "is divided by all 160 places, in the reference by the 16 samples of the batch",
    ),
    "a penalty's sign": (
        OF_ONE, with_penalty(0.2), with_penalty(-0.2), "loss_term_weight", "the sign of a term of the loss",
    ),
    "a decay that the loss has": (
        OF_ONE, Decayed(0.01, False), Decayed(0.02, True), "loss_term_weight", "is 0.02 for the reference's 0.01",
    ),
    "a square for an absolute error": (
        OF_ONE, by(lambda e: e.mean()), lambda kit, z, number: of_targets(kit, z, lambda e: e.abs().mean()),
        "loss_function", "absolute error (L1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("log", [True, False], ids=["logged", "unlogged"])
@pytest.mark.parametrize("name", FAULTS)
def test_the_term_and_the_difference_are_proven(kit, name, log):
    (make, inputs), right, wrong, kind, words = FAULTS[name]
    reference = run(TORCH, make, inputs, right, log)
    report = padiff.compare_runs(reference, run(kit, make, inputs, wrong, log))
    first = report.first_diff
    assert (first.step, first.stage) == (0, "loss"), first.message
    assert first.cause.proven and first.cause.kind.startswith(kind), first.message
    assert any(each in first.cause.sentence for each in words.split("|")), first.message


TWINS = {
    "a divergence in other words": (OF_LATENTS, elbo(0.4), elbo_by_hand(0.4)),
    "a mean as a sum": (OF_ONE, by(lambda e: e.mean()), by(lambda e: e.sum() / 160)),
    "a weight inside of a mean": (
        OF_ONE, with_penalty(0.1), with_penalty(1.0, lambda z: (0.1 * z.exp()).mean()),
    ),
    "a decay that the loss has, added in place": (OF_ONE, Decayed(0.01, False), Decayed(0.01, True)),
    "terms in another order": (
        OF_TOWERS, contrastive(True),
        lambda kit, outputs, number: contrastive(True)(kit, outputs[::-1], number),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_the_same_loss_in_other_words_matches(kit, name):
    (make, inputs), one, other = TWINS[name]
    reference = run(TORCH, make, inputs, one)
    report = padiff.compare_runs(reference, run(kit, make, inputs, other))
    assert report.passed, report.first_diff


def test_three_numbers_that_differ_are_all_read_from_the_code():
    def one(kit, z, number):
        return with_penalty(0.1)(kit, z, number) + 0.3 * z.abs().mean() + 0.2 * z.sigmoid().mean()

    def other(kit, z, number):
        return with_penalty(0.2)(kit, z, number) + 0.4 * z.abs().mean() + 0.1 * z.sigmoid().mean()

    reference = run(TORCH, *OF_ONE, one)
    first = padiff.compare_runs(reference, run(PADDLE, *OF_ONE, other)).first_diff
    assert first.stage == "loss" and first.cause.proven, first.message
    for numbers in ("0.2 for the reference's 0.1", "0.4 for the reference's 0.3", "0.1 for the reference's 0.2"):
        assert numbers in first.cause.sentence, first.message


def test_a_loss_that_cannot_be_computed_again_is_explained_by_the_other_sides_terms():
    def unknown(kit, z, number):
        # A function that padiff does not compute.
        return with_penalty(0.1, lambda z: functional(kit).selu(z).mean() * 0 + z.exp().mean())(kit, z, number)

    reference = run(TORCH, *OF_ONE, with_penalty(0.01))
    first = padiff.compare_runs(reference, run(TORCH, *OF_ONE, unknown)).first_diff
    assert first.cause.proven and "0.1 for the reference's 0.01" in first.cause.sentence, first.message


def test_an_edit_of_a_call_that_the_candidate_does_not_make_is_not_proven():
    """Where the term can't be taken apart, softmax over another axis in the second call gives the same numbers."""

    def one(kit, outputs, number):
        image, text = outputs
        scores, labels = image @ text.T, kit.tensor(np.arange(ROWS), "int64")
        entropy = functional(kit).cross_entropy
        return (entropy(scores, labels) * entropy(scores.T, labels)) ** 0.5

    def other(kit, outputs, number):
        image, text = outputs
        return functional(kit).cross_entropy(image @ text.T, kit.tensor(np.arange(ROWS), "int64"))

    first = padiff.compare_runs(run(TORCH, *OF_TOWERS, one), run(TORCH, *OF_TOWERS, other)).first_diff
    assert "softmax" not in first.cause.sentence or not first.cause.proven, first.message


def clipped(low, high):
    """The loss of PPO, whose ratio has a gradient although it is 1."""

    def loss(kit, z, number):
        advantage = kit.tensor(Y)
        logs = z - z.detach()
        ratio = (logs + 0.3 * advantage).exp()
        return -(ratio * advantage).minimum(ratio.clip(low, high) * advantage).mean()

    return loss


def distances(squared):
    def loss(kit, outputs, number):
        image, text = outputs
        apart = ((image - text) ** 2).sum(1)
        return (apart if squared else apart.sqrt()).mean() + (image * text).sum(1).exp().mean()

    return loss


def tempered(temperature):
    def loss(kit, z, number):
        f = functional(kit)
        logs, targets = f.log_softmax(z / temperature, -1), f.softmax(kit.tensor(Y) / temperature, -1)
        return -(targets * logs).sum(-1).mean() * temperature**2

    return loss


# Differences in calls between the outputs of the model and the loss, which no list of known edits has.
CODE = {
    "both bounds": (
        OF_ONE, clipped(0.8, 1.2), clipped(0.9, 1.1), "0.9 for the reference's 0.8", "1.1 for the reference's 1.2",
    ),
    "a square": (OF_TOWERS, distances(False), distances(True), "sqrt", "sqrt"),
    "several numbers": (
        OF_ONE, tempered(3.0), tempered(2.0), "temperature", "is 2 for the reference's 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CODE)
def test_calls_that_differ_are_read_from_both_sides(kit, name):
    (make, inputs), right, wrong, *words = CODE[name]
    first = padiff.compare_runs(run(TORCH, make, inputs, right), run(kit, make, inputs, wrong)).first_diff
    assert first.stage == "loss" and first.cause.proven, first.message
    assert all(each in first.cause.sentence for each in words), first.message
    twin = padiff.compare_runs(run(TORCH, make, inputs, right), run(kit, make, inputs, right))
    assert twin.passed, twin.first_diff


def test_code_and_data_that_differ_are_not_proven_as_code():
    def other(kit, z, number):
        return (z - kit.tensor(Y + 0.1)).abs().mean()

    first = padiff.compare_runs(run(TORCH, *OF_ONE, by(lambda e: e.mean())), run(TORCH, *OF_ONE, other)).first_diff
    assert not first.cause.proven, first.message


def test_the_lines_of_both_sides_are_given(tmp_path):
    def script(name, weight, before):
        path = tmp_path / name
        path.write_text(
            "import torch, padiff\n" + "\n" * before + "torch.manual_seed(0)\nmodel = torch.nn.Linear(3, 2)\n"
            "with padiff.record(model) as rec:\n"
            "    z = model(torch.ones(4, 3))\n"
            f"    (z.square().mean() + {weight} * z.exp().mean()).backward()\n"
            "    rec.try_dump()\n"
            "run = rec.run\n"
        )
        names = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        return names["run"]

    first = padiff.compare_runs(script("one.py", 0.5, 0), script("other.py", 0.25, 3)).first_diff
    assert first.cause.proven and "0.25 for the reference's 0.5" in first.cause.sentence
    reference, _, candidate = first.cause.evidence.partition("in the code: ")[2].partition(", ")
    assert reference.endswith("one.py:6") and candidate.endswith("other.py:9"), first.cause.evidence
