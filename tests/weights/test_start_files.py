"""Weights from safetensors files, which know names and shapes alone."""

from __future__ import annotations

import json
import pickle

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH, kit_of
from pairs import PAIRS
from pairs.test_truth import distance, outputs
from safetensors.numpy import save_file

import padiff
from padiff.errors import RunFolderError, UsageError

#: Names, shapes and their order do not tell: the order in which layers run, or are defined, would.
UNTOLD = {
    *(pair.name for pair in PAIRS if pair.evidence == "execution"),
    "inception_branches",
    "vit_layer_scale",
    "vit_layer_scale_to_layers",
    "heads_in_wrappers",
}


def arrays(model):
    """The state of a model by its framework's names; a tied tensor once, as the format wants it."""
    kit, found, seen = kit_of(model), {}, set()
    for name, tensor in model.state_dict().items():
        where = tensor.data_ptr()
        if where not in seen or not tensor.shape:
            seen.add(where)
            found[name] = kit.numpy(tensor).copy()
    return found


def saved(model, folder, about="own", **more):
    folder.mkdir(exist_ok=True)
    form = {"torch": "pt", "paddle": "pd"}[kit_of(model).name] if about == "own" else about
    save_file({**arrays(model), **more}, folder / "model.safetensors", None if form is None else {"format": form})
    return folder


@pytest.mark.parametrize("pair", [p for p in PAIRS[1::2] if p.name not in UNTOLD], ids=lambda pair: pair.name)
def test_outputs_are_those_of_the_saved_model(pair, tmp_path):
    reference, candidate = (model.eval() or model for model in pair.build())
    padiff.start_from(saved(reference, tmp_path / "files"), candidate)
    assert distance(*outputs(pair, (reference, candidate))) < 1e-5


def two(kit, square=False):
    hidden = 5 if square else 7
    return kit.net(
        lambda self, x: self.last(self.norm(self.first(x))),
        first=kit.linear(5, hidden),
        norm=kit.batchnorm1d(hidden),
        last=kit.linear(hidden, 5 if square else 3),
    )


BOTH_WAYS = pytest.mark.parametrize(("source", "target"), [(TORCH, PADDLE), (PADDLE, TORCH), (TORCH, TORCH)],
                                    ids=lambda kit: kit.name)  # fmt: skip


@BOTH_WAYS
@pytest.mark.parametrize("square", [False, True])
def test_matrices_are_transposed_square_ones_too(source, target, square, tmp_path, capsys):
    base, raw = two(source, square), two(target, square)
    source.set(base.norm._mean if source is PADDLE else base.norm.running_mean, np.arange(len(base.norm.bias)) + 1.0)
    started = padiff.start_from(saved(base, tmp_path / "files"), raw)
    np.testing.assert_array_equal(target.weight(raw.first), source.weight(base.first))
    np.testing.assert_array_equal(target.weight(raw.last), source.weight(base.last))
    mean = raw.norm._mean if target is PADDLE else raw.norm.running_mean
    np.testing.assert_array_equal(target.numpy(mean), np.arange(len(base.norm.bias)) + 1.0)
    assert (started.step, started.parameters, started.buffers >= 2) == (None, 6, True)
    assert f"starts from {tmp_path}/files ({source.name} weights): 6 parameters" in capsys.readouterr().err


@pytest.mark.parametrize("about", [None, "np"])
def test_files_that_do_not_say_their_framework_have_to_be_said(about, tmp_path):
    base, raw = two(TORCH, square=True), two(PADDLE, square=True)
    folder = saved(base, tmp_path / "files", about)
    with pytest.raises(UsageError, match="give framework='torch' or framework='paddle'"):
        padiff.start_from(folder, raw)
    padiff.start_from(folder, raw, framework="torch")
    np.testing.assert_array_equal(PADDLE.weight(raw.first), TORCH.weight(base.first))
    with pytest.raises(UsageError, match="framework is one of 'torch', 'paddle', got 'jax'"):
        padiff.start_from(folder, raw, framework="jax")


