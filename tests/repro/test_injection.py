"""A stranger's run is never code: each string of a run is replaced by code, and what `repro` writes is looked through."""

from __future__ import annotations

import ast
import random
import shutil
from pathlib import Path

import paddle
import pytest
import torch

import padiff
from padiff.compare.declared.fixes import clip_fix, layer_fix, loss_fix, optimizer_fix
from padiff.errors import PadiffError
from padiff.frameworks.catalog import ARGUMENTS, LAYERS, OPTIMIZERS, checked_fix
from padiff.frameworks.spelled import number_text
from padiff.records import Layer
from padiff.repro import write_repro
from padiff.repro.case import Case, variable
from padiff.repro.script import script_text
from padiff.system.code import ForeignCodeError, literal

from .injecting import ESCAPES, EVIL, inject, strings_of

FRAMEWORKS = ("torch", "paddle")
KINDS = ("layer", "loss", "update", "code", "gradient", "packed")


def _torch(folder: str, kind: str, fault: bool) -> None:
    torch.manual_seed(0)
    nn, f = torch.nn, torch.nn.functional

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(3, 4), nn.LayerNorm(4, eps=1e-3 if fault and kind == "layer" else 1e-5)
            self.last = nn.Linear(4, 2)

        def forward(self, x):
            x = self.norm(self.first(x))
            x = torch.softmax(x, dim=0 if fault and kind in ("code", "packed") else -1) * 2.0 + x
            return self.last(x.detach() * 0.5 + x * 0.5 if fault and kind == "gradient" else x)

    model = Net()
    rule = torch.optim.AdamW if fault and kind == "update" else torch.optim.Adam
    optimizer = rule(model.parameters(), 0.1, weight_decay=0.1)
    options = {"pack": True} if kind == "packed" else {}
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(2):
            loss = f.mse_loss(model(torch.randn(4, 3)), torch.ones(4, 2),
                              reduction="sum" if fault and kind == "loss" else "mean")  # fmt: skip
            rec.log_loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()


def _paddle(folder: str, kind: str, fault: bool) -> None:
    paddle.seed(0)
    nn, f = paddle.nn, paddle.nn.functional

    class Net(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.norm = nn.LayerNorm(4, epsilon=1e-3 if fault and kind == "layer" else 1e-5)
            self.last = nn.Linear(4, 2)

        def forward(self, x):
            x = self.norm(self.first(x))
            x = f.softmax(x, axis=0 if fault and kind in ("code", "packed") else -1) * 2.0 + x
            return self.last(x.detach() * 0.5 + x * 0.5 if fault and kind == "gradient" else x)

    model = Net()
    rule = paddle.optimizer.AdamW if fault and kind == "update" else paddle.optimizer.Adam
    optimizer = rule(0.1, parameters=model.parameters(), weight_decay=0.1)
    options = {"pack": True} if kind == "packed" else {}
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(2):
            loss = f.mse_loss(model(paddle.randn([4, 3])), paddle.ones([4, 2]),
                              reduction="sum" if fault and kind == "loss" else "mean")  # fmt: skip
            rec.log_loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, str], tuple[Path, Path]]:
    folder, made = tmp_path_factory.mktemp("injected"), {}
    for framework, train in (("torch", _torch), ("paddle", _paddle)):
        for kind in KINDS:
            pair = tuple(folder / f"{framework}_{kind}_{name}" for name in ("reference", "candidate"))
            for path, fault in zip(pair, (False, True)):
                train(str(path), kind, fault)
            made[framework, kind] = pair
    return made


def words(script: str) -> set[str]:
    """All words of a script that are no text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(script)):
        for name in ("id", "attr", "arg", "name", "module"):
            found |= {word for word in (getattr(node, name, None),) if isinstance(word, str)}
    return {word.rstrip("0123456789_") for word in found}


def repro(reference: Path, candidate: Path, out: Path) -> set[str] | None:
    """The words of all that `repro` writes; `None` where it refuses."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        if write_repro(reference, candidate, out) is None:
            return set()
    except PadiffError as error:
        assert "\n" not in str(error) or not isinstance(error, ForeignCodeError)
        assert not out.exists()
        return None
    assert {path.suffix for path in out.iterdir()} <= {".py", ".safetensors", ".json", ".md"}
    return set().union(*(words(path.read_text()) for path in out.glob("*.py")))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_string_of_a_run_becomes_code(runs, tmp_path, monkeypatch, framework, kind):
    """Each by itself and with a second one, in either run, as it is in all of the run's files."""
    monkeypatch.chdir(tmp_path)
    pair = runs[framework, kind]
    # The words that a script of any fault has, of either framework: none of them is the stranger's.
    usual = set().union(*(repro(*both, tmp_path / "out") or set() for both in runs.values()))
    assert repro(*pair, tmp_path / "out"), "there is no script to put code into"
    rng = random.Random(0)
    for is_candidate, source in enumerate(pair):
        texts = strings_of(source)
        assert len(texts) > 60 and "mse_loss" in texts and "float32" in texts
        # One side is swept whole here; of the other one, and of pairs of strings, each kind takes its share.
        chosen = texts if is_candidate == (kind in ("loss", "code")) else texts[KINDS.index(kind) :: len(KINDS)]
        for text in chosen:
            second = rng.choice(texts)
            changes = {text: rng.choice((EVIL, EVIL, *ESCAPES))}
            if rng.random() < 0.4:
                changes[second] = rng.choice((EVIL, *ESCAPES))
            inject(source, tmp_path / "evil", changes)
            both = (pair[0], tmp_path / "evil") if is_candidate else (tmp_path / "evil", pair[1])
            found = repro(*both, tmp_path / "out")
            foreign = (found or set()) - usual - {"float", "x"}
            assert not foreign - set(ARGUMENTS), (changes, foreign)
            assert not (tmp_path / "PWNED").exists()
