"""Probes of attention and its masks, embeddings, and recurrent layers."""

from __future__ import annotations

import numpy as np

from padiff_atlas.probe import Group, Probe

_RNG = np.random.default_rng(4)
_CAUSAL = np.tril(np.ones((5, 5), dtype=bool))

_MHA = "layer = nn.MultiheadAttention(8, 2, batch_first=True)\n", "layer = nn.MultiHeadAttention(8, 2)\n"


def _heads_last(more: str = "") -> str:
    """Return paddle's call with the axes in paddle's order and the result in torch's order."""
    call = f"F.scaled_dot_product_attention(q, k, v{more})"
    return f"q, k, v = (t.transpose([0, 2, 1, 3]) for t in (q, k, v))\n{call}.transpose([0, 2, 1, 3])"


ATTENTION = Group(
    "attention",
    (
        Probe("MultiheadAttention", f"{_MHA[0]}layer(x, x, x, need_weights=False)", f"{_MHA[1]}layer(x, x, x)"),
        Probe(
            "MultiheadAttention, order of axes by default",
            "layer = nn.MultiheadAttention(8, 2)\nlayer(x, x, x, need_weights=False)",
            f"{_MHA[1]}layer(x, x, x)",
            mended=f"{_MHA[1]}x = x.transpose([1, 0, 2])\nlayer(x, x, x).transpose([1, 0, 2])",
            mended_torch=f"{_MHA[0]}layer(x, x, x, need_weights=False)",
            note="(sequence, batch, width) in torch, (batch, sequence, width) in paddle",
        ),
        Probe(
            "MultiheadAttention, boolean mask",
            f"{_MHA[0]}layer(x, x, x, attn_mask=mask, need_weights=False)",
            f"{_MHA[1]}layer(x, x, x, attn_mask=mask)",
            mended=f"{_MHA[1]}layer(x, x, x, attn_mask=~mask)",
            note="True keeps a place out in torch and lets it in in paddle",
        ),
        Probe(
            "MultiheadAttention, mask of floats",
            f"{_MHA[0]}layer(x, x, x, attn_mask=bias, need_weights=False)",
            f"{_MHA[1]}layer(x, x, x, attn_mask=bias)",
        ),
        Probe(
            "MultiheadAttention, weights",
            f"{_MHA[0]}layer(x, x, x)[1]",
            "layer = nn.MultiHeadAttention(8, 2, need_weights=True)\nlayer(x, x, x)[1]",
            mended="layer = nn.MultiHeadAttention(8, 2, need_weights=True)\nlayer(x, x, x)[1].mean(1)",
            note="torch gives the mean over the heads, paddle each head's",
        ),
        Probe(
            "scaled_dot_product_attention, order of axes",
            "F.scaled_dot_product_attention(q, k, v)",
            mended=_heads_last(""),
            note="(batch, heads, sequence, width) in torch, (batch, sequence, heads, width) in paddle",
        ),
        Probe(
            "scaled_dot_product_attention",
            "F.scaled_dot_product_attention(q, k, v)",
            _heads_last(""),
        ),
        Probe(
            "scaled_dot_product_attention, causal",
            "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
            _heads_last(", is_causal=True"),
        ),
        Probe(
            "scaled_dot_product_attention, boolean mask",
            "F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)",
            _heads_last(", attn_mask=~mask"),
        ),
        Probe(
            "scaled_dot_product_attention, mask of floats",
            "F.scaled_dot_product_attention(q, k, v, attn_mask=bias)",
            _heads_last(", attn_mask=bias"),
        ),
        Probe(
            "Transformer.generate_square_subsequent_mask",
            "nn.Transformer.generate_square_subsequent_mask(5)",
            "nn.Transformer.generate_square_subsequent_mask(nn.Transformer, 5)",
        ),
        Probe(
            "TransformerEncoderLayer",
            "layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)\nlayer(x)",
            "layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)\nlayer(x)",
        ),
        Probe(
            "TransformerEncoderLayer, normalisation first",
            "layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)\nlayer(x)",
            "layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, normalize_before=True)\nlayer(x)",
        ),
        Probe(
            "TransformerEncoderLayer, evaluating, boolean mask",
            "layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)\n"
            "layer.eval()\nlayer(x, src_mask=mask)",
            "layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)\nlayer.eval()\nlayer(x, src_mask=mask)",
            mended="layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)\nlayer.eval()\nlayer(x, src_mask=~mask)",
            note="True keeps a place out in torch and lets it in in paddle",
        ),
    ),
    {
        "x": _RNG.normal(size=(2, 5, 8)),
        "q": _RNG.normal(size=(2, 2, 5, 4)),
        "k": _RNG.normal(size=(2, 2, 5, 4)),
        "v": _RNG.normal(size=(2, 2, 5, 4)),
        "mask": ~_CAUSAL,
        "bias": np.where(_CAUSAL, 0.0, -1e9),
    },
)


