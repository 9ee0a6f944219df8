"""Calls in evaluation mode, and inputs that only one side gives: what a verdict says of them."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff

SHAPE = (16, 4)


def _batches(steps: int, count: int = 2) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(steps, count, *SHAPE)).astype("float32")


def _two_calls(framework, folder, evaluated=None, validates=False):
    """Two calls a step; one of them in evaluation mode; a validation between steps."""
    if framework == "torch":
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer, tensor, clear = torch.optim.SGD(net.parameters(), 0.1), torch.tensor, "zero_grad"
    else:
        net = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.BatchNorm1D(8), paddle.nn.Linear(8, 1))
        optimizer, tensor, clear = (
            paddle.optimizer.SGD(0.1, parameters=net.parameters()),
            paddle.to_tensor,
            "clear_grad",
        )
        padiff.start_from(folder.parent / "reference", net)
    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for batch in _batches(3):
            outputs = []
            for number, values in enumerate(batch):
                net.eval() if number == evaluated else net.train()
                outputs.append(net(tensor(values)))
            ((outputs[0].detach() - outputs[1]) ** 2).mean().backward()
            optimizer.step()
            getattr(optimizer, clear)()
            rec.try_dump()
            if validates:
                net.eval()
                with torch.no_grad(), paddle.no_grad():
                    net(tensor(batch[0]))
    return folder


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_first_call_in_evaluation_mode_is_named(framework, tmp_path):
    reference = _two_calls("torch", tmp_path / "reference")
    candidate = _two_calls(framework, tmp_path / "candidate", evaluated=0)
    first = padiff.compare_runs(reference, candidate).first_diff
    assert (first.step, first.stage) == (0, "forward")
    assert (first.cause.kind, first.cause.fix) == ("mode", "model.train()")
    assert "the candidate makes call 1 of the step in evaluation mode" in first.message


def test_the_references_call_in_evaluation_mode_is_named(tmp_path):
    reference = _two_calls("torch", tmp_path / "reference", evaluated=0)
    candidate = _two_calls("torch", tmp_path / "candidate")
    first = padiff.compare_runs(reference, candidate).first_diff
    assert (first.cause.kind, first.cause.fix) == ("mode", "model.eval()")
    assert "the reference makes call 1 of the step in evaluation mode" in first.message


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize("evaluated", [None, 0])
def test_the_same_calls_on_both_sides_match(framework, evaluated, tmp_path):
    reference = _two_calls("torch", tmp_path / "reference", evaluated, validates=True)
    candidate = _two_calls(framework, tmp_path / "candidate", evaluated, validates=framework == "torch")
    report = padiff.compare_runs(reference, candidate)
    assert report.passed, report.first_diff.message


class _TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = torch.nn.Embedding(20, 8), torch.nn.GRU(8, 12, batch_first=True)
        self.out = torch.nn.Linear(12, 20)

    def forward(self, tokens, state=None):
        hidden, state = self.rnn(self.emb(tokens), state)
        return self.out(hidden), state


class _PaddleNet(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = paddle.nn.Embedding(20, 8), paddle.nn.GRU(8, 12)
        self.out = paddle.nn.Linear(12, 20)

    def forward(self, tokens, state=None):
        hidden, state = self.rnn(self.emb(tokens), state)
        return self.out(hidden), state


def _recurrent(framework, folder, hands_on=True):
    tokens = np.random.default_rng(1).integers(0, 20, (4, 41))
    state = None
    if framework == "torch":
        torch.manual_seed(0)
        net, tensor = _TorchNet(), torch.tensor
        optimizer, clear = torch.optim.SGD(net.parameters(), 0.1), "zero_grad"
    else:
        net, tensor = _PaddleNet(), paddle.to_tensor
        optimizer, clear = paddle.optimizer.SGD(0.1, parameters=net.parameters()), "clear_grad"
        padiff.start_from(folder.parent / "reference", net)
    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for start in range(0, 40, 10):
            logits, state = net(tensor(tokens[:, start : start + 10]), state)
            state = state.detach() if hands_on else None
            labels = tensor(tokens[:, start + 1 : start + 11].ravel())
            functional = torch.nn.functional if framework == "torch" else paddle.nn.functional
            functional.cross_entropy(logits.reshape((40, 20)), labels).backward()
            optimizer.step()
            getattr(optimizer, clear)()
            rec.try_dump()
    return folder


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_state_that_is_not_handed_on_is_named(framework, tmp_path):
    reference = _recurrent("torch", tmp_path / "reference")
    candidate = _recurrent(framework, tmp_path / "candidate", hands_on=False)
    first = padiff.compare_runs(reference, candidate).first_diff
    assert (first.step, first.reference, first.cause.kind) == (1, "rnn", "lone_input"), first.message
    assert "the reference gives `rnn` `hx`, the candidate does not" in first.cause.text
    assert "inputs agree" not in first.message


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_state_that_is_handed_on_matches(framework, tmp_path):
    report = padiff.compare_runs(
        _recurrent("torch", tmp_path / "reference"), _recurrent(framework, tmp_path / "candidate")
    )
    assert report.passed, report.first_diff.message


class _Positioned(torch.nn.Module):
    """A model that counts positions itself, unless it is given them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = torch.nn.Embedding(20, 8), torch.nn.Embedding(12, 8)
        self.out = torch.nn.Linear(8, 20)

    def forward(self, tokens, positions=None):
        positions = torch.arange(tokens.shape[1])[None] if positions is None else positions
        return self.out(torch.tanh(self.words(tokens) + self.places(positions)))


