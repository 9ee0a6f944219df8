"""What went into loss functions, what they gave and what they are set to; and clipping."""

from __future__ import annotations

import inspect
import pickle
import threading

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import hook_count, is_before
from kit.nets import mlp
from paddle.nn import functional as paddle_functional
from torch.nn import functional as torch_functional

import padiff
from padiff.recorder.capture import Capture
from padiff.records import is_loss, is_of_loss

RNG = np.random.default_rng(3)
X = RNG.standard_normal((6, 4)).astype("float32")
LABELS = np.array([0, 1, 2, -100, 1, 0])
TARGET = RNG.standard_normal((6, 3)).astype("float32")
YES = (TARGET > 0).astype("float32")


def functional(kit):
    return torch_functional if kit.name == "torch" else paddle_functional


def functions_of(kit):
    """Everything that may be listened to."""
    module = functional(kit)
    utils = (torch if kit.name == "torch" else paddle).nn.utils
    found = [getattr(module, name) for name in dir(module) if "loss" in name or "entropy" in name or name == "kl_div"]
    found += [getattr(utils, name) for name in dir(utils) if name.startswith("clip_grad")]
    found.append(kit.nn.MSELoss.forward)
    return [function for function in found if inspect.isfunction(function)]


def net(kit, seed=0):
    kit.seed(seed)
    return mlp(kit)


class Settings(list):
    """What each step's capture says, as long as it is open."""

    def __enter__(self):
        self._finish = finish = Capture.finish

        def finished(capture, *args, **kwargs):
            step = finish(capture, *args, **kwargs)
            self.append({k: v for k, v in capture.settings.items() if k.startswith(("loss.", "clip."))})
            return step

        Capture.finish = finished
        return self

    def __exit__(self, *_):
        Capture.finish = self._finish


def of_losses(rec, number=0):
    """By slot and call, what was recorded of loss functions."""
    (step,) = rec.run.steps(number)
    return {f"{r.slot}{f'#{r.call}' if r.call else ''}": r.value for r in step.records if is_of_loss(r)}


def losses(rec, number=0):
    (step,) = rec.run.steps(number)
    return {r.call: float(r.value) for r in step.records if is_loss(r)}


def trained(kit, loss, model=None, steps=1, clip=None, optimizer=True, **options):
    """Steps of a training with a loss of the model's outputs."""
    model = net(kit) if model is None else model
    made = kit.sgd(model.parameters())
    with Settings() as settings, padiff.record(model, optimizer=made if optimizer else None, **options) as rec:
        for _ in range(steps):
            output = model(kit.tensor(X))
            value = loss(output)
            value.backward()
            if clip is not None:
                clip(model.parameters())
            made.step()
            kit.zero(made)
            rec.try_dump()
    return rec, settings, kit.numpy(value), kit.numpy(output)


