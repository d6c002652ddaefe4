"""A summary of a fitted model: what is wrong with it, in words."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_dak.additive.gaussian import kl_diagonal
from pyro_dak.diagnostics.calibration import dispersion
from pyro_dak.diagnostics.checks import k_hat, loo, pit_values
from pyro_dak.diagnostics.posterior_moments import gaussian_fit, response
from pyro_dak.diagnostics.scores import accuracy, expected_calibration_error
from pyro_dak.inference.draws import Posterior, draws_and_data
from pyro_dak.inference.mcmc.nuts import MCMCRun
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.model.rows import Inputs

__all__ = ["Finding", "Summary", "summary"]

_Z = 4.0  # A deviation is reported from this many standard errors on.

# What each finding says, by its topic.
_MESSAGES = {
    "dead units": "{} of {} units do not vary over the data ({}): look for constant features or "
    "ReLUs that are always off, or lower `num_units`.",
    "outside the grid": "{:.0%} of the unit inputs lie outside the bounds ({:g}, {:g}), where the "
    "process falls back to its mean: widen `bounds`, or scale the features.",
    "coarse grid": "between two nodes the prior keeps only {:.0%} of its variance: raise `level` "
    "or the lengthscale.",
    "collapse to the prior": "the posterior of every unit is its prior: the model has learned "
    "nothing. Train longer, lower `noise_scale`, or look at the scale of `y` and of the features.",
    "idle units": "{} of {} units are as in the prior ({}): the data say nothing about them, and "
    "`num_units` may be lower.",
    "constant predictions": "the mean prediction hardly varies over the rows: the features say "
    "nothing about `y` yet, or the noise explains all of it.",
    "k-hat": "it is {}, above 0.7: the guide is far from the posterior. Train it longer, or use a "
    "richer one (`FullRankGuide`) or `run_nuts`.",
    "leave-one-out": "{} of {} rows have k-hat above 0.7: they move the posterior a lot when left "
    "out (outliers, or noise set too small), and their scores are not reliable.",
    "under-dispersed": "predictions are too narrow (the PIT histogram is a valley): `y` falls "
    "outside the intervals too often. Raise or learn `noise_scale`, use HeteroscedasticLikelihood, "
    "or `calibrate` on held-out rows.",
    "over-dispersed": "predictions are too wide (the PIT histogram is a hill). Lower or learn "
    "`noise_scale`, train longer, or `calibrate` on held-out rows.",
    "bias": "predictions are too {} on average (mean PIT {:.2f}).",
    "overconfident": "the mean confidence is {:.2f}, but the accuracy is {:.2f}: `calibrate` on "
    "held-out rows.",
    "underconfident": "the mean confidence is {:.2f}, but the accuracy is {:.2f}: train longer, or "
    "`calibrate` on held-out rows.",
    "divergences": "{} transitions diverged: raise `target_accept_prob`.",
    "r-hat": "it is up to {:.2f}: the chains have not mixed. Run longer.",
    "effective sample size": "it is as low as {:.0f}. Run longer.",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: a short topic, and a message that says what to do."""

    topic: str
    message: str


@dataclass
class Summary:
    """What is wrong with a model (`findings`), and the numbers looked at, by name (`values`)."""

    findings: list[Finding] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)

    @property
    def topics(self) -> list[str]:
        """The topics of all findings."""
        return [finding.topic for finding in self.findings]

    def add_if(self, is_wrong: bool, topic: str, *numbers: object) -> None:
        """Add the finding of this topic, with its numbers, if something is wrong."""
        if is_wrong:
            self.findings.append(Finding(topic, _MESSAGES[topic].format(*numbers)))

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in self.values.items())
        lines = [f"- {finding.topic}: {finding.message}" for finding in self.findings]
        return "\n".join([numbers, *(lines or ["Nothing found wrong."])])


@torch.no_grad()
def summary(
    model: DAK,
    posterior: Posterior,
    x: Inputs,
    y: Tensor,
    *,
    num_samples: int = 2000,
    seed: int = 0,
) -> Summary:
    """Look for the usual faults of a model and its posterior, and name them in words.

    It looks for dead units, inputs outside the grid and a grid too coarse for the kernel; for units
    or a whole model that have stayed at the prior; for k-hat of the guide or of leave-one-out above
    0.7; for predictions that are too narrow, too wide or biased (by PIT values, or by confidence
    against accuracy for classes); and for divergences, r-hat and effective sample size of a
    sampler. On rows that the network was trained on, calibration looks better than it is: give
    held-out rows to judge it. The number that `calibrate` finds does not enter.

    x `(N, ...)` and y are the rows that the posterior was made from. `num_samples` is the number of
    draws from a guide.
    """
    options = {"num_samples": num_samples, "seed": seed}
    draws, h, targets = draws_and_data(model, posterior, x, y, **options)
    report = Summary()
    _look_at_inputs(report, model, h)
    _look_at_weights(report, model, posterior)
    mean = response(model, posterior, h, draws).mean
    _look_at_predictions(report, model, mean, targets)
    if draws.log_q is not None:
        k = report.values["k_hat"] = k_hat(model, draws, x, y)
        report.add_if(k > 0.7, "k-hat", "infinite" if math.isinf(k) else f"{k:.2f}")
    left_out = loo(model, draws, x, y)
    report.values["elpd_loo"] = left_out.elpd
    report.add_if(left_out.num_bad > 0, "leave-one-out", left_out.num_bad, len(y))
    if isinstance(model.likelihood, CategoricalLikelihood):
        _look_at_classes(report, targets, mean)
    else:
        _look_at_pit(report, pit_values(model, posterior, x, y, seed=seed))
    if isinstance(posterior, MCMCRun):
        _look_at_chains(report, posterior)
    return report


