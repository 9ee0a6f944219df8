"""Recurrent nets: the frameworks' layers against each other, and cells written by hand."""

from __future__ import annotations

import numpy as np
from kit.frameworks import TORCH

from .copying import put, put_dense, same, value
from .pair import links, normal, pair, tokens

WIDTH, LENGTH, VOCABULARY = 8, 5, 11
SERIES = (normal(2, LENGTH, WIDTH),)
IDS = (tokens(2, LENGTH, vocabulary=VOCABULARY),)
NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def batch_first(kit, cell, inputs, layers=1, both=False):
    """One of the framework's recurrent layers, batch first."""
    if kit is TORCH:
        return cell(inputs, WIDTH, num_layers=layers, bidirectional=both, batch_first=True)
    return cell(inputs, WIDTH, num_layers=layers, direction="bidirect" if both else "forward")


def stacked(kit, both=True):
    """One LSTM of two layers."""

    class Tagger(kit.Net):
        def build(self):
            self.lstm = batch_first(kit, kit.LSTM, WIDTH, layers=2, both=both)
            self.fc = kit.linear(2 * WIDTH if both else WIDTH, 4)

        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    return Tagger()


def two_lstms(kit):
    """Two bidirectional LSTMs of one layer, the second defined first."""

    class Tagger(kit.Net):
        def build(self):
            self.head = kit.linear(2 * WIDTH, 4)
            self.rnn_2 = batch_first(kit, kit.LSTM, 2 * WIDTH, both=True)
            self.rnn_1 = batch_first(kit, kit.LSTM, WIDTH, both=True)

        def forward(self, x):
            return self.head(self.rnn_2(self.rnn_1(x)[0])[0])

    return Tagger()


def carry_to_two(ref, cand):
    same(ref, "fc", cand, "head")
    for layer, path in ((0, "rnn_1"), (1, "rnn_2")):
        for name in NAMES:
            for end in ("", "_reverse"):
                put(cand, path, f"{name}_l0{end}", value(ref, "lstm", f"{name}_l{layer}{end}"))


def single(kit):
    """One LSTM of one layer, with torch's two biases."""

    return kit.net(
        lambda net, x: net.fc(net.lstm(x)[0][:, -1]), lstm=batch_first(kit, kit.LSTM, WIDTH), fc=kit.linear(WIDTH, 4)
    )


def by_gates(kit):
    """A cell with one Linear layer for each gate, on input and state together; one bias each."""

    class LSTMCell(kit.Net):
        def build(self):
            self.forget_gate, self.input_gate = kit.linear(2 * WIDTH, WIDTH), kit.linear(2 * WIDTH, WIDTH)
            self.output_gate, self.candidate = kit.linear(2 * WIDTH, WIDTH), kit.linear(2 * WIDTH, WIDTH)

        def forward(self, x, h, c):
            xh = kit.cat([x, h], 1)
            c = kit.sigmoid(self.forget_gate(xh)) * c + kit.sigmoid(self.input_gate(xh)) * kit.tanh(self.candidate(xh))
            return kit.sigmoid(self.output_gate(xh)) * kit.tanh(c), c

    return _unrolled(kit, LSTMCell())


def one_bias(kit):
    """A cell with all gates in one Linear layer for the input, with bias, and one for the state, without."""

    class LSTMCell(kit.Net):
        def build(self):
            self.h2h = kit.linear(WIDTH, 4 * WIDTH, bias=False)
            self.x2h = kit.linear(WIDTH, 4 * WIDTH)

        def forward(self, x, h, c):
            gates = self.x2h(x) + self.h2h(h)
            i, f, g, o = (gates[:, part * WIDTH : (part + 1) * WIDTH] for part in range(4))
            c = kit.sigmoid(f) * c + kit.sigmoid(i) * kit.tanh(g)
            return kit.sigmoid(o) * kit.tanh(c), c

    return _unrolled(kit, LSTMCell())


def _unrolled(kit, cell):
    class Net(kit.Net):
        def build(self):
            self.cell, self.out = cell, kit.linear(WIDTH, 4)

        def forward(self, x):
            h = c = kit.zeros(x.shape[0], WIDTH)
            for step in range(x.shape[1]):
                h, c = self.cell(x[:, step], h, c)
            return self.out(h)

    return Net()


