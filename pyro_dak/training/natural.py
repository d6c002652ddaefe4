"""The learner of `fit` for guides in natural form, whose q moves by closed steps.

The optimisers have the network, the scales of the units and the noise. After each of their steps q
takes a natural-gradient step (`inference.natural`) by what the batch says about it, which has been
gathered before, at the weights that the gradient is of.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_dak.additive.scaling import NoScaling, PartStatistics
from pyro_dak.inference.guides import NaturalGuide
from pyro_dak.inference.guides.natural import RowSums
from pyro_dak.inference.natural import (
    BatchRows,
    Gathering,
    divergence,
    expected_and_rows,
    learn_noise,
    of_weights,
)
from pyro_dak.inference.objectives import AnalyticELBO
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating
from pyro_dak.model.rows import Inputs, like_model
from pyro_dak.training.checkpoint import is_finite
from pyro_dak.training.data import Epochs, rewound
from pyro_dak.training.loop import DAKLoss, seeded
from pyro_dak.training.plan import TrainingError
from pyro_dak.validation import check_integer, check_positive, check_real

__all__ = ["NaturalLoss", "are_finite", "build_learner", "over_processes"]


class _Unrounded:
    """Sums on their way out of `forward`, where Fabric makes all tensors single if it mixes."""

    def __init__(self, sums: RowSums):
        self.sums = sums


class NaturalLoss(DAKLoss):
    """Minus the ELBO per datum of a DAK with a `NaturalGuide`, and the steps of that guide.

    Attributes:
        gathering: takes the steps of q, on the rows of several batches where each is a small part
            of what q knows.
    """

    compiled_method = "batch_terms"

    def __init__(
        self,
        model: DAK,
        guide: NaturalGuide,
        objective: ELBO,
        from_features: bool = False,
        compile: bool = False,
    ):
        if not isinstance(objective, AnalyticELBO):
            raise NotImplementedError(
                f"A NaturalGuide learns from the exact q(f), which {type(objective).__name__} does "
                'not look at. Use objective="auto", "closed_form", "local" or "jensen", or another '
                "guide."
            )
        if compile and guide.covariance == "diagonal":
            warnings.warn(
                'compile=True is for covariance="joint" and "shared"; going on without it.',
                stacklevel=2,
            )
            compile = False
        super().__init__(model, guide, objective, from_features, compile)
        self.gathering = Gathering()

    def forward(  # type: ignore[override]
        self, x: Inputs, y: Tensor, scale: float, num_data: int
    ) -> tuple[Tensor, Tensor, _Unrounded]:
        """As in `DAKLoss`, with what the batch says about q, in sums over its rows."""
        guide: Any = self.guide
        layer = self.model.layer
        weights = guide.fixed_weights(layer, layer.log_unit_scale.dtype)
        expected, rows = self.batch_terms(x, y, *weights)
        kl, weight = divergence(self.model, guide), scale * len(y) / num_data
        expected = expected * (num_data / len(y))
        loss = kl - expected
        with torch.no_grad():
            means = torch.stack([loss, expected, kl]).mul_(weight / num_data)
        return loss * (weight / num_data), means, _Unrounded(rows.sums(self.model, guide))

    def batch_terms(self, x: Inputs, y: Tensor, *weights: Tensor) -> tuple[Tensor, BatchRows]:
        """`expected_and_rows` of a batch; all that depends on x, which can be compiled."""
        h = self.unit_inputs(x)
        elbo: Any = self.elbo
        guide: Any = self.guide
        return expected_and_rows(elbo, self.model, guide, h, y, *weights)

    def after_step(self, seen: _Unrounded, num_rows: int, num_data: int, fabric: Any) -> None:
        """Move q by the batch; every process adds up the sums of all and takes the same step."""
        guide: Any = self.guide
        sums, total = over_processes(seen.sums, num_rows, fabric)
        if not _is_mixed_half(fabric) or are_finite(sums):  # else the optimisers skip it too
            self.gathering.add(self.model, guide, sums, total, num_data)
        else:
            self.gathering.skip(guide, total, num_data)

    def after_epoch(self) -> None:
        """Bring the rows into q that wait for a step."""
        guide: Any = self.guide
        self.gathering.step(self.model, guide)

    def parameter_groups(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Extractor and embedding; scales of the units and what else the likelihood has."""
        network, last_layer = super().parameter_groups()
        noise = self.model.likelihood.closed_noise
        return network, [parameter for parameter in last_layer if parameter is not noise]

    def progress(self) -> dict[str, Any]:
        own = self.gathering
        counts = {"num_rows": own.num_rows, "fraction": own.fraction}
        return {"passes": own.passes, "num_batches": own.num_batches} | counts

    def progress_tensors(self) -> dict[str, Tensor]:
        sums = self.gathering.sums
        found = {} if sums is None else sums._asdict()
        return {name: value for name, value in found.items() if value is not None}

    def restore_progress(self, progress: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        own = Gathering()
        own.passes = progress["passes"]
        if own.passes is not None:
            check_real("passes", own.passes)
        if tensors:
            self._check_sums(tensors)
            for name in ("num_rows", "fraction"):
                check_positive(name, progress[name])
                setattr(own, name, progress[name])
            check_integer("num_batches", progress["num_batches"], minimum=1)
            own.num_batches = progress["num_batches"]
            own.sums = RowSums(**tensors)
        self.gathering = own

    def _check_sums(self, tensors: dict[str, Tensor]) -> None:
        """Raise unless these can be sums over rows for this guide."""
        guide: Any = self.guide
        noise = self.model.likelihood.closed_noise
        shapes = {"gradient": guide.mean.shape, "curvature": guide.precision.shape}
        if "coarse_curvature" in tensors and guide.covariance == "diagonal":
            shapes["coarse_curvature"] = guide.coarse_precision.shape
        elif guide.covariance == "diagonal" and guide.is_joint_in_the_mean:
            shapes["curvature"] = guide.coarse_precision.shape
        if guide.covariance == "shared":
            shapes |= {"steepest": torch.Size(), "mean_curvature": torch.Size()}
        if noise is not None:
            shapes["squares"] = noise.shape
            if self.model.likelihood.missing is not None:
                shapes["num_squares"] = noise.shape
        if {name: value.shape for name, value in tensors.items()} != shapes:
            raise ValueError("the sums over the last rows are not finite, or of another guide")
        if not all(is_finite(value) for value in tensors.values()):
            raise ValueError("the sums over the last rows are not finite, or of another guide")

    def renew(self, data: Epochs, fabric: Any, seed: int) -> None:
        """Take q from a pass over all rows, in eval mode, with the network as it is now.

        During training q is an average over features of several epochs, in training mode. Here it
        takes a natural-gradient step of length 1 from there, which is the posterior of the final
        features for Gaussian noise, and close to it for other likelihoods. Before that, the
        statistics of the scaling become those of all rows, and a noise in closed form is renewed,
        each from a pass of its own; since the noise is that of q, q takes such a step before it
        too. The running statistics lag behind: the mean of a feature is
        free to drift, since batches are centred, and an optimiser like Adam makes steps out of the
        rounding of its gradient.
        """
        likelihood, guide = self.model.likelihood, self.guide
        assert isinstance(guide, NaturalGuide)
        self._renew_scaling(data, fabric, seed)
        if likelihood.closed_noise is not None:
            self._step_on_all_rows(data, fabric, seed)
            sums, num_rows = self._sums_over(data, fabric, seed)
            learn_noise(likelihood, sums, num_rows, 1.0)
        self._step_on_all_rows(data, fabric, seed)
        if not bool(guide.mean.isfinite().all()):
            raise TrainingError(
                "The posterior of the final features is not finite: the precision of its weights "
                "cannot be inverted. Scale the inputs, raise the noise, or pass `final_pass=False`."
            )

    def _step_on_all_rows(self, data: Epochs, fabric: Any, seed: int) -> None:
        """Let q take a natural-gradient step of length 1 on all rows, in eval mode."""
        guide: Any = self.guide
        sums, num_rows = self._sums_over(data, fabric, seed)
        sums, gain = of_weights(self.model, guide, sums), data.num_rows / num_rows
        coupling = self.model.likelihood.coupling
        guide.step(sums, num_rows, keep=0.0, gain=gain, coupling=coupling)

    def _renew_scaling(self, data: Epochs, fabric: Any, seed: int) -> None:
        """Set the statistics of the scaling to those of all rows."""
        scaling, seen = self.model.scaling, list[PartStatistics]()
        if isinstance(scaling, NoScaling) or scaling.is_frozen:
            return
        hook = scaling.register_forward_pre_hook(
            lambda _, inputs: seen.append(scaling.part_statistics(inputs[0]))
        )
        like = self.model.layer.log_unit_scale
        try:
            with evaluating(self.model), rewound(data.generators):
                for x, _, _ in data.epoch(torch.Generator().manual_seed(seed), 0):
                    self.unit_inputs(like_model(x, like))
        finally:
            hook.remove()
        scaling.take_statistics(seen)

    def _sums_over(self, data: Epochs, fabric: Any, seed: int) -> tuple[RowSums, float]:
        """What all rows of all processes say about q, in eval mode, and how many they are."""
        like = self.model.layer.log_unit_scale
        guide: Any = self.guide
        sums, num_rows = None, 0
        with (
            evaluating(self),
            seeded(seed + fabric.global_rank, fabric.device),
            rewound(data.generators),
        ):
            for x, y, _ in data.epoch(torch.Generator().manual_seed(seed), 0):
                # The class's own: a compiled one would be compiled once more, for eval mode.
                weights = guide.fixed_weights(self.model.layer, like.dtype)
                batch = like_model(x, like), like_model(y, like)
                _, rows = NaturalLoss.batch_terms(self, *batch, *weights)
                own = rows.sums(self.model, guide, may_round=False)
                sums = own if sums is None else sums.plus(own)
                num_rows += len(y)
        assert sums is not None
        return over_processes(sums, num_rows, fabric)


def build_learner(
    model: DAK,
    guide: nn.Module,
    objective: ELBO,
    from_features: bool = False,
    compile: bool = False,
) -> DAKLoss:
    """The learner of `fit` for a guide; the arguments are those of `DAKLoss`."""
    if isinstance(guide, NaturalGuide):
        return NaturalLoss(model, guide, objective, from_features, compile)
    return DAKLoss(model, guide, objective, from_features, compile)


def over_processes(sums: RowSums, num_rows: int, fabric: Any) -> tuple[RowSums, float]:
    """The sums over the rows of all processes, and how many rows these are."""
    if fabric.world_size == 1:
        return sums, float(num_rows)
    count = torch.tensor(float(num_rows), device=fabric.device)
    values: list[Any] = [
        None if value is None else fabric.all_reduce(value, reduce_op="sum") for value in sums
    ]
    return RowSums(*values), float(fabric.all_reduce(count, reduce_op="sum"))


def _is_mixed_half(fabric: Any) -> bool:
    """Whether gradients are scaled, so that a step with too large a scale is skipped."""
    precision = getattr(getattr(fabric, "strategy", None), "precision", None)
    return getattr(precision, "scaler", None) is not None


def are_finite(sums: RowSums) -> bool:
    """Whether a step by these sums leaves q finite."""
    return bool((sums.gradient.sum() + sums.curvature.sum()).isfinite())
