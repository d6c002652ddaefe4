"""The regressors of the models board: each learns, each is what it says, in one loop."""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close

import models
import pyro_dak
from models.shared.recipe import Recipe, Regressor, backbone, train
from pyro_dak import ClosedFormELBO, MeanFieldGuide, TrainingError
from pyro_dak.model.modes import evaluating
from pyro_dak.prediction.predict import Prediction

# What GPyTorch and linear_operator say of themselves, at import and in sparse interpolation.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor:UserWarning"),
]

SMALL = {
    "avdkl": {"num_inducing": 6},
    "dak_cf": {"num_units": 4, "level": 3},
    "dak_mc": {"num_units": 4, "level": 3},
    "dgp": {"num_inducing": 20},
    "exact_dkl": {},
    "exact_gp": {},
    "nn": {},
    "nn_svgp": {"num_inducing": 20},
    "svdkl": {"num_units": 4, "grid_size": 16},
}
RECIPE = Recipe(epochs=30, batch_size=32, learning_rate=0.03)
BACKBONE = (3 * 64 + 64) + (64 * 32 + 32) + (32 * 8 + 8)


def data(num_rows=64, input_dim=3, seed=0):
    """A smooth function of the inputs, with noise of standard deviation 0.1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, input_dim, generator=generator)
    f = x[:, :1].sin() + 0.5 * x[:, -1:]
    return x, f + 0.1 * torch.randn(num_rows, 1, generator=generator)


def build(name, input_dim=3, recipe=RECIPE, **options):
    small = {"feature_dim": 8, "recipe": recipe, **SMALL[name], **options}
    return models.build(name, input_dim, **small)


@pytest.fixture(scope="module")
def fitted():
    """Every model, trained when first asked for."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = build(name)
            known[name].fit(*data())
        return known[name]

    return get


def test_the_board_holds_the_models_of_the_paper():
    assert set(SMALL) <= set(models.names())


@pytest.mark.parametrize("name", SMALL)
def test_a_model_learns_and_beats_the_mean(name, fitted):
    model = fitted(name)
    x, y = data(100, seed=1)
    prediction = model.predict(x)
    assert isinstance(model, Regressor)
    assert isinstance(prediction, Prediction)
    for part in (prediction.mean, prediction.epistemic, prediction.aleatoric):
        assert part.shape == (100, 1)
        assert part.isfinite().all()
        assert not part.requires_grad
    assert (prediction.variance > 0).all()
    assert (prediction.mean - y).square().mean() < 0.5 * (y - data()[1].mean()).square().mean()
    assert -prediction.log_prob(y).mean() < 1.0
    assert len(model.epoch_seconds) == len(model.history.column("loss")) == 30
    assert model.history.column("loss")[-1] < model.history.column("loss")[0]


@pytest.mark.parametrize("name", SMALL)
def test_a_prediction_is_made_of_its_parts(name, fitted):
    x, y = data(10, seed=1)
    prediction = fitted(name).predict(x)
    assert_close(prediction.functions.mean, prediction.mean)
    assert_close(prediction.functions.var, prediction.epistemic)
    noise = prediction.likelihood.noise_scale.detach()
    assert_close(prediction.aleatoric, noise.square().expand(10, 1))
    density = torch.distributions.Normal(prediction.mean, prediction.std).log_prob(y)
    assert_close(prediction.log_prob(y), density.sum(-1))


@pytest.mark.parametrize("name", [name for name in SMALL if name != "dgp"])  # it draws per row
def test_prediction_is_row_wise(name, fitted):
    x, _ = data(10, seed=1)
    model = fitted(name)
    assert_close(model.predict(x[3:7]).mean, model.predict(x).mean[3:7])
    assert_close(model.predict(x[3:7]).variance, model.predict(x).variance[3:7])


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_result(name):
    x, y = data(40, input_dim=1)
    predictions = []
    for seed in (0, 0, 1):
        torch.randn(seed + 1)  # the global state is nobody's seed
        model = build(name, 1, replace(RECIPE, epochs=2, batch_size=20, seed=seed))
        model.fit(x, y)
        predictions.append(model.predict(x))
    first, again, other = predictions
    assert_close(first.mean, again.mean, rtol=0, atol=0)
    assert_close(first.variance, again.variance, rtol=0, atol=0)
    # An exact GP draws nothing.
    assert torch.equal(first.mean, other.mean) == (name == "exact_gp")


