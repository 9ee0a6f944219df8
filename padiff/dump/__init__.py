"""Run folders: written whole or not at all, read without trusting them."""

from padiff.dump.opening import open_run
from padiff.dump.read import DumpSeries, FolderRun, SingleDump
from padiff.dump.write import RunWriter

__all__ = ["DumpSeries", "FolderRun", "SingleDump", "RunWriter", "open_run"]
