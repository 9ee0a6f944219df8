"""A small transformer in torch, in torch with other nesting, and in paddle: each may have one mistake between its
layers. All three are written differently: query, key and value in one; activations as functions and as layers;
attention by hand, by einsum, by the framework's own function; masks as booleans and added up.
"""

from __future__ import annotations

import math

import numpy as np
import paddle
import paddle.nn.functional as paddle_f
import torch
import torch.nn.functional as torch_f

import padiff

WORDS, WIDTH, HEADS, LENGTH, BATCH, BLOCKS = 20, 16, 2, 8, 4, 2
#: Mistakes, each in the code between layers of the second block, or before and after the blocks.
FAULTS = ("residual", "last residual", "scale", "factor", "axis", "mask", "gelu", "activation")


# -- the reference -------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).bool(), persistent=False)

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = (w(x).view(n, length, HEADS, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        shares = torch_f.softmax(scores, dim=-1)
        return self.wo((shares @ v).transpose(1, 2).reshape(n, length, WIDTH))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = torch.nn.LayerNorm(WIDTH), Attention(), torch.nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(torch_f.gelu(self.fc1(self.norm2(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.pos = torch.nn.Parameter(0.3 * torch.randn(LENGTH, WIDTH))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.mid = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.emb(ids) * math.sqrt(WIDTH) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(torch_f.relu(self.mid(self.norm(x))))


# -- the same with other nesting -----------------------------------------------------------------------------------


class Feed(torch.nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.act = torch.nn.GELU(approximate="tanh" if fault == "gelu" else "none")

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Flat(torch.nn.Module):
    """Nothing but lists of layers: what the blocks' code does above, the model's own does here."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.tok = torch.nn.Embedding(WORDS, WIDTH)
        self.places = torch.nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.n1, self.n2 = (torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(BLOCKS)) for _ in range(2))
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(BLOCKS))
        self.out = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.ff = torch.nn.ModuleList(Feed(fault if k == BLOCKS - 1 else "") for k in range(BLOCKS))
        self.ln, self.lin, self.act = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()
        self.lm = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.tok(ids)
        if self.fault != "factor":
            x = x * WIDTH**0.5
        x = self.places + x
        for k in range(BLOCKS):
            fault = self.fault if k == BLOCKS - 1 else ""
            y = self.out[k](self.attended(k, self.n1[k](x), fault))
            x = y if fault == "residual" else y + x
            y = self.ff[k](self.n2[k](x))
            x = y if fault == "last residual" else x + y
        x = self.lin(self.ln(x))
        return self.lm(x if self.fault == "activation" else self.act(x))

    def attended(self, k, h, fault):
        n, length, _ = h.shape
        q, key, v = (part.reshape(n, length, HEADS, -1).permute(0, 2, 1, 3) for part in self.qkv[k](h).split(WIDTH, -1))
        lower = torch.tril(torch.ones(length, length)).bool()
        if fault in ("axis", "") and k == BLOCKS - 1:  # by einsum, and the query scaled before
            scores = torch.einsum("bhqd,bhkd->bhqk", q * (WIDTH // HEADS) ** -0.5, key)
            shares = torch.softmax(torch.where(lower, scores, torch.tensor(-1e9)), 1 if fault == "axis" else -1)
            return torch.einsum("bhqk,bhkd->bqhd", shares, v).reshape(n, length, WIDTH)
        more = {"attn_mask": ~lower} if fault == "mask" else {"is_causal": True}
        more |= {"scale": 0.25} if fault == "scale" else {}
        return torch_f.scaled_dot_product_attention(q, key, v, **more).permute(0, 2, 1, 3).flatten(2)


# -- the same in paddle --------------------------------------------------------------------------------------------


class PortedAttention(paddle.nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (paddle.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        n, length, _ = x.shape
        shape = [n, length, HEADS, WIDTH // HEADS]
        q, k, v = (w(x).reshape(shape).transpose([0, 2, 1, 3]) for w in (self.q_proj, self.k_proj, self.v_proj))
        scores = paddle.matmul(q, k, transpose_y=True) * (WIDTH // HEADS) ** (-1 if self.fault == "scale" else -0.5)
        lower = paddle.tril(paddle.ones([length, length]))
        away = lower != 0 if self.fault == "mask" else lower == 0
        scores = scores + paddle.where(away, paddle.full([length, length], -1e9), paddle.zeros([length, length]))
        shares = paddle_f.softmax(scores, axis=1 if self.fault == "axis" else -1)
        return self.out_proj(paddle.matmul(shares, v).transpose([0, 2, 1, 3]).reshape([n, length, WIDTH]))


class PortedBlock(paddle.nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.ln_1, self.self_attn = paddle.nn.LayerNorm(WIDTH), PortedAttention(fault)
        self.ln_2 = paddle.nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = paddle.nn.Linear(WIDTH, 4 * WIDTH), paddle.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.self_attn(self.ln_1(x))
        x = y if self.fault == "residual" else y + x
        y = self.linear2(paddle_f.gelu(self.linear1(self.ln_2(x)), approximate=self.fault == "gelu"))
        return y if self.fault == "last residual" else x + y


class Port(paddle.nn.Layer):
    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.wte, self.wpe = paddle.nn.Embedding(WORDS, WIDTH), self.create_parameter([LENGTH, WIDTH])
        self.layers = paddle.nn.LayerList([PortedBlock(fault if k == BLOCKS - 1 else "") for k in range(BLOCKS)])
        self.final, self.proj = paddle.nn.LayerNorm(WIDTH), paddle.nn.Linear(WIDTH, WIDTH)
        self.relu, self.lm = paddle.nn.ReLU(), paddle.nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.wte(ids)
        if self.fault != "factor":
            x = x * math.sqrt(WIDTH)
        x = x + self.wpe
        for block in self.layers:
            x = block(x)
        x = self.proj(self.final(x))
        return self.lm(x if self.fault == "activation" else self.relu(x))


# -- trainings -----------------------------------------------------------------------------------------------------


def _start():
    torch.manual_seed(0)
    return {name: value.numpy() for name, value in Net().state_dict().items()}


START = _start()


def _flat_state():
    state = {"tok.weight": START["emb.weight"], "places": START["pos"]}
    for what in ("weight", "bias"):
        for k in range(BLOCKS):
            own = {name: START[f"blocks.{k}.{name}.{what}"] for name in ("norm1", "norm2", "attn.wo", "fc1", "fc2")}
            parts = [START[f"blocks.{k}.attn.{name}.{what}"] for name in ("wq", "wk", "wv")]
            state |= {f"n1.{k}.{what}": own["norm1"], f"n2.{k}.{what}": own["norm2"], f"out.{k}.{what}": own["attn.wo"]}
            state |= {f"ff.{k}.up.{what}": own["fc1"], f"ff.{k}.down.{what}": own["fc2"]}
            state[f"qkv.{k}.{what}"] = np.concatenate(parts)
        for name, other in (("ln", "norm"), ("lin", "mid"), ("lm", "head")):
            state[f"{name}.{what}"] = START[f"{other}.{what}"]
    return {name: torch.tensor(value) for name, value in state.items()}


def _port_state():
    names = {"wte": "emb", "final": "norm", "proj": "mid", "lm": "head"}
    for k in range(BLOCKS):
        inner = {"ln_1": "norm1", "ln_2": "norm2", "linear1": "fc1", "linear2": "fc2"}
        inner |= {f"self_attn.{one}_proj": f"attn.w{other}" for one, other in zip(("q", "k", "v", "out"), "qkvo")}
        names |= {f"layers.{k}.{one}": f"blocks.{k}.{other}" for one, other in inner.items()}
    state = {"wpe": paddle.to_tensor(START["pos"])}
    for one, other in names.items():
        for what in ("weight", "bias"):
            value = START.get(f"{other}.{what}")
            if value is not None:
                turned = value.ndim == 2 and one != "wte"
                state[f"{one}.{what}"] = paddle.to_tensor(value.T.copy() if turned else value)
    return state


def model_of(name, fault=""):
    """``net``, ``flat`` or ``port``, from equal weights."""
    if name == "port":
        model = Port(fault)
        model.set_state_dict(_port_state())
    else:
        model = Net() if name == "net" else Flat(fault)
        state = {key: torch.tensor(value) for key, value in START.items()} if name == "net" else _flat_state()
        model.load_state_dict(state)
    return model


def trained(model, folder=None, steps=2, **options):
    """The run of a training: in memory, or of a folder."""
    is_torch = isinstance(model, torch.nn.Module)
    tensor, loss_of = (torch.tensor, torch_f.cross_entropy) if is_torch else (paddle.to_tensor, paddle_f.cross_entropy)
    if is_torch:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
    else:
        optimizer = paddle.optimizer.SGD(0.05, parameters=model.parameters())
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for number in range(steps):
            rng = np.random.default_rng(number)
            ids, labels = (tensor(rng.integers(0, WORDS, (BATCH, LENGTH))) for _ in range(2))
            loss = loss_of(model(ids).flatten(0, 1), labels.flatten())
            loss.backward()
            rec.log_loss(loss)
            optimizer.step()
            optimizer.zero_grad() if is_torch else optimizer.clear_grad()
            rec.try_dump()
    return rec.run if folder is None else padiff.open_run(folder)
