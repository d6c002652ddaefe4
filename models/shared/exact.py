"""Exact Gaussian processes of GPyTorch, on the inputs or on the features of a network."""

from collections.abc import Iterator
from contextlib import contextmanager

import gpytorch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from models.shared.baseline import TableBaseline
from models.shared.recipe import Recipe
from pyro_dak.additive.gaussian import FunctionMoments

__all__ = ["DeepExactGP", "ExactRegressor"]


@contextmanager
def _exactly() -> Iterator[None]:
    """Cholesky instead of conjugate gradients, whatever the size; no checks of the inputs."""
    with gpytorch.settings.fast_computations(False, False, False), gpytorch.settings.debug(False):
        yield


class DeepExactGP(gpytorch.models.ExactGP):
    """An SE kernel and a constant mean on `network(x)`; the data come with `fit`."""

    def __init__(self, network: nn.Module, likelihood: gpytorch.likelihoods.GaussianLikelihood):
        super().__init__(None, None, likelihood)
        self.network = network
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> MultivariateNormal:
        features = self.network(x)
        return MultivariateNormal(self.mean_module(features), self.covar_module(features))


class ExactRegressor(TableBaseline):
    """Trained by the marginal likelihood of all rows: one step per epoch."""

    def __init__(
        self,
        input_dim: int,
        network: nn.Module,
        likelihood: gpytorch.likelihoods.GaussianLikelihood,
        recipe: Recipe,
    ):
        self.gp = DeepExactGP(network, likelihood)
        super().__init__(input_dim, 1, network, self.gp, recipe)

    def prepare(self, x: Tensor, y: Tensor) -> None:
        self.gp.set_train_data(x, y[:, 0], strict=False)
        self.evidence = gpytorch.mlls.ExactMarginalLogLikelihood(self.gp.likelihood, self.gp)

    def batch_size(self, num_rows: int) -> int:
        return num_rows

    def loss(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        """Minus the log marginal likelihood, per row; the batch holds all rows, in some order."""
        with _exactly():
            x, y = self.gp.train_inputs[0], self.gp.train_targets
            return -self.evidence(self.gp(x), y)

    def function_moments(self, x: Tensor) -> FunctionMoments:
        with _exactly():
            q = self.gp(x)
            return FunctionMoments(q.mean.unsqueeze(-1), q.variance.unsqueeze(-1))

    @property
    def noise_scale(self) -> Tensor:
        return self.gp.likelihood.noise[0].sqrt()
