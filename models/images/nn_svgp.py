"""NN+SVGP: a sparse variational GP of GPyTorch per class on embedded features, under a softmax."""

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from models.shared.gpytorch import initial_inducing_points
from models.shared.image_gpytorch import GPyTorchBaseline
from models.shared.image_recipe import DEFAULT_RECIPE, ImageRecipe
from models.shared.recipe import seeded


class ClassGPs(gpytorch.models.ApproximateGP):
    """C independent GPs (SE kernels), each with inducing points of its own in P dimensions."""

    def __init__(self, num_classes: int, num_units: int, num_inducing: int):
        batch_shape = torch.Size([num_classes])
        distribution = gpytorch.variational.CholeskyVariationalDistribution(
            num_inducing, batch_shape=batch_shape
        )
        strategy = gpytorch.variational.VariationalStrategy(
            self,
            torch.randn(num_classes, num_inducing, num_units),
            distribution,
            learn_inducing_locations=True,
        )
        super().__init__(
            gpytorch.variational.IndependentMultitaskVariationalStrategy(
                strategy, num_tasks=num_classes
            )
        )
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch_shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch_shape), batch_shape=batch_shape
        )

    def forward(self, h: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(h), self.covar_module(h))


class NetworkSVGP(GPyTorchBaseline):
    """The inducing points start at embedded training images drawn at random."""

    @torch.no_grad()
    def prepare(self, x: Tensor) -> None:
        points = self.gps.variational_strategy.base_variational_strategy.inducing_points
        rows = x[torch.randperm(len(x))[: points.shape[-2]].to(x.device)]
        for module in (self.features, self.embedding):
            module.eval()
        h = self.embedding(self.features(rows))
        for own in points:
            own.copy_(initial_inducing_points(h, len(own)))


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: ImageRecipe = DEFAULT_RECIPE,
    num_units: int = 16,
    num_inducing: int = 512,
) -> NetworkSVGP:
    """An embedding to P features and one GP per class on all of them.

    Args:
        features: network from images to features `(N, D_w)`.
        feature_dim: D_w.
        num_classes: C.
        recipe: the settings.
        num_units: P.
        num_inducing: inducing points of each GP.
    """
    with seeded(recipe.seed):
        gps = ClassGPs(num_classes, num_units, num_inducing)
        embedding = nn.Linear(feature_dim, num_units, bias=False)
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(
            num_classes=num_classes, mixing_weights=False
        )
        gps(torch.zeros(2, num_units))  # the first call draws the start of q(u)
    return NetworkSVGP(features, embedding, gps, likelihood, num_classes, recipe)
