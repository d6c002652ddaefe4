"""Frozen models give the numbers of the plain form, whatever has been put into their place."""

import copy
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    ClosedFormELBO,
    KernelActivation,
    LaplaceKernel,
    MeanFieldGuide,
    RBFKernel,
    predict,
)
from pyro_dak.additive.scaling import MinMax, build_scaling
from pyro_dak.fast import serving
from pyro_dak.fast.serving import affine_units
from pyro_dak.prediction import freeze
from tests import scenarios

# The package has a function of the same name.
freeze_module = sys.modules["pyro_dak.prediction.freeze"]

LINEAR = {
    "linear": lambda: nn.Linear(3, 4),
    "sequence": lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)),
    "nested": lambda: nn.Sequential(
        nn.Linear(3, 5), nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(5, 4, bias=False)))
    ),
}


def with_hook(network):
    network.register_forward_hook(lambda module, inputs, output: 2 * output)
    return network


def with_hook_on_the_last(network):
    network[-1].register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    return network


class Doubled(nn.Linear):
    """A layer that does more than its weights say."""

    def forward(self, x):
        return 2 * super().forward(x)


class Reversed(nn.Sequential):
    """A sequence with an order of its own."""

    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


def with_patch(network):
    forward = network[-1].forward
    network[-1].forward = lambda x: 2 * forward(x)
    return network


def with_own_weights(network):
    class Weights(nn.Parameter):
        """Weights that may mean something else."""

    network[-1].weight = Weights(network[-1].weight.detach())
    return network


OTHERS = {
    "activation last": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
    "hook": lambda: with_hook(LINEAR["sequence"]()),
    "hook on the last": lambda: with_hook_on_the_last(LINEAR["sequence"]()),
    "patch": lambda: with_patch(LINEAR["sequence"]()),
    "weights": lambda: with_own_weights(LINEAR["sequence"]()),
    "subclass": lambda: nn.Sequential(nn.Tanh(), Doubled(3, 4)),
    "order": lambda: Reversed(nn.Tanh(), nn.Linear(3, 4)),
    "parametrized": lambda: nn.Sequential(
        nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    ),
}


def frozen_and_plain(model, x, num_rows=10_000):
    """q(f) at x by `freeze` and by its plain form."""
    guide = MeanFieldGuide(model)
    with torch.no_grad():
        plain = guide.moments(model.layer, model.unit_inputs(x))
    return freeze(model, guide, num_rows=num_rows)(x), plain


def assert_frozen_is_plain(model, x):
    frozen, plain = frozen_and_plain(model, x)
    assert_close(frozen.mean, plain.mean)
    assert_close(frozen.var, plain.var)


def num_layers_before_the_map(network):
    """How many layers are left to apply before the affine map to the units."""
    W, gain, shift = torch.randn(2, 4), torch.ones(2), torch.zeros(2)
    return len(affine_units(network, W, gain, shift, num_rows=10_000)[0])


@pytest.mark.parametrize(("name", "left"), [("linear", 0), ("sequence", 2), ("nested", 2)])
def test_the_last_linear_layer_is_part_of_the_map(name, left):
    assert num_layers_before_the_map(LINEAR[name]()) == left


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_do_more_are_left_alone(name):
    network = OTHERS[name]()
    W, gain, shift = torch.randn(2, 4), torch.rand(2), torch.randn(2)
    layers, weight, _ = affine_units(network, W, gain, shift, num_rows=10_000)
    assert layers == [network]
    assert_close(weight, gain.unsqueeze(-1) * W)


def test_an_empty_sequence_is_left_alone():
    assert num_layers_before_the_map(nn.Sequential()) == 1


