"""The lines that construct layers and optimizers, found in source code."""

from __future__ import annotations

import re
import textwrap

import pytest

from padiff.system.construction import Built, construction_lines, loss_key


def lines_of(tmp_path, source, layers, optimizers=None, names=None):
    """The text of the found line by key, of a model whose first class is in a file with this source."""
    found = statements_of(tmp_path, source, layers, optimizers, names)
    return {key: code.partition("\n")[0] for key, code in found.items()}


def statements_of(tmp_path, source, layers, optimizers=None, names=None):
    """The text of `lines_of`, with the lines that a statement goes on in."""
    file = tmp_path / "model.py"
    file.write_text(textwrap.dedent(source))
    users = set(re.findall(r"class (\w+)", source))
    built = [
        Built(path, kind, "user" if kind in users else "torch", str(file) if kind in users else "", (kind,))
        for path, kind in layers.items()
    ]
    found = construction_lines(built, optimizers or {}, names or {})
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
            self.a, self.b = nn.GELU(), nn.SELU()
            (self.c, self.d), self.e = [nn.ELU(), nn.Mish()], block(2)
            self.q, self.k = [nn.Hardtanh() for _ in range(2)]
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
        ("a", "GELU", "self.a, self.b = nn.GELU(), nn.SELU()"),
        ("b", "SELU", "self.a, self.b = nn.GELU(), nn.SELU()"),
        ("d", "Mish", "(self.c, self.d), self.e = [nn.ELU(), nn.Mish()], block(2)"),
        ("e.1", "ReLU", "nn.ReLU(),"),
        ("k", "Hardtanh", "self.q, self.k = [nn.Hardtanh() for _ in range(2)]"),
        ("gone", "Linear", None),  # four calls: which one is not known
    ],
)
def test_the_line_that_constructs_a_layer(tmp_path, path, kind, code):
    layers = {
        "(root)": "Net",
        "body": "Sequential",
        "many": "ModuleList",
        "head": "Sequential",
        "e": "Sequential",
        path: kind,
    }
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


SECTIONS = """
    from dataclasses import dataclass, field
    import torch

    @dataclass
    class Of:
        rate: float

    @dataclass
    class Config:
        first: Of = field(default_factory=lambda: Of(rate=1e-4))
        second: Of = field(default_factory=lambda: Of(rate=4e-4))

    class Net: pass

    def schedule(optimizer, begin, end=9):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / begin, end))

    c = Config()
    a = torch.optim.AdamW(Net().parameters(), c.second.rate)
    of_a = schedule(a, begin=3)
"""


def test_a_value_is_read_from_its_section_and_a_schedule_reads_parameters(tmp_path):
    found = lines_of(tmp_path, SECTIONS, {"(root)": "Net"}, {"optimizer.0": AdamW})
    values = {key.partition("#")[2]: code for key, code in found.items() if "#" in key}
    assert values["rate#0"] == "second: Of = field(default_factory=lambda: Of(rate=4e-4))"
    assert values["begin#0"] == "of_a = schedule(a, begin=3)"


HELPERS = """
    import torch
    from torch.optim.lr_scheduler import CosineAnnealingLR

    class Net: pass

    def adam(net, rate, betas=(0.5, 0.99)):
        return torch.optim.AdamW(net.parameters(), lr=rate, betas=betas)

    def schedule(optimizer, steps):
        return CosineAnnealingLR(optimizer, T_max=steps)

    a = adam(Net(), 1e-3)
    b = adam(Net(), 2e-3, (0.9, 0.95))
    of_a = schedule(a, 5)
    of_b = schedule(b, 7)
    a.step()
    b.step()
"""


