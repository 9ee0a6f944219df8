"""What the installed torch and paddle do differently when they are called alike: ``padiff atlas``."""

from padiff_atlas.command import run

__all__ = ["run"]
