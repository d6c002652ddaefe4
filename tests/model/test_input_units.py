import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    ClosedFormELBO,
    GaussianLikelihood,
    LaplaceKernel,
    MeanFieldGuide,
    NaturalGuide,
    NormalPrior,
    exact_posterior,
    fit,
    load,
    predict,
    save,
)
from pyro_dak.prediction import freeze
from tests import reference, scenarios

embeddings = pytest.mark.parametrize("embedding", [True, False])


def case_with_input_units(embedding=True, **options):
    """Two inputs, four features, and as many units of the network as `embedding` says."""
    num_units = 3 if embedding else 4
    options = {"num_units": num_units, "input_units": True, "linear_term": True} | options
    return scenarios.make("gaussian", embedding=embedding, **options)


class Beside(nn.Module):
    """A network that returns its input after its features."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return torch.cat([self.network(x), x], -1)


def naive(model):
    """The same model, built from a network that returns its input too, and an embedding of both."""
    other = DAK(
        Beside(model.feature_extractor),
        feature_dim=model.feature_dim + 2,
        num_units=model.num_units,
        num_outputs=model.num_outputs,
        level=model.layer.activation.grid.level,
        likelihood=model.likelihood,
        embedding=model.embedding is not None,
        linear_term=True,
    )
    other.scaling, other.layer = model.scaling, model.layer
    if model.embedding is not None:
        weight = torch.block_diag(model.embedding.weight.detach(), torch.eye(2))
        other.embedding.weight = nn.Parameter(weight)
    return other.train(model.training)


# The units


@embeddings
def test_units_are_those_of_the_network_and_then_the_inputs(embedding):
    case = case_with_input_units(embedding)
    num_network_units = case.model.num_units - 2
    assert case.model.site_shapes["z"][1] == case.model.num_units
    features = case.model.feature_extractor(case.x)
    W = torch.eye(4) if case.model.embedding is None else case.model.embedding.weight
    assert W.shape == (num_network_units, 4)
    units = torch.cat([features @ W.mT, case.x], -1)
    mean, std = units.mean(0), units.std(0, correction=0)
    assert_close(case.h, 0.5 + (units - mean) / std / 6)  # the data fill three deviations each way


def test_the_scales_start_so_that_f_has_unit_prior_variance():
    model = DAK(nn.Linear(3, 4), feature_dim=4, num_units=5, input_units=True)
    assert_close(model.unit_scale, torch.full((8,), 8**-0.5))


@pytest.mark.parametrize("input_units", [False, 0])
def test_a_model_without_input_units_has_the_units_of_its_network(input_units):
    model = DAK(nn.Linear(3, 4), feature_dim=4, num_units=5, input_units=input_units)
    assert (model.num_units, model.num_input_units) == (5, 0)


def test_a_number_says_what_true_finds_in_the_network():
    network = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Dropout(), nn.Linear(3, 4)), nn.ReLU())
    assert DAK(network, 4, input_units=True).num_input_units == 3
    assert DAK(nn.Identity(), 3, input_units=3).num_input_units == 3


@embeddings
@pytest.mark.parametrize("is_training", [True, False])
def test_model_equals_one_on_a_network_that_returns_its_input(embedding, is_training):
    case = case_with_input_units(embedding)
    other = naive(case.model.train(is_training))
    sites = {name: torch.randn(shape) for name, shape in case.model.site_shapes.items()}
    h = case.model.unit_inputs(case.x)
    assert_close(h, other.unit_inputs(case.x))
    assert_close(case.model.functions(h, sites), other.functions(h, sites))
    ours, theirs = (case.guide.moments(m.layer, m.unit_inputs(case.x)) for m in (case.model, other))
    assert_close(ours, theirs)
    ours, theirs = (
        ClosedFormELBO().terms(m, case.guide, case.x, case.y, num_data=20)
        for m in (case.model, other)
    )
    assert_close(ours, theirs)
    shared = [*case.guide.parameters(), *case.model.feature_extractor.parameters()]
    shared.append(case.model.layer.log_unit_scale)
    ours, theirs = (
        torch.autograd.grad(terms.elbo, shared, retain_graph=True) for terms in (ours, theirs)
    )
    assert_close(ours, theirs)


def test_the_embedding_has_the_gradient_of_its_block_in_the_naive_model():
    case = case_with_input_units()
    model, other = case.model.train(), naive(case.model)
    for m in (model, other):
        ClosedFormELBO()(m, case.guide)(case.x, case.y).backward()
    assert_close(model.embedding.weight.grad, other.embedding.weight.grad[:3, :4])


# Training, files, prediction


def trained(guide="mean_field", **options):
    """Model and guide after three epochs, as state dictionaries."""
    case = case_with_input_units(guide=guide)
    case.model.feature_extractor.requires_grad_(False)
    fit(case.model, case.guide, (case.x, case.y), epochs=3, seed=1, progress=False, **options)
    return case.model.state_dict(), case.guide.state_dict()


@pytest.mark.parametrize(
    "options",
    [{"objective": "closed_form"}, {"objective": "trace"}, {"guide": "natural_joint"}],
    ids=lambda options: "".join(options.values()),
)
def test_fixed_features_train_as_a_network_that_is_held_fixed(options):
    expected = trained(**options)
    torch.manual_seed(0)
    assert_close(trained(**options, fixed_features=True), expected)


# Without the type checker, which cannot be compiled.
COMPILED = """
import warnings
import torch
from torch.testing import assert_close
from tests.model.test_input_units import trained

