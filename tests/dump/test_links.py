"""Files of a run that become something else between their check and their opening; and headers that lie."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

import padiff
from padiff.dump import untrusted
from padiff.dump.weight_files import open_weights
from padiff.errors import PadiffError, RunFolderError

STORED = {"plain": {}, "packed": {"pack": True}, "compressed": {"compression": "zlib"}}


@pytest.fixture(scope="module", params=STORED)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("links") / request.param
    model = torch.nn.Linear(3, 2)
    with padiff.record(model, folder, replay_every_n_steps=1, **STORED[request.param]) as rec:
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            rec.try_dump()
    return folder


def read_all(folder) -> float:
    opened = padiff.open_run(folder)
    return sum(float(r.value.sum()) for n in opened.numbers() for step in opened.steps(n) for r in step.records)


def test_a_file_that_becomes_a_link_after_its_check_is_not_followed(run, tmp_path, monkeypatch):
    """Each file in turn, swapped in the moment in which its check has passed."""
    assert np.isfinite(read_all(run))
    followed, swapped = [], 0
    for source in sorted(p for p in run.rglob("*") if p.suffix in (".json", ".npy", ".safetensors")):
        copy, outside = tmp_path / "copy", tmp_path / f"outside{source.suffix}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        shutil.copyfile(source, outside)
        victim, real = copy / source.relative_to(run), os.open

        def swap(path, flags, *rest, victim=victim, outside=outside, real=real, **more):
            nonlocal swapped
            if os.fspath(path) == os.fspath(victim) and not victim.is_symlink():
                victim.unlink()
                victim.symlink_to(outside)
                swapped += 1
                descriptor = real(path, flags, *rest, **more)  # an error is what is asked for
                followed.append(str(victim))
                return descriptor
            return real(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", swap)
        try:
            read_all(copy)
        except PadiffError:
            pass
        finally:
            monkeypatch.setattr(os, "open", real)
    assert swapped >= 2
    assert not followed


def test_a_link_that_stays_in_the_run_is_read(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for path in [p for p in (tmp_path / "run").rglob("*") if p.suffix in (".json", ".npy", ".safetensors")]:
        (aside := path.with_name(f".{path.name}.aside")).write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(aside.name)
    assert read_all(tmp_path / "run") == read_all(run)


def _file(places, size: int) -> bytes:
    header = {n: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for n, (a, b) in places.items()}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


@pytest.mark.parametrize(
    ("places", "size"),
    [
        ({"a": (0, 4), "b": (4, 8)}, 8),
        ({"a": (4, 8), "b": (0, 4)}, 8),
        ({"a": (0, 0), "b": (0, 4), "c": (4, 4)}, 4),
        ({"a": (0, 4), "b": (2, 6)}, 6),  # overlapping
        ({"a": (0, 4), "b": (0, 4)}, 4),
        ({"a": (0, 4), "b": (6, 8)}, 8),  # a hole
        ({"a": (2, 4)}, 4),
        ({"a": (0, 4)}, 8),  # more behind
        ({"a": (0, 8)}, 4),
    ],
)
def test_headers_are_refused_as_the_library_of_the_format_refuses_them(tmp_path, places, size):
    path = tmp_path / "w.safetensors"
    path.write_bytes(_file(places, size))
    try:
        load_file(path)
    except SafetensorError:
        with pytest.raises(RunFolderError, match=r"w\.safetensors is damaged"):
            open_weights(path)
    else:
        open_weights(path)


def test_an_unknown_dtype_is_one_clear_line(run, tmp_path):
    for side in ("reference", "candidate"):
        shutil.copytree(run, tmp_path / side)
    for path in (tmp_path / "reference").rglob("*.json"):
        path.write_text(path.read_text().replace('"float32"', '"floaty"'))
    for pair in (("reference", "candidate"), ("candidate", "reference")):
        with pytest.raises(RunFolderError, match="unknown dtype 'floaty' of") as caught:
            padiff.compare_runs(*(tmp_path / side for side in pair))
        assert str(tmp_path / "reference") in str(caught.value) and "\n" not in str(caught.value)


def test_there_are_links_to_follow():
    assert untrusted.NO_LINK & os.O_NOFOLLOW
    assert save({"a": np.zeros(2)})
