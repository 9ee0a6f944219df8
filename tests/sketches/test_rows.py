"""Samples of many tensors that are copied together, each by the address of its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import padiff
from padiff.frameworks.torch import tensors
from padiff.sketches.samples import Layout, Samples
from padiff.sketches.sketch import ELEMENTS, sketch_of

# More of one length than lie in one piece of memory, in turn with others; two longer than a sample.
LENGTHS = [4, 9, 4, 61, 4, 300] * 250 + [ELEMENTS, 5 * ELEMENTS + 7]


def made(seed):
    """Tensors in no order of their lengths; some lie otherwise than row by row, one is of 16 bits."""
    rng = np.random.default_rng(seed)
    found = [torch.from_numpy(rng.standard_normal(length, np.float32)) for length in LENGTHS]
    found[7] = torch.from_numpy(rng.standard_normal((3, 2), np.float32)).t()
    found[11] = torch.from_numpy(rng.standard_normal(20, np.float32))[::2]
    found[12] = torch.from_numpy(rng.standard_normal(6).astype(np.float16))
    return found


def added(samples, some):
    cuts = [tensors.cut(tensor) for tensor in some]
    return samples.add_all(Layout(cuts), cuts, np.array([cut.address for cut in cuts]))


def row_of(array):
    return sketch_of(np.ascontiguousarray(array)).row()


def test_each_number_is_that_of_its_tensor():
    some, samples = made(0), Samples()
    numbers = added(samples, some)
    assert sorted(numbers) == list(range(len(some)))
    for number, tensor in zip(numbers, some):
        np.testing.assert_array_equal(samples.table[number], row_of(tensor.numpy()))


@pytest.mark.parametrize("closed", [False, True])
def test_differences_lie_in_other_pieces_than_what_they_are_of(closed):
    before, after = made(0), made(1)
    samples = Samples()
    first, second = added(samples, before), added(samples, after)
    # Not in the order in which they were copied: pieces are met in turn.
    order = np.random.default_rng(2).permutation(len(before)).tolist()
    number = samples.differences([second[k] for k in order], [first[k] for k in order])
    if closed:
        samples.close()
    for place, k in enumerate(order):
        expected = after[k].float().numpy() - before[k].float().numpy()
        np.testing.assert_array_equal(samples.table[number + place], row_of(expected))


def test_the_next_step_has_memory_of_the_right_size():
    counts = {}
    for _ in range(2):
        samples = Samples(counts=counts)
        added(samples, made(0))
        samples.close()
    taken = []
    samples = Samples(lambda shape, dtype: taken.append(shape[0]) or np.empty(shape, dtype), counts=counts)
    added(samples, made(0))
    assert sum(taken) == len(LENGTHS)


FREED = torch.zeros(94)[3:].view(7, 13)
FREED.untyped_storage().resize_(0)
EMPTIED = torch.zeros(7, 13)
EMPTIED.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(13, 7).t(),
        torch.zeros(7, 13, dtype=torch.float64),
        torch.zeros(13, 7),
        torch.zeros(7, 13, dtype=torch.complex64).imag,
        torch.zeros(7, 13).to_sparse(),
        torch.zeros(7, 13, device="meta"),
        torch._neg_view(torch.zeros(7, 13)),
        FREED,
        EMPTIED,
    ],
    ids=["turned", "dtype", "shape", "strided", "sparse", "no values", "sign to be changed", "freed", "emptied"],
)
def test_what_lies_otherwise_has_no_address(other):
    parameter = torch.nn.Parameter(torch.zeros(7, 13))
    form = tensors.cut(parameter).form
    gradient = torch.ones(8, 13)[1:]
    found = [tensors.address(each, form) for each in (gradient, parameter, other)]
    assert found == [gradient.data_ptr(), parameter.data_ptr(), 0]
    many = [torch.zeros(7, 13) for _ in range(250)]  # more than are asked at a time
    many[3], locate = parameter, tensors.locator([form] * len(many))
    for few in (many, [*many[:160], gradient, *many[161:]]):
        assert locate(few) == [one.data_ptr() for one in few]
        for place in (0, 150, 249):
            assert locate([*few[:place], other, *few[place + 1 :]]) is None


def assert_stepped(rec, number, expected):
    """A step's gradients, and updates (with ``!``), are the sketches of these values, and no others."""
    found = {
        f"{r.layer}.{r.slot}" + "!" * (r.stage == "update"): r.source.row
        for r in rec.run.steps(number)[0].records
        if r.stage in ("grad", "update") and r.slot in ("weight", "bias")
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], row_of(values), err_msg=f"{name}, step {number}")


