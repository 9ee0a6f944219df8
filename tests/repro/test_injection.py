"""A stranger's run is never code: each string of a run is replaced by code, and all that `repro` writes is checked."""

from __future__ import annotations

import ast
import os
import random
import shutil
from pathlib import Path

import paddle
import pytest
import torch

import padiff
from padiff.compare.declared.layers import clip_fix, layer_fix, loss_fix, optimizer_fix
from padiff.errors import PadiffError
from padiff.frameworks.catalog import ARGUMENTS, LAYERS, OPTIMIZERS, checked_fix, number_text
from padiff.records import Layer
from padiff.repro import write_repro
from padiff.repro.languages import LANGUAGES, Case, variable
from padiff.repro.writing import script_text
from padiff.system.code import ForeignCodeError, literal
from tests.kit.injecting import ESCAPES, EVIL, inject, strings_of

FRAMEWORKS = ("torch", "paddle")
#: Replace every string in every kind of run, which takes ten minutes.
WHOLE = bool(os.environ.get("PADIFF_SWEEP"))
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
        refusal = error
    else:
        assert {path.suffix for path in out.iterdir()} <= {".py", ".safetensors", ".json", ".md"}
        return set().union(*(words(path.read_text()) for path in out.glob("*.py")))
    assert not out.exists()
    assert not isinstance(refusal, ForeignCodeError) or "\n" not in str(refusal)
    return None


@pytest.fixture(scope="module")
def usual(runs, tmp_path_factory) -> dict[tuple[str, str], set[str] | None]:
    """The words of the scripts of each pair of runs as they were recorded: none of them is the stranger's."""
    out = tmp_path_factory.mktemp("usual") / "out"
    return {key: repro(*pair, out) for key, pair in runs.items()}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_string_of_a_run_becomes_code(runs, tmp_path, usual, monkeypatch, framework, kind):
    """Each by itself and with a second one, in either run, as it is in all of the run's files."""
    monkeypatch.chdir(tmp_path)
    pair = runs[framework, kind]
    assert usual[framework, kind], "there is no script to put code into"
    # Besides, the functions that a writer knows: a trace whose arguments are lost is written otherwise.
    known = {word for language in LANGUAGES.values() for call in language.calls.values() for word in call.split(".")}
    every = set().union(known, *usual.values())
    rng = random.Random(0)
    for is_candidate, source in enumerate(pair):
        texts = strings_of(source)
        assert len(texts) > 60 and "mse_loss" in texts and "float32" in texts
        # Each string in some kind of run, on one side with torch and on the other with paddle, or everywhere.
        share = KINDS.index(kind) + len(KINDS) * (is_candidate ^ FRAMEWORKS.index(framework))
        chosen = texts if WHOLE else texts[share :: 2 * len(KINDS)]
        for text in chosen:
            second = rng.choice(texts)
            changes = {text: rng.choice((EVIL, EVIL, *ESCAPES))}
            if rng.random() < 0.4:
                changes[second] = rng.choice((EVIL, *ESCAPES))
            inject(source, tmp_path / "evil", changes)
            both = (pair[0], tmp_path / "evil") if is_candidate else (tmp_path / "evil", pair[1])
            found = repro(*both, tmp_path / "out")
            foreign = (found or set()) - every - {"float", "x", "loss", "gradient"}
            assert not foreign - set(ARGUMENTS), (changes, foreign)
            assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "line",
    [
        "made = (lambda: 1)()",
        "made = __import__('os').system('touch PWNED')",
        "made = torch.hub.load(x)",
        "made = paddle.load(x)",
        "made = x.__class__",
        "made = eval(x)",
        "made = [y for y in x]",
        "made = x.reshape(*x)",
        "made = x.reshape(shape=x, **x)",
        "import os",
        "made = x; return made",
        "made = x\nimport os\nif x:\n    made = x",
        "made = x)\n__import__('os').system('x')\n(",
        "exec(x)",
        "given = x",
        "made = os",
    ],
)
def test_the_second_defence_refuses_what_the_first_lets_through(framework, line):
    """Lines that no writer may write, put behind all checks of names."""
    case = Case(framework, "a test", lines=["made = x"])
    case.given["x"] = case.own = case.other = torch.ones(2).numpy()
    script_text(case, "", "x.safetensors", "")
    case.lines = [line]
    with pytest.raises(ForeignCodeError):
        script_text(case, "", "x.safetensors", "")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_text_around_the_lines_becomes_code(framework):
    for evil in (EVIL, *ESCAPES, "\\", '\\"""', "\ud800", "{0}", "\0"):
        case = Case(framework, evil, remarks=[evil], lines=[f"made = {literal(evil)}"])
        case.given["x"] = case.own = case.other = torch.ones(2).numpy()
        case.dtypes["x"], case.origins["x"], case.limit = evil, evil, float("nan")
        text = script_text(case, evil, evil, evil)
        assert not words(text) & {"system", "__import__"}


def test_what_planted_code_writes_itself_is_refused_whole(runs, tmp_path, monkeypatch):
    """A writer that trusts the run: the finished script does not pass, and nothing is written or replaced."""
    from padiff.repro import computing

    monkeypatch.setattr(computing, "_text", lambda *rest: f"{EVIL}\n")
    for framework in FRAMEWORKS:
        with pytest.raises(ForeignCodeError):
            write_repro(*runs[framework, "loss"], tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("evil", [EVIL, *ESCAPES])
def test_fixes_have_names_of_the_catalog_only(framework, evil):
    nothing = {
        loss_fix(framework, evil, {"reduction": "sum"}),
        loss_fix(framework, "mse_loss", {evil: 1}),
        optimizer_fix(framework, evil, ["lr"], {"lr": 0.1}),
        optimizer_fix(framework, "SGD", [evil], {"lr": 0.1}),
        optimizer_fix("paddle", "SGD", ["lr"], {"lr": evil}, [evil], base_rate=0.1),
        clip_fix(framework, "SGD", evil, 1.0),
        layer_fix(framework, Layer("x", evil, evil.lower()), "eps", 1e-5),
        layer_fix(framework, Layer("x", "LayerNorm", "layernorm"), evil, 1e-5),
        checked_fix(framework, f"{framework}.nn.functional.{evil}"),
        checked_fix(framework, f"{framework}.load('x')"),
    }
    assert nothing == {""}
    for line in (
        loss_fix(framework, "mse_loss", {"reduction": evil}),
        optimizer_fix(framework, "SGD", ["decay.coupled"], {"decay.coupled": evil}, [evil]),
        optimizer_fix(framework, "SGD", ["lr"], {"lr": float("inf")}),
        clip_fix(framework, "SGD", "global_norm", evil),
        layer_fix(framework, Layer("x", "LayerNorm", "layernorm"), "eps", evil),
        layer_fix(framework, Layer("x", evil, "linear"), "eps", 1e-5),  # a class of the user's
    ):
        assert line and not words(line) & {"system", "__import__", "os"}
    assert ast.literal_eval(number_text(evil)) == evil and variable(evil) == "x"


def test_the_catalog_is_what_the_frameworks_have():
    for framework, optimizers, layers in (
        ("torch", torch.optim, torch.nn),
        ("paddle", paddle.optimizer, paddle.nn),
    ):
        assert all(hasattr(optimizers, name) for name in OPTIMIZERS[framework])
        assert all(hasattr(layers, name) for name in LAYERS[framework])