@pytest.mark.parametrize("embedding", [True, False])
@pytest.mark.parametrize("scaling", ["standardize", "minmax", "none"])
@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_frozen_moments_are_the_plain_ones(name, scaling, embedding):
    network = (LINEAR | OTHERS)[name]()
    num_units = 2 if embedding else 4
    model = DAK(network, 4, num_units=num_units, scaling=scaling, embedding=embedding)
    model.unit_inputs(5 + 3 * torch.randn(50, 3))  # running statistics that are not the initial
    model.eval()
    x = torch.randn(20, 3)
    assert_frozen_is_plain(model, x)


def test_a_frozen_model_keeps_its_weights_and_a_new_one_has_the_later():
    model = DAK(LINEAR["sequence"](), 4, num_units=2).eval()
    guide, x = MeanFieldGuide(model), torch.randn(20, 3)
    before = freeze(model, guide, num_rows=10_000)
    then = before(x).mean
    with torch.no_grad():
        model.feature_extractor[-1].weight.mul_(2)
    assert_close(before(x).mean, then)
    assert_frozen_is_plain(model, x)
    assert not torch.allclose(freeze(model, guide)(x).mean, then)


@pytest.mark.parametrize("shape", [(20, 6, 3), (3,)])
def test_features_of_another_rank_are_told_apart_from_rows(shape):
    model = DAK(LINEAR["sequence"](), 4, num_units=2).eval()
    with pytest.raises(ValueError, match=r"must return shape \(N, feature_dim=4\)"):
        freeze(model, MeanFieldGuide(model), num_rows=100)(torch.randn(shape))


def test_features_of_another_width_are_told():
    model = DAK(LINEAR["sequence"](), 5, num_units=2).eval()
    with pytest.raises(ValueError, match=r"feature_dim=5\); got \(20, 4\)"):
        freeze(model, MeanFieldGuide(model), num_rows=100)(torch.randn(20, 3))


def test_a_compiled_sequence_is_left_alone():
    network = LINEAR["sequence"]()
    network._compiled_call_impl = network._call_impl  # as `network.compile()` would
    assert num_layers_before_the_map(network) == 1


@pytest.mark.parametrize(
    ("feature_dim", "embedding", "num_rows", "is_folded"),
    [
        (16, True, 10_000, True),
        (16, True, 4, False),  # 4 x 16 x 64 for the product, 832 saved a row
        (16, True, 5, True),
        (2, True, 10_000, False),  # 4 x 64 a row folded, 2 x 64 + 4 x 2 one after the other
        (4, False, 10_000, False),  # no embedding to fold it into
    ],
)
def test_layers_are_folded_where_it_pays(feature_dim, embedding, num_rows, is_folded):
    network = nn.Linear(64, feature_dim)
    model = DAK(network, feature_dim, num_units=4, embedding=embedding).eval()
    moments_at = freeze(model, MeanFieldGuide(model), num_rows=num_rows)
    x = torch.randn(5, 64)
    before = moments_at(x).mean
    with torch.no_grad():
        network.weight.mul_(2)  # what is folded does not see it
    assert torch.allclose(moments_at(x).mean, before) == is_folded


@pytest.mark.parametrize("scaling", ["standardize", "minmax", "none"])
@pytest.mark.parametrize("embedding", [True, False])
def test_frozen_units_are_those_of_eval_mode(scaling, embedding):
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model = DAK(network, 4, num_units=4, scaling=scaling, embedding=embedding)
    model.unit_inputs(5 + 3 * torch.randn(50, 3))  # running statistics that are not the initial
    model.eval()
    x = torch.randn(20, 3)
    assert_frozen_is_plain(model, x)


def test_a_frozen_last_layer_keeps_its_precision_beside_a_network_of_less():
    model = DAK(nn.Linear(3, 4), 4, num_units=2).float()
    model.unit_inputs(torch.randn(50, 3).float())
    model.eval()
    guide, x = MeanFieldGuide(model).float(), torch.randn(20, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        features = model.feature_extractor(x)
        found = freeze(model, guide, num_rows=10_000)(x)
    assert features.dtype == torch.bfloat16
    with torch.no_grad():
        expected = guide.moments(model.layer, model.embed(features.float()))
    assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)


