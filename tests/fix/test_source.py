"""Edits keep comments, format and line ends; values are followed to where they are defined."""

from __future__ import annotations

import ast
import subprocess

import pytest
import yaml

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
    "one of two attributes of a class": ("class A:\n    M, S = 0.5, 0.25\nscale(A.S)\n", "A.S", ["0.25"]),
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
    "an item of a tuple": ("BETAS = (0.9, 0.95)\nadam(b2=BETAS[1])\n", "BETAS[1]", ["0.95"]),
    "what is converted": ("CFG = {'lr': '1e-3'}\nLR = float(CFG['lr'])\nsgd(lr=LR)\n", "LR", ["'1e-3'"]),
    "a dataclass's field": ("class C:\n    eps: float = field(default=1e-5)\nnorm(eps=c.eps)\n", "c.eps", ["1e-5"]),
    "an item of a field that a function makes": (
        "class C:\n    betas: list = field(default_factory=lambda: [0.9, 0.95])\nadam(b2=c.betas[1])\n",
        "c.betas[1]",
        ["0.95"],
    ),
    "an entry that is passed on": (
        "CFG = {'eps': 1e-6}\ndef f(eps=1e-5):\n    norm(eps=eps)\nf(**CFG)\n", "eps", ["1e-6", "1e-5"]
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


YAML = """# of the paper
model: &m
  eps: 1e-6  # é: written without a point
  sizes: [16, 2.5, true]
other: *m
"""
CONFIGS = {
    "a number": ("c.yaml", YAML, "eps", "1e-05", "eps: 1.0e-05  # é"),
    "an item": ("c.yaml", YAML, "sizes", "(8, 2.5, True)", "sizes: [8, 2.5, true]"),
    "a text": ("c.yml", "mode: 'sum'\n", "mode", '"mean"', 'mode: "mean"'),
    "JSON": ("c.json", '{\n\t"a": {"lr": 0.005,\t"on": true}}\n', "lr", "1e-3", '"lr": 0.001,'),
    "nothing": ("c.json", '{"clip": 1.0}\n', "clip", "None", '"clip": null'),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_value_of_a_config_is_changed_where_it_stands(case):
    file, text, key, value, expected = CONFIGS[case]
    project = Project([source(text, file)])
    (place, node), = project.entries(key)  # fmt: skip
    start, end = place.span(node)
    changed = project.with_edits([Edit(file, start, end, value)]).get(file).text
    assert expected in changed
    # Nothing else changed, and other readers of YAML read a number.
    assert (
        changed.replace(expected, "")
        == text[: start - len(key)].rpartition("\n")[0]
        + changed.replace(expected, "")[len(text[: start - len(key)].rpartition("\n")[0]) :]
    )
    assert yaml.safe_load(changed.replace("\t", " ")) != yaml.safe_load(text.replace("\t", " "))


TOML = """# of the run
steps = 6
[model]
widths = [  # of the blocks
    8,
    16,
]
[train.optimizer]  # AdamW
weight_decay = 1e-2  # decoupled
name = "adamw"
"""


@pytest.mark.parametrize(
    ("key", "value", "before", "after"),
    [
        ("steps", "8", "steps = 6", "steps = 8"),
        ("weight_decay", "1e-05", "weight_decay = 1e-2", "weight_decay = 1.0e-05"),
        ("widths", "(8, 32)", "[  # of the blocks\n    8,\n    16,\n]", "[8, 32]"),
        ("name", "'sgd'", '"adamw"', '"sgd"'),
    ],
)
def test_a_value_of_toml_is_changed_where_it_stands(key, value, before, after):
    tomllib = pytest.importorskip("tomllib")
    project = Project([source(TOML.replace("\n", "\r\n"), "c.toml")])
    ((_, node),) = project.entries(key)
    changed = project.with_edits([Edit("c.toml", *project.get("c.toml").span(node), value)]).get("c.toml").text
    assert changed == TOML.replace(before, after).replace("\n", "\r\n")
    tomllib.loads(changed)
    assert project.with_edits([Edit("c.toml", *project.get("c.toml").span(node), "None")]) is None


def test_a_config_of_a_group_belongs_to_the_config_that_chooses_it():
    files = {
        "train.py": "cfg = compose('config')\n",
        "conf/config.yaml": "defaults:\n  - model: mixer\n",
        "conf/model/mixer.yaml": "width: 8\n",
        "conf/model/vit.yaml": "width: 16\n",
    }
    project = Project(source(text, file) for file, text in files.items())
    assert [each.file for each in project.reached_from(["train.py"])] == list(files)[:3]


def test_a_config_belongs_to_the_script_that_names_it():
    files = {
        "train.py": "import yaml\ncfg = yaml.safe_load(open('conf/a.yaml'))\n",
        "conf/a.yaml": "lr: 1\n",
        "conf/b.yaml": "lr: 2\n",
    }
    project = Project(source(text, file) for file, text in files.items())
    assert [each.file for each in project.reached_from(["train.py"])] == ["train.py", "conf/a.yaml"]
    assert [each.file for each in project.reached_from(["train.py", "conf/b.yaml"])] == [*files]


@pytest.mark.parametrize("text", ["a: [1\n", "!!python/object/apply:os.system ['id']\n: x: y", "\t- a", "&a [*b]"])
def test_what_is_no_config_is_none(text):
    assert Source.from_bytes("c.yaml", text.encode()) is None


def test_an_object_of_a_config_is_not_made():
    own = source("a: !!python/object/apply:os.system ['exit 3']\n", "c.yaml")
    assert Project([own]).entries("a")[0][1].elts[0].value == "exit 3"


UNBOUND = {
    "a variable of another function": ("def f(a):\n    return a\ndef g(b):\n    return b\n", "return b", "return a"),
    "an attribute of another class": (
        "class A:\n    def __init__(self):\n        self.x = 1\nclass B:\n    def f(self, y):\n        return y\n",
        "return y", "return self.x",
    ),
}  # fmt: skip
BOUND = {
    "a variable of the module": ("import torch as t\nX = 1\ndef g(b):\n    return b\n", "return b", "return t.relu(X)"),
    "a variable of a list": ("def g(b):\n    return b\n", "return b", "return [len(each) for each in b]"),
    "an attribute, a method": (
        "class B:\n    def __init__(self):\n        self.x = 1\n    def g(self, y):\n        return y\n",
        "return y", "return self.x, self.g, self",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*UNBOUND, *BOUND])
def test_a_name_that_nothing_defines_is_seen(case):
    text, old, new = {**UNBOUND, **BOUND}[case]
    before, after = (Project([source(each)]) for each in (text, text.replace(old, new)))
    assert before.defines_all(after) is (case in BOUND)
