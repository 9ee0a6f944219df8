"""Edits keep comments, format and line ends; values are followed to where they are defined."""

from __future__ import annotations

import ast
import subprocess

import pytest

from padiff_cli.fix.source import Edit, Project, Source, edited


def source(text: str, file: str = "train.py") -> Source:
    parsed = Source.from_bytes(file, text.encode())
    assert parsed is not None
    return parsed


def value_of(own: Source, code: str) -> ast.expr:
    return next(node for node in own.nodes if isinstance(node, ast.expr) and own.code(node) == code)


def test_spans_count_characters_whatever_the_bytes():
    own = source("größe = '长度'; lr = 0.1  # ß\r\nf(größe, lr)\r\n")
    start, end = own.span(value_of(own, "0.1"))
    assert (
        edited(own.text, [Edit("train.py", start, end, "0.2")]) == "größe = '长度'; lr = 0.2  # ß\r\nf(größe, lr)\r\n"
    )


def test_a_byte_order_mark_moves_nothing():
    own = source("\ufefflr = 0.1\n")
    start, end = own.span(value_of(own, "0.1"))
    assert own.text[start:end] == "0.1"


def test_overlapping_edits_are_refused():
    assert edited("abcd", [Edit("f", 0, 3, "x"), Edit("f", 2, 4, "y")]) is None


def test_a_patch_that_breaks_the_syntax_is_none():
    assert Project([source("f(1)\n")]).with_edits([Edit("train.py", 0, 2, "")]) is None


@pytest.mark.parametrize("text", ["a = 1\nb = 2\n", "a = 1\r\nb = 2\r\n", "a = 1\nb = 2", "b = 2"])
def test_the_diff_is_one_that_patch_applies(text, tmp_path):
    (tmp_path / "train.py").write_bytes(text.encode())
    before = Project([source(text)])
    start = text.index("2")
    after = before.with_edits([Edit("train.py", start, start + 1, "3")])
    patch = before.difference(after).encode()
    subprocess.run(["patch", "-s", "-p1", "--binary"], cwd=tmp_path, input=patch, check=True)
    assert (tmp_path / "train.py").read_bytes() == text.replace("2", "3").encode()


DEFINED = {
    "a variable": ("EPS = 1e-5\nnorm(eps=EPS)\n", "EPS", ["1e-5"]),
    "one of two variables": ("A, EPS = 1, 1e-5\nnorm(eps=EPS)\n", "EPS", ["1e-5"]),
    "an entry": ("CFG = {'eps': 1e-5}\nnorm(eps=CFG['eps'])\n", "CFG['eps']", ["1e-5"]),
    "a keyword of dict": ("CFG = dict(eps=1e-5)\nnorm(eps=CFG['eps'])\n", "CFG['eps']", ["1e-5"]),
    "an option": ("p.add_argument('--ln-eps', default=1e-5)\nnorm(eps=args.ln_eps)\n", "args.ln_eps", ["1e-5"]),
    "a field": ("class C:\n    eps: float = 1e-5\nnorm(eps=cfg.eps)\n", "cfg.eps", ["1e-5"]),
    "a default": ("def f(eps=1e-5):\n    norm(eps=eps)\n", "eps", ["1e-5"]),
    "an argument, and the default": ("def f(eps=1e-5):\n    norm(eps=eps)\nf(eps=1e-6)\n", "eps", ["1e-6", "1e-5"]),
    "an argument by place": (
        "class N:\n    def __init__(self, d, eps):\n        norm(eps=eps)\nN(3, 1e-6)\n", "eps", ["1e-6"]
    ),
    "through an attribute": (
        "class N:\n    def __init__(self, eps=1e-6):\n        self.e = eps\n    def f(self): return x + self.e\n",
        "self.e",
        ["1e-6"],
    ),
    "what is computed": ("EPS = compute()\nnorm(eps=EPS)\n", "EPS", []),
}  # fmt: skip


@pytest.mark.parametrize("case", DEFINED)
def test_values_are_followed_to_their_definition(case):
    text, code, expected = DEFINED[case]
    own = source(text)
    value = [node for node in own.nodes if isinstance(node, ast.expr) and own.code(node) == code][-1]
    assert [place.code(node) for place, node in Project([own]).definitions(own, value)] == expected


def test_values_are_followed_through_an_import():
    own = source("from settings import LR\nsgd(lr=LR)\n")
    files = [own, source("LR = 0.1\n", "settings.py")]
    (place, node), = Project(files).definitions(own, own.calls("sgd")[0].keywords[0].value)  # fmt: skip
    assert (place.file, place.code(node)) == ("settings.py", "0.1")


def test_a_value_that_reads_itself_ends():
    own = source("def f(x):\n    return f(x=x)\n")
    assert Project([own]).definitions(own, own.calls("f")[0].keywords[0].value) == []
