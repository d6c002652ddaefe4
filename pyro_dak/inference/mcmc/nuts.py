"""NUTS and HMC over the weights on cached features: the posterior without an approximation.

Chains run one after the other, each with its own seed, so that a run is reproducible and nothing
is sent between processes. Everything is in float64.
"""

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from pyro.infer import HMC, MCMC, NUTS
from torch import Tensor
from torch.distributions import Distribution
from tqdm.auto import tqdm

from pyro_dak.inference.densities import cached_inputs, checked_data, noise_scale
from pyro_dak.inference.draws import Draws
from pyro_dak.inference.mcmc.chains import effective_sample_size, split_r_hat
from pyro_dak.inference.mcmc.target import Target
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating
from pyro_dak.model.priors import PriorLike, site_prior
from pyro_dak.validation import check_integer, check_positive

__all__ = ["MCMCRun", "run_hmc", "run_nuts"]

_MAX_R_HAT = 1.05
# Whitened coordinates have nearly unit masses; fewer draws than this estimate them worse.
_MASS_WARMUP = 150


@dataclass
class MCMCRun(Draws):
    """Draws of a Hamiltonian sampler, `(chains, draws, *event)`, and how far to trust them.

    `stats` has, by draw: `lp` (log p(y, w), unnormalised log posterior), `diverging`, `n_steps`
    (leapfrog steps) and `step_size`. `acceptance` is the mean acceptance probability of each chain,
    `seconds` its time.
    """

    acceptance: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def num_divergences(self) -> int:
        """Divergent transitions after warm-up, over all chains."""
        return int(self.stats["diverging"].sum())

    def r_hat(self) -> dict[str, Tensor]:
        """Split r-hat of every element of every site, like its event; 1 is best."""
        return {n: split_r_hat(v) for n, v in self.sites.items()}

    def effective_sample_size(self) -> dict[str, Tensor]:
        """Draws that would be worth as much if they were independent, like the event."""
        return {n: effective_sample_size(v) for n, v in self.sites.items()}

    def standard_error(self) -> dict[str, Tensor]:
        """Monte Carlo standard error of the mean of every element, like the event."""
        sizes = self.effective_sample_size()
        return {n: v.flatten(0, 1).std(0) / sizes[n].sqrt() for n, v in self.sites.items()}

    def get_samples(self, group_by_chain: bool = False) -> dict[str, Tensor]:
        """The samples, as Pyro's `MCMC.get_samples` gives them."""
        return dict(self.sites) if group_by_chain else self.flat()

    def max_r_hat(self) -> float:
        """Largest r-hat of all."""
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
        for name in self.sites:
            lines.append(
                f"{name:<18} {sizes[name].numel():>8}  {float(r_hats[name].max()):>9.3f}  "
                f"{float(sizes[name].min()):>8.0f}"
            )
        return "\n".join(lines)


