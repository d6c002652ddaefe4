"""Several DAKs trained and evaluated in one pass: every parameter with the members as first axis.

A training step is bound by the number of operations, not by their size, so five members in one
batched pass cost much less than five times one. Nothing is shared or approximated: the loss is the
sum of the members' ELBOs, and each member gets the gradient that it would get alone.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.additive.scaling import Standardize
from pyro_dak.inference.guides import MeanFieldGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.training.checkpoint import load_module_tensors, module_tensors
from pyro_dak.training.describe import build_guide, build_model, describe_guide, describe_model

__all__ = ["Ensemble", "Member"]

Member = tuple[DAK, MeanFieldGuide]

# Up to this many functions the two-node gather of `stacked_moments` is faster than dense features.
_MAX_GATHERED_FUNCTIONS = 12


class Ensemble:
    """E members of one architecture, stacked.

    A member is a `DAK` on a plain multilayer perceptron (linear layers with ReLUs between or
    after), with an embedding, standardised units, a Markov kernel, normal priors and a
    `MeanFieldGuide`.

    Args:
        members: pairs of model and guide; their weights are copied.

    Attributes:
        model: a member that stands for the architecture; its own weights are not used.
        guide: likewise.
        tensors: all weights and running statistics by name, "model." and "guide.", each `(E, ...)`.
    """

    def __init__(self, members: Sequence[Member]):
        if not members:
            raise ValueError("`members` must hold at least one pair of model and guide.")
        self.model, self.guide = members[0]
        self._check()
        states = [module_tensors(model, guide) for model, guide in members]
        if any({n: t.shape for n, t in s.items()} != _shapes(states[0]) for s in states):
            raise ValueError("`members` must all have the same architecture.")
        learned = {f"model.{name}" for name, _ in self.model.named_parameters()}
        learned |= {f"guide.{name}" for name, _ in self.guide.named_parameters()}
        self.tensors = {
            name: torch.stack([state[name] for state in states]).requires_grad_(name in learned)
            for name in states[0]
        }
        self.layers = _linear_layers(self.model.feature_extractor)

    def __len__(self) -> int:
        return len(self.tensors["guide.mu_loc"])

    @property
    def likelihood(self) -> Likelihood:
        """The architecture's likelihood; the levels of the noise are in `tensors`."""
        return self.model.likelihood

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.tensors["guide.mu_loc"].device

    def to(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> "Ensemble":
        """A copy on another device or in another dtype, with weights of its own."""
        other = copy.copy(self)
        other.tensors = {
            name: t.detach().to(device, dtype, copy=True).requires_grad_(t.requires_grad)
            for name, t in self.tensors.items()
        }
        return other

    def network_parameters(self) -> list[Tensor]:
        """Weights of extractor and embedding."""
        return [t for name, t in self._learned() if name.startswith(("model.f", "model.e"))]

    def last_layer_parameters(self) -> list[Tensor]:
        """Scales of the units, noise and variational parameters."""
        return [t for name, t in self._learned() if not name.startswith(("model.f", "model.e"))]

    def _learned(self) -> list[tuple[str, Tensor]]:
        return [(name, t) for name, t in self.tensors.items() if t.requires_grad]

    def members(self) -> list[Member]:
        """The members as ordinary models and guides, copies in eval mode."""
        return [self._member(index) for index in range(len(self))]

    def _member(self, index: int) -> Member:
        with torch.random.fork_rng(devices=[]):
            model = build_model(describe_model(self.model))
            guide = build_guide(describe_guide(self.guide), model, None)
        assert isinstance(guide, MeanFieldGuide)
        dtype = self.tensors["guide.mu_loc"].dtype
        model, guide = model.to(self.device, dtype), guide.to(self.device, dtype)
        load_module_tensors(model, guide, {n: t.detach()[index] for n, t in self.tensors.items()})
        model.input_shape = self.model.input_shape
        return model.eval(), guide.eval()

    def unit_inputs(self, x: Tensor, training: bool = False) -> Tensor:
        """h of every member, `(E, P, N)`, in the coordinates of the grid.

        In training the units are standardised by the batch, as in `Scaling`, and its statistics
        enter the running ones.
        """
        tensors = self.tensors
        h = x.mT.expand(len(self), -1, -1)  # (E, D, N)
        for name, has_relu in self.layers:
            weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
            h = torch.baddbmm(bias.unsqueeze(-1), weight, h)
            h = h.relu_() if has_relu else h
        h = tensors["model.embedding.weight"] @ h  # (E, P, N)
        first, second = tensors["model.scaling.first"], tensors["model.scaling.second"]
        if training and h.shape[-1] > 1:
            var, mean = torch.var_mean(h, -1, correction=0)
            self._update_statistics(mean.detach(), var.detach())
            first, second = mean, var
        scaling = self.model.scaling
        return scaling.apply_map(h, first.unsqueeze(-1), second.unsqueeze(-1))

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, var: Tensor) -> None:
        num_batches = self.tensors["model.scaling.num_batches"]
        num_batches += 1
        weight = (1 / num_batches).clamp(min=self.model.scaling.momentum).unsqueeze(-1)
        self.tensors["model.scaling.first"].lerp_(mean, weight)
        self.tensors["model.scaling.second"].lerp_(var, weight)

    def moments(self, x: Tensor, training: bool = False) -> FunctionMoments:
        """q(f) of every member at x: mean and variance `(E, N, F)`.

        x is `(N, D)`, or `(E, N, D)` with rows of its own for each member; so for the others.
        """
        h = self.unit_inputs(x, training)
        sigma = self.tensors["model.layer.log_unit_scale"].exp().unsqueeze(-1)  # (E, P, 1)
        loc = self.tensors["guide.z_loc"].transpose(0, 1) * sigma  # (F, E, P, M)
        scale = self.tensors["guide.z_log_scale"].exp().transpose(0, 1) * sigma
        activation = self.model.layer.activation
        if len(loc) <= _MAX_GATHERED_FUNCTIONS:
            mean, var = activation.stacked_moments(h, loc, scale.square())
            mean, var = mean.permute(1, 2, 0), var.permute(1, 2, 0)
        else:
            mean, var = activation.combine_moments(
                h.mT, loc.transpose(0, 1), scale.square().transpose(0, 1), route="dense"
            )
        mu, mu_scale = self.tensors["guide.mu_loc"], self.tensors["guide.mu_log_scale"].exp()
        return FunctionMoments(mean + mu.unsqueeze(-2), var + mu_scale.square().unsqueeze(-2))

    def loss(self, x: Tensor, y: Tensor, weights: Tensor, num_data: Tensor) -> Tensor:
        """Sum over members of minus the ELBO per datum, a scalar.

        Member e's is -(sum_n weights[e, n] E log p(y_n | f_n) - KL_e) / num_data[e], where a weight
        says how often a row counts in the whole data set.

        Args:
            x: inputs, `(N, D)`.
            y: targets, `(N, C)`, or labels `(N,)`.
            weights: `(E, N)`, or `(N,)` for all members alike; 0 leaves a row out.
            num_data: total weight of each member's rows, `(E,)`.
        """
        rows = self.expected_log_prob(y, self.moments(x, training=True))
        per_member = (rows * weights).sum(-1) - self.kl()
        return -(per_member / num_data).sum()

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """E_q log p(y | f) of every member and row, `(E, N)`; by 8 draws of f for classes."""
        likelihood = self.stacked_likelihood()
        if likelihood.has_closed_form:
            return likelihood.expected_log_prob(y.expand(len(self), *y.shape), moments)
        return likelihood.distribution(sample_marginals(moments, 8)).log_prob(y).mean(0)

    def kl(self) -> Tensor:
        """KL of every member's weights from the standard normal, `(E,)`."""
        total = torch.zeros(len(self), device=self.device)
        for name in self.guide.weight_sites:
            loc, log_scale = (self.tensors[f"guide.{name}_{part}"] for part in ("loc", "log_scale"))
            terms = 0.5 * (loc.square() + (2 * log_scale).exp() - 1) - log_scale
            total = total + terms.flatten(1).sum(-1)
        return total

    def stacked_likelihood(self) -> Likelihood:
        """The likelihood with the noise of all members, for moments `(E, N, F)`; made anew."""
        likelihood = copy.copy(self.model.likelihood)
        if hasattr(likelihood, "noise"):
            noise = copy.copy(likelihood.noise)
            log_scale = self.tensors["model.likelihood.noise.log_scale"]
            noise.__dict__["_parameters"] = {}
            noise.__dict__["log_scale"] = log_scale.reshape(len(self), 1, -1)
            likelihood.__dict__["_modules"] = {"noise": noise}
        return likelihood

    def dead_units(self) -> int:
        """Number of units, over all members, whose inputs did not vary in training."""
        spread = self.tensors["model.scaling.second"].sqrt()  # (E, P)
        least = 1e-6 * spread.amax(-1, keepdim=True).clamp(min=1e-6)
        return int((spread <= least).sum())

    def _check(self) -> None:
        model = self.model
        is_standard = (
            isinstance(model.scaling, Standardize)
            and model.embedding is not None
            and model.layer.activation.has_local_route
            and not model.layer.linear_term
            and all(model.normal_prior(name) == (0.0, 1.0) for name in model.site_shapes)
            and isinstance(self.guide, MeanFieldGuide)
        )
        if not is_standard:
            raise NotImplementedError(
                "An ensemble in one pass needs an embedding, standardised units, a Laplace kernel, "
                "standard normal priors and a MeanFieldGuide. Train other members one by one."
            )


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


def _linear_layers(network: nn.Module) -> list[tuple[str, bool]]:
    """Names of the linear layers, each with whether a ReLU follows."""
    layers: list[tuple[str, bool]] = []
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
