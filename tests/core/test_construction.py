"""The lines that construct layers and optimizers, found in source code."""

from __future__ import annotations

import re
import textwrap

import pytest

from padiff.system.construction import Built, construction_lines


def lines_of(tmp_path, source, layers, optimizers=None):
    """The text of the found line by key, of a model whose first class is in a file with this source."""
    file = tmp_path / "model.py"
    file.write_text(textwrap.dedent(source))
    users = set(re.findall(r"class (\w+)", source))
    built = [
        Built(path, kind, "user" if kind in users else "torch", str(file) if kind in users else "", (kind,))
        for path, kind in layers.items()
    ]
    found = construction_lines(built, optimizers or {})
    return {key: frame.code for key, frame in found.items()}


NET = """
    from torch import nn

    def block(width):
        return nn.Sequential(
            nn.Linear(width, width),
            nn.ReLU(),
        )

    class Net(nn.Module):
        def __init__(self):
            self.first = nn.Linear(3, 4)
            self.norm: nn.Module = nn.LayerNorm(4)
            self.body = block(4)
            self.many = nn.ModuleList([nn.Dropout(0.1) for _ in range(3)])
            self.head = nn.Sequential(nn.Linear(4, 4),
                                      nn.Linear(4, 2))
            self.add_module("last", nn.Softmax(-1))
            self.maybe = nn.Tanh()
            self.maybe = nn.Sigmoid()

    net = Net()
"""


@pytest.mark.parametrize(
    ("path", "kind", "code"),
    [
        ("(root)", "Net", "net = Net()"),
        ("first", "Linear", "self.first = nn.Linear(3, 4)"),
        ("norm", "LayerNorm", "self.norm: nn.Module = nn.LayerNorm(4)"),
        ("body", "Sequential", "return nn.Sequential("),
        ("body.0", "Linear", "nn.Linear(width, width),"),
        ("body.1", "ReLU", "nn.ReLU(),"),
        ("many.2", "Dropout", "self.many = nn.ModuleList([nn.Dropout(0.1) for _ in range(3)])"),
        ("head.1", "Linear", "nn.Linear(4, 2))"),
        ("last", "Softmax", 'self.add_module("last", nn.Softmax(-1))'),
        ("gone", "Linear", None),  # four calls: which one is not known
    ],
)
def test_the_line_that_constructs_a_layer(tmp_path, path, kind, code):
    layers = {"(root)": "Net", "body": "Sequential", "many": "ModuleList", "head": "Sequential", path: kind}
    assert lines_of(tmp_path, NET, layers).get(path) == code


def test_two_assignments_leave_the_only_call_of_the_class(tmp_path):
    assert lines_of(tmp_path, NET, {"(root)": "Net", "maybe": "Sigmoid"})["maybe"] == "self.maybe = nn.Sigmoid()"


class AdamW:
    """Stands for an optimizer's class."""


AdamW.__module__ = "torch.optim.adamw"


def test_an_optimizer_is_found_by_the_package_that_its_name_is_imported_from(tmp_path):
    source = """
        import torch, paddle
        class Net: pass
        a = torch.optim.AdamW(p, lr=1)
        b = paddle.optimizer.AdamW(1)
    """
    found = lines_of(tmp_path, source, {"(root)": "Net"}, {"optimizer.0": AdamW})
    assert found["optimizer.0"] == "a = torch.optim.AdamW(p, lr=1)"


def test_two_optimizers_of_two_calls_are_in_order_and_of_one_call_unknown(tmp_path):
    two = {"optimizer.0": AdamW, "optimizer.1": AdamW}
    source = "class Net: pass\na = AdamW(1)\nb = AdamW(2)\n"
    found = lines_of(tmp_path, source, {"(root)": "Net"}, two)
    assert (found["optimizer.0"], found["optimizer.1"]) == ("a = AdamW(1)", "b = AdamW(2)")
    assert "optimizer.0" not in lines_of(tmp_path, "class Net: pass\na = AdamW(1) \n", {"(root)": "Net"}, two)


@pytest.mark.parametrize("source", ["class Net(:\n", "\x00", "class Net:\n  pass\n" + "(" * 5000])
def test_source_that_is_no_python_gives_no_line(tmp_path, source):
    assert lines_of(tmp_path, source, {"(root)": "Net"}) == {}
