"""Models that change while they are trained: what is recorded is what the model is in the step."""

from __future__ import annotations

import warnings

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH, hook_count
from kit.nets import mlp

import padiff

DETAILS = ["full", "sketch"]


def loss_of(kit, model, number, width=8):
    x = kit.tensor(np.random.default_rng(number).normal(size=(5, width)))
    return (model(x) ** 2).mean()


def trained(kit, make, change, steps=6, given=False, hooks=0, **options):
    """Record a training whose model is changed before steps, by ``change(model, optimizer, number)``."""
    kit.seed(0)
    model = make()
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=optimizer if given else None, **options) as rec:
        for number in range(steps):
            optimizer = change(model, optimizer, number) or optimizer
            loss = loss_of(kit, model, number)
            loss.backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.log_loss(loss)
            rec.try_dump()
    assert hook_count(kit, model, optimizer) == hooks  # those that are not ours
    return rec.run


def stages(run, number, layer):
    """The stages that were recorded of a layer, each as often as it was."""
    return sorted(r.stage for r in run.steps(number)[0].records if r.layer == layer)


def set_trainable(kit, layer, trainable):
    for parameter in layer.parameters():
        if kit.name == "torch":
            parameter.requires_grad_(trainable)
        else:
            parameter.stop_gradient = not trainable


# -- parameters that are frozen and unfrozen ---------------------------------------------------------------------------


def frozen_first(kit):
    def make():
        model = mlp(kit, (8, 16, 3))
        set_trainable(kit, model[0], False)
        return model

    return make


@pytest.mark.parametrize("detail", DETAILS)
def test_what_is_recorded_of_parameters_that_are_unfrozen_does_not_depend_on_the_schedule(kit, detail):
    def change(model, optimizer, number):
        if number == 3:
            set_trainable(kit, model[0], True)

    each, some = (trained(kit, frozen_first(kit), change, detail=detail, every_n_steps=n) for n in (1, 2))
    for number in some.numbers():
        assert [r.site for r in each.steps(number)[0].records] == [r.site for r in some.steps(number)[0].records]
    assert stages(each, 2, "0").count("grad") == 0
    for number in (3, 4, 5):
        assert stages(each, number, "0").count("grad") == stages(each, number, "0").count("update") == 2
    report = padiff.compare_runs(each, some)
    assert report.passed, report.first_diff.message


def test_parameters_that_are_frozen_have_no_gradient_any_more(kit):
    def change(model, optimizer, number):
        if number:
            set_trainable(kit, model[0], number % 2 == 0)

    run = trained(kit, lambda: mlp(kit, (8, 16, 3)), change)
    assert [stages(run, number, "0").count("grad") for number in range(6)] == [2, 0, 2, 0, 2, 0]
    assert [stages(run, number, "2").count("grad") for number in range(6)] == [2] * 6


def test_a_parameter_that_is_another_object_is_followed(kit):
    def change(model, optimizer, number):
        if number != 2:
            return None
        layer = model[2]
        if kit.name == "torch":
            layer.weight = torch.nn.Parameter(torch.full((3, 16), 0.25))
        else:
            layer.weight = paddle.create_parameter([16, 3], "float32")
            layer.weight.set_value(paddle.full([16, 3], 0.25))
        return kit.sgd(model.parameters())

    run = trained(kit, lambda: mlp(kit, (8, 16, 3)), change)
    for number in (2, 3):
        assert [stages(run, number, "2").count(stage) for stage in ("weight", "grad", "update")] == [2, 2, 2]
    (weight,) = (r for r in run.steps(2)[0].records if (r.layer, r.stage, r.slot) == ("2", "weight", "weight"))
    assert (weight.value == 0.25).all()


@pytest.mark.parametrize("every", [1, 2])
def test_a_norm_that_is_put_on_a_weight_does_not_disturb_the_training(kit, every):
    def change(model, optimizer, number):
        if number != 2:
            return None
        if kit.name == "torch":
            torch.nn.utils.parametrizations.spectral_norm(model[0])
        else:
            paddle.nn.utils.weight_norm(model[0])
        return kit.sgd(model.parameters())

    hooks = int(kit.name == "paddle")  # what works the weight out
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*layers of the recorded model changed in step 2 .new: 0.parametrizations")
        run = trained(kit, lambda: mlp(kit, (8, 16, 3)), change, hooks=hooks, every_n_steps=every)
    assert run.numbers() == list(range(0, 6, every))
    for number in run.numbers():
        assert stages(run, number, "2").count("grad") == 2
    slots = {r.slot for r in run.steps(4)[0].records if r.layer == "0" and r.stage == "grad"}
    assert "weight" not in slots
    assert "bias" in slots
    inside = "0.parametrizations.weight" if kit.name == "torch" else "0"
    assert stages(run, 4, inside).count("grad") == {"torch": 1, "paddle": 3}[kit.name]


