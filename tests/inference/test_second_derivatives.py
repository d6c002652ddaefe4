"""Second derivatives, Jacobians and vmap: with `route="dense"`, and elsewhere where they can."""

import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoLaplaceApproximation, init_to_value
from pyro.optim import Adam
from torch import nn
from torch.func import functional_call, hessian, jacrev, vmap
from torch.testing import assert_close

from pyro_dak import DAK, ClosedFormELBO, GaussianLikelihood, LaplaceKernel, exact_posterior
from pyro_dak.inference.guides.joint import FullRankGuide
from tests import scenarios

ROUTES = ["auto", "dense", "local"]
KERNELS = {"number": LaplaceKernel(0.5), "learned": LaplaceKernel((0.5, 0.9), learn=True)}
routes = pytest.mark.parametrize("route", ROUTES)
kernels = pytest.mark.parametrize("kernel", KERNELS)
# Of torch's own modules, which it imports at the first use of forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


def case_of(route, kernel="number", **options):
    options = {"num_outputs": 1, "level": 3} | options
    return scenarios.gaussian_regression(route=route, kernel=KERNELS[kernel], **options)


def sites_of(case):
    shapes = case.model.site_shapes
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def differences(fn, at, step=1e-6):
    """The Jacobian of `fn` at a tensor, by central differences, `(*output, *at)`."""
    columns = []
    for unit in torch.eye(at.numel()).view(-1, *at.shape):
        columns.append((fn(at + step * unit) - fn(at - step * unit)) / (2 * step))
    return torch.stack(columns, -1).unflatten(-1, at.shape)


@kernels
@routes
@pytest.mark.parametrize("level", [3, 8])
def test_hessian_by_inputs_is_the_difference_of_slopes(route, kernel, level):
    case = case_of(route, kernel, level=level)
    sites, h = sites_of(case), case.h[:2].detach()

    def total(h):
        return case.model.functions(h, sites).square().sum()

    assert_close(hessian(total)(h), differences(jacrev(total), h), rtol=1e-5, atol=1e-5)


@kernels
@routes
def test_jacobian_of_moments_by_inputs_is_the_difference_of_moments(route, kernel):
    case = case_of(route, kernel)
    h = case.h[:3].detach()

    def moments(h):
        return torch.stack(case.guide.moments(case.model.layer, h)[:2])

    def total(h):
        return moments(h).square().sum()

    assert_close(jacrev(moments)(h), differences(moments, h), rtol=1e-6, atol=1e-6)
    assert_close(hessian(total)(h), differences(jacrev(total), h), rtol=1e-5, atol=1e-5)


@kernels
@routes
def test_vmap_over_draws_and_over_rows_is_the_loop(route, kernel):
    case = case_of(route, kernel)
    model, x = case.model, case.x
    z, mu = torch.randn(5, 1, 2, 7), torch.randn(5, 1)
    f = vmap(lambda z, mu: model.functions(case.h, {"z": z, "mu": mu}))(z, mu)
    loop = [model.functions(case.h, {"z": z[s], "mu": mu[s]}) for s in range(5)]
    assert_close(f, torch.stack(loop))
    one = {"z": z[0], "mu": mu[0]}
    rows = vmap(lambda row: model.functions(model.unit_inputs(row.unsqueeze(0)), one))(x)
    assert_close(rows.squeeze(1), loop[0])


class _Bound(nn.Module):
    """Minus the ELBO as a function of the parameters of model and guide."""

    def __init__(self, case):
        super().__init__()
        self.model, self.guide, self.data = case.model, case.guide, (case.x, case.y)

    def forward(self):
        return ClosedFormELBO().differentiable_loss(self.model, self.guide, *self.data)


@routes
@pytest.mark.parametrize("name", ["guide.z_loc", "model.layer.activation.log_lengthscale"])
def test_hessian_of_the_bound_is_the_difference_of_slopes(route, name):
    bound = _Bound(case_of(route, "learned"))
    bound()  # looks for latent sites, once, which samples

    def loss(value):
        return functional_call(bound, {name: value}, ())

    at = dict(bound.named_parameters())[name].detach()
    assert_close(hessian(loss)(at), differences(jacrev(loss), at), rtol=1e-5, atol=1e-5)


@kernels
def test_second_derivatives_by_autograd_are_right_with_the_dense_route(kernel):
    case = case_of("dense", kernel)
    z_loc = case.guide.z_loc
    bound = _Bound(case)
    (slope,) = torch.autograd.grad(bound(), z_loc, create_graph=True)
    direction = torch.randn_like(z_loc)
    (found,) = torch.autograd.grad((slope * direction).sum(), z_loc)
    full = hessian(lambda value: functional_call(bound, {"guide.z_loc": value}, ()))(z_loc.detach())
    assert_close(found, torch.einsum("abcdef,def->abc", full, direction))


@pytest.mark.parametrize("route", ["auto", "local"])
@kernels
def test_second_derivatives_by_autograd_of_local_moments_name_the_option(route, kernel):
    case = case_of(route, kernel)
    with pytest.raises(NotImplementedError, match=r'`DAK\(\.\.\., route="dense"\)`'):
        torch.autograd.grad(_Bound(case)(), case.guide.z_loc, create_graph=True)


@routes
def test_laplace_approximation_of_a_gaussian_likelihood_is_the_exact_posterior(route):
    likelihood = GaussianLikelihood(0.5, learn=False)
    model = DAK(
        nn.Identity(), 2, 2, level=2, scaling="none", embedding=False, route=route,
        likelihood=likelihood, kernel=LaplaceKernel((0.5, 0.9)),
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x, y = torch.rand(20, 2), torch.randn(20, 1)
    exact = exact_posterior(model, x, y).guide
    means = {name: exact.weight_means()._asdict()[name].detach() for name in ("mu", "z")}
    guide = AutoLaplaceApproximation(model, init_loc_fn=init_to_value(values=means))
    SVI(model, guide, Adam({"lr": 1e-12}), Trace_ELBO()).step(x, y)
    found = guide.laplace_approximation(x, y).get_posterior()
    order = _order(guide, exact)
    assert_close(found.mean, exact.loc[0, order].detach(), rtol=0, atol=1e-9)
    expected = (exact.scale_tril @ exact.scale_tril.mT)[0][order][:, order]
    assert_close(found.covariance_matrix, expected.detach(), rtol=1e-7, atol=1e-9)


def _order(guide: AutoLaplaceApproximation, exact: FullRankGuide) -> torch.Tensor:
    """Where the weights of an autoguide, in the order of its sites, are in those of a function."""
    weights = exact.split(torch.arange(exact.loc.numel()).view_as(exact.loc))._asdict()
    sites = [name for name in guide.prototype_trace.stochastic_nodes if name in weights]
    return torch.cat([weights[name].flatten() for name in sites])
