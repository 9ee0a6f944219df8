"""`padiff port-check` and `padiff verify` on real trainings of both frameworks: rows, exceptions, receipts."""

from __future__ import annotations

import hashlib
import json
import shutil

import kit.trainings
import numpy as np
import pytest
from kit.trainings import W1, optimizer_of, paddle_net, torch_net, trained

import padiff
from padiff_cli.main import main

pytestmark = pytest.mark.slow

ROWS = ["start equal", "forward", "loss", "gradients", "update", "short training"]
SGD = {"torch": ("SGD", {"lr": 0.1}), "paddle": ("SGD", {"learning_rate": 0.1})}


def recorded(framework, folder, *, net=None, each=None, rate=0.1, **options):
    name, settings = SGD[framework]
    settings = dict.fromkeys(settings, rate)
    trained(framework, optimizer_of(framework, name, settings), net=net, each=each, folder=str(folder), **options)
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return recorded("torch", folder / "torch"), recorded("paddle", folder / "paddle")


def checked(tmp_path, *words, code):
    """The receipt of a port check, and what it printed as Markdown."""
    receipt, markdown = tmp_path / "receipt.json", tmp_path / "table.md"
    assert main(["port-check", *map(str, words), "--receipt", str(receipt), "--markdown", str(markdown)]) == code
    return json.loads(receipt.read_text()), markdown.read_text()


def test_a_port_that_matches(tmp_path, runs, capsys):
    receipt, markdown = checked(tmp_path, *runs, code=0)
    assert receipt["outcome"] == "match"
    assert [(row["name"], row["outcome"]) for row in receipt["checks"]] == [(name, "match") for name in ROWS]
    assert [row["stage"] for row in receipt["checks"]] == ["structure"] + ["numbers"] * 4 + ["behaviour"]
    assert receipt["exceptions"] == [] and receipt["fault"] == ""
    assert receipt["coverage"]["share"] == 1.0
    assert receipt["coverage"]["tensors"] == sum(row["tensors"] for row in receipt["checks"])
    assert receipt["moved"]["enough"]
    printed = capsys.readouterr().out
    for name in ROWS:
        assert name in printed and f"| {name} | match |" in markdown
    assert printed.startswith("MATCH: ")


def test_the_rows_of_a_long_comparison_are_the_same(tmp_path, runs, monkeypatch):
    """Diffs beyond some number are kept in compact form."""
    import padiff.compare.coverage

    receipt, _ = checked(tmp_path, *runs, code=0)
    monkeypatch.setattr(padiff.compare.coverage, "_UNFOLDED", 10)
    again, _ = checked(tmp_path, *runs, code=0)
    assert again["checks"] == receipt["checks"]


def test_the_start_is_equal_to_the_bit(tmp_path, runs):
    receipt, _ = checked(tmp_path, *runs, code=0)
    start = receipt["checks"][0]
    # Both models get the same arrays: four parameters and the input.
    assert (start["tensors"], start["equal"], start["in_full"]) == (5, 5, 5)


def test_digests_are_those_of_the_recorded_tensors(tmp_path, runs):
    receipt, _ = checked(tmp_path, *runs, code=0)
    first = padiff.open_run(runs[0]).steps(0)[0]
    digest = hashlib.sha256()
    for record in sorted((r for r in first.records if r.stage == "weight"), key=lambda r: (r.site, r.order)):
        head = [0, 0, record.site, record.dtype, list(record.shape), "full"]
        digest.update(json.dumps(head).encode() + np.ascontiguousarray(record.value).tobytes())
    assert receipt["reference"]["weights"] == digest.hexdigest()
    batches = {receipt[side]["batches"] for side in ("reference", "candidate")}
    assert None not in batches


def _scaled_gradients(step, net, optimizer):
    if step == 0:
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient * 1.5)


def _later_rate(step, net, optimizer):
    if step == 1:
        optimizer.set_lr(0.3)


def _other_start():
    net = paddle_net()
    net[0].bias.set_value(net[0].bias + 0.01)
    return net


