"""Feature extractors for images: the CNN and the ResNets of the paper, and smaller ones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torchvision.models.resnet import BasicBlock, ResNet

from pyro_dak.validation import check_choice

from .backbones import Residual


class Pixels(nn.Module):
    """(x - mean) / std of each channel, for images in [0, 1], with channels last in memory.

    Args:
        mean: of each channel.
        std: of each channel.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)


def cnn() -> nn.Sequential:
    """The paper's CNN for 28 x 28 images, 128 features; 1.199M parameters.

    The ReLU comes after the pooling, which gives the same numbers as before it, on a quarter of
    the values.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
    )


def digits_cnn() -> nn.Sequential:
    """A small CNN for the 8 x 8 digits of scikit-learn, 64 features."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(inplace=True),
        nn.Dropout(0.25),
    )


def _resnet(layers: list[int]) -> nn.Module:
    """torchvision's ResNet for 32 x 32 images: a 3 x 3 stem without pooling, 512 features."""
    network = ResNet(BasicBlock, layers)
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()
    network.fc = nn.Identity()
    return network


def resnet18() -> nn.Module:
    """The paper's network for CIFAR-10, 512 features, 11.17M parameters."""
    return _resnet([2, 2, 2, 2])


def resnet34() -> nn.Module:
    """The paper's network for CIFAR-100, 512 features, 21.28M parameters."""
    return _resnet([3, 4, 6, 3])


def small_resnet() -> nn.Sequential:
    """A ResNet for two cores: a stem of stride 2, blocks of 16, 32 and 64 channels, 64 features."""
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    return nn.Sequential(
        *stem,
        BasicBlock(16, 16),
        _downsampling_block(16, 32),
        _downsampling_block(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def _downsampling_block(width_in: int, width_out: int) -> BasicBlock:
    shortcut = nn.Sequential(
        nn.Conv2d(width_in, width_out, 1, 2, bias=False), nn.BatchNorm2d(width_out)
    )
    return BasicBlock(width_in, width_out, 2, shortcut)


def distance_resnet() -> nn.Sequential:
    """A small ResNet that keeps distances up to its last pooling, 192 features.

    Images become smaller by moving 2 x 2 pixels into channels, which is an isometry. Blocks add
    c relu(conv(x)) to x, c = 1/2. The norm of a 3 x 3 convolution is at most 3 times that of its
    weights as a matrix, which is made 1/3. So distances before the pooling are 1/8 to 27/8 times
    those of the images.
    """
    layers: list[nn.Module] = []
    for width in (12, 48, 192):
        layers += [nn.PixelUnshuffle(2), Residual(_Contraction(width), 0.5)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class _Contraction(nn.Module):
    """relu(conv(x)) with a 3 x 3 convolution, of Lipschitz constant at most 1."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = spectral_norm(nn.Conv2d(width, width, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.conv(x) / 3)


BACKBONES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "cnn": (cnn, 128),
    "digits_cnn": (digits_cnn, 64),
    "distance_resnet": (distance_resnet, 192),
    "resnet18": (resnet18, 512),
    "resnet34": (resnet34, 512),
    "small_resnet": (small_resnet, 64),
}


def build_backbone(
    name: str, mean: Sequence[float], std: Sequence[float]
) -> tuple[nn.Sequential, int]:
    """The network with this name, behind the scaling of its pixels, and its number of features."""
    check_choice("backbone", name, BACKBONES)
    make, feature_dim = BACKBONES[name]
    network = nn.Sequential(Pixels(mean, std), make())
    return network.to(memory_format=torch.channels_last), feature_dim
