"""The differences of two authors' lines, as edits of the second one's, and what may never become code."""

from __future__ import annotations

import ast

import pytest

from padiff_cli.fix.drafts import same_names
from padiff_cli.fix.fault import nodes_at, parsed_line
from padiff_cli.fix.matching import Matcher, UnwritableError, Writer
from padiff_cli.fix.source import Project, Source, edited

HEAD = {
    "torch": "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n",
    "paddle": "import paddle\nfrom paddle import nn\nimport paddle.nn.functional as F\n",
}


def made_alike(reference: str, candidate: str, frameworks: tuple[str, str]) -> str:
    """Return the candidate's code with all changes that make it like the reference's line."""
    text = HEAD[frameworks[1]] + f"def forward(self, given):\n    {candidate}\n"
    source = Source.from_bytes("train.py", text.encode())
    node = parsed_line(reference)
    if source is None or node is None:
        return candidate
    line = HEAD[frameworks[1]].count("\n") + 2
    matches = [Matcher(frameworks).statement(node, each) for each in nodes_at(source, line, node)]
    match = min(matches, key=lambda each: each.cost)
    writer = Writer(source, frameworks[1], same_names(match.names))
    edits = [edit for change in match.changes for edit in writer.edits(change)]
    return edited(text, edits).partition("given):\n    ")[2][:-1]


SAME = ("torch", "torch")
PORT = ("torch", "paddle")
ALIKE = [
    # Arguments: another value, one more, one less; by name and by place.
    (SAME, "x = F.normalize(x, dim=-1)", "y = F.normalize(y, dim=0)  # rows", "y = F.normalize(y, dim=-1)  # rows"),
    (SAME, "h = F.gelu(self.up(h))", 'y = F.gelu(self.fc(y), approximate="tanh")', "y = F.gelu(self.fc(y))"),
    (SAME, "l = F.cross_entropy(o, t, label_smoothing=0.1)", "loss = F.cross_entropy(out, y)",
     "loss = F.cross_entropy(out, y, label_smoothing=0.1)"),
    (SAME, "self.act = nn.LeakyReLU(0.1)", "self.a = nn.LeakyReLU(negative_slope=0.01)",
     "self.a = nn.LeakyReLU(negative_slope=0.1)"),
    (SAME, "torch.nn.utils.clip_grad_norm_(m.parameters(), max_norm=0.5)",
     "nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.05)",
     "nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)"),
    # Another function or class.
    (SAME, "y = F.gelu(x)", "z = F.silu(h)", "z = F.gelu(h)"),
    (SAME, "nn.ReLU(inplace=True),", "nn.LeakyReLU(0.01, inplace=True)", "nn.ReLU(inplace=True)"),
    (SAME, "opt = torch.optim.AdamW(m.parameters(), lr=0.1)", "o = torch.optim.Adam(net.parameters(), lr=0.1)",
     "o = torch.optim.AdamW(net.parameters(), lr=0.1)"),
    # Something around.
    (SAME, "return self.head(x)", "return self.fc(y) / 0.9", "return self.fc(y)"),
    (SAME, "x = self.embed(t) * 4.0", "y = self.word(ids)", "y = self.word(ids) * 4.0"),
    (SAME, "h = self.norm(x)", "y = self.ln(h).detach()", "y = self.ln(h)"),
    (SAME, "return x + self.down(h)", "return self.down(h)", "return given + self.down(h)"),
    (SAME, "loss = loss + 1e-3 * reg", "loss = loss + 1e-2 * reg", "loss = loss + 0.001 * reg"),
    (SAME, "x = (a + b) * c", "x = (a + b) * 2 * c", "x = (a + b) * c"),
    # The other framework's names and values.
    (PORT, "self.bn = nn.BatchNorm2d(c, eps=1e-3, momentum=0.1)", "self.norm = nn.BatchNorm2D(o, momentum=0.1)",
     "self.norm = nn.BatchNorm2D(o, momentum=0.9, epsilon=0.001)"),
    (PORT, "h = F.gelu(self.up(h))", "y = F.gelu(self.fc(y), approximate=True)", "y = F.gelu(self.fc(y))"),
    (PORT, "w = torch.softmax(s, dim=-1)", "p = F.softmax(q, axis=-2)", "p = F.softmax(q, axis=-1)"),
    (PORT, "s = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)",
     "lr = paddle.optimizer.lr.StepDecay(0.1, step_size=3, gamma=0.5)",
     "lr = paddle.optimizer.lr.StepDecay(0.1, step_size=2, gamma=0.5)"),
    (PORT, "s = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4], gamma=0.1)",
     "lr = paddle.optimizer.lr.MultiStepDecay(0.1, milestones=[3, 4], gamma=0.1)",
     "lr = paddle.optimizer.lr.MultiStepDecay(0.1, milestones=[2, 4], gamma=0.1)"),
    (PORT, "o = torch.optim.AdamW(m.parameters(), lr=1e-3, betas=(0.9, 0.95))",
     "o = paddle.optimizer.AdamW(learning_rate=1e-3, beta1=0.9, beta2=0.99, parameters=net.parameters())",
     "o = paddle.optimizer.AdamW(learning_rate=1e-3, beta1=0.9, beta2=0.95, parameters=net.parameters())"),
    # A learning rate by place.
    (PORT, "o = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)",
     "o = paddle.optimizer.Momentum(0.2, momentum=0.8, parameters=net.parameters())",
     "o = paddle.optimizer.Momentum(0.1, momentum=0.9, parameters=net.parameters())"),
    # Torch clips parameters, paddle's optimizer has them.
    (PORT, "torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)", "clip = nn.ClipGradByNorm(0.1)",
     "clip = nn.ClipGradByGlobalNorm(0.5)"),
    # A list of which an item is missing, and one that has one more.
    (SAME, "m = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))",
     "net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))",
     "net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))"),
    (SAME, "m = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))",
     "net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))",
     "net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))"),
    # A line of which the end is not known: what it does not show stays.
    (SAME, "optimizer = torch.optim.AdamW(", "o = torch.optim.Adam(net.parameters(), lr=0.1)",
     "o = torch.optim.AdamW(net.parameters(), lr=0.1)"),
]  # fmt: skip


