"""The formulas written out: naive loops and dense algebra, slow and plain, float64.

Nothing here imports the library, so that a mistake cannot be in both places.
"""

import math

import torch
from torch import Tensor


def laplace(a: Tensor, b: Tensor, lengthscale: float) -> Tensor:
    """exp(-|a - b| / lengthscale), `(*a, M)` for b `(M,)`."""
    return torch.exp(-(a[..., None] - b).abs() / lengthscale)


def dyadic_points(level: int, bounds: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """1/2 | 1/4 3/4 | 1/8 3/8 5/8 7/8 ... scaled to the bounds, `(M,)`."""
    low, high = bounds
    points = []
    for current in range(1, level + 1):
        for i in range(1, 2**current, 2):
            points.append(low + (high - low) * i / 2**current)
    return torch.tensor(points, dtype=torch.float64)


def algorithm_1(level: int, width: float, lengthscale: float) -> Tensor:
    """The paper's Algorithm 1, literally, with rows and columns in level order, `(M, M)`.

    A neighbour at infinity has covariance zero with all others; its own variance is set to one,
    which keeps the 3 x 3 system regular and its coefficient zero.
    """
    index: dict[int, int] = {}  # i / 2^level -> position in level order
    M = 2**level - 1
    R = torch.zeros(M, M, dtype=torch.float64)
    for current in range(1, level + 1):
        step = 2 ** (level - current)
        for i in range(1, 2**current, 2):
            index[i * step] = len(index)
            left = (i - 1) * step if i > 1 else None
            right = (i + 1) * step if i < 2**current - 1 else None
            triple = [left, i * step, right]
            system = torch.eye(3, dtype=torch.float64)
            for row, s in enumerate(triple):
                for column, t in enumerate(triple):
                    if s is None or t is None:
                        continue
                    distance = abs(s - t) / 2**level * width
                    system[row, column] = math.exp(-distance / lengthscale)
            c = torch.linalg.solve(system, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
            c = c / c[1].sqrt()
            for s, value in zip(triple, c, strict=True):
                if s is not None:
                    R[index[s], index[i * step]] = value
    return R


def phi(h: Tensor, U: Tensor, lengthscale: float) -> Tensor:
    """k(h, U) L_U^{-T} by a dense Cholesky factor, `(*h, M)`; differentiable in h."""
    L_U = torch.linalg.cholesky(laplace(U, U, lengthscale))
    k_hU = laplace(h, U, lengthscale)
    flat = k_hU.reshape(-1, len(U))
    return torch.linalg.solve_triangular(L_U, flat.mT, upper=False).mT.reshape(k_hU.shape)


def residual_variance(h: Tensor, U: Tensor, lengthscale: float) -> Tensor:
    """1 - phi phi^T, like h."""
    return 1 - phi(h, U, lengthscale).square().sum(-1)


def moments_of_f(
    features: Tensor,
    z_loc: Tensor,
    z_scale: Tensor,
    unit_scale: Tensor,
    mu_loc: Tensor,
    mu_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and variance of f_nc = sum_pm sigma_p phi_npm z_cpm + mu_c, `(N, C)`, in loops."""
    N, P, M = features.shape
    C = z_loc.shape[0]
    mean, var = features.new_zeros(N, C), features.new_zeros(N, C)
    for n in range(N):
        for c in range(C):
            mean[n, c], var[n, c] = mu_loc[c], mu_scale[c] ** 2
            for p in range(P):
                for m in range(M):
                    slope = unit_scale[p] * features[n, p, m]
                    mean[n, c] += slope * z_loc[c, p, m]
                    var[n, c] += slope**2 * z_scale[c, p, m] ** 2
    return mean, var


def kl_gaussians(loc: Tensor, cov: Tensor, prior_loc: Tensor, prior_cov: Tensor) -> Tensor:
    """KL(N(loc, cov) || N(prior_loc, prior_cov)) through full covariance matrices, `(k,)`."""
    shift = prior_loc - loc
    inverse = torch.linalg.inv(prior_cov)
    trace = torch.trace(inverse @ cov)
    log_ratio = torch.logdet(prior_cov) - torch.logdet(cov)
    return 0.5 * (trace + shift @ inverse @ shift - len(loc) + log_ratio)


def expected_calibration_error(y: Tensor, probs: Tensor, num_bins: int) -> Tensor:
    """sum_b |B_b| / n |accuracy(B_b) - confidence(B_b)|, bins (b / B, (b + 1) / B]."""
    total = torch.zeros(())
    for b in range(num_bins):
        rows = []
        for n in range(len(y)):
            confidence = float(probs[n].max())
            if b / num_bins < confidence <= (b + 1) / num_bins:
                rows.append((confidence, float(probs[n].argmax() == y[n])))
        if rows:
            confidence, hit = torch.tensor(rows).mean(0)
            total += len(rows) / len(y) * (hit - confidence).abs()
    return total


def auroc(negative: Tensor, positive: Tensor) -> float:
    """Share of pairs in which the positive is larger, ties counted half."""
    wins = 0.0
    for s in positive.tolist():
        for t in negative.tolist():
            wins += 1.0 if s > t else 0.5 if s == t else 0.0
    return wins / (len(positive) * len(negative))


def crps(y: float, mean: float, scale: float, num_points: int = 200_001) -> float:
    """Integral of (F(t) - [t >= y])^2 by the trapezium rule on either side of y, F normal."""
    normal = torch.distributions.Normal(mean, scale)
    low, high = min(y, mean - 12 * scale), max(y, mean + 12 * scale)
    total = 0.0
    for start, stop, step in [(low, y, 0.0), (y, high, 1.0)]:
        t = torch.linspace(start, stop, num_points, dtype=torch.float64)
        total += float(torch.trapezoid((normal.cdf(t) - step).square(), t))
    return total


def gauss_hermite_expectation(fn, mean: float, var: float, num_points: int = 60) -> float:
    """E fn(f) for f ~ N(mean, var); exact for polynomials of degree below 2 num_points."""
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(num_points)
    values = [fn(mean + math.sqrt(var) * node) for node in nodes]
    return float(np.dot(weights, values)) / math.sqrt(2 * math.pi)


def additive_gp_posterior(
    x: Tensor,
    y: Tensor,
    x_new: Tensor,
    lengthscale: Tensor | float,
    unit_scale: Tensor | float,
    bias_scale: float,
    noise_scale: float,
) -> tuple[Tensor, Tensor]:
    """Exact GP regression with k(x, x') = sum_p sigma_p^2 exp(-|x_p - x'_p| / t) + bias_scale^2.

    Args:
        x: inputs, `(N, P)`.
        y: targets, `(N,)`, or `(N, C)` for outputs that share the kernel and the noise.
        x_new: new inputs, `(N_new, P)`.
        lengthscale: t, `(P,)` or one for all.
        unit_scale: sigma, likewise.
        bias_scale: prior standard deviation of the bias.
        noise_scale: standard deviation of the noise.

    Returns:
        Mean of f, `(N_new,)` or `(N_new, C)` like y, and variance of f, `(N_new,)`.
    """
    num_units = x.shape[-1]
    sigma, t = (
        torch.as_tensor(value, dtype=torch.float64).expand(num_units)
        for value in (unit_scale, lengthscale)
    )

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        total = torch.full((len(a), len(b)), float(bias_scale) ** 2, dtype=torch.float64)
        for p in range(num_units):
            total += sigma[p] ** 2 * laplace(a[:, p], b[:, p], float(t[p]))
        return total

    noise = float(noise_scale) ** 2 * torch.eye(len(x), dtype=torch.float64)
    gain = torch.linalg.solve(kernel(x, x) + noise, kernel(x, x_new)).mT  # (N_new, N)
    prior_var = float(bias_scale) ** 2 + sigma.square().sum()
    return gain @ y, prior_var - (gain * kernel(x_new, x)).sum(-1)


def leverages(features: Tensor, new: Tensor, skip: int | None = None) -> Tensor:
    """Phi(x) (0.1 I + sum_n Phi_n^T Phi_n)^{-1} Phi(x)^T of each row of `new`, in loops.

    A unit for each feature, three standard deviations to either bound of (0, 1), three nodes. The
    row `skip` is left out of the sum, but not of mean and standard deviation.
    """
    U = dyadic_points(2)
    mean = features.mean(0)
    std = (((features - mean) ** 2).mean(0) + 1e-10).sqrt()

    def design(row: Tensor) -> Tensor:
        columns = [torch.ones(1, dtype=torch.float64)]
        for d in range(len(row)):
            h = 0.5 + (row[d] - mean[d]) / std[d] / 6
            columns.append(phi(h.reshape(1), U, 1.0)[0])
        return torch.cat(columns)

    A = 0.1 * torch.eye(1 + 3 * features.shape[1], dtype=torch.float64)
    for n in range(len(features)):
        if n != skip:
            A = A + torch.outer(design(features[n]), design(features[n]))
    inverse = torch.linalg.inv(A)
    return torch.stack([design(row) @ inverse @ design(row) for row in new])
