"""Novelty: leverage written out in loops, uniform for rows as in training, small for others."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    MeanFieldGuide,
    fit,
    learn_novelty,
    load,
    predict,
    save,
)
from pyro_dak.prediction import novelty
from pyro_dak.prediction.novelty import Leverage, Tails, minus_log_tail, tail_share
from tests import reference


def make(num_outputs: int = 1, has_classes: bool = False, input_dim: int = 4, width: int = 6):
    """A model with a network that keeps its inputs apart, and its guide."""
    torch.manual_seed(0)
    likelihood = CategoricalLikelihood() if has_classes else None
    network = nn.Sequential(nn.Linear(input_dim, width))
    model = DAK(network, width, 3, num_outputs, level=3, likelihood=likelihood).eval()
    return model, MeanFieldGuide(model, init_loc_scale=1.0)


def kolmogorov_distance(shares):
    """The largest distance of the distribution of these numbers from the uniform one."""
    sorted_shares = shares.sort().values
    steps = torch.arange(len(shares) + 1) / len(shares)
    below, above = sorted_shares - steps[:-1], steps[1:] - sorted_shares
    return float(torch.maximum(below, above).max())


def test_leverage_equals_the_formula_in_loops():
    features, new = torch.randn(30, 3) * 2 + 1, torch.randn(10, 3) * 5
    leverage = Leverage.of(features)
    assert_close(leverage(new), reference.leverages(features, new), rtol=1e-6, atol=0)
    assert_close(leverage(features), reference.leverages(features, features), rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_rows", [5, 40], ids=["fewer rows than columns", "more"])
def test_leverage_of_a_training_row_without_itself_equals_that_of_a_second_fit(num_rows):
    features = torch.randn(num_rows, 3)
    found = Leverage.of(features).without_itself(features)
    alone = [reference.leverages(features, features[n : n + 1], skip=n) for n in range(num_rows)]
    assert_close(found, torch.cat(alone), rtol=1e-6, atol=0)


def test_leverage_in_single_precision_is_that_in_double():
    features = torch.randn(2000, 64).relu()
    leverage, new = Leverage.of(features), 2 * torch.randn(50, 64)
    exact = leverage(new)
    assert_close(leverage.float()(new.float()).double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_keep_their_precision_in_half_precision(dtype):
    leverage = Leverage.of(torch.randn(20, 3)).to(dtype)
    assert {t.dtype for t in leverage.state_dict().values()} == {torch.float32}
    assert leverage(torch.randn(2, 3, dtype=dtype)).dtype == torch.float32


def test_constant_features_are_no_trouble_and_tell_when_they_change():
    features = torch.randn(50, 3)
    features[:, 1] = 1e4
    leverage = Leverage.of(features)
    usual, changed = torch.zeros(2, 3)
    usual[1], changed[1] = 1e4, 1e4 + 1
    usual, changed = leverage(torch.stack([usual, changed]))
    assert changed > 5 * usual


def test_many_features_are_projected():
    features = torch.randn(40, 600)
    leverage = Leverage.of(features)
    assert_close(leverage.projection @ leverage.projection.mT, torch.eye(512))
    assert len(leverage.root) == 1 + 3 * 512
    again = Leverage.of(features)
    assert torch.equal(leverage.projection, again.projection)
    assert float(leverage(10 + features).min()) > float(leverage(features).max())


def test_features_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="features that are not finite"):
        Leverage.of(torch.tensor([[1.0, math.inf], [0.0, 0.0]]))


def test_tail_shares_count_reference_scores():
    scores = torch.tensor([0.0, 1.0, 1.5, 3.0, 9.0])
    found = tail_share(scores, torch.tensor([1.0, 1.0, 2.0, 3.0]))
    assert_close(found, torch.tensor([5.0, 5.0, 3.0, 2.0, 1.0]) / 5)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 500])
def test_strangeness_increases_also_beyond_the_largest_reference_score(num_rows):
    scores = torch.rand(num_rows).exp().sort().values
    at_scores = minus_log_tail(scores, scores)
    assert_close(at_scores, -tail_share(scores, scores).log())
    grid = torch.linspace(float(scores[0]), float(scores[-1]), 1000)
    assert (minus_log_tail(grid, scores).diff() >= 0).all()
    beyond = minus_log_tail(float(scores[-1]) * torch.logspace(0, 10, 200), scores)
    assert (beyond.diff() > 0).all()
    assert_close(beyond[0], at_scores[-1])


def test_a_pareto_tail_goes_on_with_its_own_index():
    """P(score > s) = s^-2, so that -log P = 2 log s."""
    scores = (1 - torch.arange(20_000).double() / 20_000).pow(-0.5)
    far = torch.tensor([1e4, 1e5])
    assert_close(minus_log_tail(far, scores).diff(), 2 * far.log().diff(), rtol=0.1, atol=0)


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_equal_reference_scores_are_no_trouble(value):
    tails = Tails.of(torch.full((300,), value), torch.full((300,), value))
    scores = tails.scores(torch.tensor([value, value + 1]), torch.tensor([value, value + 2]))
    assert_close(scores.novelty, torch.tensor([1.0, 1 / 301]))
    assert all(part.isfinite().all() and part[1] > part[0] for part in scores[1:])


@pytest.mark.parametrize("has_classes", [False, True])
@pytest.mark.parametrize("num_held_out", [0, 600])
def test_novelty_of_rows_as_in_training_is_uniform(has_classes, num_held_out):
    """The distance between two samples has standard deviation 0.26 sqrt(1/n + 1/m); mean 0.87."""
    model, guide = make(3, has_classes)
    held_out = torch.randn(num_held_out, 4) if num_held_out else None
    learn_novelty(model, guide, torch.randn(1000, 4), held_out)
    shares = predict(model, guide, torch.randn(2000, 4), seed=0).novelty
    n, m = num_held_out or 1000, 2000
    assert kolmogorov_distance(shares) < (0.87 + 4 * 0.26) * math.sqrt(1 / n + 1 / m)


@pytest.mark.parametrize("has_classes", [False, True])
def test_strange_rows_have_small_novelty(has_classes):
    model, guide = make(3, has_classes)
    learn_novelty(model, guide, torch.randn(1000, 4))
    prediction = predict(model, guide, 8 + torch.randn(50, 4), seed=0)
    assert (prediction.novelty < 0.02).all()
    usual = predict(model, guide, torch.randn(50, 4), seed=0)
    assert prediction.strangeness().min() > usual.strangeness().max()


def test_combined_strangeness_is_fishers_product():
    model, guide = make(3, has_classes=True)
    learn_novelty(model, guide, torch.randn(300, 4))
    p = predict(model, guide, torch.randn(50, 4), seed=0)
    parts = p.strangeness("entropy") + p.strangeness("leverage")
    assert_close(p.strangeness(), parts)
    assert_close(p.novelty, tail_share(parts, model.novelty.tails.combined))
    tails, features = model.novelty.tails, model.feature_extractor
    x = torch.randn(20, 4)
    p = predict(model, guide, x, seed=0)
    assert_close(p.strangeness("entropy"), minus_log_tail(p.entropy, tails.entropy))
    leverage = model.novelty.leverage(features(x)).detach()
    assert_close(p.strangeness("leverage"), minus_log_tail(leverage, tails.leverage))


def test_reference_rows_are_held_out_rows_if_there_are_enough():
    model, guide = make()
    x, few, many = torch.randn(300, 4), 9 + torch.randn(199, 4), 9 + torch.randn(200, 4)
    learn_novelty(model, guide, x, few)
    assert predict(model, guide, many).novelty.max() < 0.02
    assert len(model.novelty.tails.leverage) == 300
    learn_novelty(model, guide, x, many)
    assert kolmogorov_distance(predict(model, guide, many).novelty) < 0.01
    assert len(model.novelty.tails.leverage) == 200


@pytest.mark.parametrize("has_classes", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 7])
def test_novelty_does_not_depend_on_the_rows_beside(has_classes, chunk_size):
    model, guide = make(3, has_classes)
    learn_novelty(model, guide, torch.randn(300, 4))
    x = torch.randn(20, 4)
    both = [predict(model, guide, x, seed=0, chunk_size=size) for size in (8192, chunk_size)]
    for score in ("leverage", "combined"):
        assert_close(both[0].strangeness(score), both[1].strangeness(score))
    assert_close(both[0].novelty, both[1].novelty)


def test_novelty_changes_nothing_else():
    """Here `predict` folds the last layer of the network into the embedding if it may."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    model = DAK(network, 5, num_units=2, level=3).eval()
    guide, x = MeanFieldGuide(model), torch.randn(300, 4)
    before = predict(model, guide, x)
    learn_novelty(model, guide, x)
    for with_novelty in (True, False):
        after = predict(model, guide, x, novelty=with_novelty)
        assert_close((after.mean, after.variance), (before.mean, before.variance))


