"""Posteriors side by side: their weights, predictions and lower bounds of the evidence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_dak.diagnostics.checks import log_ratios
from pyro_dak.diagnostics.posterior_moments import (
    GaussianFit,
    Response,
    function_moments,
    gaussian_fit,
    response,
    weight_names,
)
from pyro_dak.inference.densities import cached_inputs, checked_data, unit_data, with_noise
from pyro_dak.inference.draws import Draws, Posterior, as_guide, draw_posterior, has_closed_form
from pyro_dak.inference.exact import ExactPosterior, exact_posterior
from pyro_dak.inference.guides import FullRankGuide, MeanFieldGuide, UnitBlockGuide
from pyro_dak.inference.objectives import normal_priors
from pyro_dak.model.dak import DAK
from pyro_dak.model.rows import Inputs
from pyro_dak.validation import check_choice, check_kind

__all__ = ["Elbo", "PosteriorComparison", "compare_posteriors", "wasserstein_2"]

Row = dict[str, float | str]

# Columns of the summary and their titles in a table.
_TITLES = {
    "posterior": "posterior",
    "mean_difference": "Δmean / sd (rms)",
    "max_mean_difference": "max",
    "sd_ratio": "sd ratio",
    "min_sd_ratio": "min",
    "max_sd_ratio": "max",
    "predictive_mean_difference": "Δpredictive mean / sd (rms)",
    "predictive_sd_ratio": "predictive sd ratio",
    "wasserstein_2": "W2",
    "elbo": "ELBO",
    "evidence_gap": "evidence gap",
    "unconverged": "of it unconverged",
}


class Elbo(NamedTuple):
    """A lower bound of the log evidence, in nats, and its standard error, zero if it is exact."""

    value: float
    se: float


@dataclass(frozen=True, repr=False)
class PosteriorComparison:
    """Several posteriors, compared with one of them, the reference.

    `fits` holds the moments of the weights, `predictions` those of E[y | f] at the inputs, and
    `elbos` the lower bounds of the posteriors that are guides. Differences of means are in standard
    deviations of the reference.

    For a regression, the evidence gap of a guide is its KL from the posterior: the price of its
    family, which `smallest_gaps` holds where it is known, plus what the guide has not yet learned.
    """

    reference: str
    labels: list[str]
    units: list[str]
    fits: dict[str, GaussianFit]
    predictions: dict[str, Response]
    elbos: dict[str, Elbo]
    log_evidence: float | None
    smallest_gaps: dict[str, float]

    def weights(self, name: str) -> list[Row]:
        """One row for each weight: means, sds, difference of means in sds, ratio of sds."""
        own, other = self._fit(name), self.fits[self.reference]
        columns = {
            "weight": self.labels,
            "mean": own.mean.tolist(),
            "sd": own.sd.tolist(),
            "reference_mean": other.mean.tolist(),
            "reference_sd": other.sd.tolist(),
            "mean_difference": ((own.mean - other.mean) / other.sd).tolist(),
            "sd_ratio": (own.sd / other.sd).tolist(),
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def by_unit(self, name: str) -> list[Row]:
        """One row for each unit and one for the biases, with the columns of `summary`."""
        return [
            {"unit": unit, **self._differences(name, [u == unit for u in self.units])}
            for unit in dict.fromkeys(self.units)
        ]

    def summary(self) -> list[Row]:
        """One row for each posterior."""
        rows = []
        for name in self.fits:
            row: Row = {"posterior": name, **self._differences(name, [True] * len(self.units))}
            own, other = self.predictions[name], self.predictions[self.reference]
            difference = (own.mean - other.mean) / other.sd
            row["predictive_mean_difference"] = float(difference.square().mean().sqrt())
            row["predictive_sd_ratio"] = float((own.sd / other.sd).log().mean().exp())
            row["wasserstein_2"] = wasserstein_2(self.fits[name], self.fits[self.reference])
            if name in self.elbos:
                row["elbo"] = self.elbos[name].value
                if self.log_evidence is not None:
                    gap = row["evidence_gap"] = self.log_evidence - self.elbos[name].value
                    if name in self.smallest_gaps:
                        row["unconverged"] = gap - self.smallest_gaps[name]
            rows.append(row)
        return rows

    def to_markdown(self) -> str:
        """The summary as a table."""
        rows = self.summary()
        keys = [key for key in _TITLES if any(key in row for row in rows)]
        table = [[_TITLES[key] for key in keys]]
        table += [[_cell(row.get(key, "")) for key in keys] for row in rows]
        lines = [f"| {' | '.join(cells)} |" for cells in table]
        return "\n".join([lines[0], "|---" * len(keys) + "|", *lines[1:]])

    def __repr__(self) -> str:
        evidence = "unknown" if self.log_evidence is None else f"{self.log_evidence:.2f} nats"
        return (
            f"PosteriorComparison({', '.join(self.fits)}, against {self.reference}; "
            f"{len(self.labels)} weights, log evidence {evidence})"
        )

    def __str__(self) -> str:
        return f"against {self.reference}:\n{self.to_markdown()}"

    def _fit(self, name: str) -> GaussianFit:
        check_choice("name", name, self.fits)
        return self.fits[name]

    def _differences(self, name: str, chosen: list[bool]) -> Row:
        """Root mean square of differences, geometric mean of ratios, and their extremes."""
        own, other, index = self._fit(name), self.fits[self.reference], torch.tensor(chosen)
        differences = ((own.mean - other.mean) / other.sd).cpu()[index]
        ratios = (own.sd / other.sd).cpu()[index]
        return {
            "mean_difference": float(differences.square().mean().sqrt()),
            "max_mean_difference": float(differences.abs().max()),
            "sd_ratio": float(ratios.log().mean().exp()),
            "min_sd_ratio": float(ratios.min()),
            "max_sd_ratio": float(ratios.max()),
        }


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def wasserstein_2(a: GaussianFit, b: GaussianFit) -> float:
    """2-Wasserstein distance of two Gaussians.

    W2^2 = |m_a - m_b|^2 + tr A + tr B - 2 tr (A^1/2 B A^1/2)^1/2.
    """
    values, vectors = torch.linalg.eigh(a.cov)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    cross = torch.linalg.eigvalsh(root @ b.cov @ root).clamp(min=0).sqrt().sum()
    squared = (a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace() - 2 * cross
    return float(squared.clamp(min=0).sqrt())


@torch.no_grad()
def compare_posteriors(
    model: DAK,
    posteriors: Mapping[str, Posterior],
    x: Inputs,
    y: Tensor,
    *,
    x_new: Inputs | None = None,
    reference: str | None = None,
    num_samples: int = 4000,
    seed: int = 0,
) -> PosteriorComparison:
    """Compare several posteriors of one model on one data set.

    Moments are exact for the Gaussian guides of this library. All others are compared by their
    draws and have Monte Carlo error: even S draws from the reference itself, uncorrelated in W
    dimensions, have a Wasserstein distance of about sqrt(tr(cov) (W + 5) / S) / 2.

    Args:
        x: the inputs that the posteriors were made from, `(N, ...)`.
        y: their targets.
        x_new: inputs at which predictions are compared; by default x.
        reference: name of the posterior with which the others are compared. By default this is an
            exact posterior, or else the first that is not a guide, or else the last.
        num_samples: number of draws from guides without closed form.
    """
    check_kind("posteriors", posteriors, Mapping, "a dictionary of posteriors by name")
    if not posteriors:
        raise ValueError("`posteriors` must hold at least one posterior by name; got none.")
    if reference is None:
        exact = [n for n, p in posteriors.items() if isinstance(p, ExactPosterior)]
        samples = [n for n, p in posteriors.items() if as_guide(p) is None]
        reference = [*exact, *samples, list(posteriors)[-1]][0]
    check_choice("reference", reference, posteriors)
    checked_data(model, x, y)
    options: dict[str, Any] = {"num_samples": num_samples, "x": x, "seed": seed}
    all_draws = {n: draw_posterior(model, p, **options) for n, p in posteriors.items()}
    known = set.intersection(*(set(draws.sites) for draws in all_draws.values()))
    h, targets = unit_data(model, x, y, given=known)
    h_new = h if x_new is None else cached_inputs(model, x_new, given=known)
    fits, predictions, elbos = {}, {}, {}
    for name, posterior in posteriors.items():
        guide, draws = as_guide(posterior, torch.float64), all_draws[name]
        fits[name] = gaussian_fit(model, posterior, draws)
        predictions[name] = response(model, posterior, h_new, draws)
        if guide is not None and not draws.is_point:
            elbos[name] = _elbo(model, guide, h, targets, draws)
    evidence: float | None = None
    smallest_gaps: dict[str, float] = {}
    try:
        truth = exact_posterior(model, x, y)
    except NotImplementedError:  # another likelihood, or priors that are not normal
        pass
    else:
        evidence = truth.log_evidence
        for name in elbos:
            gap = _smallest_gap(as_guide(posteriors[name]), truth)
            smallest_gaps |= {} if gap is None else {name: gap}
    names = weight_names(model)
    return PosteriorComparison(reference, *names, fits, predictions, elbos, evidence, smallest_gaps)


def _smallest_gap(guide: nn.Module | None, exact: ExactPosterior) -> float | None:
    """The least KL that a member of the guide's family has from the posterior, if it is known.

    Among Gaussians with independent blocks b of weights, the closest to a posterior with precision
    A has its mean and precisions A_bb. Its KL is (sum_b log det A_bb - log det A) / 2.
    """
    if isinstance(guide, FullRankGuide):
        return 0.0
    scale_tril = exact.guide.scale_tril.double()  # (F, K, K)
    A = torch.cholesky_inverse(scale_tril)
    if isinstance(guide, MeanFieldGuide):
        own = A.diagonal(dim1=-2, dim2=-1).log().sum()
    elif isinstance(guide, UnitBlockGuide):
        _, P, M = guide.site_shapes["z"]
        units = A[:, -P * M :, -P * M :].unflatten(-1, (P, M)).unflatten(-3, (P, M))
        blocks = units.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # (F, P, M, M)
        single = A.diagonal(dim1=-2, dim2=-1)[:, : -P * M]
        own = torch.linalg.slogdet(blocks).logabsdet.sum() + single.log().sum()
    else:
        return None
    log_det = -2 * scale_tril.diagonal(dim1=-2, dim2=-1).log().sum()
    return 0.5 * float(own - log_det)


def _elbo(model: DAK, guide: nn.Module, h: Tensor, y: Tensor, draws: Draws) -> Elbo:
    if has_closed_form(guide) and model.likelihood.has_closed_form:
        priors = normal_priors(model, guide.weight_sites)
        if priors is not None:
            moments = function_moments(model, guide, h)
            rows = with_noise(model.likelihood).expected_log_prob(y, moments)
            return Elbo(float(rows.sum() - guide.kl_normal(priors)), 0.0)
    ratios = log_ratios(model, h, y, draws)
    return Elbo(float(ratios.mean()), float(ratios.std() / len(ratios) ** 0.5))
