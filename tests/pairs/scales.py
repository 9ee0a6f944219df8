"""Convolutional nets that go down and up in scale, and ConvNeXt."""

from __future__ import annotations

from functools import partial

from .copying import put, same, value
from .pair import links, normal, pair

IMAGES = (normal(2, 3, 8, 8),)


def unet(kit, widths=(8, 12, 16)):
    """Encoders, bottleneck, decoders in the order they run; skips by concatenation."""
    one, two, three = widths

    class Double(kit.Net):
        def build(self, inputs, outputs):
            self.conv1, self.conv2 = kit.conv(inputs, outputs, 3, padding=1), kit.conv(outputs, outputs, 3, padding=1)

        def forward(self, x):
            return kit.relu(self.conv2(kit.relu(self.conv1(x))))

    class UNet(kit.Net):
        def build(self):
            self.encoder1, self.encoder2 = Double(3, one), Double(one, two)
            self.bottleneck = Double(two, three)
            self.upconv2, self.decoder2 = kit.deconv(three, two, 2, stride=2), Double(2 * two, two)
            self.upconv1, self.decoder1 = kit.deconv(two, one, 2, stride=2), Double(2 * one, one)
            self.conv = kit.conv(one, 2, 1)

        def forward(self, x):
            wide = self.encoder1(x)
            deep = self.encoder2(kit.max_pool(wide))
            x = self.bottleneck(kit.max_pool(deep))
            x = self.decoder2(kit.cat([self.upconv2(x), deep], 1))
            return self.conv(self.decoder1(kit.cat([self.upconv1(x), wide], 1)))

    return UNet()


def ups_and_downs(kit, widths=(8, 12, 16)):
    """The way up is defined before the way down; each convolution in a Sequential."""
    one, two, three = widths

    def double(inputs, outputs):
        first, second = kit.conv(inputs, outputs, 3, padding=1), kit.conv(outputs, outputs, 3, padding=1)
        return kit.Sequential(first, kit.ReLU(), second, kit.ReLU())

    class Up(kit.Net):
        def build(self, inputs, outputs):
            self.conv, self.up = double(2 * outputs, outputs), kit.deconv(inputs, outputs, 2, stride=2)

        def forward(self, x, skip):
            return self.conv(kit.cat([self.up(x), skip], 1))

    class UNet(kit.Net):
        def build(self):
            self.outc = kit.conv(one, 2, 1)
            self.up1, self.up2 = Up(three, two), Up(two, one)
            self.inc = double(3, one)
            self.down1 = kit.Sequential(kit.MaxPool(2), double(one, two))
            self.down2 = kit.Sequential(kit.MaxPool(2), double(two, three))

        def forward(self, x):
            wide = self.inc(x)
            deep = self.down1(wide)
            return self.outc(self.up2(self.up1(self.down2(deep), deep), wide))

    return UNet()


UNET = links(
    """
    encoder1.conv1     inc.0
    encoder1.conv2     inc.2
    encoder2.conv1     down1.1.0
    encoder2.conv2     down1.1.2
    bottleneck.conv1   down2.1.0
    bottleneck.conv2   down2.1.2
    upconv2            up1.up
    decoder2.conv1     up1.conv.0
    decoder2.conv2     up1.conv.2
    upconv1            up2.up
    decoder1.conv1     up2.conv.0
    decoder1.conv2     up2.conv.2
    conv               outc
    """
)


def convnext(kit):
    """timm's ConvNeXt: pointwise layers are Linear; layer scale is the block's own parameter."""

    class Block(kit.Net):
        def build(self):
            self.gamma = kit.param(8)
            self.dwconv = kit.conv(8, 8, 3, padding=1, groups=8)
            self.norm = kit.layernorm(8, eps=1e-6)
            self.pwconv1, self.act, self.pwconv2 = kit.linear(8, 16), kit.GELU(), kit.linear(16, 8)

        def forward(self, x):
            out = self.norm(kit.permute(self.dwconv(x), (0, 2, 3, 1)))
            out = self.gamma * self.pwconv2(self.act(self.pwconv1(out)))
            return x + kit.permute(out, (0, 3, 1, 2))

    return kit.net(
        lambda net, x: net.head(net.stages(net.stem(x)).mean((2, 3))),
        stem=kit.conv(3, 8, 2, stride=2),
        stages=kit.Sequential(Block(), Block()),
        head=kit.linear(8, 4),
    )


def channels_first(kit):
    """1x1 convolutions, a LayerNorm over channels of one's own, layer scale as a layer."""

    class LayerNorm2d(kit.Net):
        def build(self):
            self.scale, self.shift = kit.param(8), kit.param(8)

        def forward(self, x):
            x = x - x.mean(1, keepdim=True)
            x = x / kit.sqrt((x * x).mean(1, keepdim=True) + 1e-6)
            return x * self.scale.reshape((1, 8, 1, 1)) + self.shift.reshape((1, 8, 1, 1))

    class LayerScale(kit.Net):
        def build(self):
            self.lambda_ = kit.param(1, 8, 1, 1)

        def forward(self, x):
            return x * self.lambda_

    class CNBlock(kit.Net):
        def build(self):
            self.block = kit.Sequential(
                kit.conv(8, 8, 3, padding=1, groups=8),
                LayerNorm2d(),
                kit.conv(8, 16, 1),
                kit.GELU(),
                kit.conv(16, 8, 1),
                LayerScale(),
            )

        def forward(self, x):
            return x + self.block(x)

    class Net(kit.Net):
        def build(self):
            self.patchify = kit.conv(3, 8, 2, stride=2)
            self.body = kit.List([CNBlock(), CNBlock()])
            self.classifier = kit.linear(8, 4)

        def forward(self, x):
            x = self.patchify(x)
            for block in self.body:
                x = block(x)
            return self.classifier(x.mean((2, 3)))

    return Net()


CONVNEXT = links(
    """
    stem                  patchify
    stages.{i}            body.{i}.block.5
    stages.{i}.dwconv     body.{i}.block.0
    stages.{i}.norm       body.{i}.block.1
    stages.{i}.pwconv1    body.{i}.block.2
    stages.{i}.pwconv2    body.{i}.block.4
    head                  classifier
    """
)


def carry_convnext(ref, cand):
    for reference, candidate in CONVNEXT:
        if candidate.endswith("block.5"):
            put(cand, candidate, "lambda_", value(ref, reference, "weight").reshape((1, 8, 1, 1)))
        else:
            same(ref, reference, cand, candidate)


PAIRS = (
    # Skips; the way up is defined before the way down; widths tell the scales apart.
    pair("unet_up_before_down", unet, ups_and_downs, IMAGES, UNET),
    # The same with one width: numbers mislead (decoder2 is up1), only running tells.
    pair(
        "unet_of_one_width",
        partial(unet, widths=(8, 8, 8)),
        partial(ups_and_downs, widths=(8, 8, 8)),
        IMAGES,
        UNET,
        evidence="execution",
    ),
    # Linear against 1x1 convolutions, a norm over channels, layer scale as parameter against a layer.
    pair("convnext_channels_first", convnext, channels_first, IMAGES, CONVNEXT, carry_convnext),
)
