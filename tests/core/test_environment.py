"""The environment fingerprint: what is in it, what reading it leaves alone, what is reported of two that differ."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import paddle
import pytest
import torch
from hard.children import run_child
from kit.forking import python_with_frameworks

import padiff
from padiff.dump import open_run
from padiff.errors import RunFolderError
from padiff.frameworks import framework_of
from padiff.model.tree import walk
from padiff.recorder import description
from padiff.recorder.description import fingerprint
from padiff.records import Layer, RunInfo
from padiff.records.declared import cautions, differences, environment_from_json
from padiff.report_formats import coverage_lines, to_json, to_markdown
from padiff_cli.main import main

COMMON = {
    "python", "platform", "cpu.model", "cpu.instructions", "cpu.cores", "padiff", "numpy", "denormals.flushed",
    "device.kind", "framework.version", "threads.intra_op", "dtype.default", "tf32.matmul", "tf32.cudnn",
    "onednn.enabled", "autocast.dtype",
}  # fmt: skip
# Older builds for the CPU have no switches of TF32.
TF32_OF_PADDLE = hasattr(paddle.base.core, "set_cublas_switch")


def nets():
    return [torch.nn.Linear(2, 3), paddle.nn.Linear(2, 3)]


def taken(model):
    framework = framework_of(model)
    return fingerprint(framework, walk(model, framework))


@pytest.mark.parametrize("side", [0, 1], ids=["torch", "paddle"])
def test_what_is_in_it(side):
    found = taken(nets()[side])
    assert found.keys() >= (COMMON if side == 0 or TF32_OF_PADDLE else COMMON - {"tf32.matmul", "tf32.cudnn"})
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["device.kind"] == "cpu" and found["autocast.dtype"] == "off" and found["dtype.default"] == "float32"
    assert found["framework.version"] == (torch.__version__, paddle.__version__)[side]
    assert environment_from_json(json.loads(json.dumps(found))) == found


def test_torch_switches_show(monkeypatch):
    before = taken(torch.nn.Linear(2, 3))
    threads = torch.get_num_threads()
    fastpath = getattr(torch.backends, "mha", None)  # since torch 2.3
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch.set_num_threads(threads + 1)
        torch.set_default_dtype(torch.float64)
        if fastpath:
            fastpath.set_fastpath_enabled(False)
        after = taken(torch.nn.Linear(2, 3))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        if fastpath:
            fastpath.set_fastpath_enabled(True)
    assert {name: after[name] for name in after if after[name] != before[name]} == {
        "deterministic.algorithms": True,
        "deterministic.warn_only": True,
        "cudnn.benchmark": True,
        "matmul.precision": "high",
        "tf32.matmul": True,
        "threads.intra_op": threads + 1,
        "dtype.default": "float64",
    } | ({"attention.fastpath": False} if fastpath else {})


def test_paddle_switches_show():
    core = paddle.base.core
    before = taken(paddle.nn.Linear(2, 3))
    try:
        if TF32_OF_PADDLE:
            core.set_cublas_switch(True)
        paddle.set_default_dtype("float64")
        after = taken(paddle.nn.Linear(2, 3))
    finally:
        if TF32_OF_PADDLE:
            core.set_cublas_switch(before["tf32.matmul"])
        paddle.set_default_dtype("float32")
    assert {name: after[name] for name in after if after[name] != before[name]} == {
        "dtype.default": "float64",
        **({"tf32.matmul": True} if TF32_OF_PADDLE else {}),
    }


def test_flushed_denormals_show():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert taken(torch.nn.Linear(2, 3))["denormals.flushed"] is True
    finally:
        torch.set_flush_denormal(False)
    assert taken(torch.nn.Linear(2, 3))["denormals.flushed"] is False


def test_no_names_and_no_paths(monkeypatch):
    monkeypatch.setenv("USER", "jane.doe")
    monkeypatch.setenv("FLAGS_log_dir", "/home/jane/runs")
    monkeypatch.setenv("OMP_PLACES", "{0:4}")
    monkeypatch.setenv("MKL_OWNER", "jane.doe+1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    for found in map(taken, nets()):
        text = json.dumps(found)
        assert "jane" not in text and "abc" not in text and "/" not in text.replace("Linux/", "")
        assert found["env.FLAGS_log_dir"] == found["env.OMP_PLACES"] == found["env.MKL_OWNER"] == "(set)"
        assert found["env.CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_reading_changes_nothing():
    """In a process of its own: pools of threads and CUDA start once."""
    code = """
