"""Models of PaddleClas and paddle.vision that are set otherwise than those which they were written after.

``benchmarks/library_pairs.py`` says what has to be installed for them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from entry import Difference, Words

import padiff

sys.path.append(str(Path(__file__).resolve().parents[1]))


def _of_the_zoo(module: str, name: str) -> padiff.Report:
    import importlib

    from library_zoo import shim

    shim.install()
    (pair,) = (one for one in importlib.import_module(f"library_zoo.{module}").PAIRS if one.name == name)
    ours, theirs = pair.models()
    return padiff.auto_diff(ours, theirs, pair.inputs(), atol=1e-6, rtol=1e-4, diff_phase="forward")


def _biases(timm_name: str, their_name: str) -> padiff.Report:
    from library_zoo import shim

    shim.install()
    import timm
    from library_zoo.pair import images
    from paddleclas.ppcls.arch import backbone

    ours = timm.create_model(timm_name, num_classes=10).eval()
    theirs = getattr(backbone, their_name)(class_num=10)
    theirs.eval()
    padiff.assign_weight(ours, theirs, partial=True)
    return padiff.auto_diff(ours, theirs, images(64)(), atol=1e-6, rtol=1e-4, auto_init=False, diff_phase="forward")
