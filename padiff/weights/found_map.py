"""A layer map that finds its pairs itself."""

from __future__ import annotations

from typing import Any

from padiff import equivalents
from padiff import layer_map as given
from padiff.align import align
from padiff.errors import UsageError
from padiff.records import ROOT, Layer
from padiff.weights.live import LiveModel


class LayerMap(given.LayerMap):
    __doc__ = given.LayerMap.__doc__

    def auto(self, first: Any, second: Any) -> LayerMap:
        """Find the layers of two models whose insides the frameworks lay out differently, pair them, print the pairs.

        These are multi-head attentions and recurrent layers, on either side, with what answers to them on the other, as
        the alignment of the two models finds it; other layers are paired without a map. Returns the map.

        Raises:
            UsageError: such a layer answers to none.
        """
        models = LiveModel.of(first), LiveModel.of(second)
        alignment = align(models[0].info, models[1].info)
        composites = [_composites(model.info.layers) for model in models]
        pairs = [
            pair
            for pair in alignment.pairs
            if pair.reference.path in composites[0] or pair.candidate.path in composites[1]
        ]
        left = [
            composites[0].keys() - {pair.reference.path for pair in pairs},
            composites[1].keys() - {pair.candidate.path for pair in pairs},
        ]
        if any(left):
            told = " against ".join(
                ", ".join(f"{path} ({kind})" for path, kind in side.items()) or "none" for side in composites
            )
            raise UsageError(
                f"LayerMap.auto: the models do not have the same layers to map: {told}; set the map by hand"
            )
        for pair in pairs:
            kind = composites[0].get(pair.reference.path) or composites[1][pair.candidate.path]
            print(f"[AutoDiff] LayerMap.auto: `{pair.reference.path}` answers to `{pair.candidate.path}` ({kind})")
            self.pairs += ((models[0].layer(pair.reference.path), models[1].layer(pair.candidate.path)),)
        if not pairs:
            print("[AutoDiff] LayerMap.auto: no layer of these models needs a map")
        return self


def _composites(layers: tuple[Layer, ...]) -> dict[str, str]:
    """Path and kind of the layers that are carried over as a whole; none inside of another."""
    found: dict[str, str] = {}
    for layer in layers:
        inside = any(path == ROOT or layer.path.startswith(f"{path}.") for path in found)
        if not inside and equivalents.is_composite(layer.kind):
            found[layer.path] = equivalents.kind(layer)
    return found
