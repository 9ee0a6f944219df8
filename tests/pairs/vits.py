"""Vision transformers: fused and separate projections, where class token and positions live."""

from __future__ import annotations

from functools import partial

from kit.nets import attend

from .copying import fuse, put, put_dense, same, split, value
from .pair import links, normal, pair

WIDTH, HEADS, HIDDEN, PATCHES = 16, 2, 24, 4
PICTURES = (normal(2, 3, 8, 8),)


def patches(kit, conv, x):
    x = conv(x)
    return kit.permute(x.reshape((x.shape[0], WIDTH, PATCHES)), (0, 2, 1))


def timm(kit, scaled=False):
    """timm's names: qkv in one; class token and positions are parameters of the root; layer scale as a layer."""

    class Scale(kit.Net):
        def build(self):
            self.gamma = kit.param(WIDTH)

        def forward(self, x):
            return x * self.gamma

    class PatchEmbed(kit.Net):
        def build(self):
            self.proj = kit.conv(3, WIDTH, 4, stride=4)

        def forward(self, x):
            return patches(kit, self.proj, x)

    class Attention(kit.Net):
        def build(self):
            self.num_heads = HEADS
            self.qkv, self.proj = kit.linear(WIDTH, 3 * WIDTH), kit.linear(WIDTH, WIDTH)

        def forward(self, x):
            qkv = self.qkv(x)
            q, k, v = (qkv[:, :, part * WIDTH : (part + 1) * WIDTH] for part in range(3))
            return self.proj(attend(kit, q, k, v, HEADS))

    class Mlp(kit.Net):
        def build(self):
            self.fc1, self.act, self.fc2 = kit.linear(WIDTH, HIDDEN), kit.GELU(), kit.linear(HIDDEN, WIDTH)

        def forward(self, x):
            return self.fc2(self.act(self.fc1(x)))

    class Block(kit.Net):
        def build(self):
            self.norm1, self.attn = kit.layernorm(WIDTH, eps=1e-6), Attention()
            self.ls1 = Scale() if scaled else kit.Identity()
            self.norm2, self.mlp = kit.layernorm(WIDTH, eps=1e-6), Mlp()
            self.ls2 = Scale() if scaled else kit.Identity()

        def forward(self, x):
            x = x + self.ls1(self.attn(self.norm1(x)))
            return x + self.ls2(self.mlp(self.norm2(x)))

    class VisionTransformer(kit.Net):
        def build(self):
            self.cls_token, self.pos_embed = kit.param(1, 1, WIDTH), kit.param(1, PATCHES + 1, WIDTH)
            self.patch_embed = PatchEmbed()
            self.blocks = kit.Sequential(Block(), Block())
            self.norm, self.head = kit.layernorm(WIDTH, eps=1e-6), kit.linear(WIDTH, 5)

        def forward(self, x):
            x = self.patch_embed(x)
            token = self.cls_token.expand((x.shape[0], 1, WIDTH))
            x = self.blocks(kit.cat([token, x], 1) + self.pos_embed)
            return self.head(self.norm(x)[:, 0])

    return VisionTransformer()


