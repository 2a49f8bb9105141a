"""Residual networks (He, Zhang, Ren, Sun, "Deep residual learning", CVPR 2016)."""

from torch import Tensor, nn
from torch.nn import functional

from mpigossip.config import JobError
from mpigossip.config.limits import Positive

Shape = tuple[int, ...]


def image_shape(shape: Shape, name: str, smallest: int) -> Shape:
    """Check that the shape of a sample is the shape of an image, and return it.

    :param shape: shape of a sample
    :param name: name of the model, for the message
    :param smallest: smallest allowed height and width in pixels
    :raises JobError: if the shape is not (channels, height, width), or a side is too small
    """
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise JobError(
            f'model.name = "{name}" takes images of (channels, height, width) with at least '
            f"{smallest}x{smallest} pixels, but samples have the shape {shape}; choose another "
            "model.name, or set data.image_size"
        )
    return shape


class Basic(nn.Module):
    """Block of two 3x3 convolutions, whose shortcut has no parameters (option A of the paper)."""

    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.stride = stride
        self.extra = out - wide

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, (B, out, H/stride, W/stride), for x, (B, wide, H, W)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.extra or self.stride > 1:
            half = self.extra // 2
            x = functional.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.extra - half)
            )
        return functional.relu(x + y)


class Bottleneck(nn.Module):
    """Block of 1x1, 3x3 and 1x1 convolutions, of which the 3x3 convolution has the stride.

    The output has 4 · inner channels. The scale of the last norm starts at 0, so that the output of
    each block starts as its shortcut (Goyal et al., 2017, section 5.1).
    """

    def __init__(self, wide: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.conv1 = nn.Conv2d(wide, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.shortcut = (
            nn.Sequential()
            if stride == 1 and wide == out
            else nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, (B, 4 inner, H/stride, W/stride), for x, (B, wide, H, W)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.shortcut(x) + self.bn3(self.conv3(y)))


def resnet20(shape: Shape, classes: int, *, width: Positive = 16) -> nn.Module:
    """Return ResNet-20 for small images.

    With 3 channels, 10 classes and the default width, it has 0.27 million parameters.

    :param shape: shape of a sample, (C, H, W)
    :param classes: number of classes
    :param width: number of channels of the first stage
    :raises JobError: if samples are no images of at least 4x4 pixels
    """
    return _small("resnet20", shape, classes, 3, width)


def resnet56(shape: Shape, classes: int, *, width: Positive = 16) -> nn.Module:
    """Return ResNet-56 for small images.

    With 3 channels, 10 classes and the default width, it has 0.86 million parameters.

    :param shape: shape of a sample, (C, H, W)
    :param classes: number of classes
    :param width: number of channels of the first stage
    :raises JobError: if samples are no images of at least 4x4 pixels
    """
    return _small("resnet56", shape, classes, 9, width)


def resnet50(shape: Shape, classes: int, *, width: Positive = 64) -> nn.Module:
    """Return ResNet-50 for images of the size of ImageNet.

    With 3 channels, 1,000 classes and the default width, it has 25.6 million parameters. If a block
    has a stride, its 3x3 convolution applies it.

    :param shape: shape of a sample, (C, H, W)
    :param classes: number of classes
    :param width: number of channels after the first convolution
    :raises JobError: if samples are no images of at least 32x32 pixels
    """
    channels, _, _ = image_shape(shape, "resnet50", 32)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    wide = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width << stage
        for block in range(blocks):
            layers.append(Bottleneck(wide, inner, 2 if stage and not block else 1))
            wide = 4 * inner
    return _with_head(layers, wide, classes)


def _small(name: str, shape: Shape, classes: int, blocks: int, width: int) -> nn.Module:
    """Return a network with three stages of blocks, at full, half and quarter resolution.

    With the width 16, it is the network for CIFAR in section 4.2 of the paper.

    :param name: name of the model, for messages
    :param shape: shape of a sample, (C, H, W)
    :param classes: number of classes
    :param blocks: number of blocks per stage
    :param width: number of channels of the first stage, which doubles with each further stage
    """
    channels, _, _ = image_shape(shape, name, 4)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    wide = width
    for stage in range(3):
        for block in range(blocks):
            layers.append(Basic(wide, width << stage, 2 if stage and not block else 1))
            wide = width << stage
    return _with_head(layers, wide, classes)


def _with_head(layers: list[nn.Module], wide: int, classes: int) -> nn.Module:
    """Return ``layers`` followed by a mean over pixels and a last layer, all of them initialized.

    Convolutions are initialized as by He et al., and the last layer with standard deviation 0.01
    (Goyal et al., 2017, section 5.1).

    :param layers: layers of the network without its head
    :param wide: number of channels of their output
    :param classes: number of classes
    """
    head = nn.Linear(wide, classes)
    nn.init.normal_(head.weight, 0.0, 0.01)
    nn.init.zeros_(head.bias)
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    for part in network.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return network