def test_positions_that_only_one_loop_gives_the_model_are_named_as_its_input(tmp_path):
    for name in ("reference", "candidate"):
        net, rng = _Positioned(), np.random.default_rng(0)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with padiff.record(net, tmp_path / name, optimizer=optimizer) as rec:
            for _ in range(2):
                tokens = torch.tensor(rng.integers(1, 20, (4, 9)))
                mask = (torch.arange(9) >= torch.tensor(rng.integers(1, 5, (4, 1)))).long()
                positions = (mask.cumsum(1) - 1).clamp(min=0)
                logits = net(tokens * mask, positions) if name == "reference" else net(tokens * mask)
                torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                rec.try_dump()
    first = padiff.compare_runs(tmp_path / "reference", tmp_path / "candidate").first_diff
    assert (first.step, first.stage, first.reference, first.cause.kind) == (0, "forward", "places", "lone_input")
    assert "the reference gives `(root)` `positions`, the candidate does not" in first.cause.text


class Apart(torch.nn.Module):
    """An actor and a critic with a shared layer; the loop calls each by a method."""

    def __init__(self):
        super().__init__()
        self.shared, self.actor, self.critic = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2), torch.nn.Linear(8, 1)

    def policy(self, x):
        return torch.softmax(self.actor(torch.relu(self.shared(x))), -1)

    def value(self, x):
        return self.critic(torch.relu(self.shared(x)))


class AtOnce(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.body = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU())
        self.pi, self.v = paddle.nn.Linear(8, 2), paddle.nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.pi(hidden), self.v(hidden)


def _acting_and_learning(folder, discount=0.9, weight=1.0):
    """Three steps: act one state at a time, then learn from all of them."""
    states = np.random.default_rng(1).normal(size=(3, 6, 4)).astype("float32")
    if folder.name == "reference":
        torch.manual_seed(0)
        net = Apart()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
    else:
        net = AtOnce()
        padiff.start_from(folder.parent / "reference", net)
        optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for batch in states:
            if folder.name == "reference":
                for state in batch:
                    net.policy(torch.tensor(state))
                now, after = torch.tensor(batch[:-1]), torch.tensor(batch[1:])
                target = 1 + 0.9 * net.value(after)
                advantage = (target - net.value(now)).detach()
                gain = (net.policy(now)[:, :1].log() * advantage).mean()
                loss = torch.nn.functional.smooth_l1_loss(net.value(now), target.detach()) - gain
            else:
                with paddle.no_grad():
                    for state in batch:
                        net(paddle.to_tensor(state))
                    target = 1 + discount * net(paddle.to_tensor(batch[1:]))[1]
                scores, value = net(paddle.to_tensor(batch[:-1]))
                advantage = (target - value).detach()
                gain = (paddle.nn.functional.log_softmax(scores)[:, :1] * advantage).mean()
                loss = weight * paddle.nn.functional.smooth_l1_loss(value, target) - gain
            loss.backward()
            optimizer.step()
            net.zero_grad() if folder.name == "reference" else optimizer.clear_grad()
            rec.try_dump()
    return folder