import warnings
warnings.simplefilter("error")
import torch, padiff
from padiff.recorder.description import fingerprint
from padiff.frameworks import framework_of
from padiff.model.tree import walk
model = torch.nn.Linear(2, 3)
framework = framework_of(model)
state = torch.get_rng_state()
fingerprint(framework, walk(model, framework))
assert torch.equal(state, torch.get_rng_state()) and not torch.cuda.is_initialized()
torch.set_num_interop_threads(3)  # raises once its threads have started
assert torch.get_num_interop_threads() == 3
"""
    done = run_child([*python_with_frameworks(), "-c", code])
    assert done.returncode == 0, done.stderr


def test_a_processor_is_reported_by_its_first_entry(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: A CPU\nflags\t: fpu avx512f avx2 vmx\n\nmodel name\t: Another\nflags\t: avx\n" * 999)
    monkeypatch.setattr(description, "CPU_FILE", str(file))
    found = taken(torch.nn.Linear(2, 3))
    assert (found["cpu.model"], found["cpu.instructions"]) == ("A CPU", "avx2 avx512f")
    monkeypatch.setattr(description, "CPU_FILE", str(tmp_path / "none"))
    assert taken(torch.nn.Linear(2, 3))["cpu.model"]


# -- in a run ---------------------------------------------------------------------------------------------------


def recorded(path, autocast=None, pack=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    with padiff.record(model, path, pack=pack) as rec:
        for _ in range(2):
            x = torch.arange(8.0).reshape(2, 4) / 3
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(x).float().sum()
            loss.backward()
            rec.try_dump()
    return path


@pytest.mark.parametrize("pack", [False, True])
def test_a_run_keeps_it_with_the_autocast_of_the_loop(tmp_path, pack):
    found = open_run(recorded(tmp_path / "run", torch.bfloat16, pack)).info.environment
    assert found["autocast.dtype"] == "bfloat16"
    assert {**found, "autocast.dtype": "off"} == taken(torch.nn.Linear(2, 3))


def test_a_run_in_memory_has_it_too():
    model = torch.nn.Linear(4, 3)
    with padiff.record(model) as rec, torch.autocast("cpu"):
        model(torch.ones(1, 4)).float().sum().backward()
        rec.try_dump()
    assert rec.run is not None and rec.run.info.environment["autocast.dtype"] == "bfloat16"


def test_two_runs_are_reported_apart(tmp_path, capsys):
    reference, candidate = recorded(tmp_path / "a"), recorded(tmp_path / "b", torch.bfloat16)
    report = padiff.compare_runs(reference, candidate, policy=padiff.Tolerance(1e-9, 1e-9, "strict"))
    reported = "autocast.dtype off against bfloat16"
    assert report.environment == (reported,)
    assert report.first_diff is not None and report.first_diff.stage == "forward"
    assert report.first_diff.cause.sentence.startswith("autocast: off in the reference run, bfloat16 in the candidate")
    assert report.first_diff.message.count("Likely cause") == 1
    assert reported in " ".join(coverage_lines(report)) and reported in to_markdown(report)
    assert to_json(report)["environment"] == [reported]
    assert padiff.compare_runs(reference, reference).environment == ()
    assert main(["show", str(candidate)]) == 0
    assert "autocast.dtype bfloat16" in capsys.readouterr().out
    assert main(["doctor", str(candidate)]) == 0
    assert "autocast computes in bfloat16" in capsys.readouterr().out


def test_an_older_run_is_read_and_a_damaged_one_refused(tmp_path):
    path = recorded(tmp_path / "run")
    other = recorded(tmp_path / "other")
    content = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({name: content[name] for name in content if name != "environment"}))
    assert open_run(path).info.environment == {}
    assert padiff.compare_runs(path, path).environment == ()
    assert padiff.compare_runs(path, other).environment == ("not known of the reference run: it was recorded without",)
    for wrong in ([1], {"a": [1]}, {"a": {"b": 1}}, "text"):
        (path / "run.json").write_text(json.dumps({**content, "environment": wrong}))
        with pytest.raises(RunFolderError, match=r"run\.json is damaged"):
            open_run(path)


# -- differences --------------------------------------------------------------------------------------------------


def info(framework="torch", **named):
    layer = Layer("(root)", "Linear", "linear")
    env = {name.replace("__", "."): value for name, value in named.items()}
    return RunInfo(framework, "1", (layer,), environment=env)


def test_what_can_change_numbers_comes_first():
    reference = info(
        python="3.10", numpy="2", threads__intra_op=1, device__kind="gpu", tf32__matmul=False, autocast__dtype="off"
    )
    candidate = info(
        python="3.11", numpy="2", threads__intra_op=8, device__kind="gpu", tf32__matmul=True, autocast__dtype="bfloat16"
    )
    assert differences(reference, candidate) == (
        "autocast.dtype off against bfloat16",
        "tf32.matmul off against on",
        "threads.intra_op 1 against 8",
        "python 3.10 against 3.11",
    )


def test_what_is_no_difference():
    reference = info(
        device__kind="cpu", tf32__matmul=False, framework__version="2", env__FLAGS_x="1", attention__fastpath=True
    )
    candidate = info("paddle", device__kind="cpu", tf32__matmul=True, framework__version="3")
    assert (
        differences(reference, candidate) == ()
    )  # TF32 on a CPU, the versions of two frameworks, a switch of one only
    assert differences(reference, replace(candidate, framework="torch")) == (
        "framework.version 2 against 3",
        "env.FLAGS_x 1 against not set",
    )


def test_cautions():
    assert cautions({"device.kind": "cpu", "tf32.matmul": True, "threads.intra_op": 1, "autocast.dtype": "off"}) == []
    reported = " ".join(
        cautions({"device.kind": "gpu", "tf32.matmul": True, "threads.intra_op": 4, "cudnn.benchmark": True})
    )
    assert (
        "TF32 is on (tf32.matmul)" in reported
        and "4 threads" in reported
        and "deterministic" in reported
        and "benchmark" in reported
    )
