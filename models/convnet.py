"""A residual network of ResNet-18's size (12M): convolution, batch norm, ReLU in place.

Structure and names are those of torchvision's resnet18.  Its batch norms hold statistics, weights and
biases as training would leave them: with fresh ones (mean 0, variance 1) a wrong folding goes unseen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Config:
    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    classes: int = 1000
    batch: int = 8
    image: int = 224


class BasicBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or width_in != width:
            projection = nn.Conv2d(width_in, width, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ConvNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv2d(3, config.widths[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(config.widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        width_in = config.widths[0]
        for i, (width, count) in enumerate(zip(config.widths, config.blocks, strict=True)):
            strides = [1 if i == 0 else 2] + [1] * (count - 1)
            inputs = [width_in] + [width] * (count - 1)
            blocks = (BasicBlock(n, width, stride) for n, stride in zip(inputs, strides, strict=True))
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
            width_in = width
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width_in, config.classes)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, mean=1.0, std=0.1)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)

    def forward(self, images: Tensor) -> Tensor:
        """``images`` (batch, 3, height, width) -> logits (batch, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for i in range(len(self.config.blocks)):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def build() -> nn.Module:
    return ConvNet(Config()).eval()


def example_inputs(model: nn.Module) -> tuple[Tensor, ...]:
    config = model.config
    return (torch.randn(config.batch, 3, config.image, config.image),)
