"""Batches of images with random crops and flips."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_dak.training.data import ResidentData

__all__ = ["AugmentedBatches", "AugmentedData", "crop_and_flip"]


def crop_and_flip(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Each image `(N, C, H, W)` moved by up to `padding` pixels, black at the rim, half flipped."""
    N, _, H, W = x.shape
    padded = torch.nn.functional.pad(x, (padding,) * 4)
    top, left = (torch.randint(2 * padding + 1, (2, N, 1), generator=generator)).unbind(0)
    is_flipped = torch.rand(N, 1, generator=generator) < 0.5
    rows = top + torch.arange(H)  # (N, H)
    columns = left + torch.arange(W)
    columns = torch.where(is_flipped, columns.flip(1), columns)
    index = (torch.arange(N)[:, None, None], rows[:, :, None], columns[:, None, :])
    image, row, column = (part.to(x.device) for part in index)
    return padded[image, :, row, column].permute(0, 3, 1, 2)  # (N, C, H, W), channels last


class AugmentedBatches:
    """An iterable of (x, y) for `pyro_dak.fit`: every image once per epoch, cropped and flipped.

    Everything that an epoch draws comes from one number of torch's global generator, drawn at its
    start, so that a resumed run sees the same images.
    """

    def __init__(self, x: Tensor, y: Tensor, batch_size: int):
        self.dataset = range(len(x))  # its length is what `fit` asks for
        self.data = ResidentData(x, y, batch_size)

    def __len__(self) -> int:
        return self.data.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        for x, y, _ in self.data.epoch(generator, 0):
            yield crop_and_flip(x, generator), y


class AugmentedData(ResidentData):
    """The same batches for the loop of the baselines: x, y and the weight of a row."""

    def epoch(
        self, generator: torch.Generator, start: int
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Batches from number `start` on."""
        own = torch.Generator().manual_seed(int(torch.randint(2**31, (), generator=generator)))
        for number, (x, y, scale) in enumerate(super().epoch(own, 0)):
            x = crop_and_flip(x, own)
            if number >= start:
                yield x, y, scale
