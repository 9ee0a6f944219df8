"""Files that a model is saved into have the same bytes, whatever its layers call their parameters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Python keeps one object of each short literal, and a pickle writes an object once. So a literal of padiff's may
# change what a framework's layers share: this shows in a process that had not imported padiff, so fork it.
SCRIPT = """
import hashlib, io, json, os, pickle, re, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, {framework} as framework
WITHOUT, TRAINED = {{}}, {{}}

def saved_torch(torch):
    n, u = torch.nn, torch.nn.utils
    class Lists(n.Module):
        def __init__(self):
            super().__init__()
            self.list = n.ParameterList(n.Parameter(torch.ones(4)) for _ in range(12))
            self.more = n.ParameterList(n.Parameter(torch.ones(4)) for _ in range(12))
            self.dict = n.ParameterDict({{f"weight_{{k}}": n.Parameter(torch.ones(4)) for k in "gv"}})
        def forward(self, x):
            return x * sum([*self.list, *self.more, *self.dict.values()])
    class Attention(n.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]
    layers = {{
        f"{{kind.__name__}} {{options}}": (kind(4, 4, **options), (3, 2, 4))
        for kind in (n.RNN, n.GRU, n.LSTM)
        for options in ({{}}, {{"num_layers": 2, "bidirectional": True}}, {{"bias": False}})
    }}
    layers["LSTM proj_size"] = n.LSTM(4, 4, proj_size=2), (3, 2, 4)
    layers |= {{kind.__name__: (kind(4, 4), (3, 4)) for kind in (n.RNNCell, n.GRUCell, n.LSTMCell)}}
    layers |= {{
        "attention": (Attention(4, 2), (3, 2, 4)), "attention kdim": (Attention(4, 2, kdim=4, vdim=4), (3, 2, 4)),
        "encoder": (n.TransformerEncoderLayer(4, 2, 8), (3, 2, 4)), "lists": (Lists(), (3, 4)),
        "batch": (n.BatchNorm1d(4), (3, 4)), "group": (n.GroupNorm(2, 4), (3, 4)),
        "instance": (n.InstanceNorm1d(4, affine=True, track_running_stats=True), (3, 4, 2)),
        "layer": (n.LayerNorm(4), (3, 4)), "prelu": (n.PReLU(4), (3, 4)),
        "weight_norm": (u.weight_norm(n.Linear(4, 4)), (3, 4)),
        "spectral_norm": (u.spectral_norm(n.Linear(4, 4)), (3, 4)),
        "parametrized": (u.parametrizations.weight_norm(n.Linear(4, 4)), (3, 4)),
        "deep": (n.Sequential(*(n.Linear(4, 4) for _ in range(12))), (3, 4)),
        "convolutions": (n.Sequential(n.Conv1d(4, 4, 1), n.ConvTranspose1d(4, 4, 1)), (3, 4, 2)),
    }}
    ways = {{"save": torch.save, "state": lambda m, f: torch.save(m.state_dict(), f), "pickle": pickle.dump}}
    return layers, torch.ones, lambda p: torch.optim.SGD(p, 0.1), ways

def saved_paddle(paddle):
    n, u = paddle.nn, paddle.nn.utils
    class Lists(n.Layer):
        def __init__(self):
            super().__init__()
            self.list = n.ParameterList([self.create_parameter([4]) for _ in range(12)])
            self.more = n.ParameterList([self.create_parameter([4]) for _ in range(12)])
        def forward(self, x):
            return x * sum([*self.list, *self.more])
    layers = {{
        f"{{kind.__name__}} {{options}}": (kind(4, 4, **options), (3, 2, 4))
        for kind in (n.SimpleRNN, n.GRU, n.LSTM)
        for options in ({{}}, {{"num_layers": 2, "direction": "bidirect"}})
    }}
    layers |= {{kind.__name__: (kind(4, 4), (3, 4)) for kind in (n.SimpleRNNCell, n.GRUCell, n.LSTMCell)}}
    layers |= {{
        "attention": (n.MultiHeadAttention(4, 2), (3, 2, 4)),
        "encoder": (n.TransformerEncoderLayer(4, 2, 8), (3, 2, 4)),
        "lists": (Lists(), (3, 4)), "batch": (n.BatchNorm1D(4), (3, 4)),
        "layer": (n.LayerNorm(4), (3, 4)), "group": (n.GroupNorm(2, 4), (3, 4)), "prelu": (n.PReLU(4), (3, 4)),
        "weight_norm": (u.weight_norm(n.Linear(4, 4)), (3, 4)),
        "spectral_norm": (u.spectral_norm(n.Linear(4, 4)), (3, 4)),
        "deep": (n.Sequential(*(n.Linear(4, 4) for _ in range(12))), (3, 4)),
        "convolutions": (n.Sequential(n.Conv1D(4, 4, 1), n.Conv1DTranspose(4, 4, 1)), (3, 4, 2)),
    }}
    ways = {{
        "save": lambda m, f: paddle.save(m.state_dict(), f),
        "pickle": lambda m, f: pickle.dump({{k: v.numpy() for k, v in m.state_dict().items()}}, f),
        "names": lambda m, f: pickle.dump([[*vars(x), *x._parameters] for x in m.sublayers(include_self=True)], f),
    }}
    def ones(shape):  # some layers' backward fails for an input without a gradient
        return paddle.to_tensor(np.ones(shape, "float32"), stop_gradient=False)
    return layers, ones, lambda p: paddle.optimizer.SGD(0.1, p), ways

def hashes(recorded):
    if recorded:
        import padiff, padiff_hooks.training
    framework.{seed}(0)
    layers, ones, optimizer, ways = saved_{framework}(framework)
    result = {{}}  # without addresses, by which a pickle names torch's storages
    for name, (layer, shape) in layers.items():
        sgd = optimizer(layer.parameters())
        recorder = padiff.record(layer, f"run-{{len(result)}}", optimizer=sgd) if recorded else None
        if recorder is not None:
            recorder.open()
        for step in range(2):
            output = layer(ones(shape))
            (output[0] if isinstance(output, tuple) else output).sum().backward()
            sgd.step()
            if recorder is not None:
                recorder.try_dump()
        for way, save in ways.items():
            file = io.BytesIO()
            try:
                save(layer, file)
            except Exception as error:
                file.write(type(error).__name__.encode())
            result[f"{{name}}, {{way}}"] = hashlib.sha256(re.sub(rb"\\d{{12,}}", b"", file.getvalue())).hexdigest()
        if recorder is not None:
            recorder.close()
    return result

for recorded in (False, True):
    if os.fork() == 0:
        with open(f"{{recorded}}.json", "w") as file:
            json.dump(hashes(recorded), file)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "seed"), [("torch", "manual_seed"), ("paddle", "seed")])
def test_bytes_of_saved_layers_are_the_same(framework, seed, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(framework=framework, seed=seed))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    plain, recorded = (json.loads((tmp_path / f"{name}.json").read_text()) for name in (False, True))
    assert [name for name in plain if plain[name] != recorded[name]] == []
    assert len(plain) >= 50 and plain.keys() == recorded.keys()
