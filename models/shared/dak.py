"""DAK behind the interface of the boards: on tables and on images."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pyro.infer import ELBO
from torch import Tensor, nn

import pyro_dak
from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    LaplaceKernel,
    MaternKernel,
    MeanFieldGuide,
    NaturalGuide,
    NormalPrior,
    RBFKernel,
)
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.additive.kernels import Kernel
from pyro_dak.additive.scaling import Standardize
from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.inference.guides.natural import Covariance
from pyro_dak.model.modes import evaluating
from pyro_dak.prediction import ClassPrediction, Prediction
from pyro_dak.training.loop import DAKLoss
from pyro_dak.training.natural import build_learner
from pyro_dak.training.plan import History
from pyro_dak.validation import check_choice, check_positive

from .. import dak
from .augmentation import AugmentedBatches
from .baseline import Baseline, check_rows
from .image_baseline import check_images
from .recipe import Recipe, fit_options, seeded
from .training import Callback, resume_options

__all__ = [
    "KERNELS",
    "DAKBaseline",
    "DAKOnImages",
    "DAKOnTables",
    "build_natural_on_images",
    "build_on_images",
    "build_on_tables",
]

# The paper's kernel is the first. The others have no sparse factor, and phi is a dense matrix.
KERNELS: dict[str, Callable[..., Kernel]] = {
    "laplace": LaplaceKernel,
    "matern32": partial(MaternKernel, nu=1.5),
    "matern52": partial(MaternKernel, nu=2.5),
    "rbf": RBFKernel,
}


class DAKBaseline(Baseline):
    """A DAK with its guide, trained by `pyro_dak.fit`.

    Args:
        model: the model.
        guide: its guide.
        objective: the bound to maximise.
        recipe: the settings.
        residual_variance: whether predictions add the prior variance that the grid loses.
    """

    def __init__(
        self,
        model: DAK,
        guide: GaussianGuide,
        objective: ELBO,
        recipe: Recipe,
        residual_variance: bool,
    ):
        super().__init__(recipe)
        self.model, self.guide, self.objective = model, guide, objective
        self.residual_variance = residual_variance

    @property
    def features(self) -> nn.Module:
        return self.model.feature_extractor

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.model, self.guide

    def training_loss(self, compile: bool = False) -> DAKLoss:
        return build_learner(self.model, self.guide, self.objective, compile=compile)

    def train(
        self, x: Tensor, y: Tensor, callbacks: Sequence[Callback], checkpoint_dir: Path | None
    ) -> History:
        recipe = self.recipe
        is_augmented = recipe.augment and not recipe.fixed_features
        return pyro_dak.fit(
            self.model,
            self.guide,
            AugmentedBatches(x, y, recipe.batch_size) if is_augmented else (x, y),
            objective=self.objective,
            callbacks=callbacks,
            **fit_options(recipe),
            **resume_options(checkpoint_dir),
        )


class DAKOnTables(DAKBaseline):
    """A regressor; `num_samples` draws of the weights in prediction, or None: the closed form.

    With `joint_posterior`, the exact posterior of the last layer at the trained features takes the
    place of the trained guide.
    """

    chunk_size = 8192

    def __init__(
        self, *parts: Any, input_dim: int, num_samples: int | None, joint_posterior: bool = False
    ):
        super().__init__(*parts)
        self.input_dim, self.num_samples = input_dim, num_samples
        self.joint_posterior = joint_posterior

    def check(self, x: Tensor, y: Tensor) -> None:
        check_rows(x, y, self.input_dim, self.model.num_outputs, self.recipe)

    def train(
        self, x: Tensor, y: Tensor, callbacks: Sequence[Callback], checkpoint_dir: Path | None
    ) -> History:
        history = super().train(x, y, callbacks, checkpoint_dir)
        if self.joint_posterior:
            self.guide = pyro_dak.exact_posterior(self.model, x, y).guide
        return history

    def predict(self, x: Tensor) -> Prediction:
        """Mean, epistemic and aleatoric variance of y, `(N, C)` each."""
        if self.num_samples is None:
            prediction = pyro_dak.predict(
                self.model,
                self.guide,
                x,
                residual_variance=self.residual_variance,
                novelty=False,
                progress=self.recipe.progress,
            )
            assert isinstance(prediction, Prediction)
            return prediction
        moments = self.sampled_moments(x, self.num_samples)
        with torch.no_grad():
            mean, epistemic, aleatoric = self.model.likelihood.predictive_moments(moments)
        parts = [part.to(x.device) for part in (mean, epistemic, aleatoric)]
        functions = FunctionMoments(*(part.to(x.device) for part in moments[:2]))
        return Prediction(*parts, functions, self.model.likelihood)

    def sampled_moments(self, x: Tensor, num_samples: int) -> FunctionMoments:
        """Mean and variance of f over draws of the weights, the same draws for every row."""
        device = self.model.unit_scale.device
        with seeded(self.recipe.seed, device):
            draws = pyro_dak.sample_functions(self.model, self.guide, num_samples)
        parts = []
        with evaluating(self.model):
            for chunk in x.to(device).split(self.chunk_size):
                h = self.model.unit_inputs(chunk)
                var, mean = torch.var_mean(self.model.functions(h, draws.sites), 0)
                if self.residual_variance:
                    var = var + self.model.residual_variance(h)
                parts.append((mean, var))
        return FunctionMoments(*(torch.cat(part) for part in zip(*parts, strict=True)))


class DAKOnImages(DAKBaseline):
    """A classifier; `method` is that of prediction, "mc" or "probit"."""

    chunk_size = 500

    def __init__(self, *parts: Any, method: Literal["mc", "probit"]):
        super().__init__(*parts)
        self.method = method

    def check(self, x: Tensor, y: Tensor) -> None:
        check_images(x, y, self.model.num_outputs)

    def predict(self, x: Tensor) -> ClassPrediction:
        """Class probabilities, averaged after the softmax, `(N, C)`."""
        prediction = pyro_dak.predict(
            self.model,
            self.guide,
            x,
            method=self.method,
            num_samples=self.recipe.num_samples_test,
            residual_variance=self.residual_variance,
            seed=self.recipe.seed,
            chunk_size=self.chunk_size,
            progress=self.recipe.progress,
        )
        assert isinstance(prediction, ClassPrediction)
        return prediction


def build_on_tables(
    objective: ELBO,
    input_dim: int,
    num_outputs: int,
    feature_dim: int,
    recipe: Recipe,
    *,
    num_samples: int | None,
    num_units: int = 16,
    level: int = 5,
    bounds: tuple[float, float] = (0.0, 1.0),
    lengthscale: float = 1.0,
    learn_lengthscale: bool = False,
    noise_scale: float = 0.5,
    learn_noise: bool = True,
    heteroscedastic: bool = False,
    init_scale: float = 0.1,
    residual_variance: bool = False,
    unit_scale: float | None = None,
    joint_posterior: bool = False,
    kernel: str = "laplace",
    **options: Any,
) -> DAKOnTables:
    """The DAK of the paper with an objective; the options are described in `dak_cf.build`."""
    check_choice("kernel", kernel, KERNELS)
    kind = HeteroscedasticLikelihood if heteroscedastic else GaussianLikelihood
    with seeded(recipe.seed):
        model = dak.build(
            input_dim,
            num_outputs,
            feature_dim,
            num_units,
            level,
            kind(noise_scale, learn_noise),
            bounds=bounds,
            kernel=KERNELS[kernel](lengthscale, learn=learn_lengthscale),
            **options,
        )
        if unit_scale is not None:
            _set_unit_scale(model, unit_scale)
            model.layer.log_unit_scale.requires_grad_(False)
        guide = MeanFieldGuide(model, init_scale=init_scale)
    parts = (model, guide, objective, recipe, residual_variance)
    return DAKOnTables(
        *parts, input_dim=input_dim, num_samples=num_samples, joint_posterior=joint_posterior
    )


def build_on_images(
    objective: ELBO,
    method: Literal["mc", "probit"],
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: Recipe,
    num_units: int = 16,
    level: int = 6,
    bounds: tuple[float, float] = (-1.0, 1.0),
    lengthscale: float = 1.0,
    init_scale: float = 0.1,
    linear_start: float | None = None,
    residual_variance: bool = False,
    scaling: str = "standardize",
    num_std: float | None = None,
    unit_scale: float | None = None,
    embedding: bool = True,
    kernel: str = "laplace",
) -> DAKOnImages:
    """A DAK on features; the options are described in `models/images/dak_mc.py`."""
    check_choice("kernel", kernel, KERNELS)
    with seeded(recipe.seed):
        model = DAK(
            features,
            feature_dim,
            num_units,
            num_classes,
            level,
            bounds,
            KERNELS[kernel](lengthscale),
            CategoricalLikelihood(),
            scaling,
            embedding,
            prior_scale=1.0,
        )
        guide = MeanFieldGuide(model, init_scale)
        if linear_start is not None:
            _start_linear(model, guide, linear_start)
    if num_std is not None:
        _set_num_std(model, num_std)
    if unit_scale is not None:
        _set_unit_scale(model, unit_scale)
    parts = (model, guide, objective, recipe, residual_variance)
    return DAKOnImages(*parts, method=method)


def build_natural_on_images(
    objective: ELBO,
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: Recipe,
    num_units: int | None = None,
    level: int = 2,
    covariance: Covariance = "shared",
    linear_term: bool = False,
    prior_scale: float = 3.0,
    residual_variance: bool = False,
) -> DAKOnImages:
    """A DAK with a `NaturalGuide`; the options are described in `models/images/dak_natural.py`.

    With r(h) of 3 standard deviations at the bounds, a linear weight of scale 3 has slope sigma_p
    per standard deviation of its unit, as much as the process of the unit varies.
    """
    with seeded(recipe.seed):
        model = DAK(
            features,
            feature_dim,
            num_units or feature_dim,
            num_classes,
            level,
            likelihood=CategoricalLikelihood(),
            embedding=num_units is not None,
            prior={"linear": NormalPrior(scale=3.0)} if linear_term else None,
            linear_term=linear_term,
            prior_scale=prior_scale,
        )
        guide = NaturalGuide(model, covariance)
    return DAKOnImages(model, guide, objective, recipe, residual_variance, method="mc")


@torch.no_grad()
def _start_linear(model: DAK, guide: MeanFieldGuide, slope: float) -> None:
    """Set the means of z so that the units start as straight lines, slopes N(0, slope^2 / P).

    With g(U) = L_U z and phi(U) = L_U: z = L_U^{-1} (slope U). Random z make a rough function,
    whose slopes say nothing to the network; so the layer starts as a linear one.
    """
    activation = model.layer.activation
    U = activation.grid.inducing_points.to(guide.z_loc)
    L_U = activation(U.unsqueeze(-1)).squeeze(-2)  # (M, M)
    line = torch.linalg.solve_triangular(L_U, U.unsqueeze(-1), upper=False).squeeze(-1)  # (M,)
    slopes = slope * torch.randn(guide.z_loc.shape[:2]) / model.num_units**0.5  # (C, P)
    guide.z_loc.copy_(slopes.unsqueeze(-1) * line)
    guide.mu_loc.zero_()


def _set_num_std(model: DAK, num_std: float) -> None:
    """Let the grid reach so many standard deviations of the unit inputs to either side."""
    check_positive("num_std", num_std)
    if not isinstance(model.scaling, Standardize):
        raise ValueError('`num_std` is for scaling="standardize"; leave it out with another.')
    model.scaling.num_std = num_std


def _set_unit_scale(model: DAK, unit_scale: float) -> None:
    """Give every unit the same scale."""
    check_positive("unit_scale", unit_scale)
    nn.init.constant_(model.layer.log_unit_scale, math.log(unit_scale))