def _lstm(ref):
    return (value(ref, "lstm", f"{name}_l0") for name in NAMES)


def carry_to_gates(ref, cand):
    same(ref, "fc", cand, "out")
    w_ih, w_hh, b_ih, b_hh = _lstm(ref)
    both, bias = np.concatenate([w_ih, w_hh], 1), b_ih + b_hh
    # torch's order of gates: input, forget, cell, output.
    for part, name in enumerate(("input_gate", "forget_gate", "candidate", "output_gate")):
        rows = slice(part * WIDTH, (part + 1) * WIDTH)
        put_dense(cand, f"cell.{name}", both[rows], bias[rows])


def carry_to_one_bias(ref, cand):
    same(ref, "fc", cand, "out")
    w_ih, w_hh, b_ih, b_hh = _lstm(ref)
    put_dense(cand, "cell.x2h", w_ih, b_ih + b_hh)
    put_dense(cand, "cell.h2h", w_hh, None)


def classifier(kit):
    """Embedding, GRU, head."""

    class TextClassifier(kit.Net):
        def build(self):
            self.embedding = kit.embedding(VOCABULARY, WIDTH)
            self.gru = batch_first(kit, kit.GRU, WIDTH, layers=2)
            self.classifier = kit.Sequential(kit.Dropout(0.1), kit.linear(WIDTH, 4))

        def forward(self, ids):
            return self.classifier(self.gru(self.embedding(ids))[0][:, -1])

    return TextClassifier()


def cells(kit):
    """The same GRU as the framework's cells, one for each layer, called step by step."""

    class Net(kit.Net):
        def build(self):
            self.decide = kit.linear(WIDTH, 4)
            self.cells = kit.List([kit.nn.GRUCell(WIDTH, WIDTH) for _ in range(2)])
            self.lookup = kit.embedding(VOCABULARY, WIDTH)

        def forward(self, ids):
            x = self.lookup(ids)
            states = [kit.zeros(x.shape[0], WIDTH) for _ in self.cells]
            for step in range(x.shape[1]):
                out = x[:, step]
                for index, cell in enumerate(self.cells):
                    out = cell(out, states[index])
                    out = out[0] if isinstance(out, tuple) else out
                    states[index] = out
            return self.decide(out)

    return Net()


def carry_to_cells(ref, cand):
    same(ref, "embedding", cand, "lookup")
    same(ref, "classifier.1", cand, "decide")
    for layer in (0, 1):
        for name in NAMES:
            put(cand, f"cells.{layer}", name, value(ref, "gru", f"{name}_l{layer}"))


PAIRS = (
    # torch's LSTM of two layers against paddle's, whose parameters are found under its cells as well.
    pair("lstm_torch_to_paddle", stacked, stacked, SERIES, links("lstm lstm\n fc fc")),
    # Two layers in one against two layers apart, both bidirectional, the second defined first.
    pair("lstm_stack_to_two", stacked, two_lstms, SERIES, links("lstm rnn_1\n lstm rnn_2\n fc head"), carry_to_two),
    # One LSTM against four Linear layers, one for each gate, in another order than the gates; biases are sums.
    pair(
        "lstm_to_gates",
        single,
        by_gates,
        SERIES,
        links(
            "\n".join(f"lstm cell.{name}" for name in ("input_gate", "forget_gate", "candidate", "output_gate"))
            + "\n fc out"
        ),
        carry_to_gates,
    ),
    # The same between two torch models: one LSTM against two Linear layers with one bias between them.
    pair(
        "lstm_to_one_bias",
        single,
        one_bias,
        SERIES,
        links("lstm cell.x2h\n lstm cell.h2h\n fc out"),
        carry_to_one_bias,
        (TORCH, TORCH),
    ),
    # GRU of two layers against two cells called step by step.
    pair(
        "gru_to_cells",
        classifier,
        cells,
        IDS,
        links("embedding lookup\n gru cells.0\n gru cells.1\n classifier.1 decide"),
        carry_to_cells,
    ),
)