def test_calls_that_repeat_a_computation_are_one_call_of_the_other_loop(tmp_path):
    reference = _acting_and_learning(tmp_path / "reference")
    report = padiff.compare_runs(reference, _acting_and_learning(tmp_path / "candidate"))
    assert report.passed, report.first_diff
    compared = {(diff.pair.anchor.layer, diff.pair.stage) for diff in report.diffs if diff.compared}
    assert {(layer, stage) for layer in ("shared", "actor", "critic") for stage in ("forward", "backward")} <= compared


@pytest.mark.parametrize(
    ("faults", "stage", "slot"), [({"discount": 0.8}, "loss", "target"), ({"weight": 2.0}, "loss", "loss")]
)
def test_a_fault_beside_repeated_calls_is_placed(faults, stage, slot, tmp_path):
    reference = _acting_and_learning(tmp_path / "reference")
    first = padiff.compare_runs(reference, _acting_and_learning(tmp_path / "candidate", **faults)).first_diff
    assert (first.step, first.stage) == (0, stage) and slot in first.slot
    assert first.cause is None or not (first.cause.proven and "micro-batch" in first.cause.sentence)


def _recorded(folder, net, optimizer, losses, **options):
    """Train with losses, each made by a function when its step begins, and return the folder of the run."""
    clear = getattr(optimizer, "zero_grad", None) or optimizer.clear_grad
    with padiff.record(net, folder, optimizer=optimizer, **options) as rec:
        for loss in losses:
            clear()
            loss().backward()
            optimizer.step()
            rec.try_dump()
    return folder