@pytest.mark.parametrize("name", SMALL)
def test_fixed_noise_stays(name):
    model = build(name, recipe=replace(RECIPE, epochs=1), noise_scale=0.3, learn_noise=False)
    model.fit(*data(20))
    assert_close(model.predict(data(5)[0]).aleatoric, torch.full((5, 1), 0.09))
    assert model.num_parameters == build(name).num_parameters - 1


@pytest.mark.parametrize("name", SMALL)
def test_a_model_is_fitted_once_and_to_its_shapes(name, fitted):
    with pytest.raises(RuntimeError, match="Build a fresh model"):
        fitted(name).fit(*data())
    with pytest.raises(ValueError, match="`x` must have 3 columns"):
        build(name).fit(*data(input_dim=2))
    with pytest.raises(ValueError, match=r"`y` must have shape \(N, 1\)"):
        build(name).fit(data()[0], data()[1][:, 0])


@pytest.mark.parametrize("name", ["dgp", "exact_dkl", "exact_gp", "nn_svgp", "svdkl"])
def test_what_has_one_output_says_so(name):
    with pytest.raises(NotImplementedError, match="Fit one per column"):
        build(name, num_outputs=2)


@pytest.mark.parametrize("name", ["avdkl", "dak_cf", "dak_mc", "nn"])
def test_two_outputs(name):
    x, y = data(40)
    model = build(name, num_outputs=2)
    model.fit(x, torch.cat([y, -2 * y], -1))
    prediction = model.predict(x)
    assert prediction.variance.shape == (40, 2)
    assert torch.corrcoef(prediction.mean.mT)[0, 1] < -0.8


