"""How a run's steps are stored: in one file each or in many, compressed, within a limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from padiff.dump import codecs
from padiff.errors import UsageError


@dataclass(frozen=True)
class Storage:
    """How a run's steps are stored.

    Args:
        pack: all of a rank's step in one file, in the safetensors format (`padiff.dump.pack`).
        compression: of packed tensors: ``zlib`` or ``zstd``; empty: none.
        mixed: steps that have no sketches are stored in many files all the same.
        max_bytes: how large the run folder may become; see `padiff.dump.budget`. Default: no limit.

    Raises:
        UsageError: an unknown codec, one that is not installed, or a limit that is no positive number.
    """

    pack: bool = False
    compression: str = ""
    max_bytes: float | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.compression:
            codecs.check(self.compression)
            if not self.pack:
                raise UsageError("compression is for packed steps: leave pack=False away")
        limit = self.max_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
            raise UsageError(f"max_bytes has to be a number of bytes above 0, got {limit!r}")

    @classmethod
    def of(
        cls, pack: bool | None, compression: str, max_bytes: float | None, sketches: bool, mixed: bool = False
    ) -> Storage:
        """What a recorder's arguments mean: sketches, and compression, ask for packed steps.

        Args:
            sketches: whether steps may have sketches.
            mixed: whether others may have none.
        """
        if pack is False and sketches:
            raise UsageError("sketches are written into packed steps: leave pack=False away")
        packed = (sketches or bool(compression)) if pack is None else pack
        return cls(packed, compression, max_bytes, mixed=mixed and pack is None and not compression)

    def in_store(self, pack: bool | None) -> Storage:
        """The same for a run in a store, where a rank's step is one object: put at once, and whole or absent by that.

        Raises:
            UsageError: steps of many files were asked for.
        """
        if pack is False:
            raise UsageError("in a store a step is one object, as with pack=True: leave pack=False away")
        return replace(self, pack=True, mixed=False)
