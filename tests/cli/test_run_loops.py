"""`padiff run`: loops of the kinds that people write, recorded with the output that they have without."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import padiff
from cli.test_run_command import call, run

pytestmark = pytest.mark.slow

HEAD = {
    "torch": """
import itertools, sys, torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
def sgd(parameters): return torch.optim.SGD(list(parameters), lr=0.05)
def randn(*shape): return torch.randn(*shape)
def show(*losses): print(*(float(loss).hex() for loss in losses))
""",
    "paddle": """
import itertools, sys, paddle
from paddle import nn
import paddle.nn.functional as F
paddle.seed(0)
nn.Module = nn.Layer
def sgd(parameters):
    optimizer = paddle.optimizer.SGD(0.05, parameters=list(parameters))
    optimizer.zero_grad = optimizer.clear_grad
    return optimizer
def randn(*shape): return paddle.randn(shape)
def show(*losses): print(*(float(loss).hex() for loss in losses))
""",
}
NETS = """
def net(a, b, c, between): return nn.Sequential(nn.Linear(a, b), between, nn.Linear(b, c))
netG, netD = net(3, 4, 2, nn.Tanh()), net(2, 4, 1, nn.ReLU())
"""
PAIR = NETS + "optD, optG = sgd(netD.parameters()), sgd(netG.parameters())\n"
DCGAN = (
    PAIR
    + """
for epoch in range(2):
    for i in range(2):
        netD.clear_gradients() if hasattr(netD, "clear_gradients") else netD.zero_grad()
        real = netD(randn(5, 2)).mean()
        real.backward()
        fake = netG(randn(5, 3))
        lossD = netD(fake.detach()).square().mean()
        lossD.backward()
        optD.step()
        optG.zero_grad()
        lossG = -netD(fake).mean()
        lossG.backward()
        optG.step()
        show(lossD, lossG)
"""
)
G_FIRST = (
    PAIR
    + """
for i in range(4):
    optG.zero_grad()
    fake = netG(randn(5, 3))
    lossG = -netD(fake).mean()
    lossG.backward()
    optG.step()
    optD.zero_grad()
    lossD = netD(fake.detach()).square().mean()
    lossD.backward()
    optD.step()
    show(lossD, lossG)
"""
)
# A critic that steps five times, in functions; the names are those of main()'s variables.
WGAN = (
    NETS.replace("netG, netD =", "nets =")
    + """