def half_the_input(module, inputs):
    return (inputs[0] / 2,)


class Rescaled(DAK):
    """A model with unit inputs of its own."""

    def unit_inputs(self, x):
        return super().unit_inputs(x / 10)


@pytest.mark.parametrize("change", ["bias", "hook", "norm", "scaling", "subclass"])
def test_a_frozen_model_follows_what_somebody_put_in_place_of_the_parts(change):
    make = Rescaled if change == "subclass" else DAK
    model = make(nn.Linear(3, 4), 4, num_units=2)
    if change == "bias":
        model.embedding = nn.Linear(4, 2)
    elif change == "hook":
        model.embedding.register_forward_pre_hook(half_the_input)
    elif change == "norm":
        torch.nn.utils.parametrizations.weight_norm(model.embedding)
    elif change == "scaling":
        model.scaling = nn.BatchNorm1d(2)
    model.unit_inputs(5 + torch.randn(50, 3))
    model.eval()
    x = torch.randn(20, 3)
    assert_frozen_is_plain(model, x)


@pytest.mark.parametrize("guide", list(scenarios.GUIDES))
@pytest.mark.parametrize("linear_term", [False, True])
@pytest.mark.parametrize("kernel", [None, RBFKernel(0.5)], ids=["laplace", "rbf"])
def test_frozen_moments_are_the_moments_of_every_guide(guide, linear_term, kernel):
    case = scenarios.heteroscedastic(guide=guide, linear_term=linear_term, kernel=kernel)
    found = freeze(case.model.eval(), case.guide)(case.x)
    expected = case.guide.moments(case.model.layer, case.model.unit_inputs(case.x))
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, rtol=1e-10)


class Doubtful(MeanFieldGuide):
    """A guide with moments of its own."""

    def moments(self, layer, h):
        q = super().moments(layer, h)
        return q._replace(var=2 * q.var)


def test_the_moments_of_a_guide_of_ones_own_count():
    model = DAK(LINEAR["sequence"](), 4, num_units=2).eval()
    guide, x = Doubtful(model), torch.randn(20, 3)
    with torch.no_grad():
        expected = guide.moments(model.layer, model.unit_inputs(x))
    assert_close(freeze(model, guide)(x).var, expected.var)


class Shifted(DAK):
    """A model with an embedding of its own."""

    def embed(self, features):
        return super().embed(features) + 1


def test_an_embedding_of_ones_own_sees_the_features():
    model = Shifted(LINEAR["sequence"](), 4, num_units=2).eval()
    x = torch.randn(50, 3)
    assert_close(model.unit_inputs(x), model.embed(model.feature_extractor(x)))
    assert_frozen_is_plain(model, x)


def test_an_embedding_put_on_the_instance_sees_the_features():
    model = DAK(LINEAR["sequence"](), 4, num_units=2).eval()
    x, embed = torch.randn(50, 3), model.embed
    expected = model.unit_inputs(x) + 1
    model.embed = lambda features: embed(features) + 1
    assert_close(model.unit_inputs(x), expected)
    assert_frozen_is_plain(model, x)


EXPORTED = """
import torch
from torch import nn
from torch.testing import assert_close
from pyro_dak import DAK, MeanFieldGuide, RBFKernel
from pyro_dak.fast.serving import affine_units
from pyro_dak.prediction import freeze

class UnitInputs(nn.Module):
    def __init__(self):
        super().__init__()
        network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
        self.model = DAK(network, 4, num_units=2)

    def forward(self, x):
        return self.model.unit_inputs(x)

module = UnitInputs().eval()
module(torch.randn(50, 3))
rows = {0: torch.export.Dim("n", min=2, max=1000)}
exported = torch.export.export(module, (torch.randn(50, 3),), dynamic_shapes=(rows,)).module()
for num_rows in (2, 7, 300):
    x = torch.randn(num_rows, 3)
    assert_close(exported(x), module(x))
"""


