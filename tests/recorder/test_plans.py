"""A step that follows the plan of one before is recorded as it is without one, to the bit, whatever happens in it."""

from __future__ import annotations

import signal
import weakref

import pytest
import torch
from kit.nets import batch, cnn, one_step
from torch.utils.checkpoint import checkpoint

import padiff
from padiff.recorder.template_matcher import Planning, TemplateMatcher

STEPS = 10
#: The step in which something else happens.
ODD = 4


class Two(torch.nn.Module):
    """Gives several tensors, one of which lies otherwise."""

    def forward(self, x, *, y, odd):
        turned = (y.t() * 2).t()
        if odd == "another name":
            return x.sin(), {"other": turned}
        return x.sin(), {"turned": turned.double() if odd == "the second is another" else turned}


class Weight(torch.nn.Module):
    """Gives its own parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self):
        return self.weight


class Experts(torch.nn.Module):
    """Takes what code outside of it has chosen, and hands some of it on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 8 * 8).reshape(8, 8))

    def forward(self, x, places, weights):
        return x + (self.weight[places] * weights[..., None]).sum(1), weights


class Net(torch.nn.Module):
    def __init__(self, odd, chooses=False):
        super().__init__()
        self.chooses, self.experts = chooses, Experts()
        self.odd, self.number, self.old, self.kept = odd, 0, None, None
        self.a, self.norm, self.relu = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True)
        self.shared, self.same, self.two = torch.nn.Linear(8, 8), torch.nn.Identity(), Two()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.weight, self.out = Weight(), torch.nn.Linear(8, 3)

    def now(self, odd):
        return self.odd == odd and self.number == ODD

    def forward(self, x, unused=None):
        x = self.a(x)
        if self.odd == "a hook of the user's" and self.number != ODD:  # so that one that stays is noticed
            x.register_hook(lambda gradient: gradient * self.number)
        if self.odd.startswith("an old graph"):
            self.old, self.kept = self.kept, x.sum()
        x = self.relu(self.norm(x))
        if self.chooses and not self.now("no choice"):
            weights, places = (x if self.odd == "an output is ranked" else x.softmax(-1)).topk(
                3 if self.now("another choice") else 2, -1
            )
            x, weights = self.experts(x, places, weights)
            x = x * (weights > 0.2).any(-1, keepdim=True)
        for _ in range(3 if self.now("more calls") else 2):
            x = self.shared(x)
        if self.odd == "written by ways that are not counted":
            x.data.mul_(1 + self.number)
        if self.now("written in place"):
            x.mul_(2)
        if self.now("narrower"):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.same(x) + self.inner(x)
        elif self.odd == "recomputed" or self.now("recomputed once"):
            x = self.same(x) + checkpoint(self.inner, x, use_reentrant=False)
        elif self.now("without a graph"):
            with torch.no_grad():
                x = self.same(x) + self.inner(x)
        elif not self.now("fewer calls"):
            x = self.same(x) + self.inner(x)
        if self.now("a transform"):
            torch.func.vmap(self.inner)(torch.ones(2, 8))
        if self.now("another order"):
            self.same(x)
        if self.now("raises"):
            self.number = -1
            raise ArithmeticError
        p, q = self.two(x, y=x, odd=self.odd if self.number == ODD else "")
        (q,) = q.values()
        return self.out(p * q.float() * self.weight())


class Training:
    """A training in which what its name says happens."""

    def __init__(self, odd, chooses=False):
        torch.manual_seed(5)
        self.odd, self.model = odd, Net(odd, chooses)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def step(self, number):
        model, odd = self.model, self.odd
        model.number = number
        now = number == ODD
        rows = 7 if now and odd == "another shape" else 6
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(number))
        if now and odd == "a layer is another":
            torch.manual_seed(6)
            model.inner[0] = torch.nn.Linear(8, 8)
        if now and odd == "a layer is frozen":
            model.shared.requires_grad_(False)
        if now and odd == "a call in evaluation mode":
            model.eval()(x)
            model.train()
        if now and odd == "an old graph goes back before":
            model.kept.backward()
        losses = []
        for part in range(2 if odd.startswith("batches") and not (now and odd == "batches, one fewer") else 1):
            try:
                if now and odd == "another input":
                    out = model(x, x + 1)
                elif now and odd == "by name":
                    out = model(x=x)
                else:
                    out = model(x + part)
            except ArithmeticError:
                out = model(x + part)
            loss = out.square().mean()
            if odd == "another order of gradients":
                two = [model.inner(x @ model.a.weight.detach().t()).mean() for _ in range(2)]
                for each in reversed(two) if now else two:
                    each.backward()
            if now and odd == "an old graph goes back after":
                model.old.backward()
            if odd == "back twice" or (now and odd == "back twice once"):
                loss.backward(retain_graph=True)
            if not (now and odd == "no backward"):
                loss.backward(retain_graph=odd.startswith("an old graph"))
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses)


def recorded(training, folder, monkeypatch, plans):
    """Record a training, with plans or without; returns what its steps gave, and its files by name; and of the steps
    that began to follow a plan, whether they did so to the end.
    """
    whole = []
    end = TemplateMatcher.end

    def ended(following):
        whole.append(following.whole)
        end(following)

    with monkeypatch.context() as patched:
        patched.setattr(TemplateMatcher, "end", ended)
        if not plans:
            patched.setattr(Planning, "begin", lambda planning, about: None)
        gave = []
        with padiff.record(training.model, folder, optimizer=training.optimizer, detail="sketch") as rec:
            for number in range(STEPS):
                gave.append(training.step(number))
                rec.try_dump()
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("step.safetensors"))}
    return gave, files, whole