# -- layers that come, go and are replaced -----------------------------------------------------------------------------


def replaced(kit, model):
    model[2] = kit.Linear(16, 4)


def wrapped(kit, model):
    model[0] = kit.Sequential(model[0], kit.ReLU())


def added(kit, model):
    module(kit, model, "more", kit.Linear(3, 5))


def removed(kit, model):
    del model[2]


def module(kit, model, name, layer):
    (model.add_module if kit.name == "torch" else model.add_sublayer)(name, layer)


#: Each with what is said, the layers that have gradients afterwards, and those that only the steps before have.
CHANGES = {
    replaced: ("replaced: 2", {"0", "2"}, set()),
    wrapped: ("new: 0.0, 0.1; replaced: 0", {"0.0", "2"}, set()),
    added: ("new: more", {"0", "2", "more"}, set()),
    removed: ("gone: 2", {"0"}, {"2"}),
}


@pytest.fixture(params=CHANGES, ids=lambda change: change.__name__)
def change(request):
    return request.param


def changing(kit, change, fault=False, every=1, **options):
    """A training whose layers change before step 2; at a fault, its last layer is another one in step 4."""

    def both(model, optimizer, number):
        if number == 4 and fault:
            last = [p for p in model.parameters() if len(p.shape) == 2][-1]
            with kit.no_grad():
                last.set_value(last * 1.5) if kit.name == "paddle" else last.mul_(1.5)
        if number != 2:
            return None
        change(kit, model)
        return kit.sgd(model.parameters())

    said = CHANGES[change][0]
    with pytest.warns(RuntimeWarning, match=rf"layers of the recorded model changed in step 2 \({said}\)") as caught:
        run = trained(kit, lambda: mlp(kit, (8, 16, 3)), both, every_n_steps=every, **options)
    assert len(caught) == 1
    return run


@pytest.mark.parametrize("every", [1, 2])
def test_layers_that_change_are_recorded_as_they_are_now(kit, change, every):
    run = changing(kit, change, every=every)
    _, now, gone = CHANGES[change]
    tree = {layer.path: layer for layer in run.info.layers}
    for number in run.numbers():
        (step,) = run.steps(number)
        found = {r.layer for r in step.records if r.stage == "grad"}
        assert found == (now if number >= 2 else {"0", "2"})
        called = {r.layer for r in step.records if r.stage == "forward"}
        assert called == (set(tree) if number >= 2 else {"(root)", "0", "1", "2"})
        for stage in ("weight", "update"):
            assert {r.layer for r in step.records if r.stage == stage} - {"(loop)"} == found
    assert gone.isdisjoint(tree)
    assert run.info.recording["layers"] == len(tree)
    shapes = {r.site: r.shape for r in run.steps(run.numbers()[-1])[0].records if r.stage == "weight"}
    for path in now:
        assert [p.shape for p in tree[path].parameters] == [shapes[f"{path}/weight/{s}"] for s in ("weight", "bias")]


# How a run is written does not depend on the framework that changed.
WRITTEN = [(change, options) for change in CHANGES for options in ({}, {"pack": True}, {"detail": "sketch"})]
WRITTEN = [(*one, (TORCH, PADDLE)[k % 2]) for k, one in enumerate(WRITTEN)]


@pytest.mark.parametrize(("change", "options", "kit"), WRITTEN, ids=lambda one: getattr(one, "__name__", None))
def test_a_run_whose_layers_changed_is_read_and_compared(kit, change, options, tmp_path):
    folders = {name: tmp_path / name for name in ("one", "two", "three")}
    for name, folder in folders.items():
        changing(kit, change, dir_path=folder, fault=name == "three", **options)
    memory = changing(kit, change, **{k: v for k, v in options.items() if k == "detail"})
    run = padiff.open_run(folders["one"])
    assert [layer.path for layer in run.info.layers] == [layer.path for layer in memory.info.layers]
    for number in memory.numbers():
        assert [r.site for r in run.steps(number)[0].records] == [r.site for r in memory.steps(number)[0].records]
    report = padiff.compare_runs(folders["one"], folders["two"])
    assert report.passed, report.first_diff.message
    missed = {site.split("/")[0] for site in report.coverage.reference_sites}
    assert missed == CHANGES[change][2]
    assert (report.coverage.share == 1) == (not missed)
    wrong = padiff.compare_runs(folders["one"], folders["three"])
    assert not wrong.passed
    assert wrong.first_diff.step == 4