@pytest.mark.slow
def test_a_model_is_exported_for_any_number_of_rows():
    # In a process of its own: numbers of rows are symbols there, which the shape checks refuse.
    scenarios.run_alone(EXPORTED)


def scaled_in_place(model, guide, x):
    with torch.no_grad():
        guide.z_loc.mul_(2)


def scaled_without_a_trace(model, guide, x):
    guide.z_loc.data.mul_(2)


def scaled_as_an_array(model, guide, x):
    guide.z_log_scale.detach().numpy()[...] += 1


def loaded(model, guide, x):
    guide.load_state_dict({name: 2 * value for name, value in guide.state_dict().items()})


def replaced(model, guide, x):
    guide.mu_loc = nn.Parameter(guide.mu_loc.detach() + 1)


def replaced_data(model, guide, x):
    guide.mu_log_scale.data = guide.mu_log_scale.data + 1


def swapped_units(model, guide, x):
    """The sums over all weights stay."""
    guide.z_loc.data.copy_(guide.z_loc.data.flip(1))


def scaled_units(model, guide, x):
    model.layer.log_unit_scale.data.add_(1)


def optimised(model, guide, x):
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.1, fused=True)
    guide.moments(model.layer, model.unit_inputs(x)).var.sum().backward()
    optimizer.step()


def stepped_by_pyro(model, guide, x):
    pyro.clear_param_store()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=ClosedFormELBO())
    svi.step(x, torch.randn(len(x), 1))
    pyro.clear_param_store()
    model.eval()


def with_another_lengthscale(model, guide, x):
    grid = model.layer.activation.grid
    model.layer.activation = KernelActivation(grid, LaplaceKernel(0.4))


def moved_statistics(model, guide, x):
    model.scaling.first.data.add_(1)


def widened_statistics(model, guide, x):
    model.scaling.second.numpy()[...] *= 4


def with_other_statistics(model, guide, x):
    model.scaling.first = torch.ones(2)


def with_narrower_scaling(model, guide, x):
    model.scaling.num_std = 2.0


def with_other_bounds(model, guide, x):
    model.scaling.bounds = (0.2, 0.8)


def with_another_embedding(model, guide, x):
    model.embedding.weight.data.mul_(2)


def with_another_scaling(model, guide, x):
    model.scaling = MinMax(2, (0.0, 1.0)).eval()


def with_a_hook(model, guide, x):
    model.scaling.register_forward_hook(lambda module, inputs, output: output / 2)


CHANGES = (
    moved_statistics,
    widened_statistics,
    with_other_statistics,
    with_narrower_scaling,
    with_other_bounds,
    with_another_embedding,
    with_another_scaling,
    with_a_hook,
    scaled_in_place,
    scaled_without_a_trace,
    scaled_as_an_array,
    loaded,
    replaced,
    replaced_data,
    swapped_units,
    scaled_units,
    optimised,
    stepped_by_pyro,
    with_another_lengthscale,
)


def small_case():
    model = DAK(LINEAR["sequence"](), 4, num_units=2).eval()
    return model, MeanFieldGuide(model), torch.randn(20, 3)


def assert_moments_are_plain(model, guide, x):
    with torch.no_grad():
        plain = guide.moments(model.layer, model.unit_inputs(x))
    frozen = freeze(model, guide)(x)
    assert_close(frozen.mean, plain.mean)
    assert_close(frozen.var, plain.var)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_is_never_that_of_other_weights(change):
    model, guide, x = small_case()
    before = freeze(model, guide)(x)
    change(model, guide, x)
    after = freeze(model, guide)(x)
    assert not torch.equal(after.mean, before.mean) or not torch.equal(after.var, before.var)
    assert_moments_are_plain(model, guide, x)


