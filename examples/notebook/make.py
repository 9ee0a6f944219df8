"""Writes ``notebook.ipynb`` with the output of its cells: ``python make.py``. No Jupyter is needed for that."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent / "notebook.ipynb"

TEXT = (
    "# padiff in a notebook\n\n"
    "Two models, trained for three steps each and recorded in memory; what a cell shows is a card."
)
CELLS = (
    """import numpy as np
import paddle
import torch

import padiff

data = np.random.default_rng(0).normal(size=(3, 8, 16)).astype("float32")""",
    """torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
port = paddle.nn.Sequential(paddle.nn.Linear(16, 32), paddle.nn.LayerNorm(32, epsilon=1e-3), paddle.nn.Linear(32, 4))
padiff.assign_weight(net, port);""",
    """optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
with padiff.record(net, optimizer=optimizer, name="torch") as reference:
    for batch in data:
        net(torch.from_numpy(batch)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.try_dump()
reference.run""",
    """optimizer = paddle.optimizer.AdamW(1e-3, parameters=port.parameters())
with padiff.record(port, optimizer=optimizer, name="paddle") as candidate:
    for batch in data:
        port(paddle.to_tensor(batch)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        candidate.try_dump()
report = padiff.compare_runs(reference.run, candidate.run)
report""",
    "print(report.first_diff.cause.sentence)",
    "print(report.first_diff.cause.fix)",
)


def executed(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line."""
    tree = ast.parse(source)
    # As in IPython, nothing is shown of a line that ends with a semicolon.
    shown = isinstance(tree.body[-1], ast.Expr) and not source.endswith(";")
    last = tree.body.pop() if shown else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return printed.getvalue(), value


def run(sources: tuple[str, ...] | list[str]) -> list[list[dict[str, Any]]]:
    """The outputs of all cells, one after the other."""
    names: dict[str, Any] = {}
    found = []
    for source in sources:
        printed, value = executed(source, names)
        outputs: list[dict[str, Any]] = []
        if printed:
            outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
        if value is not None:
            shown = {"text/plain": str(value).splitlines(keepends=True)}
            if hasattr(value, "_repr_html_"):
                shown["text/html"] = value._repr_html_().splitlines(keepends=True)
            outputs.append({"data": shown, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
        found.append(outputs)
    return found


def main(path: Path) -> None:
    cells: list[dict[str, Any]] = [
        {"cell_type": "markdown", "id": "text", "metadata": {}, "source": TEXT.splitlines(keepends=True)}
    ]
    for number, (source, outputs) in enumerate(zip(CELLS, run(CELLS))):
        for output in outputs:
            if "execution_count" in output:
                output["execution_count"] = number + 1
        cells.append(
            {
                "cell_type": "code",
                "execution_count": number + 1,
                "id": f"cell-{number}",
                "metadata": {},
                "outputs": outputs,
                "source": source.splitlines(keepends=True),
            }
        )
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    content = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK)