@pytest.mark.parametrize(("frameworks", "reference", "candidate", "expected"), ALIKE)
def test_a_line_becomes_like_the_references(frameworks, reference, candidate, expected):
    assert made_alike(reference, candidate, frameworks) == expected


@pytest.mark.parametrize(("frameworks", "reference", "candidate", "expected"), ALIKE)
def test_a_line_that_is_like_it_stays(frameworks, reference, candidate, expected):
    assert made_alike(reference, expected, frameworks) == expected


FOREIGN = [
    "h = F.gelu(__import__('os').system('id'))",
    "h = os.system('id')",
    "h = F.gelu(open(x))",
    "h = F.gelu(x.__class__)",
    "h = F.gelu(eval('1'))",
    "h = F.gelu(getattr(x, 'a'))",
    "h = F.gelu(x, approximate='$(id)')",
    "h = F.gelu(x) if system('id') else x",
    "h = (lambda: x)()",
    "h = [exec(a) for a in x]",
    "h = torch.EvilLoss(x)",
    "h = torch.load(x)",
    "h = F.gelu(x); import os",
    "h = f'{x}'",
    "h = torch.hub.load(x, x)",
    "h = F.silu(F.relu(x, evil=1))",
    "h = F.silu(x, evil=1)",
]


@pytest.mark.parametrize("reference", FOREIGN)
def test_a_line_of_a_stranger_does_not_become_code(reference):
    candidate = "h = F.silu(x)"
    try:
        code = made_alike(reference, candidate, SAME)
    except UnwritableError:
        return
    foreign = (
        "os",
        "open",
        "eval",
        "getattr",
        "id",
        "exec",
        "Evil",
        "evil",
        "load",
        "system",
        "__",
        "lambda",
        "import",
        "$",
        "f'",
    )
    assert not any(word in code for word in foreign), code


@pytest.mark.parametrize("code", ["", "x" * 300, "a\nb", "def (", ")", "'", "x = [" * 50])
def test_lines_that_are_none_are_none(code):
    assert parsed_line(code) is None


