"""Simple peers that several experiments compare with: an ensemble of networks in one pass."""

from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["NetworkEnsemble"]


class NetworkEnsemble(nn.Module):
    """Networks of two hidden layers, trained together from different starts; double precision.

    Args:
        num_inputs: D.
        num_outputs: C.
        size: members.
        width: of the hidden layers.
        dropout: share of hidden values that is dropped, in training and in prediction.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        size: int = 5,
        width: int = 64,
        dropout: float = 0.0,
    ):
        super().__init__()
        widths = [num_inputs, width, width, num_outputs]
        self.dropout = dropout
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in pairwise(widths):
            weight = torch.randn(size, inputs, outputs, dtype=torch.float64)
            self.weights.append(weight * (2 / inputs) ** 0.5)
            self.biases.append(torch.zeros(size, 1, outputs, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of all members, `(E, *b, C)`, at x `(*b, D)`."""
        h = x.reshape(1, -1, x.shape[-1]).expand(len(self.weights[0]), -1, -1)
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(bias, h, weight)
            if number < last:
                h = nn.functional.silu(h)
                if self.dropout > 0:
                    h = nn.functional.dropout(h, self.dropout)
        return h.reshape(len(h), *x.shape[:-1], -1)

    def fit(
        self,
        x: Tensor,
        y: Tensor,
        num_steps: int = 300,
        learning_rate: float = 1e-2,
        weight_decay: float = 1e-4,
    ) -> None:
        """Minimise squared errors, or the cross entropy for labels `(N,)`, by full-batch AdamW."""
        optimizer = torch.optim.AdamW(self.parameters(), learning_rate, weight_decay=weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        for _ in range(num_steps):
            optimizer.zero_grad()
            outputs = self(x)
            if y.is_floating_point():
                loss = (outputs - y).square().mean((-2, -1)).sum()
            else:
                labels = y.expand(len(outputs), -1).flatten()
                loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels)
                loss = loss * len(outputs)
            loss.backward()
            optimizer.step()
            schedule.step()
