"""NUTS and HMC over the weights: samples of the posterior, with the features held fixed.

Chains run one after the other, each with a seed of its own, so that a run is reproducible.
Everything is computed in float64.
"""

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer import HMC, MCMC, NUTS
from torch import Tensor
from torch.distributions import Distribution
from tqdm.auto import tqdm

from pyro_dak.inference.densities import log_joint, noise_scale, seeded, unit_data
from pyro_dak.inference.draws import Draws
from pyro_dak.inference.mcmc.chains import effective_sample_size, split_r_hat
from pyro_dak.inference.mcmc.target import Target
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating
from pyro_dak.model.priors import PriorLike, site_prior
from pyro_dak.model.rows import Inputs
from pyro_dak.validation import check_finite, check_integer, check_positive, check_probability

__all__ = ["MCMCRun", "run_hmc", "run_nuts"]

_MAX_R_HAT = 1.05
# In whitened coordinates all masses are nearly one. A shorter warm-up than this estimates them
# with a larger error than that, and does not adapt them.
_MASS_WARMUP = 150


@dataclass
class MCMCRun(Draws):
    """Draws of a Hamiltonian sampler, `(chains, draws, *event)`, and how far to trust them.

    `stats` holds for each draw `lp` (the log posterior without its constant, log p(y, w)),
    `diverging`, `n_steps` (the number of leapfrog steps) and `step_size`. `acceptance` is the mean
    acceptance probability of each chain, and `seconds` is the time it took.
    """

    acceptance: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def num_divergences(self) -> int:
        """Number of divergent transitions after warm-up, in all chains together."""
        return int(self.stats["diverging"].sum())

    def r_hat(self) -> dict[str, Tensor]:
        """Split r-hat of every element of every site, with the shape of its event; 1 is best."""
        return {n: split_r_hat(v) for n, v in self.sites.items()}

    def effective_sample_size(self) -> dict[str, Tensor]:
        """The number of independent draws that would be worth as much, for every element."""
        return {n: effective_sample_size(v) for n, v in self.sites.items()}

    def standard_error(self) -> dict[str, Tensor]:
        """Monte Carlo standard error of the mean of every element of every site."""
        sizes = self.effective_sample_size()
        return {n: v.flatten(0, 1).std(0) / sizes[n].sqrt() for n, v in self.sites.items()}

    def get_samples(self, group_by_chain: bool = False) -> dict[str, Tensor]:
        """The samples, as Pyro's `MCMC.get_samples` gives them."""
        return dict(self.sites) if group_by_chain else self.flat()

    def max_r_hat(self) -> float:
        """The largest r-hat of all elements of all sites."""
        return max(float(value.max()) for value in self.r_hat().values())

    def report(self) -> str:
        """Chains, divergences, r-hat and effective sample size, in a few lines."""
        sizes, r_hats = self.effective_sample_size(), self.r_hat()
        lines = [
            f"{self.num_chains} chain{'s' * (self.num_chains > 1)} of {self.num_samples} draws, "
            f"{sum(self.seconds):.1f} s, {self.num_divergences} divergences, "
            f"{float(self.stats['n_steps'].double().mean()):.1f} steps per draw",
            "site               elements  max r-hat   min ESS",
        ]
        for name, size in sizes.items():
            r_hat = float(r_hats[name].max())
            lines.append(f"{name:<18} {size.numel():>8}  {r_hat:>9.3f}  {float(size.min()):>8.0f}")
        return "\n".join(lines)