TARGETS = [
    ("_target_: paddle.nn.GELU\n", "nn.GELU(approximate='tanh')", "_target_: paddle.nn.GELU\napproximate: true\n"),
    ("act:\n  _target_: paddle.nn.GELU  # exact\nlr: 1\n", "nn.ReLU()",
     "act:\n  _target_: paddle.nn.ReLU  # exact\nlr: 1\n"),
    ("norm:\n  - _target_: 'paddle.nn.LayerNorm'\n    epsilon: 1e-3  # small\n    _partial_: true\n",
     "nn.LayerNorm(eps=1e-6)",
     "norm:\n  - _target_: 'paddle.nn.LayerNorm'\n    epsilon: 1.0e-06  # small\n    _partial_: true\n"),
    ("loss: {_target_: paddle.nn.CrossEntropyLoss}\n", "nn.CrossEntropyLoss(label_smoothing=0.1)",
     "loss: {_target_: paddle.nn.CrossEntropyLoss, label_smoothing: 0.1}\n"),
    ("loss:\n  _target_: paddle.nn.CrossEntropyLoss\n  label_smoothing: 0.1\n  reduction: mean\n",
     "nn.CrossEntropyLoss(reduction='mean')",
     "loss:\n  _target_: paddle.nn.CrossEntropyLoss\n  reduction: mean\n"),
    ("loss:\n  class_path: paddle.nn.CrossEntropyLoss\n", "nn.CrossEntropyLoss(label_smoothing=0.1)",
     "loss:\n  class_path: paddle.nn.CrossEntropyLoss\n  init_args: {label_smoothing: 0.1}\n"),
    ("opt:\n  class_path: paddle.optimizer.Adam\n  init_args:\n    beta1: 0.9\nsteps: 6\n",
     "torch.optim.Adam(p, betas=(0.9, 0.95))",
     "opt:\n  class_path: paddle.optimizer.Adam\n  init_args:\n    beta1: 0.9\n    beta2: 0.95\nsteps: 6\n"),
    ("opt:\n  type: Adam  # as in the paper\n  epsilon: 1e-6\n", "torch.optim.AdamW(p, eps=1e-8)",
     "opt:\n  type: AdamW  # as in the paper\n  epsilon: 1.0e-08\n"),
    ("- {type: GELU}\n- {type: mean}\n", "nn.GELU(approximate='tanh')",
     "- {type: GELU, approximate: true}\n- {type: mean}\n"),
    ('{"norm": {"name": "LayerNorm"}}\n', "nn.LayerNorm(eps=1e-6)",
     '{"norm": {"name": "LayerNorm", "epsilon": 1.0e-06}}\n', "conf.json"),
    ('[optimizer]\ntype = "Adam"\n\n[train]\nsteps = 3\n', "torch.optim.Adam(p, eps=1e-6)",
     '[optimizer]\ntype = "Adam"\nepsilon = 1.0e-06\n\n[train]\nsteps = 3\n', "conf.toml"),
    ('act = dict(type="GELU")\n', "nn.GELU(approximate='tanh')",
     'act = dict(type="GELU", approximate=True)\n', "conf.py"),
    ('opt = dict(\n    type="Adam",\n    learning_rate=0.1,\n)\n', "torch.optim.Adam(p, lr=0.1, eps=1e-6)",
     'opt = dict(\n    type="Adam",\n    learning_rate=0.1,\n    epsilon=1e-06,\n)\n', "conf.py"),
    ("act = {'type': 'GELU'}\n", "nn.GELU(approximate='tanh')",
     "act = {'type': 'GELU', 'approximate': True}\n", "conf.py"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reference", "expected", "file"), [(*row, "conf.yaml")[:4] for row in TARGETS])
def test_what_a_config_calls_is_changed_there(text, reference, expected, file):
    source = Source.from_bytes(file, text.encode())
    call = next(node for node in source.nodes if isinstance(node, ast.Call))
    match = Matcher(PORT).match(ast.parse(reference, mode="eval").body, call)
    edits = [edit for change in match.changes for edit in Writer(source, "paddle", {}).edits(change)]
    assert Project([source]).with_edits(edits).get(file).text == expected
