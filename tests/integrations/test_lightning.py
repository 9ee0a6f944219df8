"""PaDiffCallback in Lightning's Trainer."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import pytest
import pytorch_lightning
import torch
from torch import nn

import padiff
from padiff_lightning import PaDiffCallback

from .lit import QUIET, Lit, Validated, fit, hooks, loader, net, values


def plain_fit(module, **options):
    trainer = pl.Trainer(**{"max_epochs": 1, **QUIET, **options})
    trainer.fit(module, loader())
    return module


def gradients(batches, seed=0):
    """Autograd's gradients of the untrained net, the mean over the given batches; in float64."""
    network = net(seed).double()
    data = list(loader())
    losses = [nn.functional.cross_entropy(network(data[k][0].double()), data[k][1]) for k in batches]
    found = torch.autograd.grad(sum(losses) / len(losses), list(network.parameters()))
    names = ("net.0/grad/weight", "net.0/grad/bias", "net.2/grad/weight", "net.2/grad/bias")
    return dict(zip(names, (g.numpy() for g in found)))


def test_the_training_is_the_same_to_the_bit_with_and_without_the_callback(tmp_path):
    plain = plain_fit(Lit())
    _, _, module = fit(tmp_path / "run")
    assert torch.equal(torch.stack(module.losses), torch.stack(plain.losses))
    for a, b in zip(module.parameters(), plain.parameters()):
        assert torch.equal(a, b)


def test_the_hooks_are_gone_after_fit(tmp_path):
    _, trainer, module = fit(tmp_path / "run")
    assert hooks(module, *trainer.optimizers) == 0
    assert not [name for name in vars(module) if "padiff" in name]


@pytest.mark.parametrize("host", [pl, pytorch_lightning], ids=lambda host: host.__name__)
def test_both_of_lightnings_packages_take_the_callback(tmp_path, host):
    class Module(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        training_step = Lit.training_step
        fail_at, losses = None, []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit(tmp_path / "run", Module(), host=host, options={"every_n_steps": 2})
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 2, 4]
    assert padiff.open_run(tmp_path / "run").finished()


def test_weights_gradients_updates_loss_and_rate_are_those_of_the_training(tmp_path):
    fit(tmp_path / "run")
    found = values(tmp_path / "run")
    for site, gradient in gradients([0]).items():
        np.testing.assert_allclose(found[site], gradient, 1e-4, 1e-7)
        np.testing.assert_allclose(found[site.replace("grad", "update")], -0.1 * gradient, 1e-3, 1e-7)
    np.testing.assert_array_equal(found["net.0/weight/weight"], net()[0].weight.detach().numpy())
    x, y = next(iter(loader()))
    assert found["(loop)/loss/loss"] == pytest.approx(float(nn.functional.cross_entropy(net()(x), y).detach()))
    assert found["(loop)/update/learning_rate"] == pytest.approx(0.1)


def test_the_roots_forward_is_never_called_but_the_inputs_are_recorded_at_the_outermost_layer(tmp_path):
    fit(tmp_path / "run")
    found = values(tmp_path / "run")
    np.testing.assert_array_equal(found["net/input/input.input"], next(iter(loader()))[0].numpy())
    assert not [site for site in found if site.startswith("(root)/")]


def test_accumulated_batches_are_one_step_with_several_micro_batches(tmp_path):
    fit(tmp_path / "run", accumulate_grad_batches=3)
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 1]
    (step,) = run.steps(0)
    assert step.micro_batches == 3
    found = values(tmp_path / "run")
    for site, gradient in gradients([0, 1, 2]).items():
        np.testing.assert_allclose(found[site], gradient, 1e-4, 1e-7)
    batches = list(loader())
    for call, mark in enumerate(("", "#1", "#2")):
        np.testing.assert_array_equal(found[f"net/input/input.input{mark}"], batches[call][0].numpy())
        # As Lightning hands it to callbacks: divided by the number of batches, as it was differentiated.
        x, y = batches[call]
        share = float(nn.functional.cross_entropy(net()(x), y).detach()) / 3
        assert found[f"(loop)/loss/loss{mark}"] == pytest.approx(share, rel=1e-5)


