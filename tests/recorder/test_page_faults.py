"""While a recorder is open, the C library keeps what a training frees: it is not taken from the system in each step."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from kit.forking import python_with_frameworks

GLIBC = platform.libc_ver()[0] == "glibc"

# Six blocks of 9 MB, as gradients are: written, and let go together.
FAULTS = """
import resource, sys
import numpy as np

def faults():
    for turn in range(6):
        if turn == 2:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        blocks = [np.empty(9 << 20, np.uint8) for _ in range(6)]
        for block in blocks:
            block[::4096] = 1
        del block
        while blocks:
            blocks.pop()
    return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) / 4
"""
OF_MODEL = """
import padiff
recorder = padiff.record(model, sys.argv[1], optimizer=optimizer)
without = faults()
with recorder:
    during = faults()
print(without, during)
"""
MODELS = {
    "torch": "import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)",
    "paddle": "import paddle\nmodel = paddle.nn.Linear(2, 2)\n"
    "optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())",
}


def run(code, folder, python=(sys.executable,), **more):
    # What the user sets himself stands: here nothing is.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [*python, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**kept, **more})
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


@pytest.mark.skipif(not GLIBC, reason="another C library")
@pytest.mark.parametrize("name", MODELS)
def test_freed_memory_is_kept_while_a_recorder_is_open(name, tmp_path):
    pytest.importorskip(name)
    without, during = run(f"{MODELS[name]}\n{FAULTS}\n{OF_MODEL}", tmp_path / "run", python_with_frameworks())
    # 56 MB are 13,500 pages, or 108 where the system gives huge ones.
    assert during < 100 < without


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_what_the_user_sets_stands(tmp_path):
    code = f"{FAULTS}\nfrom padiff.system.process import keep_freed\nkeep_freed()\nprint(faults())"
    assert run(code, tmp_path)[0] < 100
    assert run(code, tmp_path, MALLOC_TRIM_THRESHOLD_="1000000")[0] > 100