def test_what_an_optimizer_steps_may_be_others_in_each_step_in_another_order_and_twice():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7))
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    turned = ["2.weight", "2.bias", "0.weight", "0.bias"]
    orders = [[*named], [*named], turned, ["0.weight", "2.bias"], [*named], ["2.weight", "0.bias", "2.weight"]]
    expected = []
    with padiff.record(model, detail="sketch", optimizer=optimizer) as rec:
        for step, order in enumerate(orders):
            model.zero_grad()
            optimizer.param_groups[0]["params"] = [named[name] for name in order]
            model(torch.randn(5, 7)).square().sum().backward()
            if step == 4:
                named["0.bias"].grad = None
            before = {name: p.detach().numpy().copy() for name, p in named.items()}
            expected.append({name: named[name].grad.numpy().copy() for name in order if named[name].grad is not None})
            optimizer.step()
            expected[-1] |= {f"{name}!": named[name].detach().numpy() - before[name] for name in [*expected[-1]]}
            rec.try_dump()
    for number, step in enumerate(expected[1:], 1):
        stages = [r.stage for r in rec.run.steps(number)[0].records]
        assert stages.count("grad") + stages.count("update") - 1 == len(step)  # of the latter one is the rate
        assert_stepped(rec, number, step)


@pytest.mark.parametrize("turned", ["weight", "bias"])
def test_gradients_that_lie_otherwise_in_some_steps_are_recorded_as_they_are(turned):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    with padiff.record(model, detail="sketch", optimizer=optimizer) as rec:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(5, 7)).square().sum().backward()
            for layer in (model[0], model[2]) if step % 2 else ():
                one = getattr(layer, turned)
                wide = torch.zeros(*one.shape[:-1], 2 * one.shape[-1])
                wide[..., ::2] = one.grad
                one.grad = wide[..., ::2]
            expected.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
            before = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
            optimizer.step()
            expected[-1] |= {f"{n}!": p.detach().numpy() - before[n] for n, p in model.named_parameters()}
            rec.try_dump()
    for number, step in enumerate(expected[1:], 1):  # small tensors of the first one are kept in full
        assert_stepped(rec, number, step)


def amid_an_element():
    """A tensor whose memory begins in the middle of an element."""
    return torch.frombuffer(bytearray(4 * 25 + 1), dtype=torch.float32, count=25, offset=1).view(5, 5)


def test_nothing_is_copied_where_memory_begins_in_the_middle_of_an_element():
    samples = Samples()
    with pytest.raises(ValueError, match="begins there"):
        added(samples, [torch.ones(25), amid_an_element()])
    assert len(samples) == 0


def test_a_parameter_in_the_middle_of_an_element_is_recorded_for_itself():
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    model[0].weight = torch.nn.Parameter(amid_an_element().copy_(torch.randn(5, 5)))
    optimizer, expected = torch.optim.SGD(model.parameters(), 0.1), []
    with padiff.record(model, detail="sketch", optimizer=optimizer) as rec:
        for _ in range(4):
            expected.append(model[0].weight.detach().numpy().copy())
            optimizer.zero_grad()
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            rec.try_dump()
    for number in range(1, 4):
        (weight,) = [r for r in rec.run.steps(number)[0].records if r.site == "0/weight/weight"]
        np.testing.assert_array_equal(weight.source.row, row_of(expected[number]))