def nested(kit):
    """Hugging Face's nesting: an embeddings layer owns the class token and positions; query, key, value apart."""

    class Patch(kit.Net):
        def build(self):
            self.projection = kit.conv(3, WIDTH, 4, stride=4)

        def forward(self, x):
            return patches(kit, self.projection, x)

    class Embeddings(kit.Net):
        def build(self):
            self.cls_token = kit.param(1, 1, WIDTH)
            self.patch_embeddings = Patch()
            self.position_embeddings = kit.param(1, PATCHES + 1, WIDTH)

        def forward(self, x):
            x = self.patch_embeddings(x)
            return kit.cat([self.cls_token.expand((x.shape[0], 1, WIDTH)), x], 1) + self.position_embeddings

    class SelfAttention(kit.Net):
        def build(self):
            self.key, self.query = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, WIDTH)
            self.value = kit.linear(WIDTH, WIDTH)

        def forward(self, x):
            return attend(kit, self.query(x), self.key(x), self.value(x), HEADS)

    class ViTLayer(kit.Net):
        def build(self):
            self.attention = kit.named(attention=SelfAttention(), output=kit.named(dense=kit.linear(WIDTH, WIDTH)))
            self.intermediate = kit.named(dense=kit.linear(WIDTH, HIDDEN), act=kit.GELU())
            self.output = kit.named(dense=kit.linear(HIDDEN, WIDTH), dropout=kit.Dropout(0.1))
            self.layernorm_before = kit.layernorm(WIDTH, eps=1e-6)
            self.layernorm_after = kit.layernorm(WIDTH, eps=1e-6)

        def forward(self, x):
            x = x + self.attention(self.layernorm_before(x))
            return x + self.output(self.intermediate(self.layernorm_after(x)))

    class ViT(kit.Net):
        def build(self):
            self.embeddings = Embeddings()
            self.encoder = kit.named(layer=kit.Sequential(ViTLayer(), ViTLayer()))
            self.layernorm = kit.layernorm(WIDTH, eps=1e-6)

        def forward(self, x):
            return self.layernorm(self.encoder(self.embeddings(x)))

    class ForImageClassification(kit.Net):
        def build(self):
            self.classifier = kit.linear(WIDTH, 5)
            self.vit = ViT()

        def forward(self, x):
            return self.classifier(self.vit(x)[:, 0])

    return ForImageClassification()


def lucid(kit, unfolded=False):
    """Lists in lists, Sequential with indices, key and value in one, positions in an embedding.

    Unfolded: patches go through a Linear layer, each a row of (channel, row, column).
    """

    class Attend(kit.Net):
        def build(self):
            self.norm = kit.layernorm(WIDTH, eps=1e-6)
            self.to_q, self.to_kv = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, 2 * WIDTH)
            self.to_out = kit.Sequential(kit.linear(WIDTH, WIDTH), kit.Dropout(0.1))

        def forward(self, x):
            x = self.norm(x)
            kv = self.to_kv(x)
            return self.to_out(attend(kit, self.to_q(x), kv[:, :, :WIDTH], kv[:, :, WIDTH:], HEADS))

    class Patchify(kit.Layer):
        def forward(self, x):
            x = kit.permute(x.reshape((x.shape[0], 3, 2, 4, 2, 4)), (0, 2, 4, 1, 3, 5))
            return x.reshape((x.shape[0], PATCHES, 48))

    def conv():
        return kit.conv(3, WIDTH, 4, stride=4)

    def feed():
        lines = kit.linear(WIDTH, HIDDEN), kit.GELU(), kit.Dropout(0.1), kit.linear(HIDDEN, WIDTH)
        return kit.named(net=kit.Sequential(kit.layernorm(WIDTH, eps=1e-6), *lines))

    class Transformer(kit.Net):
        def build(self):
            self.norm = kit.layernorm(WIDTH, eps=1e-6)
            self.layers = kit.List([kit.List([Attend(), feed()]) for _ in range(2)])

        def forward(self, x):
            for attend_to, feed_on in self.layers:
                x = x + attend_to(x)
                x = x + feed_on(x)
            return self.norm(x)

    class ViT(kit.Net):
        def build(self):
            self.places = kit.embedding(PATCHES + 1, WIDTH)
            self.cls = kit.param(1, 1, WIDTH)
            into = Patchify(), kit.linear(48, WIDTH)
            self.to_patch_embedding = kit.Sequential(*(into if unfolded else (kit.Identity(), conv())))
            self.transformer = Transformer()
            self.mlp_head = kit.linear(WIDTH, 5)

        def forward(self, x):
            x = self.to_patch_embedding(x) if unfolded else patches(kit, self.to_patch_embedding, x)
            x = kit.cat([self.cls.expand((x.shape[0], 1, WIDTH)), x], 1) + self.places(
                kit.tensor(range(PATCHES + 1), None)
            )
            return self.mlp_head(self.transformer(x)[:, 0])

    return ViT()


