"""Each layer and function that a script may have, as its framework writes it: it gives what the run recorded."""

from __future__ import annotations

import contextlib
import io
import runpy

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.compare.diagnose.traced import Graph
from padiff.dump import open_run
from padiff.records import LOOP, TracedCall
from padiff.repro.computing import Chain, Side
from padiff.repro.languages import CannotWriteError, Case
from padiff.repro.writing import script_text

TN, PN = torch.nn, paddle.nn
_RNG = np.random.default_rng(0)
ROWS, IMAGES, SIGNALS, IDS = (
    _RNG.normal(size=shape).astype("float32") if shape[-1] != 7 else _RNG.integers(0, 9, size=shape).astype("int64")
    for shape in ((5, 8), (2, 4, 9, 9), (2, 4, 10), (3, 7))
)
VOLUMES = _RNG.normal(size=(2, 4, 5, 5, 5)).astype("float32")
# Name -> torch's layer, paddle's, what goes in.
LAYERS = {
    "linear": (lambda: TN.Linear(8, 3), lambda: PN.Linear(8, 3), ROWS),
    "linear without bias": (lambda: TN.Linear(8, 8, bias=False), lambda: PN.Linear(8, 8, bias_attr=False), ROWS),
    "conv1d": (lambda: TN.Conv1d(4, 6, 3, 2, padding=1), lambda: PN.Conv1D(4, 6, 3, 2, padding=1), SIGNALS),
    "conv2d": (
        lambda: TN.Conv2d(4, 6, (3, 5), stride=2, padding=(1, 2), dilation=1, groups=2),
        lambda: PN.Conv2D(4, 6, (3, 5), stride=2, padding=(1, 2), dilation=1, groups=2), IMAGES,
    ),
    "conv2d dilated": (lambda: TN.Conv2d(4, 4, 3, dilation=2), lambda: PN.Conv2D(4, 4, 3, dilation=2), IMAGES),
    "conv3d": (lambda: TN.Conv3d(4, 2, 3, padding=1), lambda: PN.Conv3D(4, 2, 3, padding=1), VOLUMES),
    "transposed": (lambda: TN.ConvTranspose2d(4, 2, 3, 2), lambda: PN.Conv2DTranspose(4, 2, 3, 2), IMAGES),
    "embedding": (lambda: TN.Embedding(9, 4, padding_idx=1), lambda: PN.Embedding(9, 4, padding_idx=1), IDS),
    "layernorm": (lambda: TN.LayerNorm(8, eps=1e-3), lambda: PN.LayerNorm(8, epsilon=1e-3), ROWS),
    "layernorm of two axes": (lambda: TN.LayerNorm([9, 9]), lambda: PN.LayerNorm([9, 9]), IMAGES),
    "batchnorm": (lambda: TN.BatchNorm2d(4, momentum=0.3), lambda: PN.BatchNorm2D(4, momentum=0.7), IMAGES),
    "groupnorm": (lambda: TN.GroupNorm(2, 4), lambda: PN.GroupNorm(2, 4), IMAGES),
    "instancenorm": (lambda: TN.InstanceNorm2d(4, affine=True), lambda: PN.InstanceNorm2D(4), IMAGES),
    "maxpool": (lambda: TN.MaxPool2d(3, 2, padding=1), lambda: PN.MaxPool2D(3, 2, padding=1), IMAGES),
    "avgpool": (lambda: TN.AvgPool2d(3, 2, padding=1), lambda: PN.AvgPool2D(3, 2, padding=1), IMAGES),
    "adaptive": (lambda: TN.AdaptiveAvgPool2d((3, 2)), lambda: PN.AdaptiveAvgPool2D((3, 2)), IMAGES),
    **{name: (lambda name=name: getattr(TN, name)(), lambda name=name: getattr(PN, name)(), ROWS) for name in
       ("ReLU", "ReLU6", "GELU", "Tanh", "Sigmoid", "Mish", "Hardswish", "Hardsigmoid", "Softsign", "Tanhshrink",
        "LogSigmoid", "SELU", "ELU", "CELU", "Softplus")},
    "silu": (lambda: TN.SiLU(), lambda: PN.Silu(), ROWS),
    "leaky": (lambda: TN.LeakyReLU(0.3), lambda: PN.LeakyReLU(0.3), ROWS),
    "gelu by tanh": (lambda: TN.GELU("tanh"), lambda: PN.GELU(approximate=True), ROWS),
    "prelu": (lambda: TN.PReLU(4), lambda: PN.PReLU(4), IMAGES),
    "softmax": (lambda: TN.Softmax(1), lambda: PN.Softmax(1), IMAGES),
    "log softmax": (lambda: TN.LogSoftmax(-1), lambda: PN.LogSoftmax(-1), ROWS),
    "flatten": (lambda: TN.Flatten(), lambda: PN.Flatten(), IMAGES),
}  # fmt: skip