def run_nuts(
    model: DAK,
    x: Inputs,
    y: Tensor,
    num_samples: int = 500,
    warmup_steps: int = 500,
    num_chains: int = 1,
    *,
    noise_prior: PriorLike | None = None,
    unit_scale_prior: PriorLike | None = None,
    target_accept_prob: float = 0.8,
    max_tree_depth: int = 10,
    whiten: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> MCMCRun:
    """Samples of all weights by the No-U-Turn sampler, with the features held fixed.

    The unit inputs of x `(N, ...)` are computed once, in eval mode; after that steps are cheap.
    Any likelihood is allowed, and any prior whose weights are real numbers. The scales of a prior
    on `shrinkage` are sampled along with the weights. A warning says so if there are divergences
    or if r-hat is above 1.05.

    Args:
        model: the model. Its network stays fixed, and so do its noise and unit scales unless they
            get a prior here.
        num_samples: draws per chain after the warm-up.
        warmup_steps: draws per chain that adapt step size and masses and are thrown away.
        num_chains: number of chains, which run one after the other.
        noise_prior: prior of `noise_scale`, to sample it too; see `pyro_dak.model.priors`.
        unit_scale_prior: prior of `unit_scale`, to sample it too.
        target_accept_prob: a higher value means smaller steps; raise it if there are divergences.
        max_tree_depth: a draw takes at most 2^depth - 1 steps.
        whiten: whether to sample in coordinates in which the posterior is round, by its curvature
            at the mode.
        seed: chain k uses seed + k.
        progress: whether to show a bar for each chain.
    """
    check_probability("target_accept_prob", target_accept_prob)
    check_integer("max_tree_depth", max_tree_depth, minimum=1)
    kernel_fn = partial(NUTS, max_tree_depth=max_tree_depth, target_accept_prob=target_accept_prob)
    options: dict[str, Any] = {"whiten": whiten, "seed": seed, "progress": progress}
    options |= {"noise_prior": noise_prior, "unit_scale_prior": unit_scale_prior}
    return _run(kernel_fn, model, x, y, num_samples, warmup_steps, num_chains, **options)


def run_hmc(
    model: DAK,
    x: Inputs,
    y: Tensor,
    num_samples: int = 500,
    warmup_steps: int = 500,
    num_chains: int = 1,
    *,
    trajectory_length: float = 1.5,
    target_accept_prob: float = 0.8,
    **options: Any,
) -> MCMCRun:
    """Samples of all weights by Hamiltonian Monte Carlo with trajectories of fixed length.

    The length of a trajectory is a time: pi / 2 makes the draws from a standard normal, which is
    what whitening aims at, independent. All other arguments are those of `run_nuts`, apart from
    `max_tree_depth`.
    """
    check_positive("trajectory_length", trajectory_length)
    check_probability("target_accept_prob", target_accept_prob)
    kernel_fn = partial(
        HMC, trajectory_length=trajectory_length, target_accept_prob=target_accept_prob
    )
    return _run(kernel_fn, model, x, y, num_samples, warmup_steps, num_chains, **options)


def _run(
    kernel_fn: Callable[..., Any],
    model: DAK,
    x: Inputs,
    y: Tensor,
    num_samples: int,
    warmup_steps: int,
    num_chains: int,
    noise_prior: PriorLike | None = None,
    unit_scale_prior: PriorLike | None = None,
    whiten: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> MCMCRun:
    check_integer("num_samples", num_samples, minimum=4)
    check_integer("warmup_steps", warmup_steps, minimum=0)
    check_integer("num_chains", num_chains, minimum=1)
    check_integer("seed", seed, minimum=-(2**63))
    h, y = unit_data(model, x, y)
    should_adapt = not whiten or warmup_steps >= _MASS_WARMUP
    runs = []
    with evaluating(model), pyro.validation_enabled(False):
        extra_priors = _extra_priors(model, noise_prior, unit_scale_prior)
        target = Target(model, h, y, extra_priors, whiten)
        for chain in range(num_chains):
            label = f"chain {chain + 1}/{num_chains}" if progress else None
            kernel = kernel_fn(potential_fn=target, adapt_mass_matrix=should_adapt)
            with torch.enable_grad(), seeded(seed + chain):
                runs.append(_run_chain(target, kernel, num_samples, warmup_steps, label))
        run = MCMCRun(
            {name: torch.cat([r.sites[name] for r in runs]) for name in runs[0].sites},
            stats={name: torch.cat([r.stats[name] for r in runs]) for name in runs[0].stats},
            acceptance=[r.acceptance[0] for r in runs],
            seconds=[r.seconds[0] for r in runs],
        )
        flat = run.flat()
        for name, value in flat.items():
            check_finite(f"draws of {name}", value)
        lp = log_joint(model, h, y, flat)
        lp = lp + sum(prior.log_prob(flat[name]) for name, prior in extra_priors.items())
    run.stats["lp"] = lp.unflatten(0, (num_chains, num_samples))
    _warn_if_untrustworthy(run)
    return run


def _extra_priors(
    model: DAK, noise_prior: PriorLike | None, unit_scale_prior: PriorLike | None
) -> dict[str, Distribution]:
    """Priors of the parameters that are sampled; the parameter's shape is the event shape."""
    priors: dict[str, Distribution] = {}
    like = model.layer.log_unit_scale.detach().double()
    if noise_prior is not None:
        noise = noise_scale(model.likelihood)
        if noise is None:
            raise ValueError(
                "`noise_prior` needs a likelihood with a noise scale; got "
                f"{type(model.likelihood).__name__}. Leave it out."
            )
        priors["noise_scale"] = site_prior("noise_scale", noise_prior, noise.shape, like)
    if unit_scale_prior is not None:
        priors["unit_scale"] = site_prior("unit_scale", unit_scale_prior, like.shape, like)
    return priors


def _run_chain(
    target: Target, kernel: Any, num_samples: int, warmup_steps: int, label: str | None
) -> MCMCRun:
    """One chain. It shows a progress bar if it has a label."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    initial = {"position": target.initial_position(generator)}
    steps, step_sizes = [], []
    start, last = time.perf_counter(), {}
    options: dict[str, Any] = {"unit": "draw", "disable": label is None, "file": sys.stderr}
    bar = tqdm(total=warmup_steps + num_samples, desc=label, **options)

    def hook_fn(kernel: Any, params: object, stage: str, index: int) -> None:
        if stage.startswith("Sample"):
            steps.append(target.num_evaluations)
            step_sizes.append(float(kernel.step_size))
        target.num_evaluations = 0
        last.update(kernel.logging())
        bar.set_postfix({"stage": stage.split()[0].lower(), **last}, refresh=False)
        bar.update()

    options = {"initial_params": initial, "hook_fn": hook_fn, "disable_progbar": True}
    mcmc = MCMC(kernel, num_samples, warmup_steps, **options)
    with bar:
        mcmc.run()
    sites = target.sites(mcmc.get_samples(group_by_chain=True)["position"])
    diverging = torch.zeros(1, num_samples, dtype=torch.bool)
    diverging[0, list(mcmc.diagnostics()["divergences"]["chain 0"])] = True
    stats = {
        "diverging": diverging,
        "n_steps": torch.tensor([steps]),
        "step_size": torch.tensor([step_sizes], dtype=torch.float64),
    }
    seconds = time.perf_counter() - start
    return MCMCRun(sites, None, stats, [float(last["acc. prob"])], [seconds])


def _warn_if_untrustworthy(run: MCMCRun) -> None:
    if run.num_divergences:
        warnings.warn(
            f"{run.num_divergences} of {run.num_chains * run.num_samples} transitions diverged: "
            "the draws may miss parts of the posterior. Raise `target_accept_prob`.",
            stacklevel=4,
        )
    r_hat = run.max_r_hat()
    if not r_hat <= _MAX_R_HAT:
        warnings.warn(
            f"The largest r-hat is {r_hat:.2f}, above {_MAX_R_HAT}: the chains have not mixed. "
            "Raise `warmup_steps` and `num_samples`.",
            stacklevel=4,
        )
