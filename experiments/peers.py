"""Simple peers that several experiments compare with: an ensemble of networks in one pass."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

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
        return self._layer(self.hidden(x), len(self.weights) - 1)

    def hidden(self, x: Tensor) -> Tensor:
        """The last hidden layer of all members, `(E, *b, width)`, at x `(*b, D)`."""
        h = x.expand(len(self.weights[0]), *x.shape)
        for number in range(len(self.weights) - 1):
            h = nn.functional.silu(self._layer(h, number))
            if self.dropout > 0:
                h = nn.functional.dropout(h, self.dropout)
        return h

    def _layer(self, h: Tensor, number: int) -> Tensor:
        rows = h.reshape(len(h), -1, h.shape[-1])
        rows = torch.baddbmm(self.biases[number], rows, self.weights[number])
        return rows.reshape(*h.shape[:-1], -1)

    def fit(self, x: Tensor, y: Tensor, **options: Any) -> None:
        """Minimise squared errors, or the cross entropy for labels `(N,)`."""
        self._minimize(lambda: self._loss(self(x), y), **options)

    def fit_normal(self, x: Tensor, y: Tensor, **options: Any) -> None:
        """Maximise the density of y `(N, 1)` under normals with means and log variances."""

        def loss() -> Tensor:
            mean, log_var = self(x).chunk(2, -1)
            log_var = log_var.clamp(-10, 10)
            return 0.5 * (log_var + (y - mean).square() / log_var.exp()).mean((-2, -1)).sum()

        self._minimize(loss, **options)

    def fit_chosen(self, x: Tensor, outputs: Tensor, y: Tensor, **options: Any) -> None:
        """Minimise squared errors of one output a row, `outputs` `(N,)`, whose values are y."""

        def loss() -> Tensor:
            f = self(x)  # (E, N, C)
            chosen = f.gather(-1, outputs.expand(len(f), -1).unsqueeze(-1)).squeeze(-1)
            return (chosen - y).square().mean(-1).sum()

        self._minimize(loss, **options)

    def _loss(self, f: Tensor, y: Tensor) -> Tensor:
        """The sum of the losses of the members."""
        if y.is_floating_point():
            return (f - y).square().mean((-2, -1)).sum()
        labels = y.expand(len(f), -1).flatten()
        return len(f) * nn.functional.cross_entropy(f.flatten(0, 1), labels)

    def _minimize(
        self,
        loss_fn: Callable[[], Tensor],
        num_steps: int = 300,
        learning_rate: float = 1e-2,
        weight_decay: float = 1e-4,
    ) -> None:
        """Full-batch AdamW with a cosine schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), learning_rate, weight_decay=weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss_fn().backward()
            optimizer.step()
            schedule.step()
