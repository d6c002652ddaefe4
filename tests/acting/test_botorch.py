"""The surrogate for BoTorch: against brute force, the exact posterior, and BoTorch's functions."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import DAK, GaussianLikelihood, LaplaceKernel, MaternKernel, NaturalGuide, fit
from pyro_dak.inference.exact import exact_posterior
from tests import scenarios

pytest.importorskip("botorch")
from botorch.acquisition import (
    PosteriorMean,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qNoisyExpectedImprovement,
)
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.warnings import InputDataWarning
from botorch.generation.gen import gen_candidates_scipy
from botorch.models.deterministic import GenericDeterministicModel
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler

from pyro_dak.botorch import DAKModel

CUBE = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
# What BoTorch says of its own functions.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::botorch.exceptions.warnings.{name}")
    for name in ("OptimizationWarning", "NumericsWarning")
]


def data(num_rows=12, num_outputs=1):
    x = torch.rand(num_rows, 2)
    columns = [torch.sin(6 * x[:, 0]) + (i + 1) * x[:, 1].square() for i in range(num_outputs)]
    return x, torch.stack(columns, -1)


def surrogate(num_outputs=1, num_rows=12, **options):
    options = {"num_directions": 3, "max_steps": 5} | options
    return DAKModel(*data(num_rows, num_outputs), **options)


def laplace_model(num_outputs=1):
    """A network with a grid so coarse that much is lost between the nodes."""
    model = DAK(
        nn.Sequential(nn.Linear(2, 3), nn.Tanh()),
        3,
        num_units=2,
        num_outputs=num_outputs,
        level=2,
        kernel=LaplaceKernel(0.5),
        likelihood=GaussianLikelihood(0.3),
        input_units=2,
        scaling="none",
        bounds=(-0.5, 1.0),
    )
    return model.eval()


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_posterior_is_that_of_draws_of_the_weights(num_outputs):
    """The covariance of Phi w over w ~ N(m, S) is Phi S Phi^T; the lost part is added."""
    model = laplace_model(num_outputs)
    x, y = data(9, num_outputs)
    exact = exact_posterior(model, x, y)
    surrogate = DAKModel.of(model, exact)
    X = torch.rand(3, 4, 2)
    posterior = surrogate.posterior(X)
    S = exact.guide.scale_tril @ exact.guide.scale_tril.mT  # (m, K, K)
    for b in range(3):
        h = model.unit_inputs(X[b])
        design = model.layer.design(h)
        assert_close(posterior.mean[b], design @ exact.guide.loc.mT, rtol=1e-9, atol=1e-9)
        kernel = model.layer.activation.kernel
        for c in range(num_outputs):
            own = design @ S[c] @ design.mT
            for p in range(model.num_units):
                distance = (h[:, p, None] - h[None, :, p]).abs()
                phi = model.layer.activation(h[:, p : p + 1])[:, 0]
                lost = kernel.of_distance(distance) - phi @ phi.mT
                own = own + model.unit_scale[p] ** 2 * lost
            got = posterior.distribution.covariance_matrix[b]
            block = slice(4 * c, 4 * c + 4)  # one output after the other
            got = got[block, block]
            assert_close(got, own, rtol=1e-6, atol=1e-9)


def test_without_data_the_joint_posterior_is_the_additive_process():
    model = laplace_model()
    prior = NaturalGuide(model)
    X = torch.rand(7, 2)
    covariance = DAKModel.of(model, prior).posterior(X).distribution.covariance_matrix
    h, kernel = model.unit_inputs(X), model.layer.activation.kernel
    expected = torch.ones(7, 7)  # of the bias
    for p in range(model.num_units):
        distance = (h[:, p, None] - h[None, :, p]).abs()
        expected = expected + model.unit_scale[p] ** 2 * kernel.of_distance(distance)
    assert_close(covariance, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["default", "laplace", "matern"])
@pytest.mark.parametrize("residual_variance", [True, False])
def test_conditioning_equals_the_exact_posterior_of_all_rows(kind, residual_variance):
    x, y = data(14, 2)
    options = {"outcome_transform": None, "residual_variance": residual_variance}
    if kind == "laplace":
        options |= {"model": laplace_model(2)}
    elif kind == "matern":
        options |= {"kernel": MaternKernel()}
    first = DAKModel(x[:8], y[:8], max_steps=4, **options)
    both = first.condition_on_observations(x[8:11], y[8:11]).condition_on_observations(
        x[11:], y[11:]
    )
    whole = exact_posterior(first.dak, x, y, residual_variance=residual_variance)
    expected = DAKModel.of(first.dak, whole, residual_variance=residual_variance)
    X = torch.rand(2, 3, 2)
    for value, truth in zip(parts(both, X), parts(expected, X), strict=True):
        assert (value - truth).norm() < 1e-6 * truth.norm()
    assert_close(
        first.log_evidence,
        exact_posterior(first.dak, x[:8], y[:8], residual_variance=residual_variance).log_evidence,
    )


def parts(surrogate, X, **options):
    posterior = surrogate.posterior(X, **options)
    return posterior.mean, posterior.distribution.covariance_matrix


def test_a_batch_of_data_is_conditioned_as_each_of_it_alone():
    first = surrogate()
    X, Y = torch.rand(3, 2, 2), torch.randn(5, 3, 2, 1)
    batch = first.condition_on_observations(X, Y)
    assert batch.batch_shape == (5, 3)
    test = torch.rand(4, 2)
    mean, covariance = parts(batch, test)
    for i in range(5):
        for j in range(3):
            alone = parts(first.condition_on_observations(X[j], Y[i, j]), test)
            assert_close(mean[i, j], alone[0], rtol=1e-6, atol=1e-8)
            assert_close(covariance[i, j], alone[1], rtol=1e-6, atol=1e-8)


def test_noise_of_new_rows_can_be_given():
    first = surrogate(outcome_transform=None)
    X, Y = torch.rand(2, 2), torch.randn(2, 1)
    own = first.noise_var.expand(2, 1)
    same = first.condition_on_observations(X, Y, noise=own)
    assert_close(parts(same, CUBE), parts(first.condition_on_observations(X, Y), CUBE))
    useless = first.condition_on_observations(X, Y, noise=torch.full((2, 1), 1e12))
    assert_close(parts(useless, CUBE), parts(first, CUBE), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["default", "laplace"])
def test_mean_and_covariance_have_the_right_gradients(kind):
    options = {"model": laplace_model()} if kind == "laplace" else {"kernel": MaternKernel()}
    first = DAKModel(*data(), max_steps=3, **options)
    X = torch.rand(2, 3, 2, requires_grad=True)
    assert torch.autograd.gradcheck(lambda X: parts(first, X), X)
    test = torch.rand(2, 2)

    def after(X):
        return parts(first.condition_on_observations(X, X.sum(-1, keepdim=True)), test)

    assert torch.autograd.gradcheck(after, X)


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_transforms_change_units_and_nothing_else(num_outputs):
    x, y = data(10, num_outputs)
    bounds = torch.tensor([[-3.0, 0.0], [5.0, 10.0]])
    wide = bounds[0] + (bounds[1] - bounds[0]) * x
    # Few steps: many would carry rounding in the inputs into the parameters.
    options = {"num_directions": 3, "max_steps": 10}
    plain = DAKModel(x, (y - y.mean(0)) / y.std(0), outcome_transform=None, **options)
    scaled = DAKModel(wide, y, input_transform=Normalize(2, bounds=bounds), **options)
    test, new = torch.rand(3, 2), torch.randn(3, num_outputs)
    wide_test = bounds[0] + (bounds[1] - bounds[0]) * test
    for noise in (False, True):
        one = plain.posterior(test, observation_noise=noise)
        two = scaled.posterior(wide_test, observation_noise=noise)
        assert_close(two.mean, y.mean(0) + y.std(0) * one.mean, rtol=1e-5, atol=1e-6)
        assert_close(two.variance, y.var(0) * one.variance, rtol=1e-5, atol=1e-6)
    one = plain.condition_on_observations(test, new).posterior(CUBE)
    two = scaled.condition_on_observations(wide_test, y.mean(0) + y.std(0) * new).posterior(bounds)
    assert_close(two.mean, y.mean(0) + y.std(0) * one.mean, rtol=1e-5, atol=1e-6)


def test_observation_noise_is_added_to_the_diagonal():
    first, X = surrogate(2, outcome_transform=None), torch.rand(3, 2, 2)
    variance = first.posterior(X).variance
    assert_close(first.posterior(X, observation_noise=True).variance, variance + first.noise_var)
    given = torch.rand(3, 2, 2)
    assert_close(first.posterior(X, observation_noise=given).variance, variance + given)


def test_outputs_can_be_chosen():
    first, X = surrogate(3), torch.rand(2, 2, 2)
    whole = first.posterior(X)
    for posterior in (
        first.posterior(X, output_indices=[2, 0]),
        first.subset_output([2, 0]).posterior(X),
        first.subset_output([0, 2]).subset_output([1, 0]).posterior(X),
    ):
        assert_close(posterior.mean, whole.mean[..., [2, 0]])
        assert_close(posterior.variance, whole.variance[..., [2, 0]])
    assert first.subset_output([1]).num_outputs == 1
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, 2.0, -1.0]))
    scalar = first.posterior(X, posterior_transform=transform)
    assert_close(scalar.mean[..., 0], whole.mean @ transform.weights)
    conditioned = first.subset_output([1]).condition_on_observations(X[0], whole.mean[0, :, 1:2])
    assert_close(conditioned.posterior(X[0]).mean, whole.mean[0, :, 1:2], rtol=1e-4, atol=1e-4)


def test_fantasies_of_the_mean_leave_the_mean_and_lower_the_variance():
    first, X = surrogate(), torch.rand(3, 2, 2)
    sampler = SobolQMCNormalSampler(torch.Size([512]), seed=0)
    fantasy = first.fantasize(X, sampler)
    assert fantasy.batch_shape == (512, 3)
    after, before = fantasy.posterior(X), first.posterior(X)
    assert_close(after.mean.mean(0), before.mean, rtol=2e-2, atol=2e-2)
    assert bool((after.variance[0] < before.variance).all())
    total = after.variance[0] + after.mean.var(0)  # law of total variance
    assert_close(total, before.variance, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_acquisition_functions_of_botorch_find_candidates(num_outputs):
    first = surrogate(num_outputs)
    transform = None
    if num_outputs > 1:
        transform = ScalarizedPosteriorTransform(torch.ones(num_outputs))
    options = {"sampler": SobolQMCNormalSampler(torch.Size([16]), seed=0)}
    options["posterior_transform"] = transform
    functions = [
        (qLogExpectedImprovement(first, 0.5, **options), 2),
        (qNoisyExpectedImprovement(first, data()[0], **options), 2),
        (qKnowledgeGradient(first, 4, posterior_transform=transform), 1),
        (PosteriorMean(first, posterior_transform=transform), 1),
    ]
    for function, q in functions:
        candidates, value = optimize_acqf(
            function,
            CUBE,
            q,
            num_restarts=2,
            raw_samples=8,
            gen_candidates=gen_candidates_scipy,
            options={"maxiter": 5},
        )
        assert candidates.shape == (q, 2)
        assert math.isfinite(float(value))


def test_thompson_draws_are_functions_with_gradients():
    first = surrogate(2, residual_variance=False)
    draws = first.sample_functions(4000)
    X = torch.rand(3, 2, 2)
    values = draws(X)
    assert values.shape == (4000, 3, 2, 2)
    truth = first.posterior(X)
    error = truth.variance.sqrt() / 4000**0.5
    assert bool(((values.mean(0) - truth.mean).abs() < 4.5 * error).all())
    one = first.sample_functions(1)
    assert torch.autograd.gradcheck(lambda X: one(X), X.requires_grad_())
    path = GenericDeterministicModel(lambda X: one(X)[0, ..., :1])
    best, _ = optimize_acqf(PosteriorMean(path), CUBE, 1, num_restarts=2, raw_samples=16)
    grid = torch.rand(500, 2)
    assert float(one(best)[0, 0, 0]) >= float(one(grid)[0, :, 0].max()) - 1e-3


def test_a_thousand_updates_equal_one_batch():
    x, y = torch.rand(1008, 2), torch.randn(1008, 1)
    model = laplace_model()
    one = first = DAKModel(x[:8], y[:8], model=model, max_steps=0, outcome_transform=None)
    for row in range(8, 1008):
        one = one.condition_on_observations(x[row : row + 1], y[row : row + 1])
    whole = DAKModel.of(model, exact_posterior(model, x, y, residual_variance=True))
    X = torch.rand(5, 2)
    for value, truth in zip(parts(one, X), parts(whole, X), strict=True):
        assert (value - truth).norm() < 1e-6 * truth.norm()
    assert sum(t.numel() for t in vars(one.weights).values()) < 2 * first.weights.loc.numel() ** 2


def test_the_fit_raises_the_evidence_and_can_start_from_another():
    x, y = data(16)
    untrained = DAKModel(x, y, max_steps=0)
    trained = DAKModel(x, y)
    assert trained.log_evidence > untrained.log_evidence + 1
    again = DAKModel(x, y, start=trained, max_steps=0)
    assert_close(parts(again, CUBE), parts(trained, CUBE))


def test_a_model_that_fit_has_trained_is_a_surrogate():
    case = scenarios.make(num_outputs=1, num_rows=40, input_units=2)
    guide = NaturalGuide(case.model)
    fit(case.model, guide, (case.x, case.y), epochs=2, progress=False)
    surrogate = DAKModel.of(case.model, guide, residual_variance=False)
    q = guide.moments(case.model.layer, case.h)
    assert_close(surrogate.posterior(case.x).mean, q.mean)
    assert_close(surrogate.posterior(case.x).variance, q.var)


def test_the_likelihood_has_the_noise_of_the_model():
    for num_outputs in (1, 3):
        first = surrogate(num_outputs)
        assert_close(first.likelihood.noise.flatten(), first.noise_var)


def test_wrong_data_are_refused():
    x, y = data()
    with pytest.raises(ValueError, match=r"`train_Y` must have shape \(n, m\)"):
        DAKModel(x, y[:, 0])
    with pytest.raises(ValueError, match="one row each per evaluation"):
        DAKModel(x, y[:3])
    with pytest.raises(ValueError, match="train_Y"):
        DAKModel(x, y * math.nan)
    first = surrogate()
    with pytest.raises(ValueError, match="same columns, outputs and units"):
        DAKModel(x, y, start=first, num_directions=4)
    with pytest.raises(ValueError, match=r"`X` must have shape \(..., q, 2\)"):
        first.posterior(torch.rand(3, 3))
    with pytest.raises(ValueError, match=r"`Y` must have shape \(..., 3, 1\)"):
        first.condition_on_observations(torch.rand(3, 2), torch.rand(3))
    with pytest.raises(TypeError, match="have nothing to say"):
        DAKModel(x, y, model=laplace_model(), num_directions=3)
    case = scenarios.make(num_outputs=1)
    with pytest.raises(NotImplementedError, match="joint covariance"):
        DAKModel.of(case.model, case.guide)
    with pytest.raises(TypeError, match="outcome_transform"):
        DAKModel(x, y, outcome_transform="log")
    with pytest.warns(InputDataWarning, match="unit cube"):
        DAKModel(10 * x, y, max_steps=1)


def test_standardize_is_the_default_and_can_be_left_out():
    assert isinstance(surrogate().outcome_transform, Standardize)
    assert not hasattr(surrogate(outcome_transform=None), "outcome_transform")


def test_the_surrogate_moves_to_another_precision():
    first = surrogate()
    single = DAKModel.of(first.dak, exact_posterior(first.dak, *data()))
    single.float()
    assert single.posterior(torch.rand(2, 2, dtype=torch.float32)).mean.dtype == torch.float32


def test_the_state_has_the_posterior_in_it(tmp_path):
    x, y = data()
    source = surrogate().condition_on_observations(x[:3] / 2, y[:3])
    torch.save(source.state_dict(), tmp_path / "state.pt")
    other = DAKModel(x + 0.001, -y, num_directions=3, max_steps=0)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    X = torch.rand(4, 2)
    expected, found = source.posterior(X), other.posterior(X)
    assert_close(found.mean, expected.mean)
    assert_close(found.distribution.covariance_matrix, expected.distribution.covariance_matrix)
    assert other.log_evidence == source.log_evidence
    before = source.weights.loc.clone()
    other.weights.loc.add_(1.0)  # a copy, so that the source stays as it is
    assert_close(source.weights.loc, before)


def test_the_state_of_another_kind_of_model_is_refused():
    model, said = surrogate(), r"\(outputs, weights\) \(1, 76\); got means of shape"
    for other in (surrogate(2), DAKModel(*data(), num_directions=4, max_steps=0)):
        with pytest.raises(ValueError, match=said):
            model.load_state_dict(other.state_dict())
    state = model.state_dict()
    del state["_extra_state"]
    with pytest.raises(RuntimeError, match=r"Missing key.*_extra_state"):
        model.load_state_dict(state)