def _other_layer():
    import paddle

    net = paddle_net()
    net[1] = paddle.nn.Hardtanh()
    return net


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("start equal", {"net": _other_start}),
        ("forward", {"net": _other_layer}),
        ("loss", {}),
        ("gradients", {"each": _scaled_gradients}),
        ("update", {"rate": 0.2}),
        ("short training", {"each": _later_rate}),
    ],
)
def test_a_planted_fault_shows_in_its_row_first(tmp_path, runs, row, options, capsys, monkeypatch):
    if row == "loss":
        monkeypatch.setattr(kit.trainings, "Y", kit.trainings.Y * 1.1)
    options = {key: value() if key == "net" else value for key, value in options.items()}
    candidate = recorded("paddle", tmp_path / "run", **options)
    receipt, markdown = checked(tmp_path, runs[0], candidate, code=1)
    outcomes = {each["name"]: each["outcome"] for each in receipt["checks"]}
    assert next(name for name in ROWS if outcomes[name] != "match") == row
    assert f"| {row} | differ |" in markdown
    assert receipt["outcome"] == "differ" and receipt["fault"].startswith("DIFFER step ")
    assert capsys.readouterr().out.startswith("DIFFER")


# -- what is not compared ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence", "code"),
    [
        ({"black_list": ["1"]}, "1 of 4 layers by the candidate's black list: 1", 0),
        ({"white_list": ["0", "2"]}, "2 of 4 layers by the candidate's white list: (root), 1", 0),
        ({"detail": {"backward": "nothing"}}, "not recorded by the candidate's detail: backward", 0),
        ({"every_n_steps": 2}, "2 of the candidate's steps 0 to 2 (every_n_steps 2) are recorded", 0),
    ],
)
def test_what_a_recording_leaves_out_is_an_exception(tmp_path, runs, options, sentence, code, capsys):
    candidate = recorded("paddle", tmp_path / "run", **options)
    receipt, markdown = checked(tmp_path, runs[0], candidate, code=code)
    assert sentence in receipt["exceptions"]
    assert sentence in capsys.readouterr().out
    assert sentence.replace("_", "") in markdown.replace("\\", "").replace("_", "")
    assert receipt["candidate"]["left_out_by"] == next((key for key in options if key.endswith("list")), "")


def test_a_layer_that_is_left_out_on_both_sides_is_an_exception(tmp_path):
    """A fault inside of a layer that neither side records shows in nothing but the exceptions."""
    reference = recorded("torch", tmp_path / "torch", black_list=["1"])
    candidate = recorded("paddle", tmp_path / "paddle", black_list=["1"])
    receipt, _ = checked(tmp_path, reference, candidate, code=0)
    for side in ("reference", "candidate"):
        assert f"1 of 4 layers by the {side}'s black list: 1" in receipt["exceptions"]
        assert receipt[side]["left_out"] == ["1"]
        assert (receipt[side]["layers"], receipt[side]["recorded_layers"]) == (4, 3)


@pytest.mark.parametrize(
    ("options", "sentence", "code"),
    [
        (["--atol", "10"], "tolerance update: mean_abs 10 for rel_l2 1e-06", 0),
        (["--steps", "0"], "only the steps 0 are compared", 1),
        (["--stage", "input"], "stages that are not compared: weight, forward, loss, backward, grad, update", 3),
        (["--layer", "0"], "only layers like 0 are compared", 1),
    ],
)
def test_a_fault_that_options_hide_shows(tmp_path, runs, options, sentence, code, capsys):
    candidate = recorded("paddle", tmp_path / "run", rate=0.2)
    receipt, markdown = checked(tmp_path, runs[0], candidate, *options, code=code)
    assert sentence in receipt["exceptions"]
    without = receipt["without_options"]
    assert without["outcome"] == "differ"
    # The declared rate, which is known by its setting.
    assert "learning rate" in without["text"]
    printed = capsys.readouterr().out
    assert sentence in printed and "options: DIFFER step 0" in printed
    assert "options: DIFFER step 0" in markdown


def test_a_layer_map_that_leaves_a_layer_out_shows(tmp_path, runs):
    (tmp_path / "map.yaml").write_text(
        "pairs:\n- {reference: '2', candidate: null}\n- {reference: null, candidate: '2'}\n"
    )
    receipt, _ = checked(tmp_path, *runs, "--layer-map", str(tmp_path / "map.yaml"), code=0)
    assert receipt["options"]["layer_map"] == [["2", None], [None, "2"]]
    assert "2 pairs of layers by the layer map, without a partner: 2, 2" in receipt["exceptions"]
    assert receipt["without_options"]["outcome"] == "match"


def test_a_check_without_tensors_is_no_match(tmp_path):
    runs = [recorded(name, tmp_path / name, steps=1) for name in ("torch", "paddle")]
    receipt, markdown = checked(tmp_path, *runs, code=3)
    assert receipt["outcome"] == "cannot tell"
    assert receipt["fault"] == "CANNOT TELL: nothing to compare for short training"
    assert "| short training | not checked |" in markdown


