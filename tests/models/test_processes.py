"""The Gaussian processes among the models for tables are what they say, by naive formulas."""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close

from tests.models.tables import RECIPE, build, data

# What GPyTorch and linear_operator say of themselves, at import and in sparse interpolation.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor:UserWarning"),
]


def se_kernel(a, b, lengthscale, outputscale):
    squares = ((a[:, None] - b[None]) ** 2).sum(-1)
    return outputscale * numpy.exp(-0.5 * squares / lengthscale**2)


def hyperparameters(gp):
    kernel = gp.covar_module
    return (
        gp.mean_module.constant.item(),
        kernel.base_kernel.lengthscale.item(),
        kernel.outputscale.item(),
    )


@pytest.mark.parametrize("name", ["exact_gp", "exact_dkl"])
def test_exact_prediction_equals_a_naive_gp(name, fitted):
    model = fitted(name)
    (x, y), (x_new, _) = data(), data(20, seed=1)
    mean, *kernel = hyperparameters(model.gp)
    with torch.no_grad():
        h, h_new = (model.network(value).numpy() for value in (x, x_new))
    K = se_kernel(h, h, *kernel) + model.noise_scale.item() ** 2 * numpy.eye(64)
    k = se_kernel(h_new, h, *kernel)
    expected = mean + k @ numpy.linalg.solve(K, y.numpy() - mean)
    var = kernel[1] - numpy.einsum("nm,nm->n", k, numpy.linalg.solve(K, k.T).T)
    prediction = model.predict(x_new)
    assert_close(prediction.mean.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert_close(prediction.epistemic[:, 0].numpy(), var, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["exact_gp", "exact_dkl"])
def test_exact_loss_is_minus_the_log_evidence_per_datum(name, fitted):
    model = fitted(name)
    x, y = data()
    mean, *kernel = hyperparameters(model.gp)
    h = model.network(x).detach().numpy()
    K = torch.as_tensor(se_kernel(h, h, *kernel)) + model.noise_scale.detach() ** 2 * torch.eye(64)
    evidence = MultivariateNormal(torch.full((64,), mean), K).log_prob(y[:, 0])
    model.gp.train()
    loss = model.loss(x, y, 64).item()
    model.gp.eval()
    assert_close(loss, -evidence.item() / 64, rtol=1e-6, atol=1e-6)


def test_svgp_bound_equals_a_naive_one_and_is_below_the_evidence(fitted):
    model = fitted("nn_svgp")
    x, y = data()
    N, mean = 64, hyperparameters(model.gp)[0]
    kernel = hyperparameters(model.gp)[1:]
    strategy = model.gp.variational_strategy
    Z = strategy.inducing_points.detach().numpy()
    m = strategy._variational_distribution.variational_mean.detach()
    A = strategy._variational_distribution.chol_variational_covar.detach().tril()
    h = model.network(x).detach().numpy()
    L = numpy.linalg.cholesky(se_kernel(Z, Z, *kernel) + strategy.jitter_val * numpy.eye(20))
    w = torch.as_tensor(numpy.linalg.solve(L, se_kernel(Z, h, *kernel)))
    f_mean, noise = mean + w.mT @ m, model.noise_scale.item()
    f_var = kernel[1] + strategy.jitter_val - w.square().sum(0) + (A.mT @ w).square().sum(0)
    kl = kl_divergence(
        MultivariateNormal(m, A @ A.mT), MultivariateNormal(torch.zeros(20), torch.eye(20))
    )
    rows = torch.distributions.Normal(f_mean, noise).log_prob(y[:, 0]) - f_var / (2 * noise**2)
    loss = model.loss(x, y, N).item()
    assert_close(loss, (-rows.mean() + kl / N).item(), rtol=1e-6, atol=1e-6)
    prediction = model.predict(x)
    assert_close(prediction.mean[:, 0], f_mean, rtol=1e-6, atol=1e-6)
    assert_close(prediction.epistemic[:, 0], f_var, rtol=1e-4, atol=1e-6)
    K = torch.as_tensor(se_kernel(h, h, *kernel)) + noise**2 * torch.eye(N)
    assert -N * loss < MultivariateNormal(torch.full((N,), mean), K).log_prob(y[:, 0])


def test_svdkl_at_nodes_of_the_grid_is_the_mixture_of_its_inducing_variables(fitted):
    model = fitted("svdkl")
    mixing = model.gp.variational_strategy
    grid = mixing.base_variational_strategy
    q = grid._variational_distribution
    a = mixing.lmc_coefficients.detach()[:, 0]
    m, S = q.variational_mean.detach(), q().covariance_matrix.detach()
    node = torch.tensor([[1, 3, 5, 14], [2, 2, 9, 7], [12, 13, 14, 1]])  # (N, P)
    unit = torch.arange(4)
    mean = (a * m[unit, node]).sum(-1)
    var = (a.square() * S[unit, node, node]).sum(-1) + mixing.jitter_val
    network, model.network = model.network, nn.Identity()
    prediction = model.predict(grid.grid[node, 0])
    model.network = network
    assert_close(prediction.mean[:, 0], mean)
    assert_close(prediction.epistemic[:, 0], var)


def test_svdkl_through_matrices_equals_the_lazy_operators_of_gpytorch(fitted):
    model = fitted("svdkl")
    x, y = data()
    parameters = [*model.network.parameters(), *model.last_layer.parameters()]
    results = []
    model.last_layer.train()
    for model.is_dense in (True, False):
        q = model.q_functions(x)
        loss = model.loss(x, y, 64)
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)
        results.append((q.mean, q.variance, loss, *gradients))
    model.last_layer.eval()
    for dense, lazy in zip(*results, strict=True):
        assert_close(dense, lazy)


