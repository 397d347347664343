"""A small U-Net for binary/multi-class segmentation.

Conv-BN-ReLU double blocks, max-pool down, bilinear or transposed-conv up, and skip connections that are
padded to match, so any input size works (the example image is not divisible by 8 on purpose).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn_relu(cin: int, cout: int, k: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(cin, cout, k, padding=k // 2, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


class DoubleConv(nn.Sequential):
    def __init__(self, cin: int, cout: int, mid: int | None = None) -> None:
        mid = mid or cout
        super().__init__(conv_bn_relu(cin, mid), conv_bn_relu(mid, cout))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, reduction: int = 4) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // reduction),
            nn.ReLU(inplace=True),
            nn.Linear(channels // reduction, channels),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.shape
        w = self.fc(x.mean(dim=(2, 3))).view(b, c, 1, 1)
        return x * w


class Up(nn.Module):
    def __init__(self, cin: int, cskip: int, cout: int, bilinear: bool = True) -> None:
        super().__init__()
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(cin + cskip, cout, mid=(cin + cskip) // 2)
        else:
            self.up = nn.ConvTranspose2d(cin, cin // 2, kernel_size=2, stride=2)
            self.conv = DoubleConv(cin // 2 + cskip, cout)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        dy = skip.size(2) - x.size(2)
        dx = skip.size(3) - x.size(3)
        if dy != 0 or dx != 0:
            x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([skip, x], dim=1))


class UNet(nn.Module):
    def __init__(
        self, in_channels: int = 3, num_classes: int = 5, widths: Sequence[int] = (16, 32, 64, 128)
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.stem = DoubleConv(in_channels, widths[0])
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(a, b)) for a, b in pairwise(widths)
        )
        self.bottleneck = SqueezeExcite(widths[-1])
        self.up = nn.ModuleList()
        for i in range(len(widths) - 1, 0, -1):
            # deepest level uses a transposed conv, the rest plain interpolation
            self.up.append(Up(widths[i], widths[i - 1], widths[i - 1], bilinear=i < len(widths) - 1))
        self.head = nn.Conv2d(widths[0], num_classes, kernel_size=1)
        self.apply(self._init)

    @staticmethod
    def _init(m: nn.Module) -> None:
        if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            if m.bias is not None:
                nn.init.zeros_(m.bias)

    def forward(self, image: Tensor) -> Tensor:
        assert image.ndim == 4 and image.shape[1] == 3, f"expected NCHW RGB, got {tuple(image.shape)}"
        x = (image - self.mean) / self.std
        x = self.stem(x)
        skips = []
        for stage in self.down:
            skips.append(x)
            x = stage(x)
        x = self.bottleneck(x)
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


def build() -> nn.Module:
    torch.manual_seed(0)
    return UNet()


def example_inputs(model: nn.Module) -> tuple:
    gen = torch.Generator().manual_seed(1)
    return (torch.rand(2, 3, 100, 92, generator=gen),)