def test_number_of_parameters_counted_by_hand():
    P, M, D_w = 4, 7, 8
    dak = 2 * P * M + D_w * P + BACKBONE + P + 2 + 1
    assert build("dak_cf").num_parameters == build("dak_mc").num_parameters == dak
    assert build("nn").num_parameters == BACKBONE + (D_w + 1) + 1
    K = 20  # locations, mean, factor; then mean, lengthscale, outputscale, noise
    assert build("nn_svgp").num_parameters == BACKBONE + K * D_w + K + K * K + 4
    assert build("exact_gp").num_parameters == 4
    assert build("exact_dkl").num_parameters == BACKBONE + 4
    K = 6
    maps = (D_w + 1) * (K * D_w + K + K * (K + 1) // 2)
    assert build("avdkl").num_parameters == BACKBONE + maps + 4
    K = 16  # per unit: embedding, q(u), mean, lengthscale, outputscale, mixing weight
    assert build("svdkl").num_parameters == BACKBONE + P * (D_w + K + K * K + 4) + 1
    K, H = 20, 3  # hidden GPs with a linear mean, then one
    hidden = H * (3 * K + K + K * K + 2 + 4)
    assert build("dgp").num_parameters == hidden + (H * K + K + K * K + 3) + 1


def test_backbone_is_that_of_the_paper():
    network = backbone(8, 256)
    assert [type(layer).__name__ for layer in network] == ["Linear", "ReLU"] * 2 + ["Linear"]
    assert [tuple(p.shape) for p in network.parameters() if p.dim() == 2] == [
        (64, 8),
        (32, 64),
        (256, 32),
    ]
    assert isinstance(backbone(8, 16, relu_output=True)[-1], nn.ReLU)


@pytest.mark.parametrize("decay_last_layer", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_the_loop_is_that_of_fit(decay_last_layer, clip_norm):
    recipe = replace(
        RECIPE,
        epochs=3,
        weight_decay=0.1,
        decay_last_layer=decay_last_layer,
        clip_norm=clip_norm,
        last_layer_learning_rate=0.01,
        seed=5,
    )
    x, y = data(50)
    reference = build("dak_cf", recipe=recipe)
    ours = build("dak_cf", recipe=recipe)
    reference.fit(x, y)
    model, guide = ours.model, ours.guide

    def loss_fn(x, y, num_data):
        return ClosedFormELBO().differentiable_loss(model, guide, x, y, num_data) / num_data

    network = nn.ModuleList([model.feature_extractor, model.embedding])
    history = train((network, nn.ModuleList([model, guide])), loss_fn, x, y, recipe)
    assert_close(history.column("loss"), reference.history.column("loss"))
    assert_close(dict(model.named_parameters()), dict(reference.model.named_parameters()))
    assert_close(dict(guide.named_parameters()), dict(reference.guide.named_parameters()))


def test_the_loop_stops_at_a_loss_that_is_not_finite():
    model = nn.Linear(3, 1)
    with pytest.raises(TrainingError, match="The loss is nan in step 1"):
        train((model, nn.Identity()), lambda x, y, n: model(x).mean() * torch.nan, *data(), RECIPE)


def test_nn_loss_is_the_mean_negative_log_likelihood():
    model = build("nn", noise_scale=0.3)
    x, y = data()
    errors = (y - model.network(x)).detach().numpy()
    expected = numpy.mean(errors**2 / (2 * 0.09) + 0.5 * numpy.log(2 * numpy.pi * 0.09))
    assert_close(model.loss(x, y, 64).item(), expected)


def test_dak_mc_prediction_approaches_the_closed_form(fitted):
    x, _ = data(50, seed=1)
    model = fitted("dak_mc")
    S = 4000
    sampled = model._sampled_moments(x, S)
    exact = pyro_dak.predict(model.model, model.guide, x, progress=False).functions
    assert ((sampled.mean - exact.mean).abs() < 5 * (exact.var / S).sqrt()).all()
    assert ((sampled.var / exact.var - 1).abs() < 5 * (2 / S) ** 0.5).all()


@pytest.mark.parametrize("name", ["dak_cf", "dak_mc"])
def test_options_reach_dak(name):
    model = build(
        name,
        recipe=replace(RECIPE, epochs=2),
        heteroscedastic=True,
        linear_term=True,
        scaling="minmax",
        relu_output=True,
        bounds=(-1.0, 1.0),
        residual_variance=True,
    )
    model.fit(*data())
    x, _ = data(20, seed=1)
    prediction = model.predict(x)
    assert prediction.functions.mean.shape == (20, 2)
    assert prediction.aleatoric.std() > 0
    with evaluating(model.model):
        residual = model.model.residual_variance(model.model.unit_inputs(x))
    model.residual_variance = False
    assert_close(prediction.epistemic - model.predict(x).epistemic, residual[:, :1])
    assert isinstance(model.guide, MeanFieldGuide)


def test_dak_mc_can_predict_in_closed_form():
    x, y = data()
    model = build("dak_mc", recipe=replace(RECIPE, epochs=1), closed_form_prediction=True)
    model.fit(x, y)
    expected = pyro_dak.predict(model.model, model.guide, x, progress=False)
    assert_close(model.predict(x).variance, expected.variance)


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
    mixing = model.gps.variational_strategy
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
    mixing = model.gps.variational_strategy
    grid = mixing.base_variational_strategy
    kernel = model.gps.covar_module(grid.inducing_points).to_dense().detach()
    prior = MultivariateNormal(
        model.gps.mean_module.constant.detach().unsqueeze(-1).expand(4, 16),
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
    from models.shared.gpytorch import initial_inducing_points

    x, _ = data(num_rows)
    points = initial_inducing_points(x, 20)
    assert points.shape == (20, 3)
    assert len(points.unique(dim=0)) == 20
    assert torch.cdist(points, x).min(-1).values.max() < 1.0
