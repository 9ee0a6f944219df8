"""Optimizers that hand their work to another one inside: hosts and fleet give those to their loops."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from hard.children import run_child
from kit.forking import python_with_frameworks
from kit.frameworks import PADDLE, TORCH, hook_count
from kit.nets import batch, mlp, one_step, recorded, sites

import padiff
from padiff.errors import UsageError


class Accelerated(torch.optim.Optimizer):
    """As accelerate's: one of torch by class, never initialised as one, and properties for what the other has."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()


class Plain:
    """Derives from nothing, as DeepSpeed's and apex's."""

    def __init__(self, *optimizers):
        self.held = optimizers if len(optimizers) > 1 else optimizers[0]
        self.unused = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)

    @property
    def param_groups(self):
        held = self.held if isinstance(self.held, tuple) else (self.held,)
        return [group for optimizer in held for group in optimizer.param_groups]

    def step(self, closure=None):
        for optimizer in self.held if isinstance(self.held, tuple) else (self.held,):
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.held if isinstance(self.held, tuple) else (self.held,):
            optimizer.zero_grad()


def accelerate(optimizer):
    package = pytest.importorskip("accelerate")
    package.Accelerator(cpu=True)
    return package.optimizer.AcceleratedOptimizer(optimizer)


WRAPPERS = {
    "accelerated": Accelerated,
    "accelerate": accelerate,
    "plain": Plain,
    "two deep": lambda optimizer: Accelerated(Plain(optimizer)),
}


def train(kit, wrap, record=True, steps=2):
    """Two steps; their losses, the weights that they leave, and the recorder."""
    kit.seed(3)
    model = mlp(kit)
    own = kit.adam(model.parameters())
    optimizer = wrap(own)
    losses = []

    def loop(rec):
        for number in range(steps):
            losses.append(float(one_step(kit, model, optimizer, *batch(kit, seed=number), rec).detach()))

    rec = None
    if record:
        with padiff.record(model, optimizer=optimizer) as rec:
            loop(rec)
    else:
        loop(None)
    assert hook_count(kit, model) == 0
    assert kit.hooks_on_optimizer(own) == 0
    return losses, [kit.numpy(p) for p in model.parameters()], rec


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_the_optimizer_inside_consumes_and_does_is_recorded(name):
    plain = train(TORCH, WRAPPERS[name], record=False)
    losses, weights, rec = train(TORCH, WRAPPERS[name])
    _, _, bare = train(TORCH, lambda optimizer: optimizer)
    assert losses == plain[0]
    for reference, candidate in zip(weights, plain[1]):
        np.testing.assert_array_equal(reference, candidate)
    for number in (0, 1):
        values, expected = recorded(rec, number), recorded(bare, number)
        assert values.keys() == expected.keys()
        assert len(sites(rec, "grad", number)) == 4
        for site, value in expected.items():
            np.testing.assert_array_equal(values[site], value, err_msg=site)


def test_several_inside_are_all_recorded_and_each_once():
    model = mlp(TORCH)
    first, second = TORCH.sgd(model[0].parameters(), 0.1), TORCH.sgd(model[2].parameters(), 0.5)
    both = Plain(first, second)
    with padiff.record(model, optimizer=[both, first, Accelerated(second)]) as rec:
        one_step(TORCH, model, both, *batch(TORCH), rec)
    assert sites(rec, "grad") == ["0/grad/weight", "0/grad/bias", "2/grad/weight", "2/grad/bias"]
    values = recorded(rec)
    for layer, rate in (("0", 0.1), ("2", 0.5)):
        np.testing.assert_allclose(values[f"{layer}/update/bias"], -rate * values[f"{layer}/grad/bias"], 1e-4, 1e-7)


def test_zero_redundancy_is_recorded():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        _, _, rec = train(
            TORCH, lambda own: ZeroRedundancyOptimizer(own.param_groups[0]["params"], torch.optim.Adam, lr=1e-2)
        )
    finally:
        torch.distributed.destroy_process_group()
    _, _, bare = train(TORCH, lambda optimizer: optimizer)
    for site, value in recorded(bare, 1).items():
        np.testing.assert_array_equal(recorded(rec, 1)[site], value, err_msg=site)


def test_what_a_lightning_module_gets_from_its_trainer_is_recorded():
    import lightning.pytorch as pl

    class Manual(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp(TORCH)
            self.automatic_optimization = False

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), 0.1)

        def training_step(self, data, number):
            optimizer = self.optimizers()
            assert "_optimizer_step_pre_hooks" not in vars(optimizer)
            with padiff.record(self.net, optimizer=optimizer) as self.rec:
                loss = TORCH.cross_entropy(self.net(data[0]), data[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    module = Manual()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(TORCH)), batch_size=6)
    pl.Trainer(max_steps=1, accelerator="cpu", **quiet).fit(module, loader)
    values = recorded(module.rec)
    assert len(sites(module.rec, "grad")) == 4
    np.testing.assert_allclose(values["0/update/bias"], -0.1 * values["0/grad/bias"], 1e-4, 1e-7)


class Uninitialised(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]

    def step(self, closure=None):
        pass


