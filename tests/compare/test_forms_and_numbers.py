"""What both sides write in different ways stays so; numbers, calls and inputs in which the code of both differs."""

from __future__ import annotations

import copy
from itertools import count

import torch
from torch import nn
from torch.nn import functional as f

from compare.test_other_kinds import compared, descent, placed, tensor
from padiff.dump import open_run


def cause_of(report):
    return report.first_diff.cause


def verdict(tmp_path, train, steps=6, **options):
    """Return the first diff of the fault; the clean twin, written in another way, has to match."""
    clean, fault = compared(tmp_path, train, "reference", "clean", "fault", steps=steps, **options)
    assert clean.passed, clean.first_diff.message
    return fault


def descend(loss, optimizer, *others):
    """Step with one optimizer along the gradient of a loss; zero the gradients of others, too."""
    for each in (optimizer, *others):
        each.zero_grad()
    loss.backward()
    optimizer.step()


# -- forms that stay -----------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.emb, self.out = way, nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, mask):
        scores = x.sum(-1)
        if self.way != "unused":
            scores = scores + mask if self.way == "reference" else scores.masked_fill(~mask, -1e9)
        return self.out((scores.softmax(-1)[..., None] * self.emb(x)).sum(1))


def masks(way):
    """One author masks with -1e9, the other with True. The fault is another learning rate from step 3 on."""
    model = Pooled(way)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    for number in count():
        x, y = tensor(rng, 8, 6, 5), torch.randint(3, (8,), generator=rng)
        keep = torch.rand(8, 6, generator=rng) < 0.7
        keep[:, 0] = True
        mask = torch.where(keep, 0.0, -1e9) if way == "reference" else keep
        if number == 3:
            optimizer.param_groups[0]["lr"] = 0.02 if way == "fault" else 0.05
        loss = f.cross_entropy(model(x, mask), y)
        descend(loss, optimizer)
        rng = yield loss


def test_a_mask_in_another_form_is_no_difference_beside_one_that_is_not_used(tmp_path):
    """No earlier step shows the form of the mask."""
    (fault,) = compared(tmp_path, masks, "reference", "unused")
    assert placed(fault)[:2] == (0, "forward")
    assert "only the reference calls" in cause_of(fault).sentence


def padding(way):
    """One author masks what is there, the other one what is not. The faults are another loss, and the wrong mask."""
    model = Pooled("candidate")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    forward = model.forward
    if way != "reference":
        model.forward = lambda x, pad: forward(x, pad if way == "inverted" else ~pad)
    while True:
        x, y = tensor(rng, 8, 6, 5), torch.randint(3, (8,), generator=rng)
        keep = torch.rand(8, 6, generator=rng) < 0.7
        loss = f.cross_entropy(model(x, keep if way == "reference" else ~keep), y, reduction="sum")
        loss = loss if way == "sum" else loss / 8
        descend(loss, optimizer)
        rng = yield loss


def test_a_mask_in_another_form_is_no_difference_beside_another_loss(tmp_path):
    clean, total, inverted = compared(tmp_path, padding, "reference", "clean", "sum", "inverted")
    assert clean.passed, clean.first_diff.message
    assert placed(total)[:2] == (0, "loss")
    assert placed(inverted)[:2] == (0, "input")


def test_masks_in_another_form_stay_so_beside_a_later_fault(tmp_path):
    fault = verdict(tmp_path, masks)
    assert placed(fault)[:2] == (3, "update") and cause_of(fault).kind == "learning_rate"