def agrees(case: Case, folder) -> None:
    """The script gives what was recorded, in the run's dtype and nearly so in float64."""
    from padiff.dump.safetensors import write_safetensors
    from padiff.repro.languages import tensors_of

    case.other, case.limit = case.own, 1e-6
    write_safetensors(folder / "case.safetensors", tensors_of(case), {})
    script = folder / "case.py"
    script.write_text(script_text(case, "", "case.safetensors", "here"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))
    assert ended.value.code == 0, out.getvalue() + script.read_text()
    assert "not computed in float64" not in out.getvalue()


def case_of(side: Side, calls: list[TracedCall], end: int) -> Case:
    case = side.case("a test")
    chain = Chain(side, case)
    for call in calls:
        chain.write(call)
    case.lines.append(f"made = {chain.tensor(end)}")
    case.own = side.graph.trace.tensors[end].source.read()
    return case


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_layers_are_written_as_they_compute(framework, tmp_path):
    """Each layer alone, from what went into it; all of one training."""
    names = list(LAYERS)
    layers = {f"layer{k}": LAYERS[name][framework == "paddle"]() for k, name in enumerate(names)}

    def forward(net, *inputs):
        outputs = [getattr(net, f"layer{k}")(one) for k, one in enumerate(inputs)]
        return sum(one.sum() for one in outputs)

    side = recorded(framework, layers, forward, [LAYERS[name][2] for name in names], tmp_path / "run")
    calls = {call.layer: call for call in side.graph.trace.calls if not call.function and call.layer in layers}
    assert len(calls) == len(names)
    wrong = {}
    for layer, call in calls.items():
        try:
            agrees(case_of(side, [call], call.outputs[0].tensor), tmp_path)
        except (AssertionError, CannotWriteError) as error:
            wrong[names[int(layer.removeprefix("layer"))]] = str(error)[:3000]
    assert not wrong, "\n\n".join(f"{name}: {why}" for name, why in wrong.items())


def _attention(x, module, functional):
    paddles = module is paddle

    def turned(t):
        return t.transpose([0, 2, 1]) if paddles else t.transpose(1, 2)

    first, second, third = x.chunk(3, -1)
    scores = turned(first).matmul(second) * 0.3 - 1 / (second.pow(2).mean() + 2)
    mask = module.tril(module.ones([4, 4])).astype("bool") if paddles else torch.tril(torch.ones(4, 4)).bool()
    scores = module.where(mask, scores, module.full([1], -1e9))
    y = functional.softmax(scores, -1) @ turned(third)
    y = module.concat([y, 2.0 - y], axis=-1) if paddles else torch.cat([y, 2.0 - y], dim=-1)
    y = y.reshape([2, -1, 4]) if paddles else y.reshape(2, -1, 4)
    y = functional.gelu(y[:, 1:, ::2]) + module.exp(-y[..., 1:, 1:3]) ** 2
    return functional.relu(y).sum(-1).unsqueeze(-1).flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_functions_are_written_as_they_compute(framework, tmp_path):
    module, functional = (torch, TN.functional) if framework == "torch" else (paddle, PN.functional)
    side = recorded(framework, {}, lambda net, x: _attention(x * 1.0, module, functional), [_RNG.normal(
        size=(2, 4, 12)).astype("float32")], tmp_path / "run")  # fmt: skip
    calls = [call for call in side.graph.trace.calls if call.function and call.layer != LOOP]
    assert len(calls) > 20
    agrees(case_of(side, calls, calls[-1].outputs[0].tensor), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_what_drops_at_random_has_no_script(framework, tmp_path):
    layer = TN.Dropout(0.5) if framework == "torch" else PN.Dropout(0.5)
    side = recorded(framework, {"drop": layer}, lambda net, x: net.drop(x), [ROWS], tmp_path / "run")
    [call] = [call for call in side.graph.trace.calls if call.layer == "drop"]
    with pytest.raises(CannotWriteError, match=r"uses dropout.*padiff replay"):
        case_of(side, [call], call.outputs[0].tensor)


def recorded(framework: str, layers, forward, given, folder) -> Side:
    base, tensor = (TN.Module, torch.tensor) if framework == "torch" else (PN.Layer, paddle.to_tensor)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.gain = TN.Parameter(torch.ones(1)) if framework == "torch" else self.create_parameter([1])
            for name, layer in layers.items():
                setattr(self, name, layer)

        def forward(self, *inputs):
            return forward(self, *inputs) * self.gain

    net = Net()
    with padiff.record(net, str(folder)) as rec:
        inputs = [tensor(one) for one in given]
        for one in inputs:
            if framework == "paddle" and one.is_floating_point():
                one.stop_gradient = False  # of an input that does not learn, paddle's PReLU crashes in its backward
        net(*inputs).sum().backward()
        rec.try_dump()
    run = open_run(str(folder))
    [step] = run.steps(0)
    return Side(step, run.info, Graph(step.trace, run.info.layers), "candidate")