def _equation(folder, viscosity=1.0, keeps=True):
    """Three steps toward u_t + u u_x = nu u_xx; the reference calls the net twice and asks for each gradient alone."""
    points = np.random.default_rng(1).uniform(-1, 1, (20, 2)).astype("float32")
    given = np.sin(3 * points[:, :1])
    if folder.name == "reference":
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh())
        net.append(torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        x, t = (torch.tensor(points[:, k : k + 1], requires_grad=True) for k in (0, 1))

        def grad(of, at):
            return torch.autograd.grad(of, at, torch.ones_like(of), retain_graph=True, create_graph=True)[0]

        def error():
            u = net(torch.cat([x, t], 1))
            u_t, u_x = grad(u, t), grad(u, x)
            residual = u_t + u * u_x - grad(u_x, x)
            return ((net(torch.cat([x, t], 1)) - torch.tensor(given)) ** 2).mean() + (residual**2).mean()

    else:
        net = paddle.nn.Sequential(
            paddle.nn.Linear(2, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 1)
        )
        padiff.start_from(folder.parent / "reference", net)
        optimizer = paddle.optimizer.Adam(1e-2, parameters=net.parameters())

        def error():
            x, t = (paddle.to_tensor(points[:, k : k + 1], stop_gradient=False) for k in (0, 1))
            u = net(paddle.concat([x, t], 1))
            u_x, u_t = paddle.grad(u, [x, t], create_graph=True)
            u_xx = paddle.grad(u_x, x, create_graph=keeps)[0]
            return ((u - paddle.to_tensor(given)) ** 2).mean() + ((u_t + u * u_x - viscosity * u_xx) ** 2).mean()

    return _recorded(folder, net, optimizer, [error] * 3)


@pytest.mark.parametrize(
    ("faults", "stages"), [({}, ()), ({"viscosity": 2.0}, ("loss",)), ({"keeps": False}, ("backward", "grad"))]
)
def test_gradients_of_repeated_calls_that_the_loops_ask_for_in_other_ways(faults, stages, tmp_path):
    reference = _equation(tmp_path / "reference")
    report = padiff.compare_runs(reference, _equation(tmp_path / "candidate", **faults))
    assert report.passed == (not stages), report.first_diff
    assert report.passed or (report.first_diff.step == 0 and report.first_diff.stage in stages)


class _Scored(torch.nn.Module):
    """Attention with keys that each step of a sequence computes again."""

    def __init__(self):
        super().__init__()
        self.key, self.out = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

    def forward(self, memory, query):
        weights = torch.softmax(self.key(memory) @ query.unsqueeze(-1), 1)
        return self.out((weights * memory).sum(1))


class _ScoredAtOnce(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.key, self.out = paddle.nn.Linear(6, 6), paddle.nn.Linear(6, 3)

    def forward(self, memory, queries):
        weights = paddle.nn.functional.softmax(queries @ self.key(memory).transpose([0, 2, 1]))
        return self.out(weights @ memory)


def _scoring(folder, scale=1.0):
    """Six steps with Adam, which turns the rounding of the key bias's gradient, zero by softmax, into updates."""
    rng = np.random.default_rng(1)
    if folder.name == "reference":
        torch.manual_seed(0)
        net = _Scored()
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    else:
        net = _ScoredAtOnce()
        padiff.start_from(folder.parent / "reference", net)
        optimizer = paddle.optimizer.Adam(1e-2, parameters=net.parameters())

    def loss():
        memory, queries = rng.normal(size=(4, 5, 6)).astype("float32"), rng.normal(size=(4, 3, 6)).astype("float32")
        labels = rng.integers(0, 3, (4, 3))
        if folder.name == "reference":
            outs = [net(torch.tensor(memory), torch.tensor(queries[:, k])) for k in range(3)]
            return sum(torch.nn.functional.cross_entropy(o, torch.tensor(labels[:, k])) for k, o in enumerate(outs))
        scores = net(paddle.to_tensor(memory), paddle.to_tensor(queries * scale))
        return 3 * paddle.nn.functional.cross_entropy(scores, paddle.to_tensor(labels))

    return _recorded(folder, net, optimizer, [loss] * 6)


def test_repeated_calls_are_merged_in_steps_that_have_drifted(tmp_path):
    reference = _scoring(tmp_path / "reference")
    report = padiff.compare_runs(reference, _scoring(tmp_path / "candidate"))
    assert report.passed, report.first_diff
    compared = {(d.pair.step, d.pair.anchor.layer) for d in report.diffs if d.compared and d.pair.stage == "backward"}
    assert {(step, "key") for step in range(6)} <= compared
    assert not padiff.compare_runs(reference, _scoring(tmp_path / "scaled", 1.1)).passed


class Density(torch.nn.Module):
    def __init__(self, positive):
        super().__init__()
        self.net, self.positive = (
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 40)),
            positive,
        )

    def forward(self, x):
        return torch.relu(self.net(x)) if self.positive else self.net(x)