def critic(D, G, optimizer):
    loss = D(G(randn(5, 3)).detach()).mean() - D(randn(5, 2)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
def generate(D, G, optimizer):
    loss = -D(G(randn(5, 3))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
def main():
    netG, netD = nets
    optG, optD = sgd(netG.parameters()), sgd(netD.parameters())
    for i in range(4):
        for _ in range(5):
            loss = critic(netD, netG, optD)
        show(loss, generate(netD, netG, optG))
main()
"""
)
# D, G, G in an object, whose attributes are what it trains.
OBJECT = (
    NETS.replace("netG, netD =", "nets =")
    + """
class Trainer:
    def __init__(self):
        self.netG, self.netD = nets
        self.optimizers = {"G": sgd(self.netG.parameters()), "D": sgd(self.netD.parameters())}
    def step(self):
        self.step_d()
        self.step_g()
        self.step_g()
    def step_d(self):
        self.optimizers["D"].zero_grad()
        loss = self.netD(self.netG(randn(5, 3)).detach()).square().mean()
        loss.backward()
        self.optimizers["D"].step()
        show(loss)
    def step_g(self):
        self.optimizers["G"].zero_grad()
        loss = -self.netD(self.netG(randn(5, 3))).mean()
        loss.backward()
        self.optimizers["G"].step()
        show(loss)
    def train(self):
        i = 0
        while i < 4:
            self.step()
            i += 1
Trainer().train()
"""
)
# D, then G and D at once, by their places in a list of optimizers.
PLACES = (
    NETS
    + """
optimizers = [sgd(netG.parameters()), sgd(netD.parameters())]
def update(loss, *which):
    loss.backward()
    for k in which:
        optimizers[k].step()
    for each in optimizers:
        each.zero_grad()
    show(loss)
for i in range(4):
    update(netD(netG(randn(5, 3)).detach()).square().mean(), 1)
    update(-netD(netG(randn(5, 3))).mean(), 0, 1)
"""
)
# The generator steps in every second iteration only, first in the first one.
RARELY = (
    PAIR
    + """
for i in range(7):
    loss = netD(netG(randn(5, 3)).detach()).square().mean()
    optD.zero_grad()
    loss.backward()
    optD.step()
    show(loss)
    if i % 2 == 0:
        loss = -netD(netG(randn(5, 3))).mean()
        optG.zero_grad()
        loss.backward()
        optG.step()
"""
)
CYCLE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(2, 2)
    def forward(self, x):
        return self.l(x)
netG_A2B, netG_B2A, netD_A = Net(), Net(), Net()
optG, optD = sgd(itertools.chain(netG_A2B.parameters(), netG_B2A.parameters())), sgd(netD_A.parameters())
for i in range(4):
    a = randn(5, 2)
    loss = (netG_B2A(netG_A2B(a)) - a).abs().mean() + netD_A(a).mean()
    optG.zero_grad()
    loss.backward()
    optG.step()
    optD.zero_grad()
    other = netD_A(a).square().mean()
    other.backward()
    optD.step()
    show(loss, other)
"""
LISTED = """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
optimizers = [sgd(net[0].parameters()), sgd(net[2].parameters())]
for i in range(4):
    loss = net(randn(5, 3)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    show(loss)
"""
PARTS = """
encoder, head = nn.Linear(3, 4), nn.Linear(4, 2)
optimizer = sgd(list(encoder.parameters()) + list(head.parameters()))
for i in range(4):
    loss = head(encoder(randn(5, 3))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
BARE = """
net = nn.Linear(3, 2)
if "paddle" in sys.modules and "torch" not in globals():
    sigma = paddle.create_parameter([1], "float32")
else:
    sigma = nn.Parameter(torch.ones(1))
optimizer = sgd([*net.parameters(), sigma])
for i in range(4):
    loss = (net(randn(5, 3)) * sigma).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
# No layer owns the tensor that has an optimizer of its own, nor those of the list.
STRAY = """
if "paddle" in sys.modules and "torch" not in globals():
    half = nn.initializer.Constant(0.5)
    def trained(*shape): return paddle.create_parameter(list(shape), "float32", default_initializer=half)
else:
    def trained(*shape): return torch.full(shape, 0.5, requires_grad=True)
log_alpha, codes = trained(1), [trained(2), trained(3)]
net = nn.Linear(3, 2)
optimizer, second = sgd([*net.parameters(), *codes]), sgd([log_alpha])
for i in range(4):
    loss = (net(randn(5, 3) * codes[1]) + codes[0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tuned = (log_alpha.exp() * float(loss)).sum()
    second.zero_grad()
    tuned.backward()
    second.step()
    show(loss, tuned)
"""
# The image is trained, and the model, whose parameters nothing trains, is called in evaluation mode.
IMAGE = """
body = nn.Sequential(nn.Conv2D(1, 2, 3) if hasattr(nn, "Conv2D") else nn.Conv2d(1, 2, 3), nn.Tanh())
body.eval()
if "paddle" in sys.modules and "torch" not in globals():
    image = paddle.create_parameter([1, 1, 5, 5], "float32")
else:
    image = torch.rand(1, 1, 5, 5).requires_grad_(True)
for p in body.parameters():
    p.stop_gradient = True
    p.requires_grad = False
optimizer, style = sgd([image]), body(randn(1, 1, 5, 5)).detach()
for i in range(4):
    loss = (body(image) - style).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
# The loss is computed with a network that does not train.
PERCEPTUAL = """
net, features = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh())
features.eval()
for p in features.parameters():
    p.stop_gradient = True
    p.requires_grad = False
optimizer = sgd(net.parameters())
for i in range(4):
    x, y = randn(5, 3), randn(5, 3)
    loss = (features(net(x)) - features(y)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
# Both branches hold a step of the one optimizer, and the scheduler steps, too.
ACTOR = """
actor, critic = nn.Linear(3, 2), nn.Linear(3, 1)
a_opt, c_opt = sgd(actor.parameters()), sgd(critic.parameters())
class Schedule:
    def step(self): pass
schedule = Schedule()
for i in range(4):
    for t in range(3):
        actor(randn(1, 3))
    value = critic(randn(5, 3)).square().mean()
    loss = actor(randn(5, 3)).square().mean()
    a_opt.zero_grad()
    c_opt.zero_grad()
    (loss + value).backward()
    if len(sys.argv) > 5:
        c_opt.step()
    else:
        c_opt.step()
    a_opt.step()
    schedule.step()
    show(loss, value)
"""
TEACHER = """
teacher, student = nn.Linear(3, 2), nn.Linear(3, 2)
optimizer = sgd(student.parameters())
for i in range(4):
    loss = (teacher(randn(5, 3)).detach() - student(randn(5, 3))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
# A wider teacher, of which one layer has the shapes of one of the student's.
DISTILLED = """
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(3, width), nn.Linear(width, 4), nn.Linear(4, 2)
    def forward(self, x): return self.head(self.middle(self.body(x).tanh()))
student, teacher, unused = Net(5), Net(9), Net(7)
teacher.eval(); unused.eval()
optimizer = sgd(student.parameters())
for i in range(4):
    x = randn(5, 3)
    loss = (teacher(x).detach() - student(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
SIAMESE = """
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = sgd(net.parameters())
for i in range(4):
    loss = (net(randn(5, 3)) - net(randn(5, 3))).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
REINFORCE = """
policy = nn.Linear(3, 1)
optimizer = sgd(policy.parameters())
for episode in range(4):
    logs = []
    for t in range(6):
        logs.append(F.sigmoid(policy(randn(1, 3))).log())
    loss = -sum(logs).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
VAE = """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.mu, self.logvar, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(2, 3)
    def encode(self, x):
        h = F.relu(self.a(x))
        return self.mu(h), self.logvar(h)
    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.b(mu + randn(*mu.shape) * (0.5 * logvar).exp()), mu, logvar
model = VAE()
optimizer = sgd(model.parameters())
def train():
    model.train()
    for i in range(4):
        x = randn(5, 3)
        y, mu, logvar = model(x)
        loss = (y - x).square().sum() - 0.5 * (1 + logvar - mu.square() - logvar.exp()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(loss)
train()
"""
RNN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(2, 4), nn.Linear(4, 3)
    def forward(self, x):
        y, _ = self.rnn(x)
        return F.log_softmax(self.out(y[-1]), -1)
net = Net()
optimizer = sgd(net.parameters())
for i in range(4):
    loss = -net(randn(5, 3, 2))[:, 0].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
# One of two branches steps; the loop is another function's, and goes over what a call gives.
BRANCHES = (
    NETS.replace("netG, netD =", "nets =")
    + """
class Model:
    def __init__(self, half):
        self.half = half
        self.netG, self.netD = nets
        self.optimizer_G, self.optimizer_D = sgd(self.netG.parameters()), sgd(self.netD.parameters())
    def optimize_parameters(self, x):
        self.fake = self.netG(x)
        self.optimizer_D.zero_grad()
        self.loss_D = self.netD(self.fake.detach()).square().mean()
        self.loss_D.backward()
        if self.half:
            self.update(self.optimizer_D)
        else:
            self.optimizer_D.step()
        self.optimizer_G.zero_grad()
        self.loss_G = -self.netD(self.fake).mean()
        self.loss_G.backward()
        self.optimizer_G.step() if not self.half else self.update(self.optimizer_G)
    def update(self, optimizer):
        optimizer.step()
def main():
    model = Model(len(sys.argv) == 1)
    for epoch in range(2):
        for i, x in enumerate(randn(2, 5, 3)):
            model.optimize_parameters(x)
            show(model.loss_D, model.loss_G)
main()
"""
)
# The functions that step are wrapped by a decorator of a library.
DECORATED = (
    PAIR
    + """
import contextlib
class Timer(contextlib.ContextDecorator):
    def __enter__(self): return self
    def __exit__(self, *error): return False
@Timer()
def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
@Timer()
def critic():
    update(optD, netD(netG(randn(5, 3)).detach()).square().mean())
@Timer()
def generator():
    update(optG, -netD(netG(randn(5, 3))).mean())
for i in range(4):
    critic()
    generator()
"""
)
# Agents that learn in turn, each with an optimizer of its own: an attribute, or an item of a list.
AGENTS = """
class Agent:
    def __init__(self, k):
        self.actor, self.k = nn.Linear(2, 1), k
        self.optimizer = sgd(self.actor.parameters())
    def learn(self, team, x):
        given = [agent.actor(x) if agent.k == self.k else agent.actor(x).detach() for agent in team]
        loss = sum(given).square().mean()
        self.optimizer.zero_grad(); loss.backward(); self.optimizer.step()
        show(loss)
team = [Agent(k) for k in range(3)]
for step in range(4):
    x = randn(5, 2)
    for agent in team:
        agent.learn(team, x)
"""
OF_LISTS = """
actors = [nn.Linear(2, 1) for _ in range(3)]
optimizers = [sgd(each.parameters()) for each in actors]
for step in range(4):
    x = randn(5, 2)
    for i in range(3):
        loss = (actors[i](x) + actors[i - 1](x).detach()).square().mean()
        optimizers[i].zero_grad(); loss.backward(); optimizers[i].step()
        show(loss)
"""
KINDS = {
    "agents": (AGENTS, ["actor", "actor_", "actor__"], 4),
    "of lists": (OF_LISTS, ["actors_0", "actors_1", "actors_2"], 4),
    "decorated": (DECORATED, ["netG", "netD"], 4),
    "branches": (BRANCHES, ["netG", "netD"], 4),
    "dcgan": (DCGAN, ["netG", "netD"], 4),
    "generator first": (G_FIRST, ["netG", "netD"], 4),
    "wgan": (WGAN, ["netG", "netD"], 4),
    "object": (OBJECT, ["netG", "netD"], 4),
    "places": (PLACES, ["netG", "netD"], 4),
    "rarely": (RARELY, ["netG", "netD"], 4),
    "cycle": (CYCLE, ["netG_A2B", "netG_B2A", "netD_A"], 4),
    "listed": (LISTED, ["0", "1", "2"], 4),
    "parts": (PARTS, ["encoder", "head"], 4),
    "bare": (BARE, ["net"], 4),
    "stray": (STRAY, ["net"], 4),
    "image": (IMAGE, ["body"], 4),
    "perceptual": (PERCEPTUAL, ["net", "features"], 4),
    "actor": (ACTOR, ["actor", "critic"], 4),
    "teacher": (TEACHER, ["student", "teacher"], 4),
    "distilled": (DISTILLED, ["student", "teacher"], 4),
    "teacher in training mode": (DISTILLED.replace("teacher.eval()", "teacher.train()"), ["student", "teacher"], 4),
    "siamese": (SIAMESE, ["0", "1", "2"], 4),
    "reinforce": (REINFORCE, [], 4),
    "vae": (VAE, ["a", "mu", "logvar", "b"], 4),
    "rnn": (RNN, ["rnn", "out"], 4),
}


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tops(folder: str) -> list[str]:
    """Return the names of the layers directly below the root."""
    return [layer.path for layer in padiff.open_run(folder).info.layers if "." not in layer.path][1:]


def test_optimizers_that_step_while_backward_runs_are_one_step_an_iteration():
    pytest.importorskip("torch")
    text = """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
optimizers = {p: sgd([p]) for p in net.parameters()}
def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in net.parameters():
    p.register_post_accumulate_grad_hook(update)
for i in range(4):
    loss = net(randn(5, 3)).square().mean()
    loss.backward()
    show(loss)
"""
    Path("train.py").write_text(HEAD["torch"] + text)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    opened = padiff.open_run("auto")
    assert opened.numbers() == [0, 1, 2, 3] and opened.finished(), recorded.stderr
    for number in opened.numbers():
        stages = [record.stage for record in opened.steps(number)[0].records if record.layer != "(loop)"]
        assert [stages.count(stage) for stage in ("weight", "grad", "update", "forward")] == [4, 4, 4, 4]


@pytest.mark.parametrize("back", [False, True], ids=["to the end", "and back"])
def test_a_script_may_go_on_in_static_mode(back):
    pytest.importorskip("paddle")
    text = f"""
net, average = nn.Linear(3, 2), nn.Linear(3, 2)
optimizer = sgd(net.parameters())
def train(steps):
    for i in range(steps):
        loss = net(randn(5, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(loss)
train(4)
paddle.enable_static()
main, start = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(main, start):
    x = paddle.static.data("x", [None, 4])
    loss = nn.Linear(4, 1)(x).square().mean()
    paddle.optimizer.SGD(0.1).minimize(loss)
executor = paddle.static.Executor()
executor.run(start)
show(*executor.run(main, {{"x": __import__("numpy").zeros((2, 4), "float32")}}, [loss]))
if {back}:
    paddle.disable_static()
    train(2)
"""
    Path("train.py").write_text(HEAD["paddle"] + text)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    assert padiff.open_run("auto").numbers() == list(range(6 if back else 4)) and padiff.open_run("auto").finished()
    assert not Path("auto-2").exists() and "not recorded" not in recorded.stderr, recorded.stderr


def test_of_two_trainings_in_threads_one_is_recorded_whole():
    pytest.importorskip("torch")
    text = """
import threading
def train(number, losses):
    generator = torch.Generator().manual_seed(number)
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.fill_(number + 1)
        net.bias.zero_()
    optimizer = sgd(net.parameters())
    for i in range(6):
        loss = net(torch.randn(5, 3, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        barrier.wait()
barrier = threading.Barrier(2)
both = [[], []]
threads = [threading.Thread(target=train, args=(k, both[k])) for k in range(2)]
for each in threads: each.start()
for each in threads: each.join()
show(*both[0], *both[1])
"""
    Path("train.py").write_text(HEAD["torch"] + text)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    opened = padiff.open_run("auto")
    assert opened.numbers() == list(range(6)) and opened.finished(), recorded.stderr
    assert "not recorded" not in recorded.stderr and not Path("auto-2").exists()


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_each_kind_is_recorded_from_its_first_step(framework, kind):
    text, layers, steps = KINDS[kind]
    Path("train.py").write_text(HEAD[framework] + text)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert unchanged.returncode == 0, unchanged.stderr
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    opened = padiff.open_run("auto")
    assert (opened.numbers(), tops("auto")) == (list(range(steps)), layers), recorded.stderr
    assert opened.finished() and not Path("auto-2").exists()
    stray = {"bare": ["sigma"], "stray": ["codes_0", "codes_1", "log_alpha"], "image": ["image"]}.get(kind, [])
    if stray:
        assert [each.slot for each in opened.info.layers[0].parameters] == stray
        assert f"{', '.join(stray)} (of no layer)" in recorded.stderr
    assert "no layer of the recorded model was called" not in recorded.stderr
    # Every parameter of a model has an update in each step.
    for number in opened.numbers():
        updated = [record.site for step in opened.steps(number) for record in step.records if record.stage == "update"]
        trained = [
            p
            for layer in opened.info.layers
            for p in layer.parameters
            if p.trainable and not p.tied_to and not layer.path.startswith("teacher")
        ]
        assert len({site.partition("#")[0] for site in updated if "learning_rate" not in site}) == len(trained)


TENSORS = """
import numpy as np
rng = np.random.RandomState(0)
def tensor(a):
    return torch.tensor(a, requires_grad=True) if "torch" in globals() else paddle.to_tensor(a, stop_gradient=False)
left, right = (tensor(rng.randn(5, 3).astype("float32")) for _ in range(2))
optimizer = sgd([left, right])
for i in range(4):
    loss = F.softplus(left * right).sum()
    if {further}:
        loss = loss + F.mse_loss(left, right.detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    show(loss)
"""


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_loop_over_tensors_without_a_layer_is_recorded_with_its_losses(framework):
    for name, further in (("a", False), ("b", True)):
        Path("train.py").write_text(HEAD[framework] + TENSORS.replace("{further}", str(further)))
        recorded = run("--dir", name, "train.py")
        losses = [float.fromhex(line) for line in recorded.stdout.split()]
        opened = padiff.open_run(name)
        records = [r for number in opened.numbers() for step in opened.steps(number) for r in step.records]
        assert [float(r.value) for r in records if r.slot == "loss"] == losses, recorded.stderr
        assert sum("mse_loss" in r.slot for r in records) == (12 if further else 0)
        assert opened.info.settings.get("loss.function", "mse_loss") == "mse_loss"
    first = padiff.compare_runs("a", "b").first_diff
    assert (first.step, first.stage, first.cause.proven) == (0, "loss", True), first.message


# Of an earlier fold nothing is alive.
FOLDS = """
import gc, weakref
made = []
for fold in range(3):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = sgd(net.parameters())
    made += map(weakref.ref, (net, net[0].weight, optimizer))
    for i in range(2 + fold):
        loss = net(randn(5, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(loss)
    gc.collect()
    print(sum(each() is not None for each in made))
"""
# Both are made before the first loop.
LOOPS = (
    PAIR
    + """
def fit(net, optimizer, width, steps):
    for i in range(steps):
        loss = net(randn(5, width)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(loss)
fit(netG, optG, 3, 2)
fit(netD, optD, 2, 3)
"""
)
TUNED = """
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
for epoch in range(2):
    optimizer = sgd(net.parameters() if epoch else net[2].parameters())
    for i in range(2):
        loss = net(randn(5, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(loss)
"""


# The source does not tell that the two loops take turns.
TURNS = (
    LOOPS.partition("fit(netG")[0]
    + """
exec("for turn in range(2):\\n    fit(netG, optG, 3, 2)\\n    fit(netD, optD, 2, 3)")
"""
)
# The teacher has an optimizer, which does not step in the student's loop; its gradients are on.
TAUGHT = """
teacher, student = nn.Linear(3, 2), nn.Linear(3, 2)
first, second = sgd(teacher.parameters()), sgd(student.parameters())
for i in range(2):
    loss = teacher(randn(5, 3)).square().mean()
    loss.backward()
    first.step()
    first.zero_grad()
    show(loss)
for i in range(3):
    loss = (teacher(randn(5, 3)) - student(randn(5, 3))).square().mean()
    loss.backward()
    second.step()
    second.zero_grad()
    show(loss)
"""


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_models_that_take_turns_are_refused(framework):
    Path("train.py").write_text(HEAD[framework] + TURNS)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    assert "not recorded any more: the model of an earlier run trains again" in recorded.stderr
    assert padiff.open_run("auto").finished() and not Path("auto-3").exists()


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (FOLDS, {"auto": 2, "auto-2": 3, "auto-3": 4}),
        (LOOPS, {"auto": 2, "auto-2": 3}),
        (TUNED, {"auto": 4}),
        (TAUGHT, {"auto": 2, "auto-2": 3}),
    ],
    ids=["folds", "loops", "tuned", "taught"],
)
def test_each_training_of_a_script_has_a_run_of_its_own(framework, text, steps):
    Path("train.py").write_text(HEAD[framework] + text)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    assert sorted(path.name for path in Path().glob("auto*")) == sorted(steps), recorded.stderr
    for folder, count in steps.items():
        opened = padiff.open_run(folder)
        assert opened.finished() and opened.numbers() == list(range(count)), (folder, recorded.stderr)
        assert folder == "auto" or f"into {folder}\n" in recorded.stderr


TRAINER_TWICE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (12, 8))]
args = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=4, report_to=[], save_strategy="no",
                         num_train_epochs=1, disable_tqdm=True)
trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows)
trainer.train()
trainer.train()
second = Trainer(LlamaForCausalLM(config), args, train_dataset=rows)
second.train()
for parameter in second.model.parameters():
    print(parameter.detach().numpy().tobytes().hex())
"""
LIGHTNING_TWICE = """
import torch, pytorch_lightning as pl
torch.manual_seed(0)
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        print(loss.item().hex())
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randint(0, 3, (12,)))
for fold in range(2):
    trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         accelerator="cpu", enable_model_summary=False)
    trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=4))
"""


@pytest.mark.parametrize(
    ("text", "steps"),
    [(TRAINER_TWICE, (3, 3, 3)), (LIGHTNING_TWICE, (3, 3))],
    ids=["transformers", "lightning"],
)
def test_each_training_of_a_host_has_a_run_of_its_own(text, steps):
    Path("train.py").write_text(text)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert recorded.returncode == unchanged.returncode == 0, recorded.stderr

    def numbers(done):
        return [line for line in done.stdout.splitlines() if line.startswith(("0x", "-0x")) or line.isalnum()]

    assert numbers(unchanged) == numbers(recorded) and numbers(recorded)
    for place, count in enumerate(steps, 1):
        opened = padiff.open_run("auto" if place == 1 else f"auto-{place}")
        assert (len(opened.numbers()), opened.finished()) == (count, True), recorded.stderr
    assert not Path(f"auto-{len(steps) + 1}").exists()


COMPILED = """
import torch
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.m = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    def forward(self, x):
        return self.m(self.l(x))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = net
{compile}
@torch.no_grad()
def evaluate():
    model.eval()
    print(model(torch.ones(8, 4)).sum().item().hex())
    model.train()
{train}
for step in range(2):
    evaluate()
    print(train(torch.randn(8, 4)).item().hex())