class OwnDAK(DAK):
    """A class of its own, which may compute its units as it likes."""


@pytest.mark.parametrize(("kind", "options", "number"), [
    (DAK, {}, 20), (DAK, {"embedding": False, "num_units": 6}, 20), (DAK, {"input_units": 4}, 20),
    (OwnDAK, {}, 40),
])  # fmt: skip
def test_the_network_runs_once_for_each_row(kind, options, number):
    torch.manual_seed(0)
    model = kind(nn.Sequential(nn.Linear(4, 6)), 6, **({"num_units": 3} | options)).eval()
    guide = MeanFieldGuide(model)
    learn_novelty(model, guide, torch.randn(300, 4))
    calls = []
    model.feature_extractor.register_forward_hook(lambda *args: calls.append(len(args[2])))
    p = predict(model, guide, torch.ones(20, 4))
    assert sum(calls) == number
    assert_close(p.novelty, p.novelty[:1].expand(20))
    assert_close(p.mean, predict(model, guide, torch.ones(20, 4), novelty=False).mean)


def test_input_units_are_features_too(tmp_path):
    """The network does not see the second input, whose strange values only its unit tells."""
    network = nn.Linear(2, 3)
    with torch.no_grad():
        network.weight[:, 1] = 0
    model = DAK(network, 3, num_units=2, level=2, input_units=True).eval()
    guide, x = MeanFieldGuide(model), torch.randn(300, 2)
    learn_novelty(model, guide, x)
    x[:, 1] += 20
    assert predict(model, guide, x).novelty.max() < 0.01
    loaded = load(save(model, guide, tmp_path / "model"))
    assert torch.equal(predict(*loaded, x).strangeness(), predict(model, guide, x).strangeness())


