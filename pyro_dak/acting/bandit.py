"""Contextual bandits by Thompson sampling: an arm is as good as a function drawn for it says."""

import math
from typing import Any

import torch
from torch import Tensor

from pyro_dak.acting.surrogate import build_surrogate, maximize_evidence
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.guides import NaturalGuide
from pyro_dak.model.modes import evaluating
from pyro_dak.validation import (
    check_finite,
    check_has_values,
    check_integer,
    check_real,
    check_seed,
    check_tensor,
)

__all__ = ["ThompsonBandit"]

# Rows of an arm that enter the evidence, steps of the fit, and rewards that call for a fit at once.
_MAX_ROWS, _MAX_STEPS, _FAR = 200, 15, 10.0
# The prior of the lengthscales for two columns, and how far they and the unit scales go from it, in
# logarithms.
_LENGTHSCALE, _DEVIATION = 0.25, 0.2


class ThompsonBandit:
    """Chooses arms for contexts in the unit cube, and learns from the rewards of those it chose.

    The rewards of each arm are a function of the context with Gaussian noise: a DAK of
    `build_surrogate` and a `NaturalGuide`, which is conditioned on every reward as it comes, in
    O(K^2). Lengthscales, unit scales and noise are those of the evidence, found anew every
    `refresh_every` rounds, and when a reward lies far outside of what was seen; the posterior is
    then that of all rewards. Lengthscales and scales stay near those of the prior, whose standard
    deviation is the size of the rewards, their root mean square so far: an arm that has paid the
    same everywhere may pay twice as much where it was not tried. The lengthscale of that prior is a
    quarter of the cube for two columns, and grows with the square root of D, as distances in the
    cube do. Until every arm has been tried `num_trials` times, they take turns.

    Args:
        num_inputs: D, the columns of a context.
        num_arms: A.
        refresh_every: rounds between two fits.
        num_trials: turns of each arm at the start.
        seed: of the draws; None is 0.
        options: further arguments of `build_surrogate`.
    """

    def __init__(
        self,
        num_inputs: int,
        num_arms: int,
        *,
        refresh_every: int = 200,
        num_trials: int = 3,
        seed: int | None = None,
        **options: Any,
    ):
        for name, value in (
            ("num_arms", num_arms),
            ("refresh_every", refresh_every),
            ("num_trials", num_trials),
        ):
            check_integer(name, value, minimum=1)
        check_integer("num_inputs", num_inputs, minimum=1)
        check_seed("seed", seed)
        self.num_inputs, self.num_arms = num_inputs, num_arms
        self.refresh_every, self.num_trials = refresh_every, num_trials
        options = {
            "num_directions": 14,
            "lengthscale": _LENGTHSCALE * math.sqrt(num_inputs / 2),
            "log_deviation": _DEVIATION,
        } | options
        self.models = [build_surrogate(num_inputs, **options).double() for _ in range(num_arms)]
        self.guides = [NaturalGuide(model) for model in self.models]
        self._start = [model.layer.log_unit_scale.detach().clone() for model in self.models]
        self._contexts: list[Tensor] = []
        self._arms: list[int] = []
        self._rewards: list[float] = []
        self._loc, self._scale = 0.0, 1.0
        self._num_since = 0
        self._generator = torch.Generator().manual_seed(0 if seed is None else int(seed))

    @property
    def num_rounds(self) -> int:
        """Rewards so far."""
        return len(self._rewards)

    def moments(self, context: Tensor) -> FunctionMoments:
        """Mean and variance of each arm's expected reward at a context `(D,)`, `(A,)` each."""
        x = self._checked(context)
        parts = []
        for model, guide in zip(self.models, self.guides, strict=True):
            with evaluating(model, guide):
                h = model.unit_inputs(x)
                q = guide.moments(model.layer, h)
                parts.append(torch.cat([q.mean[0], (q.var + model.residual_variance(h))[0]]))
        mean, var = torch.stack(parts, -1)
        return FunctionMoments(self._loc + self._scale * mean, self._scale**2 * var)

    def choose(self, context: Tensor) -> int:
        """The arm whose drawn reward is largest at a context `(D,)`."""
        x = self._checked(context)
        if self.num_rounds < self.num_trials * self.num_arms:
            return self.num_rounds % self.num_arms
        mean, var, _ = self.moments(x[0])
        noise = torch.randn(len(mean), generator=self._generator, dtype=mean.dtype)
        return int((mean + var.sqrt() * noise).argmax())

    def update(self, context: Tensor, arm: int, reward: float) -> None:
        """Learn from the reward of an arm at a context `(D,)`."""
        x = self._checked(context)
        check_integer("arm", arm, minimum=0, maximum=self.num_arms - 1)
        check_real("reward", reward)
        self._contexts.append(x)
        self._arms.append(int(arm))
        self._rewards.append(float(reward))
        self._num_since += 1
        num_first = self.num_trials * self.num_arms
        scaled = (float(reward) - self._loc) / self._scale
        if self.num_rounds <= num_first:
            if self.num_rounds == num_first:
                self.refresh()
        elif self._num_since >= self.refresh_every or abs(scaled) > _FAR:
            self.refresh()
        else:
            y = torch.tensor([[scaled]], dtype=x.dtype)
            self.guides[arm].update(self.models[arm], x, y)

    def refresh(self) -> None:
        """Fit the features of every arm to its rewards, and condition on all of them."""
        contexts, arms = torch.cat(self._contexts), torch.tensor(self._arms)
        rewards = torch.tensor(self._rewards, dtype=contexts.dtype)
        self._loc = float(rewards.mean())
        self._scale = max(float(rewards.square().mean().sqrt()), 1e-12)
        self._num_since = 0
        y = ((rewards - self._loc) / self._scale).unsqueeze(-1)
        for arm, model in enumerate(self.models):
            rows = (arms == arm).nonzero().flatten()
            guide = self.guides[arm] = NaturalGuide(model)
            if len(rows) == 0:
                continue
            some = rows[torch.randperm(len(rows), generator=self._generator)[:_MAX_ROWS]]
            maximize_evidence(
                model,
                contexts[some],
                y[some],
                log_unit_scale=self._start[arm],
                log_deviation=_DEVIATION,
                max_steps=_MAX_STEPS,
            )
            guide.update(model, contexts[rows], y[rows])

    def _checked(self, context: Tensor) -> Tensor:
        """The context as a row `(1, D)` in double precision."""
        check_tensor("context", context)
        check_has_values("context", context)
        if context.shape != (self.num_inputs,):
            raise ValueError(
                f"`context` must have shape ({self.num_inputs},), one number per column; got "
                f"{tuple(context.shape)}."
            )
        check_finite("context", context)
        return context.detach().double().unsqueeze(0)