class Decoder(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.a, self.b, self.whole = nn.Linear(6, 16), nn.Linear(16, 6), way == "reference"

    def forward(self, x):
        x = self.b(torch.tanh(self.a(x)))
        return torch.sigmoid(x) if self.whole else x


def decoders(way):
    """One author's model takes the sigmoid, the other's loss. The fault: from step 2 on one gradient is doubled."""
    model = Decoder(way)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    rng = yield model, optimizer
    for number in count():
        x = torch.rand(8, 6, generator=rng)
        made = model(x)
        loss = (f.binary_cross_entropy if way == "reference" else f.binary_cross_entropy_with_logits)(made, x)
        optimizer.zero_grad()
        loss.backward()
        if way == "fault" and number >= 2:
            model.a.weight.grad *= 2
        optimizer.step()
        rng = yield loss


def test_outputs_in_another_form_stay_so_beside_a_later_fault(tmp_path):
    fault = verdict(tmp_path, decoders)
    assert placed(fault)[:2] == (2, "grad") and fault.first_diff.candidate == "a"


# -- numbers of the code -------------------------------------------------------------------------------------------


class Scores(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.net = way, nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        scores = self.net(x)
        return scores if self.way == "reference" else scores.reshape(-1, 2, 5).softmax(-1)


def projections(way):
    """A target in the rows that index_add writes, or in one product; the model ends before its softmax, or after it."""
    model, bins = Scores(way), torch.linspace(-1, 1, 5)

    def loss(rng):
        x, reward = tensor(rng, 6, 4), torch.rand(6, generator=rng)
        share = model(x)
        share = share.view(-1, 2, 5).softmax(-1) if way == "reference" else share
        at = reward[:, None] + (0.8 if way == "fault" else 0.9) * bins
        place = (at.clamp(-1, 1) + 1) / 0.5
        if way == "reference":
            low, target = place.floor().clamp(0, 3).long(), torch.zeros(6, 5)
            for row in range(6):
                target[row].index_add_(0, low[row], 0.2 * (low[row] + 1 - place[row]))
                target[row].index_add_(0, low[row] + 1, 0.2 * (place[row] - low[row]))
        else:
            target = 0.2 * (1 - (place[:, None] - torch.arange(5)[:, None]).abs()).clamp(min=0).sum(-1)
        return -(target[:, None] * share.clamp(1e-5, 1).log()).sum(-1).mean()

    return descent(model, loss)


def test_a_number_is_named_where_the_formula_of_the_reference_is_not_known(tmp_path):
    fault = verdict(tmp_path, projections, steps=2)
    assert placed(fault)[:2] == (0, "loss")
    assert cause_of(fault).proven and "is 0.8 for the reference's 0.9" in cause_of(fault).sentence


class Adapted(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.inner, self.down = nn.Linear(6, 6), nn.Linear(6, 2, bias=False)
        self.up, self.scale = nn.Linear(2, 6, bias=False), scale
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.inner(x) + self.scale * self.up(self.down(x))


def adapters(way):
    model = nn.Sequential(Adapted(1.0 if way == "fault" else 2.0), nn.Tanh(), nn.Linear(6, 3))
    return descent(model, lambda rng: f.cross_entropy(model(tensor(rng, 8, 6)), torch.randint(3, (8,), generator=rng)))


def test_a_scale_that_zeros_hide_is_read_in_the_code(tmp_path):
    fault = verdict(tmp_path, adapters, steps=3)
    assert placed(fault)[:2] in {(0, "grad"), (0, "backward")}
    assert cause_of(fault).proven and "1 for the reference's 2" in cause_of(fault).sentence


def margins(way):
    """A margin that no sample comes near before step 3."""
    model, margin = nn.Linear(4, 3), 0.4 if way == "fault" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rng = yield model, optimizer
    for number in count():
        made = model(tensor(rng, 8, 4)).sigmoid() * (1.0 if number >= 3 else 0.01)
        loss = f.relu(made - margin).square().sum() + (made - 0.5).square().mean()
        descend(loss, optimizer)
        rng = yield loss


def test_a_number_without_effect_in_the_traced_steps_is_named(tmp_path):
    fault = verdict(tmp_path, margins)
    assert placed(fault)[:2] == (3, "loss")
    assert not cause_of(fault).proven and "is 0.4 for the reference's 0.1" in cause_of(fault).sentence


def temperatures(way):
    """A temperature that depends on the number of the step, and is 1 in the first one."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    for number in count():
        heat = (0.8 if way == "fault" else 0.9) ** number
        loss = f.cross_entropy(model(tensor(rng, 8, 4)) / heat, torch.randint(3, (8,), generator=rng))
        descend(loss, optimizer)
        rng = yield loss


def test_a_number_of_the_second_step_is_proven(tmp_path):
    fault = verdict(tmp_path, temperatures)
    assert placed(fault)[:2] == (1, "loss")
    assert cause_of(fault).proven and "is 0.8 for the reference's 0.9" in cause_of(fault).sentence
    run = open_run(tmp_path / "reference")
    assert [run.steps(number)[0].trace.functions for number in range(4)] == [True, True, False, False]


# -- several networks ----------------------------------------------------------------------------------------------


def networks(way):
    """An actor with a target, in whose place one fault calls the actor; the other clamps weights to another limit."""
    actor, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    target = copy.deepcopy(actor)
    with torch.no_grad():
        target.weight *= 0.5
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (critic, actor)]
    rng = yield {"actor": actor, "critic": critic, "target": target}, optimizers
    while True:
        for _ in range(2):
            now, after = tensor(rng, 8, 4), tensor(rng, 8, 4)
            with torch.no_grad():
                chosen = (actor if way == "network" else target)(after)
                goal = 0.9 * critic(torch.cat([after, chosen], 1))
            loss = f.mse_loss(critic(torch.cat([now, actor(now).detach()], 1)), goal + now.mean(1, keepdim=True))
            descend(loss, *optimizers)
            if way in ("reference", "clamped"):
                with torch.no_grad():
                    for each in critic.parameters():
                        each.clamp_(-0.05, 0.05) if way == "clamped" else each.clamp_(-0.1, 0.1)
        loss = -critic(torch.cat([now, actor(now)], 1)).mean()
        descend(loss, *optimizers[::-1])
        rng = yield loss


def test_a_network_that_is_called_for_its_target_is_named(tmp_path):
    (fault,) = compared(tmp_path, networks, "reference", "network")
    assert placed(fault)[:2] == (0, "input")
    assert "calls `actor` where the reference calls `target`" in cause_of(fault).sentence


def test_other_limits_of_weights_within_a_step_are_named(tmp_path):
    (fault,) = compared(tmp_path, networks, "reference", "clamped")
    assert placed(fault)[:2] == (0, "forward")
    assert cause_of(fault).kind == "weights_clamped" and cause_of(fault).proven
    assert "the candidate to 0.05, the reference to 0.1" in cause_of(fault).sentence


def delays(way):
    """The critic is updated twice for each update of the actor; the reference's first update of the actor is early."""
    actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (critic, actor)]
    rng = yield {"actor": actor, "critic": critic}, optimizers
    for number in count():
        for _ in range(1 if number == 0 and way == "reference" else 2):
            x, action = tensor(rng, 8, 4), tensor(rng, 8, 2)
            loss = (critic(torch.cat([x, action], 1)) - x.sum(1, keepdim=True)).square().mean()
            descend(loss, optimizers[0])
        loss = -critic(torch.cat([x, actor(x)], 1)).mean()
        descend(loss, optimizers[1])
        rng = yield loss


def test_other_numbers_of_updates_are_no_other_samples(tmp_path):
    (fault,) = compared(tmp_path, delays, "reference", "fault", steps=4)
    assert placed(fault)[:2] == (0, "input")
    assert cause_of(fault).kind == "step_repeated" and "the first time for 1" in cause_of(fault).sentence


# -- inputs --------------------------------------------------------------------------------------------------------


class Twins(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.net, self.out, self.way = nn.Linear(5, 8), nn.Linear(16, 3), way

    def forward(self, first, second):
        pair = (second, first) if self.way == "fault" else (first, second)
        return self.out(torch.cat([torch.tanh(self.net(x)) for x in pair], 1))


def twins(way):
    model = Twins(way)

    def loss(rng):
        return f.cross_entropy(model(tensor(rng, 8, 5), tensor(rng, 8, 5)), torch.randint(3, (8,), generator=rng))

    return descent(model, loss)


def test_exchanged_inputs_of_a_model_are_named(tmp_path):
    fault = verdict(tmp_path, twins, steps=2)
    assert cause_of(fault).kind == "inputs_exchanged" and cause_of(fault).proven


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 16), nn.Linear(16, 3)

    def forward(self, x, state):
        state = self.cell(x, state)
        return self.out(state), state


def resets(way):
    """Two numbers of all states are set to zero, at another step in the fault."""
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng, state = (yield model, optimizer), torch.zeros(20, 16)
    for number in count():
        made, state = model(tensor(rng, 20, 4), state)
        loss = f.cross_entropy(made, torch.randint(3, (20,), generator=rng))
        descend(loss, optimizer)
        state = state.detach()
        if number == (1 if way == "fault" else 3):
            state = state * torch.ones(16).index_fill(0, torch.tensor([2, 5]), 0.0)
        rng = yield loss


def test_parts_of_an_input_that_are_zero_are_named(tmp_path):
    fault = verdict(tmp_path, resets)
    assert placed(fault)[:2] == (2, "input")
    assert "zero at 2, 5 of axis 1" in cause_of(fault).sentence


# -- losses of other functions -------------------------------------------------------------------------------------


def two_losses(way):
    """Both losses are called in another order, and reduced by the loop or the function; the fault leaves out one."""
    model = nn.Linear(6, 7)

    def loss(rng):
        made, y, z = model(tensor(rng, 8, 6)), torch.randint(3, (8,), generator=rng), tensor(rng, 8, 4)
        if way == "reference":
            box = f.smooth_l1_loss(made[:, 3:], z, reduction="sum")
            kind = f.cross_entropy(made[:, :3], y, reduction="sum")
        else:
            kind = f.cross_entropy(made[:, :3], y, reduction="none").sum()
            box = f.smooth_l1_loss(made[:, 3:], z, reduction="none").sum() * (0.5 if way == "fault" else 1.0)
        return (box + kind) / 8

    return descent(model, loss)


def test_losses_in_another_order_are_no_other_losses(tmp_path):
    fault = verdict(tmp_path, two_losses, steps=2)
    assert placed(fault)[:2] == (0, "loss")
    assert "cross_entropy" not in cause_of(fault).sentence and "set differently" not in cause_of(fault).sentence


def paths(way):
    """The score of a path in a chain: gathered step by step, or as products with one-hot labels, all at once."""
    model = nn.Linear(6, 5)
    steps = nn.Parameter(0.3 * torch.randn(5, 5, generator=torch.Generator().manual_seed(4)))
    model.register_parameter("steps", steps)

    def loss(rng):
        x, y = tensor(rng, 4, 7, 6), torch.randint(5, (4, 7), generator=rng)
        score = model(x)
        if way == "reference":
            total = score[:, 0].gather(1, y[:, :1]).squeeze(1)
            for t in range(1, 7):
                total = total + steps[y[:, t - 1], y[:, t]] + score[:, t].gather(1, y[:, t : t + 1]).squeeze(1)
        else:
            hot = f.one_hot(y, 5).float()
            pair = (hot[:, :-1] @ steps) * hot[:, 1:]
            pair = pair.mean(-1) if way == "fault" else pair.sum(-1)
            total = (hot * score).sum((1, 2)) + pair.sum(1)
        return (total**2).mean()

    return descent(model, loss)


def test_a_mean_for_a_sum_is_named_in_code_that_is_written_otherwise(tmp_path):
    fault = verdict(tmp_path, paths, steps=2)
    assert placed(fault)[:2] == (0, "loss")
    assert cause_of(fault).sentence.startswith("the candidate takes the mean, the reference the sum (the first mean()")
    assert cause_of(fault).proven


class Margin(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.bound = nn.Linear(6, 5), 20.0 if way == "fault" else -20.0

    def forward(self, x):
        z = self.first(x)
        return torch.where(z > self.bound, 2 * z, z - 1)


def thresholds(way):
    model = Margin(way)
    return descent(model, lambda rng: model(tensor(rng, 4, 6)).square().mean())


def test_a_number_that_is_compared_with_is_named_and_not_what_it_lets_through(tmp_path):
    """With any number beyond all values, the mask is as good as missing, and as good as that of the opposite."""
    fault = verdict(tmp_path, thresholds, steps=2)
    assert cause_of(fault).kind == "threshold" and cause_of(fault).proven
    assert "the number is 20 for the reference's -20 (gt() in `(root)`)" in cause_of(fault).sentence


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.centers = nn.Linear(6, 9), nn.Parameter(torch.zeros(3, 9))

    def forward(self, x, y):
        z = self.body(x)
        return z, z - self.centers[y]


def centered(way):
    """Two optimizers; the gradients of one are scaled by hand. The fault does not zero them."""
    model = Centered()
    optimizers = [torch.optim.SGD(model.body.parameters(), 0.1), torch.optim.SGD([model.centers], 0.5)]
    rng = yield model, optimizers
    while True:
        y = torch.randint(3, (8,), generator=rng)
        z, away = model(tensor(rng, 8, 6), y)
        loss = f.cross_entropy(z, y) + 0.1 * away.pow(2).sum(1).mean()
        for each in optimizers[: 1 if way == "fault" else 2]:
            each.zero_grad()
        loss.backward()
        model.centers.grad /= 0.1
        for each in optimizers:
            each.step()
        rng = yield loss


def test_gradients_of_one_of_two_optimizers_that_are_not_zeroed_are_named(tmp_path):
    """What is left over is scaled again: 10 times the gradients of the step before."""
    fault = verdict(tmp_path, centered, steps=3)
    assert placed(fault)[:2] == (1, "grad")
    assert cause_of(fault).proven and "gradients of (root)/centers are made of this step's" in cause_of(fault).sentence
    assert "step 0 (1 and 10 times)" in cause_of(fault).sentence


class Taking(nn.Module):
    """Takes its weights as arguments, as the inner loop of a training that learns to learn does."""

    def __init__(self, way):
        super().__init__()
        self.act = torch.sigmoid if way == "fault" else torch.tanh
        self.w, self.v = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5, 3))

    def forward(self, x, w, v):
        return self.act(x @ w) @ v


def taking(way):
    model = Taking(way)
    return descent(model, lambda rng: model(tensor(rng, 8, 6), model.w, model.v).square().mean())


def test_weights_that_a_model_is_given_are_no_inputs_that_differ(tmp_path):
    fault = verdict(tmp_path, taking, steps=2)
    assert placed(fault)[:2] == (0, "forward")
    assert "sigmoid for the reference's tanh" in cause_of(fault).sentence
    assert not fault.independent


def spread_out(way):
    """The spread is 1 at the start: another function of it makes the squares count 4 times, as of 4 samples."""
    model = nn.Linear(6, 3)
    model.register_parameter("spread", nn.Parameter(torch.zeros(3)))

    def loss(rng):
        away = model(tensor(rng, 4, 6)) - tensor(rng, 4, 3)
        if way == "reference":
            return (0.5 * torch.exp(-2 * model.spread) * away**2 + model.spread).mean() + model.weight.square().mean()
        spread = torch.sigmoid(model.spread) if way == "fault" else model.spread.exp()
        return (model.spread + 0.5 * (away / spread) ** 2).mean() + model.weight.square().mean()

    return descent(model, loss)


def test_a_factor_that_is_the_batch_by_chance_is_no_reduction(tmp_path):
    fault = verdict(tmp_path, spread_out, steps=2)
    assert placed(fault)[:2] == (0, "loss")
    assert "samples" not in cause_of(fault).sentence


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x):
        z = torch.tanh(self.body(x))
        return self.head(z), z


def distilled(way):
    """Two tensors of a teacher, of other shapes; the square of the temperature, or the temperature twice."""
    model, teacher = Student(), nn.Linear(6, 13)
    t = 2.0 if way == "fault" else 4.0

    def loss(rng):
        x = tensor(rng, 8, 6)
        with torch.no_grad():
            taught, hidden = teacher(x).split([4, 9], 1)
        z, h = model(x)
        if way == "reference":
            soft = f.kl_div(f.log_softmax(z / t, 1), f.softmax(taught / t, 1), reduction="batchmean") * t * t
        else:
            wanted = f.softmax(taught / t, 1)
            soft = (wanted * (wanted.log() - f.log_softmax(z / t, 1))).sum(1).mean() * t**2
        return soft + f.mse_loss(h, hidden)

    return descent(model, loss)


def test_a_temperature_is_named_beside_other_tensors_of_a_teacher(tmp_path):
    fault = verdict(tmp_path, distilled, steps=2)
    assert cause_of(fault).proven and "temperature" in cause_of(fault).kind
    assert "whose square multiplies the term, is 2 for the reference's 4" in cause_of(fault).sentence
