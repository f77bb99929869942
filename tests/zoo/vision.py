"""Models of images: transformers, timm, torchvision, and a U-Net."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import packages
from tests.zoo.entry import CLASSES, SAMPLES, Microbatch, Model, Sample, classes, draws, images, rows

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
PATCHES: dict[str, Any] = {"image_size": 32, "patch_size": 8}


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=CLASSES, **SMALL, **PATCHES))


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**SMALL, "vocab_size": 61, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    return CLIPModel(CLIPConfig(text_config=text, vision_config={**SMALL, **PATCHES}, projection_dim=16))


def pairs() -> list[Sample]:
    return [
        {"input_ids": row["input_ids"], "pixel_values": image["pixel_values"]}
        for row, image in zip(rows(), images(), strict=True)
    ]


def contrastive(model: nn.Module, mb: Microbatch) -> tuple[Tensor, int]:
    """Which text of the microbatch belongs to each of its images, and the other way round."""
    result = model(input_ids=mb["input_ids"], pixel_values=mb["pixel_values"])
    here, number = torch.arange(len(mb["input_ids"])), len(mb["input_ids"])
    total = F.cross_entropy(result.logits_per_image, here, reduction="sum")
    return total + F.cross_entropy(result.logits_per_text, here, reduction="sum"), 2 * number


def timm(name: str, **options: Any) -> nn.Module:
    return packages.load("timm").create_model(name, num_classes=CLASSES, **options)


def torchvision(name: str, **options: Any) -> nn.Module:
    return getattr(packages.load("torchvision").models, name)(num_classes=CLASSES, **options)


class Double(nn.Module):
    """Two convolutions, told the time in between."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.norm = nn.GroupNorm(4, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = F.silu(self.first(x)) + self.time(time)[:, :, None, None]
        return self.second(F.silu(self.norm(h)))


class UNet(nn.Module):
    """A denoiser: down, a middle, and up again, with skips and a sinusoidal embedding of time."""

    def __init__(self, width: int = 8, time: int = 16) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, -4, time // 2)), persistent=False)
        self.embed = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.down = nn.ModuleList([Double(3, width, time), Double(width, 2 * width, time)])
        self.middle = Double(2 * width, 2 * width, time)
        self.up = nn.ModuleList([Double(4 * width, width, time), Double(2 * width, width, time)])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies
        time = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        skips = []
        for part in self.down:
            x = part(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for part in self.up:
            x = part(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1), time)
        return self.head(x)


def noisy() -> list[Sample]:
    draw = draws(3)
    return [
        {
            "noisy": torch.randn(3, 16, 16, generator=draw),
            "noise": torch.randn(3, 16, 16, generator=draw),
            "time": torch.rand((), generator=draw) * 100,
        }
        for _ in range(SAMPLES)
    ]


def denoising(model: nn.Module, mb: Microbatch) -> tuple[Tensor, int]:
    return (model(mb["noisy"], mb["time"]) - mb["noise"]).square().sum(), mb["noise"].numel()


VISION: dict[str, Model] = {
    "vit": Model(vit, classes, images),
    "clip": Model(clip, contrastive, pairs),
    "timm vit": Model(
        partial(timm, "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4),
        classes,
        images,
    ),
    "timm convnext": Model(partial(timm, "convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)), classes, images),
    # statistics of 2 samples of one pixel each would turn the rounding of a sum into another network
    "torchvision resnet18": Model(partial(torchvision, "resnet18"), classes, partial(images, 64)),
    "torchvision efficientnet_b0": Model(
        partial(torchvision, "efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0), classes, partial(images, 64)
    ),
    "u-net": Model(UNet, denoising, noisy),
}
