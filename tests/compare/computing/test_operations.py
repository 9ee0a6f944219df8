"""What functions and layers are computed to be again, against what both frameworks gave."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.compare.diagnose.computing.writer import Writer
from padiff.compare.diagnose.traced import Graph

F, P = torch.nn.functional, paddle.nn.functional
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 6, 8)).astype("float32")
IMAGE = RNG.normal(size=(2, 4, 7, 9)).astype("float32")
Q = RNG.normal(size=(2, 3, 5, 4)).astype("float32")

# A product of a matrix with itself has a Cholesky factor.
SQUARE = X[0] @ X[0].T + np.eye(6, dtype="float32")


def factored(linalg, solve, solve_factor, right):
    """Solutions of linear equations in each way that a framework has."""

    def forward(m, x):
        low, high = linalg.cholesky(x), linalg.cholesky(x, upper=True)
        ways = linalg.solve(x, x[:, :2]) + linalg.inv(x)[:, :2] + solve_factor(x[:, :2], low, upper=False)
        return ways + solve(low, x[:, :2], upper=False) + solve(high, x[:, :2], upper=True) + right(low, x)

    return SQUARE, forward


def from_the_right(low, x):
    return torch.linalg.solve_triangular(low, x[:2], upper=False, left=False).T + torch.linalg.det(low).log()


def transposed(low, x):
    whole = paddle.linalg.triangular_solve(low, x[:, :2], upper=False, transpose=True)
    return whole + paddle.linalg.det(low)


ROWS = torch.tensor([1, 0, 2])
PLACES = paddle.to_tensor([[0, 2], [1, 0]])


def written(x, y):
    x[1] = y[0]
    x[:, 2:4] = 0.5
    return x


def overwritten(x, y):
    x.set_value(y)
    return x


KINDS = RNG.integers(0, 4, (2, 7, 9))
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4]), paddle.to_tensor([0.1, 0.2, 0.3, 0.4])
TORCH = {
    "nll of places": (IMAGE, lambda m, x: F.nll_loss(
        F.log_softmax(x, 1), torch.tensor(KINDS), WEIGHTS[0], reduction="none") * 1),
    "linear": (X, lambda m, x: F.linear(x, m.w, m.b)),
    "layer_norm": (X, lambda m, x: F.layer_norm(x, (8,), m.b)),
    "group_norm": (X, lambda m, x: F.group_norm(x, 3)),
    "gelu": (X, lambda m, x: F.gelu(x, approximate="tanh")),
    "leaky": (X, lambda m, x: F.leaky_relu(x, 0.3)),
    "softplus": (X, lambda m, x: F.softplus(x, 2.0)),
    "glu": (X, lambda m, x: F.glu(x, -1)),
    "softmax": (X, lambda m, x: torch.log_softmax(x, 1)),
    "attention": (Q, lambda m, x: F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True)),
    "var": (X, lambda m, x: x.var(1, keepdim=True) + x.std(-1, unbiased=False, keepdim=True)),
    "norms": (X, lambda m, x: x / x.norm(dim=-1, keepdim=True) + F.normalize(x, dim=1)),
    "parts": (X, lambda m, x: torch.cat(x.chunk(4, -1)[::-1], 1) * torch.stack(x.split([2, 2, 4], -1)[:2], 1).sum()),
    "axes": (X, lambda m, x: x.permute(2, 0, 1).reshape(8, -1).unsqueeze(1).flatten(1)[:, 3]),
    "where": (X, lambda m, x: torch.where(x > 0, x, 2 * x).masked_fill(x < -1, 0.5).clamp(-0.5, 1)),
    "conv": (IMAGE, lambda m, x: F.conv2d(x, m.kernel, m.eight, stride=2, padding=(1, 2), dilation=2, groups=2)),
    "max_pool": (IMAGE, lambda m, x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "avg_pool": (IMAGE, lambda m, x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "avg_pool not counted": (IMAGE, lambda m, x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "pad": (IMAGE, lambda m, x: F.pad(x, (1, 2, 3, 0), mode="reflect")),
    "bilinear": (IMAGE, lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)),
    "nearest": (IMAGE, lambda m, x: F.interpolate(x, size=(5, 13), mode="nearest")),
    "sampled": (IMAGE, lambda m, x: F.grid_sample(x, x[..., :2] * 1.5, align_corners=True)),
    "sampled at the border": (IMAGE, lambda m, x: F.grid_sample(x, x[..., :2] * 1.5, "nearest", "border", False)),
    "grids": (X, lambda m, x: torch.stack(torch.meshgrid(x[0, 0], x[0, 1, :5], indexing="ij")) * 2),
    "rounded": (X, lambda m, x: (x * 3).round() + x),
    "overwritten": (X, lambda m, x: torch.zeros(3, 6, 8).copy_(x[:1] * 2) + x),
    "written": (X, lambda m, x: written(x.clone(), 2 * x)),
    "distances": (X, lambda m, x: torch.cdist(x, 2 * x) + F.cosine_similarity(x, x + 1, dim=-1)[:, None]),
    "einsum": (X, lambda m, x: torch.einsum("bij, bkj -> bik", x, x)),
    "running": (X, lambda m, x: x.cumsum(1) + x.cumprod(-1)),
    "indexed": (X, lambda m, x: x[:, ROWS] * x[ROWS, ROWS].sum() + x[None][0, :, :1]),
    "selected": (X, lambda m, x: x.index_select(1, ROWS) + x.narrow(1, 3, 3)),
    "added": (X, lambda m, x: torch.zeros(3, 5, 8).index_add(1, ROWS, x[:, :3])),
    "scattered": (X, lambda m, x: torch.zeros(3, 6, 8).scatter_add(1, (x > 0).long(), x) * 1),
    "mixed": (X, lambda m, x: torch.lerp(x, x.flip(0), 0.3) + torch.addmm(x[0], x[1], m.w)),
    "repeated": (X, lambda m, x: x.repeat(2, 1, 1) + x.repeat_interleave(2, dim=0)),
    "shuffled": (IMAGE, lambda m, x: F.pixel_shuffle(x, 2)),
    "angles": (X, lambda m, x: x.clamp(-0.9, 0.9).acos() + torch.asin(x.tanh()) + torch.atan2(x, x + 3) + x.asinh()),
    "differences": (X, lambda m, x: x.diff(dim=1)[:, :, :6] + x[:, :5, :6].diagonal(0, 1, 2).sum() + x.diff().sum()),
    "spread": (X, lambda m, x: sum(torch.var_mean(x, 1, keepdim=True)) + torch.std_mean(x, -1, True, keepdim=True)[0]),
    "limited": (X, lambda m, x: x.clamp_min(-0.5) + x.clamp_max(0.5) + torch.logaddexp(x, 2 * x) + x.erfc()),
    "not a number": (X, lambda m, x: torch.nan_to_num((x - 9).sqrt()) + torch.where(x.isnan(), 2 * x, x)),
    "triplets": (X[0], lambda m, x: F.triplet_margin_loss(x, 2 * x, x.flip(0), 0.7) + F.pairwise_distance(x, x + 1)),
    "ranked": (X[0], lambda m, x: F.margin_ranking_loss(x[0], x[1], x[2].sign(), 0.3) + x),
    "soft margin": (X[0], lambda m, x: F.soft_margin_loss(x, x.flip(0).sign()) + x.sigmoid().logit()),
    "angular": (X[0], lambda m, x: F.cosine_embedding_loss(x, x + 1, x[:, 0].sign(), 0.2, reduction="none") + x[:, 1]),
    "filled": (X, lambda m, x: x + torch.full_like(x, 0.25) * torch.ones_like(x) + torch.full((3, 6, 8), 2.0)),
    "as another": (X, lambda m, x: x[:, :1].expand_as(x) * torch.add(x, x, alpha=-0.3)),
    "numbers in an index": (X, lambda m, x: x[ROWS, 2, 1:4] + x[:, ROWS][:, :1, 0] + x[ROWS, :, 3][:, :3]),
    "running sums of exponentials": (X, lambda m, x: torch.logcumsumexp(x, 1) + x.floor() + x.trunc() + x.fmod(0.7)),
    "reduced at places": (X, lambda m, x: torch.zeros(3, 2, 8).scatter_reduce(1, (x > 0).long(), x, "amax") * 2),
    "matrices": (X[0], lambda m, x: torch.kron(x, x[:2]) * x[:, :6].trace()),
    "diagonals": (X[0], lambda m, x: torch.diag(x[:, :6], 1) @ torch.diag(x[0, :5])),
    "linear algebra": factored(torch.linalg, torch.linalg.solve_triangular, torch.cholesky_solve, from_the_right),
    "elementwise": (X, lambda m, x: x.expm1() + x.abs().log1p() + x.erf() + x.sign() + x.abs().log10() + x.atan()),
}  # fmt: skip
PADDLE = {
    "linear": (X, lambda m, x: P.linear(x, m.w, m.b)),
    "layer_norm": (X, lambda m, x: P.layer_norm(x, 8)),
    "gelu": (X, lambda m, x: P.gelu(x, approximate=True)),
    "softmax": (X, lambda m, x: P.softmax(x, axis=1)),
    "add_n": (X, lambda m, x: paddle.add_n([x, 2 * x, paddle.sin(x)]) * 1),
    "nll of places": (IMAGE, lambda m, x: P.nll_loss(P.log_softmax(x, 1), paddle.to_tensor(KINDS), WEIGHTS[1]) * x),
    "at places": (X, lambda m, x: paddle.gather_nd(x, PLACES) + x[2, 3]),
    "added at places": (X, lambda m, x: paddle.scatter_nd_add(paddle.zeros([3, 6, 8]), PLACES[:, :1], x[:2]) * 1),
    "einsum with a parameter": (X, lambda m, x: paddle.einsum("bti,ij,btj->bt", x, m.w, x)),
    "matmul": (X, lambda m, x: paddle.matmul(x, x, transpose_y=True) / 3.0),
    "parts": (X, lambda m, x: paddle.concat(paddle.split(x, [2, 6], axis=-1)[::-1], axis=-1)),
    "axes": (X, lambda m, x: x.transpose([2, 0, 1]).reshape([8, -1]).unsqueeze(1).squeeze(1)),
    "extents of the tensor": (X, lambda m, x: x.reshape([0, -1]).reshape([0, 2, -1])),
    "mean": (X, lambda m, x: x.mean(axis=1, keepdim=True) + x.max(axis=-1, keepdim=True)),
    "conv": (IMAGE, lambda m, x: P.conv2d(x, m.kernel, m.eight, stride=2, padding=1, groups=2)),
    "avg_pool": (IMAGE, lambda m, x: P.avg_pool2d(x, 3, 2, 1)),
    "avg_pool counted": (IMAGE, lambda m, x: P.avg_pool2d(x, 3, 2, 1, exclusive=False)),
    "max_pool": (IMAGE, lambda m, x: P.max_pool2d(x, 3, 2, 1)),
    "bilinear": (IMAGE, lambda m, x: P.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)),
    "sampled": (IMAGE, lambda m, x: P.grid_sample(x, x[..., :2] * 1.5)),
    "overwritten": (X, lambda m, x: overwritten(paddle.zeros([3, 6, 8]), x * 2) + x),
    "written": (X, lambda m, x: written(x.clone(), 2 * x)),
    "indexed": (X, lambda m, x: x[:, paddle.to_tensor([1, 0, 2])] * 2),
    "gathered": (X, lambda m, x: paddle.gather(x, paddle.to_tensor([1, 0, 1]), axis=1) * 1),
    "added": (X, lambda m, x: paddle.index_add(paddle.zeros([3, 6, 8]), paddle.to_tensor([1, 0, 1]), 0, x) * 1),
    "scattered": (X, lambda m, x: paddle.scatter(x, paddle.to_tensor([1, 0, 1]), 2 * x, overwrite=False) * 1),
    "put": (X, lambda m, x: paddle.put_along_axis(x, (x > 0).astype("int64"), 2 * x, 1, reduce="add") * 1),
    "linear algebra": factored(paddle.linalg, paddle.linalg.triangular_solve, paddle.linalg.cholesky_solve, transposed),
    "tiled": (X, lambda m, x: paddle.tile(x, [2, 1, 1]) * 2),
}


def of_torch(forward, layers=()):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w, self.b = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8))
            self.kernel, self.eight = torch.nn.Parameter(torch.randn(8, 2, 3, 3)), torch.nn.Parameter(torch.randn(8))
            self.inside = torch.nn.Sequential(*layers)

        def forward(self, x):
            return forward(self, x)

    return Net(), torch.tensor


def of_paddle(forward, layers=()):
    class Net(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            paddle.seed(0)
            self.w, self.b = self.create_parameter([8, 8]), self.create_parameter([8], is_bias=True)
            self.kernel, self.eight = self.create_parameter([8, 2, 3, 3]), self.create_parameter([8], is_bias=True)
            self.inside = paddle.nn.Sequential(*layers)

        def forward(self, x):
            return forward(self, x)

    return Net(), paddle.to_tensor


def computed_again(net, tensor, values):
    """What comes out of a net, as it was recorded and as the trace is computed again."""
    with padiff.record(net) as rec:
        net(tensor(values))
        rec.try_dump()
    step = rec.run.steps(0)[0]
    graph = Graph(step.trace, rec.run.info.layers)
    end = next(call for call in step.trace.calls if call.layer == "(root)" and not call.function).outputs[0].tensor
    opened = {operand.tensor for call in step.trace.calls for operand in call.outputs}
    writer = Writer(graph, step, rec.run.info)
    formula = writer.write(end, opened)
    return formula, writer.value(end)


def near(formula, recorded):
    made = formula.values[formula.end]
    return made.shape == recorded.shape and np.allclose(made, recorded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TORCH)
def test_functions_of_torch(name):
    values, forward = TORCH[name]
    formula, recorded = computed_again(*of_torch(forward), values)
    assert formula.nodes[formula.end].operation, "it was taken as it is"
    assert near(formula, recorded)


@pytest.mark.parametrize("name", PADDLE)
def test_functions_of_paddle(name):
    values, forward = PADDLE[name]
    formula, recorded = computed_again(*of_paddle(forward), values)
    assert formula.nodes[formula.end].operation, "it was taken as it is"
    assert near(formula, recorded)


LAYERS = {
    "linear": (X, "Linear", (8, 5), (8, 5)),
    "layer norm": (X, "LayerNorm", (8,), (8,)),
    "group norm": (IMAGE, "GroupNorm", (2, 4), (2, 4)),
    "batch norm": (IMAGE, "BatchNorm2d", (4,), (4,)),
    "conv": (IMAGE, "Conv2d", (4, 6, 3, 2, 1), (4, 6, 3, 2, 1)),
    "transposed conv": (IMAGE, "ConvTranspose2d", (4, 6, 3, 2, 1), (4, 6, 3, 2, 1)),
    "global pool": (IMAGE, "AdaptiveAvgPool2d", (1,), (1,)),
    "gelu": (X, "GELU", (), ()),
    "leaky relu": (X, "LeakyReLU", (0.2,), (0.2,)),
}
_OF_PADDLE = {"BatchNorm2d": "BatchNorm2D", "Conv2d": "Conv2D", "ConvTranspose2d": "Conv2DTranspose",
              "AdaptiveAvgPool2d": "AdaptiveAvgPool2D"}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_both_frameworks(name):
    values, kind, of_torch_, of_paddle_ = LAYERS[name]
    nets = (
        of_torch(lambda m, x: m.inside(x), [getattr(torch.nn, kind)(*of_torch_)]),
        of_paddle(lambda m, x: m.inside(x), [getattr(paddle.nn, _OF_PADDLE.get(kind, kind))(*of_paddle_)]),
    )
    for net, tensor in nets:
        formula, recorded = computed_again(net, tensor, values)
        assert formula.nodes[formula.end].operation, "it was taken as it is"
        assert near(formula, recorded)


@pytest.mark.parametrize("kind", ["AvgPool2d", "MaxPool2d"])
def test_pooling_layers(kind):  # of torch: paddle's do not say their kernel's size
    net, tensor = of_torch(lambda m, x: m.inside(x), [getattr(torch.nn, kind)(3, 2, 1)])
    formula, recorded = computed_again(net, tensor, IMAGE)
    assert formula.nodes[formula.end].operation == "pool"
    assert near(formula, recorded)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers(kind):
    for net, tensor in (
        of_torch(lambda m, x: m.inside[0](x)[0] * 1, [getattr(torch.nn, kind)(8, 5, batch_first=True)]),
        of_paddle(lambda m, x: m.inside[0](x)[0] * 1, [getattr(paddle.nn, kind)(8, 5)]),
    ):
        formula, recorded = computed_again(net, tensor, X)
        assert kind.lower() in [node.operation for node in formula.nodes]
        assert near(formula, recorded)


def test_attention_of_several_heads():
    net, tensor = of_torch(
        lambda m, x: m.inside[0](x, x, x)[0] * 1, [torch.nn.MultiheadAttention(8, 2, batch_first=True)]
    )
    formula, recorded = computed_again(net, tensor, X)
    assert "softmax" in [node.operation for node in formula.nodes]
    assert near(formula, recorded)
