"""A layer map that finds its pairs itself."""

from __future__ import annotations

from typing import Any

from padiff.align import LayerPair, align
from padiff.errors import UsageError
from padiff.model import layer_map as given
from padiff.records import ROOT
from padiff.weights.live import LiveModel
from padiff.weights.special_init import ruled_either_way, special_init, wholes


class LayerMap(given.LayerMap):
    __doc__ = given.LayerMap.__doc__

    def auto(self, first: Any, second: Any) -> LayerMap:
        """Find the layers of two models whose insides the frameworks lay out differently, pair them, print the pairs.

        These are multi-head attentions and recurrent layers, on either side, and layers that a rule of the user's
        (`add_special_init`) is about, with what answers to them on the other, as the alignment of the two models finds
        it; other layers are paired without a map. Returns the map.

        Raises:
            UsageError: such a layer answers to none.
        """
        models = LiveModel.of(first), LiveModel.of(second)
        rules = ruled_either_way(models[0].framework.name, models[1].framework.name)
        alignment = align(models[0].info, models[1].info, whole=rules)
        by_rule = [(p.reference.path, p.candidate.path) for p in alignment.pairs if _is_ruled(p, models)]
        composites = [
            wholes(model.info.layers, {pair[k] for pair in by_rule if ROOT not in pair})
            for k, model in enumerate(models)
        ]
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


def _is_ruled(pair: LayerPair, models: tuple[LiveModel, LiveModel]) -> bool:
    """Whether a rule of the user's is about these two layers, in either direction."""
    sides = [
        (model.framework.name, model.layer(layer.path))
        for model, layer in zip(models, (pair.reference, pair.candidate))
    ]
    return any(special_init(*a, *b) is not None for a, b in (sides, sides[::-1]))
