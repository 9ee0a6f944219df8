"""``LayerMap``, a layer map that can also find its pairs."""

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
        """Find, pair and print the layers of two models that the frameworks build differently inside.

        These are multi-head attentions and recurrent layers of either model, and layers that have a rule of the user
        (`add_special_init`). The alignment of the two models pairs these layers; other layers need no map. Returns this
        map.

        Raises:
            UsageError: such a layer has no partner.
        """
        models = Both(first, second).map(LiveModel.from_model)
        frameworks = models.map(lambda model: model.framework.name)
        rules = ruled_either_way(frameworks)
        alignment = align(models.reference.info, models.candidate.info, whole=rules)
        candidates = [Both(pair.reference.path, pair.candidate.path) for pair in alignment.pairs]
        by_rule = [
            paths for paths in candidates if ROOT not in paths and _is_ruled(frameworks, layers_at(models, paths))
        ]
        composites = Both(
            wholes(models.reference.info.layers, {paths.reference for paths in by_rule}),
            wholes(models.candidate.info.layers, {paths.candidate for paths in by_rule}),
        )
        pairs = [
            paths
            for paths in candidates
            if paths.reference in composites.reference or paths.candidate in composites.candidate
        ]
        paired = Both({paths.reference for paths in pairs}, {paths.candidate for paths in pairs})
        if any(side.keys() - partners for side, partners in composites.zip(paired)):
            sides = (", ".join(f"{path} ({kind})" for path, kind in side.items()) or "none" for side in composites)
            raise UsageError(
                "LayerMap.auto: the models do not have the same layers to map: "
                f"{' against '.join(sides)}; set the map by hand"
            )
        for paths in pairs:
            kind = composites.reference.get(paths.reference) or composites.candidate[paths.candidate]
            print(f"[AutoDiff] LayerMap.auto: `{paths.reference}` answers to `{paths.candidate}` ({kind})")
            layers = layers_at(models, paths)
            self.pairs += ((layers.reference, layers.candidate),)
        if not pairs:
            print("[AutoDiff] LayerMap.auto: no layer of these models needs a map")
        return self


def _is_ruled(frameworks: Both[str], layers: Both[Any]) -> bool:
    """Return True if the user has a rule for these two layers, in either direction."""
    return bool(special_init(frameworks, layers) or special_init(frameworks.swapped(), layers.swapped()))