def test_a_copy_of_the_reference_is_refused(tmp_path, runs, capsys):
    shutil.copytree(runs[0], tmp_path / "copy")
    assert main(["port-check", runs[0], str(tmp_path / "copy")]) == 2
    assert "hold one recording" in capsys.readouterr().err


def test_json_holds_the_receipt_and_the_faults(tmp_path, runs, capsys):
    assert main(["port-check", *runs, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["diagnostic"]["outcome"] == result["outcome"] == "match"


# -- receipts ----------------------------------------------------------------------------------------------------------


def verified(capsys, *words):
    capsys.readouterr()
    code = main(["verify", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_a_receipt_holds_for_its_runs(tmp_path, runs, capsys):
    checked(tmp_path, *runs, code=0)
    code, text = verified(capsys, tmp_path / "receipt.json", *runs)
    assert code == 0 and text.rstrip().endswith("the receipt holds")


def test_a_receipt_of_runs_that_differ_holds_too(tmp_path, runs, capsys):
    candidate = recorded("paddle", tmp_path / "run", rate=0.2)
    checked(tmp_path, runs[0], candidate, "--atol", "10", code=0)
    assert verified(capsys, tmp_path / "receipt.json", runs[0], candidate)[0] == 0


def test_a_receipt_holds_for_the_same_training_recorded_again(tmp_path, runs, capsys):
    checked(tmp_path, *runs, code=0)
    again = recorded("paddle", tmp_path / "again")
    code, text = verified(capsys, tmp_path / "receipt.json", runs[0], again)
    assert code == 0, text
    assert "note     candidate.identity: " in text


def _flip_a_bit(folder):
    files = [each for each in (folder / "steps").rglob("*.*") if each.suffix in (".npy", ".safetensors")]
    file = max(files, key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-4] ^= 1  # the last bit of the last number
    file.write_bytes(data)


def _edit_run(folder, edit):
    content = json.loads((folder / "run.json").read_text())
    edit(content)
    (folder / "run.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda folder: _edit_run(folder, lambda run: run["environment"].update(platform="other")), "run.json"),
        (_flip_a_bit, "steps/"),
        (lambda folder: (folder / "finished.json").unlink(), "finished.json"),
        (lambda folder: (folder / "steps" / "more.json").write_text("{}"), "steps/more.json"),
    ],
)
def test_a_run_folder_that_was_edited_after_the_receipt_does_not_hold(tmp_path, runs, capsys, edit, name):
    """Also where the comparison comes out as before."""
    candidate = tmp_path / "candidate"
    shutil.copytree(runs[1], candidate)
    checked(tmp_path, runs[0], candidate, code=0)
    assert verified(capsys, tmp_path / "receipt.json", runs[0], candidate)[0] == 0
    edit(candidate)
    code, text = verified(capsys, tmp_path / "receipt.json", runs[0], candidate)
    assert code == 1 and f"differs  candidate.files.{name}" in text


def test_digests_of_files_are_those_of_the_folder(tmp_path, runs):
    receipt, _ = checked(tmp_path, *runs, code=0)
    with open(f"{runs[0]}/run.json", "rb") as file:
        assert receipt["reference"]["files"]["run.json"] == hashlib.sha256(file.read()).hexdigest()


def test_a_run_with_another_identity_is_told_apart_from_the_one_that_was_judged(tmp_path, runs, capsys):
    candidate = tmp_path / "candidate"
    shutil.copytree(runs[1], candidate)
    checked(tmp_path, runs[0], candidate, code=0)
    _edit_run(candidate, lambda run: run.update(id="0" * 16))
    code, text = verified(capsys, tmp_path / "receipt.json", runs[0], candidate)
    assert code == 0
    assert text.rstrip().endswith("the receipt holds for another recording: the candidate's files are not those judged")


def test_pipes_and_links_in_a_run_folder_are_not_followed(tmp_path, runs, capsys):
    import os

    candidate = tmp_path / "candidate"
    shutil.copytree(runs[1], candidate)
    os.mkfifo(candidate / "pipe")  # reading it would wait for ever
    (candidate / "link").symlink_to("/dev/zero")
    checked(tmp_path, runs[0], candidate, code=0)
    (candidate / "link").unlink()
    (candidate / "link").symlink_to("/dev/null")
    code, text = verified(capsys, tmp_path / "receipt.json", runs[0], candidate)
    assert code == 1 and "differs  candidate.files.link" in text


def test_verify_names_what_changed(tmp_path, runs, capsys):
    checked(tmp_path, *runs, code=0)
    other = recorded("paddle", tmp_path / "other", net=_other_start())
    code, text = verified(capsys, tmp_path / "receipt.json", runs[0], other)
    assert code == 1
    assert "differs  outcome: match in the receipt, differ now" in text
    assert "differs  candidate.weights: " in text
    assert "differs  check start equal.outcome: match in the receipt, differ now" in text


def test_without_runs_no_path_of_the_receipt_is_opened(tmp_path, runs, capsys):
    receipt, _ = checked(tmp_path, *runs, code=0)
    receipt["reference"]["path"] = str(tmp_path / "pipe")
    import os

    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    (tmp_path / "edited.json").write_text(json.dumps(receipt))
    code, text = verified(capsys, tmp_path / "edited.json")
    assert code == 0 and "the runs were not compared" in text


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda r: r["checks"][2].update(outcome="differ"), "the outcome is match, but not that of every check"),
        (lambda r: r["checks"][1].update(differ=3), "forward: its outcome and its numbers contradict each other"),
        (lambda r: r["coverage"].update(tensors=1), "another number of tensors"),
    ],
)
def test_an_edited_receipt_contradicts_itself(tmp_path, runs, capsys, edit, sentence):
    receipt, _ = checked(tmp_path, *runs, code=0)
    edit(receipt)
    (tmp_path / "edited.json").write_text(json.dumps(receipt))
    code, text = verified(capsys, tmp_path / "edited.json")
    assert code == 1 and sentence in text