def test_the_last_batches_of_an_epoch_that_make_a_smaller_step_count_as_one(tmp_path):
    fit(tmp_path / "run", accumulate_grad_batches=4, max_epochs=2)
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 1, 2, 3]
    assert [run.steps(n)[0].micro_batches for n in run.numbers()] == [4, 2, 4, 2]


def test_the_gradient_is_the_one_consumed_after_clipping(tmp_path):
    fit(tmp_path / "run", gradient_clip_val=0.05)
    found = values(tmp_path / "run")
    plain = gradients([0])
    norm = np.sqrt(sum((g**2).sum() for g in plain.values()))
    assert norm > 0.1
    for site, gradient in plain.items():
        np.testing.assert_allclose(found[site], gradient * 0.05 / norm, 1e-3, 1e-7)


def test_accumulation_and_clipping_together_and_recording_every_second_step(tmp_path):
    fit(
        tmp_path / "run",
        data=loader(8),
        options={"every_n_steps": 2},
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
    )
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 2]
    found = values(tmp_path / "run", 2)
    total = sum(
        (v.astype(np.float64) ** 2).sum() for site, v in found.items() if "/grad/" in site and "(loop)" not in site
    )
    assert np.sqrt(total) == pytest.approx(0.05, rel=1e-3)


def test_the_sanity_check_and_validation_are_not_recorded(tmp_path):
    module = Validated()
    callback = PaDiffCallback(tmp_path / "run")
    trainer = pl.Trainer(
        **{**QUIET, "max_epochs": 1, "callbacks": [callback], "num_sanity_val_steps": 2, "val_check_interval": 2}
    )
    trainer.fit(module, loader(), loader(3, seed=9))
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == list(range(6))
    assert trainer.global_step == 6
    training = list(loader())
    for number in run.numbers():
        (step,) = run.steps(number)
        inputs = [r.value for r in step.records if r.stage == "input"]
        assert len(inputs) == 1
        np.testing.assert_array_equal(inputs[0], training[number][0].numpy())


class Manual(pl.LightningModule):
    """Manual optimization with one or two optimizers."""

    def __init__(self, count):
        super().__init__()
        self.automatic_optimization = False
        self.parts = nn.ModuleList(net(k) for k in range(count))

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for part, optimizer in zip(self.parts, optimizers if isinstance(optimizers, list) else [optimizers]):
            loss = nn.functional.cross_entropy(part(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1 * (k + 1)) for k, part in enumerate(self.parts)]


@pytest.mark.parametrize("count", [1, 2])
def test_manual_optimization_records_the_gradients_and_updates_of_every_optimizer(tmp_path, count):
    fit(tmp_path / "run", Manual(count))
    found = values(tmp_path / "run")
    for k in range(count):
        for site, gradient in gradients([0], seed=k).items():
            site = site.replace("net.", f"parts.{k}.")
            np.testing.assert_allclose(found[site], gradient, 1e-4, 1e-7)
            np.testing.assert_allclose(found[site.replace("grad", "update")], -0.1 * (k + 1) * gradient, 1e-3, 1e-7)
    assert found["(loop)/update/learning_rate"] == pytest.approx(0.1)
    assert ("(loop)/update/learning_rate.1" in found) == (count == 2)


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_of_manual_optimization_is_one_step_however_many_optimizers_stepped(tmp_path, count):
    fit(tmp_path / "run", Manual(count), data=loader(3))
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2]