def cases(kit):
    """Calls under both frameworks' names; what is recorded of them, by role; and some of their settings."""
    f, nn = functional(kit), kit.nn
    labels, target, yes = kit.tensor(LABELS, "int64"), kit.tensor(TARGET), kit.tensor(YES)
    counted = kit.tensor(np.maximum(LABELS, 0), "int64")
    weight = kit.tensor([1.0, 2.0, 4.0])
    found = {
        "cross_entropy": (lambda o: f.cross_entropy(o, labels), "cross_entropy", {"logits": None, "labels": LABELS}, {
            "reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0, "soft_label": False, "axis": -1,
            "use_softmax": True,
        }),
        "class": (
            nn.CrossEntropyLoss(weight=weight, ignore_index=1, reduction="sum", label_smoothing=0.0),
            "cross_entropy",
            {"weight": [1.0, 2.0, 4.0]},
            {"reduction": "sum", "ignore_index": 1, "weight": [1.0, 2.0, 4.0]},
        ),
        "nll": (
            lambda o: f.nll_loss(f.log_softmax(o, -1), counted),
            "nll_loss",
            {"labels": np.maximum(LABELS, 0)},
            {"reduction": "mean", "ignore_index": -100},
        ),
        "mse": (nn.MSELoss(reduction="sum"), "mse_loss", {"prediction": None, "target": TARGET}, {"reduction": "sum"}),
        "mse, the other way round": (
            lambda o: f.mse_loss(target, o),
            "mse_loss",
            {"prediction": None, "target": TARGET},
            {"reduction": "mean"},
        ),
        "l1": (nn.L1Loss(), "l1_loss", {"prediction": None, "target": TARGET}, {"reduction": "mean"}),
        "bce": (
            lambda o: f.binary_cross_entropy(kit.sigmoid(o), yes),
            "binary_cross_entropy",
            {"labels": YES},
            {"reduction": "mean"},
        ),
        "bce with logits": (
            nn.BCEWithLogitsLoss(pos_weight=weight),
            "binary_cross_entropy_with_logits",
            {"logits": None, "labels": YES, "pos_weight": [1.0, 2.0, 4.0]},
            {"reduction": "mean", "pos_weight": [1.0, 2.0, 4.0]},
        ),
        "kl": (
            lambda o: f.kl_div(f.log_softmax(o, -1), yes, reduction="batchmean"),
            "kl_div",
            {"target": YES},
            {"reduction": "batchmean", "log_target": False},
        ),
    }  # fmt: skip
    if kit.name == "torch":
        found["smooth l1"] = (
            lambda o: f.smooth_l1_loss(o, target, beta=0.5),
            "smooth_l1_loss",
            {"prediction": None},
            {"beta": 0.5},
        )
        found["huber"] = (
            lambda o: f.huber_loss(o, target, delta=0.5),
            "huber_loss",
            {"target": TARGET},
            {"delta": 0.5},
        )
        found["older words"] = (
            lambda o: f.mse_loss(o, target, size_average=False),
            "mse_loss",
            {},
            {"reduction": "sum"},
        )
    else:
        found["smooth l1"] = (
            lambda o: f.smooth_l1_loss(o, target, delta=0.5, is_huber=False),
            "smooth_l1_loss",
            {"prediction": None},
            {"beta": 0.5},
        )
        found["huber"] = (nn.SmoothL1Loss(delta=0.5), "huber_loss", {"target": TARGET}, {"delta": 0.5})
        found["keyword of torch"] = (
            lambda o: f.cross_entropy(o, target=labels),
            "cross_entropy",
            {"labels": LABELS},
            {},
        )
        found["with softmax"] = (
            lambda o: f.softmax_with_cross_entropy(o, kit.tensor(LABELS[:, None], "int64")).sum(),
            "cross_entropy",
            {"labels": LABELS[:, None]},
            {"reduction": "none", "label_smoothing": 0.0},
        )
        found["probabilities"] = (
            lambda o: f.cross_entropy(f.softmax(o), counted, use_softmax=False),
            "cross_entropy",
            {"labels": np.maximum(LABELS, 0)},
            {"use_softmax": False},
        )
        found["square error"] = (
            lambda o: f.square_error_cost(o, target).mean(),
            "mse_loss",
            {"target": TARGET},
            {"reduction": "none"},
        )
    return found


NAMES = ["cross_entropy", "class", "nll", "mse", "mse, the other way round", "l1", "bce", "bce with logits", "kl",
         "smooth l1", "huber", "older words", "keyword of torch", "with softmax", "probabilities",
         "square error"]  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:size_average and reduce", "ignore::paddle.utils.deprecated.VisibleDeprecationWarning"
)
@pytest.mark.parametrize("name", NAMES)
def test_what_goes_into_a_loss_and_comes_out(kit, name):
    if name not in cases(kit):
        pytest.skip("the other framework's")
    if kit.name == "paddle" and name in ("smooth l1", "keyword of torch") and is_before(paddle, 3, 2):
        pytest.skip("this paddle has no such argument")
    loss, function, inputs, expected = cases(kit)[name]

    def call(output):
        if isinstance(loss, kit.Layer):
            integer = function == "cross_entropy"
            values = np.maximum(LABELS, 0) if integer else YES if "binary" in function else TARGET
            return loss(output, kit.tensor(values, "int64" if integer else "float32"))
        return loss(output)

    rec, (settings,), value, output = trained(kit, call)
    found = of_losses(rec)
    assert {slot.partition("()")[0] for slot in found} == {function}
    for role, values in inputs.items():
        np.testing.assert_array_equal(found[f"{function}().input.{role}"], output if values is None else values)
    gave = found[f"{function}().0"]
    if settings["loss.reduction"] != "none":
        np.testing.assert_array_equal(gave, value)
    assert losses(rec) == {0: float(value)}  # nobody logged it
    assert settings.pop("loss.function") == function
    assert {name: settings[f"loss.{name}"] for name in expected} == expected
    assert not any(name.endswith((".name", ".input", ".label")) for name in settings)