def test_optimizers_of_one_helper_have_the_calls_of_the_helper(tmp_path):
    two = {"optimizer.0": AdamW, "optimizer.1": AdamW}
    names = {"optimizer.0": {"a"}, "optimizer.1": {"b"}}
    found = lines_of(tmp_path, HELPERS, {"(root)": "Net"}, two, names)
    assert (found["optimizer.0"], found["optimizer.1"]) == (
        "a = adam(Net(), 1e-3)",
        "b = adam(Net(), 2e-3, (0.9, 0.95))",
    )
    assert (found["@step:optimizer.0"], found["@step:optimizer.1"]) == ("a.step()", "b.step()")
    assert "return torch.optim.AdamW(net.parameters(), lr=rate, betas=betas)" in found.values()
    default = [code for key, code in found.items() if "#betas#" in key]
    assert "def adam(net, rate, betas=(0.5, 0.99)):" in default
    assert found["@scheduler:optimizer.1"] == "of_b = schedule(b, 7)"


@pytest.mark.parametrize("source", ["class Net(:\n", "\x00", "class Net:\n  pass\n" + "(" * 5000])
def test_source_that_is_no_python_gives_no_line(tmp_path, source):
    assert lines_of(tmp_path, source, {"(root)": "Net"}) == {}


TRAINING = """
    import argparse
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import StepLR as Steps

    CFG = {"eps": 1e-3, "decay": 0.1}

    class Net(nn.Module):
        def __init__(self, cfg, rate=0.2, width=4):
            self.norm = nn.LayerNorm(width, eps=cfg["eps"])
            self.drop = nn.Dropout(rate)
            self.wide = nn.Dropout(width / 10)

    def options():
        parser = argparse.ArgumentParser()
        parser.add_argument("--base-lr", default=0.05)
        return parser.parse_args()

    def train(net, args):
        optimizer = torch.optim.SGD(
            net.parameters(),
            lr=args.base_lr,
            weight_decay=CFG["decay"],
            nesterov=True,
        )
        scheduler = Steps(optimizer, step_size=2)
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        loss = criterion(net(1), 2)
        loss = loss + 0.5
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    net = Net(CFG, rate=0.3)
"""


def training_lines(tmp_path, source=TRAINING):
    layers = {"(root)": "Net", "norm": "LayerNorm", "drop": "Dropout", "wide": "Dropout"}
    kind = type("SGD", (), {"__module__": "torch.optim.sgd"})
    return lines_of(tmp_path, source, layers, {"optimizer.0": kind})


def values_of(found, argument):
    return [code for key, code in found.items() if key.partition("#")[2].startswith(f"{argument}#")]


@pytest.mark.parametrize(
    ("role", "code"),
    [
        ("@scheduler", "scheduler = Steps(optimizer, step_size=2)"),
        ("@loss:crossentropy", "criterion = nn.CrossEntropyLoss(label_smoothing=0.1)"),
        ("@total", "loss = loss + 0.5"),
        ("@backward", "loss.backward()"),
        ("@clip", "nn.utils.clip_grad_norm_(net.parameters(), 1.0)"),
        ("@step", "optimizer.step()"),
        ("@scheduled", "scheduler.step()"),
        ("@zero_grad", "optimizer.zero_grad()"),
    ],
)
def test_the_calls_of_a_training_are_found(role, code, tmp_path):
    assert training_lines(tmp_path)[role] == code


@pytest.mark.parametrize(
    ("argument", "code"),
    [
        ("eps", 'CFG = {"eps": 1e-3, "decay": 0.1}'),
        ("rate", "net = Net(CFG, rate=0.3)"),
        ("lr", 'parser.add_argument("--base-lr", default=0.05)'),
        ("weight_decay", 'CFG = {"eps": 1e-3, "decay": 0.1}'),
        ("nesterov", "nesterov=True,"),
    ],
)
def test_a_value_is_found_where_it_is_defined(argument, code, tmp_path):
    assert values_of(training_lines(tmp_path), argument) == [code]


@pytest.mark.parametrize(
    ("order", "is_cleared"),
    [
        ("backward zero_grad step", True),
        ("step backward zero_grad", True),
        ("zero_grad step backward", True),
        ("step zero_grad backward", False),
        ("zero_grad backward step", False),
        ("backward step zero_grad", False),
    ],
)
def test_a_clearing_between_backward_and_step_is_known(order, is_cleared, tmp_path):
    calls = {"backward": "loss.backward()", "step": "optimizer.step()", "zero_grad": "optimizer.zero_grad()"}
    lines = [f"        {call}\n" for call in calls.values()]
    source = TRAINING
    for line in lines[1:]:
        source = source.replace(line, "")
    source = source.replace(lines[0], "".join(f"        {calls[each]}\n" for each in order.split()))
    assert training_lines(tmp_path, source).get("@zeroed") == (calls["zero_grad"] if is_cleared else None)


