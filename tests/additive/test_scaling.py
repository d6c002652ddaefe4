import math

import pytest
import torch
from torch.testing import assert_close

from pyro_dak.additive.scaling import SCALINGS, MinMax, NoScaling, Standardize, build_scaling

BOUNDS = (-1.0, 3.0)
NAMES = sorted(SCALINGS)


def trained(name, num_batches=3):
    scaling = build_scaling(name, 2, BOUNDS)
    for _ in range(num_batches):
        scaling(5 + 3 * torch.randn(20, 2))
    return scaling


def test_standardize_sends_mean_to_the_middle_and_three_deviations_to_the_bounds():
    scaling = Standardize(2, BOUNDS, eps=0.0)
    h = torch.randn(50, 2) * torch.tensor([3.0, 0.1]) + torch.tensor([5.0, -2.0])
    scaling(h)
    loc, std = h.mean(0), h.std(0, correction=0)
    landmarks = scaling.eval()(torch.stack([loc - 3 * std, loc, loc + 3 * std]))
    assert_close(landmarks, torch.tensor([[-1.0, -1.0], [1.0, 1.0], [3.0, 3.0]]))


def test_minmax_sends_the_extremes_to_the_bounds():
    scaling = MinMax(2, BOUNDS)
    h = torch.randn(50, 2) * torch.tensor([3.0, 0.1])
    scaling(h)
    ends = scaling.eval()(torch.stack([h.amin(0), h.amax(0)]))
    assert_close(ends, torch.tensor([[-1.0, -1.0], [3.0, 3.0]]))


@pytest.mark.parametrize("is_training", [True, False])
def test_no_scaling_is_the_identity(is_training):
    h = torch.randn(5, 2)
    assert torch.equal(NoScaling(2, BOUNDS).train(is_training)(h), h)


@pytest.mark.parametrize("name", ["minmax", "standardize"])
def test_training_does_not_see_position_and_scale_of_the_batch(name):
    h = torch.randn(20, 2)
    scaled = trained(name)(h)
    moved = trained(name)(torch.tensor([1e3, 0.1]) * h - 7)
    assert_close(moved, scaled, rtol=1e-4, atol=1e-4)