def run_nuts(
    model: DAK,
    x: Tensor,
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
    """Samples of all weights by the No-U-Turn sampler, with the features as they are.

    The unit inputs are computed once, in eval mode; a step then costs one matrix product. Any
    likelihood and any prior of real weights; priors over the scales of units are sampled along.

    Args:
        model: the model; its network and, unless they get a prior here, its noise and unit scales
            stay fixed.
        x: inputs, `(N, ...)`.
        y: targets.
        num_samples: draws per chain after warm-up.
        warmup_steps: draws per chain that adapt step size and masses and are thrown away.
        num_chains: chains, one after the other.
        noise_prior: prior of `noise_scale`, to sample it too; see `pyro_dak.model.priors`.
        unit_scale_prior: prior of `unit_scale`, to sample it too.
        target_accept_prob: higher means smaller steps; raise it against divergences.
        max_tree_depth: at most 2^depth - 1 steps per draw.
        whiten: sample in coordinates that the curvature at the mode makes round.
        seed: chain k uses seed + k.
        progress: show a bar per chain.

    Returns:
        The draws. A warning says so if there are divergences or r-hat is above 1.05.
    """

    def kernel_fn(target: Target) -> NUTS:
        return NUTS(
            potential_fn=target,
            adapt_mass_matrix=not whiten or warmup_steps >= _MASS_WARMUP,
            target_accept_prob=target_accept_prob,
            max_tree_depth=max_tree_depth,
        )

    priors = {"noise_scale": noise_prior, "unit_scale": unit_scale_prior}
    lengths = (num_samples, warmup_steps, num_chains)
    return _run(model, x, y, kernel_fn, lengths, priors, whiten, seed, progress)


def run_hmc(
    model: DAK,
    x: Tensor,
    y: Tensor,
    num_samples: int = 500,
    warmup_steps: int = 500,
    num_chains: int = 1,
    *,
    trajectory_length: float = 1.5,
    noise_prior: PriorLike | None = None,
    unit_scale_prior: PriorLike | None = None,
    target_accept_prob: float = 0.8,
    whiten: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> MCMCRun:
    """Samples of all weights by plain Hamiltonian Monte Carlo; arguments as in `run_nuts`.

    Args:
        model: the model.
        x: inputs, `(N, ...)`.
        y: targets.
        num_samples: draws per chain after warm-up.
        warmup_steps: draws per chain that are thrown away.
        num_chains: chains, one after the other.
        trajectory_length: time of a trajectory; in whitened coordinates pi / 2 makes draws from a
            Gaussian independent.
        noise_prior: prior of `noise_scale`, to sample it too.
        unit_scale_prior: prior of `unit_scale`, to sample it too.
        target_accept_prob: higher means smaller steps.
        whiten: sample in coordinates that the curvature at the mode makes round.
        seed: chain k uses seed + k.
        progress: show a bar per chain.
    """
    check_positive("trajectory_length", trajectory_length)

    def kernel_fn(target: Target) -> HMC:
        return HMC(
            potential_fn=target,
            adapt_mass_matrix=not whiten or warmup_steps >= _MASS_WARMUP,
            trajectory_length=trajectory_length,
            target_accept_prob=target_accept_prob,
        )

    priors = {"noise_scale": noise_prior, "unit_scale": unit_scale_prior}
    lengths = (num_samples, warmup_steps, num_chains)
    return _run(model, x, y, kernel_fn, lengths, priors, whiten, seed, progress)


def _run(
    model: DAK,
    x: Tensor,
    y: Tensor,
    kernel_fn: Callable[[Target], Any],
    lengths: tuple[int, int, int],
    priors: Mapping[str, PriorLike | None],
    whiten: bool,
    seed: int,
    progress: bool,
) -> MCMCRun:
    num_samples, warmup_steps, num_chains = lengths
    check_integer("num_samples", num_samples, minimum=4)
    check_integer("warmup_steps", warmup_steps, minimum=0)
    check_integer("num_chains", num_chains, minimum=1)
    x, y = checked_data(model, x, y)
    extra = _extra_priors(model, priors)
    with evaluating(model), pyro.validation_enabled(False):
        h = cached_inputs(model, x)
        target = Target(model, h, y.to(h.device), extra, whiten)
        chains = []
        for chain in range(num_chains):
            label = f"chain {chain + 1}/{num_chains}"
            kernel = kernel_fn(target)
            with torch.enable_grad(), torch.random.fork_rng():
                torch.manual_seed(seed + chain)
                chains.append(
                    _run_chain(target, kernel, num_samples, warmup_steps, label, progress)
                )
    run = MCMCRun(
        {name: torch.stack([c.sites[name] for c in chains]) for name in chains[0].sites},
        stats={name: torch.stack([c.stats[name] for c in chains]) for name in chains[0].stats},
        acceptance=[c.acceptance[0] for c in chains],
        seconds=[c.seconds[0] for c in chains],
    )
    _warn_if_untrustworthy(run)
    return run


def _extra_priors(model: DAK, priors: Mapping[str, PriorLike | None]) -> dict[str, Distribution]:
    """Priors of the parameters that are to be sampled, with the parameter's shape as event."""
    resolved: dict[str, Distribution] = {}
    like = model.layer.log_unit_scale.detach().double()
    for name, prior in priors.items():
        if prior is None:
            continue
        shape = torch.Size([model.num_units])
        if name == "noise_scale":
            current = noise_scale(model.likelihood)
            if current is None:
                raise ValueError(
                    f"`noise_prior` needs a likelihood with a noise scale; got "
                    f"{type(model.likelihood).__name__}. Leave it out."
                )
            shape = current.shape
        resolved[name] = site_prior(name, prior, shape, like)
    return resolved


def _run_chain(
    target: Target,
    kernel: Any,
    num_samples: int,
    warmup_steps: int,
    label: str,
    progress: bool,
) -> MCMCRun:
    """One chain, without a chain dimension."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    initial = {"position": target.initial_position(generator)}
    steps, step_sizes = [], []
    start, last = time.perf_counter(), {}
    bar = tqdm(
        total=warmup_steps + num_samples,
        desc=label,
        unit="draw",
        disable=not progress,
        file=sys.stderr,
    )

    def hook_fn(kernel: Any, params: object, stage: str, index: int) -> None:
        if stage.startswith("Sample"):
            steps.append(target.num_evaluations)
            step_sizes.append(float(kernel.step_size))
        target.num_evaluations = 0
        last.update(kernel.logging())
        bar.set_postfix({"stage": stage.split()[0].lower(), **last}, refresh=False)
        bar.update()

    mcmc = MCMC(
        kernel,
        num_samples,
        warmup_steps,
        initial_params=initial,
        hook_fn=hook_fn,
        disable_progbar=True,
    )
    with bar:
        mcmc.run()
    sites = target.sites(mcmc.get_samples()["position"])
    diverging = torch.zeros(num_samples, dtype=torch.bool)
    diverging[list(mcmc.diagnostics()["divergences"]["chain 0"])] = True
    stats = {
        "lp": target.log_joints(sites),
        "diverging": diverging,
        "n_steps": torch.tensor(steps),
        "step_size": torch.tensor(step_sizes, dtype=torch.float64),
    }
    seconds = time.perf_counter() - start
    return MCMCRun(sites, None, stats, [float(last["acc. prob"])], [seconds])


def _warn_if_untrustworthy(run: MCMCRun) -> None:
    if run.num_divergences:
        warnings.warn(
            f"{run.num_divergences} of {run.num_chains * run.num_samples} transitions diverged: "
            "parts of the posterior may be missing. Raise `target_accept_prob`.",
            stacklevel=4,
        )
    r_hat = run.max_r_hat()
    if not r_hat <= _MAX_R_HAT:
        warnings.warn(
            f"The largest r-hat is {r_hat:.2f}, above {_MAX_R_HAT}: the chains have not mixed. "
            "Raise `warmup_steps` and `num_samples`.",
            stacklevel=4,
        )