def _looked_up(table: str) -> str:
    """Return paddle's lookup in which the first row is read but receives no gradient."""
    return (
        f"padding = paddle.arange(6)[:, None] == 0\nF.embedding(ids, paddle.where(padding, {table}.detach(), {table}))"
    )


EMBEDDINGS = Group(
    "embeddings",
    (
        Probe("embedding", "F.embedding(ids, table)"),
        Probe(
            "embedding, padding_idx",
            "F.embedding(ids, table, padding_idx=0)",
            mended=_looked_up("table"),
            formula="table[ids]",
            note="paddle gives zeros at padding_idx whatever the table holds; torch looks the row up, and gives it "
            "no gradient",
        ),
        Probe(
            "embedding, gradient with padding_idx, called so",
            "F.embedding(ids, table, padding_idx=0)",
            _looked_up("table"),
            way="gradient",
        ),
        Probe(
            "Embedding, padding_idx",
            "layer = nn.Embedding(6, 4, padding_idx=0)\nlayer(ids)",
            mended=f"layer = nn.Embedding(6, 4)\n{_looked_up('layer.weight')}",
            note="as with the function",
        ),
        Probe(
            "embedding, padding_idx counted from the end",
            "F.embedding(ids, table, padding_idx=-6)",
            mended=_looked_up("table"),
            note="as with a positive one",
        ),
        Probe("embedding, gradient with padding_idx", "F.embedding(ids, table, padding_idx=0)", way="gradient"),
        Probe("embedding, max_norm", "F.embedding(ids, table, max_norm=1.0)"),
        Probe("embedding, gradient by frequency", "F.embedding(ids, table, scale_grad_by_freq=True)", way="gradient"),
        Probe("one_hot", "F.one_hot(ids, 6)"),
    ),
    {"ids": np.array([[0, 2, 5], [1, 0, 2]]), "table": _RNG.normal(size=(6, 4))},
)


def _recurrent(
    name: str, torch: str, paddle: str = "", tail: str = "(x)[0]", mended: str = "", note: str = ""
) -> Probe:
    text, paddle_text = f"layer = {torch}\nlayer{tail}", f"layer = {paddle or torch}\nlayer{tail}"
    return Probe(name, text, paddle_text, mended=mended, note=note)


RECURRENT = Group(
    "recurrent",
    (
        _recurrent("LSTM", "nn.LSTM(4, 3, batch_first=True)", "nn.LSTM(4, 3)"),
        _recurrent("LSTM, last states", "nn.LSTM(4, 3, batch_first=True)", "nn.LSTM(4, 3)", "(x)[1]"),
        _recurrent(
            "LSTM, order of axes by default",
            "nn.LSTM(4, 3)",
            mended="layer = nn.LSTM(4, 3, time_major=True)\nlayer(x)[0]",
            note="(sequence, batch, width) in torch, (batch, sequence, width) in paddle",
        ),
        _recurrent(
            "LSTM, two layers, both directions",
            "nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)",
            "nn.LSTM(4, 3, num_layers=2, direction='bidirect')",
        ),
        _recurrent("GRU", "nn.GRU(4, 3, batch_first=True)", "nn.GRU(4, 3)"),
        _recurrent("RNN", "nn.RNN(4, 3, batch_first=True)", "nn.SimpleRNN(4, 3)"),
        _recurrent(
            "RNN, relu", "nn.RNN(4, 3, batch_first=True, nonlinearity='relu')", "nn.SimpleRNN(4, 3, activation='relu')"
        ),
        _recurrent("LSTMCell", "nn.LSTMCell(4, 3)", tail="(x[:, 0])[0]"),
        Probe("GRUCell", "layer = nn.GRUCell(4, 3)\nlayer(x[:, 0])", "layer = nn.GRUCell(4, 3)\nlayer(x[:, 0])[0]"),
        Probe(
            "GRUCell, outputs",
            "layer = nn.GRUCell(4, 3)\nlayer(x[:, 0])",
            mended="layer = nn.GRUCell(4, 3)\nlayer(x[:, 0])[0]",
            note="paddle gives the output and the state, which are the same",
        ),
    ),
    {"x": _RNG.normal(size=(2, 5, 4))},
)
