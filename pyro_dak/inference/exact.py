"""The exact posterior of the last layer for a Gaussian likelihood, and the log evidence."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from pyro_dak.additive.gaussian import tril_of_inverse
from pyro_dak.additive.scaling import num_processes
from pyro_dak.inference.densities import checked_data, noise_scale
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.inference.guides.joint import FullRankGuide, flat_priors
from pyro_dak.inference.objectives import normal_priors
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.inputs import check_model
from pyro_dak.model.latent_sites import known_sites
from pyro_dak.model.likelihoods import GaussianLikelihood
from pyro_dak.model.modes import evaluating, pyro_lock
from pyro_dak.model.rows import Inputs, split
from pyro_dak.validation import check_finite, check_integer, check_real

__all__ = ["ExactPosterior", "checked_normal_priors", "exact_posterior"]


class ExactPosterior(NamedTuple):
    """The posterior as a guide, and log p(y | x), summed over outputs, in nats."""

    guide: FullRankGuide
    log_evidence: float

    def __repr__(self) -> str:
        loc = self.guide.loc
        F, K = loc.shape
        dtype = str(loc.dtype).removeprefix("torch.")
        return (
            f"ExactPosterior({F} functions x {K} weights, log evidence {self.log_evidence:.2f} "
            f"nats; {dtype} on {loc.device})"
        )

    @torch.no_grad()
    def update(
        self,
        model: DAK,
        x: Inputs,
        y: Tensor,
        *,
        forget: float = 1.0,
        residual_variance: bool = False,
        chunk_size: int = 4096,
        over_processes: bool = False,
    ) -> "ExactPosterior":
        """The posterior of the rows so far and of these, without the rows so far.

        The evidence grows by log p(y | rows so far).

        Args:
            model: the model, with features and noise as they were.
            x: inputs of the new rows, `(N, ...)`.
            y: their targets.
            forget: how much of what the posterior knows is kept, the rest goes back to the prior.
            residual_variance: as in `exact_posterior`.
            chunk_size: number of rows at a time.
            over_processes: as in `exact_posterior`.
        """
        check_model(model)
        check_guide(model, self.guide)
        check_real("forget", forget)
        loc, root = self.guide.loc.double(), self.guide.scale_tril.double()
        if not 0 < forget <= 1:
            raise ValueError(f"`forget` must be above 0 and at most 1; got {forget}.")
        if forget < 1:
            loc0, scale0 = flat_priors(checked_normal_priors(model), self.guide.site_shapes, loc)
            kept = forget * torch.cholesky_inverse(root)
            natural = (kept @ loc.unsqueeze(-1)).squeeze(-1)
            natural += (1 - forget) * loc0 / scale0.square()
            kept.diagonal(dim1=-2, dim2=-1).add_((1 - forget) / scale0.square())
            root, _ = tril_of_inverse(kept)
            loc = (root @ (root.mT @ natural.unsqueeze(-1))).squeeze(-1)
        options = (residual_variance, chunk_size, over_processes)
        loc, root, log_prob = _condition(model, x, y, loc, root, *options)
        return ExactPosterior(_as_guide(model, loc, root), self.log_evidence + log_prob)

    @torch.no_grad()
    def downdate(
        self,
        model: DAK,
        x: Inputs,
        y: Tensor,
        *,
        residual_variance: bool = False,
        chunk_size: int = 4096,
    ) -> "ExactPosterior":
        """The posterior without these rows, which must be among those it knows.

        The arguments are those of `update`.

        Raises:
            ValueError: if they are not, so that no posterior is left.
        """
        check_model(model)
        check_guide(model, self.guide)
        options = (residual_variance, chunk_size, False)
        loc, root = self.guide.loc.double(), self.guide.scale_tril.double()
        loc, root, _ = _condition(model, x, y, loc, root, *options, sign=-1)
        log_prob = _condition(model, x, y, loc, root, *options)[2]
        return ExactPosterior(_as_guide(model, loc, root), self.log_evidence - log_prob)


@torch.no_grad()
def exact_posterior(
    model: DAK,
    x: Inputs,
    y: Tensor,
    *,
    residual_variance: bool = False,
    chunk_size: int = 4096,
    over_processes: bool = False,
) -> ExactPosterior:
    """Posterior of (z, mu, linear) at the features as they are, exactly, in float64.

    For each output y = Phi w + noise with rows Phi from `AdditiveLayer.design`,
    w ~ N(w0, diag(s0^2)) and noise of variance v_n at row n. With whitened weights (w - w0) / s0
    and B = diag(v)^{-1/2} Phi diag(s0) the posterior precision is A = I + B^T B, K x K, and

        log p(y) = -(sum_n log(2 pi v_n) + log det A + r^T r - m^T A m) / 2

    with r = diag(v)^{-1/2} (y - Phi w0) and m = A^{-1} B^T r the whitened posterior mean.

    Args:
        model: with `GaussianLikelihood` and normal priors; evaluated in eval mode.
        x: inputs, `(N, ...)`.
        y: targets, `(N, C)`, or `(N,)` for one output.
        residual_variance: whether v_n is noise_scale^2 plus the prior variance that the grid loses
            at row n, instead of noise_scale^2 alone. On a fine grid this is the posterior of the
            additive GP itself (rows that share no interval between nodes lose independent parts);
            without it, it is the posterior of the model as written.
        chunk_size: number of rows at a time; A is summed over them.
        over_processes: whether x and y are the rows of this process alone, and those of all
            processes of `torch.distributed` count. Each of them calls this with rows of its own,
            and gets the posterior of all.
    """
    priors, like = checked_normal_priors(model), model.layer.log_unit_scale
    C, K = model.layer.num_functions, model.layer.num_weights
    empty = torch.empty(C, K, dtype=torch.float64, device=like.device)
    loc0, scale0 = flat_priors(priors, model.site_shapes, empty)
    options = (residual_variance, chunk_size, over_processes)
    loc, root, log_evidence = _condition(model, x, y, loc0, scale0.unsqueeze(-2), *options)
    return ExactPosterior(_as_guide(model, loc, root), log_evidence)


def _condition(
    model: DAK,
    x: Inputs,
    y: Tensor,
    loc: Tensor,
    root: Tensor,
    residual_variance: bool,
    chunk_size: int,
    over_processes: bool,
    sign: int = 1,
) -> tuple[Tensor, Tensor, float]:
    """Condition w ~ N(loc, R R^T) on rows: the new loc `(C, K)` and R `(C, K, K)`, and log p(y).

    The formulas are those of `exact_posterior` with R in the place of diag(s0). R is lower
    triangular, or the diagonal alone, `(C, 1, K)`. With sign -1 the rows are taken out,
    A = I - B^T B, and the number means nothing.
    """
    checked_normal_priors(model)
    check_integer("chunk_size", chunk_size, minimum=1)
    if over_processes and num_processes() == 1:
        raise ValueError(
            "`over_processes` needs several processes of torch.distributed, which were started by "
            "torchrun and joined by `torch.distributed.init_process_group`; there is one."
        )
    noise = noise_scale(model.likelihood)
    assert noise is not None
    x, y = checked_data(model, x, y)
    C, K = loc.shape
    is_diagonal = root.shape[-2] != K
    A = loc.new_zeros(C, K, K)
    moment, fit = loc.new_zeros(C, K, 1), loc.new_zeros(C)
    with explaining(model, x), evaluating(model), known_sites(model):
        size = int(chunk_size)
        for x_part, y_part in zip(split(x, size), y.split(size), strict=True):
            h = model.unit_inputs(x_part).double()
            check_finite("unit_inputs", h)
            design = model.layer.design(h)
            lost = model.residual_variance(h) if residual_variance else h.new_zeros(len(h), C)
            var = noise.square() + lost  # (n, C)
            r = ((y_part - design @ loc.mT) / var.sqrt()).mT.unsqueeze(-1)  # (C, n, 1)
            columns = design * root if is_diagonal else design @ root
            B = columns / var.sqrt().mT.unsqueeze(-1)  # (C, n, K)
            A.add_(B.mT @ B, alpha=sign)
            moment.add_(B.mT @ r, alpha=sign)
            fit += (2 * math.pi * var).log().sum(0) + r.square().sum((-2, -1))
    if over_processes:
        for total in (A, moment, fit):
            torch.distributed.all_reduce(total)
    A.diagonal(dim1=-2, dim2=-1).add_(1.0)
    tril, is_definite = tril_of_inverse(A)
    if not bool(is_definite.all()):
        raise ValueError(
            f"`noise_scale`={float(noise.min()):.2g} is too small against the scale of f: the "
            "posterior is singular in float64. Raise it."
            if sign > 0
            else "`x` and `y` must be rows that the posterior knows; without these, none is left."
        )
    half = tril.mT @ moment  # (C, K, 1)
    log_det = -2 * tril.diagonal(dim1=-2, dim2=-1).log().sum()
    log_prob = -0.5 * (fit.sum() + log_det - half.square().sum())
    if sign > 0 and not math.isfinite(log_prob):
        raise ValueError("The log evidence is not finite: `y` is too large. Scale it first.")
    root = root.mT * tril if is_diagonal else root @ tril
    return loc + (root @ half).squeeze(-1), root, float(log_prob)


def _as_guide(model: DAK, loc: Tensor, root: Tensor) -> FullRankGuide:
    """The guide with this mean and Cholesky factor, in the dtype of the model."""
    like = model.layer.log_unit_scale
    with pyro_lock, torch.random.fork_rng(devices=[]):  # the guide's random start is not used
        guide = FullRankGuide(model).to(like.device, torch.float64)
    guide.set_parameters(loc, root)
    return guide.to(like.dtype)


def checked_normal_priors(model: DAK) -> dict[str, tuple[Any, Any]]:
    """(loc, scale) of the prior of each site, or an error if the posterior is not Gaussian."""
    check_model(model)
    priors = normal_priors(model, model.site_shapes)
    if not isinstance(model.likelihood, GaussianLikelihood):
        need = f"GaussianLikelihood; got {type(model.likelihood).__name__}"
    elif model.has_shrinkage:
        need = "Gaussian f, and a prior on `shrinkage` breaks it"
    elif priors is None:
        name = next(name for name in model.site_shapes if model.normal_prior(name) is None)
        need = f"normal priors; site `{name}` has {type(model.prior[name]).__name__}"
    else:
        return priors
    raise NotImplementedError(f"The exact posterior needs {need}. Use run_nuts or a guide.")