def test_a_clearing_of_one_of_several_optimizers_is_known(tmp_path):
    source = """
        import torch
        class Net(torch.nn.Module):
            pass
        def train(generator, critic, batches):
            slow = torch.optim.Adam(generator.parameters())
            fast = torch.optim.Adam(critic.parameters())
            for batch in batches:
                fast.zero_grad(); critic(batch).mean().backward(); fast.step()
                critic(generator(batch)).mean().backward(); slow.zero_grad(); slow.step()
    """
    kind = type("Adam", (), {"__module__": "torch.optim.adam"})
    names = {"optimizer.0": ["slow"], "optimizer.1": ["fast"]}
    lines = lines_of(tmp_path, source, {"(root)": "Net"}, {"optimizer.0": kind, "optimizer.1": kind}, names)
    cleared = [code for key, code in lines.items() if key.startswith("@zeroed")]
    assert len(cleared) == 1 and cleared[0].startswith("critic(generator(batch))"), lines


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("cfg['eps']", 'CFG = {"eps": 1e-3, "decay": 0.1}'),
        ("args.base_lr", 'parser.add_argument("--base-lr", default=0.05)'),
        ("0.7", "self.scale = 0.7"),
        ("width ** -0.5", "self.scale = width ** -0.5"),
        ("compute(width)", None),
    ],
)
def test_the_value_of_an_attribute_is_found_where_it_is_defined(value, code, tmp_path):
    first = "self.norm = nn.LayerNorm"
    source = TRAINING.replace(first, f"self.scale = {value}\n            {first}")
    assert training_lines(tmp_path, source).get("self.scale") == code
    twice = source.replace(first, f"self.scale = 2\n            {first}")
    assert "self.scale" not in training_lines(tmp_path, twice)


def test_a_parameter_that_no_call_gives_has_its_default(tmp_path):
    found = values_of(training_lines(tmp_path, TRAINING.replace("Net(CFG, rate=0.3)", "Net(CFG)")), "rate")
    assert found == ["def __init__(self, cfg, rate=0.2, width=4):"]


@pytest.mark.parametrize(
    ("old", "new", "lacking"),
    [
        ("    loss.backward()\n", "    loss.backward()\n        other.backward()\n", "@backward"),
        ("label_smoothing=0.1)", "label_smoothing=0.1), nn.CrossEntropyLoss()", "@loss:crossentropy"),
        ('"decay": 0.1}', '"decay": 0.1}\n    OTHER = {"eps": 1e-5}', "eps"),
    ],
)
def test_where_there_is_a_choice_nothing_is_said(old, new, lacking, tmp_path):
    assert old in TRAINING
    found = training_lines(tmp_path, TRAINING.replace(old, new))
    assert lacking not in found and not values_of(found, lacking)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("CrossEntropyLoss", "@loss:crossentropy"),
        ("cross_entropy", "@loss:crossentropy"),
        ("softmax_with_cross_entropy", "@loss:crossentropy"),
        ("BCEWithLogitsLoss", "@loss:bce"),
        ("mse_loss", "@loss:mse"),
        ("MSELoss", "@loss:mse"),
    ],
)
def test_a_loss_has_one_key_in_both_frameworks(name, key):
    assert loss_key(name) == key


OPTIMIZERS = """
    from torch.optim import AdamW
    class Net: pass

    def groups(net, decay):
        return [
            {"params": net.matrices, "weight_decay": decay},
            {"params": net.vectors,
             "weight_decay": 0.0, "lr": 1},
        ]

    late = AdamW(groups(net, 0.1), lr=2)
    early = AdamW([{"params": net.other, "lr": 3}])
"""
SGD = type("SGD", (), {"__module__": "torch.optim.sgd"})
TWO = {"optimizer.0": AdamW, "optimizer.1": AdamW}


