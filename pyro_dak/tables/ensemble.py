"""Several DAKs trained and evaluated in one pass: every parameter with the members as first axis.

A training step is bound by the number of operations, not by their size, so five members in one
batched pass cost much less than five times one. Nothing is shared or approximated: the loss is the
sum of the members' ELBOs, and each member gets the gradient that it would get alone.
(`torch.func.vmap` over the members was tried: it cannot see through the fused moments of f, and the
network and the scaling alone take 1.3 times as long as below.)
"""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments, kl_elements, sample_marginals
from pyro_dak.additive.scaling import Standardize, update_running
from pyro_dak.inference.guides import MeanFieldGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.tables.rows import Rows
from pyro_dak.training.checkpoint import load_module_tensors, module_tensors
from pyro_dak.training.data import Data, ResidentData
from pyro_dak.training.describe import describe, rebuild
from pyro_dak.training.loop import Learner, Run
from pyro_dak.training.plan import History, Plan

__all__ = ["Ensemble", "FixedEnsemble", "Member", "Stack", "ensemble_plan", "train"]

Member = tuple[DAK, MeanFieldGuide]

# Up to this many functions the two-node gather of `stacked_moments` is faster than dense features.
_MAX_GATHERED_FUNCTIONS = 12


class Stack(Learner):
    """Members whose tensors are stacked, `(E, ...)` each, and trained in one pass.

    A subclass gives `tensors`, `loss` and `parameter_groups`. What its loss draws comes from
    `generator`, which `train` seeds.
    """

    tensors: dict[str, Tensor]
    # What the loss draws from; None is the global generator of torch.
    generator: torch.Generator | None = None
    advice = "Lower `learning_rate`, or look for columns with extreme values."

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def num_members(self) -> int:  # type: ignore[override]
        """E."""
        return len(self)

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return next(iter(self.tensors.values())).device

    def loss(self, x: Tensor, y: Tensor, weights: Tensor, num_data: Tensor) -> Tensor:
        """The sum of the members' losses per datum, a scalar."""
        raise NotImplementedError

    def forward(self, *batch: Any) -> tuple[Tensor, Tensor]:
        """The loss, and for the history its mean over members, `(1,)`."""
        loss = self.loss(*batch)
        return loss, loss.detach().reshape(1) / len(self)

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors

    def clip_gradients(self, parameters: Sequence[Tensor], clip_norm: float | None) -> Tensor:
        """Scale the gradient of each member down to norm `clip_norm`; returns the norms, `(E,)`."""
        gradients = [p.grad.reshape(len(p), -1) for p in parameters if p.grad is not None]
        norms = torch.cat(gradients, 1).norm(dim=1)
        if clip_norm is not None and bool((norms > clip_norm).any()):
            factor = (clip_norm / norms).clamp(max=1).unsqueeze(-1)
            for gradient in gradients:
                gradient *= factor
        return norms


def ensemble_plan(epochs: int, batch_size: int, **options: Any) -> Plan:
    """The plan of the estimators for tables, which score held-out rows 20 times in a run."""
    defaults = dict[str, Any](learning_rate=2e-2, optimizer="adamw", patience=8, num_scorings=20)
    return Plan(epochs, batch_size, **(defaults | options))


def train(
    stack: Stack,
    rows: Rows | Data,
    plan: Plan,
    score_fn: Callable[[], Tensor] | None = None,
    progress: bool = False,
    description: str = "fit",
) -> History:
    """Minimise the loss of every member; the members are changed in place.

    The rows are in memory, or come in batches with their weights. `score_fn` scores every member on
    held-out rows, `(E, n)`, where smaller is better. In the end every member goes back to its best
    scoring. The run ends early if in `plan.patience` scorings in a row all members were worse than
    their best by two standard errors of the difference. Scores in one row, `(1, n)`, let all
    members stop together. With `progress`, a bar shows what takes more than two seconds.

    Raises:
        TrainingError: if the loss or the gradient becomes NaN or infinite.
    """
    if isinstance(rows, Rows):
        rows = ResidentData(rows.x, rows.y, plan.batch_size, weights=rows.weights)

    def with_mean() -> tuple[Tensor, dict[str, float]]:
        assert score_fn is not None
        scores = score_fn()
        return scores, {"val_score": float(scores.mean())}

    # A generator of its own, because other threads may draw from the global one.
    stack.generator = torch.Generator(stack.device).manual_seed(plan.seed)
    try:
        run = Run(stack, rows, plan, None if score_fn is None else with_mean)
        return run.run(progress=progress, description=description)
    finally:
        stack.generator = None


