"""Layer map of two runs as YAML that a user can read, edit and pass to ``--layer-map``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from padiff.align import Alignment, LayerPair
from padiff.records import SIDES, Both, Layer


def map_to_yaml(alignment: Alignment, reference: str, candidate: str) -> str:
    """Return the layer map as YAML with comments, readable by `padiff.model.given_map.GivenMap.read`.

    Each pair has its confidence (0 to 1) and the reason of the match; an ambiguous pair also lists the alternatives.
    Comments at the end list assumptions, and layers and parameters without a partner.
    """
    lines = [
        f"# Which layer of {reference} (reference) answers to which of {candidate} (candidate).",
        "# Edit, and give it back with --layer-map: a pair that stands here always wins, the rest is found around it.",
        "# Pairs that you delete are found anew, `candidate: null` means that the layer has no counterpart, and a list",
        "# names the parts of one layer in their order.",
    ]
    entries = [*(_pair(pair) for pair in alignment.pairs), *_splits(alignment)]
    lines.append("pairs:" if entries else "pairs: []")
    lines += [line for entry in entries for line in entry]
    lines += _left(
        "assumed, since neither names nor shapes tell",
        [f"{x.about}: {x.options[0]} (or {', '.join(x.options[1:])})" for x in alignment.ambiguities if not x.answer],
    )
    lines += _left("shown by the values", [f"{x.about}: {x.answer}" for x in alignment.ambiguities if x.answer])
    layers_left = alignment.reference_only, alignment.candidate_only
    parameters_left = alignment.reference_parameters, alignment.candidate_parameters
    for side, layers, parameters in zip(SIDES, layers_left, parameters_left):
        lines += _left(f"{len(layers)} {side} layers without a partner", [_named(layer) for layer in layers])
        lines += _left(f"{len(parameters)} {side} parameters without a partner", parameters)
    return "\n".join(lines) + "\n"


def _pair(pair: LayerPair) -> list[str]:
    why = f"{pair.reference.type} / {pair.candidate.type}, by {pair.reason}"
    lines = [
        _line(_entry(_paths(pair), pair.confidence), f"{why}: {', '.join(pair.evidence)}" if pair.evidence else why)
    ]
    if pair.ambiguous:
        lines.append(f"    # ambiguous: {', '.join(pair.alternatives)} would fit nearly as well")
    return lines


def _splits(alignment: Alignment) -> Iterator[list[str]]:
    paired = {path for pair in alignment.pairs for path in zip(SIDES, _paths(pair))}
    for split in alignment.splits:
        # Splits inside of a pair of layers follow from the pair.
        if paired.isdisjoint((side, layer.path) for side, layers in zip(SIDES, split) for layer in layers):
            paths = split.map(lambda layers: [layer.path for layer in layers])
            entry = _entry(paths.map(lambda side: side[0] if len(side) == 1 else side), split.confidence)
            types = " / ".join(" + ".join(layer.type for layer in layers) for layers in split)
            yield [_line(entry, f"{types}, by {split.reason}: {', '.join(split.evidence)}")]


def _paths(pair: LayerPair) -> Both[str]:
    return pair.map(lambda layer: layer.path)


def _entry(paths: Both[Any], confidence: float) -> dict[str, Any]:
    return {"reference": paths.reference, "candidate": paths.candidate, "confidence": round(confidence, 2)}


def _line(entry: Mapping[str, Any], comment: str) -> str:
    text = yaml.safe_dump(dict(entry), default_flow_style=True, sort_keys=False, width=10_000).strip()
    return f"  - {text}  # {comment}"


def _left(title: str, names: Sequence[str]) -> list[str]:
    return [f"# {title}:", *(f"#   {name}" for name in names)] if names else []


def _named(layer: Layer) -> str:
    return f"{layer.path}  ({layer.type})"