def test_an_optimizer_is_found_by_the_variable_that_holds_it(tmp_path):
    names = {"optimizer.0": {"early"}, "optimizer.1": {"late", "self"}}
    found = lines_of(tmp_path, OPTIMIZERS, {"(root)": "Net"}, TWO, names)
    assert found["optimizer.0"] == 'early = AdamW([{"params": net.other, "lr": 3}])'
    assert found["optimizer.1"] == "late = AdamW(groups(net, 0.1), lr=2)"


def test_the_entries_of_parameter_groups_are_found(tmp_path):
    found = lines_of(tmp_path, OPTIMIZERS, {"(root)": "Net"}, TWO)
    assert found["optimizer.0.group.0.weight_decay"] == '{"params": net.matrices, "weight_decay": decay},'
    assert (
        found["optimizer.0.group.1.weight_decay"] == found["optimizer.0.group.1.lr"] == '"weight_decay": 0.0, "lr": 1},'
    )
    assert values_of(found, "weight_decay") == ["late = AdamW(groups(net, 0.1), lr=2)"]  # what the entry reads
    assert found["optimizer.1.group.0.lr"] == 'early = AdamW([{"params": net.other, "lr": 3}])'


def test_a_step_is_known_by_the_variable_that_holds_the_optimizer(tmp_path):
    source = "from torch.optim import AdamW\nclass Net: pass\nopt = AdamW(p)\nopt.step()\nschedule.step()\n"
    found = lines_of(tmp_path, source, {"(root)": "Net"}, {"optimizer.0": AdamW}, {"optimizer.0": {"opt"}})
    assert found["@step"] == "opt.step()"


def test_a_partial_constructs_a_class_that_is_not_called(tmp_path):
    source = """
        from functools import partial
        from torch import nn
        norm = partial(nn.LayerNorm, eps=1e-6)
        class Net(nn.Module):
            def __init__(self, norm=norm):
                self.first = norm(4)
    """
    found = lines_of(tmp_path, source, {"(root)": "Net", "first": "LayerNorm"})
    assert found["first"] == "norm = partial(nn.LayerNorm, eps=1e-6)"


@pytest.mark.parametrize(
    ("call", "betas"),
    [
        ("make(net, (beta1, beta2))", "betas"),
        ("make(net, betas=[beta1, beta2])", "betas"),
        ("AdamW(net, betas=(beta1, beta2))", ""),
    ],
)
def test_the_elements_of_a_tuple_are_found_where_they_are_defined(call, betas, tmp_path):
    source = f"""
        from torch.optim import AdamW
        class Net: pass
        {"def make(net, betas): return AdamW(net, betas=betas)" if betas else ""}
        beta1 = 0.9
        beta2 = 0.95
        opt = {call}
    """
    found = lines_of(tmp_path, source, {"(root)": "Net"}, {"optimizer.0": AdamW})
    assert values_of(found, "beta2") == ["beta2 = 0.95"]
    assert values_of(found, "beta1") == ["beta1 = 0.9"]


@pytest.mark.parametrize(
    ("backward", "total"),
    [
        ("loss.backward()", "loss = loss / 4"),
        ("scaler.scale(loss).backward()", "loss = loss / 4"),
        ("scaled = scaler.scale(loss)\n            scaled.backward()", "loss = loss / 4"),
        ("accelerator.backward(loss)", "loss = loss / 4"),
        ("(loss + other).backward()", None),
    ],
)
def test_the_line_of_the_total_is_found_through_scaling(backward, total, tmp_path):
    source = f"""
        class Net: pass
        for x in data:
            out, loss = net(x)
            loss = loss / 4
            {backward}
    """
    assert lines_of(tmp_path, source, {"(root)": "Net"}).get("@total") == total


def test_a_loss_among_several_outputs_is_the_total(tmp_path):
    source = "class Net: pass\nout, loss = net(x)\nloss.backward()\n"
    assert lines_of(tmp_path, source, {"(root)": "Net"})["@total"] == "out, loss = net(x)"


