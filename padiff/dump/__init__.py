"""Run folders: written whole or not at all, read without trusting them."""

from padiff.dump.read import FolderRun, open_run
from padiff.dump.write import RunWriter

__all__ = ["FolderRun", "RunWriter", "open_run"]
