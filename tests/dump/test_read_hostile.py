"""Run folders that were damaged, edited or made to harm: each is refused with one clear error."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kit.records import toy_folder

from padiff import check_report, compare_runs, open_run
from padiff.dump.untrusted import inside_folder
from padiff.errors import PadiffError, RunFolderError, TensorFileError
from padiff_cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return toy_folder(tmp_path / "run", [0])


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return toy_folder(tmp_path / "good", [0])


def dump(run: Path) -> Path:
    return run / "steps" / "00000000" / "rank_0"


def tensor(run: Path) -> Path:
    [path] = [p for p in (dump(run) / "tensors").iterdir() if "forward-fc1" in p.name]
    return path


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def entry(content: dict) -> dict:
    """The entry of fc1's output in a report.json."""
    [layer] = [x for x in content["tree"]["layers"] if x["path"] == "fc1"]
    return next(r for r in layer["records"] if r["stage"] == "forward")


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    text += b" " * (63 - (len(text) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


class Boom:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("pwned",)


def saved(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=array.dtype.hasobject)
    return out.getvalue()


def npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, a=np.zeros(3))
    return out.getvalue()


def deep_header() -> str:
    return "{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 3000 + ")" * 3000 + "}"


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is damaged"),
    "no npy": (b"hello, world, this is no tensor at all", "is damaged|pickled"),
    "truncated": (saved(np.zeros((16, 8), np.float32))[:-7], "is damaged"),
    "half a header": (saved(np.zeros((16, 8), np.float32))[:40], "is damaged"),
    "pickled objects": (saved(np.asarray([Boom()], dtype=object)), "holds pickled objects, which are never loaded"),
    "a bare pickle": (pickle.dumps(Boom()), "holds pickled objects|is damaged"),
    "an archive": (npz(), "has shape NpzFile"),
    "of another shape": (saved(np.zeros((8, 16), np.float32)), r"has shape \(8, 16\), but \(16, 8\) was recorded"),
    "of text": (saved(np.full((16, 8), "x")), "holds <U1"),
    "of fields": (saved(np.zeros((16, 8), [("a", "f4"), ("b", "f4")])), "holds "),
    "of dates": (saved(np.zeros((16, 8), "M8[s]")), "holds "),
    "petabytes": (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000000), }"), "is damaged"),
    "a deep header": (npy(deep_header()), "is damaged"),
    "a header that is code": (npy("__import__('os').mkdir('pwned')"), "is damaged"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_tensor_file_that_is(name, run, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = FILES[name]
    tensor(run).write_bytes(content)
    with pytest.raises(TensorFileError, match=message) as caught:
        compare_runs(good, run)
    assert str(tensor(run)) in str(caught.value) and "fc1/forward/output.0" in str(caught.value)
    assert not (tmp_path / "pwned").exists()


def test_a_missing_tensor_is_named_with_what_to_do(run, good):
    tensor(run).unlink()
    with pytest.raises(TensorFileError, match=r"is missing: copy the whole run folder, or record the run again"):
        compare_runs(good, run)


def test_a_bfloat16_tensor_stored_in_another_width_is_refused(run, good):
    edit(dump(run) / "report.json", lambda c: entry(c).update(dtype="bfloat16"))
    tensor(run).write_bytes(saved(np.zeros((16, 8), np.uint32)))
    with pytest.raises(TensorFileError, match=r"holds uint32, but bfloat16 was recorded"):
        compare_runs(good, run)


@pytest.mark.timeout(20)
def test_a_folder_or_a_pipe_in_a_tensors_place_is_refused_and_not_waited_for(run, good):
    path = tensor(run)
    path.unlink()
    path.mkdir()
    with pytest.raises(TensorFileError, match=r"is no plain file"):
        compare_runs(good, run)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(TensorFileError, match=r"is no plain file"):
        compare_runs(good, run)


OUTSIDE = {
    "up": "../../../../secret.npy",
    "up through a folder": "tensors/../../../../../secret.npy",
    "absolute": "{root}/secret.npy",
    "backslashes": "..\\..\\secret.npy",
    "itself": "",
    "a null byte": "tensors/\0.npy",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_path_that_leaves_the_folder_is_not_read(name, run, good, tmp_path):
    np.save(tmp_path / "secret.npy", np.load(tensor(run)))
    edit(dump(run) / "report.json", lambda c: entry(c).update(file=OUTSIDE[name].format(root=tmp_path)))
    message = "by a link" if name == "itself" else r"leaves the run folder, and is not read|cannot be a path"
    with pytest.raises(TensorFileError, match=rf"({message}).*: do not use this run folder"):
        compare_runs(good, run)


def test_a_link_that_leaves_the_folder_is_not_followed(run, good, tmp_path):
    path, secret = tensor(run), tmp_path / "secret.npy"
    path.rename(secret)
    path.symlink_to(secret)
    with pytest.raises(TensorFileError, match=r"leaves the run folder by a link, and is not read"):
        compare_runs(good, run)


def test_a_link_to_itself_is_refused(run, good):
    path = tensor(run)
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(TensorFileError, match=re.escape(str(path))):
        compare_runs(good, run)


def test_a_link_within_the_folder_is_followed(run, good):
    path = tensor(run)
    path.rename(path.with_name("moved.npy"))
    path.symlink_to("moved.npy")
    assert compare_runs(good, run).passed


EDITS: dict[str, tuple[str, Callable[[dict], object], str]] = {
    "no tree in the run": ("run.json", lambda c: c.pop("tree"), "KeyError: 'tree'"),
    "no framework": ("run.json", lambda c: c.pop("framework"), "KeyError: 'framework'"),
    "a framework that is text": ("run.json", lambda c: c.update(framework="torch"), "TypeError"),
    "a layer without a path": ("run.json", lambda c: c["tree"]["layers"][0].pop("path"), "KeyError: 'path'"),
    "layers that are a number": ("run.json", lambda c: c["tree"].update(layers=5), "TypeError"),
    "a layer that is null": ("run.json", lambda c: c["tree"].update(layers=[None]), "(Type|Attribute)Error"),
    "a world of text": ("run.json", lambda c: c.update(world_size="two"), "ValueError"),
    "an unknown stage": ("report.json", lambda c: entry(c).update(stage="sideways"), "unknown stage 'sideways'"),
    "no file": ("report.json", lambda c: entry(c).pop("file"), "KeyError: 'file'"),
    "a shape of text": ("report.json", lambda c: entry(c).update(shape="ab"), "ValueError"),
    "a shape that is null": ("report.json", lambda c: entry(c).update(shape=None), "TypeError"),
    "records that are a number": ("report.json", lambda c: c["tree"].update(records=3), "TypeError"),
    "a record that is text": ("report.json", lambda c: c["tree"].update(records=["x"]), "TypeError"),
    "an order of text": ("report.json", lambda c: entry(c).update(order="x"), "ValueError"),
    "a call beyond bounds": ("report.json", lambda c: entry(c).update(call=float("inf")), "OverflowError"),
    "a loop that is a list": ("report.json", lambda c: c.update(loop=[]), "AttributeError"),
    "no step": ("params.json", lambda c: c.pop("step"), "KeyError: 'step'"),
    "a loss scale of text": ("params.json", lambda c: c.update(loss_scale="big"), "ValueError"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_json_file_edited_to_have(name, run, good):
    file, change, message = EDITS[name]
    path = run / file if file == "run.json" else dump(run) / file
    edit(path, change)
    with pytest.raises(
        RunFolderError, match=rf"{re.escape(str(path))} is damaged: (ValueError: )?{message}.*edited, or only half"
    ):
        compare_runs(good, run)


@pytest.mark.parametrize("file", ["run.json", "report.json", "params.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged, it is no JSON"),
        (b'{"schema_version": 1, "tree": {', "is damaged, it is no JSON"),
        (b"[" * 200_000, "is damaged, it is no JSON"),
        (b"\xff\xfe\x00", "is damaged, it is no JSON"),
        (b"[]", "has schema version None; this padiff reads 1"),
        (b'{"schema_version": 2}', "has schema version 2; this padiff reads 1. Use the padiff that recorded it"),
        (b'{"schema_version": 1}', "is damaged: KeyError"),
    ],
    ids=["empty", "cut off", "deep", "no text", "a list", "of another schema", "without content"],
)
def test_a_json_file_that_is_something_else(run, good, file, content, message):
    path = run / file if file == "run.json" else dump(run) / file
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match=f"{re.escape(str(path))} {message}"):
        compare_runs(good, run)


def test_deep_but_whole_json_is_no_traceback(run, good):
    deep = b'{"schema_version": 1, "tree": ' + b'{"layers": [' * 400 + b"]}" * 400 + b"}"
    (run / "run.json").write_bytes(deep)
    with pytest.raises(RunFolderError, match=r"is damaged"):
        compare_runs(good, run)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(RunFolderError, match=r"there is no run folder .*nowhere"):
        open_run(tmp_path / "nowhere")


def test_a_file_instead_of_a_folder(run):
    with pytest.raises(RunFolderError, match=r"run\.json is a file; expected a run folder"):
        open_run(run / "run.json")


def test_an_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match=r"empty is no run folder: it holds neither run\.json nor report\.json"):
        open_run(tmp_path / "empty")


def test_a_folder_of_runs_names_them(run, good, tmp_path):
    with pytest.raises(RunFolderError, match=r"Below it there are run folders: good, run"):
        open_run(tmp_path)


def test_a_run_without_its_run_json_says_so(run):
    (run / "run.json").unlink()
    with pytest.raises(RunFolderError, match=r"its run\.json is lost"):
        open_run(run)


def test_a_step_without_a_rank(run, good):
    dump(run).rename(run / "elsewhere")
    with pytest.raises(RunFolderError, match=r"holds no rank_N folder: the step is damaged"):
        compare_runs(good, run)


def test_a_rank_without_its_files(run, good):
    for name in ("report.json", "params.json"):
        (dump(run) / name).unlink()
    with pytest.raises(RunFolderError, match=r"holds neither report\.json nor params\.json"):
        compare_runs(good, run)


def test_a_file_in_the_place_of_the_steps_folder(run, good):
    (run / "steps").rename(run / "moved")
    (run / "steps").write_text("x")
    with pytest.raises(RunFolderError, match=r"steps is a file"):
        compare_runs(good, run)


def test_entries_that_are_no_steps_and_no_ranks_are_passed_over(run, good):
    for name in ("00000001.txt", "x", "1", "-0000001"):
        (run / "steps" / name).mkdir()
    for name in ("rank_x", "rank_", "rank_²"):
        (run / "steps" / "00000000" / name).mkdir()
    assert open_run(run).numbers() == [0]
    assert compare_runs(good, run).passed


def test_a_layer_map_in_the_folder_that_names_no_layer(run, good):
    for path, name in ((run, "nosuch"), (good, "fc1")):
        edit(path / "run.json", lambda c, name=name: c.update(layer_map=[name]))
    with pytest.raises(PadiffError, match=r"the candidate has no layer 'nosuch'"):
        compare_runs(good, run)


def test_the_seeds_checks_refuse_the_same(run, good):
    tensor(run).unlink()
    with pytest.raises(TensorFileError, match=r"is missing"):
        check_report(good, run)


# -- the command line: one line, exit code 2, no traceback ----------------------------------------------------------

BREAK: dict[str, Callable[[Path], object]] = {
    "a truncated tensor": lambda run: tensor(run).write_bytes(FILES["truncated"][0]),
    "a missing tensor": lambda run: tensor(run).unlink(),
    "a pickled tensor": lambda run: tensor(run).write_bytes(FILES["pickled objects"][0]),
    "a tensor of text": lambda run: tensor(run).write_bytes(FILES["of text"][0]),
    "a tensor of petabytes": lambda run: tensor(run).write_bytes(FILES["petabytes"][0]),
    "an edited report": lambda run: edit(dump(run) / "report.json", lambda c: entry(c).pop("file")),
    "a bad stage": lambda run: edit(dump(run) / "report.json", lambda c: entry(c).update(stage="x")),
    "a path upwards": lambda run: edit(dump(run) / "report.json", lambda c: entry(c).update(file="../../x.npy")),
    "an absolute path": lambda run: edit(dump(run) / "report.json", lambda c: entry(c).update(file="/etc/passwd")),
    "a path with a null byte": lambda run: edit(dump(run) / "report.json", lambda c: entry(c).update(file="\0")),
    "deep JSON": lambda run: (dump(run) / "report.json").write_bytes(b"[" * 200_000),
    "another schema": lambda run: edit(run / "run.json", lambda c: c.update(schema_version=99)),
    "no run.json": lambda run: (run / "run.json").unlink(),
    "no steps folder": lambda run: (run / "steps").rename(run / "moved"),
}


@pytest.mark.parametrize("name", BREAK)
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_the_command_line_tells_in_one_line(name, side, run, good, capsys):
    BREAK[name](run)
    paths = [str(run), str(good)] if side == "reference" else [str(good), str(run)]
    assert main(["compare", *paths]) == 2
    err = capsys.readouterr().err
    assert err.startswith("padiff: ") and err.count("\n") == 1
    assert str(run) in err or "run" in err


# -- links, devices, and files that are too much --------------------------------------------------------------------


@pytest.mark.parametrize("what", ["step", "rank", "steps"])
def test_folders_that_lead_out_of_the_run_are_not_followed(what, run, good, tmp_path):
    folder = {"steps": run / "steps", "step": run / "steps" / "00000000", "rank": dump(run)}[what]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=r"leaves .* by a link, and is not read"):
        compare_runs(good, run)


@pytest.mark.parametrize("file", ["run.json", "report.json", "params.json"])
def test_a_json_file_that_leads_out_of_the_run_is_not_read(file, run, good, tmp_path):
    path = run / file if file == "run.json" else dump(run) / file
    path.rename(tmp_path / "secret.json")
    path.symlink_to(tmp_path / "secret.json")
    with pytest.raises(RunFolderError, match=r"leaves .* by a link, and is not read"):
        compare_runs(good, run)


def test_a_path_that_leads_upwards_is_not_read(run, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    up = Path(*[".."] * len(run.relative_to(tmp_path).parts))
    with pytest.raises(RunFolderError, match=r"leaves .* by a link, and is not read"):
        inside_folder(run / up / "secret.json", run)


def test_a_run_reached_by_a_link_is_read(run, good, tmp_path):
    (tmp_path / "latest").symlink_to(run)
    assert compare_runs(good, tmp_path / "latest").passed


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["run.json", "report.json"])
def test_a_pipe_a_folder_and_a_device_are_no_json(file, run, good):
    path = run / file if file == "run.json" else dump(run) / file
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunFolderError, match=r"it is no plain file"):
        compare_runs(good, run)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(RunFolderError, match=r"leaves .* by a link, and is not read"):
        compare_runs(good, run)
    path.unlink()
    path.mkdir()
    with pytest.raises(RunFolderError, match=r"it is no plain file"):
        compare_runs(good, run)


