"""Recurrent cells over all steps of a sequence, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from padiff.compare.diagnose.kernels.activations import act


def lstm(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, order: Sequence[int] = (0, 1, 2, 3),
    backward: bool = False, inner: str = "tanh", outer: str = "tanh", gate: str = "sigmoid", forget: float = 0.0,
    time_first: bool = False, start: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Return the hidden states of all steps of an LSTM.

    Args:
        order: positions of the input, forget, cell and output gate in the weights.
        backward: True to run from the last step to the first.
        inner: activation of the cell gate.
        outer: activation of the cell state for the output.
        gate: activation of the other gates.
        forget: number that is added to the forget gate.
        time_first: True if the first axis is time, else the second is.
        start: each number of the first states.
    """
    x = np.swapaxes(x, 0, 1) if not time_first else x
    h = c = np.full((x.shape[1], u.shape[1]), start)
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        parts = np.split(x[t] @ w.T + h @ u.T + sum(biases, np.zeros(len(w))), 4, axis=-1)
        i, f, g, o = (parts[k] for k in order)
        c = act(f + forget, gate) * c + act(i, gate) * act(g, inner)
        h = act(o, gate) * act(c, outer)
        states.append(h)
    output = np.stack(states)
    return output if time_first else np.swapaxes(output, 0, 1)


def gru(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, order: Sequence[int] = (0, 1, 2),
    backward: bool = False, inner: str = "tanh", swapped: bool = False, time_first: bool = False,
    gate: str = "sigmoid", reset: str = "after", keeps: bool = True, start: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Return the hidden states of all steps of a GRU.

    Args:
        order: positions of the reset, update and new gate in the weights.
        backward: True to run from the last step to the first.
        inner: activation of the new gate.
        swapped: True if the update gate scales the new state instead of the previous one.
        time_first: True if the first axis is time, else the second is.
        gate: activation of the other gates.
        reset: the reset gate scales the state ``after`` its matrix product, ``before`` it, or ``never``.
        keeps: True if the new state contains a share of the previous one.
        start: each number of the first state.
    """
    x = np.swapaxes(x, 0, 1) if not time_first else x
    input_bias, state_bias = biases if biases else (np.zeros(len(w)), np.zeros(len(w)))
    h = np.full((x.shape[1], u.shape[1]), start)
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        from_input, from_state = (
            np.split(part, 3, axis=-1) for part in (x[t] @ w.T + input_bias, h @ u.T + state_bias)
        )
        (ri, zi, ni), (rh, zh, nh) = ([part[k] for k in order] for part in (from_input, from_state))
        r, z = act(ri + rh, gate), act(zi + zh, gate)
        if reset == "before":
            nh = np.split((r * h) @ u.T + state_bias, 3, axis=-1)[order[2]]
        n = act(ni + (r * nh if reset == "after" else nh), inner)
        h = z * n + (1 - z) * h if swapped else (1 - z) * n + (z * h if keeps else 0.0)
        states.append(h)
    output = np.stack(states)
    return output if time_first else np.swapaxes(output, 0, 1)


def rnn(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, inner: str = "tanh", backward: bool = False,
    time_first: bool = False,
) -> np.ndarray:  # fmt: skip
    """Return the hidden states of all steps of a plain RNN."""
    x = np.swapaxes(x, 0, 1) if not time_first else x
    h = np.zeros((x.shape[1], u.shape[1]))
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        h = act(x[t] @ w.T + h @ u.T + sum(biases, np.zeros(len(w))), inner)
        states.append(h)
    output = np.stack(states)
    return output if time_first else np.swapaxes(output, 0, 1)
