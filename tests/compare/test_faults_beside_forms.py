"""Faults of trainings that two authors write in different forms: the form is no fault, and loosens no limit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as f

from compare.test_forms_and_numbers import cause_of, descend, verdict
from compare.test_other_kinds import BOTH, compared, descent, placed, tensor
from padiff.compare.diagnose import first as search
from padiff.compare.diagnose.known_differences import _fits, known_difference
from padiff.system.guard import Strictness


def missing(way, reference, candidate):
    return reference if way == "reference" else candidate


# -- losses of probabilities and of logits ---------------------------------------------------------------------------


def adversarial(way):
    """One author's discriminator gives probabilities, the other's logits."""
    generator = nn.Linear(4, 6)
    layers = [nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)]
    discriminator = nn.Sequential(*layers, nn.Sigmoid()) if way == "reference" else nn.Sequential(*layers)
    models = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    first, second = (torch.optim.SGD(each.parameters(), 0.1) for each in (generator, discriminator))
    rng = yield models, [first, second]
    while True:
        real, fake = tensor(rng, 8, 6), generator(tensor(rng, 8, 4))
        if way == "reference":
            of_real = f.binary_cross_entropy(discriminator(real), torch.ones(8, 1))
            of_fake = f.binary_cross_entropy(discriminator(fake.detach()), torch.zeros(8, 1))
        elif way == "fault":
            of_real, of_fake = torch.zeros(()), f.softplus(discriminator(fake.detach())).mean()
        else:
            of_real = f.softplus(-discriminator(real)).mean()
            of_fake = f.softplus(discriminator(fake.detach())).mean()
        descend(of_real + of_fake, second, first)
        scores = discriminator(fake)
        fooled = -scores.log().mean() if way == "reference" else f.softplus(-scores).mean()
        descend(fooled, first, second)
        rng = yield fooled


def test_a_term_that_a_loss_of_logits_leaves_out_is_no_missing_sigmoid(tmp_path):
    fault = verdict(tmp_path, adversarial, steps=3)
    assert placed(fault)[:2] == (0, "loss")
    cause = cause_of(fault)
    assert cause.kind == "missing_call" and not cause.proven, cause
    assert "calls `discriminator` 2 times, and has no partner of call 1" in cause.sentence
    assert "f.softplus(discriminator(fake.detach()))" in cause.lines.candidate.code
    assert "discriminator(real)" in cause.lines.reference.code


# -- longer sequences ------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """One author leaves the last score out of the loss, the other the last token out of the input."""

    def __init__(self, way):
        super().__init__()
        self.way, self.emb, self.norm = way, nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 11)

    def forward(self, x):
        x = self.emb(x)
        update = self.down(torch.relu(self.up(self.norm(x))))
        return self.out(update if self.way == "fault" else x + update)


def language(way):
    model = Language(way)

    def loss(rng):
        tokens = torch.randint(11, (4, 9), generator=rng)
        if way == "reference":
            scores = model(tokens)[:, :-1]
        else:
            scores = model(tokens[:, :-1])
        return f.cross_entropy(scores.reshape(-1, 11), tokens[:, 1:].reshape(-1))

    return descent(model, loss)


def test_a_residual_is_proven_missing_where_one_side_has_longer_sequences(tmp_path):
    fault = verdict(tmp_path, language, steps=3)
    assert placed(fault)[:2] == (0, "forward")
    assert cause_of(fault).kind == "residual_missing" and cause_of(fault).proven, cause_of(fault)


# -- evaluation in training mode -------------------------------------------------------------------------------------


def validated(way, *layers):
    model = nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    rng = yield model, optimizer
    while True:
        model.train(way == "candidate")
        with torch.no_grad():
            for _ in range(2):
                model(tensor(rng, 8, 5))
        model.train()
        loss = model(tensor(rng, 8, 5)).square().mean()
        descend(loss, optimizer)
        rng = yield loss


@BOTH
def test_an_evaluation_in_training_mode_is_no_difference_without_layers_that_have_modes(options, tmp_path):
    (report,) = compared(tmp_path, validated, "reference", "candidate", **options)
    assert report.passed, report.first_diff.message


def test_an_evaluation_in_training_mode_is_named_where_layers_have_modes(tmp_path):
    (report,) = compared(tmp_path, lambda way: validated(way, nn.BatchNorm1d(6)), "reference", "candidate")
    assert placed(report) == (1, "weight", "1") and cause_of(report).kind == "mode", cause_of(report)
    (mode,) = report.settings_differ
    assert mode.step == 0 and "the reference makes call 1, 2 of the step in evaluation mode" in mode.note


def generated(way):
    """One author computes the same again for the other model, without gradients."""
    generator, critic = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Linear(6, 1)
    generator[1].momentum = 0.0
    models = nn.ModuleDict({"generator": generator, "critic": critic})
    first, second = (torch.optim.SGD(each.parameters(), 0.1) for each in (generator, critic))
    rng = yield models, [first, second]
    while True:
        noise = tensor(rng, 8, 4)
        fake = generator(noise)
        with torch.no_grad():
            detached = generator(noise) if way == "again" else fake.detach()
        descend(critic(detached).square().mean(), second, first)
        loss = critic(fake).mean()
        descend(loss, first, second)
        rng = yield loss


def test_what_a_loop_computes_again_is_no_evaluation(tmp_path):
    for ways in (("reference", "again"), ("again", "reference")):
        (report,) = compared(tmp_path / ways[0], generated, *ways)
        assert report.passed, report.first_diff.message


# -- limits ----------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.emb, self.out = way, nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, mask):
        scores = x.sum(-1)
        scores = scores + mask if self.way == "reference" else scores.masked_fill(~mask, -1e9)
        pooled = self.out((scores.softmax(-1)[..., None] * self.emb(x)).sum(1))
        return pooled * 1.01 if self.way == "fault" else pooled


def masked(way):
    model = Masked(way)

    def loss(rng):
        x, keep = tensor(rng, 8, 6, 5), torch.rand(8, 6, generator=rng) < 0.7
        keep[:, 0] = True
        return model(x, torch.where(keep, 0.0, -1e9) if way == "reference" else keep).square().mean()

    return descent(model, loss)


def test_a_mask_in_another_form_loosens_no_limit(tmp_path):
    fault = verdict(tmp_path, masked, steps=3)
    assert placed(fault)[:2] == (0, "forward")
    assert fault.first_diff.diff.judgement.limit < 1e-4


# -- signs, operations and numbers of the code -----------------------------------------------------------------------


class Scan(nn.Module):
    """A state space layer; one author multiplies by einsum."""

    def __init__(self, way):
        super().__init__()
        self.way, self.rate, self.given, self.out = way, nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
        self.log = nn.Parameter(torch.rand(6, 2))

    def forward(self, x):
        rate, given = f.softplus(self.rate(x)), self.given(x)
        if self.way == "reference":
            decay = torch.exp(torch.einsum("btd,dn->btdn", rate, -torch.exp(self.log)))
        else:
            power = torch.exp(self.log) if self.way == "sign" else -torch.exp(self.log)
            decay = torch.exp(rate[..., None] + power if self.way == "sum" else rate[..., None] * power)
        state, states = torch.zeros(len(x), 6, 2), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + given[:, step, :, None]
            states.append(state.sum(-1))
        return self.out(torch.stack(states, 1))


def scanned(way):
    model = Scan(way)
    return descent(model, lambda rng: model(tensor(rng, 4, 5, 4)).square().mean())


@pytest.mark.parametrize(
    ("way", "kind", "code"), [("sign", "sign", "power = torch.exp(self.log)"), ("sum", "operation", "rate[..., None]")]
)
def test_an_operation_before_a_loop_is_proven(way, kind, code, tmp_path):
    clean, fault = compared(tmp_path, scanned, "reference", "clean", way)
    assert clean.passed
    cause = cause_of(fault)
    assert cause.kind == kind and cause.proven, cause
    assert code in cause.lines.candidate.code


class Attention(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.q, self.k, self.v, self.out = way, *(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        power = 0.6 if self.way == "fault" else 0.5
        scores = scores / math.sqrt(6) if self.way == "reference" else scores * 6**-power
        return self.out(scores.softmax(-1) @ self.v(x))


def attending(way):
    model = Attention(way)
    return descent(model, lambda rng: model(tensor(rng, 4, 5, 6)).square().mean())


def test_a_number_that_the_candidate_writes_in_another_form_is_proven(tmp_path):
    fault = verdict(tmp_path, attending, steps=2)
    cause = cause_of(fault)
    assert cause.proven and cause.kind == "attention_scale", cause
    assert f"is {6**0.6:.6g} for the reference's {math.sqrt(6):.6g}" in cause.sentence


# -- layers that give other sizes ------------------------------------------------------------------------------------


class Causal(nn.Module):
    """One author pads both ends in the convolution and cuts the end off, the other pads the beginning before it."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first, self.second = (nn.Conv1d(i, 4, 3, padding=2 if way == "reference" else 0) for i in (3, 4))

    def convolved(self, layer, x):
        return layer(x)[..., :-2] if self.way == "reference" else layer(f.pad(x, (2, 0)))

    def forward(self, x):
        x = self.convolved(self.first, x)
        return self.convolved(self.second, x if self.way == "fault" else torch.relu(x))


