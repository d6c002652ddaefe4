"""Posteriors side by side: weights, predictions and evidence, as tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_dak.diagnostics.posterior_moments import GaussianFit, gaussian_fit, wasserstein_2
from pyro_dak.inference.densities import (
    Response,
    cached_inputs,
    checked_data,
    exact_moments,
    log_joint,
    response,
    with_noise,
)
from pyro_dak.inference.draws import Draws, Posterior, as_guide, draw_posterior, has_closed_form
from pyro_dak.inference.exact import ExactPosterior, exact_posterior
from pyro_dak.inference.objectives import kl
from pyro_dak.model.dak import DAK
from pyro_dak.validation import check_choice

__all__ = ["PosteriorComparison", "compare_posteriors"]

Row = dict[str, float | str]


class Elbo(NamedTuple):
    """A lower bound of the log evidence, in nats, and its standard error, zero if exact."""

    value: float
    se: float


@dataclass(frozen=True)
class PosteriorComparison:
    """Several posteriors against one of them, the reference.

    `fits` has the moments of the weights, `predictions` those of E[y | f] at the inputs, `elbos`
    the bounds of those that are guides. Differences of means are in standard deviations of the
    reference.
    """

    reference: str
    labels: list[str]
    units: list[str]
    fits: dict[str, GaussianFit]
    predictions: dict[str, Response]
    elbos: dict[str, Elbo]
    log_evidence: float | None

    def weights(self, name: str) -> list[Row]:
        """A row per weight: means, sds, difference of means in sds, ratio of sds."""
        check_choice("name", name, self.fits)
        own, other = self.fits[name], self.fits[self.reference]
        difference, ratio = (own.mean - other.mean) / other.sd, own.sd / other.sd
        return [
            {
                "weight": label,
                "mean": float(own.mean[i]),
                "sd": float(own.sd[i]),
                "reference_mean": float(other.mean[i]),
                "reference_sd": float(other.sd[i]),
                "mean_difference": float(difference[i]),
                "sd_ratio": float(ratio[i]),
            }
            for i, label in enumerate(self.labels)
        ]

    def by_unit(self, name: str) -> list[Row]:
        """A row per unit, and one for the biases: root mean square difference, mean sd ratio."""
        table: dict[str, list[Row]] = {}
        for unit, row in zip(self.units, self.weights(name), strict=True):
            table.setdefault(unit, []).append(row)
        return [{"unit": unit, **_aggregate(rows)} for unit, rows in table.items()]

    def summary(self) -> list[Row]:
        """A row per posterior."""
        rows = []
        for name in self.fits:
            row: Row = {"posterior": name, **_aggregate(self.weights(name))}
            own, other = self.predictions[name], self.predictions[self.reference]
            difference = (own.mean - other.mean) / other.sd
            row["predictive_mean_difference"] = float(difference.square().mean().sqrt())
            row["predictive_sd_ratio"] = float((own.sd / other.sd).log().mean().exp())
            row["wasserstein_2"] = wasserstein_2(self.fits[name], self.fits[self.reference])
            if name in self.elbos:
                row["elbo"] = self.elbos[name].value
                if self.log_evidence is not None:
                    row["evidence_gap"] = self.log_evidence - self.elbos[name].value
            rows.append(row)
        return rows

    def to_markdown(self) -> str:
        """The summary as a table."""
        columns = [
            ("posterior", "posterior"),
            ("mean_difference", "Δmean / sd (rms)"),
            ("max_mean_difference", "max"),
            ("sd_ratio", "sd ratio"),
            ("min_sd_ratio", "min"),
            ("max_sd_ratio", "max"),
            ("predictive_mean_difference", "Δpredictive mean / sd (rms)"),
            ("predictive_sd_ratio", "predictive sd ratio"),
            ("wasserstein_2", "W2"),
            ("elbo", "ELBO"),
            ("evidence_gap", "evidence gap"),
        ]
        rows = self.summary()
        columns = [(key, title) for key, title in columns if any(key in row for row in rows)]
        lines = [
            "| " + " | ".join(title for _, title in columns) + " |",
            "|---" * len(columns) + "|",
        ]
        for row in rows:
            cells = [_cell(row.get(key)) for key, _ in columns]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"against {self.reference}:\n{self.to_markdown()}"


def _aggregate(rows: list[Row]) -> Row:
    differences = torch.tensor([row["mean_difference"] for row in rows], dtype=torch.float64)
    ratios = torch.tensor([row["sd_ratio"] for row in rows], dtype=torch.float64)
    return {
        "mean_difference": float(differences.square().mean().sqrt()),
        "max_mean_difference": float(differences.abs().max()),
        "sd_ratio": float(ratios.log().mean().exp()),
        "min_sd_ratio": float(ratios.min()),
        "max_sd_ratio": float(ratios.max()),
    }


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return (
        value if isinstance(value, str) else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    )


@torch.no_grad()
def compare_posteriors(
    model: DAK,
    posteriors: Mapping[str, Posterior],
    x: Tensor,
    y: Tensor,
    *,
    x_new: Tensor | None = None,
    reference: str | None = None,
    num_samples: int = 4000,
    seed: int = 0,
) -> PosteriorComparison:
    """Compare posteriors of one model on one data set with each other.

    Moments are in closed form for the Gaussian guides of this library, and those of the draws for
    all others, with Monte Carlo error: even for S draws from the reference itself, uncorrelated in
    W dimensions, the Wasserstein distance is about sqrt(tr(cov) (W + 5) / S) / 2.

    Args:
        model: the model.
        posteriors: by name: guides, exact posteriors, MCMC runs, dictionaries of samples.
        x: inputs that the posteriors were made from, `(N, ...)`.
        y: their targets.
        x_new: inputs at which predictions are compared; by default x.
        reference: name of the posterior that the others are measured against; by default an exact
            one, else the first that is not a guide, else the last.
        num_samples: draws from guides without closed form.
        seed: of those draws.
    """
    if not posteriors:
        raise ValueError("`posteriors` must hold at least one posterior by name; got none.")
    reference = _default_reference(posteriors) if reference is None else reference
    check_choice("reference", reference, posteriors)
    x, y = checked_data(model, x, y)
    h = cached_inputs(model, x)
    y = y.to(h.device)
    h_new = h if x_new is None else cached_inputs(model, x_new)
    fits, predictions, elbos = {}, {}, {}
    for name, posterior in posteriors.items():
        guide = as_guide(posterior, torch.float64)
        draws = draw_posterior(model, posterior, num_samples=num_samples, x=x, seed=seed)
        fits[name] = gaussian_fit(model, posterior if guide is None else guide, draws)
        predictions[name] = response(model, posterior, h_new, draws)
        if guide is not None and not draws.is_point:
            elbos[name] = _elbo(model, guide, h, y, draws)
    labels, units = _weight_names(model)
    evidence = _log_evidence(model, x, y)
    return PosteriorComparison(reference, labels, units, fits, predictions, elbos, evidence)


def _default_reference(posteriors: Mapping[str, Posterior]) -> str:
    exact = [n for n, p in posteriors.items() if isinstance(p, ExactPosterior)]
    samples = [n for n, p in posteriors.items() if as_guide(p) is None]
    return [*exact, *samples, list(posteriors)[-1]][0]


def _elbo(model: DAK, guide: nn.Module, h: Tensor, y: Tensor, draws: Draws) -> Elbo:
    if has_closed_form(guide, model) and model.likelihood.has_closed_form:
        priors = [model.normal_prior(name) for name in guide.weight_sites]
        if None not in priors:
            moments = exact_moments(model, guide, h)
            rows = with_noise(model.likelihood).expected_log_prob(y, moments)
            return Elbo(float(rows.sum() - kl(model, guide)), 0.0)
    assert draws.log_q is not None
    ratios = log_joint(model, h, y, draws.flat()) - draws.log_q.flatten()
    return Elbo(float(ratios.mean()), float(ratios.std() / len(ratios) ** 0.5))


def _log_evidence(model: DAK, x: Tensor, y: Tensor) -> float | None:
    try:
        return exact_posterior(model, x, y).log_evidence
    except NotImplementedError:  # another likelihood, or priors that are not normal
        return None


def _weight_names(model: DAK) -> tuple[list[str], list[str]]:
    """A label for each weight, and the unit it belongs to, in the order of `GaussianFit`."""
    F, P, M = model.site_shapes["z"]
    labels, units = [], []
    for c in range(F):
        labels.append(f"mu[{c}]")
        units.append("bias")
        if model.layer.linear_term:
            labels += [f"linear[{c},{p}]" for p in range(P)]
            units += [f"unit {p}" for p in range(P)]
        labels += [f"z[{c},{p},{m}]" for p in range(P) for m in range(M)]
        units += [f"unit {p}" for p in range(P) for _ in range(M)]
    return labels, units
