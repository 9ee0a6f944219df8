"""Two real training runs, one in Lightning and one in paddle.Model, compared: ``padiff demo``."""

from padiff_demo.demo import run

__all__ = ["run"]