def test_a_json_file_of_terabytes_is_not_begun(run, good):
    os.truncate(dump(run) / "report.json", 1 << 40)
    with pytest.raises(RunFolderError, match=r"it has 1,099,511,627,776 bytes, at most [\d,]+ are read"):
        compare_runs(good, run)


def test_a_short_text_of_many_lists_is_not_built(run, good):
    (dump(run) / "report.json").write_bytes(b"[" + b"[]," * 9_000_000 + b"0]")
    with pytest.raises(RunFolderError, match=r"it holds some 18,000,001 values, at most [\d,]+ are read"):
        compare_runs(good, run)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


HUGE: dict[str, tuple[str, Callable[[dict], object]]] = {
    "an order": ("report.json", lambda c: entry(c).update(order=10**30)),
    "a call": ("report.json", lambda c: entry(c).update(call=2**64)),
    "an extent": ("report.json", lambda c: entry(c).update(shape=[2**64])),
    "a product of extents": ("report.json", lambda c: entry(c).update(shape=[2**31, 2**31, 2**31])),
    "axes": ("report.json", lambda c: entry(c).update(shape=[1] * 65)),
    "an extent below zero": ("report.json", lambda c: entry(c).update(shape=[-16, 8])),
    "a parameter": ("run.json", lambda c: c["tree"]["layers"][0]["parameters"][0].update(shape=[10**4000])),
    "a number of children": ("run.json", lambda c: c["tree"].update(children=10**4000)),
    "a setting": ("run.json", lambda c: c["tree"].update(settings={"eps": 10**4000})),
    "nesting in a setting": ("run.json", lambda c: c["tree"].update(settings={"eps": nested(200)})),
    "nesting in what is reported": ("run.json", lambda c: c.update(recording={"x": nested(200)})),
    "a world": ("run.json", lambda c: c.update(world_size=10**40)),
    "a step": ("params.json", lambda c: c.update(step=10**40)),
    "a loss scale": ("params.json", lambda c: c.update(loss_scale=float("inf"))),
    "a loss scale of nothing": ("params.json", lambda c: c.update(loss_scale=0)),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_is_beyond_bounds(name, run, good, capsys):
    file, change = HUGE[name]
    path = run / file if file == "run.json" else dump(run) / file
    edit(path, change)
    with pytest.raises(RunFolderError, match=rf"{re.escape(str(path))} is damaged"):
        compare_runs(good, run)
    assert main(["show", str(run)]) == 2 and capsys.readouterr().err.startswith("padiff: ")


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_of_gigabytes_is_not_read(version, run, good):
    head = b"\x93NUMPY" + bytes((version, 0)) + (2**32 - 1).to_bytes(4, "little") + b"{'descr': '<f4', "
    tensor(run).write_bytes(head)
    os.truncate(tensor(run), 1 << 33)
    with pytest.raises(TensorFileError, match=r"is damaged"):
        compare_runs(good, run)
