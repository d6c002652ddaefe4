"""The models for tables: each learns, each keeps to the interface, all in one loop."""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import models
import pyro_dak
from models.shared.backbones import backbone
from models.shared.baseline import Baseline
from models.shared.training import Terms, TrainingLoss, train
from pyro_dak import ClosedFormELBO, MeanFieldGuide, TrainingError, exact_posterior
from pyro_dak.model.modes import evaluating
from pyro_dak.prediction import Prediction
from pyro_dak.training.data import ResidentData
from tests.models.tables import BACKBONE, RECIPE, SMALL, build, data

# What GPyTorch and linear_operator say of themselves, at import and in sparse interpolation.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor:UserWarning"),
]


def test_the_board_holds_the_models_of_the_paper():
    assert set(SMALL) <= set(models.names())


@pytest.mark.parametrize("name", SMALL)
def test_a_model_learns_and_beats_the_mean(name, fitted):
    model = fitted(name)
    x, y = data(100, seed=1)
    prediction = model.predict(x)
    assert isinstance(model, Baseline)
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


@pytest.mark.parametrize("name", ["avdkl", "dak_cf", "dak_mc", "nn", "nn_svgp", "svdkl"])
def test_training_goes_on_from_the_weights_if_told_to(name):
    x, y = data()
    model = build(name, recipe=replace(RECIPE, epochs=8, schedule="constant"))
    losses = []
    for _ in range(2):
        model.fit(x, y, keep_weights=True)
        losses.append(model.history.column("loss"))
    assert losses[1][0] < losses[0][0] - 0.3 * (losses[0][0] - losses[0][-1])
    assert len(losses[1]) == 8


def test_inducing_points_stay_where_training_left_them():
    x, y = data()
    still = replace(RECIPE, epochs=1, learning_rate=1e-12)
    model = build("nn_svgp", recipe=RECIPE)
    model.fit(x, y)
    before = model.gp.variational_strategy.inducing_points.detach().clone()
    model.recipe = still
    model.fit(x, y, keep_weights=True)
    assert_close(model.gp.variational_strategy.inducing_points.detach(), before)


@pytest.mark.parametrize("name", ["dak_cf", "nn"])
def test_settings_for_images_are_refused_for_tables(name):
    for settings in ({"augment": True}, {"fixed_features": True}, {"precision": "bf16-mixed"}):
        with pytest.raises(ValueError, match="settings for images"):
            build(name, recipe=replace(RECIPE, **settings)).fit(*data())


@pytest.mark.parametrize("name", ["dak_cf", "nn", "nn_svgp", "svdkl"])
def test_a_model_for_tables_goes_on_from_its_checkpoints(name, tmp_path):
    x, y = data(40)
    recipe = replace(RECIPE, epochs=3)

    class Stop(Exception):
        pass

    def stop(epoch, row):
        if epoch == 2:
            raise Stop

    whole, resumed = build(name, recipe=recipe), build(name, recipe=recipe)
    whole.fit(x, y)
    with pytest.raises(Stop):
        build(name, recipe=recipe).fit(x, y, [stop], tmp_path)
    resumed.fit(x, y, checkpoint_dir=tmp_path)
    assert_close(resumed.history.column("loss"), whole.history.column("loss"), rtol=0, atol=0)
    assert torch.equal(resumed.predict(x).mean, whole.predict(x).mean)


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
    assert build("nn_bn").num_parameters == BACKBONE + 2 * D_w + (D_w + 1) + 1
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

    def terms(x, y, num_data):
        loss = ClosedFormELBO().differentiable_loss(model, guide, x, y, num_data) / num_data
        return Terms(loss, -loss, torch.zeros_like(loss))

    network = nn.ModuleList([model.feature_extractor, model.embedding])
    loss = TrainingLoss(network, nn.ModuleList([model, guide]), terms)
    history = train(loss, ResidentData(x, y, recipe.batch_size), recipe)
    assert_close(history.column("loss"), reference.history.column("loss"))
    assert_close(dict(model.named_parameters()), dict(reference.model.named_parameters()))
    assert_close(dict(guide.named_parameters()), dict(reference.guide.named_parameters()))


def test_the_loop_stops_at_a_loss_that_is_not_finite():
    model = nn.Linear(3, 1)
    loss = TrainingLoss(model, nn.Identity(), lambda x, y, n: Terms(*[model(x).mean() / 0] * 3))
    with pytest.raises(TrainingError, match=r"The loss is .* in epoch 1, step 1"):
        train(loss, ResidentData(*data(), 32), RECIPE)


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
    sampled = model.sampled_moments(x, S)
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


@pytest.mark.parametrize("name", ["dak_cf", "dak_mc"])
def test_the_joint_posterior_is_the_exact_one_at_the_trained_features(name):
    recipe, (x, y) = replace(RECIPE, epochs=2), data()
    trained = build(name, recipe=recipe, input_units=True)
    model = build(name, recipe=recipe, input_units=True, joint_posterior=True)
    for each in (trained, model):
        each.fit(x, y)
    expected = exact_posterior(trained.model, x, y).guide
    assert_close(model.guide.loc, expected.loc)
    assert_close(model.guide.scale_tril, expected.scale_tril)


def test_dak_mc_can_predict_in_closed_form():
    x, y = data()
    model = build("dak_mc", recipe=replace(RECIPE, epochs=1), closed_form_prediction=True)
    model.fit(x, y)
    expected = pyro_dak.predict(model.model, model.guide, x, progress=False)
    assert_close(model.predict(x).variance, expected.variance)
