"""Convolutional nets: residual, plain, branched."""

from __future__ import annotations

from kit.frameworks import PADDLE, TORCH

from .pair import links, normal, pair

IMAGES = (normal(2, 3, 12, 12),)


def resnet(kit):
    """torchvision's names; activations are functions; ``downsample`` is a Sequential."""

    class BasicBlock(kit.Net):
        def build(self, inputs, outputs, stride):
            self.conv1 = kit.conv(inputs, outputs, 3, stride=stride, padding=1, bias=False)
            self.bn1 = kit.batchnorm(outputs)
            self.conv2 = kit.conv(outputs, outputs, 3, padding=1, bias=False)
            self.bn2 = kit.batchnorm(outputs)
            self.downsample = None
            if stride != 1:
                projection = kit.conv(inputs, outputs, 1, stride=stride, bias=False)
                self.downsample = kit.Sequential(projection, kit.batchnorm(outputs))

        def forward(self, x):
            identity = x if self.downsample is None else self.downsample(x)
            out = self.bn2(self.conv2(kit.relu(self.bn1(self.conv1(x)))))
            return kit.relu(out + identity)

    class ResNet(kit.Net):
        def build(self):
            self.conv1 = kit.conv(3, 8, 3, padding=1, bias=False)
            self.bn1 = kit.batchnorm(8)
            self.layer1 = kit.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
            self.layer2 = kit.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
            self.fc = kit.linear(16, 5)

        def forward(self, x):
            x = self.layer2(self.layer1(kit.relu(self.bn1(self.conv1(x)))))
            return self.fc(x.mean((2, 3)))

    return ResNet()


