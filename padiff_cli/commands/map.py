"""``padiff map A B``: print the layer map of two runs as YAML."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from padiff.compare import RunComparison
from padiff.dump import open_run
from padiff_cli.arguments import paths_of
from padiff_cli.collecting import few_collections
from padiff_cli.map_yaml import map_to_yaml


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("reference", metavar="REFERENCE")
    parser.add_argument("candidate", metavar="CANDIDATE")
    parser.add_argument("--layer-map", metavar="MAP.yaml", help="pairs to start from; the rest is found around them")
    parser.set_defaults(run=_map)


@few_collections()
def _map(args: argparse.Namespace, console: Console) -> int:
    reference, candidate = paths_of(args).map(open_run)
    comparison = RunComparison(reference, candidate, args.layer_map)
    for number in comparison.common()[:1]:
        # The first common step shows which layers are called; wrappers that are never called get no partner.
        comparison.diffs(number)
    sys.stdout.write(map_to_yaml(comparison.alignment, reference.name, candidate.name))
    return 0
