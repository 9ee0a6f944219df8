"""The first diff of two runs as two short scripts, which need no padiff."""

from padiff.repro.writing import Repro, write_repro

__all__ = ["Repro", "write_repro"]
