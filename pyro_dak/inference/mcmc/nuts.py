"""NUTS and HMC over the weights: samples of the posterior, with the features held fixed.

Each chain has a seed of its own, so that a run is reproducible, whether chains run one after the
other or in processes side by side. Everything is computed in float64.
"""

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer import HMC, MCMC, NUTS
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution
from tqdm.auto import tqdm

from pyro_dak.inference.densities import log_joint, noise_scale, seeded, unit_data
from pyro_dak.inference.draws import Draws
from pyro_dak.inference.mcmc.chains import effective_sample_size, split_r_hat
from pyro_dak.inference.mcmc.processes import Report, run_in_processes
from pyro_dak.inference.mcmc.target import Target
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_model
from pyro_dak.model.modes import evaluating
from pyro_dak.model.priors import PriorLike, site_prior, sites_inside
from pyro_dak.model.rows import Inputs
from pyro_dak.validation import check_finite, check_integer, check_positive, check_probability

__all__ = ["MCMCRun", "run_hmc", "run_nuts"]

_MAX_R_HAT = 1.05
# In whitened coordinates all masses are nearly one. A shorter warm-up than this estimates them
# with a larger error than that, and does not adapt them.
_MASS_WARMUP = 150


@dataclass(repr=False)
class MCMCRun(Draws):
    """Draws of a Hamiltonian sampler, `(chains, draws, *event)`, and how far to trust them.

    `stats` holds for each draw `lp` (the log posterior without its constant, log p(y, w)),
    `energy` (potential plus kinetic energy at the start of its trajectory, along which it hardly
    changes), `diverging`, `n_steps` (the number of leapfrog steps) and `step_size`. `acceptance` is
    the mean acceptance probability of each chain, and `seconds` is the time it took. `sites` are in
    float64, and `dtype` is that of the model.
    """

    acceptance: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    dtype: torch.dtype = torch.float64

    def __repr__(self) -> str:
        smallest = min(float(size.min()) for size in self.effective_sample_size().values())
        return (
            f"MCMCRun({self._facts()}; max r-hat {self.max_r_hat():.3f}, min ESS {smallest:.0f}, "
            f"{self.num_divergences} divergences, {sum(self.seconds):.1f} s; on "
            f"{self.sites['mu'].device})"
        )

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
        """The samples in the dtype of the model, as Pyro's `MCMC.get_samples` gives them.

        `Predictive(model, run.get_samples())` reads the sites that the model has. A noise scale or
        unit scales that were sampled by an option of `run_nuts` are no sites of the model;
        `predict(model, run, x)` reads them too.
        """
        sites = self.sites if group_by_chain else self.flat()
        return {name: value.to(self.dtype) for name, value in sites.items()}

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
    parallel: bool = False,
    progress: bool = True,
) -> MCMCRun:
    """Samples of all weights by the No-U-Turn sampler, with the features held fixed.

    The unit inputs of x `(N, ...)` are computed once, in eval mode; after that steps are cheap.
    Any likelihood is allowed, and any prior whose weights are real numbers. The scales of a prior
    on `shrinkage` are sampled along with the weights. A warning says so if there are divergences
    or if r-hat is above 1.05.

    Args:
        model: the model. Its network stays fixed, and so do its noise and unit scales, unless they
            have a prior in the model or get one here.
        num_samples: draws per chain after the warm-up.
        warmup_steps: draws per chain that adapt step size and masses and are thrown away.
        num_chains: number of chains.
        noise_prior: prior of `noise_scale`, to sample it too; see `pyro_dak.model.priors`.
        unit_scale_prior: prior of `unit_scale`, to sample it too.
        target_accept_prob: a higher value means smaller steps; raise it if there are divergences.
        max_tree_depth: a draw takes at most 2^depth - 1 steps.
        whiten: whether to sample in coordinates in which the posterior is round, by its curvature
            at the mode.
        seed: chain k uses seed + k.
        parallel: whether chains run in processes side by side, as many as there are cores, and not
            one after the other. The draws are the same. Processes take seconds to start and import
            the script again, so a script needs `if __name__ == "__main__":`; each uses as many
            threads as this one, so `torch.set_num_threads(1)` before is often faster.
        progress: whether to show a bar for each chain.
    """
    check_probability("target_accept_prob", target_accept_prob)
    check_integer("max_tree_depth", max_tree_depth, minimum=1)
    kernel_fn = partial(NUTS, max_tree_depth=max_tree_depth, target_accept_prob=target_accept_prob)
    options: dict[str, Any] = {"whiten": whiten, "seed": seed, "progress": progress}
    options |= {"parallel": parallel}
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
    parallel: bool = False,
    progress: bool = True,
) -> MCMCRun:
    check_integer("num_samples", num_samples, minimum=4)
    check_integer("warmup_steps", warmup_steps, minimum=0)
    check_integer("num_chains", num_chains, minimum=1)
    check_integer("seed", seed, minimum=-(2**63))
    check_model(model)
    own = _own_priors(model)
    h, y = unit_data(model, x, y, given=own)
    should_adapt = not whiten or warmup_steps >= _MASS_WARMUP
    with evaluating(model), pyro.validation_enabled(False):
        options = {"noise_scale": noise_prior, "unit_scale": unit_scale_prior}
        extra_priors = _extra_priors(model, own, options)
        target = Target(model, h, y, extra_priors, whiten)
        kernel_fn = partial(kernel_fn, adapt_mass_matrix=should_adapt)
        chains = [
            _Chain(target, kernel_fn, num_samples, warmup_steps, seed + k)
            for k in range(num_chains)
        ]
        runs = _run_chains(chains, parallel, progress)
        run = MCMCRun(
            {name: torch.cat([r.sites[name] for r in runs]) for name in runs[0].sites},
            stats={name: torch.cat([r.stats[name] for r in runs]) for name in runs[0].stats},
            acceptance=[r.acceptance[0] for r in runs],
            seconds=[r.seconds[0] for r in runs],
            dtype=model.layer.log_unit_scale.dtype,
        )
        flat = run.flat()
        for name, value in flat.items():
            check_finite(f"draws of {name}", value)
        lp = log_joint(model, h, y, flat)
        lp = lp + sum(p.log_prob(flat[name]) for name, p in extra_priors.items() if name not in own)
    run.stats["lp"] = lp.unflatten(0, (num_chains, num_samples))
    _warn_if_untrustworthy(run)
    return run


