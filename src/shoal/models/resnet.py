"""ResNets with BatchNorm (He et al. 2015, https://arxiv.org/abs/1512.03385): 18, 34, 50 for images, 20 for 32 x 32
ones.

The weights of 18, 34 and 50 have torchvision's shapes (stride on the 3 x 3 convolution of a bottleneck: "v1.5").

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.checks import one_of, positive


@dataclass(frozen=True)
class ResNetConfig:
    """The size of a ResNet. `depth`: 18, 34, 50, or 20, the narrow network for CIFAR (no max pooling, three stages,
    projection shortcuts)."""

    depth: int
    classes: int
    channels: int = 3

    def __post_init__(self) -> None:
        one_of("ResNet", "depth", self.depth, list(STAGES))
        positive("ResNet", "classes", self.classes)
        positive("ResNet", "channels", self.channels)


class Basic(nn.Module):
    """A block of two 3 x 3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(channels, width, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x_BCHW)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x_BCHW))


class Bottleneck(nn.Module):
    """A block of 1 x 1, 3 x 3, 1 x 1 convolutions and a shortcut; four times as wide at the end."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(channels, 4 * width, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x_BCHW)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x_BCHW))


def _shortcut(channels: int, width: int, stride: int) -> nn.Module:
    if channels == width and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))


STAGES: dict[int, tuple[type[Basic] | type[Bottleneck], tuple[int, ...], int]] = {
    18: (Basic, (2, 2, 2, 2), 64),
    34: (Basic, (3, 4, 6, 3), 64),
    50: (Bottleneck, (3, 4, 6, 3), 64),
    20: (Basic, (3, 3, 3), 16),
}
"""By depth: the block, blocks per stage, width of the first stage; later stages halve the size and double the width."""


class ResNet(nn.Module):
    """A model from images [B, C, H, W] to class logits [B, classes]."""

    def __init__(self, cfg: ResNetConfig) -> None:
        super().__init__()
        self.cfg = cfg
        block, counts, width = STAGES[cfg.depth]
        if cfg.depth == 20:
            stem = [nn.Conv2d(cfg.channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        else:
            stem = [nn.Conv2d(cfg.channels, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            stem.append(nn.MaxPool2d(3, 2, padding=1))
        self.stem = nn.Sequential(*stem)
        channels = width
        blocks: list[nn.Module] = []
        for stage, count in enumerate(counts):
            for index in range(count):
                blocks.append(block(channels, width << stage, 2 if stage > 0 and index == 0 else 1))
                channels = (width << stage) * block.expansion
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, cfg.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises convolutions as He et al. (fan out, ReLU); BatchNorm and the head keep torch's own."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem(images_BCHW)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.head(x_BCHW.mean(dim=(2, 3)))
