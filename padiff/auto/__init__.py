"""``auto_diff``: run two models side by side and find where they differ."""

from padiff.auto.engine import auto_diff

__all__ = ["auto_diff"]