def test_a_model_output_is_kept_once(kit, tmp_path):
    """Logits are the model's output, or another view of all of it."""
    model = net(kit)
    made, label = kit.sgd(model.parameters()), kit.tensor(np.zeros(6), "int64")
    x = kit.tensor(X.reshape(2, 3, 4))
    for number, flatten in enumerate((lambda o: o.reshape([-1, 3]), lambda o: o.reshape([6, 3]) * 1)):
        folder = tmp_path / str(number)
        with padiff.record(model, folder, optimizer=made) as rec:
            output = model(x)
            functional(kit).cross_entropy(flatten(output), label).backward()
            made.step()
            rec.try_dump()
        (step,) = padiff.open_run(folder).steps(0)
        (logits,) = [r for r in step.records if r.slot == "cross_entropy().input.logits"]
        (output,) = [r for r in step.records if r.site == "(root)/forward/output.0"]
        assert (logits.source.identity == output.source.identity) is (number == 0)
        assert logits.shape == ((2, 3, 3) if number == 0 else (6, 3))
        np.testing.assert_array_equal(logits.value.ravel(), output.value.ravel())


@pytest.mark.parametrize(
    "options", [{}, {"pack": True}, {"detail": "sketch"}, {"detail": "sketch", "compression": "zlib"}]
)
def test_they_survive_the_run_folder(kit, options, tmp_path):
    labels, weight = kit.tensor(LABELS, "int64"), kit.tensor([1.0, 2.0, 4.0])

    def train(**options):
        return trained(kit, lambda o: functional(kit).cross_entropy(o, labels, weight=weight), steps=2, **options)[0]

    plain = train()
    train(dir_path=tmp_path / "run", **options)
    run = padiff.open_run(tmp_path / "run")
    for number in (0, 1):
        expected = of_losses(plain, number)
        (step,) = run.steps(number)
        records = {r.slot: r for r in step.records if is_of_loss(r)}
        assert set(records) == set(expected)
        for slot, record in records.items():
            if slot.endswith("logits") and "detail" in options and number:  # in the first step they are whole
                assert record.sketch is not None
            else:
                np.testing.assert_array_equal(record.value, expected[slot])
    (step,) = run.steps(0)
    assert {**run.info.settings, **step.settings}["loss.weight"] == [1.0, 2.0, 4.0]


def test_nothing_is_kept_of_what_lists_leave_out(kit):
    labels = kit.tensor(LABELS, "int64")
    rec, *_ = trained(kit, lambda o: functional(kit).cross_entropy(o * 1, labels), white_list=["0"])
    assert set(of_losses(rec)) == {"cross_entropy().input.labels", "cross_entropy().0"}
    rec, (settings,), *_ = trained(kit, lambda o: functional(kit).cross_entropy(o, labels), detail={"loss": "nothing"})
    assert of_losses(rec) == {}
    assert settings["loss.function"] == "cross_entropy"


# -- where losses are computed -----------------------------------------------------------------------------------------