def _own_priors(model: DAK) -> dict[str, PriorLike]:
    """Priors of the scales that are sites of the model, apart from those that sample inside."""
    own = {name: model.prior[name] for name in model.scale_shapes if name == "unit_scale"}
    noise = getattr(model.likelihood, "parameter_priors", {}).get("noise_scale")
    own |= {} if noise is None else {"noise_scale": noise}
    shapes = {"unit_scale": torch.Size((model.num_units,)), "noise_scale": torch.Size()}
    return {name: prior for name, prior in own.items() if not sites_inside(prior, shapes[name])}


def _extra_priors(
    model: DAK, own: Mapping[str, PriorLike], options: Mapping[str, PriorLike | None]
) -> dict[str, Distribution]:
    """Priors of the scales that are sampled; the shape of a scale is the event shape of its prior.

    They are the model's own, or come from the options `noise_prior` and `unit_scale_prior`.
    """
    like = model.layer.log_unit_scale.detach().double()
    noise = noise_scale(model.likelihood)
    shapes = {"noise_scale": None if noise is None else noise.shape, "unit_scale": like.shape}
    priors: dict[str, Distribution] = {}
    for name, shape in shapes.items():
        option = {"noise_scale": "noise_prior", "unit_scale": "unit_scale_prior"}[name]
        prior = options[name]
        if prior is not None and name in own:
            raise ValueError(f"`{name}` has a prior in the model already; leave `{option}` out.")
        prior = own.get(name, prior)
        if prior is None:
            continue
        if shape is None:
            raise ValueError(
                f"`{option}` needs a likelihood with a noise scale; got "
                f"{type(model.likelihood).__name__}. Leave it out."
            )
        priors[name] = site_prior(name, prior, shape, like)
    return priors


@dataclass(frozen=True)
class _Chain:
    """What one chain needs."""

    target: Target
    kernel_fn: Callable[..., Any]
    num_samples: int
    warmup_steps: int
    seed: int