def test_svdkl_bound_is_fit_minus_kl_per_datum(fitted):
    model = fitted("svdkl")
    x, y = data()
    mixing = model.gp.variational_strategy
    grid = mixing.base_variational_strategy
    kernel = model.gp.covar_module(grid.inducing_points).to_dense().detach()
    prior = MultivariateNormal(
        model.gp.mean_module.constant.detach().unsqueeze(-1).expand(4, 16),
        kernel + 1e-3 * torch.eye(16),
    )
    q = grid._variational_distribution()
    posterior = MultivariateNormal(q.mean.detach(), q.covariance_matrix.detach())
    kl = kl_divergence(posterior, prior)
    assert (kl >= 0).all()
    prediction = model.predict(x)
    fit = prediction.likelihood.expected_log_prob(y, prediction.functions).mean()
    assert_close(model.loss(x, y, 64).item(), (-fit + kl.sum() / 64).item())


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("is_whitened", [True, False])
def test_avdkl_posterior_equals_a_naive_one_for_each_row(covariance, is_whitened):
    options = {"num_outputs": 2, "covariance": covariance, "is_whitened": is_whitened}
    model = build("avdkl", recipe=replace(RECIPE, epochs=2), **options)
    x, y = data(12)
    model.fit(x, torch.cat([y, -y], -1))
    with torch.no_grad():
        moments, kl = model.posterior(x)
        g = model.network["features"](x).tanh()
        Z, means, trils = model.network["amortisation"](g)
    process = model.last_layer["process"]
    mu, *log_kernel = (p.item() for p in process.parameters())
    kernel = numpy.exp(log_kernel)
    for row in range(12):
        row_kl = 0.0
        for output in range(2):
            z, factor = Z[row, output].numpy(), trils[row, output]
            K = torch.as_tensor(se_kernel(z, z, *kernel) + 1e-4 * kernel[1] * numpy.eye(6))
            k = torch.as_tensor(se_kernel(g[row : row + 1].numpy(), z, *kernel))[0]
            m, S = means[row, output], factor @ factor.mT
            if is_whitened:
                L = torch.linalg.cholesky(K)
                m, S = mu + L @ m, L @ S @ L.mT
            weights = torch.linalg.solve(K, k)
            assert_close(moments.mean[row, output].item(), (mu + weights @ (m - mu)).item())
            var = kernel[1] - weights @ k + weights @ S @ weights
            assert_close(moments.var[row, output].item(), var.item())
            prior = MultivariateNormal(torch.full((6,), mu), K)
            row_kl += kl_divergence(MultivariateNormal(m, S), prior).item()
        assert_close(kl[row].item(), row_kl)
    assert (kl >= 0).all()


def test_avdkl_covariances_are_lower_triangular_or_diagonal():
    for covariance in ("full", "diagonal"):
        model = build("avdkl", covariance=covariance)
        tril = model.network["amortisation"](torch.randn(5, 8)).tril
        assert tril.shape == (5, 1, 6, 6)
        assert (tril.diagonal(dim1=-2, dim2=-1) > 0).all()
        expected = (
            tril.tril()
            if covariance == "full"
            else torch.diag_embed(tril.diagonal(dim1=-2, dim2=-1))
        )
        assert_close(tril, expected)


def test_avdkl_bound_weighs_the_mean_kl_by_the_number_of_data(fitted):
    model = fitted("avdkl")
    x, y = data()
    with torch.no_grad():
        moments, kl = model.posterior(x)
        fit = model.last_layer["likelihood"].expected_log_prob(y, moments).mean()
        assert_close(model.loss(x, y, 640), -fit + kl.mean() / 640)


def test_dgp_starts_as_a_sparse_gp_on_the_inputs():
    model = build("dgp")
    x, y = data()
    model.prepare(x, y)
    model.gp.eval()
    points = model.gp.last.variational_strategy.inducing_points.detach()
    assert (torch.cdist(points, x).min(-1).values < 1e-6).all()
    with torch.no_grad():
        assert_close(model.gp.hidden(x).mean[0], x)
        assert (model.gp.hidden(points).variance < 1e-3).all()


def test_gpytorch_noise_is_learned_as_a_log_scale():
    likelihood = build("exact_gp", noise_scale=0.3).gp.likelihood
    likelihood.raw_noise.data += 1.0
    expected = (0.09 - 1e-4) * numpy.exp(2.0) + 1e-4
    assert_close(likelihood.noise.item(), expected, rtol=1e-6, atol=0)


def test_gpytorch_noise_has_a_floor():
    with pytest.raises(ValueError, match=r"above 0\.01"):
        build("exact_gp", noise_scale=0.001)


@pytest.mark.parametrize("num_rows", [10, 64])
def test_inducing_points_start_near_training_rows(num_rows):
    from models.shared.gpytorch import initial_inducing_points  # its import warns

    x, _ = data(num_rows)
    points = initial_inducing_points(x, 20)
    assert points.shape == (20, 3)
    assert len(points.unique(dim=0)) == 20
    assert torch.cdist(points, x).min(-1).values.max() < 1.0
