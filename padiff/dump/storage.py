"""Storage options of a run: one file per step or many, compression, and a size limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from padiff.dump import codecs
from padiff.errors import UsageError


@dataclass(frozen=True)
class Storage:
    """Storage options of a run.

    Args:
        pack: store a rank's step in one file, in the safetensors format (`padiff.dump.pack`).
        compression: codec of packed tensors, ``zlib`` or ``zstd``; empty: none.
        mixed: although ``pack`` is set, store steps without sketches in many files.
        max_bytes: largest size of the run folder; see `padiff.dump.budget`. Default: no limit.

    Raises:
        UsageError: the codec is unknown or not installed, or the limit is no positive number.
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
    def from_options(
        cls, pack: bool | None, compression: str, max_bytes: float | None, sketches: bool, mixed: bool = False
    ) -> Storage:
        """Return the storage for a recorder's arguments. If ``pack`` is None, sketches or compression turn it on.

        Args:
            sketches: True if steps may have sketches.
            mixed: True if some steps may have none.

        Raises:
            UsageError: ``pack`` is False although steps may have sketches.
        """
        if pack is False and sketches:
            raise UsageError("sketches are written into packed steps: leave pack=False away")
        packed = (sketches or bool(compression)) if pack is None else pack
        return cls(packed, compression, max_bytes, mixed=mixed and pack is None and not compression)

    def in_store(self, pack: bool | None) -> Storage:
        """Return these options for a run in a store, where a rank's step is one object, written atomically.

        Raises:
            UsageError: ``pack`` is False.
        """
        if pack is False:
            raise UsageError("in a store a step is one object, as with pack=True: leave pack=False away")
        return replace(self, pack=True, mixed=False)