def computing_itself(kit, depth=0):
    """A model that computes its loss in its own forward, inside of so many others, and an auxiliary one in a layer."""

    class Block(kit.Layer):
        def __init__(self):
            super().__init__()
            self.linear = kit.Linear(4, 4)

        def forward(self, x):
            x = self.linear(x)
            self.aside = functional(kit).mse_loss(x, x * 0)
            return x

    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.other = Block(), kit.Linear(4, 3), kit.Linear(4, 4)
            self.criterion = kit.nn.CrossEntropyLoss()

        def forward(self, x, labels):
            logits = self.head(kit.tanh(self.other(self.body(x))))
            return self.criterion(logits, labels) + 0.01 * self.body.aside

    class Around(kit.Layer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, labels):
            return self.inner(x, labels)

    model = Net()
    for _ in range(depth):
        model = Around(model)
    return model


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_model_that_computes_its_loss_itself(kit, depth):
    model = computing_itself(kit, depth)
    with padiff.record(model) as rec:
        model(kit.tensor(X), kit.tensor(LABELS, "int64")).backward()
        rec.try_dump()
    # That of a layer inside is the layer's own affair.
    found = of_losses(rec)
    assert set(found) == {f"cross_entropy().{slot}" for slot in ("input.logits", "input.labels", "0")}
    np.testing.assert_array_equal(found["cross_entropy().input.labels"], LABELS)
    # Backward began at the sum of both.
    assert set(losses(rec)) == {0} and losses(rec)[0] > float(found["cross_entropy().0"])


def test_a_model_of_which_only_layers_are_called(kit):
    """As a LightningModule's, with the loss a layer of it."""

    class Module(kit.Layer):
        def __init__(self):
            super().__init__()
            self.net, self.criterion = net(kit), kit.nn.CrossEntropyLoss()

    model = Module()
    with padiff.record(model) as rec:
        for _ in range(2):
            loss = model.criterion(model.net(kit.tensor(X)), kit.tensor(LABELS, "int64"))
            loss.backward()
        rec.try_dump()
    assert set(of_losses(rec)) == {
        f"cross_entropy().{s}{m}" for s in ("input.logits", "input.labels", "0") for m in ("", "#1")
    }
    assert losses(rec) == {0: float(kit.numpy(loss)), 1: float(kit.numpy(loss))}


def test_figures_that_are_looked_at_are_no_losses(kit):
    labels = kit.tensor(LABELS, "int64")

    def loss(output):
        with kit.no_grad():
            functional(kit).mse_loss(output, output * 2)
        functional(kit).l1_loss(output.detach(), output.detach() * 2)
        return functional(kit).cross_entropy(output, labels)

    rec, (settings,), value, _ = trained(kit, loss)
    assert {slot.partition("()")[0] for slot in of_losses(rec)} == {"cross_entropy"}
    assert settings["loss.function"] == "cross_entropy"
    assert losses(rec) == {0: float(value)}


@pytest.mark.parametrize("term", [False, True])
def test_evaluation_within_a_step_is_left_out(kit, term):
    model = net(kit)
    labels = kit.tensor(LABELS, "int64")
    with padiff.record(model) as rec:
        output = model(kit.tensor(X))
        loss = functional(kit).cross_entropy(output, labels)
        total = loss + output.square().mean() if term else loss
        total.backward()
        model.eval()
        with kit.no_grad():
            functional(kit).cross_entropy(model(kit.tensor(-X)), labels)
        model.train()
        rec.try_dump()
    assert float(of_losses(rec)["cross_entropy().0"]) == float(kit.numpy(loss))
    assert losses(rec) == {0: float(kit.numpy(total))}


def test_evaluation_alone_is_recorded(kit):
    model = net(kit)
    model.eval()
    with padiff.record(model) as rec, kit.no_grad():
        loss = functional(kit).cross_entropy(model(kit.tensor(X)), kit.tensor(LABELS, "int64"))
        rec.try_dump()
    assert float(of_losses(rec)["cross_entropy().0"]) == float(kit.numpy(loss))


def test_a_model_that_is_trained_in_evaluation_mode(kit):
    """As with frozen statistics."""
    model = net(kit)
    model.eval()
    with padiff.record(model) as rec:
        loss = functional(kit).cross_entropy(model(kit.tensor(X)), kit.tensor(LABELS, "int64"))
        loss.backward()
        rec.try_dump()
    assert losses(rec) == {0: float(kit.numpy(loss))}