def test_standardised_batch_has_its_moments_in_training():
    scaled = trained("standardize")(5 + 3 * torch.randn(20, 2))
    assert_close(scaled.mean(0), torch.tensor([1.0, 1.0]))
    # Bounds (-1, 3): half the width, 2, is three standard deviations.
    assert_close(scaled.std(0, correction=0), torch.full((2,), 2 / 3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["minmax", "standardize"])
def test_first_batches_are_averaged_with_equal_weight(name):
    scaling = build_scaling(name, 2, BOUNDS)
    h = torch.randn(10, 7, 2) + torch.arange(10.0)[:, None, None]
    for batch in h:
        scaling(batch)
    statistics = {
        "minmax": (h.amin(1), h.amax(1)),
        "standardize": (h.mean(1), h.var(1, correction=0)),
    }
    first, second = statistics[name]
    assert_close((scaling.first, scaling.second), (first.mean(0), second.mean(0)))


def test_running_mean_and_variance_converge_to_those_of_the_batches():
    num_rows, momentum = 64, 0.01
    scaling = Standardize(1, BOUNDS, momentum=momentum)
    locs, variances = [], []
    for step in range(4001):
        scaling(5 + 3 * torch.randn(num_rows, 1))
        if step >= 500 and step % 500 == 0:  # five times 1/momentum apart: nearly independent
            locs.append(float(scaling.first))
            variances.append(float(scaling.second))
    effective = num_rows * (2 - momentum) / momentum  # rows an exponential average weighs
    loc_error = 3 / math.sqrt(effective * len(locs))
    var_error = 9 * math.sqrt(2 / (effective * len(locs)))
    assert abs(sum(locs) / len(locs) - 5) < 4 * loc_error
    batch_variance = 9 * (1 - 1 / num_rows)  # about the mean of its own batch
    assert abs(sum(variances) / len(variances) - batch_variance) < 4 * var_error


@pytest.mark.parametrize("name", ["minmax", "standardize"])
def test_running_statistics_forget_the_past(name):
    scaling = build_scaling(name, 1, BOUNDS)
    scaling(torch.tensor([[-100.0], [100.0]]))
    for _ in range(400):
        scaling(torch.tensor([[2.0], [4.0]]))
    expected = {"minmax": [2.0, 4.0], "standardize": [3.0, 1.0]}
    assert_close(torch.cat([scaling.first, scaling.second]), torch.tensor(expected[name]))


@pytest.mark.parametrize("name", NAMES)
def test_eval_mode_is_row_wise(name):
    scaling = trained(name).eval()
    h = torch.randn(6, 2)
    rows = torch.cat([scaling(row) for row in h.split(1)])
    assert torch.equal(scaling(h), rows)


@pytest.mark.parametrize("name", NAMES)
def test_eval_mode_leaves_the_statistics_alone(name):
    scaling = trained(name).eval()
    before = {key: value.clone() for key, value in scaling.state_dict().items()}
    scaling(100 * torch.randn(6, 2))
    assert_close(dict(scaling.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_training_mode_without_gradients_is_as_eval_mode(name):
    scaling, h = trained(name), torch.randn(6, 2)
    before = {key: value.clone() for key, value in scaling.state_dict().items()}
    with torch.no_grad():
        found = scaling(h)
    assert_close(dict(scaling.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(found, scaling.eval()(h))


@pytest.mark.parametrize("name", NAMES)
def test_before_the_first_step_a_batch_without_gradients_is_scaled_by_itself(name):
    scaling, h = build_scaling(name, 2, BOUNDS), 5 + 3 * torch.randn(20, 2)
    with torch.no_grad():
        found = scaling(h)
    assert scaling.num_batches == 0
    assert torch.equal(found, scaling(h))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_repeated_in_training_is_scaled_alike_in_eval(name):
    scaling = build_scaling(name, 2, BOUNDS)
    h = 5 + 3 * torch.randn(20, 2)
    in_training = scaling(h)
    assert_close(scaling.eval()(h), in_training)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_row_in_training_is_mapped_as_in_eval(name):
    scaling, row = trained(name), torch.randn(1, 2)
    in_training = scaling.train()(row)
    assert torch.equal(in_training, scaling.eval()(row))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", ["minmax", "standardize"])
def test_gradients_equal_finite_differences(name, is_training):
    scaling = trained(name).train(is_training)
    h = torch.randn(6, 2, requires_grad=True)
    assert torch.autograd.gradcheck(scaling, (h,))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs the gloo backend")
@pytest.mark.parametrize("name", ["minmax", "standardize"])
def test_a_group_of_one_process_gives_the_statistics_of_the_batch(name, tmp_path):
    h = torch.randn(20, 2)
    alone = build_scaling(name, 2, BOUNDS)(h)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        scaling = build_scaling(name, 2, BOUNDS)
        scaling.is_synchronized = True
        in_group = scaling(h)
        if name == "standardize":
            assert torch.autograd.gradcheck(scaling, (h.requires_grad_(),))
    finally:
        torch.distributed.destroy_process_group()
    assert_close(in_group, alone)


@pytest.mark.parametrize("is_synchronized", [None, True, False])
def test_processes_share_statistics_in_training_steps_unless_told_otherwise(
    is_synchronized, monkeypatch
):
    scaling = build_scaling("standardize", 2, BOUNDS)
    scaling.is_synchronized = is_synchronized
    assert scaling.spans_processes() == (is_synchronized is True)  # there is one process
    monkeypatch.setattr("pyro_dak.additive.scaling.num_processes", lambda: 2)
    assert scaling.spans_processes() == (is_synchronized is not False)
    assert scaling.eval().spans_processes() == (is_synchronized is True)


@pytest.mark.parametrize("name", ["minmax", "standardize"])
def test_frozen_statistics_serve_in_training_steps_and_stay(name):
    scaling, h = trained(name), torch.randn(6, 2)
    before = {key: value.clone() for key, value in scaling.state_dict().items()}
    expected = scaling.eval()(h)
    scaling.train().is_frozen = True
    assert torch.equal(scaling(h), expected)
    assert torch.equal(scaling(h[:2]), expected[:2])
    assert all(torch.equal(value, before[key]) for key, value in scaling.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name):
    scaling = trained(name)
    other = build_scaling(name, 2, BOUNDS)
    other.load_state_dict(scaling.state_dict())
    h = torch.randn(6, 2)
    assert torch.equal(other.eval()(h), scaling.eval()(h))
    more = torch.randn(20, 2)  # the count of batches is restored too
    assert torch.equal(other.train()(more), scaling.train()(more))


@pytest.mark.parametrize("name", ["minmax", "standardize"])
def test_leading_batch_dimensions_are_rows(name):
    flat, batched = build_scaling(name, 2, BOUNDS), build_scaling(name, 2, BOUNDS)
    h = torch.randn(3, 4, 2)
    assert_close(batched(h), flat(h.reshape(12, 2)).reshape(3, 4, 2))


@pytest.mark.parametrize("name", ["minmax", "standardize"])
def test_a_dead_unit_stays_finite_and_is_warned_about(name):
    scaling = build_scaling(name, 3, BOUNDS)
    h = torch.randn(20, 3)
    h[:, 1] = 0.7
    assert scaling(h).isfinite().all()
    with pytest.warns(UserWarning, match=r"1 of 3 units are dead: .* \(units \[1\]\)"):
        scaling.warn_if_dead()


def test_many_dead_units_are_listed_in_part():
    scaling = Standardize(12, BOUNDS)
    scaling(torch.zeros(5, 12))
    with pytest.warns(UserWarning, match=r"12 of 12 units are dead: .* \[0, 1, .*, 7\] \.\.\."):
        scaling.warn_if_dead()


@pytest.mark.parametrize("name", NAMES)
def test_live_units_do_not_warn(name):
    trained(name).warn_if_dead()  # a warning would be an error here


@pytest.mark.parametrize("name", NAMES)
def test_meta_device_has_shapes_and_no_dead_units(name):
    scaling = build_scaling(name, 2, BOUNDS).to("meta")
    assert scaling.eval()(torch.empty(4, 5, 2, device="meta")).shape == (4, 5, 2)
    scaling.warn_if_dead()  # a warning would be an error here


def test_unknown_scaling_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="`scaling` must be one of 'minmax', 'none', 'standardize'"
    ):
        build_scaling("robust", 2, BOUNDS)


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize("name", NAMES)
def test_number_of_units_and_bounds_are_checked(name):
    with pytest.raises(ValueError, match="`num_units` must be at least 1; got 0"):
        build_scaling(name, 0, BOUNDS)
    with pytest.raises(ValueError, match="`bounds` must be finite with low < high"):
        build_scaling(name, 2, (1.0, 0.0))


@pytest.mark.parametrize("scaling_class", [MinMax, Standardize])
def test_momentum_must_be_positive(scaling_class):
    with pytest.raises(ValueError, match="`momentum` must be positive and finite; got 0"):
        scaling_class(2, BOUNDS, momentum=0.0)


def test_number_of_deviations_must_be_positive():
    with pytest.raises(ValueError, match="`num_std` must be positive and finite; got -1"):
        Standardize(2, BOUNDS, num_std=-1.0)


def test_repr_names_units_and_bounds():
    assert repr(Standardize(2, BOUNDS)) == "Standardize(num_units=2, bounds=(-1.0, 3.0))"


def test_members_are_mapped_as_each_alone():
    scaling = Standardize(4, (0.0, 1.0))
    h = (3 + 2 * torch.randn(3, 4, 20)).requires_grad_()
    found = scaling.map_members(h)
    expected = [
        torch.stack(part) for part in zip(*(scaling.map_batch(m.mT) for m in h), strict=True)
    ]
    assert_close(found[0], expected[0].mT)
    assert_close(found[1], expected[1])
    assert_close(found[2], expected[2])
    weight = torch.randn_like(h)
    slopes = [torch.autograd.grad((weight * x).sum(), h)[0] for x in (found[0], expected[0].mT)]
    assert_close(*slopes)