import torch._dynamo.utils
print(dict(torch._dynamo.utils.counters["graph_break"]), torch._dynamo.utils.counters["stats"])
"""
TRAIN = """
def train(x):
    loss = model(x).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""
WAYS = {
    "wrapped": ("model = torch.compile(net, backend='eager', fullgraph=True)", TRAIN, 2),
    "aot": ("model = torch.compile(net, backend='aot_eager')", TRAIN, 2),
    "in place": ("net.compile(backend='eager', fullgraph=True)", TRAIN, 2),
    "inside": ("net.m = torch.compile(net.m, backend='eager')", TRAIN, 2),
    "loss": ("model = torch.compile(lambda x: net(x), backend='eager'); model.eval, model.train = net.eval, net.train",
             TRAIN, 2),
    "step": ("", "@torch.compile(backend='eager')" + TRAIN, 0),
    "scripted": ("net = model = torch.jit.script(net)", TRAIN, 2),
    "parallel": ("model = torch.nn.DataParallel(net)", TRAIN, 2),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_compiler_sees_nothing_of_the_watch(way):
    text, train, steps = WAYS[way]
    Path("train.py").write_text(COMPILED.replace("{compile}", text).replace("{train}", train))
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert unchanged.returncode == 0, unchanged.stderr
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    if steps:
        assert padiff.open_run("auto").numbers() == list(range(steps)), recorded.stderr
    else:
        assert "steps inside of a compiled function are not seen: set TORCH_COMPILE_DISABLE=1" in recorded.stderr


HOSTED = {
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
backward = accelerator.backward
""",
    "lightning.fabric": """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
backward = fabric.backward
""",
}


@pytest.mark.parametrize("host", HOSTED)
def test_a_loop_on_prepared_models_is_recorded(host):
    if importlib.util.find_spec(host.partition(".")[0]) is None:
        pytest.skip(f"{host} is not installed")
    loop = PARTS.partition("for i")[2].replace("head(encoder(randn(5, 3)))", "net(randn(5, 3))")
    text = HEAD["torch"] + "net = nn.Linear(3, 2)\n" + HOSTED[host] + "for i" + loop
    Path("train.py").write_text(text.replace("loss.backward()", "backward(loss)"))
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert unchanged.returncode == 0, unchanged.stderr
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    opened = padiff.open_run("auto")
    assert opened.numbers() == [0, 1, 2, 3] and "Linear, which SGD trains" in recorded.stderr
    assert {"forward", "grad", "update"} <= {record.stage for record in next(iter(opened.steps(0))).records}


BY_HAND_TORCH = """
with torch.no_grad():
    for p in net.parameters():
        p -= 0.1 * p.grad
net.zero_grad()
"""
BY_HAND_PADDLE = """
with paddle.no_grad():
    for p in net.parameters():
        p.set_value(p - 0.1 * p.grad)
net.clear_gradients()
"""


OPTIMIZER_TORCH = "optimizer.step()\noptimizer.zero_grad()\n"
OPTIMIZER_PADDLE = "optimizer.step()\noptimizer.clear_grad()\n"


@pytest.mark.parametrize(
    ("framework", "update", "make", "step"),
    [
        ("torch", BY_HAND_TORCH, "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n", OPTIMIZER_TORCH),
        ("torch", "for p in net.parameters():\n    p.data.add_(p.grad, alpha=-0.1)\n    p.grad = None\n",
         "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n", OPTIMIZER_TORCH),
        ("paddle", BY_HAND_PADDLE, "optimizer = paddle.optimizer.SGD(0.1, net.parameters())\n", OPTIMIZER_PADDLE),
    ],
)  # fmt: skip
def test_a_loop_without_an_optimizer_is_recorded_from_its_first_step(framework, update, make, step):
    def script(name, before, after):
        loop = "for i in range(5):\n    loss = net(randn(5, 3)).square().mean()\n    loss.backward()\n"
        text = f"{HEAD[framework]}net = nn.Linear(3, 2)\nnet.eval()\nnet(randn(1, 3))\nnet.train()\n{before}{loop}    "
        Path(name).write_text(text + after.replace("\n", "\n    ") + "\n    show(loss)\n")

    script("train.py", "", update)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    assert "recording a plain loop without an optimizer: Linear" in recorded.stderr
    by_hand = padiff.open_run("auto")
    assert by_hand.numbers() == [0, 1, 2, 3, 4]
    assert {"forward", "grad", "update"} <= {record.stage for record in by_hand.steps(4)[0].records}
    script("other.py", make, step)
    assert run("--dir", "other", "other.py").returncode == 0
    report = padiff.compare_runs("other", "auto")
    assert report.passed and {diff.pair.step for diff in report.diffs} == {0, 1, 2, 3, 4}, report.first_diff


def test_a_call_before_the_optimizer_is_made_is_no_training():
    text = "net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))\nnet(randn(1, 3))\n"
    text += "optimizer = torch.optim.SGD(net.parameters(), 0.1)\nfor i in range(3):\n    optimizer.zero_grad()\n"
    text += "    loss = net(randn(5, 3)).square().mean()\n    loss.backward()\n    optimizer.step()\n    show(loss)\n"
    Path("train.py").write_text(HEAD["torch"] + text)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    assert padiff.open_run("auto").numbers() == [0, 1, 2] and "which SGD trains" in recorded.stderr


@pytest.mark.parametrize(
    "loop",
    [
        # Several models; values that change without a backward; a backward that changes no values.
        "b = nn.Linear(2, 2)\nfor i in range(3):\n    b(net(randn(5, 3))).square().mean().backward()\n"
        "    for p in (*net.parameters(), *b.parameters()):\n        p.data.add_(p.grad, alpha=-0.1)\n",
        "for i in range(3):\n    net(randn(5, 3))\n    net.weight.data.mul_(0.9)\n",
        "for i in range(3):\n    net(randn(5, 3)).square().mean().backward()\n",
    ],
)
def test_a_loop_without_an_optimizer_that_is_not_understood_is_named(loop):
    Path("train.py").write_text(HEAD["torch"] + "net = nn.Linear(3, 2)\n" + loop + "show(net.weight.sum())\n")
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    assert "A loop without an optimizer is recorded from inside: with padiff.record(model, DIR)" in recorded.stderr
    assert not Path("auto").exists()


# The watch fails once at each of these, which is one line; test_own_errors.py plants an error in each function.
PLANTED = """
import padiff_cli.{module} as planted
def fail(*args, **kwargs):
    raise ZeroDivisionError("planted")
planted.{name} = fail
"""


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize(
    ("module", "name"),
    [("finding", "_owned"), ("run.loop", "TrainingRecorder"), ("run.loop", "LoopFinder._end_step")],
)
def test_an_error_of_the_watch_is_said_once(framework, module, name):
    Path("train.py").write_text(HEAD[framework] + PLANTED.format(module=module, name=name) + DCGAN)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    assert recorded.stderr.count("padiff failed: ZeroDivisionError: planted") == 1, recorded.stderr
    assert "Traceback" not in recorded.stderr


PREPARED = """
net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
teacher = nn.Linear(4, 2)
optimizer = sgd(net.parameters())
mean, scale = randn(4), 0.25
for step in range(3):
    optimizer.zero_grad()
    x = (randn(5, 4) - mean) / scale
    wanted = teacher(x).detach() * 3 + 1
    unused = randn(5) + 1
    loss = ((net(x) - wanted) ** 2).mean()
    loss.backward()
    optimizer.step()
    show(loss)
"""


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_what_the_loop_prepares_for_its_first_step_is_traced(framework):
    Path("train.py").write_text(HEAD[framework] + PREPARED)
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    traced = padiff.open_run("auto").steps(0)[0].trace
    calls = [call.function for call in traced.calls if call.layer == "(loop)"]
    assert calls[:2] == ["sub", "div"] and calls[-2:] == ["mean", "backward"], calls
    assert calls.count("mul") == 1 and calls.count("add") == 1, calls  # of what is wanted, and of nothing else


# As `paddle.distributed.fleet` does while paddle is imported.
WHILE_IMPORTED = """
linalg, paddle.__spec__._initializing = paddle.linalg, True
del paddle.linalg
paddle.optimizer.Optimizer(0.0, parameters=[paddle.create_parameter([2], "float32")])
paddle.linalg, paddle.__spec__._initializing = linalg, False
"""


def test_an_optimizer_that_paddle_makes_while_it_is_imported_begins_nothing():
    Path("train.py").write_text(HEAD["paddle"] + WHILE_IMPORTED + PREPARED)
    recorded = run("--dir", "auto", "train.py")
    assert not recorded.returncode, recorded.stderr
    calls = padiff.open_run("auto").steps(0)[0].trace.calls
    assert [call.function for call in calls if call.layer == "(loop)"][:2] == ["sub", "div"]


@pytest.mark.parametrize(
    ("framework", "make", "clear"),
    [
        ("torch", "torch.optim.LBFGS(net.parameters(), lr=0.8, max_iter=3)", "zero_grad"),
        ("paddle", "paddle.optimizer.LBFGS(0.8, max_iter=3, parameters=net.parameters())", "clear_grad"),
    ],
)
def test_a_model_that_is_first_called_in_a_closure_is_recorded_from_its_first_step(framework, make, clear):
    text = f"net = nn.Linear(3, 1)\noptimizer = {make}\nx = randn(5, 3)\ndef closure():\n    optimizer.{clear}()\n"
    text += "    loss = net(x).square().mean()\n    loss.backward()\n    return loss\n"
    Path("train.py").write_text(HEAD[framework] + text + "for i in range(2):\n    show(optimizer.step(closure))\n")
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    recorded_run = padiff.open_run("auto")
    assert recorded_run.numbers() == [0, 1]
    for step in (recorded_run.steps(number)[0] for number in (0, 1)):
        assert {"forward", "grad", "update"} <= {record.stage for record in step.records}
        rates = [float(record.value.item()) for record in step.records if record.slot.startswith("learning_rate")]
        assert rates == [pytest.approx(0.8)]


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_first_call_without_gradients_belongs_to_the_first_step(framework):
    """The loop samples with its model, and then learns; a call before the loop is none of its steps."""
    text = "net = nn.Linear(3, 3)\noptimizer = sgd(net.parameters())\n"
    text += f"with {framework}.no_grad():\n    net(randn(1, 3))\n"
    text += f"for i in range(3):\n    with {framework}.no_grad():\n        target = net(randn(5, 3))\n"
    text += "    loss = (net(randn(5, 3)) - target).square().mean()\n    loss.backward()\n    optimizer.step()\n"
    Path("train.py").write_text(f"{HEAD[framework]}{text}    optimizer.zero_grad()\n    show(loss)\n")
    unchanged, recorded = call("train.py"), run("--dir", "auto", "train.py")
    assert (recorded.returncode, recorded.stdout) == (0, unchanged.stdout), recorded.stderr
    recorded_run = padiff.open_run("auto")
    assert recorded_run.numbers() == [0, 1, 2]
    for step in (recorded_run.steps(number)[0] for number in recorded_run.numbers()):
        assert {record.call: record.shape for record in step.records if record.stage == "input"} == {
            0: (5, 3),
            1: (5, 3),
        }


def test_tensors_of_no_layer_are_compared_as_they_are_stored():
    """No layer says how the matrices are stored, and a bias beside one says more than that beside the other."""
    values = "import numpy as np\nR = np.random.RandomState(0)\n"
    values += "a, b = (R.randn(*shape).astype('float32') for shape in ((5, 8), (8, 1)))\n"
    loop = "for i in range(3):\n    loss = (relu(x @ {0} + {1}) @ {2} + {3}).square().mean()\n"
    sides = {
        "torch": (
            "W1 b1 W2 b2",
            "P = lambda v: nn.Parameter(torch.tensor(v))",
            "torch.optim.SGD",
            "zero_grad",
            "F.relu",
        ),
        "paddle": (
            "w_in bias_in w_out bias_out",
            "P = lambda v: paddle.to_tensor(v, stop_gradient=False)",
            "(lambda p, r: paddle.optimizer.SGD(r, p))",
            "clear_grad",
            "F.relu",
        ),
    }
    for framework, (names, make, sgd, clear, relu) in sides.items():
        tensors = names.split()
        text = f"{HEAD[framework]}{values}{make}\nrelu = {relu}\nx = {framework}.ones([6, 5])\n"
        text += f"{', '.join(tensors)} = P(a), P(np.zeros(8, 'float32')), P(b), P(np.zeros(1, 'float32'))\n"
        text += f"optimizer = {sgd}([{', '.join(tensors)}], 0.1)\n"
        text += loop.format(*tensors)
        text += f"    loss.backward()\n    optimizer.step()\n    optimizer.{clear}()\n"
        Path(f"{framework}_train.py").write_text(text)
        assert run("--dir", framework, f"{framework}_train.py").returncode == 0
    report = padiff.compare_runs("torch", "paddle")
    assert report.passed, report.first_diff


LOSES = """
import numpy as np, torch
from torch import nn
torch.manual_seed(0)
netG, netD = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.Linear(2, 1)
optG, optD = torch.optim.SGD(netG.parameters(), 0.1), torch.optim.SGD(netD.parameters(), 0.1)
R = np.random.RandomState(0)
for i in range(3):
    z, x = (torch.tensor(R.randn(5, n), dtype=torch.float32) for n in (3, 2))
    fake = netG(z)
    lossD = (netD(fake.detach()) - netD(x)).mean() ** 2
    optD.zero_grad(); lossD.backward(); optD.step()
    lossG = netD(fake).square().mean(); {end}
"""
ENDS = {
    "right": ("optG.zero_grad(); lossG.backward(); optG.step()", ""),
    "never": ("optG.zero_grad(); lossG.backward()", "optimizer of `netG.0/weight` never steps"),
    "detached": (
        "optG.zero_grad(); lossG.detach().requires_grad_().backward(); optG.step()",
        "no gradient comes back to layer netG.0",
    ),
    "cleared": (
        "lossG.backward(); optG.zero_grad(); optG.step()",
        "clears its gradients between backward and step",
    ),
}


def test_an_optimizer_that_has_nothing_to_do_is_named():
    for name, (end, words) in ENDS.items():
        Path(f"{name}.py").write_text(LOSES.format(end=end))
        assert run("--dir", name, f"{name}.py").returncode == 0
        if not words:
            continue
        report = padiff.compare_runs("right", name)
        cause = report.first_diff.cause
        assert cause.proven and words in cause.sentence, cause
        assert "lossG" in report.text(120).split("-->")[1].splitlines()[0], report


ALONE = """
import numpy as np, paddle
paddle.seed(0)
net = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))
opt = paddle.optimizer.Adam(0.1, parameters=net.parameters())
R = np.random.RandomState(0)
for i in range(3):
    loss = net(paddle.to_tensor(R.randn(5, 3).astype("float32"))).square().mean(); {end}
