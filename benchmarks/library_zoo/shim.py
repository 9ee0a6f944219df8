"""Make the libraries importable without what their models never use: a server and a download hub.

A missing module of the list is stood in for by an empty one; nothing that is installed is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

_UNUSED = ("aistudio_sdk", "fastapi", "uvicorn")
# Helpers of an older huggingface_hub, for uploading.
_HUB = ("repo_type_and_id_from_hf_id",)


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so it is only asked for modules that are not there."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in _UNUSED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def install() -> None:
    """Call this before paddlenlp, paddleformers or paddleclas are imported; torch and transformers come first."""
    import huggingface_hub

    torchvision_of_another_build()
    import transformers  # noqa: F401

    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    for name in _HUB:
        if not hasattr(huggingface_hub, name):
            setattr(huggingface_hub, name, None)
    _only_models_of_paddleclas()


def _only_models_of_paddleclas() -> None:
    """Leave out the package's own ``__init__``: it imports its predictor, which needs faiss."""
    if "paddleclas" in sys.modules:
        return
    spec = importlib.util.find_spec("paddleclas")
    if spec is None:
        return
    root = Path(spec.submodule_search_locations[0])
    for name in ("paddleclas", "paddleclas.ppcls", "paddleclas.ppcls.arch"):
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module


def torchvision_of_another_build() -> None:
    """A torchvision built for CUDA can't load its operators next to a torch for the CPU; its models need none."""
    import torch

    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401