def test_arguments_by_name_and_what_can_not_be_understood(kit):
    model, labels = net(kit), kit.tensor(LABELS, "int64")
    name = "target" if kit.name == "torch" else "label"
    limit = kit.tensor(0.5)
    with padiff.record(model) as rec:
        output = model(kit.tensor(X))
        functional(kit).cross_entropy(**{"input": output, name: labels}).backward()
        for parameters in (model.parameters(), list(model.parameters()), next(iter(model.parameters()))):
            utils(kit).clip_grad_norm_(parameters, limit)
        utils(kit).clip_grad_norm_([], 1.0)
        rec.try_dump()
    assert "cross_entropy().input.labels" in of_losses(rec)


def test_another_thread_and_what_fails_are_left_out(kit):
    model, labels = net(kit), kit.tensor(LABELS, "int64")

    def evaluate():
        functional(kit).mse_loss(kit.tensor(X, grad=True), kit.tensor(X))

    with padiff.record(model) as rec:
        output = model(kit.tensor(X))
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            functional(kit).cross_entropy(output, kit.tensor(LABELS[:2], "int64"))
        functional(kit).cross_entropy(output, labels).backward()
        rec.try_dump()
    assert set(of_losses(rec)) == {f"cross_entropy().{slot}" for slot in ("input.logits", "input.labels", "0")}


# -- the step's loss ---------------------------------------------------------------------------------------------------


def test_the_loss_of_each_micro_batch_is_known_without_being_logged(kit):
    model, labels = net(kit), kit.tensor(LABELS, "int64")
    expected = {}
    with padiff.record(model) as rec:
        for k in range(3):
            loss = functional(kit).cross_entropy(model(kit.tensor((k + 1) * X)), labels)
            loss.backward()
            expected[k] = float(kit.numpy(loss))
        rec.try_dump()
    assert losses(rec) == expected
    (step,) = rec.run.steps(0)
    orders = {f"{r.slot}#{r.call}": r.order for r in step.records if r.layer == "(loop)" and r.stage == "loss"}
    # Where it would have been logged: after what it is made of, before the next.
    assert orders["cross_entropy().0#0"] < orders["loss#0"] < orders["cross_entropy().input.labels#1"]


def test_the_loss_is_what_the_only_backward_began_at(kit):
    labels = kit.tensor(LABELS, "int64")

    def loss(output):
        return functional(kit).cross_entropy(output, labels)

    rec, _, half, _ = trained(kit, lambda o: loss(o) / 2)
    assert losses(rec) == {0: float(half)}
    rec, _, total, _ = trained(kit, lambda o: loss(o) + functional(kit).mse_loss(o, o.detach() * 2))
    assert losses(rec) == {0: float(total)}

    def written(output):
        value = loss(output)
        value.add_(output.square().mean())  # as `value += ...` of torch
        return value

    for of_loss in (written, lambda o: written(o) / 2):
        rec, _, total, _ = trained(kit, of_loss)
        assert losses(rec) == {0: float(total)}
    # Of several micro-batches what backward begins at is divided by their number on one side, and not on another.
    model = net(kit)
    with padiff.record(model) as rec:
        for _ in range(2):
            (loss(model(kit.tensor(X))) / 2).backward()
        rec.try_dump()
    assert losses(rec) == {}
    # Of several backwards it is the sum, without that of another model.
    model, other = net(kit), net(kit, 1)
    with padiff.record(model) as rec:
        output = model(kit.tensor(X))
        first, second = loss(output), output.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        rec.try_dump()
        loss(other(kit.tensor(X))).backward()
        loss(model(kit.tensor(X))).backward()
        rec.try_dump()
    assert losses(rec) == {0: pytest.approx(float(kit.numpy(first)) + float(kit.numpy(second)), rel=1e-6)}
    assert losses(rec, 1) == {}
    # Of several backwards with an update each, it is each one's.
    model = net(kit)
    optimizer, expected = kit.sgd(model.parameters()), {}
    with padiff.record(model, optimizer=optimizer) as rec:
        for k in range(2):
            value = loss(model(kit.tensor(X))) / 2
            value.backward()
            expected[k] = float(kit.numpy(value))
            optimizer.step()
        rec.try_dump()
    assert losses(rec) == expected and expected[0] != expected[1]
    model = net(kit)
    with padiff.record(model) as rec:
        value = loss(model(kit.tensor(X)))
        value.backward()
        rec.log_loss(7.0)
        rec.try_dump()
    assert losses(rec) == {0: 7.0}