def causal(way):
    model = Causal(way)
    return descent(model, lambda rng: model(tensor(rng, 4, 3, 9)).square().mean())


def test_a_convolution_that_pads_in_another_way_is_not_where_an_activation_is_missing(tmp_path):
    fault = verdict(tmp_path, causal, steps=2)
    assert placed(fault) == (0, "forward", "second"), fault.first_diff.message
    assert "relu()" in cause_of(fault).sentence


def test_the_order_of_axes_of_a_layer_that_has_the_batch_first_is_no_known_difference():
    (row,) = (row for row in known_difference("LSTM") if "order of axes" in row.name)
    assert _fits(row, {"batch_first": False}) and not _fits(row, {"batch_first": True})


# -- inputs of a loss ------------------------------------------------------------------------------------------------


class Headed(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.body, self.head = way, nn.Linear(5, 16), nn.Linear(16, 7)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return x if self.way == "fault" else self.head(x)


def headed(way):
    model = Headed(way)
    return descent(model, lambda rng: f.cross_entropy(model(tensor(rng, 8, 5)), torch.randint(7, (8,), generator=rng)))


def test_a_loss_of_a_tensor_of_another_size_is_said_so(tmp_path):
    cause = cause_of(verdict(tmp_path, headed, steps=2))
    assert "agrees" not in cause.sentence and "(8, 16)" in cause.sentence, cause


# -- errors of the search --------------------------------------------------------------------------------------------


def test_an_error_in_the_search_for_a_cause_leaves_the_verdict(tmp_path, monkeypatch):
    def failing(*_):
        raise ValueError("axes of two tensors")

    monkeypatch.setattr(search, "_cause", failing)
    with pytest.raises(ValueError, match="axes of two tensors"):
        compared(tmp_path / "strict", attending, "reference", "fault")
    monkeypatch.setattr(Strictness, "raises", False)
    (report,) = compared(tmp_path / "users", attending, "reference", "fault")
    assert placed(report)[:2] == (0, "forward") and cause_of(report).kind == "unknown"
    assert "the search for it failed, please report this: ValueError: axes of two tensors" in cause_of(report).sentence
