"""The fix of a layer or a call is followed to the letter, the candidate is recorded again, and nothing differs."""

import ast
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
import torch

import padiff

Make = Callable[[Any], Any]


def made(line: str) -> Make:
    return lambda net: eval(line, {"torch": torch, "paddle": paddle, "model": net})


T, P = "torch.optim.", "paddle.optimizer."
NETS, NETP = "params=model.parameters()", "parameters=model.parameters()"


def convolved(framework: str, layer: str, folder: Any, start: Any = None) -> str:
    """Train a convolution, a layer and a convolution; ``layer`` is code in terms of ``nn``."""
    batches = np.random.default_rng(1).normal(size=(4, 2, 1, 8, 8)).astype("float32")
    nn = torch.nn if framework == "torch" else paddle.nn
    torch.manual_seed(0)
    conv = nn.Conv2d if framework == "torch" else nn.Conv2D
    net = nn.Sequential(conv(1, 4, 3), eval(layer, {"nn": nn}), conv(4, 1, 3))
    if start is not None:
        padiff.start_from(start, net, partial=True)
    optimizer = made(f"{T}Adam({NETS}, lr=3e-2)" if framework == "torch" else f"{P}Adam(3e-2, {NETP})")(net)
    tensor = torch.tensor if framework == "torch" else paddle.to_tensor
    with padiff.record(net, str(folder), optimizer=optimizer) as recorder:
        for batch in batches:
            (net(tensor(batch)) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad() if framework == "torch" else optimizer.clear_grad()
            recorder.try_dump()
    return str(folder)


LAYERS = {
    "align_corners": (
        'nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)',
        'nn.Upsample(scale_factor=2, mode="bilinear")',
    ),
    "no align_corners": (
        'nn.Upsample(scale_factor=2, mode="bilinear")',
        'nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)',
    ),
    "lambd": ("nn.Softshrink(0.3)", "nn.Softshrink()"),
    "mode": ('nn.Upsample(scale_factor=2, mode="nearest")', 'nn.Upsample(scale_factor=2, mode="bilinear")'),
}


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize("case", LAYERS)
def test_the_fix_of_a_layer_is_its_setting(case, framework, tmp_path):
    right, wrong = LAYERS[case]
    start = convolved("torch", right, tmp_path / "reference")
    before = padiff.compare_runs(start, convolved(framework, wrong, tmp_path / "before", start))
    call = ast.parse(before.first_diff.cause.fix, mode="eval").body
    old = ast.parse(wrong, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(old, ast.Call)
    words = {w.arg: ast.unparse(w.value) for w in (*old.keywords, *call.keywords)}
    layer = f"{ast.unparse(call.func).split('.', 1)[1]}({', '.join(f'{k}={v}' for k, v in words.items())})"
    assert padiff.compare_runs(start, convolved(framework, layer, tmp_path / "after", start)).passed


class Torch(torch.nn.Module):
    def __init__(self, code: str) -> None:
        super().__init__()
        self.a, self.b, self.code = torch.nn.Conv2d(1, 3, 3), torch.nn.Conv2d(3, 1, 3), code

    def forward(self, x: Any) -> Any:
        return self.b(eval(self.code, {"torch": torch, "y": self.a(x)}))


class Paddle(paddle.nn.Layer):
    def __init__(self, code: str) -> None:
        super().__init__()
        self.a, self.b, self.code = paddle.nn.Conv2D(1, 3, 3), paddle.nn.Conv2D(3, 1, 3), code

    def forward(self, x: Any) -> Any:
        return self.b(eval(self.code, {"paddle": paddle, "y": self.a(x)}))


def computed(code: str, folder: Any, start: Any = None) -> str:
    framework = "torch" if code.startswith("torch") else "paddle"
    torch.manual_seed(0)
    net = Torch(code) if framework == "torch" else Paddle(code)
    if start is not None:
        padiff.start_from(start, net)
    optimizer = made(f"{T}SGD({NETS}, lr=.1)" if framework == "torch" else f"{P}SGD(.1, {NETP})")(net)
    tensor = torch.tensor if framework == "torch" else paddle.to_tensor
    with padiff.record(net, str(folder), optimizer=optimizer) as recorder:
        for batch in np.random.default_rng(1).normal(size=(2, 2, 1, 8, 8)).astype("float32"):
            (net(tensor(batch)) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad() if framework == "torch" else optimizer.clear_grad()
            recorder.try_dump()
    return str(folder)


RESIZED = ".nn.functional.interpolate(y, scale_factor=2, mode='bilinear'"
CALLS = {
    "align_corners": (f"torch{RESIZED}, align_corners=True)", f"paddle{RESIZED})"),
    "no align_corners": (f"torch{RESIZED})", f"paddle{RESIZED}, align_corners=True)"),
    "align_corners in torch": (f"torch{RESIZED}, align_corners=True)", f"torch{RESIZED})"),
    "softmax": ("torch.nn.functional.softmax(y, dim=1)", "paddle.nn.functional.softmax(y)"),
    "log_softmax": ("torch.nn.functional.log_softmax(y, dim=-1)", "torch.nn.functional.log_softmax(y, dim=1)"),
    "softmax from the end": ("torch.nn.functional.softmax(y, dim=-3)", "paddle.nn.functional.softmax(y, axis=-2)"),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_fix_of_a_call_is_its_argument(case, tmp_path):
    right, wrong = CALLS[case]
    start = computed(right, tmp_path / "reference")
    fix = padiff.compare_runs(start, computed(wrong, tmp_path / "before", start)).first_diff.cause.fix
    call, old = ast.parse(fix, mode="eval").body, ast.parse(wrong, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(old, ast.Call)
    assert ast.unparse(call.func) == ast.unparse(old.func)
    words = {w.arg: ast.unparse(w.value) for w in (*old.keywords, *call.keywords)}
    code = f"{ast.unparse(old.func)}(y, {', '.join(f'{k}={v}' for k, v in words.items())})"
    assert padiff.compare_runs(start, computed(code, tmp_path / "after", start)).passed


def test_a_call_among_others_of_its_kind_has_no_fix(tmp_path):
    soft = "torch.nn.functional.softmax"
    start = computed(f"{soft}({soft}(y, dim=1), dim=2)", tmp_path / "reference")
    other = computed(f"{soft}({soft}(y, dim=3), dim=2)", tmp_path / "candidate", start)
    assert not padiff.compare_runs(start, other).first_diff.cause.fix