def test_a_loss_that_is_scaled_is_divided_by_a_known_scale(kit):
    model, labels = net(kit), kit.tensor(LABELS, "int64")
    for known in (True, False):
        with padiff.record(model) as rec:
            value = functional(kit).cross_entropy(model(kit.tensor(X)), labels)
            (value * 1024).backward()
            if known:
                rec.loss_scale = 1024.0
            rec.try_dump()
        assert losses(rec) == {0: float(kit.numpy(value)) * (1 if known else 1024)}


# -- whose loss it is --------------------------------------------------------------------------------------------------


def test_each_of_two_recorders_gets_its_models_losses(kit):
    """A generator and a discriminator, whose losses are computed by turns."""
    generator, judge = net(kit), mlp(kit, (3, 5, 1))
    makers = kit.sgd(generator.parameters()), kit.sgd(judge.parameters())
    ones, zeros = kit.tensor(np.ones((6, 1))), kit.tensor(np.zeros((6, 1)))
    f = functional(kit)
    with padiff.record(generator, optimizer=makers[0]) as first, padiff.record(judge, optimizer=makers[1]) as second:
        fake = generator(kit.tensor(X))
        aside = f.mse_loss(fake, fake.detach() * 0)  # of what the generator gave, before the judge is called
        both = [f.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)]
        both.append(f.binary_cross_entropy_with_logits(judge(kit.tensor(TARGET)) * 2, ones))
        also = f.l1_loss(fake * 2, fake.detach() * 0)  # of the generator's, though the judge was called last
        (sum(both) + aside + also).backward()
        first.try_dump()
        second.try_dump()
    assert {slot.partition("()")[0] for slot in of_losses(first)} == {"mse_loss", "l1_loss"}
    found = of_losses(second)
    assert {slot.partition("()")[0] for slot in found} == {"binary_cross_entropy_with_logits"}
    np.testing.assert_array_equal(found["binary_cross_entropy_with_logits().input.labels"], np.zeros((6, 1)))
    np.testing.assert_array_equal(found["binary_cross_entropy_with_logits().input.labels#1"], np.ones((6, 1)))


def test_a_student_and_its_teacher(kit):
    """The loss is of both: it is the student's, which learns."""
    student, teacher = net(kit), net(kit, seed=1)
    f = functional(kit)
    for kwargs in ({}, {"reverse": True}):
        order = [student, teacher][:: -1 if kwargs else 1]
        with padiff.record(order[0]) as one, padiff.record(order[1]) as other:
            with kit.no_grad():
                wanted = teacher(kit.tensor(X))
            f.mse_loss(student(kit.tensor(X)), wanted).backward()
            one.try_dump()
            other.try_dump()
        of_student, of_teacher = (other, one) if kwargs else (one, other)
        assert set(of_losses(of_student)) == {
            f"mse_loss().{slot}" for slot in ("input.prediction", "input.target", "0")
        }
        assert of_losses(of_teacher) == {}


# -- settings ----------------------------------------------------------------------------------------------------------


def test_several_losses_are_numbered(kit):
    f, labels, target = functional(kit), kit.tensor(LABELS, "int64"), kit.tensor(TARGET)

    def loss(output):
        first = f.cross_entropy(output, labels)
        return (
            first
            + f.mse_loss(output, target, reduction="sum")
            + f.mse_loss(output, target)
            + 0 * f.cross_entropy(output, labels)
        )

    _, (settings,), *_ = trained(kit, loss)
    names = ["loss.0.function", "loss.1.function", "loss.1.reduction", "loss.2.function", "loss.2.reduction"]
    assert [settings[name] for name in names] == ["cross_entropy", "mse_loss", "sum", "mse_loss", "mean"]
    assert not any(name.startswith("loss.3") for name in settings)


