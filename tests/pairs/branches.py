"""Convolutional nets with branches and gates."""

from __future__ import annotations

from .pair import links, normal, pair

IMAGES = (normal(2, 3, 8, 8),)


def inception(kit):
    """Branches named by what they are."""

    def unit(inputs, outputs, size):
        return kit.Sequential(kit.conv(inputs, outputs, size, padding=size // 2), kit.batchnorm(outputs), kit.ReLU())

    class Inception(kit.Net):
        def build(self, inputs):
            self.branch1x1 = unit(inputs, 8, 1)
            self.branch5x5_1, self.branch5x5_2 = unit(inputs, 8, 1), unit(8, 8, 3)
            self.branch3x3dbl_1, self.branch3x3dbl_2 = unit(inputs, 8, 1), unit(8, 8, 3)
            self.branch3x3dbl_3 = unit(8, 8, 3)
            self.branch_pool = unit(inputs, 8, 1)

        def forward(self, x):
            one = self.branch1x1(x)
            five = self.branch5x5_2(self.branch5x5_1(x))
            three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
            return kit.cat([one, five, three, self.branch_pool(kit.relu(x))], 1)

    return kit.net(
        lambda net, x: net.fc(net.mixed_b(net.mixed_a(x)).mean((2, 3))),
        mixed_a=Inception(3),
        mixed_b=Inception(32),
        fc=kit.linear(32, 4),
    )


def branched(kit):
    """Branches numbered in the same order, each a Sequential of named convolution and norm."""

    def unit(inputs, outputs, size):
        conv = kit.conv(inputs, outputs, size, padding=size // 2)
        return kit.named(conv=conv, bn=kit.batchnorm(outputs), act=kit.ReLU())

    class Mixed(kit.Net):
        def build(self, inputs):
            self.b0 = unit(inputs, 8, 1)
            self.b1 = kit.Sequential(unit(inputs, 8, 1), unit(8, 8, 3))
            self.b2 = kit.Sequential(unit(inputs, 8, 1), unit(8, 8, 3), unit(8, 8, 3))
            self.b3 = kit.Sequential(kit.ReLU(), unit(inputs, 8, 1))

        def forward(self, x):
            return kit.cat([branch(x) for branch in (self.b0, self.b1, self.b2, self.b3)], 1)

    return kit.net(
        lambda net, x: net.out(net.trunk(x).mean((2, 3))),
        trunk=kit.Sequential(Mixed(3), Mixed(32)),
        out=kit.linear(32, 4),
    )


INCEPTION = "\n fc out" + "".join(
    f"\n mixed_{letter}.{reference}.0 trunk.{index}.{candidate}.conv"
    f"\n mixed_{letter}.{reference}.1 trunk.{index}.{candidate}.bn"
    for index, letter in enumerate("ab")
    for reference, candidate in (
        ("branch1x1", "b0"),
        ("branch5x5_1", "b1.0"),
        ("branch5x5_2", "b1.1"),
        ("branch3x3dbl_1", "b2.0"),
        ("branch3x3dbl_2", "b2.1"),
        ("branch3x3dbl_3", "b2.2"),
        ("branch_pool", "b3.1"),
    )
)


def mobile(kit):
    """MobileNet's inverted residuals, Sequential with indices; squeeze and excitation by 1x1 convolutions."""

    class SqueezeExcite(kit.Net):
        def build(self, width):
            self.conv_reduce, self.conv_expand = kit.conv(width, 4, 1), kit.conv(4, width, 1)

        def forward(self, x):
            return x * kit.sigmoid(self.conv_expand(kit.relu(self.conv_reduce(x.mean((2, 3), True)))))

    class Inverted(kit.Net):
        def build(self):
            into, out = kit.conv(8, 16, 1, bias=False), kit.conv(16, 8, 1, bias=False)
            deep = kit.conv(16, 16, 3, padding=1, groups=16, bias=False)
            wide = [kit.batchnorm(16), kit.ReLU6()], [kit.batchnorm(16), kit.ReLU6()]
            self.conv = kit.Sequential(into, *wide[0], deep, *wide[1], SqueezeExcite(16), out, kit.batchnorm(8))

        def forward(self, x):
            return x + self.conv(x)

    stem = kit.Sequential(kit.conv(3, 8, 3, stride=2, padding=1), kit.batchnorm(8), kit.ReLU6())
    return kit.named(features=kit.Sequential(stem, Inverted(), Inverted()), last=kit.conv(8, 4, 1))


def depthwise(kit):
    """The same with names; squeeze and excitation by Linear layers; norms before their convolutions; a Linear head."""

    class SE(kit.Net):
        def build(self):
            self.fc1, self.fc2 = kit.linear(16, 4), kit.linear(4, 16)

        def forward(self, x):
            share = kit.sigmoid(self.fc2(kit.relu(self.fc1(x.mean((2, 3))))))
            return x * share.reshape((x.shape[0], 16, 1, 1))

    class MBConv(kit.Net):
        def build(self):
            self.se = SE()
            self.bn0, self.bn1, self.bn2 = kit.batchnorm(16), kit.batchnorm(16), kit.batchnorm(8)
            self.project_conv = kit.conv(16, 8, 1, bias=False)
            self.expand_conv = kit.conv(8, 16, 1, bias=False)
            self.depthwise_conv = kit.conv(16, 16, 3, padding=1, groups=16, bias=False)

        def forward(self, x):
            out = kit.relu6(self.bn0(self.expand_conv(x)))
            out = self.se(kit.relu6(self.bn1(self.depthwise_conv(out))))
            return x + self.bn2(self.project_conv(out))

    class Net(kit.Net):
        def build(self):
            self.conv_stem, self.bn_stem = kit.conv(3, 8, 3, stride=2, padding=1), kit.batchnorm(8)
            self.blocks = kit.Dict({"first": MBConv(), "second": MBConv()})
            self.conv_head = kit.linear(8, 4)

        def forward(self, x):
            x = kit.relu6(self.bn_stem(self.conv_stem(x)))
            x = self.blocks["second"](self.blocks["first"](x))
            x = self.conv_head(kit.permute(x, (0, 2, 3, 1)))
            return kit.permute(x, (0, 3, 1, 2))

    return Net()


MOBILE = links(
    "\n features.0.0 conv_stem\n features.0.1 bn_stem\n last conv_head"
    + "".join(
        f"\n features.{index}.conv.{reference} blocks.{name}.{candidate}"
        for index, name in ((1, "first"), (2, "second"))
        for reference, candidate in (
            ("0", "expand_conv"),
            ("1", "bn0"),
            ("3", "depthwise_conv"),
            ("4", "bn1"),
            ("6.conv_reduce", "se.fc1"),
            ("6.conv_expand", "se.fc2"),
            ("7", "project_conv"),
            ("8", "bn2"),
        )
    )
)


PAIRS = (
    # Branches of the same shapes, in the same order, with names that tell nothing.
    pair("inception_branches", inception, branched, IMAGES, links(INCEPTION)),
    # Depthwise convolutions by index against names; 1x1 convolutions against Linear; squeeze and excitation first.
    pair("mobile_squeeze_excite", mobile, depthwise, IMAGES, MOBILE),
)
