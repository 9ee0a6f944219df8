"""The lines that give the batches of a training, found around its loop."""

from __future__ import annotations

import runpy
import textwrap

import pytest

from padiff.system.construction import parsed, users_sources
from padiff.system.data_lines import data_lines, used_lines

LOADER = """
    class Scaled:
        def __init__(self, by):
            self.by = by
        def __call__(self, x):
            return x / self.by

    class Data:
        def __init__(self, transform):
            self.transform = transform
        def __getitem__(self, k):
            return self.transform(k)

    class Unused:
        def __getitem__(self, k):
            return 2 * k

    def train(model, data):
        for x in data:
            loss = model(x)
            FOUND.append(look())

    def main():
        model = lambda x: x * 7
        train(model, DataLoader(Data(Scaled(3.0)), 4))

    def DataLoader(data, n):
        return [data[k] for k in range(n)]

    main()
"""
LOOP = """
    scale = 3.0
    def batch(k):
        return k * scale

    def loss_of(x):
        return model(x) - 9

    model = lambda x: x * 7
    for k in range(2):
        x = batch(k)
        loss = loss_of(x)
        after = loss + 5
        FOUND.append(look())
"""


def found(tmp_path, source):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(source))
    lines: list = []
    look = lambda: data_lines(users_sources([]), {"model"})  # noqa: E731
    runpy.run_path(str(file), {"FOUND": lines, "look": look}, "__main__")
    return {key: frame.code for key, frame in lines[0].items()}


@pytest.mark.parametrize(
    ("source", "batch", "some", "none"),
    [
        (LOADER, "for x in data:", ["return x / self.by", "return self.transform(k)",
                                    "train(model, DataLoader(Data(Scaled(3.0)), 4))"],
         ["return 2 * k", "loss = model(x)", "model = lambda x: x * 7"]),
        (LOOP, "x = batch(k)", ["x = batch(k)", "return k * scale", "scale = 3.0"],
         ["return model(x) - 9", "after = loss + 5", "model = lambda x: x * 7"]),
    ],
)  # fmt: skip
def test_the_code_that_gives_the_batches(tmp_path, source, batch, some, none):
    lines = found(tmp_path, source)
    assert lines.pop("@batch") == batch
    assert {*some} <= {*lines.values()}
    assert not {*none} & {*lines.values()}


def test_without_a_loop_the_only_data_loader_is_followed(tmp_path):
    source = """
        class Data:
            def __getitem__(self, k):
                return k / 5
        def main():
            fit(DataLoader(Data()))
        def DataLoader(data):
            return data
        def fit(data):
            FOUND.append(look())
        main()
    """
    assert [*found(tmp_path, source).values()] == ["return k / 5", "fit(DataLoader(Data()))", "return data"]


def test_the_functions_of_a_schedule_are_followed(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "import torch\n\ndef warmup(steps):\n    def factor(step):\n        return step / steps\n    return factor\n\n"
        "net = build()\nopt = torch.optim.SGD(net.parameters(), lr=1)\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(opt, warmup(3))\nother = build(4)\n"
    )
    source = parsed(str(file))
    found = used_lines([source], source.frame_at(10), "@schedule")
    assert [frame.line for frame in found.values()] == [5, 6, 10]
    assert list(found) == ["@schedule:0", "@schedule:1", "@schedule:2"]


def test_what_a_call_gives_with_a_star_is_followed(tmp_path):
    source = """
        def load(seed):
            return [seed / 2], 3
        def train(net, data, count):
            for x in data:
                FOUND.append(look())
        train(None, *load(7))
    """
    assert "return [seed / 2], 3" in [*found(tmp_path, source).values()]


@pytest.mark.timeout(60)
def test_functions_that_all_call_one_another_are_read_once(tmp_path):
    """Not once for each way from one to another, of which there are millions."""
    file, names = tmp_path / "train.py", [f"f{k}" for k in range(12)]
    functions = [f"def {name}(n):\n    return {' + '.join(f'{each}(n)' for each in names)}" for name in names]
    file.write_text("\n".join([*functions, "schedule = LambdaLR(opt, f0)"]) + "\n")
    source = parsed(str(file))
    found = used_lines([source], source.frame_at(25), "@schedule")
    assert [frame.line for frame in found.values()] == [*range(2, 25, 2)]
