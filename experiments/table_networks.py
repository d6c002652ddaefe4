"""Networks on tables, several in one pass, which stop early: deep ensembles and single networks.

Every member holds out another tenth of the rows, and goes back to where it predicted these best.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from pyro_dak.tables.ensemble import Stack, ensemble_plan, train
from pyro_dak.tables.predictive import Calibration, StudentPrediction, calibrate
from pyro_dak.tables.rows import Rows, default_batch_size, default_epochs, held_out_rows, without

__all__ = [
    "InputColumns",
    "NetworkClassifier",
    "NetworkRegressor",
    "StackedMLP",
    "train_with_early_stopping",
]

# The widths of `DAKRegressor()`.
HIDDEN = (64, 32, 64)
# Added to the variance, a softplus, as in the paper on deep ensembles; else some diverge.
_LEAST_VAR = 1e-6
# Held-out rows are scored up to so many times in a run, which ends after so many worse scores.
_SCORINGS, _PATIENCE = 100, 20
# At most so many columns come out of a piecewise-linear embedding, and so many out of one column.
_MAX_ENCODED, _MAX_BINS = 1024, 16


class StackedMLP(Stack):
    """E perceptrons in one pass, each with weights of its own.

    Args:
        widths: those of inputs, hidden layers and outputs.
        size: E.
        seed: of the first weights.
        kind: what the outputs are: "noise" for the mean and the noise of y, "mean" for the mean,
            with one learned noise beside it, and "classes" for the logits of classes.
    """

    def __init__(self, widths: Sequence[int], size: int, seed: int, kind: str):
        torch.manual_seed(seed)
        self.kind, self.num_layers = kind, len(widths) - 1
        self.tensors: dict[str, Tensor] = {}
        for number, pair in enumerate(pairwise(widths)):
            layers = [nn.Linear(*pair) for _ in range(size)]
            self.tensors[f"weight{number}"] = torch.stack(
                [layer.weight.detach() for layer in layers]
            )
            self.tensors[f"bias{number}"] = torch.stack([layer.bias.detach() for layer in layers])
        if kind != "classes":
            self.tensors["raw_noise"] = torch.full((size, 1), math.log(0.5))
        for tensor in self.tensors.values():
            tensor.requires_grad_()

    def parameter_groups(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases, and the level of the noise."""
        network = [t for name, t in self.tensors.items() if name != "raw_noise"]
        return network, [t for name, t in self.tensors.items() if name == "raw_noise"]

    def outputs(self, x: Tensor) -> Tensor:
        """What the last layers give, `(E, outputs, N)`."""
        h = x.mT.expand(len(self), -1, -1)
        for i in range(self.num_layers):
            h = torch.baddbmm(self.tensors[f"bias{i}"].unsqueeze(-1), self.tensors[f"weight{i}"], h)
            h = h.relu() if i < self.num_layers - 1 else h
        return h

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of y, `(E, N)` each."""
        h = self.outputs(x)
        # Twice, as for a log scale, which it is where the noise is small.
        raw = 2 * self.tensors["raw_noise"].expand(-1, h.shape[-1])
        raw = raw + h[:, 1] if self.kind == "noise" else raw
        return h[:, 0], nn.functional.softplus(raw).add(_LEAST_VAR).log()

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Minus the log probability of each row under each member, `(E, N)`."""
        if self.kind == "classes":
            return -self.outputs(x).log_softmax(1).gather(1, y.expand(len(self), 1, -1)).squeeze(1)
        mean, log_var = self.moments(x)
        squares = (y[:, 0] - mean).square() * (-log_var).exp()
        return 0.5 * (math.log(2 * math.pi) + log_var + squares)

    def loss(self, x: Tensor, y: Tensor, weights: Tensor, num_data: Tensor) -> Tensor:
        """The sum over members of minus the log-likelihood per datum."""
        return ((self.losses(x, y) * weights).sum(-1) / num_data).sum()


def train_with_early_stopping(
    network: StackedMLP, rows: Rows, seed: int, epochs: int | None, learning_rate: float
) -> Tensor:
    """Train every member without a tenth of the rows of its own; the numbers of these, `(E, n)`."""
    N = len(rows.x)
    held_out = held_out_rows(N, len(network), 0.1, seed, overlap=len(network) > 1)
    plan = ensemble_plan(
        default_epochs(N) if epochs is None else epochs,
        default_batch_size(N),
        seed=seed,
        learning_rate=learning_rate,
        num_scorings=_SCORINGS,
        patience=_PATIENCE,
    )

    @torch.no_grad()
    def score_fn() -> Tensor:
        return network.losses(rows.x, rows.y).gather(1, held_out)

    train(network, without(rows, held_out), plan, score_fn)
    return held_out