def test_a_list_means_what_takes_a_layers_place(kit):
    def head(kit, model):
        model[2] = kit.Sequential(kit.Linear(16, 4), kit.ReLU())

    made = []

    def make():
        made.append(mlp(kit, (8, 16, 3)))
        return made[-1]

    def change(model, optimizer, number):
        if number == 2:
            head(kit, model)
            return kit.sgd(model.parameters())
        return None

    for listed, expected in (
        ({"white_list": ["2"]}, {"2", "2.0", "2.1"}),
        ({"white_list": [("2", "self")]}, {"2"}),
        ({"black_list": ["0", "1"]}, {"(root)", "2", "2.0", "2.1"}),
    ):
        with pytest.warns(RuntimeWarning, match="new: 2.0, 2.1; replaced: 2"):
            run = trained(kit, make, change, **listed)
        assert {r.layer for r in run.steps(3)[0].records if r.stage == "forward"} == expected

    def gone(model, optimizer, number):
        if number == 2:
            del model[2]
            return kit.sgd(model.parameters())
        return None

    with pytest.warns(RuntimeWarning, match="gone: 2"):
        run = trained(kit, make, gone, white_list=["2"])
    assert [len(stages(run, number, "2")) > 0 for number in range(6)] == [True, True] + [False] * 4
    assert not [r for r in run.steps(3)[0].records if r.stage == "forward"]


def test_a_layer_object_in_a_list_is_meant_by_its_path(kit):
    model = mlp(kit, (8, 16, 3))

    def change(_, optimizer, number):
        if number == 2:
            replaced(kit, model)
            return kit.sgd(model.parameters())
        return None

    with pytest.warns(RuntimeWarning, match="replaced: 2"):
        run = trained(kit, lambda: model, change, white_list=[model[2]])
    assert ["forward" in stages(run, number, "2") for number in run.numbers()] == [True] * 6
    assert not stages(run, 3, "0")


def test_a_model_that_becomes_another_as_a_whole_is_recorded_from_the_next_step_on(kit):
    class Host(kit.Net):
        """Whose own forward is never called."""

        def build(self):
            self.net = mlp(kit, (8, 16, 3))

    host = Host()
    with padiff.record(host) as rec, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for number in range(4):
            if number == 1:
                host.net = mlp(kit, (8, 12, 3))
            loss = loss_of(kit, host.net, number)
            loss.backward()
            rec.log_loss(loss)
            rec.try_dump()
    said = [str(one.message) for one in caught if "padiff" in str(one.message)]
    assert len(said) == 2
    assert "no layer of the recorded model was called in step 1" in said[0]
    assert "replaced: net" in said[1]
    for number in (0, 2, 3):
        assert stages(rec.run, number, "net.0").count("grad") == 2
    assert stages(rec.run, 3, "net.0").count("forward") == 1


def test_a_model_that_does_not_change_is_described_once(kit, tmp_path):
    run_file = tmp_path / "run/run.json"
    model = mlp(kit, (8, 16, 3))
    with padiff.record(model, tmp_path / "run") as rec:
        for number in range(4):
            loss_of(kit, model, number).backward()
            rec.try_dump()
            if number == 0:  # which says how the training is set
                rec.flush()
                described = run_file.stat().st_mtime_ns
    assert run_file.stat().st_mtime_ns == described


def test_layers_that_are_gone_are_freed(kit):
    import gc
    import weakref

    model = mlp(kit, (8, 16, 3))
    with padiff.record(model) as rec:
        for number in range(4):
            if number == 2:
                alive = [weakref.ref(model[2]), weakref.ref(model[2].weight)]
                replaced(kit, model)
            loss_of(kit, model, number).backward()
            if number == 3:
                gc.collect()
                assert [ref() for ref in alive] == [None, None]
            if number != 2:
                rec.try_dump()
                continue
            with pytest.warns(RuntimeWarning, match="replaced: 2"):
                rec.try_dump()


# -- lazy layers -------------------------------------------------------------------------------------------------------


def lazy_model():
    return torch.nn.Sequential(
        torch.nn.LazyLinear(16), torch.nn.LazyBatchNorm1d(), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )


def lazily(steps, options):
    torch.manual_seed(0)
    model = lazy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for number in range(steps):
            loss = (model(torch.from_numpy(np.random.default_rng(number).normal(size=(5, 8))).float()) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.log_loss(loss)
            if steps > 1:
                rec.try_dump()
    return rec.run


@pytest.mark.parametrize("steps", [1, 3])
def test_lazy_layers_are_described_once_they_have_their_parameters(steps):
    runs = [lazily(steps, {}) for _ in range(2)]
    tree = {layer.path: layer for layer in runs[0].info.layers}
    assert [(p.slot, p.shape) for p in tree["0"].parameters] == [("weight", (16, 8)), ("bias", (16,))]
    assert (tree["0"].kind, tree["1"].kind) == ("linear", "batchnorm1d")
    report = padiff.compare_runs(*runs)
    assert report.passed
    assert report.coverage.complete
    assert report.coverage.share == 1
    if steps > 1:
        assert stages(runs[0], 1, "0").count("weight") == 2