def test_bf16_mixed_precision_keeps_the_true_dtypes(tmp_path):
    fit(tmp_path / "run", precision="bf16-mixed")
    (step,) = padiff.open_run(tmp_path / "run").steps(0)
    dtypes = {record.site: record.dtype for record in step.records}
    assert dtypes["net.0/forward/output.0"] == "bfloat16"
    assert dtypes["net.0/backward/output.0"] == "bfloat16"
    assert dtypes["net.0/weight/weight"] == dtypes["net.0/grad/weight"] == "float32"
    network, x = net(), next(iter(loader()))[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = network[0](x).float().detach().numpy()
    np.testing.assert_array_equal(values(tmp_path / "run")["net.0/forward/output.0"].astype(np.float32), expected)


def test_with_a_scaler_gradients_are_unscaled_and_each_step_says_the_scale_it_was_scaled_with(tmp_path):
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1)
    fit(tmp_path / "run", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    run = padiff.open_run(tmp_path / "run")
    assert [run.steps(n)[0].loss_scale for n in run.numbers()] == [512, 1024, 2048, 4096, 8192, 16384]
    found = values(tmp_path / "run")
    for site, gradient in gradients([0]).items():
        assert np.linalg.norm(found[site] - gradient) < 0.01 * np.linalg.norm(gradient), site
    fit(tmp_path / "plain")
    report = padiff.compare_runs(tmp_path / "plain", tmp_path / "run")
    assert report.passed, report.first_diff.message


def test_after_a_resume_from_a_checkpoint_the_step_numbers_go_on(tmp_path):
    first = Lit()
    _, trainer, _ = fit(tmp_path / "run", first, options={"every_n_steps": 2}, data=loader(4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fit(
        tmp_path / "run",
        Lit(net(5)),
        options={"every_n_steps": 2},
        data=loader(4),
        ckpt_path=tmp_path / "last.ckpt",
        max_epochs=2,
    )
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 2, 4, 6]
    after_four = first.net[0].weight.detach().numpy()
    np.testing.assert_array_equal(values(tmp_path / "run", 4)["net.0/weight/weight"], after_four)


def test_a_checkpoint_written_without_the_callback_is_counted_by_its_optimizer_steps(tmp_path):
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 1})
    trainer.fit(Lit(), loader(5))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    fit(tmp_path / "run", Lit(), data=loader(5), ckpt_path=tmp_path / "plain.ckpt", max_epochs=2)
    assert padiff.open_run(tmp_path / "run").numbers() == [5, 6, 7, 8, 9]


def test_a_second_fit_of_the_same_callback_goes_on_in_the_same_run(tmp_path):
    callback, module = PaDiffCallback(tmp_path / "run"), Lit()
    for _ in range(2):
        pl.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": [callback]}).fit(module, loader(3))
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2, 3, 4, 5]


def test_a_new_callback_refuses_a_folder_that_holds_a_run(tmp_path):
    fit(tmp_path / "run")
    with pytest.raises(padiff.PadiffError, match="holds a run"):
        fit(tmp_path / "run")
    fit(tmp_path / "run", options={"existing": "overwrite", "every_n_steps": 5})
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 5]


def test_an_exception_in_training_step_leaves_no_hooks_and_keeps_what_is_written(tmp_path):
    module = Lit(fail_at=3)
    with pytest.raises(ZeroDivisionError, match="in training_step"):
        fit(tmp_path / "run", module)
    assert hooks(module) == 0
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 1, 2]
    assert not run.finished()


def test_an_epoch_that_the_module_cuts_short_leaves_no_hooks_behind(tmp_path):
    class Cut(Lit):
        seen = ()

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

        def on_train_epoch_end(self):
            self.seen = (*self.seen, hooks(self))

    _, _, module = fit(tmp_path / "run", Cut(), max_epochs=2)
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 1, 2, 3]
    assert module.seen == (0, 0)
    for number in run.numbers():
        (step,) = run.steps(number)
        assert step.micro_batches == 1
        assert len([r for r in step.records if r.stage == "forward"]) == 4
        assert step.notes == ()


def test_lists_reach_the_recording(tmp_path):
    fit(tmp_path / "run", options={"white_list": ["net.2"]})
    layers = {site.split("/")[0] for site in values(tmp_path / "run")}
    assert layers == {"net.2", "(loop)"}
