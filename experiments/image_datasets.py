"""Image data sets by name: from a data directory, else downloaded once and verified.

MNIST and Fashion-MNIST are read from their gzipped idx files (`fashion` is the 10,000 images of its
test part alone, of which 2,000 are for testing); CIFAR from the subsets `NAME_subset
.npz` in the data directory (10,000 training and 2,000 test images) or, in full, through
torchvision; digits come with scikit-learn.
"""

import gzip
import math
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
from torch import Tensor

from experiments.datasets import DataError, find_file
from pyro_dak.validation import check_choice

__all__ = ["IMAGE_SETS", "Images", "load_images", "read_idx"]

IMAGE_SETS = ("cifar10", "cifar100", "digits", "fashion", "mnist")
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_CIFAR_MEAN = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
# Directory, address and sha256 of the idx files.
_IDX = {
    "mnist-x_train": (
        "MNIST/raw/train-images-idx3-ubyte.gz",
        _MNIST_URL,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    "mnist-y_train": (
        "MNIST/raw/train-labels-idx1-ubyte.gz",
        _MNIST_URL,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    "mnist-x_test": (
        "MNIST/raw/t10k-images-idx3-ubyte.gz",
        _MNIST_URL,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    "mnist-y_test": (
        "MNIST/raw/t10k-labels-idx1-ubyte.gz",
        _MNIST_URL,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion-x_test": (
        "FashionMNIST/raw/t10k-images-idx3-ubyte.gz",
        _FASHION_URL,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    "fashion-y_test": (
        "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz",
        _FASHION_URL,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
}
_SUBSETS = {
    "cifar10": "4adfc93746131fb09467d359b58d36b568f8e1897b196db99f072da2d0dea316",
    "cifar100": "f358dc8a0ba90ca0d8d1671b32a4f41b8b85bbb1eb73d49e36983f31be10f0d7",
}


@dataclass(frozen=True)
class Images:
    """Images `(N, channels, height, width)` in [0, 1] and labels; `x_ood` is of another kind.

    `mean` and `std` are those of the channels, for the network's first layer.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    x_ood: Tensor | None
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def first(self, num_rows: int) -> "Images":
        """The first so many training images, and as many test images at most."""
        return replace(
            self,
            x_train=self.x_train[:num_rows],
            y_train=self.y_train[:num_rows],
            x_test=self.x_test[:num_rows],
            y_test=self.y_test[:num_rows],
            x_ood=None if self.x_ood is None else self.x_ood[:num_rows],
        )

    def hold_out(self, num_rows: int, seed: int = 0) -> "Images":
        """Training images split in two: what is left, and `num_rows` in place of the test images.

        For choosing settings without a look at the test images.
        """
        order = torch.randperm(len(self.x_train), generator=torch.Generator().manual_seed(seed))
        held_out, kept = order[:num_rows], order[num_rows:]
        return replace(
            self,
            x_train=self.x_train[kept],
            y_train=self.y_train[kept],
            x_test=self.x_train[held_out],
            y_test=self.y_train[held_out],
        )


def load_images(
    name: str, data_root: str | Path | None = None, full: bool = False, split: int = 0
) -> Images:
    """The image set of this name.

    `full` is for CIFAR: the whole archive instead of the subset. `split` is for digits, which have
    no split of their own: the number of a random one.
    """
    check_choice("dataset", name, IMAGE_SETS)
    if name == "digits":
        return _load_digits(split)
    if name == "mnist":
        return _load_mnist(data_root)
    if name == "fashion":
        return _load_fashion(data_root)
    other = "cifar100" if name == "cifar10" else "cifar10"
    parts = _cifar_parts(name, data_root, full)
    x_ood = _pixels(_cifar_parts(other, data_root, full)["x_test"])
    mean, std = _CIFAR_MEAN
    num_classes = 10 if name == "cifar10" else 100
    return Images(
        _pixels(parts["x_train"]),
        parts["y_train"].long(),
        _pixels(parts["x_test"]),
        parts["y_test"].long(),
        x_ood,
        num_classes,
        mean,
        std,
    )


def read_idx(path: Path) -> Tensor:
    """The array in a gzipped idx file of bytes, uint8.

    Two zero bytes, the type 8, the number of dimensions, each size as four bytes, then the values.
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
        zeros, kind, num_dims = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{num_dims}I", content, 4)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path}: is damaged: {error}. Delete it to download it again.") from error
    start = 4 + 4 * num_dims
    if (zeros, kind) != (0, 8) or len(content) - start != math.prod(shape):
        raise DataError(
            f"{path}: is no idx file of bytes, or a part of one ({len(content)} bytes, expected "
            f"{math.prod(shape)} values). Delete it to download it again."
        )
    values = numpy.frombuffer(content, numpy.uint8, offset=start).reshape(shape)
    return torch.from_numpy(values.copy())


def _idx(name: str, data_root: str | Path | None) -> Tensor:
    """One of the idx files: images in [0, 1], `(N, 1, 28, 28)`, or labels."""
    relative, address, sha256 = _IDX[name]
    url = f"{address}/{Path(relative).name}"
    values = read_idx(find_file(relative, sha256, url, data_root))
    return values.long() if "-y_" in name else values.unsqueeze(1).float() / 255


def _load_mnist(data_root: str | Path | None) -> Images:
    names = ("mnist-x_train", "mnist-y_train", "mnist-x_test", "mnist-y_test", "fashion-x_test")
    return Images(*(_idx(name, data_root) for name in names), 10, (0.1307,), (0.3081,))


def _load_fashion(data_root: str | Path | None) -> Images:
    """8,000 images to train on and 2,000 to test on; digits are the others."""
    x, y = (_idx(name, data_root) for name in ("fashion-x_test", "fashion-y_test"))
    return replace(_split(x, y), x_ood=_idx("mnist-x_test", data_root))


def _split(x: Tensor, y: Tensor, seed: int = 0) -> Images:
    """Ten classes of grey images without a split of their own: a random fifth is for testing."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    mean, std = float(x[train].mean()), float(x[train].std())
    return Images(x[train], y[train], x[test], y[test], None, 10, (mean,), (std,))


def _pixels(x: Tensor) -> Tensor:
    """(N, H, W, 3) bytes to (N, 3, H, W) in [0, 1]."""
    return (x.float() / 255).permute(0, 3, 1, 2).contiguous()


def _cifar_parts(name: str, data_root: str | Path | None, full: bool) -> dict[str, Tensor]:
    root = data_root or os.environ.get("PYRO_DAK_DATA")
    relative = f"{name}_subset.npz"
    if full or root is None or not (Path(root) / relative).is_file():
        return _cifar_archive(name, root)
    path = find_file(relative, _SUBSETS[name], "", root)
    return read_subset(path)


def read_subset(path: Path) -> dict[str, Tensor]:
    """The four arrays of a subset file, checked for shapes and numbers of rows."""
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with path.open("rb") as content, numpy.load(content, allow_pickle=False) as file:
            parts = {name: torch.from_numpy(file[name]) for name in names}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: is damaged or no subset of images: {error}.") from error
    for split in ("train", "test"):
        x, y = parts[f"x_{split}"], parts[f"y_{split}"]
        if x.shape[1:] != (32, 32, 3) or y.shape != x.shape[:1]:
            raise DataError(f"{path}: {split} has shapes {tuple(x.shape)} and {tuple(y.shape)}.")
    return parts


def _cifar_archive(name: str, root: str | Path | None) -> dict[str, Tensor]:
    """All of CIFAR through torchvision, which verifies what it downloads."""
    import pooch
    from torchvision.datasets import CIFAR10, CIFAR100

    kind = CIFAR10 if name == "cifar10" else CIFAR100
    parts = {}
    for split in ("train", "test"):
        try:
            try:
                data = kind(str(root or "."), train=split == "train", download=False)
            except RuntimeError:
                cache = str(pooch.os_cache("pyro_dak"))
                data = kind(cache, train=split == "train", download=True)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"{name}: neither {name}_subset.npz nor the archive is under the data root "
                f"({root}), and the archive could not be downloaded: {error}. Put one there and "
                "set PYRO_DAK_DATA or --data-root."
            ) from error
        parts[f"x_{split}"] = torch.from_numpy(data.data)
        parts[f"y_{split}"] = torch.tensor(data.targets)
    return parts


def _load_digits(split: int) -> Images:
    """Digits of scikit-learn, 8 x 8. Inverted test images are the others."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    images = _split(x, torch.from_numpy(data.target).long(), split)
    return replace(images, x_ood=1 - images.x_test)