class InputColumns:
    """Columns as standardised numbers, with piecewise-linear embeddings if asked for.

    An embedded column becomes, beside itself, the shares of bins between quantiles that lie below
    its values: min(max((x - b_k) / (b_{k+1} - b_k), 0), 1) for each bin k.
    """

    def __init__(self, x: np.ndarray, is_embedded: bool = False):
        self.mean, self.scale = x.mean(0), np.where(x.std(0) > 0, x.std(0), 1)
        num_bins = min(_MAX_BINS, max(2, _MAX_ENCODED // x.shape[1]))
        quantiles = np.linspace(0, 1, num_bins + 1)
        edges = [np.unique(np.quantile(column, quantiles)) for column in x.T]
        self.edges = edges if is_embedded else []

    def __call__(self, x: np.ndarray) -> Tensor:
        """The inputs of the network, `(N, D')`, in single precision."""
        parts = [(x - self.mean) / self.scale]
        for column, edges in zip(x.T, self.edges, strict=False):
            shares = (column[:, None] - edges[:-1]) / np.diff(edges)
            parts.append(shares.clip(0, 1))
        return torch.from_numpy(np.concatenate(parts, 1)).float()


class NetworkRegressor:
    """Networks of y behind the interface of `DAKRegressor`: a single one, or a deep ensemble.

    Args:
        size: the number of networks.
        kind: "noise" for networks of mean and noise; "mean" for one noise that is learned.
        seed: of weights, held-out rows and batches.
        epochs: by default those of `DAKRegressor`.
        hidden: the widths.
        is_embedded: whether columns have piecewise-linear embeddings.
        learning_rate: at the peak of the one-cycle schedule.
    """

    def __init__(
        self,
        size: int,
        kind: str,
        seed: int,
        epochs: int | None = None,
        hidden: Sequence[int] = HIDDEN,
        is_embedded: bool = False,
        learning_rate: float = 1e-2,
    ):
        self.size, self.kind, self.seed, self.epochs = size, kind, seed, epochs
        self.hidden, self.is_embedded, self.learning_rate = hidden, is_embedded, learning_rate

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Train, and find out how wide the predictions should have been on held-out rows."""
        self.inputs, self.mean, self.scale = InputColumns(x, self.is_embedded), y.mean(), y.std()
        target = torch.from_numpy((y - self.mean) / self.scale).float().unsqueeze(-1)
        rows = Rows(self.inputs(x), target, torch.ones(len(x)))
        widths = (rows.x.shape[1], *self.hidden, 2 if self.kind == "noise" else 1)
        self.network = StackedMLP(widths, self.size, self.seed, self.kind)
        options = self.seed, self.epochs, self.learning_rate
        held_out = train_with_early_stopping(self.network, rows, *options)
        with torch.no_grad():
            moments = self.network.moments(rows.x)
        mean, log_var = (part.gather(1, held_out).double().numpy() for part in moments)
        y, var = target[held_out, 0].double().numpy(), np.exp(log_var)
        overlap = held_out.shape[1] // 2 if self.size > 1 else 0
        self.calibration = calibrate(y, mean, var, self.size, None, overlap, is_refit=False)

    def predict_dist(self, x: np.ndarray, is_calibrated: bool = False) -> StudentPrediction:
        """A normal distribution with the moments of the mixture.

        With `is_calibrated` it has the widths and tails that `DAKRegressor` would give it.
        """
        with torch.no_grad():
            moments = self.network.moments(self.inputs(x))
        mean, log_var = (part.double().numpy() for part in moments)
        scale, df, factor, own = (
            self.calibration if is_calibrated else Calibration(1.0, math.inf, 1.0, None)
        )
        own_scales = scale * np.array(own or [1.0] * self.size)[:, None]
        factor = factor * self.scale**2 / (1 - 2 / df)
        var = (own_scales * np.exp(log_var)).mean(0)
        return StudentPrediction(
            self.mean + self.scale * mean.mean(0), factor * mean.var(0), factor * var, df
        )


class NetworkClassifier:
    """A deep ensemble of classes behind the interface of `DAKClassifier`.

    Args:
        size: the number of networks.
        seed: of weights, held-out rows and batches.
        epochs: by default those of `DAKClassifier`.
        learning_rate: at the peak of the one-cycle schedule.
    """

    def __init__(
        self, size: int, seed: int, epochs: int | None = None, learning_rate: float = 1e-2
    ):
        self.size, self.seed, self.epochs = size, seed, epochs
        self.learning_rate = learning_rate

    def fit(self, x: np.ndarray, labels: np.ndarray) -> None:
        """Train; labels are 0 to K - 1."""
        self.inputs = InputColumns(x)
        rows = Rows(self.inputs(x), torch.from_numpy(labels), torch.ones(len(x)))
        widths = (rows.x.shape[1], *HIDDEN, int(labels.max()) + 1)
        self.network = StackedMLP(widths, self.size, self.seed, "classes")
        train_with_early_stopping(self.network, rows, self.seed, self.epochs, self.learning_rate)

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """The mean of the members' probabilities, `(N, K)`."""
        with torch.no_grad():
            return self.network.outputs(self.inputs(x)).double().softmax(1).mean(0).mT.numpy()
