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
    """Hidden states of all steps; the gates are input, forget, cell, output, in an order."""
    x = np.swapaxes(x, 0, 1) if not time_first else x
    h = c = np.full((x.shape[1], u.shape[1]), start)
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        parts = np.split(x[t] @ w.T + h @ u.T + sum(biases, np.zeros(len(w))), 4, axis=-1)
        i, f, g, o = (parts[k] for k in order)
        c = act(f + forget, gate) * c + act(i, gate) * act(g, inner)
        h = act(o, gate) * act(c, outer)
        states.append(h)
    found = np.stack(states)
    return found if time_first else np.swapaxes(found, 0, 1)


def gru(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, order: Sequence[int] = (0, 1, 2),
    backward: bool = False, inner: str = "tanh", swapped: bool = False, time_first: bool = False,
    gate: str = "sigmoid", reset: str = "after", keeps: bool = True, start: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Hidden states of all steps; the gates are reset, update, new, in an order.

    Args:
        reset: whether the state is reset ``after`` its matrix product, ``before`` it, or ``never``.
        keeps: whether a share of the state before is in the new one.
        start: each number of the first state.
    """
    x = np.swapaxes(x, 0, 1) if not time_first else x
    one, other = biases if biases else (np.zeros(len(w)), np.zeros(len(w)))
    h = np.full((x.shape[1], u.shape[1]), start)
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        given, kept = (np.split(part, 3, axis=-1) for part in (x[t] @ w.T + one, h @ u.T + other))
        (ri, zi, ni), (rh, zh, nh) = ([part[k] for k in order] for part in (given, kept))
        r, z = act(ri + rh, gate), act(zi + zh, gate)
        if reset == "before":
            nh = np.split((r * h) @ u.T + other, 3, axis=-1)[order[2]]
        n = act(ni + (r * nh if reset == "after" else nh), inner)
        h = z * n + (1 - z) * h if swapped else (1 - z) * n + (z * h if keeps else 0.0)
        states.append(h)
    found = np.stack(states)
    return found if time_first else np.swapaxes(found, 0, 1)


def rnn(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, inner: str = "tanh", backward: bool = False,
    time_first: bool = False,
) -> np.ndarray:  # fmt: skip
    """Hidden states of all steps."""
    x = np.swapaxes(x, 0, 1) if not time_first else x
    h = np.zeros((x.shape[1], u.shape[1]))
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        h = act(x[t] @ w.T + h @ u.T + sum(biases, np.zeros(len(w))), inner)
        states.append(h)
    found = np.stack(states)
    return found if time_first else np.swapaxes(found, 0, 1)
