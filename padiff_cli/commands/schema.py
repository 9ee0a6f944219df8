"""``padiff schema``: print the JSON Schema of what ``padiff compare --brief`` writes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from padiff.records.diagnostic import diagnostic_schema


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = "Print the JSON Schema of what `padiff compare --brief` writes."
    parser.set_defaults(run=_schema)


def _schema(args: argparse.Namespace, console: Console) -> int:
    print(json.dumps(diagnostic_schema(), indent=1))
    return 0
