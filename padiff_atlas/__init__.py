"""``padiff atlas``: differences between the installed torch and paddle in calls that look alike."""

from padiff_atlas.command import run

__all__ = ["run"]
