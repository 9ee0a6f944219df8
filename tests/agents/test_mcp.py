"""`padiff mcp`: the five tools, on real runs, through the SDK's client and alone."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import paddle
import pytest
import torch
from kit.schema import violations
from kit.trainings import optimizer_of, paddle_net, torch_net, trained
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

import padiff
from padiff.compare.diagnose.hypotheses.engine import Explanation
from padiff.errors import UsageError
from padiff.records import Both
from padiff.records.diagnostic import diagnostic_schema
from padiff_cli.main import main
from padiff_cli.mcp.answers import LARGEST
from padiff_cli.mcp.edits import answering, schedule_of
from padiff_cli.mcp.tools import TOOLS, Tools

pytestmark = pytest.mark.slow

SGD = {
    "torch": optimizer_of("torch", "SGD", {"lr": 0.1}),
    "paddle": optimizer_of("paddle", "SGD", {"learning_rate": 0.1}),
}


def recorded(folder, framework, net=None, make=None, **options):
    trained(framework, make or SGD[framework], net=net, folder=str(folder), **options)
    return str(folder)


def tanh_missing():
    net = paddle_net()
    net[1] = paddle.nn.Identity()
    return net


class Called(torch.nn.Module):
    """Two layers with a function between."""

    def __init__(self, function):
        super().__init__()
        self.first, _, self.second = torch_net()
        self.function = function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def off_by_a_bias():
    net = paddle_net()
    net[0].bias.set_value(net[0].bias + 0.01)
    return net


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "torch": recorded(folder / "torch", "torch"),
        "paddle": recorded(folder / "paddle", "paddle"),
        "norm": recorded(folder / "norm", "torch", torch_net(norm=True)),
        "momentum": recorded(folder / "momentum", "paddle", _momentum()),
        "identity": recorded(folder / "identity", "paddle", tanh_missing()),
        "both": recorded(
            folder / "both", "paddle", tanh_missing(), make=optimizer_of("paddle", "SGD", {"learning_rate": 0.2})
        ),
        "start": recorded(folder / "start", "paddle", off_by_a_bias()),
        "gelu": recorded(
            folder / "gelu", "torch", torch.nn.Sequential(*torch_net()[:1], torch.nn.GELU(), torch_net()[2])
        ),
        "silu": recorded(folder / "silu", "torch", Called(torch.nn.functional.silu)),
        "adam": recorded(folder / "adam", "torch", make=optimizer_of("torch", "Adam", {"betas": (0.9, 0.98)})),
        "beta": recorded(folder / "beta", "torch", make=optimizer_of("torch", "Adam", {"betas": (0.9, 0.999)})),
    }
    return folder, made


def _momentum():
    net = paddle_net(norm=True)
    net[1]._momentum = 0.1  # the reference's 0.1 is 0.9 here
    return net


@pytest.fixture
def tools(runs):
    with Tools([str(runs[0])]) as made:
        yield made


def answer(tools, name, **arguments):
    text = tools.call(name, arguments)
    assert len(text.encode()) <= LARGEST
    value = json.loads(text)
    assert not violations(value, TOOLS[name].output, TOOLS[name].output) if name == "compare" else True
    return value


def pair(runs, reference="torch", candidate="paddle"):
    return {"reference": runs[1][reference], "candidate": runs[1][candidate]}


def test_a_client_lists_and_calls_the_tools(runs):
    async def use():
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "padiff", "mcp", str(runs[0])], env=dict(os.environ)
        )
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            listed = (await session.list_tools()).tools
            results = {
                "compare": await session.call_tool("compare", pair(runs, candidate="identity")),
                "refused": await session.call_tool("compare", {"reference": "/", "candidate": "/etc"}),
                "wrong": await session.call_tool("explain", {"reference": 1}),
            }
            return listed, results

    listed, results = anyio.run(use)
    assert [tool.name for tool in listed] == ["compare", "explain", "tensor", "what_if", "next_experiment"]
    for tool in listed:
        assert tool.annotations.read_only_hint
        assert tool.output_schema["type"] == tool.input_schema["type"] == "object"
    compared = results["compare"]
    assert not compared.is_error
    assert json.loads(compared.content[0].text) == compared.structured_content
    assert compared.structured_content["outcome"] == "differ"
    assert not violations(compared.structured_content, diagnostic_schema(), diagnostic_schema())
    assert results["refused"].is_error and "is not read" in results["refused"].content[0].text
    assert results["wrong"].is_error and "Expected `str`" in results["wrong"].content[0].text


def test_compare_says_what_padiff_compare_says(tools, runs, capsys):
    value = answer(tools, "compare", **pair(runs, candidate="identity"))
    assert main(["compare", runs[1]["torch"], runs[1]["identity"], "--brief"]) == 1
    brief = json.loads(capsys.readouterr().out)
    assert {**value, "artifacts": []} == brief
    report = json.loads(Path(value["artifacts"][0]).read_text())
    assert report["outcome"] == "differ" and report["steps"]


def test_explain_shows_a_layer_in_a_step(tools, runs):
    value = answer(tools, "explain", **pair(runs, candidate="identity"), step=0, layer="1")
    assert value["is_first"] and value["first"].startswith("step 0, forward: 1")
    by_name = {each["tensor"]: each for each in value["tensors"]}
    assert by_name["forward/output.0"]["outcome"] == "differ"
    assert answer(tools, "explain", **pair(runs), step=1, layer="2")["tensors"][0]["outcome"] == "match"
    with pytest.raises(
        UsageError, match="nothing of the layer 7 was compared in step 0: the compared steps are 0, 1, 2"
    ):
        tools.call("explain", {**pair(runs), "step": 0, "layer": "7"})


def test_tensor_shows_values_of_a_slice(tools, runs):
    run = padiff.open_run(runs[1]["paddle"])
    weight = next(r.value for r in run.steps(1)[0].records if r.site == "0/weight/weight")
    value = answer(tools, "tensor", run=runs[1]["paddle"], step=1, layer="0", tensor="weight/weight", slice="1:3,0")[
        "tensors"
    ][0]
    assert value["shape"] == [5, 7] and value["dtype"] == "float32" and value["kept"] == "full"
    assert value["values"] == pytest.approx(weight[1:3, 0].tolist(), rel=1e-6)
    assert value["minimum"] == pytest.approx(float(weight.min()), rel=1e-6)
    assert value["l2"] == pytest.approx(math.sqrt(sum(float(x) ** 2 for x in weight.ravel())), rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": 9}, "has no step 9: it has 0, 1, 2"),
        ({"layer": "x"}, "has no record of the layer x"),
        ({"tensor": "x"}, "the layer has no tensor x: it has"),
        ({"slice": "0,0,0"}, "the slice does not fit the shape"),
        ({"slice": "__import__('os')"}, "slice: expected numbers and ranges"),
        ({"slice": ",".join("0" * 9)}, "slice: expected numbers and ranges"),
        ({"step": -1}, "Expected `int` >= 0"),
        ({"layer": "x" * 2000}, "length <= 1000"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_wrong_arguments_are_refused_in_words(tools, runs, wrong, message):
    arguments = {"run": runs[1]["paddle"], "step": 0, "layer": "0", "tensor": "weight/weight", **wrong}
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        tools.call("tensor", arguments)


# -- what if ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "candidate", "edit", "text", "proven"),
    [
        # Of seven channels, too few numbers to prove anything.
        ("norm", "momentum", "momentum=0.9", "running statistics", False),
        ("torch", "identity", "tanh", "anh", True),
    ],
)
def test_the_right_edit_explains_all_of_the_difference(tools, runs, reference, candidate, edit, text, proven):
    arguments = {**pair(runs, reference, candidate), "edit": edit}
    tools.call("what_if", arguments)  # compares
    began = time.monotonic()
    value = answer(tools, "what_if", **arguments)
    assert time.monotonic() - began < 1.0
    best = value["computed"][0]
    assert best["share"] > 0.999 and best["proven"] == proven and text in best["text"]


def test_a_wrong_edit_leaves_a_difference(tools, runs):
    arguments = pair(runs, "norm", "momentum")  # 0.1 for 0.9
    tools.call("compare", arguments)
    for edit, share in (("momentum=0.1", 0.0), ("momentum=0.5", 0.5), ("batch norm momentum 0.7", 0.75)):
        for each in answer(tools, "what_if", **arguments, edit=edit)["computed"]:
            assert each["share"] == pytest.approx(share, abs=0.01) and each["remaining"] > 8 and not each["proven"]
            assert each["text"].startswith("a difference is left: ") and "0.9" in each["fix"]
    value = answer(tools, "what_if", **arguments, edit="label_smoothing=0.1")
    assert value["computed"] == [] and value["others"][0]["share"] > 0.999
    for edit in ("relu", "identity"):
        for each in answer(tools, "what_if", **pair(runs, candidate="identity"), edit=edit)["computed"]:
            assert each["share"] < 0.9 and not each["proven"]


def test_a_cause_that_another_computation_has_proven_is_an_answer(tools, runs):
    # Of a function between two layers, the reference's formula is computed anew.
    arguments = pair(runs, "gelu", "silu")
    value = answer(tools, "what_if", **arguments, edit="gelu")
    assert value["computed"][0]["proven"] and value["computed"][0]["share"] > 0.999
    assert not any(each["proven"] for each in answer(tools, "what_if", **arguments, edit="relu")["computed"])


def proven(kind, text, fix=""):
    return Explanation(kind, text, fix, 1.0, 0.1, True, 1000.0)


SCALE = proven("scale", "in the candidate, the scale of attention in div() in `layers.0` is 8 for "
               "the reference's 2.82843 (sqrt(8))")  # fmt: skip
LOSS = proven("loss", "in the candidate, the loss is of the squared error (MSE), for what the reference's "
              "smooth_l1_loss() in the loop takes", "torch.nn.functional.smooth_l1_loss(..., beta=1.0)")  # fmt: skip
GELU = proven("activation", "the candidate uses tanh-form GELU for the reference's exact GELU (gelu() in `1`)")
RESIDUAL = proven("term", "in the candidate, the residual is missing: add() in `0` leaves out what `0` gives")
RATE = proven("rate", "the learning rates differ: 0.1 against 0.2", "torch.optim.SGD(..., lr=0.1)")
MOMENTUM = proven("batch_norm", "the candidate's running statistics take 0.1 of each batch's, the reference's 0.05: "
                  "momentum, counted as torch does", "paddle.nn.BatchNorm2D(..., momentum=0.95)")  # fmt: skip
DECAY = proven(
    "rule", "epsilon is 6e-10 in the candidate and weight decay is 0 in the candidate for the reference's 0.02"
)
NUMBER = proven("number", "in the candidate, the number in div() in `(root)` is 0.1 for the reference's 0.07")
WEIGHT = proven("loss_term_weight", "in the candidate, the weight of a term of the loss (mean() in the loop) is 0.001 "
                "for the reference's 0.01")  # fmt: skip
ORDER = proven("activation_order", "in the candidate, ReLU is taken of what `layers.0.bn2` gives before the sum, for "
               "the reference's of the sum (`layers.0.relu`)")  # fmt: skip
CLASSES = proven("loss_weight", "the losses are set differently: cross_entropy with weight [0.2, 1.0, 2.0] against "
                 "not set", "paddle.nn.CrossEntropyLoss(..., weight=paddle.to_tensor([0.2, 1.0, 2.0]))")  # fmt: skip
PARTS = proven("parts_order", "in the candidate, the parts of cat() in `up` are in the other order")
FACTOR = proven("scale_missing", "in the candidate, mul() in `(root)` is left out: nothing is scaled by 4 there")
GROUPS = proven("learning_rate", "the learning rates differ: 0.1, 0.2 against 0.1, 0.4 (by parameter group)",
                'torch.optim.SGD([{"params": [\'a\'], "lr": 0.2}, ...])')  # fmt: skip
INPUT = proven("input_scale", "the candidate's input is scaled and offset by channel (axis 1): 0.458 x +6e-10, "
               "0.448 x +6e-10, 0.45 x -7e-10: normalised by another std")  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "known", "share"),
    [
        # Paddle counts the momentum of a norm from the other end: the candidate's 0.1 is 0.9 there.
        ("momentum=0.95", MOMENTUM, 1.0), ("momentum=0.99", MOMENTUM, 0.2), ("momentum=0.9", MOMENTUM, 0.0),
        # A name of the user's own says nothing, its number does.
        ("temperature=0.07", NUMBER, 1.0), ("divide by 0.07 instead of 0.1", NUMBER, 1.0),
        ("multiply the penalty by 0.01 instead of 0.001", WEIGHT, 1.0), ("sparsity=1e-2", WEIGHT, 1.0),
        ("return F.relu(out + identity)", ORDER, 1.0), ("take the relu after the sum", ORDER, 1.0),
        ("weight_decay=0.0", DECAY, 0.0), ("weight_decay=0.02", DECAY, 1.0),
        ("smooth_l1 instead of mse", LOSS, 1.0), ("smooth_l1_loss", LOSS, 1.0), ("l1_loss instead of mse", LOSS, 0.0),
        ("mse", LOSS, 0.0),
        ("divide by sqrt(head_dim)", SCALE, 1.0), ("scale 0.3535", SCALE, 1.0), ("scale by 1/sqrt(8)", SCALE, 1.0),
        ("scale 8", SCALE, 0.0), ("scale 4", SCALE, 0.7733),
        ("approximate='none'", GELU, 1.0), ("exact GELU", GELU, 1.0), ("approximate=True", GELU, 0.0),
        ("add the skip connection", RESIDUAL, 1.0), ("x = x + self.body(x)", RESIDUAL, 1.0),
        ("weight=torch.tensor([0.2, 1.0, 2.0])", CLASSES, 1.0), ("weight=torch.tensor([0.2, 1.0, 1.0])", CLASSES, 0.0),
        ("paddle.concat([skip, x], axis=1)", PARTS, 1.0), ("h = embed(x) * 2", FACTOR, 0.3333),
        ("learning rate 0.1", RATE, 1.0), ("lr=0.15", RATE, 0.5), ("lr=0.2", RATE, 0.0),
    ],
)  # fmt: skip
def test_an_edit_in_other_words_is_the_same_edit(edit, known, share):
    (each,) = answering(edit, [known])
    assert each.proven == (share == 1.0) and each.share == pytest.approx(share, abs=1e-3)
    assert each.proven or each.remaining == pytest.approx((1 - each.share) * 1000)
    assert answering("dropout", [known]) == []


@pytest.mark.parametrize(
    ("edit", "known"),
    [
        ("normalise by std 0.229, 0.224, 0.225 instead of 0.5", INPUT), ("temperature=0.05", NUMBER),
        ("eps=0.07", NUMBER), ("smooth=1.0", INPUT), ("smooth=0.448", INPUT),
        ("lr=0.3", GROUPS), ("remove the relu", ORDER), ("add the residual before the relu", RESIDUAL),
    ],
)  # fmt: skip
def test_an_edit_of_another_quantity_is_no_answer(edit, known):
    assert answering(edit, [known]) == []


def test_a_change_in_words_is_no_edit_that_explains_nothing():
    little = replace(RESIDUAL, share=0.1, proven=False)
    assert answering("x = x + self.body(x)", [little]) == []
    assert answering("x = x + self.body(x)", [little, RESIDUAL]) == [RESIDUAL]


def test_an_edit_of_one_of_two_causes_is_no_answer():
    both = proven("learning_rate+adam_beta2", f"{RATE.text}; and beta2 is 0.999 for the reference's 0.95",
                  "paddle.optimizer.AdamW(..., learning_rate=0.1, beta2=0.95)")  # fmt: skip
    assert answering("beta2=0.95", [both]) == []
    assert answering("learning_rate=0.1, beta2=0.95", [both]) == [both]


def test_an_edit_of_two_causes_that_are_known_apart_is_answered():
    loss = proven(
        "loss_setting", "the losses are set differently: beta 0.3 against 1.0", "smooth_l1_loss(..., beta=0.3)"
    )
    clip = Explanation("clipping", "another difference", "opt(..., grad_clip=ClipGradByGlobalNorm(0.25))", 0.0, None,
                       False, declared=True)  # fmt: skip
    assert answering("beta=0.3, max_norm=0.25", [loss, clip]) == [loss, clip]
    assert answering("max_norm=0.25", [loss, clip]) == [clip]
    assert [each.share for each in answering("max_norm=0.5", [loss, clip])] == [0.0]
    # What the other argument does is not known.
    assert answering("beta=0.3, pct_start=0.4", [loss, clip]) == []


@pytest.mark.parametrize(
    ("rule", "edit", "expected"),
    [
        (lambda t, n: 1e-4 + (2e-3 - 1e-4) * (1 + np.cos(np.pi * t / n)) / 2, "T_max=20", ("cosine", 10.0)),
        (lambda t, n: 1e-4 + (2e-3 - 1e-4) * (1 + np.cos(np.pi * t / n)) / 2, "period = 10", None),
        (lambda t, n: 0.1 * (n / 25) ** t, "gamma=0.8", ("exponential", 0.4)),
        (lambda t, n: 0.1 * (n / 25) ** t, "gamma=0.9", None),
        (lambda t, n: 0.1 / (1 + t / n), "T_max=20", None),
    ],
)
def test_the_number_of_a_schedule_follows_from_the_rates(rule, edit, expected):
    rates = {t: Both(rule(t, 20), rule(t, 10)) for t in range(1, 6)}
    found = schedule_of(edit, rates)
    assert found == expected if found is None else found == (expected[0], pytest.approx(expected[1]))


def test_a_fault_beside_the_first_one_is_an_answer_that_leaves_the_first_one(tools, runs):
    value = answer(tools, "what_if", **pair(runs, "torch", "both"), edit="learning_rate=0.1")
    assert [each["share"] for each in value["computed"]] == [0.0]
    assert value["computed"][0]["text"].startswith("another difference, at step 0, update")


def test_a_setting_of_the_optimizer_is_an_answer(tools, runs):
    arguments = pair(runs, "adam", "beta")
    assert answer(tools, "what_if", **arguments, edit="beta2=0.98")["computed"][0]["share"] == 1.0
    for edit in ("beta2=0.999", "beta2=0.99", "betas=(0.9, 0.99)"):
        (left,) = answer(tools, "what_if", **arguments, edit=edit)["computed"]
        assert left["share"] < 0.6 and not left["proven"]
    # The candidate has 0.9 already.
    assert answer(tools, "what_if", **arguments, edit="betas=(0.9, 0.98)")["computed"][0]["share"] == 1.0
    (left,) = answer(tools, "what_if", **arguments, edit="betas=(0.8, 0.98)")["computed"]
    assert left["share"] < 0.6
    (left,) = answer(tools, "what_if", **arguments, edit="beta1=0.5")["computed"]
    assert left["share"] == 0.0 and not left["proven"]


def test_a_match_has_nothing_to_explain(tools, runs):
    with pytest.raises(UsageError, match="the runs match: there is no difference"):
        tools.call("what_if", {**pair(runs), "edit": "eps=1"})


# -- the next experiment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "candidate", "command", "do"),
    [
        ("torch", "paddle", "padiff port-check", "let the judge decide"),
        ("torch", "identity", "padiff fix", "fix the cause"),
        ("norm", "momentum", "padiff fix", "read the candidate's code there"),
        ("torch", "start", "padiff compare", "start the candidate equal, with padiff.start_from"),
    ],
)
def test_the_next_experiment_follows_from_the_state(tools, runs, reference, candidate, command, do):
    value = answer(tools, "next_experiment", **pair(runs, reference, candidate))
    assert value["command"].startswith(command) and value["do"].startswith(do)
    assert value["why"] and value["decides"]


def test_sketches_are_recorded_again_in_full(tmp_path, runs):
    net = torch.nn.Sequential(torch.nn.Linear(5, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 3))
    other = torch.nn.Sequential(torch.nn.Linear(5, 3000), torch.nn.Sigmoid(), torch.nn.Linear(3000, 3))
    other.load_state_dict(net.state_dict())
    made = [recorded(tmp_path / name, "torch", each, detail="sketch", functions=False)
            for name, each in (("a", net), ("b", other))]  # fmt: skip
    with Tools([str(tmp_path)]) as tools:
        value = answer(tools, "next_experiment", reference=made[0], candidate=made[1])
        assert "--detail full" in value["command"] or "padiff fix" in value["command"]


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_only_the_given_folders_are_read(tools, runs, tmp_path):
    outside = shutil.copytree(runs[1]["paddle"], tmp_path / "outside")
    link = runs[0] / "link"
    link.symlink_to(outside)
    try:
        for path in (outside, link, runs[0] / ".." / ".." / "x", "/", "s3://bucket/run", f"{runs[0]}evil", "a\0b"):
            with pytest.raises((UsageError, ValueError), match=r"is not read|null byte"):
                tools.call("compare", {"reference": runs[1]["torch"], "candidate": str(path)})
            with pytest.raises((UsageError, ValueError), match=r"is not read|null byte"):
                tools.call("tensor", {"run": str(path), "step": 0, "layer": "0"})
    finally:
        link.unlink()


def test_tools_change_no_file(tools, runs):
    def state():
        files = sorted(path for path in runs[0].rglob("*") if path.is_file())
        return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}

    before = state()
    for name in ("compare", "next_experiment"):
        tools.call(name, pair(runs, candidate="identity"))
    tools.call("explain", {**pair(runs), "step": 0, "layer": "0"})
    tools.call("tensor", {"run": runs[1]["torch"], "step": 0, "layer": "0"})
    assert state() == before


def test_a_long_answer_names_the_file_with_the_rest(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(5, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3))
    path = recorded(tmp_path / "wide", "torch", net)
    with Tools([path]) as tools:
        value = answer(tools, "tensor", run=path, step=0, layer="0", tensor="weight/weight")
        whole = json.loads(Path(value["rest"]).read_text())["tensors"][0]["values"]
        assert len(whole) == 2000 and value["tensors"][0]["values"] == whole[:64]
        value = answer(tools, "tensor", run=path, step=0, layer="0")
        assert value["hidden"] + len(value["tensors"]) == len(json.loads(Path(value["rest"]).read_text())["tensors"])
        rest = value["rest"]
    assert not os.path.exists(rest)


def test_a_run_that_was_recorded_again_is_compared_again(tmp_path, runs):
    reference = shutil.copytree(runs[1]["torch"], tmp_path / "torch")
    candidate = recorded(tmp_path / "now", "paddle", tanh_missing())
    with Tools([str(tmp_path)]) as tools:
        names = {"reference": str(reference), "candidate": candidate}
        assert answer(tools, "compare", **names)["outcome"] == "differ"
        recorded(tmp_path / "now", "paddle", existing="overwrite")
        assert answer(tools, "compare", **names)["outcome"] == "match"


def test_text_of_a_run_is_escaped(tmp_path, runs):
    candidate = Path(shutil.copytree(runs[1]["identity"], tmp_path / "run"))
    shutil.copytree(runs[1]["torch"], tmp_path / "torch")
    info = json.loads((candidate / "run.json").read_text())
    info["name"] = "\x1b[2Jname"
    for layer in info["tree"]["layers"]:
        layer["type"] = "T\x1b]0;x\x07"
    info["lines"] = {"1": ["a\x1b[1m.py", 1, "", "code\x07"]}
    (candidate / "run.json").write_text(json.dumps(info))
    with Tools([str(tmp_path)]) as tools:
        names = {"reference": str(tmp_path / "torch"), "candidate": str(candidate)}
        for name, more in (("compare", {}), ("explain", {"step": 0, "layer": "1"}), ("next_experiment", {})):
            text = tools.call(name, {**names, **more})
            decoded = json.dumps(json.loads(text), ensure_ascii=False)
            assert "\\u001b" not in text and "\x1b" not in decoded and "\x07" not in decoded


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["mcp", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_shapes_without_elements_and_numbers_that_are_none(tmp_path):
    from padiff.records import InMemory, Record
    from padiff_cli.mcp.tools import _values

    array = np.array([[math.nan, math.inf]], np.float32)
    values = _values(Record("0", "weight", "w", InMemory(array), "float32", (1, 2)), (), 10)
    assert values.values == ["nan", "inf"] and values.maximum == "nan"
    empty = np.zeros((0, 3), np.float32)
    assert _values(Record("0", "weight", "w", InMemory(empty), "float32", (0, 3)), (), 10).values == []