warnings.simplefilter("error", UserWarning)  # that compiling has failed
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
expected = trained()
torch.manual_seed(0)
assert_close(trained(compile=True), expected)
"""


@pytest.mark.slow
@scenarios.compiles_training
def test_compiled_training_is_plain_training():
    scenarios.run_alone(COMPILED)


def test_columns_in_units_of_their_own_are_not_called_dead():
    case = case_with_input_units()
    x = case.x * torch.tensor([1e7, 1e-3])  # a warning would be an error
    fit(case.model, case.guide, (x, case.y), epochs=1, seed=1, progress=False)


def test_a_constant_column_is_called_dead():
    model = DAK(nn.Linear(2, 4), 4, num_units=3, input_units=True)
    x = torch.cat([torch.randn(20, 1), torch.full((20, 1), 0.1)], -1)
    with pytest.warns(UserWarning, match=r"1 of 5 units are dead.*\(units \[4\]\)"):
        fit(model, MeanFieldGuide(model), (x, x[:, :1]), epochs=1, progress=False)


@pytest.mark.parametrize("guide_fn", [MeanFieldGuide, NaturalGuide, AutoNormal])
def test_a_saved_model_predicts_the_same(guide_fn, tmp_path):
    case = case_with_input_units()
    guide = guide_fn(case.model)
    guide(case.x, case.y)
    save(case.model, guide, tmp_path / "model")
    model, loaded_guide = load(tmp_path / "model")
    assert (model.num_units, model.num_input_units) == (5, 2)
    options = {"residual_variance": True, "seed": 0}
    expected = predict(case.model, guide, case.x, **options)
    assert_close(predict(model, loaded_guide, case.x, **options).variance, expected.variance)


def test_mixed_precision_leaves_the_inputs_as_they_are():
    case = case_with_input_units()
    model, x = case.model.float(), case.x.float()
    with torch.autocast("cpu", torch.bfloat16):
        h = model.unit_inputs(x)
    assert h.dtype == torch.float32
    assert_close(h[:, 3:], model.unit_inputs(x)[:, 3:], rtol=0, atol=0)


def test_predictions_are_those_of_single_rows():
    case = case_with_input_units()
    whole = predict(case.model, case.guide, case.x, residual_variance=True)
    rows = [predict(case.model, case.guide, row, residual_variance=True) for row in case.x.split(1)]
    assert_close(whole.mean, torch.cat([row.mean for row in rows]))
    assert_close(whole.variance, torch.cat([row.variance for row in rows]))


@pytest.mark.parametrize("linear_term", [True, False])
@embeddings
def test_frozen_moments_are_the_plain_ones(embedding, linear_term):
    case = case_with_input_units(embedding, linear_term=linear_term, level=4)
    x = 5 * torch.randn(3000, 2)
    with torch.no_grad():
        expected = case.guide.moments(case.model.layer, case.model.unit_inputs(x))
    moments = freeze(case.model, case.guide, num_rows=3000)(x)
    assert_close(moments[:2], expected[:2])


# Far from the data


def test_far_away_the_input_units_have_their_prior_variance_whatever_the_network_does():
    case = case_with_input_units(linear_term=False)
    far = 1e6 * torch.tensor([[1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]])  # where tanh is at its ends
    with torch.no_grad():
        sigma, h = case.model.unit_scale, case.model.unit_inputs(far)
        assert_close(case.model.layer.unit_residuals(h)[:, 3:], sigma[3:].square().expand(3, 2))
        q = predict(case.model, case.guide, far, residual_variance=True)
        # The share of the network: what q says of its units and the bias, and what the grid loses.
        phi = case.model.layer.activation.features(h[:, :3])  # (N, 3, M)
        var = torch.einsum("npm,cpm,p->nc", phi**2, case.guide.z_scale[:, :3] ** 2, sigma[:3] ** 2)
        lost = case.model.layer.unit_residuals(h)[:, :3].sum(-1, keepdim=True)
        of_network = var + (2 * case.guide.mu_log_scale).exp() + lost
    assert_close(q.epistemic, of_network + sigma[3:].square().sum())


def test_at_the_prior_the_variance_of_f_is_that_of_the_prior_everywhere():
    case = case_with_input_units(linear_term=False)
    guide = NaturalGuide(case.model)  # which starts at the prior
    x = torch.cat([case.x, 1e3 * case.x])
    prior = 1 + case.model.unit_scale.square().sum().detach()  # 1 is that of the bias
    q = predict(case.model, guide, x, residual_variance=True)
    assert_close(q.epistemic, prior.expand(16, 2))


@pytest.mark.parametrize("input_dim", [1, 3])
def test_with_a_network_that_sees_nothing_it_is_the_additive_gp_of_the_inputs(input_dim):
    cells = torch.stack([torch.randperm(1024)[:65] for _ in range(input_dim)], -1)
    inputs = (cells + torch.rand(65, input_dim)) / 1024  # each between two nodes of its own
    x, x_new = inputs[:40], torch.cat([inputs[40:], inputs[40:] + 9])  # and far away
    y = torch.sin(6 * x).sum(-1) + 0.1 * torch.randn(40)
    network = nn.Linear(input_dim, 1)
    nn.init.zeros_(network.weight)
    nn.init.constant_(network.bias, 0.5)  # a node of the grid
    model = DAK(
        network,
        feature_dim=1,
        num_units=1,
        level=10,
        kernel=LaplaceKernel(0.2),
        likelihood=GaussianLikelihood(0.1),
        scaling="none",
        embedding=False,
        prior={"mu": NormalPrior(scale=1.5)},
        input_units=True,
    ).eval()
    guide = exact_posterior(model, x, y, residual_variance=True).guide
    q = predict(model, guide, x_new, residual_variance=True)
    sigma = model.unit_scale.detach()
    constant = float((1.5**2 + sigma[0] ** 2).sqrt())  # one unit of the network adds to the bias
    mean, var = reference.additive_gp_posterior(x, y, x_new, 0.2, sigma[1:], constant, 0.1)
    assert_close(q.mean.squeeze(-1), mean, rtol=1e-8, atol=1e-8)
    assert_close(q.epistemic.squeeze(-1), var, rtol=1e-8, atol=1e-8)


# Errors


@pytest.mark.parametrize(
    ("network", "input_units", "kind", "message"),
    [
        (nn.Identity(), True, ValueError, "first layer is linear.*Set `input_units` to that"),
        (nn.Conv2d(1, 4, 3), True, ValueError, "first layer is linear"),
        (nn.LazyLinear(4), True, ValueError, "first layer is linear"),
        (nn.Linear(65, 4), True, ValueError, "of few dimensions, at most 64; got 65"),
        (nn.Linear(3, 4), 65, ValueError, "of few dimensions, at most 64; got 65"),
        (nn.Linear(3, 4), -1, ValueError, "`input_units` must be at least 0; got -1"),
    ],
)
def test_wrong_numbers_of_input_units_are_named(network, input_units, kind, message):
    with pytest.raises(kind, match=message):
        DAK(network, 4, input_units=input_units)


@pytest.mark.usefixtures("no_type_checker")
def test_input_units_of_another_kind_are_named():
    with pytest.raises(TypeError, match="`input_units` must be an integer; got 'x'"):
        DAK(nn.Linear(3, 4), 4, input_units="x")


@pytest.mark.parametrize("shape", [(8, 4), (8, 2, 2)])
def test_inputs_that_are_not_one_column_per_input_unit_are_named(shape):
    model = DAK(nn.Flatten(), 4, num_units=2, input_units=3)
    with pytest.raises(ValueError, match=r"`x` must have shape \(N, 3\), a column for each input"):
        model(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"`x` must have shape \(N, 3\), a column for each input"):
        fit(model, MeanFieldGuide(model), (torch.randn(shape), torch.randn(8, 1)), progress=False)


@pytest.mark.parametrize("num_columns", [4, 7])
def test_features_of_another_width_are_named(num_columns):
    model = DAK(nn.Linear(2, 4), 4, num_units=2, input_units=True)
    message = r"shape \(N, feature_dim=4 \+ 2 inputs\); got \(8, " + str(num_columns)
    with pytest.raises(ValueError, match=message):
        model.embed(torch.zeros(8, num_columns))
    with pytest.raises(ValueError, match=r"return shape \(N, feature_dim=4\); got \(8, 5\)"):
        DAK(nn.Linear(2, 5), 4, num_units=2, input_units=True)(torch.zeros(8, 2))


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_residual_covariance_completes_the_covariance_of_the_additive_process(num_outputs):
    prior = {"z": NormalPrior(0.0, 1.5)}
    case = scenarios.make(num_outputs=num_outputs, num_units=3, level=3, prior=prior)
    h, model = case.h, case.model
    kernel = model.layer.activation.kernel
    expected = torch.zeros(len(h), len(h))
    for unit in range(3):
        distance = (h[:, unit, None] - h[None, :, unit]).abs()
        expected += model.unit_scale[unit] ** 2 * 1.5**2 * kernel.of_distance(distance)
    design = model.layer.design(h)[:, 1:]
    total = 1.5**2 * design @ design.mT + model.residual_covariance(h)
    assert_close(total, expected.expand(num_outputs, -1, -1))
