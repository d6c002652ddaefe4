"""What the baselines of GPyTorch share: a bound in terms, draws through the softmax."""

import gpytorch
from torch import Tensor, nn

from models.shared.image_baseline import ImageBaseline, Terms
from models.shared.image_recipe import ImageRecipe
from pyro_dak.additive.gaussian import FunctionMoments


class GPyTorchBaseline(ImageBaseline):
    """Processes of GPyTorch on embedded features under its `SoftmaxLikelihood`.

    Args:
        features: network from images to features.
        embedding: from features to what the processes see.
        gps: the processes, `(N, ...)` to a multitask normal `(N, tasks)`.
        likelihood: the softmax, which may mix the tasks into classes.
        num_classes: C.
        recipe: the settings.
    """

    def __init__(
        self,
        features: nn.Module,
        embedding: nn.Module,
        gps: gpytorch.models.ApproximateGP,
        likelihood: gpytorch.likelihoods.SoftmaxLikelihood,
        num_classes: int,
        recipe: ImageRecipe,
    ):
        last_layer = nn.ModuleList([gps, likelihood])
        super().__init__(features, embedding, last_layer, num_classes, recipe)
        self.gps, self.likelihood = gps, likelihood
        for module in last_layer.modules():
            if isinstance(module, gpytorch.constraints.Interval):
                # Constants, and infinite: not for checkpoints, which hold finite numbers only.
                for name in ("lower_bound", "upper_bound"):
                    module.register_buffer(name, getattr(module, name), persistent=False)

    def terms(self, h: Tensor, y: Tensor, num_data: int) -> Terms:
        """E log p(y | f) by draws of f, minus KL / num_data: GPyTorch's `VariationalELBO`."""
        with gpytorch.settings.num_likelihood_samples(self.recipe.num_samples_train):
            fit = self.likelihood.expected_log_prob(y, self.gps(h)).mean()
        kl = self.gps.variational_strategy.kl_divergence() / num_data
        return Terms(kl - fit, fit.detach(), kl.detach())

    def latent_moments(self, h: Tensor) -> FunctionMoments:
        q = self.gps(h)
        return FunctionMoments(q.mean, q.variance)

    @property
    def mixing_weights(self) -> Tensor | None:
        return self.likelihood.mixing_weights
