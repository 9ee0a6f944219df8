"""What happens to gradients between the backward and the optimizer, planted in real trainings."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import paddle
import pytest
import torch

import padiff
from compare.hypotheses.trainings import first_of, paddle_run, torch_net, torch_run

OPTIM, PADDLE = torch.optim, paddle.optimizer
CLIP = torch.nn.utils


def sgd(model):
    return OPTIM.SGD(model.parameters(), 0.1, momentum=0.9)


def by_norm(limit):
    return lambda model, *_: CLIP.clip_grad_norm_(model.parameters(), limit)


def by_value(limit):
    return lambda model, *_: CLIP.clip_grad_value_(model.parameters(), limit)


def by_tensor(limit):
    return lambda model, *_: [CLIP.clip_grad_norm_(p, limit) for p in model.parameters()]


def each(change):
    return lambda model, *_: [p.grad.copy_(change(p, k)) for k, p in enumerate(model.parameters())]


def clipped(clip):
    return lambda model: PADDLE.Momentum(0.1, 0.9, parameters=model.parameters(), grad_clip=clip)


@lru_cache(maxsize=8)
def whole(before, steps):
    return torch_run(sgd, steps, before_step=before)


def cause_of(before, then, steps=4, make=None):
    reference = whole(before, steps)
    if make is not None:
        return first_of(reference, paddle_run(make, steps)).cause
    return first_of(reference, torch_run(sgd, steps, before_step=then)).cause


@pytest.mark.parametrize(
    ("before", "then", "kind", "words"),
    [
        (by_norm(0.3), None, "clip_missing", "are not clipped, the reference's are, to a norm of 0.3"),
        (None, by_norm(0.3), "clip_added", "the candidate clips gradients to a norm of 0.3, the reference does not"),
        (by_norm(0.3), by_norm(0.6), "clip_limit", "to a norm of 0.6, the reference to 0.3"),
        (None, by_tensor(0.1), "clip_tensor", "clips each tensor's gradient by itself, to a norm of 0.1, the"),
        (
            by_norm(0.3),
            by_tensor(0.1),
            "clip_tensor",
            "to a norm of 0.1; the reference's, where that leaves them alone",
        ),
        (by_tensor(0.1), by_tensor(0.2), "clip_limit", "to a norm of 0.2, the reference to 0.1"),
        (None, by_value(0.01), "clip_value", "the candidate clips gradients by value, to 0.01, the reference does not"),
        (by_value(0.01), by_norm(0.3), "clip_value", "the reference clips gradients by value, to 0.01"),
        (by_value(0.01), by_value(0.02), "clip_limit", "by value to 0.02, the reference to 0.01"),
        (None, each(lambda p, k: 65536 * p.grad), "loss_scale", "65536 = a loss scale, not undone in the candidate"),
        (None, each(lambda p, k: -p.grad), "sign", "the sign is flipped"),
        (None, each(lambda p, k: p.grad + 0.01 * p), "weight_decay_in_gradient", "0.01 times the weight is added"),
    ],
)
def test_what_is_done_to_gradients_is_proven(before, then, kind, words):
    cause = cause_of(before, then)
    assert (cause.kind, cause.proven) == (kind, True), cause.text
    assert words in cause.sentence


@pytest.mark.parametrize(
    ("clip", "kind"),
    [
        (None, "clip_missing"),
        (paddle.nn.ClipGradByGlobalNorm(0.5), "clip_limit"),
        (paddle.nn.ClipGradByNorm(0.1), "clip_tensor"),
        (paddle.nn.ClipGradByValue(0.01), "clip_value"),
    ],
)
def test_paddles_clipping_is_reported(clip, kind):
    cause = cause_of(by_norm(0.3), None, make=clipped(clip))
    assert (cause.kind, cause.proven) == (kind, True), cause.text


def by_hand(limit, norm=torch.linalg.vector_norm, of=lambda parameters: parameters):
    """Clip by a factor that is computed as a number, as many loops do."""

    def clip(model, *_):
        norms = torch.stack([p.grad.norm() for p in of(list(model.parameters()))])
        factor = limit / (float(norm(norms)) + 1e-6)
        return [p.grad.mul_(factor) for p in model.parameters() if factor < 1]

    return clip


def test_the_limit_of_clipping_by_hand_is_proven():
    cause = cause_of(by_hand(0.3), by_hand(0.15))
    assert (cause.kind, cause.proven) == ("clip_limit", True), cause.text
    assert "to a norm of 0.15, the reference to 0.3" in cause.sentence and "the number in" not in cause.sentence


@pytest.mark.parametrize(
    "then", [by_hand(0.3, torch.sum), by_hand(0.3, of=lambda parameters: [p for p in parameters if p.ndim > 1])]
)
def test_a_factor_of_another_norm_is_no_missing_clipping_and_no_number_that_is_proven(then):
    cause = cause_of(by_hand(0.3), then)
    assert not cause.proven and "clip_missing" not in cause.kind, cause.text
    assert "both loops scale their gradients before the optimizer steps" in cause.sentence


def test_paddle_clips_each_parameter_group_by_itself():
    def groups(model):
        rate, clip = 0.1, paddle.nn.ClipGradByGlobalNorm(0.1)
        params = list(model.parameters())
        return PADDLE.Momentum(rate, 0.9, [{"params": params[:4]}, {"params": params[4:]}], grad_clip=clip)

    cause = cause_of(None, None, make=groups)
    assert (cause.kind, cause.proven) == ("clip_group", True), cause.text
    assert "of each parameter group by itself, to a norm of 0.1 each" in cause.sentence


@pytest.mark.parametrize("clip", [by_norm(0.3), by_tensor(0.05)])
def test_stale_gradients_that_are_clipped_afterwards_are_reported(clip):
    runs = (torch_run(sgd, before_step=clip, zero=zero) for zero in (lambda step: True, lambda step: step != 1))
    cause = first_of(*runs).cause
    assert (cause.kind, cause.proven) == ("stale_gradient", True), cause.text
    assert "of this step's and of those of step 1" in cause.sentence


@pytest.mark.parametrize("zeroed", [lambda step: step != 1, lambda step: False])
def test_gradients_that_were_not_zeroed_are_reported(zeroed):
    runs = torch_run(sgd), torch_run(sgd, zero=zeroed)
    first = first_of(*runs)
    assert (first.cause.kind, first.cause.proven) == ("stale_gradient", True)
    assert f"plus those of step {first.step - 1}" in first.cause.sentence


def accumulated(divide=True, only_last=False, steps=3, count=4, rows=8, logged=True):
    """A loop that accumulates four micro-batches."""
    model = torch_net()
    optimizer = sgd(model)
    data = np.random.default_rng(3)
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(steps):
            for _ in range(count):
                x, y = data.normal(size=(rows, 12)).astype("float32"), data.integers(0, 6, rows)
                if only_last:
                    optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
                (loss / count if divide else loss).backward()
                if logged:
                    rec.log_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


def test_a_sum_over_micro_batches_for_their_mean_is_reported_by_their_number():
    cause = first_of(accumulated(), accumulated(divide=False)).cause
    assert (cause.kind, cause.proven) == ("accumulation", True), cause.text
    assert "4 = 4 micro-batches are accumulated" in cause.sentence


def test_the_loss_that_agrees_is_not_computed_otherwise():
    """As many times more rows than classes as micro-batches: a sum over rows in the loss gives the same gradients."""
    runs = [accumulated(divide, count=2, rows=12, logged=False) for divide in (True, False)]
    cause = first_of(*runs).cause
    assert (cause.kind, cause.proven) == ("accumulation", True), cause.text


def test_a_sum_over_as_many_numbers_as_micro_batches_is_not_proven():
    """The candidate takes a mean, too: of 4 numbers in each of 4 micro-batches."""

    def of_squares(divide):
        model = torch_net()
        optimizer = sgd(model)
        data = np.random.default_rng(3)
        with padiff.record(model, optimizer=optimizer) as rec:
            for _ in range(2):
                for _ in range(4):
                    x = torch.from_numpy(data.normal(size=(4, 12)).astype("float32"))
                    out, ones = model(x)[:, :1], torch.ones(4, 1)
                    loss = (out - ones).square().mean() / 4 if divide else torch.nn.functional.mse_loss(out, ones)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rec.try_dump()
        return rec.run

    cause = first_of(of_squares(True), of_squares(False)).cause
    assert cause.kind == "accumulation" and not cause.proven, cause.text
    assert "4 = 4 micro-batches are accumulated" in cause.sentence


def test_fewer_micro_batches_are_counted():
    cause = first_of(accumulated(), accumulated(count=2)).cause
    assert cause.kind == "micro_batches" and "the candidate's step has 2 micro-batches, the reference's 4" in str(cause)


def test_micro_batches_that_are_zeroed_away_are_reported():
    cause = first_of(accumulated(), accumulated(only_last=True)).cause
    assert (cause.kind, cause.proven) == ("micro_batch_missing", True), cause.text
    assert "only the last micro-batch is" in cause.sentence


def test_a_ratio_that_is_no_number_of_the_run_is_proven_where_each_step_shows_it():
    cause = cause_of(None, each(lambda p, k: 0.37 * p.grad))
    assert (cause.kind, cause.proven) == ("gradient_scale", True)
    assert "the candidate multiplies what its backward gave by 0.37 before its optimizer steps" in cause.sentence


def test_a_ratio_that_other_steps_do_not_show_is_likely_at_most():
    def once(model, optimizer, step):
        return [p.grad.mul_(0.37) for p in model.parameters() if step == 1]

    cause = cause_of(None, once)
    assert (cause.kind, cause.proven) == ("gradient_scale", False)
    assert "0.37 times what its backward gave, the other side's are what it gave" in cause.sentence


def test_a_factor_of_the_loss_that_only_one_sides_code_has_is_named():
    cause = first_of(torch_run(sgd), torch_run(sgd, loss_factor=lambda step: 5 / 6)).cause
    assert (cause.kind, cause.proven) == ("scale_added", True)
    assert "mul() in the loop is left out" in cause.sentence and "not scaled by 0.833333" in cause.sentence


def test_one_gradient_alone_is_named():
    def head(model, *_):
        model[5].weight.grad.mul_(2)

    cause = cause_of(None, head)
    assert cause.sentence.startswith("gradients of 5/weight are 2 times the reference's") and not cause.proven


LIMITED = by_norm(0.3)
ODD = [
    lambda p, k: p.grad + 0.1 * p.grad.std() * torch.randn_like(p),
    lambda p, k: p.grad**2,
    lambda p, k: p.grad * (1 + 0.3 * k),
    lambda p, k: p.grad - p.grad.mean(),
    lambda p, k: p.grad.flip(0),
    lambda p, k: torch.tanh(20 * p.grad) / 20,
    lambda p, k: p.grad * (torch.rand_like(p) > 0.1),
    lambda p, k: p.grad + 0.05 * p.abs(),
    lambda p, k: p.grad * (p.grad.abs() > 0.002),
]


@pytest.mark.parametrize("change", range(len(ODD)))
@pytest.mark.parametrize("before", [None, LIMITED])
def test_what_no_hypothesis_covers_is_never_proven(before, change):
    torch.manual_seed(2)
    cause = cause_of(before, each(ODD[change]))
    assert cause is None or not cause.proven, cause.text


def frozen(seed):
    model = torch_net(seed)
    model[3].weight.requires_grad_(False)
    return model


def test_why_a_parameter_has_no_gradient():
    cause = first_of(torch_run(sgd), torch_run(sgd, net=frozen)).cause
    assert (cause.kind, cause.proven) == ("frozen", True) and "3/weight is frozen on the candidate" in cause.sentence

    def without(model):
        return OPTIM.SGD([p for p in model.parameters() if p is not model[3].bias], 0.1, momentum=0.9)

    cause = first_of(torch_run(sgd), torch_run(without)).cause
    assert (cause.kind, cause.proven) == ("not_in_optimizer", True) and "does not hold 3/bias" in cause.sentence


def test_a_frozen_parameter_that_is_missing_in_the_norm_comes_before_the_others():
    def late(seed):
        model = torch_net(seed)
        model[5].weight.requires_grad_(False)
        return model

    first = first_of(torch_run(sgd, before_step=by_norm(0.3)), torch_run(sgd, before_step=by_norm(0.3), net=late))
    assert first.reference == "5"  # every gradient is another, by the factor of the norm
    assert (first.cause.kind, first.cause.proven) == ("frozen", True), first.cause.text
    assert "5/weight" in first.cause.sentence and "frozen" in first.cause.sentence


def test_a_step_that_is_taken_twice_is_reported():
    def twice(model, optimizer, step):
        if step == 2:
            optimizer.step()

    first = first_of(torch_run(sgd), torch_run(sgd, before_step=twice))
    assert (first.step, first.cause.kind, first.cause.proven) == (2, "step_repeated", True)


@pytest.mark.parametrize(
    ("is_frozen", "words"),
    [
        (lambda step: step < 2, "each time, but only from step 2 on"),
        (lambda step: step % 2 == 1, "in every 2 steps, from step 0 on"),
    ],
)
def test_the_steps_in_which_only_one_side_updates_a_parameter_are_reported(is_frozen, words):
    def freeze(model, optimizer, step):
        if is_frozen(step):
            model[0].weight.grad = model[0].bias.grad = None

    first = first_of(whole(freeze, 5), torch_run(sgd, 5))
    assert (first.cause.kind, first.cause.proven) == ("step_repeated", True), first.cause.text
    assert f"the candidate updates `0` each time, the reference {words}" in first.cause.sentence


def test_a_ratio_is_a_fraction_of_what_the_run_counts():
    from padiff.compare.diagnose.hypotheses.transforms import fraction

    assert fraction(5 / 6, {5, 6, 16}) == "0.83333 = 5 / 6"
    assert fraction(5 / 6, {4, 8, 16}) == "0.83333"
    assert fraction(1.2, ()) == "1.2"
    assert fraction(23.156, range(1, 65)) == "23.156"  # 741 / 32 to five digits