def test_a_temperature_does_not_change_what_is_strange():
    model, guide = make(3, has_classes=True)
    x = torch.randn(300, 4)
    learn_novelty(model, guide, x)
    before = predict(model, guide, x)
    model.calibration = torch.tensor(2.5)
    after = predict(model, guide, x)
    assert (after.entropy > before.entropy).all()
    assert_close(after.strangeness("entropy"), before.strangeness("entropy"))
    learn_novelty(model, guide, x)
    # These rows are the reference: rounding breaks their ties with themselves, a rank to one side.
    rank = 1 / (len(x) + 1)
    assert_close(predict(model, guide, x).novelty, before.novelty, rtol=0, atol=1.01 * rank)


def test_threads_share_a_model():
    model, guide = make(3, has_classes=True)
    learn_novelty(model, guide, torch.randn(300, 4))
    parts = torch.randn(8, 40, 4)
    expected = [predict(model, guide, x, seed=0).strangeness() for x in parts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: predict(model, guide, x, seed=0).strangeness(), parts))
    assert_close(found, expected)


@pytest.mark.slow
def test_a_compiled_prediction_has_novelty():
    model, guide = make()
    x = torch.randn(300, 4)
    learn_novelty(model, guide, x)
    assert_close(predict(model, guide, x, compile=True).novelty, predict(model, guide, x).novelty)


def test_a_guide_of_pyro_has_novelty():
    model, _ = make(3, has_classes=True)
    guide, x = AutoNormal(model), torch.randn(300, 4)
    fit(model, guide, (x, torch.randint(3, (300,))), epochs=1, seed=0, progress=False)
    assert 0.01 < float(predict(model, guide, x, seed=0).novelty.mean()) < 0.99