def test_a_rate_that_code_sets_itself_is_the_schedule(tmp_path):
    source = """
        class Net: pass
        for group in opt.param_groups:
            group["lr"] = rate * warm
        lr = 3
    """
    assert lines_of(tmp_path, source, {"(root)": "Net"})["@scheduler"] == 'group["lr"] = rate * warm'
    source += "        other['lr'] = 2\n"
    assert "@scheduler" not in lines_of(tmp_path, source, {"(root)": "Net"})


def test_a_rate_that_a_call_sets_is_the_schedule(tmp_path):
    source = """
        class Net: pass
        def rate(step):
            return 0.1 * step
        for step in range(3):
            opt.set_lr(rate(step))
    """
    assert lines_of(tmp_path, source, {"(root)": "Net"})["@scheduler"] == "opt.set_lr(rate(step))"
    source += "        opt.set_lr(2)\n"
    assert "@scheduler" not in lines_of(tmp_path, source, {"(root)": "Net"})


def test_the_line_that_registers_a_buffer_is_found(tmp_path):
    source = """
        class Net:
            def __init__(self):
                self.register_buffer("table", make(4), persistent=False)
    """
    found = lines_of(tmp_path, source, {"(root)": "Net"})
    assert found["@buffer:table"] == 'self.register_buffer("table", make(4), persistent=False)'


def test_several_calls_that_hand_on_one_value_have_it(tmp_path):
    source = """
        from torch import nn
        class Part(nn.Module):
            def __init__(self, drop):
                self.drop = nn.Dropout(p=drop)
        class Net(nn.Module):
            def __init__(self, drop=0.1):
                self.first = Part(drop)
                self.second = Part(drop=drop)
    """
    layers = {"(root)": "Net", "first": "Part", "first.drop": "Dropout", "second": "Part"}
    assert values_of(lines_of(tmp_path, source, layers), "p") == ["def __init__(self, drop=0.1):"]
    other = source.replace("Part(drop=drop)", "Part(drop=0.2)")
    assert values_of(lines_of(tmp_path, other, layers), "p") == []


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("Loss(1.5)", "loss = Loss(1.5)"),
        ("Loss(gamma=1.5)", "loss = Loss(gamma=1.5)"),
        ("Loss()", "def __init__(self, gamma=2.0):"),
        ("Loss(cfg.gamma)", "gamma = 3.0"),
        ("make(4.0)", "loss = make(4.0)"),
        ("Loss(1.5), Loss(2.5)", None),
    ],
)
def test_the_value_of_an_attribute_is_followed_through_calls(call, value, tmp_path):
    source = f"""
        class Net: pass
        class Loss:
            def __init__(self, gamma=2.0):
                self.gamma = gamma
        {"def make(gamma): return Loss(gamma)" if "make" in call else ""}
        class cfg:
            gamma = 3.0
        loss = {call}
    """
    assert lines_of(tmp_path, source, {"(root)": "Net"}).get("self.gamma") == value


def test_the_value_that_one_config_has_is_found(tmp_path):
    source = 'class Net: pass\ncfg = {"tau": 2.0, "eps": 1}\nother = {"eps": 2}\n'
    found = lines_of(tmp_path, source, {"(root)": "Net"})
    assert found["self.tau"] == 'cfg = {"tau": 2.0, "eps": 1}' and "self.eps" not in found


def test_arguments_of_a_trainer_stand_for_the_calls(tmp_path):
    source = """
        class Net: pass
        trainer = Trainer(max_epochs=1,
                          gradient_clip_val=0.5)
        model.fit(data, shuffle=False)
    """
    found = lines_of(tmp_path, source, {"(root)": "Net"})
    assert found["@clip"] == "trainer = Trainer(max_epochs=1,"
    assert found["@loader"] == "model.fit(data, shuffle=False)"


