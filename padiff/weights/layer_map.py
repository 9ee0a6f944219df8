"""A layer map that finds its pairs itself."""

from __future__ import annotations

from typing import Any

from padiff.align import align
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.model.live_model import LiveModel, layers_at
from padiff.records import ROOT, Both
from padiff.weights.special_init import ruled_either_way, special_init, wholes


class LayerMap(GivenMap):
    __doc__ = GivenMap.__doc__

    def auto(self, first: Any, second: Any) -> LayerMap:
        """Find the layers of two models whose insides the frameworks lay out differently, pair them, print the pairs.

        These are multi-head attentions and recurrent layers, on either side, and layers that a rule of the user's
        (`add_special_init`) is about, with what answers to them on the other, as the alignment of the two models finds
        it; other layers are paired without a map. Returns the map.

        Raises:
            UsageError: such a layer answers to none.
        """
        models = Both(first, second).map(LiveModel.of)
        frameworks = models.map(lambda model: model.framework.name)
        rules = ruled_either_way(frameworks)
        alignment = align(models.reference.info, models.candidate.info, whole=rules)
        found = [Both(pair.reference.path, pair.candidate.path) for pair in alignment.pairs]
        by_rule = [paths for paths in found if ROOT not in paths and _is_ruled(frameworks, layers_at(models, paths))]
        whole = Both(
            wholes(models.reference.info.layers, {paths.reference for paths in by_rule}),
            wholes(models.candidate.info.layers, {paths.candidate for paths in by_rule}),
        )
        pairs = [paths for paths in found if paths.reference in whole.reference or paths.candidate in whole.candidate]
        paired = Both({paths.reference for paths in pairs}, {paths.candidate for paths in pairs})
        if any(side.keys() - partners for side, partners in whole.zip(paired)):
            sides = (", ".join(f"{path} ({kind})" for path, kind in side.items()) or "none" for side in whole)
            raise UsageError(
                "LayerMap.auto: the models do not have the same layers to map: "
                f"{' against '.join(sides)}; set the map by hand"
            )
        for paths in pairs:
            kind = whole.reference.get(paths.reference) or whole.candidate[paths.candidate]
            print(f"[AutoDiff] LayerMap.auto: `{paths.reference}` answers to `{paths.candidate}` ({kind})")
            layers = layers_at(models, paths)
            self.pairs += ((layers.reference, layers.candidate),)
        if not pairs:
            print("[AutoDiff] LayerMap.auto: no layer of these models needs a map")
        return self


def _is_ruled(frameworks: Both[str], layers: Both[Any]) -> bool:
    """Whether a rule of the user's is about these two layers, in either direction."""
    return bool(special_init(frameworks, layers) or special_init(frameworks.swapped(), layers.swapped()))