def test_few_rows_are_taken_of_many(monkeypatch):
    """At most so many numbers of features, and so many reference rows."""
    monkeypatch.setattr(novelty, "MAX_NUMBERS", 6 * 150)
    monkeypatch.setattr(novelty, "MAX_REFERENCE_ROWS", 70)
    monkeypatch.setattr(novelty, "_CHUNK", 32)
    model, guide = make()
    features, rows = novelty.features_of(model, novelty.in_random_order(torch.randn(500, 4)))
    assert (len(features), len(rows)) == (150, 70)
    assert_close(features[:70], model.feature_extractor(rows).detach())
    learn_novelty(model, guide, torch.randn(500, 4))
    assert len(model.novelty.tails.leverage) == 70


def test_what_is_missing_is_told():
    model, guide = make()
    x = torch.randn(300, 4)
    p = predict(model, guide, x)
    with pytest.raises(ValueError, match=r"call `learn_novelty\(model, guide, x\)`"):
        _ = p.novelty
    with pytest.raises(ValueError, match="does not know how strange its rows are"):
        p.strangeness()
    learn_novelty(model, guide, x)
    p = predict(model, guide, x)
    assert torch.equal(p.strangeness(), p.strangeness("leverage"))
    with pytest.raises(ValueError, match="only a prediction of classes has the entropy"):
        p.strangeness("entropy")
    with pytest.raises(ValueError, match="`score` must be one of 'combined', 'entropy', 'lev"):
        p.strangeness("variance")
    with pytest.raises(ValueError, match="with `novelty=True`"):
        _ = predict(model, guide, x, novelty=False).novelty


@pytest.mark.parametrize("name", ["x", "held_out"])
def test_wrong_inputs_are_told(name):
    model, guide = make()
    rows = {"x": torch.randn(300, 4)} | {name: torch.full((300, 4), math.nan)}
    with pytest.raises(ValueError, match=f"`{name}`.*finite"):
        learn_novelty(model, guide, **rows)
    with pytest.raises(ValueError, match="`x` must fit `feature_extractor`"):
        learn_novelty(model, guide, torch.randn(300, 5))
    with pytest.raises(ValueError, match=r"`held_out` must have rows like those of `x`.*\(4,\)"):
        learn_novelty(model, guide, torch.randn(300, 4), torch.randn(300, 5))


@pytest.mark.parametrize("width", [6, 520])
@pytest.mark.parametrize("has_classes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_has_the_same_novelty(tmp_path, has_classes, width, dtype):
    model, guide = (part.to(dtype) for part in make(3, has_classes, width=width))
    x = torch.randn(300, 4, dtype=dtype)
    learn_novelty(model, guide, x)
    loaded = load(save(model, guide, tmp_path / "model"))
    pairs = [(model, guide), loaded]
    found = [predict(*pair, x, seed=0).strangeness() for pair in pairs]
    assert torch.equal(*found)
    assert loaded.model.novelty.leverage.root.dtype == torch.float32


def small_fit(model, guide, data, **options):
    defaults = {"epochs": 2, "batch_size": 100, "seed": 0, "progress": False}
    return fit(model, guide, data, **(defaults | options))


def rows_with_targets(num_rows=400):
    x = torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(1))
    return x, x.sum(-1, keepdim=True)


def test_fit_learns_novelty_of_the_final_network():
    model, guide = make()
    x, y = rows_with_targets()
    small_fit(model, guide, (x, y), patience=1, validation=0.2)
    learned = model.novelty.state_dict()
    learn_novelty(model, guide, x)
    assert learned.keys() == model.novelty.state_dict().keys()
    assert len(learned["tails.leverage"]) == 320  # 80 held-out rows are too few
    small_fit(model, guide, (x, y), novelty=False)
    assert model.novelty is None


def test_fit_compares_with_validation_rows():
    model, guide = make()
    x, y = rows_with_targets()
    validation = (9 + x[:250], y[:250])
    small_fit(model, guide, (x, y), validation=validation)
    assert kolmogorov_distance(predict(model, guide, validation[0]).novelty) < 0.01


@pytest.mark.parametrize("fixed_features", [False, True])
def test_fit_on_a_loader_learns_novelty(fixed_features):
    found = []
    x, y = rows_with_targets()
    for shuffle in (False, True):
        model, guide = make()
        loader = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=shuffle)
        small_fit(model, guide, loader, epochs=1, fixed_features=fixed_features)
        assert len(model.novelty.tails.leverage) == (100 if fixed_features else 400)
        found.append(kolmogorov_distance(predict(model, guide, x).novelty))
    assert max(found) < 0.3


