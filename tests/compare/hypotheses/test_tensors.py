"""Inputs, start weights, weights between steps, and outputs: planted, named, and proven where they can be."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from kit.records import info, memory_run, plain, record, step

from compare.hypotheses.trainings import changed, first_of, torch_net, torch_run
from padiff.compare.diagnose.hypotheses.transforms import affine

F = torch.nn.functional
STEPS = 3


def adam(model):
    return torch.optim.Adam(model.parameters(), 1e-2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


# -- inputs --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def adams():
    return torch_run(adam, STEPS)


def fed(change):
    """A run and another one whose inputs were changed (only what was recorded of them)."""
    run = adams()
    inputs = {n: next(r.value for r in run.steps(n)[0].records if r.stage == "input") for n in run.numbers()}
    return run, changed(run, lambda r, v: change(v, inputs) if r.stage == "input" else None)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda v, _: v[::-1], "input_permuted", "the same samples in reverse"),
        (lambda v, _: np.roll(v, 3, 0), "input_permuted", "the same samples shifted by 3"),
        (lambda v, _: v[np.random.default_rng(0).permutation(len(v))], "input_permuted", "in the order"),
        (lambda v, _: v[:, ::-1], "input_flipped", "flipped along axis 1"),
        (lambda v, _: np.roll(v, 1, 1), "input_shifted", "shifted by 1 along axis 1, forward"),
        (lambda v, _: v * 255, "input_scaled", "255 times the reference's (0 to 255 against 0 to 1)"),
        (
            lambda v, _: v * np.sqrt(48 / 47),
            "input_scaled",
            "variance of 48 values divides by n, the reference's by n - 1",
        ),
        (
            lambda v, _: v * np.sqrt(9 / 10),
            "input_scaled",
            "variance of 10 values divides by n - 1, the reference's by n)",
        ),
        (lambda v, _: v + 0.3, "input_offset", "the reference's +0.3"),
        (lambda v, _: 2 * v - 1, "input_normalised", "2 times the reference's -1"),
        (lambda v, _: np.float16(v), "input_precision", "in float16's precision"),
        (lambda v, all_: np.concatenate([all_[1][::2], all_[2][::2]]), "batch_order", "in steps 1, 2"),
    ],
)
def test_what_was_done_to_an_input_is_proven(change, kind, words):
    cause = first_of(*fed(change)).cause
    assert (cause.kind, cause.proven) == (kind, True), cause.text
    assert words in cause.sentence


def images(change):
    """Inputs like images, recorded by hand."""
    values = np.random.default_rng(0).random((8, 3, 6, 6)).astype("float32")
    sides = (values, np.asarray(change(values), "float32"))
    return [memory_run(info(plain("(root)", "net")), step(0, [record("(root)", "input", "x", v)])) for v in sides]


def test_another_window_of_the_samples_is_named():
    pixels = np.random.default_rng(0).random((8, 3, 16, 16)).astype("float32")
    windows = (pixels[:, :, 3:13, 2:12], pixels[:, :, :10, :10])
    one, other = ([memory_run(info(plain("(root)", "net")), step(0, [record("(root)", "input", "x", v.copy())]))
                   for v in pair] for pair in (windows, (pixels[..., 4:14], pixels[..., :10])))  # fmt: skip
    cause = first_of(*one).cause
    assert (cause.kind, cause.proven, cause.values.candidate) == ("input_moved", True, (3, 2)), cause.text
    cause = first_of(*other).cause
    assert cause.proven and "shifted by 4 along axis 3, forward" in cause.sentence, cause.text


def test_channels_and_their_statistics_are_reported():
    cause = first_of(*images(lambda v: v[:, ::-1])).cause
    assert (cause.kind, cause.proven) == ("input_flipped", True) and "RGB against BGR" in cause.sentence
    cause = first_of(*images(lambda v: v[:, [1, 0, 2]])).cause
    assert (cause.kind, cause.proven) == ("input_channels", True) and "1, 0, 2" in cause.sentence
    cause = first_of(*images(lambda v: v.transpose(0, 1, 3, 2))).cause
    assert (cause.kind, cause.proven) == ("input_transposed", True)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    shape = (1, 3, 1, 1)
    cause = first_of(*images(lambda v: (v - mean.reshape(shape)) / deviation.reshape(shape))).cause
    assert (cause.kind, cause.proven) == ("input_normalised", True) and "ImageNet's mean" in cause.sentence


# -- weights -------------------------------------------------------------------------------------------------------


def started(change):
    def net(seed):
        model = torch_net(seed)
        with torch.no_grad():
            model[3].weight.copy_(change(model[3].weight.clone()))
        return model

    return adams(), torch_run(adam, STEPS, net=net)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda w: w.t(), "weight_transposed"),
        (lambda w: w[torch.randperm(len(w), generator=torch.Generator().manual_seed(0))], "weight_rows_permuted"),
        (lambda w: w.bfloat16().float(), "weight_precision"),
        (lambda w: w * 2, "weight_scaled"),
        (lambda w: w + 0.1 * torch.randn(w.shape), "start_weights"),
    ],
)
def test_how_a_start_weight_differs_is_proven(change, kind):
    cause = first_of(*started(change)).cause
    assert (cause.kind, cause.proven) == (kind, True), cause.text


def test_weights_that_were_partly_carried_over_are_counted():
    cause = first_of(*started(lambda w: w + 1)).cause
    assert "in 3/weight, and from equal ones in 5 others" in cause.sentence


def reloaded(back):
    kept = {}

    def after(model, optimizer, step):
        kept[step + 1] = [p.detach().clone() for p in model.parameters()]
        if step == 2:
            with torch.no_grad():
                for p, value in zip(model.parameters(), kept[step + 1 - back]):
                    p.copy_(value)

    return after


def clamped(model, optimizer, step):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)


def averaged():
    mean = []

    def after(model, optimizer, step):
        with torch.no_grad():
            if not mean:
                mean.extend(p.detach().clone() for p in model.parameters())
                return
            for p, own in zip(model.parameters(), mean):
                own.mul_(0.6).add_(p, alpha=0.4)
                if step == 2:
                    p.copy_(own)

    return after


@pytest.mark.parametrize(
    ("after", "kind", "words"),
    [
        (lambda: reloaded(1), "weights_reloaded", "those of the start of step 2 again"),
        (lambda: reloaded(2), "weights_reloaded", "those of the start of step 1 again"),
        (lambda: clamped, "weights_clamped", "clamped to 0.2"),
        # What there was before: 0.4 of this step's, 0.4 * 0.6 of the one before, and 0.6 ** 2 of the first.
        (averaged, "weights_averaged", "shares 0.4, 0.24, 0.36"),
    ],
)
def test_what_changed_weights_between_steps_is_proven(after, kind, words):
    cause = first_of(torch_run(adam, 4), torch_run(adam, 4, after_step=after())).cause
    assert (cause.kind, cause.proven) == (kind, True), cause.text
    assert words in cause.sentence and "something else than the candidate's optimizer" in cause.sentence


def test_steps_between_that_are_not_recorded_are_named():
    runs = torch_run(adam, 7, numbers=(0, 3, 6)), torch_run(adam, 7, numbers=(0, 3, 6), after_step=clamped)
    cause = first_of(*runs).cause
    assert cause.kind == "unknown" and "in step 1 to 2, of which nothing is recorded" in cause.sentence


class OtherNorm(torch.nn.BatchNorm1d):
    """A BatchNorm whose momentum no setting tells, or that keeps no statistics."""

    share: float | None = None

    def forward(self, x):
        statistics = (None, None) if self.share is None else (self.running_mean, self.running_var)
        return F.batch_norm(x, *statistics, self.weight, self.bias, True, self.share or 0.0)


@pytest.mark.parametrize(
    ("share", "kind", "words"),
    [
        (0.3, "running_momentum", "take 0.3 of each batch's, the reference's 0.1"),
        (0.9, "running_momentum", "(paddle's own is 1 minus it)"),
        (
            0.19,
            "running_momentum",
            "take in each batch twice (its forward runs twice in a step), or their momentum is 0.19",
        ),
        (None, "running_statistics_frozen", "do not move, the reference's do"),
    ],
)
def test_how_running_statistics_move_is_proven(share, kind, words):
    def change(model):
        norm = OtherNorm(24)
        norm.load_state_dict(model.norm.state_dict())
        norm.share = share
        model.norm = norm

    cause = cause_in(change)
    assert (cause.kind, cause.proven) == (kind, True), cause.text
    assert words in cause.sentence


# -- outputs -------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.one, self.norm, self.act = nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU()
        self.two, self.tanh, self.drop = nn.Linear(24, 24), nn.Tanh(), nn.Dropout(0.0)
        self.three, self.soft, self.head = nn.Linear(24, 24), nn.Softmax(-1), nn.Linear(24, 6)
        nn.init.normal_(self.norm.weight, 1, 0.2)
        nn.init.normal_(self.norm.bias, 0, 0.2)

    def forward(self, x):
        x = self.act(self.norm(self.one(x)))
        return self.head(10 * self.soft(self.three(self.drop(self.tanh(self.two(x))))))


def net(change=None):
    def make(seed):
        torch.manual_seed(seed)
        model = Net()
        if change is not None:
            change(model)
        return model

    return make


@lru_cache(maxsize=1)
def whole():
    return torch_run(sgd, 2, net=net())


def cause_in(change):
    torch.manual_seed(9)
    return first_of(whole(), torch_run(sgd, 2, net=net(change))).cause


def hooked(layer, change):
    return lambda model: getattr(model, layer).register_forward_hook(lambda _, __, output: change(output))


def put(name, layer):
    return lambda model: setattr(model, name, layer)


def without_bias(model):
    model.three.forward = lambda x: F.linear(x, model.three.weight)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (put("act", torch.nn.GELU()), "activation", "the candidate uses exact GELU for the reference's ReLU"),
        (put("act", torch.nn.GELU("tanh")), "activation", "uses tanh-form GELU for the reference's ReLU"),
        (put("tanh", torch.nn.ReLU()), "activation", "the candidate uses ReLU for the reference's tanh"),
        (put("act", torch.nn.LeakyReLU(0.07)), "activation", "leaky ReLU of slope 0.07 for the reference's ReLU"),
        (put("act", torch.nn.Identity()), "activation_missing", "has no activation, the reference ReLU"),
        (put("soft", torch.nn.Softmax(0)), "softmax_axis", "over axis 0 for the reference's 1"),
        (without_bias, "bias_missing", "the candidate does not add three/bias, the reference does"),
        (hooked("two", lambda o: o.roll(1, 1)), "output_shifted", "shifted by 1 along axis 1, forward"),
        (hooked("two", lambda o: o.flip(1)), "output_flipped", "flipped along axis 1"),
        (hooked("two", torch.relu), "activation_added", "is ReLU of the reference's"),
        (hooked("two", lambda o: o * 24**0.5), "output_scale", "sqrt(24), of the width of the output"),
        (hooked("two", lambda o: o.bfloat16().float()), "precision", "those of bfloat16"),
        (hooked("two", lambda o: F.dropout(o, 0.3)), "dropout", "(dropout of rate 0.3)"),
        (
            hooked("two", lambda o: o[:, torch.arange(24).view(2, 12).t().reshape(-1)]),
            "output_permuted",
            "interleaved: the first half and the second in turn",
        ),
    ],
)
def test_what_was_done_to_an_output_is_proven(change, kind, words):
    cause = cause_in(change)
    assert (cause.kind, cause.proven) == (kind, True), cause.text
    assert words in cause.sentence


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (hooked("two", lambda o: 1.3 * o), "output_scale"),
        # The root of an extent of a weight, and of nothing that an output is scaled by.
        (hooked("two", lambda o: o * 20**0.5), "output_scale"),
        (hooked("norm", lambda o: o + 0.1 * torch.randn(24)), "channel_offset"),
    ],
)
def test_what_outputs_alone_do_not_tell_is_likely(change, kind):
    cause = cause_in(change)
    assert (cause.kind, cause.proven) == (kind, False), cause.text


def test_a_normalisation_that_evaluates_is_proven_from_what_goes_in():
    cause = cause_in(lambda model: model.norm.eval())
    assert (cause.kind, cause.proven) == ("mode", True) or cause.kind == "norm_statistics", cause.text
    assert cause.proven


ODD = [
    lambda o: o + 0.1 * torch.randn(o.shape),
    lambda o: o * o.abs().sqrt(),
    lambda o: o * (1 + 0.1 * torch.randn(24)),
    lambda o: o + 0.1 * torch.randn(24),
    lambda o: o.clamp(-0.5, 0.05),
    lambda o: o * (1 + 0.1 * torch.randn(len(o), 1)),
    lambda o: torch.sin(3 * o),
    lambda o: o + 0.02 * o.mean(),
    lambda o: o.cumsum(1) / 5,
    lambda o: torch.where(torch.rand(o.shape) > 0.02, o, -o),
    lambda o: o + 1e-3 * torch.randn(o.shape),
    lambda o: o @ torch.linalg.qr(torch.randn(24, 24))[0],
]


@pytest.mark.parametrize(
    ("layer", "change"),
    [(("norm", "act", "two", "soft")[(k + more) % 4], k) for k in range(len(ODD)) for more in (0, 2)],
)
def test_an_output_that_no_hypothesis_covers_is_never_proven(layer, change):
    cause = cause_in(hooked(layer, ODD[change]))
    assert cause is None or not cause.proven, cause.text


@pytest.mark.parametrize("stage", ["input", "forward", "backward", "grad", "update"])
@pytest.mark.parametrize("seed", range(3))
def test_noise_of_any_size_is_never_proven_to_be_anything(stage, seed):
    run = adams()
    rng = np.random.default_rng(seed)
    size, step = 10 ** rng.uniform(-1.5, 0.5), int(rng.integers(0, STEPS))
    broken = run.steps(step)[0]
    chosen = [r.site for r in broken.records if r.stage == stage and r.layer != "(loop)"]
    chosen = chosen if seed % 2 else chosen[:1]
    steps = {id(r): r.site in chosen for r in broken.records}

    def noise(record, values):
        if not steps.get(id(record)):
            return None
        return values + size * values.std() * rng.normal(size=values.shape)

    first = first_of(run, changed(run, noise))
    assert first.cause is None or not first.cause.proven, first.cause.text


def test_constants_are_no_scaled_reference():
    values = np.random.default_rng(0).normal(size=(32, 3))
    constant = np.broadcast_to([0.3, -1.7, 4.2], (32, 3))
    by_channel = "scaled and offset by channel"
    assert not any(each.words.startswith(by_channel) for each in affine(values, constant))
    assert any(each.words.startswith(by_channel) for each in affine(values, values * [0.3, -1.7, 4.2] + 1))