"""


def test_the_only_optimizer_may_never_step_or_step_with_zeros():
    ends = {
        "right": "loss.backward(); opt.step(); opt.clear_grad()",
        "never": "loss.backward(); opt.clear_grad()",
        "zeros": "loss.backward(); opt.clear_grad(); opt.step()",
    }
    for name, end in ends.items():
        Path(f"{name}.py").write_text(ALONE.format(end=end))
        assert run("--dir", name, f"{name}.py").returncode == 0
    never, zeros = (padiff.compare_runs("right", name).first_diff.cause for name in ("never", "zeros"))
    assert never.proven and "optimizer of `0/weight` never steps" in never.sentence, never
    assert zeros.proven and "clears its gradients between backward and step" in zeros.sentence, zeros


WRAPPED = """
import numpy as np, torch
from torch import nn
torch.manual_seed(0)
class Wrapper(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, 0.1)
    def climb(self): self.zero_grad()
    def descend(self): self.base.step(); self.zero_grad()
    def step(self): raise NotImplementedError
net = nn.Linear(3, 1)
optimizer, R = Wrapper(net.parameters()), np.random.RandomState(0)
for i in range(3):
    optimizer.zero_grad()
    for turn in (optimizer.climb, optimizer.descend):
        net(torch.tensor(R.randn(5, 3), dtype=torch.float32)).square().mean().backward()
        turn()
"""


def test_a_wrapper_that_clears_and_never_steps_itself_is_not_waited_for():
    Path("wrapped.py").write_text(WRAPPED)
    assert run("--dir", "wrapped", "wrapped.py").returncode == 0
    assert padiff.open_run("wrapped").numbers() == [0, 1, 2]
