"""Which parts a fused matrix consists of, and which layers of its shape are none."""

from __future__ import annotations

import pytest
from kit.frameworks import PADDLE, TORCH

from padiff.align import align
from padiff.model.tree import LiveModel

WIDTH = 8


def block(kit, names, fused):
    """Attention to itself and to another, flat in one block, fused or not; the MLP has ``wide`` rows."""

    class Block(kit.Net):
        def build(self, wide):
            for parts, whole in names:
                if fused:
                    shape = (3 * WIDTH, WIDTH) if kit is TORCH else (WIDTH, 3 * WIDTH)
                    setattr(self, f"{whole}_weight", kit.param(*shape))
                    setattr(self, f"{whole}_bias", kit.param(3 * WIDTH))
                else:
                    for part in parts[:3]:
                        setattr(self, part, kit.linear(WIDTH, WIDTH))
                setattr(self, parts[3], kit.linear(WIDTH, WIDTH))
            self.first, self.second = kit.linear(WIDTH, wide), kit.linear(wide, WIDTH)

    return Block


NAMED = ((("query", "key", "value", "out"), "in_proj"), (("c_query", "c_key", "c_value", "c_out"), "c_in_proj"))
COUNTED = ((("s1", "s2", "s3", "s4"), "sin"), (("x1", "x2", "x3", "x4"), "xin"))


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("wide", [WIDTH, 3 * WIDTH])
@pytest.mark.parametrize("names", [NAMED, COUNTED], ids=["named", "counted"])
def test_parts_of_two_attentions_in_one_block(names, wide, back):
    kits = (PADDLE, TORCH) if back else (TORCH, PADDLE)
    whole, apart = (
        LiveModel.from_model(block(kit, names, fused)(wide)).info for kit, fused in zip(kits, (True, False))
    )
    found = align(whole, apart)
    sites = {pair.candidate[0].site: pair.reference[0].site for pair in found.parameters}
    for parts, fused in names:
        for number, part in enumerate(parts[:3]):
            for slot in ("weight", "bias"):
                rows = f"[{number * WIDTH}:{(number + 1) * WIDTH}]"
                assert sites[f"{part}/{slot}"].endswith(f"/{fused}_{slot}{rows}"), sites
        assert sites[f"{parts[3]}/weight"] == f"{parts[3]}/weight"
    assert sites["first/weight"] == "first/weight" and sites["second/weight"] == "second/weight"