def sharded(base, folder):
    folder.mkdir()
    whole = arrays(base)
    files = {name: f"model-{number % 2 + 1:05}-of-00002.safetensors" for number, name in enumerate(whole)}
    for file in set(files.values()):
        save_file({n: whole[n] for n in whole if files[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def test_several_files_with_an_index_are_one_model(tmp_path):
    base, raw = two(TORCH), two(PADDLE)
    padiff.start_from(sharded(base, tmp_path / "files"), raw)
    np.testing.assert_array_equal(PADDLE.weight(raw.first), TORCH.weight(base.first))
    np.testing.assert_array_equal(PADDLE.weight(raw.last), TORCH.weight(base.last))


def test_one_file_serves_and_assign_weight_takes_files(tmp_path):
    base, raw = two(TORCH), two(PADDLE)
    file = saved(base, tmp_path / "files") / "model.safetensors"
    padiff.start_from(file, raw)
    np.testing.assert_array_equal(PADDLE.weight(raw.first), TORCH.weight(base.first))
    other = two(PADDLE)
    assert padiff.assign_weight(file, other)
    np.testing.assert_array_equal(PADDLE.weight(other.last), TORCH.weight(base.last))


def test_bfloat16_is_read(tmp_path):
    from safetensors.torch import save_file as save

    base, raw = two(TORCH), two(PADDLE)
    save({n: t.bfloat16() if t.is_floating_point() else t for n, t in base.state_dict().items()},
         tmp_path / "model.safetensors", {"format": "pt"})  # fmt: skip
    padiff.start_from(tmp_path, raw)
    expected = base.first.weight.detach().bfloat16().float().numpy().T
    np.testing.assert_array_equal(raw.first.weight.numpy(), expected)


# -- bad input


def refused(message, path, **options):
    raw = two(PADDLE)
    before = [tensor.numpy() for tensor in raw.state_dict().values()]
    with pytest.raises((UsageError, RunFolderError), match=message):
        padiff.start_from(path, raw, **options)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, raw.state_dict().values()))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pdparams", "last.ckpt"])
def test_a_pickle_is_refused_unread(name, tmp_path):
    class Fires:
        def __reduce__(self):
            return (open, (str(tmp_path / "fired"), "w"))

    (tmp_path / name).write_bytes(pickle.dumps(Fires()))
    for path in (tmp_path, tmp_path / name):
        refused("is no safetensors file. A pickle .* is not read.*save it with safetensors", path)
    assert not (tmp_path / "fired").exists()


def test_what_the_model_lacks_is_named_and_partial_leaves_it(tmp_path):
    folder = saved(two(TORCH), tmp_path / "files", extra=np.ones((3, 4), "float32"))
    refused("extra", folder)
    raw = two(PADDLE)
    started = padiff.start_from(folder, raw, partial=True)
    assert any("extra" in name for name in started.left_as_is)


def test_a_step_of_files_cannot_be_meant(tmp_path):
    refused("holds weights, not steps: step=3", saved(two(TORCH), tmp_path / "files"), step=3)


def test_a_cut_off_file_is_refused(tmp_path):
    file = saved(two(TORCH), tmp_path / "files") / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 60, len(whole) - 10):
        file.write_bytes(whole[:length])
        refused("is damaged", tmp_path / "files")


def test_a_lost_shard_is_refused(tmp_path):
    folder = sharded(two(TORCH), tmp_path / "files")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused("model-00002-of-00002.safetensors is missing", folder)


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path):
    folder = sharded(two(TORCH), tmp_path / "files")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["more.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    refused("the index names more.weight, which its files do not hold", folder)
    content["weight_map"]["more.weight"] = "../other.safetensors"
    index.write_text(json.dumps(content))
    refused("names files outside of its folder", folder)
    index.write_text("{")
    refused("is damaged", folder)


def test_several_models_in_one_folder_are_refused(tmp_path):
    for name in ("one", "two"):
        save_file(arrays(two(TORCH)), tmp_path / f"{name}.safetensors", {"format": "pt"})
    refused("holds several files of weights", tmp_path)


def test_paddles_own_file_is_read(tmp_path):
    from safetensors.paddle import save_file as save

    base, raw = two(PADDLE), two(TORCH)
    save(base.state_dict(), str(tmp_path / "model.safetensors"), {"format": "pd"})
    padiff.start_from(tmp_path, raw)
    np.testing.assert_array_equal(TORCH.weight(raw.first), PADDLE.weight(base.first))
    assert isinstance(base.first.weight, paddle.Tensor)
    assert isinstance(raw.first.weight, torch.Tensor)


def test_layers_that_little_tells_apart_are_said_to_be_assumed(tmp_path):
    (pair,) = (pair for pair in PAIRS if pair.name == "inception_branches")
    reference, candidate = pair.build()
    started = padiff.start_from(saved(reference, tmp_path / "files"), candidate)
    assert "assumed: which layers answer to" in str(started)
    raw = two(PADDLE)
    assert not padiff.start_from(saved(two(TORCH), tmp_path / "plain"), raw).assumed
