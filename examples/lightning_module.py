"""A Lightning module whose last layer knows how sure it is: `DAKHead` in the place of `nn.Linear`.

python examples/lightning_module.py [EPOCHS]

The lines that differ from a network with a linear layer and a cross entropy have a comment.
"""

import logging
import sys
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_dak import DAKHead


class Classifier(lightning.LightningModule):
    """A network for images of 8 x 8 pixels in ten classes."""

    def __init__(self, num_data: int):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.head = DAKHead(64, 10, num_data=num_data)  # nn.Linear(64, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return self.head.loss(self.backbone(x), y)  # cross_entropy(self.head(self.backbone(x)), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        prediction = self.head(self.backbone(x))  # probs, label, entropy, mutual_information
        self.log("accuracy", (prediction.label == y).float().mean())
        self.log("nll", -prediction.log_prob(y).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 3e-3)


def stripes(num_rows: int, seed: int) -> TensorDataset:
    """Noisy images of stripes in ten directions, and their directions."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (num_rows,), generator=generator)
    shift = 6 * torch.rand(num_rows, generator=generator)
    angle = torch.pi * y / 10
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    wave = angle.cos()[:, None, None] * rows + angle.sin()[:, None, None] * columns
    noise = 0.7 * torch.randn(num_rows, 8, 8, generator=generator)
    return TensorDataset((wave + shift[:, None, None]).sin() + noise, y)


def main(epochs: int) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    lightning.seed_everything(0, verbose=False)
    train, test = stripes(2000, seed=0), stripes(1000, seed=1)
    model = Classifier(num_data=len(train))
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train, 100, shuffle=True), DataLoader(test, 500))
    result = trainer.callback_metrics
    print(f"accuracy {result['accuracy']:.3f}, NLL {result['nll']:.3f}")


if __name__ == "__main__":
    main(epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 20)