ALIKE = [True] * (STEPS - 2)
#: One step leaves the plan, and so is unlike the one before; another plan is made once two are alike.
ONCE = [True, True, False, True, True]
ODDITIES = {
    "nothing": ALIKE,
    "another shape": ONCE,
    "more calls": ONCE,
    "fewer calls": ONCE,
    "another order": ONCE,
    "another order of gradients": ONCE,
    "another name": ONCE,
    "another input": ONCE,
    "the second is another": ONCE,
    "raises": ONCE,
    "narrower": ONCE,
    "without a graph": ONCE,
    "written in place": ONCE,
    "written by ways that are not counted": ALIKE,
    "recomputed": [],
    # What is left out of a step for being called elsewhere does not tell whether the next one is alike.
    "recomputed once": [True, True, False, True, True, True, True],
    "a call in evaluation mode": [True, True, False, True, True, True, True],
    "a transform": [True, True, False, True, True],
    # Nothing is expected of other layers.
    "a layer is another": [True] * (STEPS - 3),
    "a layer is frozen": ALIKE,
    "a hook of the user's": ALIKE,
    "an old graph goes back before": ALIKE,
    "an old graph goes back after": ALIKE,
    "back twice": ALIKE,
    "back twice once": ONCE,
    "no backward": ONCE,
    "batches": ALIKE,
    "batches, one fewer": ONCE,
    "by name": ALIKE,
}
CHOICES = {**ODDITIES, "an output is ranked": ALIKE, "another choice": ONCE, "no choice": ONCE}


@pytest.mark.filterwarnings("ignore:padiff:RuntimeWarning")
@pytest.mark.parametrize(("odd", "chooses"), [*((odd, False) for odd in ODDITIES), *((odd, True) for odd in CHOICES)])
def test_what_is_recorded_is_the_same_with_a_plan_and_without(odd, chooses, tmp_path, monkeypatch):
    plain = Training(odd, chooses)
    expected = [plain.step(number) for number in range(STEPS)]
    trainings = Training(odd, chooses), Training(odd, chooses)
    # From one line: where the first step's layers are called is recorded.
    runs = [
        recorded(training, tmp_path / str(plans), monkeypatch, plans)
        for training, plans in zip(trainings, (True, False))
    ]
    (gave, files, whole), (_, slow, _) = runs
    assert whole == CHOICES[odd]
    assert all(torch.equal(one, other) for one, other in zip(gave, expected))
    for training in trainings:
        for name, value in plain.model.state_dict().items():
            assert torch.equal(training.model.state_dict()[name], value), name
    assert len(files) == STEPS and files.keys() == slow.keys()
    for name, content in files.items():
        assert content == slow[name], name


class OfKit:
    def __init__(self, kit):
        kit.seed(7)
        self.kit, self.model = kit, cnn(kit)
        self.optimizer = kit.adam(self.model.parameters())

    def step(self, number):
        x, y = batch(self.kit, (8, 1, 6, 6), 5, seed=number)
        return self.kit.numpy(one_step(self.kit, self.model, self.optimizer, x, y))


def test_steps_follow_plans_in_both_frameworks(kit, tmp_path, monkeypatch):
    runs = [recorded(OfKit(kit), tmp_path / str(plans), monkeypatch, plans) for plans in (True, False)]
    (gave, files, whole), (others, slow, _) = runs
    assert whole == ALIKE
    assert [each.tobytes() for each in gave] == [each.tobytes() for each in others]
    assert files == slow


def test_a_plan_keeps_no_output_and_no_model(tmp_path):
    training, outputs, graphs = Training("nothing"), [], []
    training.model.two.register_forward_hook(lambda layer, args, output: outputs.append(weakref.ref(output[0])))
    with padiff.record(training.model, tmp_path / "run", optimizer=training.optimizer, detail="sketch") as rec:
        for number in range(5):
            training.step(number)
            assert outputs[-1]() is None
            out = training.model(torch.ones(6, 6))
            graphs += [out] if number > 1 else []  # of steps that follow a plan
            rec.try_dump()
    assert rec._output._known.plan is None
    model = weakref.ref(training.model.inner)
    del training, rec
    assert model() is None and graphs


def test_ctrl_c_in_a_gradient_that_is_expected_is_a_keyboard_interrupt(kit, tmp_path, monkeypatch):
    training, caught, copied = OfKit(kit), None, TemplateMatcher._copied

    def interrupted(following, *args):
        if following._events[following._at].place >= 0:  # not of an output
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return copied(following, *args)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with padiff.record(training.model, optimizer=training.optimizer, detail="sketch") as rec:
            for number in range(5):
                if number == 3:
                    monkeypatch.setattr(TemplateMatcher, "_copied", interrupted)
                training.step(number)
                rec.try_dump()
    except BaseException as error:
        caught = error
    finally:
        signal.signal(signal.SIGINT, before)
    assert type(caught) is KeyboardInterrupt
    assert number == 3