def _run_chains(chains: list[_Chain], parallel: bool, progress: bool) -> list[MCMCRun]:
    """All chains, one after the other or side by side, with a bar for each."""
    bars = []
    options: dict[str, Any] = {"unit": "draw", "disable": not progress, "file": sys.stderr}
    with ExitStack() as stack:

        def report_of(k: int) -> Report:
            """A bar, shown from now on, and the function that moves it."""
            total = chains[k].warmup_steps + chains[k].num_samples
            position = k if parallel else None
            label = f"chain {k + 1}/{len(chains)}"
            bar = stack.enter_context(tqdm(total=total, desc=label, position=position, **options))
            bars.append(bar)

            def report(stage: str, facts: dict[str, Any]) -> None:
                bar.set_postfix({"stage": stage, **facts}, refresh=False)
                bar.update()

            return report

        if parallel and len(chains) > 1:
            reports = [report_of(k) for k in range(len(chains))]
            return [
                _from_arrays(arrays, chains[0].target.device)
                for arrays in run_in_processes(_run_chain_alone, chains, reports)
            ]
        runs = []
        for k, chain in enumerate(chains):
            runs.append(_run_chain(chain, report_of(k)))
            bars[k].close()
        return runs


def _run_chain_alone(chain: _Chain, report: Report) -> dict[str, Any]:
    """The fields of a run as arrays, from a process of its own."""
    with evaluating(chain.target.model), pyro.validation_enabled(False):
        run = _run_chain(chain, report)
    return {
        "sites": {name: value.cpu().numpy() for name, value in run.sites.items()},
        "stats": {name: value.cpu().numpy() for name, value in run.stats.items()},
        "acceptance": run.acceptance,
        "seconds": run.seconds,
    }


def _from_arrays(arrays: dict[str, Any], device: torch.device) -> MCMCRun:
    parts = {
        group: {name: torch.from_numpy(value).to(device) for name, value in arrays[group].items()}
        for group in ("sites", "stats")
    }
    return MCMCRun(**(arrays | parts))


def _run_chain(chain: _Chain, report: Report) -> MCMCRun:
    """One chain, which reports each draw."""
    target, num_samples = chain.target, chain.num_samples
    start, last, steps, step_sizes = time.perf_counter(), {}, [], []
    with torch.enable_grad(), seeded(chain.seed):
        generator = torch.Generator().manual_seed(torch.initial_seed())
        before = {"position": target.initial_position(generator)}
        initial = dict(before)

        def hook_fn(kernel: Any, params: Any, stage: str, index: int) -> None:
            if stage.startswith("Sample"):
                steps.append(target.num_evaluations)
                step_sizes.append(float(kernel.step_size))
            else:
                before["position"] = params["position"].detach()
            target.num_evaluations = 0
            last.update(kernel.logging())
            report(stage.split()[0].lower(), dict(last))

        options = {"initial_params": initial, "hook_fn": hook_fn, "disable_progbar": True}
        kernel, momenta = chain.kernel_fn(potential_fn=target), _Momenta()
        kernel.sample = momenta(kernel.sample)  # `MCMC.run` hides it from handlers outside
        mcmc = MCMC(kernel, num_samples, chain.warmup_steps, **options)
        mcmc.run()
    positions = mcmc.get_samples(group_by_chain=True)["position"]
    with torch.no_grad():
        starts = torch.cat([before["position"].unsqueeze(0), positions[0, :-1]])
        potential = torch.stack([target({"position": position}) for position in starts])
    kinetic = torch.stack(momenta.energies[-num_samples:])
    diverging = torch.zeros(1, num_samples, dtype=torch.bool)
    diverging[0, list(mcmc.diagnostics()["divergences"]["chain 0"])] = True
    stats = {
        "energy": (potential + kinetic).unsqueeze(0),
        "diverging": diverging,
        "n_steps": torch.tensor([steps]),
        "step_size": torch.tensor([step_sizes], dtype=torch.float64),
    }
    seconds = time.perf_counter() - start
    return MCMCRun(target.sites(positions), None, stats, [float(last["acc. prob"])], [seconds])


class _Momenta(Messenger):
    """Collects the kinetic energy |r|^2 / 2 of the momenta that start trajectories.

    A kernel of Pyro samples them, whitened by the masses, as standard normals `r_t=...`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.energies: list[Tensor] = []

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"].startswith("r_t="):
            self.energies.append(0.5 * msg["value"].detach().square().sum())


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