CONFIGURED = """
    import json
    from torch.optim import SGD
    class Net: pass
    with open({name!r}) as opened:
        conf = load(opened)
    section = conf["optim"]
    optimizer = SGD(net.parameters(), {arguments})
"""
CONFIGS = {
    "conf.yaml": "lr: 5  # of nothing\noptim:\n  lr: 0.1\n  momentum: 0.9\nother:\n  momentum: 1\n  tokens: a b c\n",
    "conf.json": '{\n  "lr": 5,\n  "optim": {\n    "lr": 0.1,\n    "momentum": 0.9\n  },\n  "momentum": 1\n}\n',
    "conf.toml": "lr = 5\n[run.optim]\nlr = 0.1\nmomentum = 0.9\n[other]\nmomentum = 1\n",
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("arguments", "is_known"),
    [
        ('lr=conf["optim"]["lr"], momentum=conf.optim.momentum', True),
        ('**conf["optim"]', True),
        ("**section", True),
        ('lr=conf["run"]["lr"], momentum=conf["momenta"]', False),
    ],
)
def test_values_of_a_config_file_are_found_in_their_section(name, arguments, is_known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(CONFIGS[name])
    source = CONFIGURED.format(name=name, arguments=arguments)
    found = lines_of(tmp_path, source, {"(root)": "Net"}, {"optimizer.0": SGD})
    lines = [each.strip().rstrip(",") for argument in ("lr", "momentum") for each in values_of(found, argument)]
    written = {"conf.yaml": "{}: {}", "conf.json": '"{}": {}', "conf.toml": "{} = {}"}[name]
    assert lines == ([written.format("lr", 0.1), written.format("momentum", 0.9)] if is_known else [])


@pytest.mark.parametrize("content", [b"\xff\x00", b"lr: [0.1, (\n", b"lr: 1.2.3\n[[\n{{", b"x" * 500_000])
def test_a_config_that_cannot_be_read_leaves_the_other_lines(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf.yaml").write_bytes(content)
    source = CONFIGURED.format(name="conf.yaml", arguments='momentum=conf["momentum"]')
    assert "optimizer.0" in lines_of(tmp_path, source, {"(root)": "Net"}, {"optimizer.0": SGD})


@pytest.mark.parametrize(
    ("construction", "line"),
    [
        ("SGD(p, **{'lr': 0.5})", None),
        ("SGD(p, **HP)", "HP = dict(lr=0.1, nesterov=True)"),
        ("SGD(p, **CFG['optim'])", "'lr': 0.2,"),
        ("SGD(p, **CFG['net'])", "'lr': 0.3,"),
        ("build(p, 'sgd', **CFG['optim'])", "'lr': 0.2,"),
        ("build(p, 'sgd', lr=HP['lr'])", "HP = dict(lr=0.1, nesterov=True)"),
        ("SGD(p, **load(CFG))", None),
    ],
)
def test_arguments_of_a_dict_are_found_where_they_are_written(construction, line, tmp_path):
    source = f"""
        from torch.optim import SGD
        class Net: pass
        HP = dict(lr=0.1, nesterov=True)
        CFG = {{
            'optim': {{
                'lr': 0.2,
            }},
            'net': {{
                'lr': 0.3,
            }},
        }}
        {"def build(params, name, **kw): return SGD(params, **kw)" if "build" in construction else ""}
        optimizer = {construction}
    """
    found = values_of(lines_of(tmp_path, source, {"(root)": "Net"}, {"optimizer.0": SGD}), "lr")
    assert found == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("TABLE[name](net.parameters(), **CFG['optim'])", True),
        ("getattr(torch.optim, name)(net.parameters(), **CFG['optim'])", True),
        ("kind(net.parameters(), **CFG['optim'])", True),
        ("TABLE[name](net.parameters(), **CFG['optim']), TABLE[other](net.parameters())", False),
        ("TABLE[name](3)", False),
        ("made(TABLE[name], net.parameters(), **CFG['optim'])", "return cls(params, **options)"),
    ],
)
def test_an_optimizer_that_is_chosen_by_its_name_is_found(call, is_found, tmp_path):
    source = f"""
        import torch
        class Net: pass
        {"def made(cls, params, **options): return cls(params, **options)" if "made" in call else ""}
        TABLE = {{"sgd": torch.optim.SGD}}
        CFG = {{"optim": {{"lr": 0.2}}}}
        kind = TABLE[name]
        optimizer = {call}
    """
    found = lines_of(tmp_path, source, {"(root)": "Net"}, {"optimizer.0": SGD})
    expected = f"optimizer = {call}" if is_found is True else is_found or None
    assert (found.get("optimizer.0") or "").rpartition(": ")[2] == (expected or "")
    assert values_of(found, "lr") == (['CFG = {"optim": {"lr": 0.2}}'] if is_found else [])