def staged_resnet(kit):
    """The head is defined first, the shortcut before the body; activations are layers."""

    class Shortcut(kit.Net):
        def build(self, inputs, outputs, stride):
            self.norm = kit.batchnorm(outputs)
            self.conv = kit.conv(inputs, outputs, 1, stride=stride, bias=False)

        def forward(self, x):
            return self.norm(self.conv(x))

    class Unit(kit.Net):
        def build(self, inputs, outputs, stride):
            self.shortcut = Shortcut(inputs, outputs, stride) if stride != 1 else kit.Identity()
            self.a_conv = kit.conv(inputs, outputs, 3, stride=stride, padding=1, bias=False)
            self.a_norm = kit.batchnorm(outputs)
            self.act = kit.ReLU()
            self.b_conv = kit.conv(outputs, outputs, 3, padding=1, bias=False)
            self.b_norm = kit.batchnorm(outputs)
            self.final_act = kit.ReLU()

        def forward(self, x):
            out = self.b_norm(self.b_conv(self.act(self.a_norm(self.a_conv(x)))))
            return self.final_act(out + self.shortcut(x))

    class Stage(kit.Net):
        def build(self, inputs, outputs, stride):
            self.blocks = kit.List([Unit(inputs, outputs, stride), Unit(outputs, outputs, 1)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    class StagedResNet(kit.Net):
        def build(self):
            self.classifier = kit.linear(16, 5)
            conv = kit.conv(3, 8, 3, padding=1, bias=False)
            self.stem = kit.named(conv=conv, norm=kit.batchnorm(8), act=kit.ReLU())
            self.stages = kit.List([Stage(8, 8, 1), Stage(8, 16, 2)])

        def forward(self, x):
            x = self.stem(x)
            for stage in self.stages:
                x = stage(x)
            return self.classifier(x.mean((2, 3)))

    return StagedResNet()


RESNET_TO_STAGES = links(
    """
    conv1                   stem.conv
    bn1                     stem.norm
    layer1.{i}.conv1        stages.0.blocks.{i}.a_conv
    layer1.{i}.bn1          stages.0.blocks.{i}.a_norm
    layer1.{i}.conv2        stages.0.blocks.{i}.b_conv
    layer1.{i}.bn2          stages.0.blocks.{i}.b_norm
    layer2.{i}.conv1        stages.1.blocks.{i}.a_conv
    layer2.{i}.bn1          stages.1.blocks.{i}.a_norm
    layer2.{i}.conv2        stages.1.blocks.{i}.b_conv
    layer2.{i}.bn2          stages.1.blocks.{i}.b_norm
    layer2.0.downsample.0   stages.1.blocks.0.shortcut.conv
    layer2.0.downsample.1   stages.1.blocks.0.shortcut.norm
    fc                      classifier
    """
)


def own_norm_resnet(kit, frozen=False):
    """Its own BatchNorm (gamma, beta, moving statistics), defined after all convolutions; flat, no nested blocks."""

    class BatchNormalization(kit.Net):
        def build(self, width):
            self.gamma, self.beta = kit.param(width), kit.param(width)
            self.register_buffer("moving_mean", kit.zeros(width))
            self.register_buffer("moving_variance", kit.zeros(width))

        def forward(self, x):
            def wide(value):
                return value.reshape((1, -1, 1, 1))

            normed = (x - wide(self.moving_mean)) / kit.sqrt(wide(self.moving_variance) + 1e-5)
            return wide(self.gamma) * normed + wide(self.beta)

    class FrozenBatchNorm2d(kit.Net):
        def build(self, width):
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(name, kit.zeros(width))

        def forward(self, x):
            factor = self.weight / kit.sqrt(self.running_var + 1e-5)
            offset = self.bias - self.running_mean * factor
            return x * factor.reshape((1, -1, 1, 1)) + offset.reshape((1, -1, 1, 1))

    norm = FrozenBatchNorm2d if frozen else BatchNormalization

    class Bottleneck(kit.Net):
        def build(self, inputs, middle, outputs):
            self.reduce = kit.conv(inputs, middle, 1, bias=False)
            self.spatial = kit.conv(middle, middle, 3, padding=1, bias=False)
            self.expand = kit.conv(middle, outputs, 1, bias=False)
            self.proj = kit.conv(inputs, outputs, 1, bias=False)
            self.reduce_bn, self.spatial_bn, self.expand_bn = norm(middle), norm(middle), norm(outputs)
            self.proj_bn = norm(outputs)

        def forward(self, x):
            out = kit.relu(self.reduce_bn(self.reduce(x)))
            out = kit.relu(self.spatial_bn(self.spatial(out)))
            return kit.relu(self.expand_bn(self.expand(out)) + self.proj_bn(self.proj(x)))

    return kit.net(
        lambda net, x: net.logits(net.block_b(net.block_a(x)).mean((2, 3))),
        block_a=Bottleneck(3, 8, 16),
        block_b=Bottleneck(16, 8, 16),
        logits=kit.linear(16, 4),
    )


def bottleneck_resnet(kit):
    """The same with the framework's BatchNorm, conv and norm in turn, and ``downsample``."""

    class Bottleneck(kit.Net):
        def build(self, inputs, middle, outputs):
            self.conv1 = kit.conv(inputs, middle, 1, bias=False)
            self.bn1 = kit.batchnorm(middle)
            self.conv2 = kit.conv(middle, middle, 3, padding=1, bias=False)
            self.bn2 = kit.batchnorm(middle)
            self.conv3 = kit.conv(middle, outputs, 1, bias=False)
            self.bn3 = kit.batchnorm(outputs)
            self.relu = kit.ReLU()
            self.downsample = kit.Sequential(kit.conv(inputs, outputs, 1, bias=False), kit.batchnorm(outputs))

        def forward(self, x):
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.relu(self.bn2(self.conv2(out)))
            return self.relu(self.bn3(self.conv3(out)) + self.downsample(x))

    class ResNet(kit.Net):
        def build(self):
            self.layers = kit.Sequential(Bottleneck(3, 8, 16), Bottleneck(16, 8, 16))
            self.fc = kit.linear(16, 4)

        def forward(self, x):
            return self.fc(self.layers(x).mean((2, 3)))

    return ResNet()


BOTTLENECKS = "".join(
    f"""
    layers.{index}.conv1          block_{letter}.reduce
    layers.{index}.bn1            block_{letter}.reduce_bn
    layers.{index}.conv2          block_{letter}.spatial
    layers.{index}.bn2            block_{letter}.spatial_bn
    layers.{index}.conv3          block_{letter}.expand
    layers.{index}.bn3            block_{letter}.expand_bn
    layers.{index}.downsample.0   block_{letter}.proj
    layers.{index}.downsample.1   block_{letter}.proj_bn
    """
    for index, letter in enumerate("ab")
)
BOTTLENECKS = links(BOTTLENECKS + "\n    fc logits")


def reversed_resnet(kit):
    """Blocks are made from the last to the first, then named by their place; norms stand before their convs."""

    class Block(kit.Net):
        def build(self, inputs, outputs, stride):
            self.norm2, self.norm1 = kit.batchnorm(outputs), kit.batchnorm(outputs)
            self.conv2 = kit.conv(outputs, outputs, 3, padding=1, bias=False)
            self.conv1 = kit.conv(inputs, outputs, 3, stride=stride, padding=1, bias=False)
            if stride != 1:
                self.short_norm = kit.batchnorm(outputs)
                self.short = kit.conv(inputs, outputs, 1, stride=stride, bias=False)

        def forward(self, x):
            out = kit.relu(self.norm1(self.conv1(x)))
            out = self.norm2(self.conv2(out))
            return kit.relu(out + (self.short_norm(self.short(x)) if hasattr(self, "short") else x))

    class Net(kit.Net):
        def build(self):
            self.head = kit.linear(16, 5)
            self.block4, self.block3 = Block(16, 16, 1), Block(8, 16, 2)
            self.block2, self.block1 = Block(8, 8, 1), Block(8, 8, 1)
            self.stem_norm = kit.batchnorm(8)
            self.stem = kit.conv(3, 8, 3, padding=1, bias=False)

        def forward(self, x):
            x = kit.relu(self.stem_norm(self.stem(x)))
            for block in (self.block1, self.block2, self.block3, self.block4):
                x = block(x)
            return self.head(x.mean((2, 3)))

    return Net()


REVERSED = links(
    "conv1 stem\nbn1 stem_norm\nfc head\n"
    + "layer2.0.downsample.0 block3.short\nlayer2.0.downsample.1 block3.short_norm\n"
    + "\n".join(
        f"layer{stage}.{block}.{reference} block{2 * stage + block - 1}.{candidate}"
        for stage in (1, 2)
        for block in (0, 1)
        for reference, candidate in (("conv1", "conv1"), ("bn1", "norm1"), ("conv2", "conv2"), ("bn2", "norm2"))
    )
)


def vgg(kit):
    """A Sequential with indices."""
    layers = []
    for inputs, outputs in ((3, 8), (8, 8), (8, 16)):
        layers += [kit.conv(inputs, outputs, 3, padding=1), kit.batchnorm(outputs), kit.ReLU()]
    return kit.named(
        features=kit.Sequential(*layers, kit.MaxPool(4)), flat=kit.Flatten(), classifier=kit.linear(16 * 9, 4)
    )


def named_vgg(kit):
    """Named units, norms of all units defined after the convolutions, the head before both."""

    class VGG(kit.Net):
        def build(self):
            self.fc = kit.linear(16 * 9, 4)
            self.conv1_1, self.conv1_2 = kit.conv(3, 8, 3, padding=1), kit.conv(8, 8, 3, padding=1)
            self.conv2_1 = kit.conv(8, 16, 3, padding=1)
            self.bn1_1, self.bn1_2, self.bn2_1 = kit.batchnorm(8), kit.batchnorm(8), kit.batchnorm(16)

        def forward(self, x):
            x = kit.relu(self.bn1_2(self.conv1_2(kit.relu(self.bn1_1(self.conv1_1(x))))))
            x = kit.max_pool(kit.relu(self.bn2_1(self.conv2_1(x))), 4)
            return self.fc(x.flatten(1))

    return VGG()


VGG = links(
    """
    features.0 conv1_1
    features.1 bn1_1
    features.3 conv1_2
    features.4 bn1_2
    features.6 conv2_1
    features.7 bn2_1
    classifier fc
    """
)

PAIRS = (
    # Other names and nesting, the head first, the shortcut before the body, relu as functions and as layers.
    pair("resnet_stages", resnet, staged_resnet, IMAGES, RESNET_TO_STAGES),
    # A BatchNorm class of one's own with other names, all norms defined last.
    pair("resnet_own_norm", bottleneck_resnet, own_norm_resnet, IMAGES, BOTTLENECKS),
    # Frozen norms, which own buffers only.
    pair("resnet_frozen_norm", bottleneck_resnet, lambda kit: own_norm_resnet(kit, frozen=True), IMAGES, BOTTLENECKS),
    # Two torch models, with the same reversal.
    pair("resnet_reversed_torch", resnet, reversed_resnet, IMAGES, REVERSED, kits=(TORCH, TORCH)),
    # Sequential indices against names, in paddle alone.
    pair("vgg_indices", vgg, named_vgg, IMAGES, VGG, kits=(PADDLE, PADDLE)),
)