@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize("fault", [0.0, 1e-3])
def test_the_positive_part_of_an_output_may_be_taken_after_the_model(fault, detail, tmp_path):
    """Few elements are negative; the gradient of those is large on one side, and zero on the other."""
    for positive in (True, False):
        torch.manual_seed(0)
        model = Density(positive)
        torch.nn.init.constant_(model.net[2].bias, 0.9)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with padiff.record(model, tmp_path / str(positive), optimizer=optimizer, detail=detail) as rec:
            for step in range(2):
                out = model(torch.randn(64, 4, generator=torch.Generator().manual_seed(step)))
                out = out if positive else torch.relu(out)
                near = (1 - torch.exp(-1e6 * out)).mean()  # its slope is 1e6 at zero, and none elsewhere
                loss = near + (0.1 + fault * (not positive)) * (out - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rec.try_dump()
    report = padiff.compare_runs(tmp_path / "True", tmp_path / "False")
    assert report.passed is not bool(fault), report.first_diff


def _masked(folder, kept, as_bool=False):
    """Three steps of attention pooling with a mask: places to keep as True, or -1e9 for the others."""
    rng = np.random.default_rng(1)
    torch.manual_seed(0)

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.out = torch.nn.Linear(4, 1), torch.nn.Linear(4, 2)

        def forward(self, x, mask):
            scores = self.score(x).squeeze(-1)
            scores = scores.masked_fill(~mask, -1e9) if as_bool else scores + mask
            return self.out((torch.softmax(scores, -1).unsqueeze(-1) * x).sum(1))

    net = Pooled()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss():
        x = torch.tensor(rng.normal(size=(4, 6, 4)).astype("float32"))
        mask = torch.tensor(kept) if as_bool else torch.tensor(np.where(kept, 0.0, -1e9).astype("float32"))
        return net(x, mask).square().mean()

    return _recorded(folder, net, optimizer, [loss] * 3)


def test_a_mask_in_another_form_is_no_difference_and_another_mask_is(tmp_path):
    kept = np.arange(6)[None] < np.array([[6], [3], [4], [5]])
    other = kept.copy()
    other[1, 3] = True
    reference = _masked(tmp_path / "reference", kept)
    report = padiff.compare_runs(reference, _masked(tmp_path / "as_bool", kept, True))
    assert report.passed, report.first_diff
    first = padiff.compare_runs(reference, _masked(tmp_path / "other", other, True)).first_diff
    assert (first.step, first.stage, first.slot) == (0, "input", "input.mask")


class _Tokens(torch.nn.Module):
    """A causal language model."""

    def __init__(self):
        super().__init__()
        self.emb, self.rnn = torch.nn.Embedding(12, 6), torch.nn.GRU(6, 8, batch_first=True)
        self.out = torch.nn.Linear(8, 12)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


class _TokensOfPaddle(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = paddle.nn.Embedding(12, 6), paddle.nn.GRU(6, 8), paddle.nn.Linear(8, 12)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def _predicting(folder, whole, shift=1, drop=0, detail="auto"):
    """Three steps; the model gets all tokens, and the loss leaves the last scores out, or all but the last token."""
    rng = np.random.default_rng(1)
    if folder.name == "reference":
        torch.manual_seed(0)
        net, tensor, functions = _Tokens(), torch.tensor, torch.nn.functional
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
    else:
        net, tensor, functions = _TokensOfPaddle(), paddle.to_tensor, paddle.nn.functional
        padiff.start_from(folder.parent / "reference", net)
        optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())

    def loss():
        ids = rng.integers(0, 12, (4, 7))[:, drop:]
        scores = net(tensor(ids))[:, :-1] if whole else net(tensor(ids[:, :-1]))
        labels = tensor(np.ascontiguousarray(ids[:, shift:][:, : ids.shape[1] - 1]))
        return functions.cross_entropy(scores.reshape([-1, 12]), labels.reshape([-1]))

    return _recorded(folder, net, optimizer, [loss] * 3, detail=detail)


@pytest.mark.parametrize("detail", ["auto", "sketch"])
@pytest.mark.parametrize("whole", [True, False])
def test_scores_of_the_last_token_may_be_left_out_or_not_computed(whole, detail, tmp_path):
    reference = _predicting(tmp_path / "reference", whole, detail=detail)
    report = padiff.compare_runs(reference, _predicting(tmp_path / "candidate", not whole, detail=detail))
    assert report.passed, report.first_diff
    compared = {d.pair.anchor.layer for d in report.diffs if d.compared and d.pair.stage == "backward"}
    assert detail == "sketch" or {"emb", "out"} <= compared


def test_other_labels_and_fewer_tokens_are_differences_beside_left_out_scores(tmp_path):
    reference = _predicting(tmp_path / "reference", True)
    first = padiff.compare_runs(reference, _predicting(tmp_path / "labels", False, shift=0)).first_diff
    assert (first.step, first.stage) == (0, "loss") and "labels" in first.slot
    assert not padiff.compare_runs(reference, _predicting(tmp_path / "dropped", True, drop=1)).passed
    assert not padiff.compare_runs(reference, _predicting(tmp_path / "fewer", False, drop=1)).passed
