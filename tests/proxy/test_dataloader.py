"""``check_dataloader``: do two data loaders give the same batches?"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.nets import data

import padiff
from padiff import check_dataloader


class TorchSet(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class PaddleSet(paddle.io.Dataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def loaders(x, y, other_x=None, other_y=None):
    other_x, other_y = x if other_x is None else other_x, y if other_y is None else other_y
    return (
        torch.utils.data.DataLoader(TorchSet(x, y), batch_size=4),
        paddle.io.DataLoader(PaddleSet(other_x, other_y), batch_size=4),
    )


def batches(count=10):
    return data(count, 3), np.arange(count)


def test_equal_loaders_of_both_frameworks_match():
    assert check_dataloader(*loaders(*batches())) is True


def test_the_first_batch_and_tensor_that_differ_are_reported(capsys):
    x, y = batches()
    other = y.copy()
    other[5] = 99
    assert check_dataloader(*loaders(x, y, other_y=other)) is False
    printed = capsys.readouterr().out
    assert "batch 1, batch.1 against batch.1" in printed
    assert "max |diff| 94" in printed


def test_shuffled_batches_are_not_equal_though_their_means_are():
    x, y = batches(4)
    assert check_dataloader(*loaders(x, y, x[::-1].copy(), y)) is False


def test_a_loader_that_ends_early_is_reported(capsys):
    x, y = batches(12)
    assert check_dataloader(*loaders(x, y, x[:8], y[:8])) is False
    assert "the second data loader ends after 2 batches" in capsys.readouterr().out


def test_shapes_and_numbers_of_tensors_that_differ_are_reported(capsys):
    assert check_dataloader([data(2, 3)], [data(3, 2)]) is False
    assert "shapes differ: [2, 3] against [3, 2]" in capsys.readouterr().out
    assert check_dataloader([(data(2), data(2))], [(data(2),)]) is False
    assert "batch 0: 2 against 1 tensors" in capsys.readouterr().out


def test_a_tolerance_may_be_given():
    pair = [data(2, 3)], [data(2, 3) + 0.01]
    assert not check_dataloader(*pair)
    assert check_dataloader(*pair, {"atol": 0.1})
    with pytest.raises(padiff.PadiffError, match=r"unknown key 'atoll'. Nearest: atol"):
        check_dataloader(*pair, {"atoll": 0.1})


def test_dicts_are_compared_by_key_whatever_their_order():
    x, y = data(2, 3), data(2, 3, seed=5)
    assert check_dataloader([{"image": x, "label": y}], [{"label": y, "image": x}])
    assert not check_dataloader([{"image": x, "label": y}], [{"label": x, "image": y}])


def test_nan_on_one_side_only_is_a_difference(capsys):
    x = data(2, 3)
    spoiled = x.copy()
    spoiled[0, 0] = np.nan
    assert not check_dataloader([x], [spoiled])
    assert "1 values are NaN" in capsys.readouterr().out
    assert check_dataloader([spoiled], [spoiled])


def test_two_empty_loaders_compare_nothing_which_is_an_error():
    with pytest.raises(padiff.PadiffError, match="no batch"):
        check_dataloader([], [])
