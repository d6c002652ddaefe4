"""A model and its posterior as one module from x to predictions, which other runtimes can run.

`portable_model` takes network, posterior, likelihood and calibration as they are now. Its module
computes what `predict` does, in the same precision, with draws of f that are constants, from plain
operations alone: neither this library nor Pyro is needed to run what is traced from it.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.additive.portable import PortableMoments, WeightMoments, grid_coordinates
from pyro_dak.inference.draws import Posterior, as_guide, has_closed_form
from pyro_dak.inference.guides import (
    FullRankGuide,
    LowRankGuide,
    MeanFieldGuide,
    NaturalGuide,
    UnitBlockGuide,
)
from pyro_dak.inference.guides.base import GaussianGuide, check_guide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import CategoricalLikelihood, Likelihood, StudentTLikelihood
from pyro_dak.model.modes import with_own_tensors
from pyro_dak.model.rows import call
from pyro_dak.prediction.freeze import affine_parts
from pyro_dak.prediction.novelty import Tails, tail_share, tail_spread
from pyro_dak.prediction.rescaling import rescaled_likelihood, rescaled_moments

__all__ = [
    "ClassProbabilities",
    "Member",
    "PortableModel",
    "PortableTails",
    "UnitCoordinates",
    "entropy",
    "member_of",
    "portable_model",
    "weight_moments",
]

Method = Literal["mc", "probit"]
# A linear layer at the end of a network is always made one with the embedding.
_MANY_ROWS = 2**31


def entropy(probs: Tensor) -> Tensor:
    """The entropy of probabilities over the last axis, in nats; 0 log 0 is 0."""
    return -(probs * torch.where(probs > 0, probs, 1.0).log()).sum(-1)


@torch.no_grad()
def weight_moments(guide: GaussianGuide, with_shift: bool = True) -> WeightMoments:
    """The weights of a guide of this library, without what it needs to learn them.

    The shift that the functions of classes share changes no probability that is a mean over draws;
    it is left out unless `with_shift`.
    """
    if type(guide) is MeanFieldGuide or type(guide) is UnitBlockGuide:
        return _of_independent_units(guide)
    if type(guide) is LowRankGuide:
        parts = [guide.split(p) for p in (guide.loc, guide.log_scale.exp(), guide.factor.mT)]
        loc, scale, shared = (_flat(weights) for weights in parts)
        return WeightMoments(loc, scale, shared=shared)
    if type(guide) is NaturalGuide:
        has_shift = guide.has_common_shift and with_shift
        if guide.covariance == "diagonal":
            scale = guide.scale if has_shift else guide.precision.rsqrt()
            return WeightMoments(guide.mean, scale)
        root = guide.scale_tril
        if has_shift:
            root = torch.cat(torch.broadcast_tensors(root, guide.shift_root().to(root)[None]), -1)
        return WeightMoments(guide.mean, root=root)
    if type(guide) is FullRankGuide:
        return WeightMoments(guide.loc, root=guide.scale_tril)
    raise NotImplementedError(
        f"The weights of {type(guide).__name__} are not known in a form that can be exported. Use "
        "a guide of pyro_dak, or `exact_posterior`."
    )


def _of_independent_units(guide: MeanFieldGuide | UnitBlockGuide) -> WeightMoments:
    others: list[Any] = [guide.normal(name) for name in guide.weight_sites if name != "z"]
    z_loc = guide.z_loc.flatten(-2)
    is_block = isinstance(guide, UnitBlockGuide)
    z_scale = torch.zeros_like(z_loc) if is_block else guide.z_scale.flatten(-2)
    loc, scale = (
        torch.cat([*(part.reshape(len(z), -1) for part in column), z], -1)
        for column, z in zip(zip(*others, strict=True), (z_loc, z_scale), strict=True)
    )
    return WeightMoments(loc, scale, guide.z_scale_tril if is_block else None)


def _flat(weights: Any) -> Tensor:
    """Weights, with any batch in front, in the order of `AdditiveLayer.design`, `(..., F, K)`."""
    linear = [] if weights.linear is None else [weights.linear]
    return torch.cat([weights.mu.unsqueeze(-1), *linear, weights.z.flatten(-2)], -1)


class UnitCoordinates(nn.Module):
    """From x to the unit inputs in coordinates of the grid, `(N, P)`, and to the features.

    Args:
        model: a copy of the model, in eval mode.
        with_features: whether the features are wanted, `(N, D_w)`; else None comes in their place.
    """

    weight: Tensor
    shift: Tensor
    gain: Tensor
    offset: Tensor

    def __init__(self, model: DAK, with_features: bool):
        super().__init__()
        self.with_features = with_features
        self.names: list[str] | None = None  # of the parts of x, if x is a dictionary
        gain, offset = torch.tensor(grid_coordinates(model.layer), dtype=torch.float64)
        found = affine_parts(model, 0 if with_features else _MANY_ROWS)
        self.model = model if found is None else None
        like = model.layer.log_unit_scale
        self.register_buffer("gain", gain.to(like))
        self.register_buffer("offset", offset.to(like))
        if found is not None:
            layers, weight, shift = found
            self.network = nn.Sequential(*layers) if len(layers) != 1 else layers[0]
            self.has_matrix = model.embedding is not None
            # The map is made in double precision, so that the grid has no part in its rounding.
            weight, shift = (part.detach().double() for part in (weight, shift.squeeze(-1)))
            weight, shift = gain * weight, gain * shift + offset
            weight = weight.mT if self.has_matrix else weight.squeeze(-1)
            self.register_buffer("weight", weight.to(like).contiguous())
            self.register_buffer("shift", shift.to(like))

    def forward(self, *x: Any) -> tuple[Tensor, Tensor | None]:
        inputs = x[0] if len(x) == 1 else x
        if self.names is not None:
            inputs = dict(zip(self.names, x, strict=True))
        if self.model is not None:
            features = self.model.features(inputs)
            return self.model.embed(features) * self.gain + self.offset, features
        features = call(self.network, inputs)
        if self.has_matrix:
            return torch.addmm(self.shift, features, self.weight), features
        return torch.addcmul(self.shift, features, self.weight), features


class ClassProbabilities(nn.Module):
    """From q(f) to class probabilities `(N, C)`, and the expected entropy `(N,)`, as in `predict`.

    With "mc" they are means over draws of f, whose standard normals are constants, those of the
    seed. With "probit" nothing is drawn, and there is no expected entropy.

    Args:
        method: "mc" or "probit".
        num_samples: the number of draws.
        num_classes: C.
        num_shared: the number of rows that the root of q(f) has.
        generator: gives the standard normals, in the order of `sample_marginals`.
        dtype: of f.
    """

    noise: Tensor
    shared: Tensor | None

    def __init__(
        self,
        method: Method,
        num_samples: int,
        num_classes: int,
        num_shared: int,
        generator: torch.Generator,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.is_mc, self.num_classes = method == "mc", num_classes
        options: dict[str, Any] = {"generator": generator, "dtype": dtype}
        noise = torch.randn(num_samples, num_classes, **options) if self.is_mc else torch.empty(0)
        has_shared = self.is_mc and num_shared > 0
        shared = torch.randn(num_samples, num_shared, **options) if has_shared else None
        self.register_buffer("noise", noise.to(dtype))
        self.register_buffer("shared", shared)

    def forward(self, q: FunctionMoments) -> tuple[Tensor, Tensor | None]:
        if not self.is_mc:
            likelihood = CategoricalLikelihood()
            return likelihood.class_probabilities(q, None)[0].exp(), None
        var = q.var
        if q.root is not None:
            var = (var - q.root.square().sum(0)).clamp(min=torch.finfo(var.dtype).tiny)
        f = q.mean.unsqueeze(1) + var.sqrt().unsqueeze(1) * self.noise  # (N, S, C)
        if q.root is not None and self.shared is not None:
            f = f + self.shared @ q.root.transpose(0, 1)
        log_probs = f.log_softmax(-1)
        probs = log_probs.exp()
        return probs.mean(1), -(probs * log_probs).sum(-1).mean(1)


class _Sorted(nn.Module):
    """How many entries of a sorted vector are below each score, `torch.searchsorted` in two steps.

    Blocks of about sqrt(n) entries are counted by their last ones, and then the entries of a block.
    """

    last: Tensor
    blocks: Tensor

    def __init__(self, reference: Tensor):
        super().__init__()
        n = len(reference)
        self.size = max(1, round(n**0.5))
        num_blocks = -(-n // self.size)
        padded = reference.new_full((num_blocks * self.size,), float("inf"))
        padded[:n] = reference
        self.register_buffer("blocks", padded.view(num_blocks, self.size))
        self.register_buffer("last", self.blocks[:-1, -1].contiguous())

    def forward(self, score: Tensor) -> Tensor:
        score = score.unsqueeze(-1)
        block = (self.last < score).to(torch.int64).sum(-1)
        inside = self.blocks.index_select(0, block) < score
        return block * self.size + inside.to(torch.int64).sum(-1)


class _MinusLogTail(nn.Module):
    """`minus_log_tail` for a reference that stays."""

    def __init__(self, reference: Tensor):
        super().__init__()
        n, tiny = len(reference), torch.finfo(reference.dtype).tiny
        self.search = _Sorted(reference)
        values = -tail_share(reference, reference).log()
        zero = reference.new_zeros(1)
        self.register_buffer("low", torch.cat([zero, reference[:-1]]))
        self.register_buffer("high", reference)
        self.register_buffer("low_value", torch.cat([zero, values[:-1]]))
        self.register_buffer("high_value", values)
        self.spread = float(tail_spread(reference))
        self.log_largest = float(reference[-1].clamp(min=tiny).log())
        self.tiny, self.last = tiny, n - 1

    def forward(self, score: Tensor) -> Tensor:
        right = self.search(score).clamp(max=self.last)
        names = ("low", "high", "low_value", "high_value")
        low, high, from_value, to_value = (getattr(self, n).index_select(0, right) for n in names)
        width = torch.where(high > low, high - low, 1)
        part = torch.where(high > low, (score - low) / width, (score > low).to(score)).clamp(0, 1)
        inside = from_value + part * (to_value - from_value)
        beyond = (score.clamp(min=self.tiny).log() - self.log_largest) / self.spread
        return inside + beyond.clamp(min=0)


class PortableTails(nn.Module):
    """The novelty of rows with these leverages `(N,)`, and entropies where there are classes.

    The twin of `Tails.scores`, in the dtype of the scores.
    """

    def __init__(self, tails: Tails, dtype: torch.dtype):
        super().__init__()
        reference = tails.leverage.to(dtype)
        self.by_leverage = self.by_entropy = None
        if tails.entropy is not None and tails.combined is not None:
            self.by_leverage = _MinusLogTail(reference)
            self.by_entropy = _MinusLogTail(tails.entropy.to(dtype))
            reference = tails.combined.to(dtype)
        self.search, self.num_rows = _Sorted(reference), len(reference)

    def forward(self, leverage: Tensor, entropy: Tensor | None) -> Tensor:
        score = leverage
        if self.by_leverage is not None and self.by_entropy is not None and entropy is not None:
            score = self.by_leverage(leverage) + self.by_entropy(entropy)
        n = self.num_rows
        return (1 + n - self.search(score)).to(score) / (n + 1)


class Member(nn.Module):
    """q(f) at x, as `PortableMoments`, and the features if they are wanted, else None."""

    def __init__(self, coordinates: UnitCoordinates, moments: PortableMoments):
        super().__init__()
        self.coordinates, self.moments = coordinates, moments

    def forward(self, *x: Any) -> tuple[FunctionMoments, Tensor | None]:
        units, features = self.coordinates(*x)
        q = self.moments(units)
        # Far outside the grid f is its bias, also at infinity; NaN shows that something overflowed.
        mean = q.mean + 0 * units.sum(-1, keepdim=True)
        return q._replace(mean=mean), features if self.coordinates.with_features else None


@torch.no_grad()
def member_of(
    model: DAK,
    posterior: Posterior,
    *,
    residual_variance: bool = False,
    with_features: bool = False,
    with_shift: bool = True,
) -> Member:
    """A model and a guide that knows q(f) in closed form as a module from x to q(f)."""
    guide = as_guide(posterior)
    if guide is not None:
        check_guide(model, guide)
    if not has_closed_form(guide) or model.scale_shapes:
        raise NotImplementedError(
            "Only a posterior that knows q(f) in closed form can be exported: a guide of pyro_dak "
            "without shrinkage, or `exact_posterior`. This one is known by draws; fit such a guide "
            "to the same model."
        )
    own = with_own_tensors(model, torch.device("cpu")).eval().requires_grad_(False)
    lost = own.node_variances(own.layer.log_unit_scale) if residual_variance else None
    moments = PortableMoments.of(own.layer, weight_moments(guide, with_shift), lost)
    return Member(UnitCoordinates(own, with_features), moments)


class PortableModel(nn.Module):
    """From x to predictions, a tuple in the order of `outputs`, each with a row for each of x.

    Attributes:
        outputs: their names, those of the attributes of `Prediction` and `ClassPrediction`.
        facts: what else is known about the predictions, as plain data.
    """

    mean_factor: Tensor
    scale_factor: Tensor
    leverage: nn.Module | None

    def __init__(self, member: Member, likelihood: Likelihood, number: float | None):
        super().__init__()
        self.member, self.likelihood = member, likelihood
        F = member.moments.num_functions
        q = FunctionMoments(*torch.ones(2, 1, F, dtype=torch.float64))
        if number is not None:
            q = rescaled_moments(likelihood, q, number)
            self.likelihood = rescaled_likelihood(likelihood, number)
        self.has_number = number is not None
        self.register_buffer("mean_factor", q.mean.to(member.moments.dtype))
        self.register_buffer("scale_factor", q.var.sqrt().to(member.moments.dtype))
        self.classes: ClassProbabilities | None = None
        self.leverage = None
        self.tails: PortableTails | None = None

    def _rescaled(self, q: FunctionMoments) -> FunctionMoments:
        if not self.has_number:
            return q
        root = None if q.root is None else q.root * self.scale_factor
        return FunctionMoments(q.mean * self.mean_factor, q.var * self.scale_factor.square(), root)

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        if self.classes is None:
            names = ["mean", "epistemic", "aleatoric"]
            names += ["noise_scale"] if isinstance(self.likelihood, StudentTLikelihood) else []
        else:
            names = ["probs", "entropy"] + ["expected_entropy"] * self.classes.is_mc
        return names + ["novelty"] * (self.tails is not None)

    @property
    def facts(self) -> dict[str, Any]:
        """The degrees of freedom of Student-t noise."""
        is_student = isinstance(self.likelihood, StudentTLikelihood)
        return {"df": self.likelihood.df} if is_student else {}

    def forward(self, *x: Any) -> tuple[Tensor, ...]:
        as_trained, features = self.member(*x)
        q, of_novelty = self._rescaled(as_trained), None
        outputs: list[Tensor]
        if self.classes is None:
            outputs = [*self.likelihood.predictive_moments(q)]
            if isinstance(self.likelihood, StudentTLikelihood):
                outputs.append(self.likelihood.noise_scale.expand_as(outputs[0]))
        else:
            probs, expected = self.classes(q)
            of_novelty = entropy(probs)
            outputs = [probs, of_novelty] + ([] if expected is None else [expected])
            if self.has_number and self.tails is not None:  # a temperature does not make strange
                of_novelty = entropy(self.classes(as_trained)[0])
        if self.tails is not None and self.leverage is not None:
            outputs.append(self.tails(self.leverage(features), of_novelty))
        return tuple(outputs)


@torch.no_grad()
def portable_model(
    model: DAK,
    posterior: Posterior,
    *,
    method: Method = "mc",
    num_samples: int = 100,
    seed: int | None = None,
    residual_variance: bool = False,
    novelty: bool = True,
) -> PortableModel:
    """The module that computes what `predict(model, posterior, x, ...)` does, on the CPU.

    The arguments are those of `predict`.
    """
    has_classes = isinstance(model.likelihood, CategoricalLikelihood)
    has_novelty = novelty and model.novelty is not None
    member = member_of(
        model,
        posterior,
        residual_variance=residual_variance,
        with_features=has_novelty,
        with_shift=not has_classes or method == "probit",
    )
    cpu = torch.device("cpu")
    likelihood = with_own_tensors(model.likelihood, cpu).requires_grad_(False)
    number = None if model.calibration is None else float(model.calibration)
    own, dtype = PortableModel(member, likelihood, number), member.moments.dtype
    if has_classes:
        generator = torch.Generator().manual_seed(0 if seed is None else int(seed))
        num_shared = member.moments.num_shared
        own.classes = ClassProbabilities(
            method, num_samples, model.num_functions, num_shared, generator, dtype
        )
    if has_novelty:
        own.leverage = with_own_tensors(model.novelty.leverage, cpu)
        own.tails = PortableTails(with_own_tensors(model.novelty.tails, cpu), dtype)
    return own.eval()
