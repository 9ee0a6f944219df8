"""Probes of initial weights of layers, and of initialisers."""

from __future__ import annotations

from functools import partial

from padiff_atlas.probe import Group, Probe

# Standard deviation and the 99 % quantile of 20,000 draws vary by some percent.
_drawn = partial(Probe, way="drawn", tolerance=0.05)


def _made(shape: str, initializer: str) -> str:
    """Return the text of a paddle parameter that an initialiser draws."""
    return f"paddle.create_parameter({shape}, 'float32', default_initializer=init.{initializer})"


INITIALISATION = Group(
    "initialisation",
    (
        _drawn(
            "Linear, weight by default",
            "nn.Linear(200, 100).weight",
            mended="nn.Linear(200, 100, weight_attr=init.Uniform(-1 / 200**0.5, 1 / 200**0.5)).weight",
            formula="np.array([1 / 600**0.5, 0.99 / 200**0.5])",
            note="uniform within 1 / inputs ** 0.5 in torch, Xavier's uniform in paddle",
        ),
        _drawn(
            "Linear, bias by default",
            "nn.Linear(200, 20000).bias",
            mended="nn.Linear(200, 20000, bias_attr=init.Uniform(-1 / 200**0.5, 1 / 200**0.5)).bias",
            note="paddle's biases start at zero",
        ),
        _drawn(
            "Conv2d, weight by default",
            "nn.Conv2d(32, 64, 3).weight",
            "nn.Conv2D(32, 64, 3).weight",
            mended="nn.Conv2D(32, 64, 3, weight_attr=init.Uniform(-1 / 288**0.5, 1 / 288**0.5)).weight",
            note="uniform within 1 / fan_in ** 0.5 in torch, Kaiming's normal in paddle",
        ),
        _drawn(
            "Conv2d, bias by default",
            "nn.Conv2d(8, 20000, 3).bias",
            "nn.Conv2D(8, 20000, 3).bias",
            mended="nn.Conv2D(8, 20000, 3, bias_attr=init.Uniform(-1 / 72**0.5, 1 / 72**0.5)).bias",
            note="paddle's biases start at zero",
        ),
        _drawn(
            "ConvTranspose2d, weight by default",
            "nn.ConvTranspose2d(32, 64, 3).weight",
            "nn.Conv2DTranspose(32, 64, 3).weight",
            mended="nn.Conv2DTranspose(32, 64, 3, weight_attr=init.Uniform(-1 / 576**0.5, 1 / 576**0.5)).weight",
        ),
        _drawn(
            "Embedding by default",
            "nn.Embedding(200, 100).weight",
            mended="nn.Embedding(200, 100, weight_attr=init.Normal()).weight",
            note="standard normal in torch, Xavier's uniform in paddle",
        ),
        _drawn("LSTM by default", "nn.LSTM(64, 64).weight_ih_l0"),
        _drawn("LSTM, bias by default", "nn.LSTM(4, 400).bias_ih_l0"),
        _drawn("GRUCell by default", "nn.GRUCell(64, 64).weight_hh"),
        _drawn(
            "MultiheadAttention, projection of queries, by default",
            "nn.MultiheadAttention(96, 4).in_proj_weight[:96]",
            "nn.MultiHeadAttention(96, 4).q_proj.weight",
            mended="nn.MultiHeadAttention(96, 4, weight_attr=init.XavierUniform(fan_in=96, fan_out=288)).q_proj.weight",
            note="torch draws for the three projections as one matrix",
        ),
        _drawn(
            "MultiheadAttention, projection of the output, by default",
            "nn.MultiheadAttention(96, 4).out_proj.weight",
            "nn.MultiHeadAttention(96, 4).out_proj.weight",
            mended="nn.MultiHeadAttention(96, 4, weight_attr=init.Uniform(-1 / 96**0.5, 1 / 96**0.5)).out_proj.weight",
        ),
        _drawn(
            "TransformerEncoderLayer, linear1 by default",
            "nn.TransformerEncoderLayer(64, 4, 256).linear1.weight",
            mended="attr = init.Uniform(-1 / 64**0.5, 1 / 64**0.5)\n"
            "nn.TransformerEncoderLayer(64, 4, 256, weight_attr=attr).linear1.weight",
        ),
        _drawn("BatchNorm2d, weight by default", "nn.BatchNorm2d(40).weight", "nn.BatchNorm2D(40).weight"),
        _drawn("PReLU, weight by default", "nn.PReLU(40).weight", "nn.PReLU(40)._weight"),
        _drawn(
            "xavier_uniform_",
            "init.xavier_uniform_(torch.empty(100, 200))",
            _made("[100, 200]", "XavierUniform()"),
        ),
        _drawn(
            "xavier_normal_",
            "init.xavier_normal_(torch.empty(100, 200))",
            _made("[100, 200]", "XavierNormal()"),
        ),
        _drawn(
            "kaiming_uniform_ by default, of a linear layer's matrix",
            "init.kaiming_uniform_(torch.empty(100, 200))",
            _made("[200, 100]", "KaimingUniform()"),
        ),
        _drawn(
            "kaiming_normal_ by default, of a linear layer's matrix",
            "init.kaiming_normal_(torch.empty(100, 200))",
            _made("[200, 100]", "KaimingNormal()"),
        ),
        _drawn(
            "kaiming_uniform_ of a convolution",
            "init.kaiming_uniform_(torch.empty(64, 32, 3, 3))",
            _made("[64, 32, 3, 3]", "KaimingUniform()"),
        ),
        _drawn(
            "kaiming_uniform_ for leaky_relu, a 5 ** 0.5",
            "init.kaiming_uniform_(torch.empty(100, 200), a=5**0.5)",
            _made("[200, 100]", "KaimingUniform(negative_slope=5**0.5, nonlinearity='leaky_relu')"),
        ),
        _drawn(
            "trunc_normal_",
            "init.trunc_normal_(torch.empty(20000), std=0.02)",
            _made("[20000]", "TruncatedNormal(std=0.02)"),
        ),
        _drawn(
            "trunc_normal_, standard deviation 3",
            "init.trunc_normal_(torch.empty(20000), std=3.0)",
            _made("[20000]", "TruncatedNormal(std=3.0)"),
        ),
        _drawn(
            "normal_",
            "init.normal_(torch.empty(20000))",
            _made("[20000]", "Normal()"),
        ),
        _drawn(
            "uniform_",
            "init.uniform_(torch.empty(20000))",
            _made("[20000]", "Uniform()"),
            mended=_made("[20000]", "Uniform(0.0, 1.0)"),
            note="0 to 1 in torch, -1 to 1 in paddle",
        ),
        _drawn(
            "orthogonal_",
            "init.orthogonal_(torch.empty(100, 200))",
            _made("[100, 200]", "Orthogonal()"),
        ),
        _drawn(
            "dirac_",
            "init.dirac_(torch.empty(8, 8, 3))",
            _made("[8, 8, 3]", "Dirac()"),
        ),
        Probe("calculate_gain of leaky_relu", "init.calculate_gain('leaky_relu', 0.2)"),
    ),
)
