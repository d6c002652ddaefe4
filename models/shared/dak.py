"""DAK behind the interface of the board: `dak_cf` and `dak_mc` differ in objective and draws."""

import math
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor

import pyro_dak
from models import dak
from models.shared.baseline import check_rows, check_unfitted
from models.shared.recipe import Recipe, count_parameters, seeded
from pyro_dak import (
    DAK,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    LaplaceKernel,
    MeanFieldGuide,
)
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.model.modes import evaluating
from pyro_dak.prediction.predict import Prediction
from pyro_dak.training.plan import History


class DAKRegressor:
    """A `Regressor` from a DAK with its mean-field guide.

    Args:
        model: the model.
        objective: the bound to maximise.
        recipe: the settings.
        residual_variance: whether predictions add the prior variance that the grid loses.
        num_samples: draws of the weights in prediction, or None for the closed form.
        init_scale: initial standard deviation of the weights.
    """

    chunk_size = 8192

    def __init__(
        self,
        model: DAK,
        objective: ELBO,
        recipe: Recipe,
        residual_variance: bool,
        num_samples: int | None,
        init_scale: float,
    ):
        self.model, self.objective, self.recipe = model, objective, recipe
        self.guide = MeanFieldGuide(model, init_scale=init_scale)
        self.residual_variance, self.num_samples = residual_variance, num_samples
        self.input_dim = model.feature_extractor[0].in_features
        self.history = History()

    @property
    def num_parameters(self) -> int:
        """Trained parameters, variational ones included."""
        return count_parameters(self.model, self.guide)

    @property
    def epoch_seconds(self) -> list[float]:
        """Seconds of each epoch of training."""
        return self.history.seconds

    def fit(self, x: Tensor, y: Tensor) -> None:
        """Train on these rows, and on nothing else."""
        check_rows(x, y, self.input_dim, self.model.num_outputs)
        check_unfitted(self.history)
        recipe, device = self.recipe, torch.device(self.recipe.device)
        self.history = pyro_dak.fit(
            self.model,
            self.guide,
            (x, y),
            objective=self.objective,
            epochs=recipe.epochs,
            batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            last_layer_learning_rate=recipe.last_layer_learning_rate,
            optimizer=recipe.optimizer,
            last_layer_optimizer=recipe.last_layer_optimizer,
            schedule=recipe.schedule,
            weight_decay=recipe.weight_decay,
            decay_last_layer=recipe.decay_last_layer,
            clip_norm=recipe.clip_norm,
            seed=recipe.seed,
            accelerator=device.type,
            devices=1 if device.index is None else f"{device.index},",
            progress=recipe.progress,
        )

    def predict(self, x: Tensor) -> Prediction:
        """Mean, epistemic and aleatoric variance of y, `(N, C)` each."""
        if self.num_samples is None:
            return pyro_dak.predict(
                self.model,
                self.guide,
                x,
                residual_variance=self.residual_variance,
                progress=self.recipe.progress,
            )
        moments = self._sampled_moments(x, self.num_samples)
        with torch.no_grad():
            mean, epistemic, aleatoric = self.model.likelihood.predictive_moments(moments)
        parts = [part.to(x.device) for part in (mean, epistemic, aleatoric)]
        functions = FunctionMoments(*(part.to(x.device) for part in moments[:2]))
        return Prediction(*parts, functions, self.model.likelihood)

    def _sampled_moments(self, x: Tensor, num_samples: int) -> FunctionMoments:
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


def build_regressor(
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
    noise_scale: float = 0.5,
    learn_noise: bool = True,
    heteroscedastic: bool = False,
    init_scale: float = 0.1,
    residual_variance: bool = False,
    unit_scale: float | None = None,
    **options: Any,
) -> DAKRegressor:
    """The DAK of the paper with an objective; the options are described in `dak_cf.build`."""
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
            kernel=LaplaceKernel(lengthscale),
            **options,
        )
        if unit_scale is not None:
            log_unit_scale = model.layer.log_unit_scale.requires_grad_(False)
            log_unit_scale.fill_(math.log(unit_scale))
        return DAKRegressor(model, objective, recipe, residual_variance, num_samples, init_scale)
