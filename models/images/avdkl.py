"""AV-DKL: every image has inducing points and a variational posterior of its own, amortised."""

from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.model.likelihoods import CategoricalLikelihood

from ..avdkl import AVDKL, Amortisation, SEProcess
from ..shared.image_baseline import ImageBaseline
from ..shared.recipe import IMAGE_RECIPE, Recipe, seeded
from ..shared.training import Terms


class AmortisedClassifier(ImageBaseline):
    """The q(f) of `models/avdkl.py` under a softmax.

    Args:
        features: network from images to features.
        inner: the amortised processes; its network takes the features.
        num_classes: C.
        recipe: the settings.
    """

    chunk_size = 100

    def __init__(self, features: nn.Module, inner: AVDKL, num_classes: int, recipe: Recipe):
        last_layer = nn.ModuleList(inner.modules)
        super().__init__(features, nn.Identity(), last_layer, num_classes, recipe)
        self.inner = inner

    def terms(self, h: Tensor, y: Tensor, num_data: int) -> Terms:
        """Mean E log p(y | f) by draws of f, minus the mean KL of the images / num_data."""
        moments, kl = self.inner.posterior(h)
        f = sample_marginals(moments, self.recipe.num_samples_train)
        fit = CategoricalLikelihood().distribution(f).log_prob(y).mean()
        kl = kl.mean() / num_data
        return Terms(kl - fit, fit, kl)

    def latent_moments(self, h: Tensor) -> FunctionMoments:
        return self.inner.posterior(h)[0]


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: Recipe = IMAGE_RECIPE,
    num_units: int = 16,
    num_inducing: int = 64,
    covariance: str = "full",
) -> AmortisedClassifier:
    """An embedding to P = `num_units` features, and for each image inducing points among them.

    There are `num_inducing` points for each image and class. `covariance`, "full" or "diagonal",
    is that of the inducing variables of an image.
    """
    with seeded(recipe.seed):
        network = nn.ModuleDict(
            {
                "features": nn.Linear(feature_dim, num_units),
                "amortisation": Amortisation(num_units, num_classes, num_inducing, covariance),
            }
        )
        last_layer = nn.ModuleDict({"process": SEProcess()})
    inner = AVDKL(feature_dim, num_classes, network, last_layer, recipe, is_whitened=True)
    return AmortisedClassifier(features, inner, num_classes, recipe)