class Ensemble(Stack):
    """E members of one architecture, stacked.

    A member is a `DAK` on a plain multilayer perceptron (linear layers with ReLUs between or
    after), with an embedding, standardised units, a Markov kernel, normal priors and a
    `MeanFieldGuide`. Its weights are copied.

    Attributes:
        model: a member that stands for the architecture; its own weights are not used.
        guide: the guide of that member, likewise.
        tensors: all weights and running statistics by name, "model." and "guide.", each `(E, ...)`.
    """

    def __init__(self, members: Sequence[Member]):
        if not members:
            raise ValueError("`members` must hold at least one pair of model and guide.")
        self.model, self.guide = members[0]
        self.layers = _linear_layers(self.model, self.guide)
        states = [_state(model, guide) for model, guide in members]
        shapes = [{name: tensor.shape for name, tensor in state.items()} for state in states]
        if any(other != shapes[0] for other in shapes):
            raise ValueError("`members` must all have the same architecture.")
        both = nn.ModuleDict({"model": self.model, "guide": self.guide})
        learned = {name for name, _ in both.named_parameters()}
        self.tensors = {
            name: torch.stack([state[name] for state in states]).requires_grad_(name in learned)
            for name in states[0]
        }

    def to(self, *place: Any, **options: Any) -> "Ensemble":
        """A copy with weights of its own; the arguments are those of `Tensor.to`."""
        other, own = copy.copy(self), options | {"copy": True}
        other.tensors = {
            name: t.detach().to(*place, **own).requires_grad_(t.requires_grad)
            for name, t in self.tensors.items()
        }
        return other

    def parameter_groups(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Extractor and embedding; scales of the units, noise and variational parameters."""
        parts = ("model.feature_extractor.", "model.embedding.")
        network = [t for name, t in self.tensors.items() if name.startswith(parts)]
        return network, [t for name, t in self.tensors.items() if not name.startswith(parts)]

    def architecture(self) -> dict[str, Any]:
        """What `rebuild` makes a member from, with fresh weights."""
        return describe(self.model, self.guide) | {"novelty": None}

    def members(self) -> list[Member]:
        """The members as ordinary models and guides, copies in eval mode."""
        members: list[Any] = []
        for index in range(len(self)):
            own = {name: tensor.detach()[index] for name, tensor in self.tensors.items()}
            pair = rebuild(self.architecture())
            model, guide = (part.to(self.device, own["guide.mu_loc"].dtype) for part in pair)
            load_module_tensors(model, guide, own)
            members.append((model, guide))
        return members

    def features(self, x: Tensor) -> Tensor:
        """The features of every member's network, `(E, D_w, N)`, and x below if it has input units.

        x is `(N, D)`, or `(E, N, D)` with rows of its own for each member.
        """
        h = x.mT.expand(len(self), -1, -1)  # (E, D, N)
        for name, has_relu in self.layers:
            weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
            h = torch.baddbmm(bias.unsqueeze(-1), weight, h)
            h = h.relu_() if has_relu else h
        if self.model.num_input_units == 0:
            return h
        return torch.cat([h, x.mT.expand(len(self), -1, -1)], 1)  # (E, D_w + D, N)

    def unit_inputs(self, features: Tensor, training: bool = False) -> Tensor:
        """h of every member, `(E, P, N)`, in the coordinates of the grid.

        In training the units are standardised by the batch, as in `Scaling`, and the statistics of
        the batch enter the running ones.
        """
        tensors = self.tensors
        D_w, D = self.model.feature_dim, self.model.num_input_units
        h = tensors["model.embedding.weight"] @ features[:, :D_w]  # (E, P, N)
        if D > 0:
            h = torch.cat([h, features[:, D_w:]], 1)
        scaling = self.model.scaling
        running = tensors["model.scaling.first"], tensors["model.scaling.second"]  # (E, P) each
        if not training or h.shape[-1] == 1:
            return scaling.apply_map(h, *(part.unsqueeze(-1) for part in running))
        assert isinstance(scaling, Standardize)  # `_linear_layers` has looked
        scaled, *batch = scaling.map_members(h)
        num_batches = tensors["model.scaling.num_batches"]
        update_running(running, [part.detach() for part in batch], num_batches, scaling.momentum)
        return scaled

    def moments(self, x: Tensor) -> FunctionMoments:
        """q(f) of every member at x `(N, D)` or `(E, N, D)`: mean and variance `(E, N, F)`."""
        return self.moments_from(self.features(x))

    def moments_from(self, features: Tensor) -> FunctionMoments:
        """q(f) of every member from its features: mean and variance `(E, N, F)`.

        If there are input units, the variance has what the grid loses in it, which is what these
        units are for: far from the data their prior variance comes back.
        """
        h = self.unit_inputs(features)
        mean, var = self._moments_at(h)
        return FunctionMoments(mean, var + self.lost_variance(h))

    def training_terms(self, x: Tensor) -> tuple[FunctionMoments, Tensor]:
        """q(f) of every member in training, `(E, N, F)`, and the KL of its weights, `(E,)`."""
        h, terms = self.unit_inputs(self.features(x), training=True), None
        if self.tensors["guide.z_loc"].shape[1] <= _MAX_GATHERED_FUNCTIONS:
            names = "guide.z_loc", "guide.z_log_scale", "model.layer.log_unit_scale"
            others = (self.tensors[f"guide.mu_{name}"] for name in ("loc", "log_scale"))
            own = [self.tensors[name] for name in names]
            terms = self.model.layer.activation.member_terms(h, *own, *others)
        if terms is None:
            return FunctionMoments(*self._moments_at(h)), self.kl()
        mean, var, kl = terms
        return FunctionMoments(mean.permute(1, 2, 0), var.permute(1, 2, 0)), kl

    def _moments_at(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f of every member at the inputs of its units, `(E, N, F)` each."""
        loc, var = self.scaled_weights()  # (E, F, P, M) each
        activation = self.model.layer.activation
        if loc.shape[1] <= _MAX_GATHERED_FUNCTIONS:
            mean, var = activation.stacked_moments(h, loc.transpose(0, 1), var.transpose(0, 1))
            mean, var = mean.permute(1, 2, 0), var.permute(1, 2, 0)
        else:
            mean, var = activation.combine_moments(h.mT, loc, var, route="dense")
        mu, mu_scale = self.tensors["guide.mu_loc"], self.tensors["guide.mu_log_scale"].exp()
        return mean + mu.unsqueeze(-2), var + mu_scale.square().unsqueeze(-2)

    def scaled_weights(self) -> tuple[Tensor, Tensor]:
        """Means and variances of sigma_p z_p of every member, `(E, F, P, M)` each."""
        sigma = self.tensors["model.layer.log_unit_scale"].exp()[:, None, :, None]  # (E, 1, P, 1)
        scale = self.tensors["guide.z_log_scale"].exp() * sigma
        return self.tensors["guide.z_loc"] * sigma, scale.square()

    def lost_variance(self, h: Tensor) -> Tensor | float:
        """What the grids lose of the variance of f at h `(E, P, N)`, `(E, N, 1)`.

        It counts only if there are input units.
        """
        if self.model.num_input_units == 0:
            return 0.0
        var = (2 * self.tensors["model.layer.log_unit_scale"]).exp().unsqueeze(-1)  # (E, P, 1)
        lost = var * self.model.layer.activation.residual_variance(h)
        return lost.sum(-2).unsqueeze(-1)

    def loss(
        self, x: Tensor, y: Tensor, weights: Tensor | float, num_data: Tensor | float
    ) -> Tensor:
        """The sum over members of minus the ELBO per datum, a scalar.

        That of member e is -(sum_n weights[e, n] E log p(y_n | f_n) - KL_e) / num_data[e], where a
        weight says how often a row counts in the whole data set; 0 leaves it out. Inputs are
        `(N, D)`, targets `(N, C)` or labels `(N,)`, weights `(E, N)`, `(N,)` for all members alike,
        or one for all rows, and `num_data` is the total weight of each member's rows, `(E,)`, or of
        all, `()`.
        """
        moments, kl = self.training_terms(x)
        rows = self.expected_log_prob(y, moments)
        per_member = (rows * weights).sum(-1) - kl
        return -(per_member / num_data).sum()

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """E_q log p(y | f) of every member and row, `(E, N)`; by 8 draws of f for classes."""
        likelihood = self.stacked_likelihood()
        if likelihood.has_closed_form:
            return likelihood.expected_log_prob(y.expand(len(self), *y.shape), moments)
        draws = sample_marginals(moments, 8, self.generator)
        return likelihood.distribution(draws).log_prob(y).mean(0)

    def kl(self) -> Tensor:
        """KL of every member's weights from the standard normal, `(E,)`."""
        pairs = [
            (self.tensors[f"guide.{site}_loc"], self.tensors[f"guide.{site}_log_scale"])
            for site in self.guide.weight_sites
        ]
        return torch.stack([kl_elements(*pair).flatten(1).sum(-1) for pair in pairs]).sum(0)

    def stacked_likelihood(self) -> Likelihood:
        """The likelihood with the noise of all members, for moments `(E, N, F)`."""
        log_scale = self.tensors.get("model.likelihood.noise.log_scale")
        if log_scale is None:
            return self.model.likelihood
        return self.model.likelihood.with_noise(log_scale.reshape(len(self), 1, -1))


class FixedEnsemble:
    """An ensemble whose weights stay as they are: q(f) in fewer operations, without gradients."""

    def __init__(self, ensemble: Ensemble):
        self.ensemble = ensemble
        tensors = ensemble.tensors
        mu, mu_scale = tensors["guide.mu_loc"], tensors["guide.mu_log_scale"].exp()
        self.mu, self.mu_var = mu.unsqueeze(-2), mu_scale.square().unsqueeze(-2)  # (E, 1, F)
        self.has_input_units = ensemble.model.num_input_units > 0
        if not self.has_input_units:
            statistics = tensors["model.scaling.first"], tensors["model.scaling.second"]
            gain, shift = ensemble.model.scaling.affine(*statistics)
            self.shift = shift.unsqueeze(-1)  # (E, P, 1)
            self.weight = gain.unsqueeze(-1) * tensors["model.embedding.weight"]  # (E, P, D_w)
        self.weights = ensemble.scaled_weights()  # (E, F, P, M) each
        self.is_gathered = mu.shape[-1] <= _MAX_GATHERED_FUNCTIONS

    @cached_property
    def members(self) -> list[Any]:
        """Mean and variance of each member's f without its bias, as functions of its units."""
        make = self.ensemble.model.layer.activation.fixed_moments
        return [make(*weights) for weights in zip(*self.weights, strict=True)]

    @cached_property
    def average(self) -> Any:
        """The average over the members, which is one function of the units of all of them."""
        parts = (part.transpose(0, 1).flatten(1, 2) / len(self.ensemble) for part in self.weights)
        return self.ensemble.model.layer.activation.fixed_moments(*parts)

    def unit_inputs(self, features: Tensor) -> Tensor:
        """`Ensemble.unit_inputs`, where embedding and scaling are one map, `(E, P, N)`."""
        if self.has_input_units:
            return self.ensemble.unit_inputs(features)
        return torch.baddbmm(self.shift, self.weight, features)

    def moments_from(self, features: Tensor) -> FunctionMoments:
        """`Ensemble.moments_from`."""
        if not self.is_gathered:
            return self.ensemble.moments_from(features)
        h = self.unit_inputs(features)
        found = [moments(rows) for moments, rows in zip(self.members, h.mT, strict=True)]
        mean, var = (torch.stack(parts) for parts in zip(*found, strict=True))
        var = var + self.mu_var + self.ensemble.lost_variance(h)
        return FunctionMoments(mean + self.mu, var)

    def mean_from(self, features: Tensor, num_functions: int) -> Tensor:
        """The mean of the first functions, averaged over the members, `(N, num_functions)`."""
        if not self.is_gathered:
            return self.ensemble.moments_from(features).mean[..., :num_functions].mean(0)
        h = self.unit_inputs(features).flatten(0, 1)  # (E P, N)
        mu = self.mu[..., :num_functions].mean(0)
        return self.average.means(h.mT, num_functions) + mu


def _state(model: DAK, guide: nn.Module) -> dict[str, Tensor]:
    """The tensors of a member; what it knows of its training rows is not trained."""
    tensors = module_tensors(model, guide)
    return {name: t for name, t in tensors.items() if not name.startswith("model.novelty.")}


def _linear_layers(model: DAK, guide: nn.Module) -> list[tuple[str, bool]]:
    """The names of a member's linear layers, each with whether a ReLU follows; or an error."""
    is_standard = (
        isinstance(model.scaling, Standardize)
        and model.embedding is not None
        and model.layer.activation.has_local_route
        and model.layer.activation.kernel.is_fixed_number
        and not model.layer.linear_term
        and all(model.normal_prior(name) == (0.0, 1.0) for name in model.site_shapes)
        and isinstance(guide, MeanFieldGuide)
    )
    if not is_standard:
        raise NotImplementedError(
            "An ensemble in one pass needs an embedding, standardised units, a Laplace kernel with "
            "one lengthscale that is not learned, standard normal priors and a MeanFieldGuide. "
            "Train other members one by one."
        )
    layers: list[tuple[str, bool]] = []
    network = model.feature_extractor
    children = network.named_children() if isinstance(network, nn.Sequential) else [("", network)]
    for name, child in children:
        if isinstance(child, nn.Linear) and child.bias is not None:
            layers.append((f"model.feature_extractor.{name}", False))
        elif isinstance(child, nn.ReLU) and layers:
            layers[-1] = (layers[-1][0], True)
        else:
            raise NotImplementedError(
                "An ensemble in one pass needs a Sequential of linear layers and ReLUs; got "
                f"{type(child).__name__}. Train other members one by one."
            )
    return layers
