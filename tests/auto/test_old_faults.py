"""Faults of the existing tool (DESIGN, section 8) that no other file of this folder has a test for."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import paddle
import pytest
import torch
from hard.children import run_child
from kit.forking import python_with_frameworks
from kit.frameworks import PADDLE, TORCH
from kit.nets import both, data, tanh_mlp

import padiff
from padiff import check_params, check_report, check_weights, create_model

CFG = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}


def trained(kit, model, x, **options):
    proxy = create_model(model, **options)
    proxy.backward(proxy(kit.tensor(x)).mean())
    return proxy


def test_a_surplus_bias_is_a_diff_of_two_dumps_not_a_gap(pair):
    base, raw = pair[0].Sequential(pair[0].Linear(3, 3)), pair[1].Sequential(pair[1].linear(3, 3, bias=False))
    pair[1].set_weight(raw[0], pair[0].weight(base[0]))
    pair[0].set(base[0].bias, np.zeros(3))
    for side, kit, model in zip("ab", pair, (base, raw)):
        trained(kit, model, data(2, 3)).try_dump(1, side)
    assert check_report("a", "b", CFG)
    for first, second in ("ab", "ba"):
        report = check_weights(first, second, CFG)
        assert not report
        assert report.first_diff.slot == "bias"
        assert "missing" in report.first_diff.message


def scaling(kit, dtype):
    """Two layers that multiply: on the CPU, paddle has no bfloat16 sum or matrix product, and nothing of float16."""

    class Scale(kit.Net):
        def build(self):
            if kit.name == "torch":
                self.weight = torch.nn.Parameter(torch.randn(4).to(getattr(torch, dtype)))
            else:
                self.weight = self.create_parameter((4,), dtype=dtype)
                self.weight.set_value(paddle.randn((4,)).astype(dtype))

        def forward(self, x):
            return x * self.weight

    return kit.Sequential(Scale(), Scale())


def test_a_bfloat16_model_is_dumped_and_compared_with_its_true_dtype(kit):
    model = scaling(kit, "bfloat16")
    proxy = create_model(model)
    proxy.backward(in_float32(kit)(proxy(kit.tensor(data(5, 4), "bfloat16"))))
    proxy.try_dump(1, "a")
    assert check_report("a", "a")
    (weight,) = [d for d in check_weights("a", "a") if d.pair.anchor.site == "0/weight/weight"]
    assert weight.pair.reference.dtype == "bfloat16"
    assert weight.pair.reference.value.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(weight.pair.reference.value.astype("float64"), kit.float64(model[0].weight))


def in_float32(kit):
    """A loss that a bfloat16 output, which paddle on the CPU has no mean of, can have too."""

    def loss(output):
        if "bfloat16" in str(output.dtype):
            output = output.float() if kit.name == "torch" else output.astype("float32")
        return output.mean()

    return loss


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_models_of_other_dtypes_go_through_auto_diff(pair, dtype):
    if dtype == "float16" and "paddle" in {kit.name for kit in pair}:
        pytest.skip("paddle multiplies no float16 on the CPU")
    models = [scaling(kit, dtype) for kit in pair]
    tolerance = {"float64": 1e-10, "bfloat16": 0.05, "float16": 5e-3}[dtype]
    inputs = [kit.tensor(data(5, 4), dtype) for kit in pair]
    losses = [in_float32(kit) for kit in pair]
    for options in ({}, {"single_step": True}):
        report = padiff.auto_diff(*models, inputs, losses, atol=tolerance, rtol=tolerance, **options)
        assert report
        assert {d.pair.anchor.dtype for d in report if d.pair.stage == "forward"} == {dtype}
    assert [str(model[0].weight.dtype).split(".")[-1] for model in models] == [dtype, dtype]
    pair[1].set(models[1][1].weight, pair[1].float64(models[1][1].weight) + 1)
    assert not padiff.auto_diff(*models, inputs, losses, auto_init=False, atol=tolerance, rtol=tolerance)


@dataclasses.dataclass
class Output:
    logits: object
    hidden: object = None


def test_none_and_dataclass_outputs_are_dumped_and_compared(kit):
    class Inner(kit.Net):
        def build(self):
            self.fc = kit.Linear(4, 4)

        def forward(self, x):
            return self.fc(x), None

    class Net(kit.Net):
        def build(self):
            self.inner = Inner()

        def forward(self, x):
            return Output(logits=self.inner(x)[0])

    proxy = create_model(Net())
    output = proxy(kit.tensor(data(2, 4)))
    assert output.hidden is None
    proxy.backward(output.logits.mean())
    proxy.try_dump(1, "a")
    assert {d.pair.anchor.slot for d in check_report("a", "a") if d.pair.stage == "forward"} == {
        "output.0",
        "output.logits",
    }


def test_every_rank_has_a_folder_of_its_own():
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    code = """
import torch, padiff, sys
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
model = padiff.create_model(torch.nn.Linear(2, 2), "Simple")
model.backward(model(torch.ones(1, 2)).mean())
model.try_dump()
"""
    done = run_child([*python_with_frameworks(), "-c", code])
    assert done.returncode == 0, done.stderr
    written = Path("padiff_dump/Simple/step_0/rank_1/report.json")
    assert json.loads(written.read_text())["rank"] == 1


def test_a_proxy_keeps_no_step_alive_once_it_is_cleared(kit):
    proxy = create_model(tanh_mlp(kit))
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            output = proxy(kit.tensor(data(5, 4)))
            proxy.backward(output.mean())
            proxy.try_dump(1, "a")
            alive = weakref.ref(output)
            del output
            assert alive() is None, f"the graph of step {step} is alive though nobody has it"
    finally:
        gc.enable()


def test_auto_diff_keeps_no_output_alive(pair):
    seen = []
    models = [tanh_mlp(kit) for kit in pair]
    for model in models:

        def forward(x, real=model.forward):
            output = real(x)
            seen.append(weakref.ref(output))
            return output

        model.forward = forward
    gc.collect()
    gc.disable()
    try:
        report = padiff.auto_diff(*models, both(pair, data(5, 4)), **CFG)
        assert report
        assert len(seen) >= 2
        assert not any(ref() is not None for ref in seen)
    finally:
        gc.enable()


def test_a_dump_is_never_compared_with_itself_because_of_a_name(pair):
    proxies = [create_model(tanh_mlp(kit), name="Net") for kit in pair]
    for kit, proxy in zip(pair, proxies):
        proxy.backward(proxy(kit.tensor(data(5, 4))).mean())
        proxy.try_dump()
    assert not check_params(proxies[0].dump_path, proxies[1].dump_path, CFG)
    report = padiff.auto_diff(*proxies, both(pair, data(5, 4)), auto_init=False, **CFG)
    assert not report


def test_one_dump_path_for_both_models_still_makes_two_dumps(pair, tmp_path):
    proxies = [create_model(tanh_mlp(kit)) for kit in pair]
    for proxy in proxies:
        proxy.dump_path = str(tmp_path / "same")
    assert not padiff.auto_diff(*proxies, both(pair, data(5, 4)), auto_init=False, **CFG)
    folders = [tmp_path / "same" / "auto_diff" / side for side in ("base", "raw")]
    assert not check_params(*folders, CFG)


def test_the_parameters_of_one_step_are_not_zipped_with_another_order(pair):
    """Layers defined in another order, of unequal shapes, are paired by what they are."""

    def net(kit, names):
        class Net(kit.Net):
            def build(self):
                for name in names:
                    setattr(self, name, kit.Linear(4, 3) if name == "wide" else kit.Linear(3, 4))

            def forward(self, x):
                return self.wide(self.narrow(x))

        return Net()

    base, raw = net(pair[0], ("wide", "narrow")), net(pair[1], ("narrow", "wide"))
    assert padiff.auto_diff(base, raw, both(pair, data(5, 3)), **CFG)
    np.testing.assert_array_equal(pair[1].weight(raw.wide), pair[0].weight(base.wide))


def test_importing_changes_no_print_options():
    code = (
        "import numpy as np, torch; before = (np.get_printoptions(), str(torch.rand(3, 3).shape), repr(torch.pi));"
        "state = dict(vars(torch._tensor_str.PRINT_OPTS));"
        "import padiff; padiff.auto_diff, padiff.create_model, padiff.assign_weight;"
        "assert dict(vars(torch._tensor_str.PRINT_OPTS)) == state; assert np.get_printoptions() == before[0];"
        "import sys; assert 'paddle' not in sys.modules"
    )
    done = run_child([*python_with_frameworks(only="torch"), "-c", code])
    assert done.returncode == 0, done.stderr


def test_an_optimizer_of_paddle_that_does_nothing_is_seen():
    base, raw = tanh_mlp(TORCH), tanh_mlp(PADDLE)
    report = padiff.auto_diff(
        base, raw, both((TORCH, PADDLE), data(5, 4)), None, [TORCH.sgd(base.parameters()), lambda: None], **CFG
    )
    assert (report.first_diff.stage, report.first_diff.step) == ("weight", 1)