def test_kept_nodes_are_those_of_each_copy():
    model, guide, x = small_case()
    before = freeze(model, guide)(x)
    other = copy.deepcopy(guide)
    other.z_loc.data.mul_(2)
    assert_moments_are_plain(model, other, x)
    assert_close(freeze(model, guide)(x).mean, before.mean, rtol=0, atol=0)


def test_kept_nodes_have_the_precision_of_the_model():
    model, guide, x = small_case()
    freeze(model, guide)(x)
    assert freeze(model.float(), guide.float())(x.float()).var.dtype == torch.float32


def test_nodes_made_in_inference_mode_serve_outside():
    model, guide, x = small_case()
    with torch.inference_mode():
        freeze(model, guide)(x)
    x.requires_grad_()
    assert_moments_are_plain(model, guide, x)


def num_tables(monkeypatch, function):
    """How often the nodes are computed."""
    calls, node_table = [], KernelActivation.node_table

    def counted(*args):
        calls.append(args)
        return node_table(*args)

    with monkeypatch.context() as patch:
        patch.setattr(KernelActivation, "node_table", counted)
        function()
    return len(calls)


def test_nodes_are_computed_once_for_the_same_weights(monkeypatch):
    model, guide, x = small_case()

    def predictions():
        for _ in range(3):
            predict(model, guide, x)
            guide.load_state_dict(guide.state_dict())

    assert num_tables(monkeypatch, predictions) == 1
    guide.z_loc.data[0, 0, 0] += 1
    assert num_tables(monkeypatch, predictions) == 1


def test_nodes_with_a_nan_are_not_kept(monkeypatch):
    model, guide, x = small_case()
    guide.z_loc.data[0, 1, 2] = torch.nan
    assert num_tables(monkeypatch, lambda: [freeze(model, guide)(x) for _ in range(2)]) == 2


def test_many_nodes_are_not_kept(monkeypatch):
    monkeypatch.setattr(serving, "_MAX_KEPT_NUMBERS", 10)
    model, guide, x = small_case()
    assert num_tables(monkeypatch, lambda: [freeze(model, guide)(x) for _ in range(2)]) == 2


def test_a_weight_that_is_no_parameter_any_more_counts():
    model, guide, x = small_case()
    freeze(model, guide)(x)
    weight = guide.z_loc.detach() + 1
    del guide.z_loc
    guide.z_loc = weight
    assert_moments_are_plain(model, guide, x)


@pytest.mark.parametrize("scaling", ["standardize", "minmax", "none"])
def test_the_options_of_a_scaling_are_all_numbers_that_its_map_depends_on(scaling):
    own = build_scaling(scaling, 2, (0.0, 1.0))
    first, second = torch.tensor([0.3, 0.4]), torch.tensor([0.5, 0.6])
    gain, shift = own.affine(first, second)
    numbers = [name for name, value in vars(own).items() if type(value) is float]
    for name in [*numbers, "bounds"]:
        before, value = own.options, getattr(own, name)
        setattr(own, name, (0.1, 0.7) if name == "bounds" else value + 1)
        changed = own.affine(first, second)
        is_same = torch.equal(changed[0], gain) and torch.equal(changed[1], shift)
        assert is_same or own.options != before
        setattr(own, name, value)


def test_kept_nodes_go_with_their_guide():
    model, guide, x = small_case()
    freeze(model, guide)(x)
    moments = weakref.ref(freeze_module._FROM_NODES._results[guide][-1])
    del guide
    gc.collect()
    assert moments() is None


def test_threads_with_guides_of_their_own_and_a_shared_one_get_their_moments():
    model, shared, x = small_case()
    guides = [MeanFieldGuide(model) for _ in range(4)]
    expected = [predict(model, guide, x).mean for guide in (shared, *guides)]

    def work(number):
        for _ in range(30):
            found = predict(model, guides[number], x).mean, predict(model, shared, x).mean
            assert torch.equal(found[0], expected[number + 1])
            assert torch.equal(found[1], expected[0])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
