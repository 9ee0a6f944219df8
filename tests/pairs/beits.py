"""A vision transformer with layer scale, in a wrapper and with a head too many."""

from __future__ import annotations

from functools import partial

from kit.nets import attend

from .copying import put, value
from .pair import links, pair, straight
from .vits import HEADS, HIDDEN, PATCHES, PICTURES, WIDTH, patches, timm


def beit(kit):
    """Layer scale as parameters of the block; a wrapper around all; a second head that is never used."""

    class Layer(kit.Net):
        def build(self):
            self.gamma_1, self.gamma_2 = kit.param(WIDTH), kit.param(WIDTH)
            self.dense, self.output_dense = kit.linear(WIDTH, HIDDEN), kit.linear(HIDDEN, WIDTH)
            self.o_proj, self.in_proj = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, 3 * WIDTH)
            self.ln_1, self.ln_2 = kit.layernorm(WIDTH, eps=1e-6), kit.layernorm(WIDTH, eps=1e-6)

        def forward(self, x):
            parts = self.in_proj(self.ln_1(x)).reshape((x.shape[0], x.shape[1], 3, WIDTH))
            heads = attend(kit, parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], HEADS)
            x = x + self.gamma_1 * self.o_proj(heads)
            return x + self.gamma_2 * self.output_dense(kit.gelu(self.dense(self.ln_2(x))))

    class Beit(kit.Net):
        def build(self):
            self.aux_head = kit.linear(WIDTH, 7)
            self.head, self.final_norm = kit.linear(WIDTH, 5), kit.layernorm(WIDTH, eps=1e-6)
            self.layer0, self.layer1 = Layer(), Layer()
            self.position, self.token = kit.param(1, PATCHES + 1, WIDTH), kit.param(1, 1, WIDTH)
            self.patch = kit.conv(3, WIDTH, 4, stride=4)

        def forward(self, x):
            x = patches(kit, self.patch, x)
            x = kit.cat([self.token.expand((x.shape[0], 1, WIDTH)), x], 1) + self.position
            return self.head(self.final_norm(self.layer1(self.layer0(x)))[:, 0])

    class Wrapper(kit.Net):
        def build(self):
            self.model = Beit()

        def forward(self, x):
            return self.model(x)

    return Wrapper()


TIMM_TO_BEIT = links(
    """
    (root)                  model
    patch_embed.proj        model.patch
    blocks.{i}.norm1        model.layer{i}.ln_1
    blocks.{i}.attn.qkv     model.layer{i}.in_proj
    blocks.{i}.attn.proj    model.layer{i}.o_proj
    blocks.{i}.ls1          model.layer{i}
    blocks.{i}.norm2        model.layer{i}.ln_2
    blocks.{i}.mlp.fc1      model.layer{i}.dense
    blocks.{i}.mlp.fc2      model.layer{i}.output_dense
    blocks.{i}.ls2          model.layer{i}
    norm                    model.final_norm
    head                    model.head
    """
)


def carry_scaled(ref, cand):
    straight([entry for entry in TIMM_TO_BEIT if entry[0] != "(root)" and ".ls" not in entry[0]])(ref, cand)
    for index in (0, 1):
        # `value` gives the scale its common name.
        put(cand, f"model.layer{index}", "gamma_1", value(ref, f"blocks.{index}.ls1", "weight"))
        put(cand, f"model.layer{index}", "gamma_2", value(ref, f"blocks.{index}.ls2", "weight"))
    put(cand, "model", "token", value(ref, "(root)", "cls_token"))
    put(cand, "model", "position", value(ref, "(root)", "pos_embed"))


PAIRS = (
    # Layer scale as layers against the block's own parameters; all inside a wrapper; a head that has no partner.
    pair(
        "vit_layer_scale",
        partial(timm, scaled=True),
        beit,
        PICTURES,
        TIMM_TO_BEIT,
        carry_scaled,
        extra=((), ("model.aux_head",)),
    ),
)
