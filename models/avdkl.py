"""AV-DKL: every input has inducing points and a variational posterior of its own, amortised."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_dak import GaussianLikelihood
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.validation import check_choice

from .shared.backbones import backbone
from .shared.baseline import TableBaseline
from .shared.recipe import DEFAULT_RECIPE, Recipe, seeded


class Amortised(NamedTuple):
    """What the network says of each input: the inducing points Z and q(u).

    The locations are `(N, C, M, D_w)`, the mean `(N, C, M)`, the Cholesky factor `(N, C, M, M)`.
    """

    locations: Tensor
    mean: Tensor
    tril: Tensor


class Amortisation(nn.Module):
    """Linear maps from features to inducing locations, variational means and covariances.

    Args:
        feature_dim: D_w.
        num_outputs: C.
        num_inducing: M.
        covariance: "full" or "diagonal".
    """

    def __init__(self, feature_dim: int, num_outputs: int, num_inducing: int, covariance: str):
        super().__init__()
        check_choice("covariance", covariance, ("diagonal", "full"))
        C, M = num_outputs, num_inducing
        self.shape = (C, M, feature_dim)
        index = torch.tril_indices(M, M) if covariance == "full" else torch.arange(M).expand(2, M)
        self.register_buffer("index", index.contiguous())
        self.locations = nn.Linear(feature_dim, C * M * feature_dim)
        self.mean = nn.Linear(feature_dim, C * M)
        self.tril = nn.Linear(feature_dim, C * index.shape[1])

    def forward(self, g: Tensor) -> Amortised:
        """From features g `(N, D_w)`; the diagonal of the factor is an exponential."""
        C, M, _ = self.shape
        raw = self.tril(g).unflatten(-1, (C, -1))
        row, column = self.index
        entries = torch.where(row == column, raw.exp(), raw)
        tril = raw.new_zeros(len(g), C, M, M)
        tril[..., row, column] = entries
        locations = self.locations(g).unflatten(-1, self.shape)
        return Amortised(locations, self.mean(g).unflatten(-1, (C, M)), tril)


class SEProcess(nn.Module):
    """A prior with constant mean, k(a, b) = outputscale exp(-|a - b|^2 / (2 lengthscale^2)).

    Both scales start where GPyTorch starts them, at log 2.
    """

    def __init__(self, jitter: float = 1e-4):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(()))
        self.log_lengthscale = nn.Parameter(torch.tensor(2.0).log().log())
        self.log_outputscale = nn.Parameter(torch.tensor(2.0).log().log())
        self.jitter = jitter

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        """k(a, b) for `(..., n, D)` and `(..., m, D)`, `(..., n, m)`."""
        a, b = (value * (-self.log_lengthscale).exp() for value in (a, b))
        squares = a.square().sum(-1).unsqueeze(-1) + b.square().sum(-1).unsqueeze(-2)
        return (self.log_outputscale - 0.5 * (squares - 2 * a @ b.mT).clamp(min=0)).exp()

    def root(self, Z: Tensor) -> Tensor:
        """Cholesky factor of k(Z, Z), one per input and output."""
        K = self.kernel(Z, Z)
        jitter = self.jitter * self.log_outputscale.exp()
        return torch.linalg.cholesky(
            K + jitter * torch.eye(K.shape[-1], dtype=K.dtype).to(K.device)
        )


class AVDKL(TableBaseline):
    """q(f(x)) from the conditional of f(x) given the inducing variables u of x alone.

    With L L^T = k(Z, Z), w = L^{-1} k(Z, g), u = mean + L v and q(v) = N(m, A A^T):
    f(x) ~ N(mean + w^T m, k(g, g) - w^T w + |A^T w|^2). If not `is_whitened` the network's mean
    and factor are those of u, and m = L^{-1} (mean_u - mean), A = L^{-1} factor_u.
    """

    chunk_size = 512
    last_layer: nn.ModuleDict

    def __init__(
        self,
        input_dim: int,
        num_outputs: int,
        network: nn.ModuleDict,
        last_layer: nn.ModuleDict,
        recipe: Recipe,
        is_whitened: bool,
    ):
        super().__init__(input_dim, num_outputs, network, last_layer, recipe)
        self.is_whitened = is_whitened

    def posterior(self, x: Tensor) -> tuple[FunctionMoments, Tensor]:
        """q(f) `(N, C)` and KL(q(u | x) || p(u | x)) summed over outputs, `(N,)`."""
        g = self.network["features"](x).tanh()
        Z, m, A = self.network["amortisation"](g)
        process = self.last_layer["process"]
        L = process.root(Z)  # (N, C, M, M)
        k_Zg = process.kernel(Z, g[:, None, None])  # (N, C, M, 1)
        w = torch.linalg.solve_triangular(L, k_Zg, upper=False)
        if not self.is_whitened:
            both = torch.cat([(m - process.mean).unsqueeze(-1), A], -1)
            both = torch.linalg.solve_triangular(L, both, upper=False)
            m, A = both[..., 0], both[..., 1:]
        mean = process.mean + (w[..., 0] * m).sum(-1)
        prior_var = process.log_outputscale.exp()
        conditional = (prior_var - w.square().sum((-2, -1))).clamp(min=1e-6)
        var = conditional + (A.mT @ w).square().sum((-2, -1))
        log_det = A.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        M = m.shape[-1]
        kl = 0.5 * (A.square().sum((-2, -1)) + m.square().sum(-1) - M) - log_det
        return FunctionMoments(mean, var), kl.sum(-1)

    def loss(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        """Minus (mean expected log-likelihood - mean KL / num_data)."""
        moments, kl = self.posterior(x)
        fit = self.last_layer["likelihood"].expected_log_prob(y, moments)
        return -(fit.mean() - kl.mean() / num_data)

    def function_moments(self, x: Tensor) -> FunctionMoments:
        return self.posterior(x)[0]

    @property
    def noise_scale(self) -> Tensor:
        return self.last_layer["likelihood"].noise_scale


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    num_inducing: int = 64,
    covariance: str = "full",
    is_whitened: bool = True,
    noise_scale: float = 0.5,
    learn_noise: bool = True,
) -> AVDKL:
    """The backbone with tanh features, the amortisation, and the prior process.

    Args:
        input_dim: D.
        num_outputs: C.
        feature_dim: D_w.
        recipe: the settings of the training.
        num_inducing: inducing points of each input and output.
        covariance: "full" or "diagonal", of the inducing variables of an input.
        is_whitened: whether the network's mean and factor are those of L^{-1} (u - mean), which
            is as good and a quarter faster, or those of u itself.
        noise_scale: standard deviation of the noise, or its start.
        learn_noise: whether it is trained.
    """
    with seeded(recipe.seed):
        amortisation = Amortisation(feature_dim, num_outputs, num_inducing, covariance)
        network = nn.ModuleDict(
            {"features": backbone(input_dim, feature_dim), "amortisation": amortisation}
        )
    likelihood = GaussianLikelihood(noise_scale, learn_noise)
    last_layer = nn.ModuleDict({"process": SEProcess(), "likelihood": likelihood})
    return AVDKL(input_dim, num_outputs, network, last_layer, recipe, is_whitened)