def test_the_arguments_of_a_trainer_stand_for_the_optimizer_that_the_trainer_makes(tmp_path):
    source = """
        class Net: pass
        HP = dict(
            learning_rate=0.1,
            max_grad_norm=0.5,
        )
        args = TrainingArguments(
            "out",
            lr_scheduler_type="cosine",
            **HP,
        )
        {}
    """
    found = lines_of(tmp_path, source.format(""), {"(root)": "Net"}, {"optimizer.0": SGD})
    assert {found[key] for key in ("optimizer.0", "@scheduler", "@clip")} == {"args = TrainingArguments("}
    assert values_of(found, "lr_scheduler_type") == ['lr_scheduler_type="cosine",']
    assert values_of(found, "max_grad_norm") == ["max_grad_norm=0.5,"]
    own = "optimizer = torch.optim.SGD(net.parameters())"
    found = lines_of(tmp_path, source.format(own), {"(root)": "Net"}, {"optimizer.0": SGD})
    assert found["optimizer.0"] == own and found["@clip"] == "args = TrainingArguments("


def test_the_value_of_a_parameter_is_found_that_a_function_inside_reads(tmp_path):
    source = """
        class Net: pass
        def focal(alpha, gamma):
            def loss(p):
                return alpha * p ** gamma
            return loss
        loss = focal(0.5,
                     gamma=1.5)
    """
    found = lines_of(tmp_path, source, {"(root)": "Net"})
    assert found["self.gamma"] == "gamma=1.5)" and found["self.alpha"] == "loss = focal(0.5,"


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (
            'nn.Sequential(OrderedDict([("a", nn.ReLU()),\n            ("act", nn.LeakyReLU(0.2)),]))',
            '("act", nn.LeakyReLU(0.2)),]))',
        ),
        ('nn.ModuleDict({"a": nn.ReLU(),\n            "act": nn.LeakyReLU(0.2)})', '"act": nn.LeakyReLU(0.2)})'),
        ('nn.Sequential(("a", nn.ReLU()),\n            ("act", nn.LeakyReLU(0.2)))', '("act", nn.LeakyReLU(0.2)))'),
        ('nn.Sequential(("act", nn.LeakyReLU(0.2)), ("b", f(("act", nn.LeakyReLU(0.3)))))', None),
    ],
)
def test_a_layer_is_found_by_its_name_in_a_table_or_a_list_of_pairs(build, line, tmp_path):
    source = f"""
        from torch import nn
        class Net(nn.Module):
            def __init__(self):
                self.body = {build}
        other = nn.LeakyReLU(0.2), ("act", 3)
    """
    found = lines_of(tmp_path, source, {"(root)": "Net", "body": "Sequential", "body.act": "LeakyReLU"})
    assert found.get("body.act") == line


@pytest.mark.parametrize(
    ("add", "line"),
    [
        ('self.add_module(f"act{k}", nn.LeakyReLU(0.2))', 'self.add_module(f"act{k}", nn.LeakyReLU(0.2))'),
        ('setattr(self, f"act{k}", nn.LeakyReLU(0.2))', 'setattr(self, f"act{k}", nn.LeakyReLU(0.2))'),
        ("setattr(self, name(k), nn.LeakyReLU(0.2))", None),
    ],
)
def test_a_layer_is_found_that_a_loop_adds_by_a_name_with_a_number(add, line, tmp_path):
    source = f"""
        from torch import nn
        class Net(nn.Module):
            def __init__(self):
                for k in range(3):
                    self.add_module(f"fc{{k}}", nn.Linear(3, 3))
                    {add}
        other = nn.LeakyReLU(0.2)
    """
    found = lines_of(tmp_path, source, {"(root)": "Net", "act2": "LeakyReLU", "fc1": "Linear"})
    assert found.get("act2") == line and found["fc1"].startswith("self.add_module(")


