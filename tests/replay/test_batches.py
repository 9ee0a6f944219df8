"""The very batches of a recorded run; expected is what the loop was fed with."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import KITS, PADDLE, TORCH

import padiff
from padiff.errors import RunFolderError, UsageError

IMAGES = np.random.RandomState(0).randn(4, 2, 6, 5).astype("float32")
LABELS = np.random.RandomState(1).randint(0, 3, (4, 2, 6))
OTHER = {"torch": "paddle", "paddle": "torch"}


def cross_entropy(kit):
    return torch.nn.functional.cross_entropy if kit is TORCH else paddle.nn.functional.cross_entropy


def recorded(kit, folder, call=lambda net, x: net(x), loss=None, net=None, **options):
    """A run of four steps of two micro-batches."""
    net = kit.net(lambda self, x: self.last(x), last=kit.linear(5, 3)) if net is None else net
    optimizer = kit.sgd(net.parameters(), 0.1)
    loss = loss or cross_entropy(kit)
    with padiff.record(net, dir_path=folder, optimizer=optimizer, **options) as rec:
        for images, labels in zip(IMAGES, LABELS):
            for x, y in zip(images, labels):
                loss(call(net, kit.tensor(x)), kit.tensor(y, None)).backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return folder


@pytest.mark.parametrize("packs", [{}, {"replay_every_n_steps": 2}], ids=["records", "packs"])
@pytest.mark.parametrize("source", KITS)
def test_they_are_those_that_the_loop_was_fed_with(source, packs, tmp_path):
    run, kit = recorded(KITS[source], tmp_path / "run", **packs), KITS[OTHER[source]]
    batches = padiff.batches(run, framework=kit.name)
    assert len(batches) == 8
    assert [(batch.step, batch.micro_batch) for batch in batches] == [(s, m) for s in range(4) for m in range(2)]
    for number, (x, y) in enumerate(batches):
        assert isinstance(x, torch.Tensor if kit is TORCH else paddle.Tensor)
        np.testing.assert_array_equal(kit.numpy(x), IMAGES.reshape(8, 6, 5)[number])
        np.testing.assert_array_equal(kit.numpy(y), LABELS.reshape(8, 6)[number])
        assert str(y.dtype).endswith("int64")
    assert repr(batches) == f"<Batches of {run}: 8 in 4 steps, as {kit.name} tensors>"


def test_they_can_be_asked_for_one_by_one(tmp_path):
    batches = padiff.batches(recorded(TORCH, tmp_path / "run"), framework="torch")
    assert (batches[3].step, batches[-1].step, batches[2:5].steps, batches.steps) == (1, 3, [1, 2], [0, 1, 2, 3])
    assert torch.equal(batches[3].inputs[0], torch.tensor(IMAGES[1, 1]))
    (labels,) = batches[3].labels
    assert torch.equal(labels, torch.tensor(LABELS[1, 1]))
    assert [*batches[3].named] == ["x"]
    with pytest.raises(IndexError):
        batches[8]


def test_some_steps(tmp_path):
    run = recorded(TORCH, tmp_path / "run")
    assert padiff.batches(run, steps=[1, 3], framework="torch").steps == [1, 3]
    with pytest.raises(UsageError, match=r"has no step 7: recorded are 0, 1, 2, 3"):
        padiff.batches(run, steps=[1, 7], framework="torch")


@pytest.mark.parametrize("kit", [TORCH, PADDLE], ids=lambda kit: kit.name)
def test_a_loader_takes_the_dataset(kit, tmp_path):
    dataset = padiff.batches(recorded(TORCH, tmp_path / "run"), framework=kit.name).dataset()
    loaders = torch.utils.data if kit is TORCH else paddle.io
    assert isinstance(dataset, loaders.Dataset)
    found = list(loaders.DataLoader(dataset, batch_size=None, shuffle=False))
    assert len(found) == 8
    for number, (x, y) in enumerate(found):
        np.testing.assert_array_equal(kit.numpy(x), IMAGES.reshape(8, 6, 5)[number])
        np.testing.assert_array_equal(kit.numpy(y), LABELS.reshape(8, 6)[number])


def test_several_nested_inputs_keep_their_order(tmp_path):
    net = TORCH.net(lambda self, x, more, extra=None: self.last(x + more["a"] + extra[1]), last=torch.nn.Linear(5, 3))
    run = recorded(TORCH, tmp_path / "run", lambda net, x: net(x, {"a": 2 * x, "n": 3}, extra=(x, 3 * x)), net=net)
    batch = padiff.batches(run, framework="paddle")[0]
    x, more, extra = batch.inputs
    assert [*more] == ["a"]
    np.testing.assert_array_equal(more["a"].numpy(), 2 * IMAGES[0, 0])
    assert isinstance(extra, tuple)
    np.testing.assert_array_equal(extra[1].numpy(), 3 * IMAGES[0, 0])
    assert [*batch.named] == ["x", "more", "extra"]
    np.testing.assert_array_equal(x.numpy(), IMAGES[0, 0])
    *inputs, labels = batch
    assert len(inputs) == 3
    np.testing.assert_array_equal(labels.numpy(), LABELS[0, 0])


@pytest.mark.parametrize(("packs", "count"), [({}, 2), ({"replay_every_n_steps": 1}, 1)], ids=["records", "packs"])
def test_a_label_of_several_losses(packs, count, tmp_path):
    """Equal labels are not taken for one: the batch would be built otherwise where they are equal by chance."""
    ce = torch.nn.functional.cross_entropy
    run = recorded(TORCH, tmp_path / "run", loss=lambda out, y: ce(out, y) + ce(2 * out, y), **packs)
    assert [len(batch.labels) for batch in padiff.batches(run, framework="torch")] == [count] * 8


def test_no_label_is_no_label(tmp_path):
    run = recorded(TORCH, tmp_path / "run", loss=lambda out, y: (out**2).mean())
    batch = padiff.batches(run, framework="torch")[0]
    assert batch.labels == ()
    *inputs, labels = batch
    assert (len(inputs), labels) == (1, ())


# -- which framework


def test_with_both_imported_it_has_to_be_said(tmp_path):
    run = recorded(TORCH, tmp_path / "run")
    with pytest.raises(UsageError, match="both frameworks are imported here"):
        padiff.batches(run)
    with pytest.raises(UsageError, match="framework is one of 'torch', 'paddle', got 'jax'"):
        padiff.batches(run, framework="jax")
    with pytest.raises(UsageError, match="give like= or framework="):
        padiff.batches(run, framework="torch", like=torch.nn.Linear(1, 1))
    for like in (paddle.nn.Linear(1, 1), paddle.zeros([1])):
        assert isinstance(padiff.batches(run, like=like)[0].inputs[0], paddle.Tensor)


# -- steps without their batch


def test_sketches_are_no_batches_and_are_named(tmp_path, capsys):
    run = recorded(TORCH, tmp_path / "run", detail="sketch", full_every_n_steps=2)
    with pytest.raises(UsageError, match=r"does not hold the batch of steps 1, 3 \(missing='skip' leaves them out\).*"
                       r"Of step 1: of input.x it keeps sketches, not values"):  # fmt: skip
        padiff.batches(run, framework="torch")
    batches = padiff.batches(run, framework="torch", missing="skip")
    assert batches.steps == [0, 2]
    assert "are without steps 1, 3" in capsys.readouterr().err
    with pytest.raises(UsageError, match="missing is 'error' or 'skip', got 'no'"):
        padiff.batches(run, framework="torch", missing="no")


def test_packs_serve_where_records_are_sketches(tmp_path):
    run = recorded(TORCH, tmp_path / "run", detail="sketch", replay_every_n_steps=1)
    for number, (x, y) in enumerate(padiff.batches(run, framework="paddle")):
        np.testing.assert_array_equal(x.numpy(), IMAGES.reshape(8, 6, 5)[number])
        np.testing.assert_array_equal(y.numpy(), LABELS.reshape(8, 6)[number])


def test_a_list_that_leaves_the_model_out_leaves_out_its_inputs(tmp_path):
    net = TORCH.net(lambda self, x: self.last(x), last=torch.nn.Linear(5, 3))
    run = recorded(TORCH, tmp_path / "run", net=net, white_list=["last"])
    with pytest.raises(UsageError, match="its inputs were not recorded"):
        padiff.batches(run, framework="torch")


def test_a_model_that_is_called_in_parts_has_no_inputs_as_a_whole(tmp_path):
    net = torch.nn.ModuleDict({"first": torch.nn.Linear(5, 4), "last": torch.nn.Linear(4, 3)})
    run = recorded(TORCH, tmp_path / "run", lambda net, x: net["last"](net["first"](x)), net=net)
    with pytest.raises(UsageError, match=r"called in parts \(first, last\)"):
        padiff.batches(run, framework="torch")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="is no run folder"):
        padiff.batches(tmp_path, framework="torch")