def _look_at_inputs(report: Summary, model: DAK, h: Tensor) -> None:
    activation = model.layer.activation
    low, high = activation.grid.bounds
    spread = h.amax(0) - h.amin(0)
    dead = torch.nonzero(spread <= 1e-6 * (high - low)).flatten().tolist()
    is_dead = len(dead) > 0 and len(h) > 1
    report.add_if(is_dead, "dead units", len(dead), model.num_units, dead[:8])
    outside = report.values["outside_grid"] = float(((h < low) | (h > high)).double().mean())
    report.add_if(outside > 0.05, "outside the grid", outside, low, high)
    if not activation.kernel.has_prior:
        kept = activation.prior_variance_between_nodes()
        report.add_if(model.num_inducing > 1 and kept < 0.5, "coarse grid", kept)


def _look_at_weights(report: Summary, model: DAK, posterior: Posterior) -> None:
    """Nats that each unit has learned: the KL of its marginals from a prior with these moments."""
    F, P, M = model.site_shapes["z"]
    prior = model.prior_distribution("z", torch.zeros((), dtype=torch.float64))
    try:
        moments = [part.expand(F, P, M) for part in (prior.mean, prior.variance.sqrt())]
    except NotImplementedError:
        return
    if not all(bool(torch.isfinite(part).all()) for part in moments):
        return
    fit = gaussian_fit(model, posterior)
    own = [part.unflatten(0, (F, -1))[:, -P * M :].cpu() for part in (fit.mean, fit.sd)]
    parts = [part.unflatten(-1, (P, M)) for part in own] + moments
    by_unit = torch.stack([kl_diagonal(*(part[:, p] for part in parts)) for p in range(P)])
    report.values["nats_learned"] = float(by_unit.sum())
    idle = torch.nonzero(by_unit < 0.1).flatten().tolist()
    report.add_if(len(idle) == P, "collapse to the prior")
    report.add_if(0 < len(idle) < P, "idle units", len(idle), P, idle[:8])


def _look_at_predictions(report: Summary, model: DAK, mean: Tensor, y: Tensor) -> None:
    scale = 1.0 if isinstance(model.likelihood, CategoricalLikelihood) else float(y.double().std())
    if len(y) < 3 or scale == 0:
        return
    varies = report.values["predictions_vary"] = float(mean.std(0).max()) / scale
    report.add_if(varies < 0.05, "constant predictions")


def _look_at_pit(report: Summary, pit: Tensor) -> None:
    ratio, z_score = dispersion(pit)
    centre = float(pit.mean())
    report.values |= {"pit_dispersion": ratio, "pit_mean": centre}
    report.add_if(z_score > _Z and ratio > 1.2, "under-dispersed")
    report.add_if(z_score < -_Z and ratio < 0.8, "over-dispersed")
    is_biased = abs(centre - 0.5) > max(0.05, _Z / math.sqrt(12 * pit.numel()))
    report.add_if(is_biased, "bias", "low" if centre > 0.5 else "high", centre)


def _look_at_classes(report: Summary, y: Tensor, probs: Tensor) -> None:
    hit = float(accuracy(y, probs))
    confidence = float(probs.amax(-1).mean())
    error = float(expected_calibration_error(y, probs))
    report.values |= {"accuracy": hit, "confidence": confidence, "ece": error}
    se = math.sqrt(max(confidence * (1 - confidence), 1e-6) / len(y))
    topic = "overconfident" if confidence > hit else "underconfident"
    report.add_if(abs(confidence - hit) > max(0.05, _Z * se), topic, confidence, hit)


def _look_at_chains(report: Summary, run: MCMCRun) -> None:
    size = min(float(value.min()) for value in run.effective_sample_size().values())
    r_hat, diverged = run.max_r_hat(), run.num_divergences
    report.values |= {"divergences": float(diverged), "max_r_hat": r_hat, "min_ess": size}
    report.add_if(diverged > 0, "divergences", diverged)
    report.add_if(r_hat > 1.05, "r-hat", r_hat)
    report.add_if(size < 100, "effective sample size", size)