def test_many_weights_are_a_checksum(kit):
    model = mlp(kit, (4, 8, 20))
    labels = kit.tensor(np.arange(6), "int64")

    def weight_of(values):
        weight = kit.tensor(values)
        _, (settings,), *_ = trained(kit, lambda o: functional(kit).cross_entropy(o, labels, weight=weight), model)
        return settings["loss.weight"]

    found = [weight_of(np.arange(20) + more) for more in (1, 1, 2)]
    assert found[0].startswith("20 values, checksum ")
    assert found[0] == found[1] != found[2]


def utils(kit):
    return (torch if kit.name == "torch" else paddle).nn.utils


def test_clipping_by_norm(kit):
    labels = kit.tensor(LABELS, "int64")
    norms = []

    def clip(parameters):
        norms.append(float(utils(kit).clip_grad_norm_(parameters, 0.125)))

    rec, (settings,), *_ = trained(kit, lambda o: functional(kit).cross_entropy(o, labels), clip=clip)
    assert {n: v for n, v in settings.items() if n.startswith("clip.")} == {
        "clip.kind": "global_norm",
        "clip.limit": 0.125,
        "clip.norm_type": 2.0,
    }
    (step,) = rec.run.steps(0)
    (norm,) = [r for r in step.records if r.slot == "clip_grad_norm().0"]
    assert (norm.stage, norm.layer, float(norm.value)) == ("grad", "(loop)", norms[0])
    # What the optimizer consumed is what clipping left.
    left = sum((r.value.astype(np.float64) ** 2).sum() for r in step.records if r.stage == "grad" and r is not norm)
    assert np.sqrt(left) == pytest.approx(0.125, rel=1e-3)


def test_other_clipping_and_none(kit):
    labels = kit.tensor(LABELS, "int64")

    def settings(clip):
        _, (found,), *_ = trained(kit, lambda o: functional(kit).cross_entropy(o, labels), clip=clip)
        return {n: v for n, v in found.items() if n.startswith("clip.")}

    assert settings(lambda p: utils(kit).clip_grad_value_(p, 0.5)) == {"clip.kind": "value", "clip.limit": 0.5}
    by_largest = {"clip.kind": "norm", "clip.limit": 0.5, "clip.norm_type": float("inf")}
    assert settings(lambda p: utils(kit).clip_grad_norm_(p, 0.5, norm_type=float("inf"))) == by_largest
    assert settings(None) == {"clip.kind": "none"}

    def twice(parameters):
        parameters = list(parameters)
        utils(kit).clip_grad_value_(parameters, 0.5)
        utils(kit).clip_grad_norm_(parameters, 0.25)

    found = settings(twice)
    assert (found["clip.0.kind"], found["clip.1.kind"], found["clip.1.limit"]) == ("value", "global_norm", 0.25)


@pytest.mark.skipif(is_before(torch, 2, 6), reason="this torch has no function of the norm alone")
def test_clipping_by_a_norm_that_is_known():
    from kit.frameworks import TORCH

    def clip(parameters):
        parameters = list(parameters)
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.25, total)

    labels = torch.tensor(LABELS)
    rec, (settings,), *_ = trained(TORCH, lambda o: torch_functional.cross_entropy(o, labels), clip=clip)
    assert (settings["clip.kind"], settings["clip.limit"]) == ("global_norm", 0.25)
    assert len([slot for slot in of_losses(rec) if slot.startswith("clip")]) == 1


# -- nothing is left, nothing is changed -------------------------------------------------------------------------------


