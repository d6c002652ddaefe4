"""Exact Gaussian processes of GPyTorch, on the inputs or on the features of a network."""

from collections.abc import Iterator
from contextlib import contextmanager

import gpytorch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.training.data import ResidentData

from .baseline import TableBaseline, only_one_output
from .gpytorch import gpytorch_likelihood
from .recipe import Recipe

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
    """Trained by the marginal likelihood of all rows: one step per epoch.

    Args:
        input_dim: D.
        num_outputs: must be 1.
        network: from inputs to what the kernel sees.
        recipe: the settings.
        noise_scale: standard deviation of the noise, or its start.
        learn_noise: whether it is trained.
    """

    def __init__(
        self,
        input_dim: int,
        num_outputs: int,
        network: nn.Module,
        recipe: Recipe,
        noise_scale: float = 0.5,
        learn_noise: bool = True,
    ):
        only_one_output(num_outputs)
        self.gp = DeepExactGP(network, gpytorch_likelihood(noise_scale, learn_noise))
        super().__init__(input_dim, 1, network, self.gp, recipe)

    def prepare(self, x: Tensor, y: Tensor) -> None:
        self.gp.set_train_data(x, y[:, 0], strict=False)
        self.evidence = gpytorch.mlls.ExactMarginalLogLikelihood(self.gp.likelihood, self.gp)

    def batches(self, x: Tensor, y: Tensor) -> ResidentData:
        return ResidentData(x, y, len(x))

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