@pytest.mark.parametrize(
    "edit",
    [
        lambda r: r.update(schema_version=2),
        lambda r: r.update(unknown=1),
        lambda r: r.pop("coverage"),
        lambda r: r["options"].update(atol="0.1"),
        lambda r: r["options"].update(atol=-1),
        lambda r: r["reference"].update(weights="no digest"),
        lambda r: r.update(fault="x" * 100_000),
        lambda r: r.update(exceptions=["x"] * 100_000),
        lambda r: r["options"].update(layer_map=[["a", "b", "c"]]),
    ],
)
def test_what_is_no_receipt_is_refused_in_one_line(tmp_path, runs, capsys, edit):
    receipt, _ = checked(tmp_path, *runs, code=0)
    edit(receipt)
    (tmp_path / "edited.json").write_text(json.dumps(receipt))
    code, text = verified(capsys, tmp_path / "edited.json")
    assert code == 2 and "is no receipt of this version" in text and len(text.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff\xfe", b'{"schema_version": 1e999}', b"x" * (5 << 20)])
def test_hostile_files_are_refused(tmp_path, capsys, content):
    (tmp_path / "receipt.json").write_bytes(content)
    code, text = verified(capsys, tmp_path / "receipt.json")
    assert code == 2 and "Traceback" not in text and "should not have happened" not in text


def test_control_characters_of_a_receipt_are_escaped(tmp_path, runs, capsys):
    receipt, _ = checked(tmp_path, *runs, code=0)
    receipt["reference"]["path"] = "\x1b[2Jrun"
    receipt["exceptions"] = ["\x1b]0;title\x07"]
    (tmp_path / "edited.json").write_text(json.dumps(receipt))
    _, text = verified(capsys, tmp_path / "edited.json", *runs)
    assert "\x1b]0" not in text and "\x1b[2J" not in text and "\\x1b[2Jrun" in text


def test_markdown_gives_names_no_effect(tmp_path, runs):
    import msgspec

    from padiff.port_check import Receipt, to_markdown

    receipt, _ = checked(tmp_path, *runs, code=0)
    receipt["reference"]["path"] = "<img src=x>|@everyone"
    receipt["exceptions"] = ["</details><script>"]
    text = to_markdown(msgspec.convert(receipt, Receipt))
    assert "<img" not in text and "<script" not in text and "@everyone" not in text


def test_one_run_is_not_enough(tmp_path, runs, capsys):
    checked(tmp_path, *runs, code=0)
    code, text = verified(capsys, tmp_path / "receipt.json", runs[0])
    assert code == 2 and "verify takes both runs, or none" in text


def test_torch_net_and_paddle_net_start_alike():
    assert np.array_equal(torch_net()[0].weight.detach().numpy(), W1)
