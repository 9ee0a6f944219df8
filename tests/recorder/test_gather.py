"""Samples are read from tensors' memory, and gradients heard of, without torch's own detours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from padiff.frameworks.torch import tensors
from padiff.sketches.sketch import ELEMENTS, cut_of

SIZES = (1, 2, 61, ELEMENTS - 1, ELEMENTS, ELEMENTS + 1, 5 * ELEMENTS + 7, 100_003)


def copied(cut):
    row = np.zeros(cut.kind[0], cut.kind[1])
    cut.copy_to(row)
    return row


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("offset", [0, 1, 3, 122])
def test_a_sample_read_from_memory_is_that_of_the_values(size, dtype, offset):
    whole = (torch.arange(size + offset) % 251).to(dtype)
    tensor = whole[offset:]
    expected = copied(cut_of(tensor.numpy().copy()))
    np.testing.assert_array_equal(copied(tensors.cut(tensor)), expected)
    whole.add_(1) if dtype != torch.bool else whole.logical_not_()
    assert not np.array_equal(copied(tensors.cut(tensor)), expected)


def test_memory_that_was_given_back_is_not_read():
    tensor = torch.zeros(9000)
    tensor.untyped_storage().resize_(400)
    assert tensors.cut(tensor) is None
    tensor.untyped_storage().resize_(0)
    assert tensors.cut(tensor) is None


def test_another_hook_on_the_same_gradient_is_called_too_and_each_is_taken_off_alone():
    from padiff.frameworks.torch import hooks

    seen = []
    leaf = torch.ones(3, requires_grad=True)
    output = leaf * 2
    own = hooks.on_gradient(output, lambda g: seen.append("own"))
    other = output.register_hook(lambda g: seen.append("other"))
    third = hooks.on_gradient(output, lambda g: seen.append("third"))
    output.sum().backward(retain_graph=True)
    assert seen == ["own", "other", "third"]
    own.remove()
    third.remove()
    output.sum().backward(retain_graph=True)
    assert seen == ["own", "other", "third", "other"]
    other.remove()
    output.sum().backward()
    assert len(seen) == 4
    assert hooks.on_gradient(torch.ones(3), print) is None
