"""``padiff demo``: train in Lightning and in paddle.Model, and compare the two runs."""

from padiff_demo.demo import run

__all__ = ["run"]
