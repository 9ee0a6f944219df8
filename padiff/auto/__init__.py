"""``auto_diff``: run two models side by side and say where they part."""

from padiff.auto.engine import auto_diff

__all__ = ["auto_diff"]