class OfOthers(Uninitialised):
    """It holds an optimizer, but one for other parameters."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)


class UninitialisedPaddle(paddle.optimizer.Optimizer):
    def __init__(self, parameters):
        pass


@pytest.mark.parametrize("kind", [Uninitialised, OfOthers, UninitialisedPaddle], ids=lambda kind: kind.__name__)
def test_one_of_which_nothing_can_be_seen_is_refused_before_the_first_step(kind):
    model = mlp(PADDLE if kind is UninitialisedPaddle else TORCH)
    with pytest.raises(UsageError, match=rf"of .*\.{kind.__name__} nothing can be seen: .* Give the optimizer whose"):
        padiff.record(model, optimizer=kind(model.parameters()))


def test_a_scheduler_is_no_optimizer_though_it_holds_one(kit):
    if kit.name == "torch":
        wrong = torch.optim.lr_scheduler.StepLR(kit.sgd(mlp(kit).parameters()), 1)
    else:
        wrong = paddle.optimizer.lr.StepDecay(0.1, 1)
    with pytest.raises(UsageError, match=r"expected an optimizer of \w+ .*, got .*Step"):
        padiff.record(mlp(kit), optimizer=wrong)


# -- paddle ----------------------------------------------------------------------------------------------------------


def heterogeneous(optimizer):
    from paddle.distributed import fleet
    from paddle.distributed.fleet.meta_optimizers import HeterParallelOptimizer

    return HeterParallelOptimizer(optimizer, fleet.DistributedStrategy())


def mixed(optimizer):
    """It does what the optimizer's step() does by itself, with gradients in float32."""
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionOptimizer

    return MixPrecisionOptimizer(optimizer)


def both(optimizer):
    return heterogeneous(mixed(optimizer))


def distributed(optimizer):
    """Of paddle by class; what is set on it is set on the one inside."""
    return paddle.distributed.shard_optimizer(optimizer)


def clipped(wrap, steps=3):
    """A training whose gradients are clipped to a norm of 0.01, twice an update in its last step."""
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

    PADDLE.seed(3)
    model = mlp(PADDLE)
    clip = paddle.nn.ClipGradByGlobalNorm(0.01)
    own = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), grad_clip=clip)
    optimizer = wrap(own)
    called = MixPrecisionLayer(model, dtype="bfloat16") if wrap in (mixed, both) else model
    before = [dict(vars(one)) for one in (own, optimizer)]
    with padiff.record(model, optimizer=optimizer) as rec:
        for number in range(steps):
            one_step(PADDLE, called, optimizer, *batch(PADDLE, seed=number))
            if number == steps - 1:
                one_step(PADDLE, called, optimizer, *batch(PADDLE, seed=number))
            rec.try_dump()
    for one, was in zip((own, optimizer), before):
        assert not {"step", "minimize", "append_regularization_ops"} & (vars(one).keys() | was.keys())
    return rec


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [heterogeneous, mixed, both, distributed])
def test_fleets_wrappers_are_recorded_as_what_they_wrap(wrap):
    rec, bare = clipped(wrap), clipped(lambda optimizer: optimizer)
    for number in (0, 1, 2):
        values, expected = recorded(rec, number), recorded(bare, number)
        assert values.keys() == expected.keys()
        parameters = [site for site in sites(rec, "grad", number) if not site.startswith("(loop)")]
        assert len(parameters) == len(sites(rec, "update", number)) - 1 == (8 if number == 2 else 4)
        norm = np.sqrt(sum((values[site] ** 2).sum() for site in parameters if "#" not in site))
        assert norm == pytest.approx(0.01, rel=1e-3)
        for site, value in expected.items():
            np.testing.assert_allclose(values[site], value, 1e-5, 1e-8, err_msg=site)


HYBRID = """
import numpy as np, paddle, padiff
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers import HybridParallelOptimizer

strategy = fleet.DistributedStrategy()
fleet.init(is_collective=True, strategy=strategy)
model = paddle.nn.Linear(8, 4)
clip = paddle.nn.ClipGradByGlobalNorm(0.01)
inner = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), grad_clip=clip)
optimizer = HybridParallelOptimizer(inner, fleet.get_hybrid_communicate_group(), strategy)
with padiff.record(model, optimizer=optimizer) as rec:
    before = model.weight.numpy()
    model(paddle.ones([4, 8])).mean().backward()
    optimizer.step()
    rec.try_dump()
found = {r.site: r.value for r in rec.run.steps(0)[0].records}
np.testing.assert_array_equal(found["(root)/update/weight"], model.weight.numpy() - before)
norm = np.sqrt(sum((found[f"(root)/grad/{slot}"] ** 2).sum() for slot in ("weight", "bias")))
np.testing.assert_allclose(norm, 0.01, 1e-3)
"""


def test_fleets_hybrid_parallel_optimizer_is_recorded():
    """In a process of its own: fleet is initialised for good."""
    process = run_child([*python_with_frameworks(), "-W", "ignore", "-c", HYBRID])
    assert process.returncode == 0, process.stderr[-2000:]


def test_the_callbacks_take_wrapped_optimizers(tmp_path):
    from padiff_hooks.training import TrainingRecorder

    model = mlp(TORCH)
    optimizer = Accelerated(TORCH.sgd(model.parameters()))
    training = TrainingRecorder(tmp_path / "run")
    training.start(model, [optimizer])
    training.begin_batch()
    one_step(TORCH, model, optimizer, *batch(TORCH))
    training.end_batch()
    training.end_step()
    training.finish()
    (step,) = padiff.open_run(tmp_path / "run").steps(0)
    assert sum(r.stage == "grad" for r in step.records) == 4
