"""The way of one record in the page on the architecture is the one that it takes: the example runs under a profiler."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

import padiff

from .pages import DOCS, ROOT, Page

#: A row of the table: file, and the call with or without its class.
_ROW = re.compile(r"^\| \w* ?\| `(padiff/[\w/]+\.py)` \| `([\w.]+)` \|", re.M)


@contextmanager
def profiled() -> Iterator[list[tuple[str, str]]]:
    """Yield padiff's calls in their order, on any thread: file, and the name in its class."""
    calls: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(ROOT / "padiff")):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            calls.append((file.removeprefix(f"{ROOT}/"), name))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def train(folder, eps):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8, eps=eps), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    inputs = torch.randn(2, 8, 4)
    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for batch in inputs:
            net(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()


def test_each_call_of_the_example_happens_in_the_order_of_the_page(tmp_path):
    rows = _ROW.findall(Page.of(DOCS / "architecture.md").text)
    assert len(rows) > 20
    with profiled() as calls:
        train(tmp_path / "a", 1e-5)
        train(tmp_path / "b", 1e-2)
        report = padiff.compare_runs(tmp_path / "a", tmp_path / "b")
        text = report.text()
    if sys.version_info < (3, 11):  # which does not say the class of a method
        rows = [(file, call.split(".")[-1]) for file, call in rows]
    later = iter(calls)
    assert [row for row in rows if row not in later] == []
    file = "steps/00000000/rank_0/tensors/000008-forward-1-output.0-0.npy"
    assert file in Page.of(DOCS / "architecture.md").text and (tmp_path / "a" / file).exists()
    assert "eps 1e-05 against 0.01" in text and "proven" in text
    assert report.first_diff.diff.pair.anchor.site == "1/forward/output.0"
    assert "relative error 0.024, limit 2e-05" in text
