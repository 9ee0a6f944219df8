"""Run folders: written whole or not at all, read without trusting them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from padiff.system.lazily import names_from

if TYPE_CHECKING:
    from padiff.dump.read import DumpSeries, FolderRun, SingleDump, file_digests, open_run
    from padiff.dump.write import RunWriter
else:
    # Lazy imports: `padiff run` checks a folder's name, and leaves reading and writing to the script's process.
    __getattr__ = names_from(
        __name__,
        {
            "DumpSeries": "padiff.dump.read",
            "FolderRun": "padiff.dump.read",
            "RunWriter": "padiff.dump.write",
            "SingleDump": "padiff.dump.read",
            "file_digests": "padiff.dump.read",
            "open_run": "padiff.dump.read",
        },
    )

__all__ = ["DumpSeries", "FolderRun", "RunWriter", "SingleDump", "file_digests", "open_run"]