FUSED_TO_NESTED = links(
    """
    (root)                  vit.embeddings
    patch_embed.proj        vit.embeddings.patch_embeddings.projection
    blocks.{i}.norm1        vit.encoder.layer.{i}.layernorm_before
    blocks.{i}.attn.qkv     vit.encoder.layer.{i}.attention.attention.query
    blocks.{i}.attn.qkv     vit.encoder.layer.{i}.attention.attention.key
    blocks.{i}.attn.qkv     vit.encoder.layer.{i}.attention.attention.value
    blocks.{i}.attn.proj    vit.encoder.layer.{i}.attention.output.dense
    blocks.{i}.norm2        vit.encoder.layer.{i}.layernorm_after
    blocks.{i}.mlp.fc1      vit.encoder.layer.{i}.intermediate.dense
    blocks.{i}.mlp.fc2      vit.encoder.layer.{i}.output.dense
    norm                    vit.layernorm
    head                    classifier
    """
)
NESTED_TO_LUCID = links(
    """
    vit.embeddings                                    (root)
    vit.embeddings                                    places
    vit.embeddings.patch_embeddings.projection        to_patch_embedding.1
    vit.encoder.layer.{i}.layernorm_before            transformer.layers.{i}.0.norm
    vit.encoder.layer.{i}.attention.attention.query   transformer.layers.{i}.0.to_q
    vit.encoder.layer.{i}.attention.attention.key     transformer.layers.{i}.0.to_kv
    vit.encoder.layer.{i}.attention.attention.value   transformer.layers.{i}.0.to_kv
    vit.encoder.layer.{i}.attention.output.dense      transformer.layers.{i}.0.to_out.0
    vit.encoder.layer.{i}.layernorm_after             transformer.layers.{i}.1.net.0
    vit.encoder.layer.{i}.intermediate.dense          transformer.layers.{i}.1.net.1
    vit.encoder.layer.{i}.output.dense                transformer.layers.{i}.1.net.4
    vit.layernorm                                     transformer.norm
    classifier                                        mlp_head
    """
)
PATCH = ("vit.embeddings.patch_embeddings.projection", "to_patch_embedding.1")


def carry_fused(ref, cand):
    for reference, candidate in FUSED_TO_NESTED:
        if reference != "(root)" and not reference.endswith("qkv"):
            same(ref, reference, cand, candidate)
    for index in (0, 1):
        inside = f"vit.encoder.layer.{index}.attention.attention."
        split(ref, f"blocks.{index}.attn.qkv", cand, [inside + name for name in ("query", "key", "value")])
    put(cand, "vit.embeddings", "cls_token", value(ref, "(root)", "cls_token"))
    put(cand, "vit.embeddings", "position_embeddings", value(ref, "(root)", "pos_embed"))


def carry_nested(ref, cand):
    same(ref, PATCH[0], cand, PATCH[1])
    carry_but_patches(ref, cand)


def carry_to_unfolded(ref, cand):
    matrix = value(ref, PATCH[0], "weight").reshape((WIDTH, -1))
    put_dense(cand, PATCH[1], matrix, value(ref, PATCH[0], "bias"))
    carry_but_patches(ref, cand)


def carry_but_patches(ref, cand):
    for reference, candidate in NESTED_TO_LUCID:
        if reference not in ("vit.embeddings", PATCH[0]) and not candidate.endswith("to_kv"):
            same(ref, reference, cand, candidate)
    for index in (0, 1):
        inside = f"vit.encoder.layer.{index}.attention.attention."
        fuse(ref, [inside + "key", inside + "value"], cand, f"transformer.layers.{index}.0.to_kv")
    put(cand, "(root)", "cls", value(ref, "vit.embeddings", "cls_token"))
    put(cand, "places", "weight", value(ref, "vit.embeddings", "position_embeddings")[0])


PAIRS = (
    # One qkv against three layers in another order; the root's parameters against an embeddings layer's.
    pair("vit_fused_to_nested", timm, nested, PICTURES, FUSED_TO_NESTED, carry_fused),
    # Key and value in one; positions in an embedding; lists of lists; the class token in the root.
    pair("vit_nested_to_fused_kv", nested, lucid, PICTURES, NESTED_TO_LUCID, carry_nested),
    # The same, and the patch convolution has become a Linear layer on unfolded patches.
    pair("vit_patches_by_linear", nested, partial(lucid, unfolded=True), PICTURES, NESTED_TO_LUCID, carry_to_unfolded),
)