def test_a_statement_has_all_its_lines_without_remarks(tmp_path):
    source = """
        class Net:
            def __init__(self):
                self.norm = nn.LayerNorm(  # not (this
                    8,

                    eps="#(",
                )
                self.last = nn.Linear(8, 3)
    """
    found = statements_of(tmp_path, source, {"(root)": "Net", "norm": "LayerNorm", "last": "Linear"})
    assert found["norm"] == 'self.norm = nn.LayerNorm(\n8,\n\neps="#(",\n)'
    assert found["last"] == "self.last = nn.Linear(8, 3)"


def test_what_is_kept_is_of_the_file_as_it_is_now_and_of_the_names_that_are_asked_for(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("class Net: ...\nfirst = SGD(net.parameters(), lr=0.1)\nother = SGD(net.parameters(), lr=0.2)\n")
    built = [Built("(root)", "Net", "user", str(file), ("Net",))]
    for name, rate in (("first", 0.1), ("other", 0.2), ("first", 0.1)):
        found = construction_lines(built, {"optimizer.0": SGD}, {"optimizer.0": {name}})
        assert found["optimizer.0"].code == f"{name} = SGD(net.parameters(), lr={rate})"
        found.clear()  # the next one's are not these
    file.write_text(file.read_text().replace("0.1", "0.15"))
    assert construction_lines(built, {"optimizer.0": SGD}, {"optimizer.0": {"first"}})["optimizer.0"].code.endswith(
        "0.15)"
    )


def test_an_argument_that_stands_in_a_variable_is_shown_where_it_is_made(tmp_path):
    source = """
        class Net(nn.Layer):
            def __init__(self):
                attr = paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(1e-2))
                self.fc = nn.Linear(3, 3, weight_attr=attr)
    """
    found = lines_of(tmp_path, source, {"(root)": "Net", "fc": "Linear"})
    (found,) = (code for key, code in found.items() if key.endswith("#weight_attr#0"))
    assert found == "attr = paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(1e-2))"


def test_a_class_by_another_name_and_what_a_class_gives_its_base_are_found(tmp_path):
    source = """
        from torch import nn
        from torch.nn import LeakyReLU as Leaky
        Dense = nn.Linear
        class Norm(nn.LayerNorm):
            def __init__(self, width, cfg):
                super().__init__(width, eps=1e-3)
        class Net(nn.Module):
            def __init__(self, cfg):
                self.act = Leaky(0.2)
                self.norm = Norm(8, cfg)
                self.fc = Dense(8, 3)
    """
    layers = {"(root)": "Net", "act": "LeakyReLU", "norm": "Norm", "fc": "Linear"}
    found = lines_of(tmp_path, source, layers)
    assert found["act"] == "self.act = Leaky(0.2)" and found["fc"] == "self.fc = Dense(8, 3)"
    (argument,) = {code for key, code in found.items() if "#eps#" in key}
    assert argument == "super().__init__(width, eps=1e-3)"


def test_a_class_in_a_table_or_a_default_is_found_where_it_is_named(tmp_path):
    source = """
        from torch import nn
        TABLE = {
            "relu": nn.ReLU6,
        }
        def block(act, drop=nn.Dropout2d):
            layers = [nn.Linear(3, 3)]
            layers.append(TABLE[act]())
            return nn.Sequential(*layers, drop(0.1))
        class Net(nn.Module):
            def __init__(self):
                self.body = block("relu")
                self.last = nn.Sequential(nn.Linear(3, 3), *[act() for act in [nn.Mish]])
    """
    layers = {"(root)": "Net", "body": "Sequential", "body.1": "ReLU6", "last": "Sequential", "last.1": "Mish"}
    found = lines_of(tmp_path, source, layers)
    assert found["body.1"] == '"relu": nn.ReLU6,' and "nn.Mish" in found["last.1"]


def test_the_interval_of_a_schedule_of_lightning_is_found(tmp_path):
    source = """
        class Net:
            def configure(self):
                sched = torch.optim.lr_scheduler.StepLR(opt, 3)
                return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "epoch"}}
    """
    assert '"interval": "epoch"' in lines_of(tmp_path, source, {"(root)": "Net"})["@scheduled"]