def test_fixed_features_have_the_novelty_of_others():
    x, y = rows_with_targets()
    model, guide = make()
    small_fit(model, guide, (x, y), fixed_features=True)
    found = predict(model, guide, x).novelty
    learn_novelty(model, guide, x)
    assert_close(predict(model, guide, x).novelty, found)


def test_novelty_leaves_training_as_it_is():
    x, y = rows_with_targets()
    found = []
    for with_novelty in (False, True):
        model, guide = make()
        small_fit(model, guide, (x, y), novelty=with_novelty)
        found.append((torch.cat([p.flatten() for p in model.parameters()]), torch.rand(3)))
        torch.manual_seed(0)
    assert torch.equal(found[0][0], found[1][0])


def test_fit_only_warns_if_novelty_cannot_be_learned():
    class Rows(nn.Module):
        def forward(self, x):
            if not self.training and len(x) > 50:
                raise RuntimeError("too many rows.")
            return x

    model = DAK(Rows(), 4, num_units=2, level=2)
    guide, data = MeanFieldGuide(model), rows_with_targets(120)
    with pytest.warns(UserWarning, match=r"could not be learned: too many rows\. Call"):
        small_fit(model, guide, data, batch_size=20)
    assert model.novelty is None


def test_fit_of_a_network_that_samples_learns_no_novelty():
    """`predict` does not take such a model, so that a warning would be of no use."""

    class Sampling(nn.Module):
        def forward(self, x):
            return x + pyro.sample("shift", pyro.distributions.Normal(torch.zeros(()), 1.0))

    model = DAK(Sampling(), 4, num_units=2, level=2)
    small_fit(model, AutoNormal(model), rows_with_targets(120), objective=Trace_ELBO())
    assert model.novelty is None


def test_a_fitted_model_can_be_trained_again_from_a_checkpoint(tmp_path):
    model, guide = make()
    small_fit(model, guide, rows_with_targets(), checkpoint_dir=tmp_path)
    learned = model.novelty.state_dict()
    small_fit(model, guide, rows_with_targets(), resume_from=tmp_path)
    assert_close(model.novelty.state_dict(), learned)


def test_an_interrupted_fit_learns_no_novelty():
    model, guide = make()
    small_fit(model, guide, rows_with_targets())

    def stop(epoch, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_fit(model, guide, rows_with_targets(), callbacks=[stop])
    assert model.novelty is None


@pytest.mark.parametrize("has_classes", [False, True])
def test_weights_are_loaded_with_their_novelty_and_without(has_classes):
    model, guide = make(2, has_classes)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(50, 4)
    learn_novelty(model, guide, x)
    other, _ = make(2, has_classes)
    other.load_state_dict(model.state_dict())
    assert torch.equal(predict(other, guide, x).novelty, predict(model, guide, x).novelty)
    learn_novelty(model, guide, x[:30])  # other numbers of rows
    other.load_state_dict(model.state_dict())
    assert torch.equal(predict(other, guide, x).novelty, predict(model, guide, x).novelty)
    other.load_state_dict(before)
    assert other.novelty is None


def test_mixed_precision_leaves_leverages_as_they_are():
    model, guide = make()
    model.float()
    guide.float()
    x = torch.randn(300, 4, dtype=torch.float32)
    learn_novelty(model, guide, x)
    expected = predict(model, guide, x).novelty
    with torch.autocast("cpu", torch.bfloat16):
        found = predict(model, guide, x).novelty
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.01


def test_fixed_features_are_compared_with_rows_from_all_over_the_data(monkeypatch):
    monkeypatch.setattr(novelty, "MAX_REFERENCE_ROWS", 100)
    model, guide = make()
    x = torch.randn(400, 4) * torch.linspace(0.1, 3, 400).unsqueeze(-1)  # sorted
    options = {"epochs": 1, "seed": 0, "progress": False, "accelerator": "cpu"}
    fit(model, guide, (x, x[:, :1]), fixed_features=True, **options)
    assert len(model.novelty.tails.leverage) == 100
    assert 0.4 < predict(model, guide, x).novelty.mean() < 0.6
