"""Trainings of small compiled models, and compilers that compute one operation otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

STEPS = 2


@dataclass(frozen=True)
class Fault:
    """A compiler's fault.

    Attributes:
        program: name of the program.
        edit: changes the graph that is compiled.
        operation: regular expression of the operation's name, or of that of the layer.
        layer: regular expression of the layer that calls it.
        region: number of the region among those that the step calls.
        backward: True if `edit` changes the graph of the backward.
    """

    program: str
    edit: Callable[[Any], None]
    operation: str
    layer: str
    region: int = 0
    backward: bool = False


def replaced(name: str, function: Callable[..., Any], nth: int = 0) -> Callable[[Any], None]:
    """An edit: the n-th operation with a name calls another function, with the same arguments."""

    def edit(gm: Any) -> None:
        nodes = [n for n in gm.graph.nodes if n.op.startswith("call") and name in str(n.target)]
        if nth >= len(nodes):
            return
        node = nodes[nth]
        with gm.graph.inserting_after(node):
            args = node.args
            new = gm.graph.call_function(function, args, dict(node.kwargs))
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        gm.recompile()

    return edit


def compiler(edit: Callable[[Any], None], backward: bool = False) -> Callable[..., Any]:
    """A compiler that runs an edited graph eagerly."""
    if not backward:

        def faulty(gm: Any, inputs: Any) -> Any:
            edit(gm)
            return gm.forward

        return faulty
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def edited(gm: Any, inputs: Any) -> Any:
        edit(gm)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(gm.forward), bw_compiler=edited)

    def faulty_backward(gm: Any, inputs: Any) -> Any:
        return backend(gm, inputs)

    return faulty_backward


def train(program: Any, backend: Any, folder: str | None = None, steps: int = STEPS) -> list[float]:
    """Train a program with a compiler, `None` for eager code; record it in a folder."""
    import contextlib

    import padiff

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = program(lambda code: code if backend is None else torch.compile(code, backend=backend))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    recording = contextlib.nullcontext() if folder is None else padiff.record(model, folder, optimizer=optimizer)
    with recording as rec:
        for k in range(steps):
            loss = batches(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if rec is not None:
                rec.end_step()
    return losses