def test_functions_are_as_before_in_steps_that_are_not_due_and_afterwards(kit):
    model, labels = net(kit), kit.tensor(LABELS, "int64")
    functions = functions_of(kit)
    codes = [function.__code__ for function in functions]
    texts = [(str(inspect.signature(f)), inspect.getsource(f), f.__doc__) for f in functions]

    def listened():
        return sum(f.__code__ is not code for f, code in zip(functions, codes))

    with padiff.record(model, every_n_steps=2) as rec:
        for number in range(4):
            assert listened() == 0 or number in (0, 2)
            loss = functional(kit).cross_entropy(model(kit.tensor(X)), labels)
            assert (listened() > 10) is (number in (0, 2))
            now = [(str(inspect.signature(f)), inspect.getsource(f), f.__doc__) for f in functions]
            assert now == texts
            for function in functions[:3]:
                assert pickle.loads(pickle.dumps(function)) is function
            loss.backward()
            rec.try_dump()
    assert listened() == 0
    assert hook_count(kit, model) == 0
    with pytest.raises(RuntimeError, match="planned"), padiff.record(model):
        functional(kit).cross_entropy(model(kit.tensor(X)), labels)
        assert listened() > 10
        raise RuntimeError("planned")
    assert listened() == 0


def test_a_recorder_that_nobody_keeps_leaves_nothing(kit):
    import gc
    import weakref

    model = net(kit)
    functions = functions_of(kit)
    codes = [function.__code__ for function in functions]
    rec = padiff.record(model)
    rec.open()
    rec.attach()
    functional(kit).cross_entropy(model(kit.tensor(X)), kit.tensor(LABELS, "int64")).backward()
    assert any(f.__code__ is not code for f, code in zip(functions, codes))
    rec.discard()
    alive = weakref.ref(model)
    rec.close(finished=False)
    del rec, model
    gc.collect()
    assert alive() is None
    assert all(f.__code__ is code for f, code in zip(functions, codes))


def test_losses_and_gradients_are_the_same_to_the_bit(kit):
    def train(recorded):
        model = net(kit)
        made, found = kit.sgd(model.parameters()), []
        labels, target = kit.tensor(LABELS, "int64"), kit.tensor(TARGET)
        rec = padiff.record(model, optimizer=made).__enter__() if recorded else None
        for number in range(3):
            output = model(kit.tensor(X * (number + 1)))
            loss = functional(kit).cross_entropy(output, labels) + functional(kit).mse_loss(output, target)
            loss.backward()
            utils(kit).clip_grad_norm_(model.parameters(), 0.5)
            found += [kit.numpy(loss), *(kit.grad(p) for p in model.parameters())]
            made.step()
            kit.zero(made)
            if rec is not None:
                rec.try_dump()
        if rec is not None:
            rec.close()
        return found

    for one, other in zip(train(False), train(True)):
        np.testing.assert_array_equal(one, other)


def test_recomputation_is_no_second_call():
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Linear(4, 3)
    labels = torch.tensor(LABELS)
    with padiff.record(model) as rec:
        loss = checkpoint(
            lambda x: torch_functional.cross_entropy(model(x), labels), torch.tensor(X), use_reentrant=False
        )
        loss.backward()
        rec.try_dump()
    assert set(of_losses(rec)) == {f"cross_entropy().{slot}" for slot in ("input.logits", "input.labels", "0")}


def test_transformed_calls_are_left_out():
    model = torch.nn.Linear(4, 3)
    labels = torch.tensor(LABELS)

    def loss(parameters, x, y):
        output = torch.func.functional_call(model, parameters, (x[None],))
        return torch_functional.cross_entropy(output, y[None], ignore_index=-100)

    parameters = {name: value.detach() for name, value in model.named_parameters()}
    with padiff.record(model) as rec:
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, torch.tensor(X), labels)
        value = torch_functional.cross_entropy(model(torch.tensor(X)), labels)
        value.backward()
        with pytest.warns(RuntimeWarning, match="torch.func"):
            rec.try_dump()
    assert float(of_losses(rec)["cross_entropy().0"]) == value.item()


def test_under_autocast_the_logits_are_what_the_function_was_given():
    model = torch.nn.Linear(4, 3)
    with padiff.record(model) as rec:
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch_functional.cross_entropy(model(torch.tensor(X)), torch.tensor(LABELS))
        loss.backward()
        rec.try_dump()
    (step,) = rec.run.steps(0)
    dtypes = {r.slot: r.dtype for r in step.records if is_of_loss(r)}
    assert dtypes["cross_entropy().input.logits"] == "bfloat16"
    assert dtypes["cross_entropy().0"] == "float32"
