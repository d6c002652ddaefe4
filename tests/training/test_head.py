"""`DAKHead`: the last layer and its loss in a training loop of one's own."""

import copy
import math
import pickle

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    ClosedFormELBO,
    DAKHead,
    FullRankGuide,
    GaussianLikelihood,
    MeanFieldGuide,
    NaturalGuide,
    StudentTLikelihood,
    calibrate,
    exact_posterior,
    load,
    predict,
    save,
)
from tests import scenarios
from tests.training.runs import assert_same, make_data, train

NUM_ROWS = 60
GUIDES = ("mean_field", "natural", "unit_block", "low_rank", "full_rank")
guides = pytest.mark.parametrize("guide", ["mean_field", "natural"])


def make_network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def make_head(num_outputs=1, **options):
    torch.manual_seed(2)
    settings = {"num_data": NUM_ROWS, "num_units": 3, "likelihood": GaussianLikelihood(0.5)}
    return DAKHead(4, num_outputs, **(settings | options))


def make_classes():
    x, y = make_data()
    return x, y.squeeze(-1).clamp(-1, 1).round().long() + 1


def optimizer_of(*modules, kind=torch.optim.Adam, **options):
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return kind(parameters, **({"lr": 1e-2} | options))


def train_by_hand(network, head, x, y, optimizer=None, epochs=3, num_parts=1):
    """The batches of `fit` with seed 0, three in an epoch, each in `num_parts` parts."""
    optimizer = optimizer or optimizer_of(network, head)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).tensor_split(3):
            optimizer.zero_grad()
            for part in rows.tensor_split(num_parts):
                (head.loss(network(x[part]), y[part]) / num_parts).backward()
            optimizer.step()


def backward(head, *batch):
    head.loss(*batch).backward()


def features_and_targets(num_rows=20):
    return torch.randn(num_rows, 4), torch.randn(num_rows, 1)


# The same as `fit`


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("has_classes", [False, True])
def test_a_plain_loop_gives_the_weights_of_fit(guide, has_classes):
    x, y = make_classes() if has_classes else make_data()
    likelihood = CategoricalLikelihood if has_classes else GaussianLikelihood
    num_outputs = 3 if has_classes else 1
    network = make_network()
    head = make_head(num_outputs, likelihood=likelihood(), guide=guide)
    model = DAK(make_network(), 4, num_units=3, num_outputs=num_outputs, likelihood=likelihood())
    own = {f"feature_extractor.{name}": value for name, value in network.state_dict().items()}
    model.load_state_dict(head.model.state_dict() | own)
    classes = {"natural": NaturalGuide, "mean_field": MeanFieldGuide, "full_rank": FullRankGuide}
    made = classes[guide](model) if guide in classes else copy.deepcopy(head.guide)
    made.load_state_dict(head.guide.state_dict())
    options = {"schedule": "constant", "clip_norm": None, "last_layer_learning_rate": None}
    train(model, made, (x, y), **options)
    torch.manual_seed(0)
    train_by_hand(network, head, x, y)
    head.finish([(x, y)], network)
    state = head.state_dict()
    for name, value in {**model.state_dict(), **made.state_dict()}.items():
        for prefix in ("model.", "guide."):
            if f"{prefix}{name}" in state and "novelty" not in name:
                assert_close(state[f"{prefix}{name}"], value, atol=1e-6, rtol=1e-6, msg=name)
    for name, value in network.state_dict().items():
        expected = model.state_dict()[f"feature_extractor.{name}"]
        assert_close(value, expected, atol=1e-6, rtol=1e-6)
    first, second = head(network(x)), predict(model, made, x)
    assert_close(first.functions.mean, second.functions.mean, atol=1e-6, rtol=1e-6)
    assert_close(first.functions.var, second.functions.var, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("guide", GUIDES)
def test_the_loss_is_minus_the_bound_per_datum(guide):
    head, (features, y) = make_head(guide=guide), features_and_targets()
    head.eval()
    terms = ClosedFormELBO().terms(head.model, head.guide, features, y, NUM_ROWS)
    assert_close(head.loss(features, y), -terms.elbo / NUM_ROWS)


def test_three_lines_replace_a_linear_layer_and_a_cross_entropy():
    x, y = make_classes()
    network, head = make_network(), DAKHead(4, 3, num_data=len(x))
    train_by_hand(network, head, x, y, epochs=30)
    net = nn.Sequential(network, head).eval()
    prediction = net(x)
    assert (prediction.label == y).double().mean() > 0.8
    assert_close(prediction.probs.sum(-1), torch.ones(len(x)))


def test_a_prediction_in_training_mode_is_that_of_eval_mode_and_changes_nothing():
    head, (features, y) = make_head(), features_and_targets()
    backward(head, features, y)
    before = copy.deepcopy(head.state_dict())
    first = head.train()(features)
    assert head.training
    assert_same(head.state_dict(), before)
    assert_close(first.std, head.eval()(features).std)


def test_any_function_of_the_model_makes_a_guide():
    head = make_head(guide=AutoNormal)
    assert head.objective.num_particles == 8
    features, y = features_and_targets()
    before = copy.deepcopy(head.state_dict())
    optimizer = optimizer_of(head)
    backward(head, features, y)
    optimizer.step()
    changed = [name for name, value in head.state_dict().items() if (value != before[name]).any()]
    assert any(name.startswith("guide.") for name in changed)
    assert head(features).mean.shape == (20, 1)
    assert not pyro.get_param_store().keys()


# When q takes its steps


def q_of(head):
    head.train(head.training)  # which brings q up to date
    return {name: value.clone() for name, value in head.guide.state_dict().items()}


@pytest.mark.parametrize("kind", ["for each", "foreach", "fused", "sgd", "data"])
def test_q_steps_once_after_each_step_of_any_optimiser(kind):
    class InData(torch.optim.SGD):
        """Moves parameters behind the back of autograd, as some optimisers do."""

        def step(self):
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - 1e-2 * parameter.grad

    known = {
        "for each": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "sgd": {"kind": torch.optim.SGD},
        "data": {"kind": InData},
    }
    network, head, (x, y) = make_network(), make_head(), make_data()
    optimizer = optimizer_of(network, head, **known[kind])
    train_by_hand(network, head, x, y, optimizer)
    assert int(head.state_dict()["rows_seen"]) == 3 * NUM_ROWS
    reference, expected = make_network(), make_head()
    optimizer = optimizer_of(reference, expected, **known[kind])
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for rows in torch.randperm(len(x), generator=generator).tensor_split(3):
            optimizer.zero_grad()
            backward(expected, reference(x[rows]), y[rows])
            optimizer.step()
            expected.state_dict()
    assert_same(q_of(head), q_of(expected))


def test_a_step_waits_for_the_optimiser_and_no_longer():
    head, (features, y) = make_head(), features_and_targets()
    optimizer = optimizer_of(head)
    before = q_of(head)
    backward(head, features, y)
    assert_same(q_of(head), before)
    optimizer.step()
    head.eval()
    assert (head.guide.mean != before["mean"]).any()


@pytest.mark.parametrize("reader", [
    lambda head: head.eval(),
    lambda head: head.state_dict(),
    lambda head: head(torch.zeros(2, 4)),
    lambda head: head.loss(*features_and_targets()),
    copy.deepcopy,
])  # fmt: skip
def test_whoever_reads_the_head_finds_q_up_to_date(reader):
    head = make_head()
    optimizer = optimizer_of(head)
    backward(head, *features_and_targets())
    optimizer.step()
    reader(head)
    assert float(head.guide.num_rows) == 20


@pytest.mark.parametrize("look", ["no_grad", "eval", "not differentiated"])
def test_losses_that_are_looked_at_teach_nothing(look):
    head = make_head().train(look != "eval")
    optimizer = optimizer_of(head)
    before = q_of(head)
    with torch.set_grad_enabled(look != "no_grad"):
        loss = head.loss(*features_and_targets())
    if look == "eval":
        loss.backward()
    optimizer.step()
    assert_same(q_of(head), before)
    assert int(head.state_dict()["rows_seen"]) == 0


def test_small_batches_are_gathered_as_in_fit_and_none_is_lost():
    head, num_data = make_head(num_data=1000), 1000
    head.freeze_statistics(torch.randn(100, 4))
    optimizer, counts = optimizer_of(head), []
    for _ in range(20):
        backward(head, *features_and_targets(50))
        optimizer.step()
        optimizer.zero_grad()
    head.state_dict()
    assert int(head.rows_seen) == num_data
    for _ in range(3):
        backward(head, *features_and_targets(10))
        optimizer.step()
        optimizer.zero_grad()
        head(torch.zeros(2, 4))
        counts.append(int(head.rows_seen))
    assert counts == [num_data] * 3  # gathered, and a prediction does not disturb that
    head.eval()
    assert int(head.rows_seen) == num_data + 30


def test_a_loss_that_is_differentiated_twice_counts_once():
    head = make_head()
    loss = head.loss(*features_and_targets())
    loss.backward(retain_graph=True)
    loss.backward()
    head.step()
    assert int(head.rows_seen) == 20


def test_two_losses_of_one_step_are_one_batch():
    features, y = features_and_targets(40)
    heads = [make_head(), make_head()]
    for head in heads:
        head.freeze_statistics(features)
    backward(heads[0], features, y)
    (heads[1].loss(features[:20], y[:20]) + heads[1].loss(features[20:], y[20:])).backward()
    for head in heads:
        head.step()
    assert_close(heads[0].guide.mean, heads[1].guide.mean)
    assert_close(heads[0].guide.precision, heads[1].guide.precision)


def test_rows_that_wait_in_vain_are_told_of():
    head = make_head()
    head.freeze_statistics(torch.randn(50, 4))
    for _ in range(3):
        backward(head, *features_and_targets())
    with pytest.warns(UserWarning, match="call `head.step\\(\\)` after each of its steps"):
        backward(head, *features_and_targets())
    head.state_dict()
    assert int(head.rows_seen) == 80


def test_with_frozen_parameters_q_steps_at_every_loss():
    head, network, (x, y) = make_head().requires_grad_(False), make_network(), make_data()
    train_by_hand(network, head, x, y, optimizer_of(network))
    assert int(head.state_dict()["rows_seen"]) == 3 * NUM_ROWS


# Mixed precision


def test_a_step_that_a_scaler_skips_leaves_q_finite():
    network, head, (x, y) = make_network(), make_head(), make_data()
    optimizer, scaler = optimizer_of(network, head), torch.amp.GradScaler("cpu")
    before = copy.deepcopy(head.state_dict())
    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        loss = head.loss(factor * network(x), y)
        assert bool(loss.isfinite()) == (factor == 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor == math.inf:
            assert_same(q_of(head), {n[6:]: v for n, v in before.items() if n.startswith("guide.")})
            head.model.scaling.load_state_dict({  # as of any batch normalisation, they are spoiled
                name[14:]: value for name, value in before.items() if "scaling" in name
            })  # fmt: skip
    assert int(head.state_dict()["rows_seen"]) == NUM_ROWS
    assert all(bool(value.isfinite().all()) for value in head.state_dict().values())


@pytest.mark.parametrize("device", [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
])  # fmt: skip
@guides
def test_under_autocast_the_head_keeps_its_precision(guide, device):
    network, head = make_network().float().to(device), make_head(guide=guide).float().to(device)
    x, y = (part.float().to(device) for part in make_data())
    optimizer = optimizer_of(network, head)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            features = network(x)
            loss = head.loss(features, y)
        assert features.dtype == torch.bfloat16
        assert loss.dtype == torch.float32
        loss.backward()
        optimizer.step()
    head.eval()
    with torch.autocast(device, torch.bfloat16):
        features = network(x)
        mixed, mixed_loss = head(features), head.loss(features, y)
    assert_close(mixed.std, head(features.float()).std, atol=0, rtol=0)
    assert_close(mixed_loss, head.loss(features.float(), y), atol=0, rtol=0)


# Gradient accumulation


@guides
@pytest.mark.parametrize("num_parts", [2, 5])
def test_with_frozen_statistics_parts_of_a_batch_are_the_whole_batch(guide, num_parts):
    x, y = make_data()
    ends = []
    for parts in (1, num_parts):
        network, head = make_network(), make_head(guide=guide)
        head.freeze_statistics(network(x))
        train_by_hand(network, head, x, y, num_parts=parts)
        ends.append({**head.state_dict(), **network.state_dict()})
    for name, value in ends[0].items():
        assert_close(ends[1][name], value, atol=1e-8, rtol=1e-8, msg=name)


def test_statistics_of_parts_are_told_of():
    network, head, (x, y) = make_network(), make_head(), make_data()
    with pytest.warns(UserWarning, match="head.freeze_statistics") as caught:
        train_by_hand(network, head, x, y, num_parts=2)
    assert len(caught) == 1


def test_frozen_statistics_are_those_of_the_rows_given_and_can_thaw():
    head, features = make_head(embedding=False, num_units=4), torch.randn(50, 4)
    with pytest.raises(ValueError, match="there are no statistics yet"):
        head.freeze_statistics()
    head.freeze_statistics(features)
    assert_close(head.model.scaling.first, features.mean(0))
    assert_close(head.model.scaling.second, features.var(0, correction=0))
    before = copy.deepcopy(head.model.scaling.state_dict())
    head.loss(*features_and_targets())
    head.finish([features_and_targets(NUM_ROWS)])
    assert_same(head.model.scaling.state_dict(), before)
    head.train().freeze_statistics(is_frozen=False)
    head.loss(*features_and_targets())
    assert (head.model.scaling.first != before["first"]).any()


# A module like others


@guides
def test_training_goes_on_from_a_state_as_if_uninterrupted(guide):
    x, y = make_data()
    whole, other = (
        (make_network(), make_head(guide=guide)),
        (make_network(), make_head(guide=guide)),
    )
    optimizers = [optimizer_of(*modules) for modules in (whole, other)]
    train_by_hand(*whole, x, y, optimizers[0], epochs=2)
    states = [copy.deepcopy(part.state_dict()) for part in (*whole, optimizers[0])]
    for part, state in zip((*other, optimizers[1]), states, strict=True):
        part.load_state_dict(state)
    for modules, optimizer in zip((whole, other), optimizers, strict=True):
        train_by_hand(*modules, x, y, optimizer, epochs=2)
    assert_same(other[1].state_dict(), whole[1].state_dict())


def test_loaded_weights_forget_rows_that_wait():
    head = make_head()
    state = copy.deepcopy(head.state_dict())
    backward(head, *features_and_targets())
    head.load_state_dict(state)
    head.step()
    assert_same(head.state_dict(), state)


@guides
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_a_copy_learns_by_itself(guide, copied):
    x, y = make_data()
    network, head = make_network(), make_head(guide=guide)
    train_by_hand(network, head, x, y)
    other, its_network = copied(head), copy.deepcopy(network)
    before = copy.deepcopy(head.state_dict())
    train_by_hand(its_network, other, x, y)
    assert_same(head.state_dict(), before)
    train_by_hand(network, head, x, y)
    assert_same(head.state_dict(), other.state_dict())


@guides
def test_an_average_of_weights_predicts(guide):
    x, y = make_data()
    net = nn.Sequential(make_network(), make_head(guide=guide))
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        train_by_hand(*net, x, y, epochs=1)
        net.state_dict()  # q takes its last step
        average.update_parameters(net)
    own = average.module[1].model.layer.log_unit_scale
    assert (own != net[1].model.layer.log_unit_scale).any()
    assert bool(average.eval()(x).std.isfinite().all())
    if guide == "natural":
        assert_close(average.module[1].guide.mean, net[1].guide.mean)


@guides
def test_a_head_made_on_the_meta_device_takes_a_state(guide):
    head = make_head(guide=guide)
    train_by_hand(make_network(), head, *make_data())
    with torch.device("meta"):
        empty = make_head(guide=guide)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu").load_state_dict(head.state_dict())
    features = torch.randn(5, 4)
    assert_close(empty.eval()(features).std, head.eval()(features).std, atol=0, rtol=0)


@pytest.mark.parametrize("guide", GUIDES)
def test_parameters_leave_out_nothing(guide):
    head = make_head(guide=guide)
    own = {id(parameter) for parameter in head.parameters()}
    assert own == {id(p) for part in (head.model, head.guide) for p in part.parameters()}
    backward(head, *features_and_targets())
    learned = [p for p in head.parameters() if p.requires_grad]
    assert all(parameter.grad is not None for parameter in learned)
    assert len(learned) == len(own) - (guide == "natural")  # the noise, in closed form


def test_weight_decay_leaves_the_noise_of_a_natural_guide_alone():
    noises = []
    for decay in (0.0, 10.0):
        head = make_head(embedding=False, num_units=4)
        optimizer = optimizer_of(head, kind=torch.optim.AdamW, lr=1e-9, weight_decay=decay)
        backward(head, *features_and_targets())
        optimizer.step()
        noises.append(head.eval().model.likelihood.noise_scale)
    assert_close(*noises)
    assert float(noises[0]) != 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_head_moves_to_a_device():
    network, head = make_network().cuda(), make_head().cuda()
    x, y = (part.cuda() for part in make_data())
    train_by_hand(network, head, x, y)
    assert head(network(x)).std.is_cuda


def test_calibration_saving_and_loading_take_its_parts(tmp_path):
    head, (features, y) = make_head(), features_and_targets(NUM_ROWS)
    head.finish([(features, y)])
    calibrate(head.model, head.guide, *features_and_targets(NUM_ROWS))
    save(head.model, head.guide, tmp_path / "head")
    loaded = load(tmp_path / "head")
    assert_close(predict(*loaded, features).std, head(features).std)


# The end of training


def test_finishing_gives_the_posterior_of_the_final_features():
    x, y = make_data()
    likelihood = GaussianLikelihood(0.3, learn=False)
    network, head = make_network(), make_head(likelihood=likelihood)
    train_by_hand(network, head, x, y)
    batches = DataLoader(TensorDataset(x, y), batch_size=25, shuffle=True)
    network.train()
    head.finish(batches, network)
    assert not head.training
    assert network.training
    features = network(x).detach()
    exact = exact_posterior(head.model, features, y).guide
    assert_close(head.guide.loc, exact.loc.detach(), atol=1e-8, rtol=1e-8)
    assert head(features).novelty.shape == (NUM_ROWS,)
    again = copy.deepcopy(head)
    again.finish(iter([(features[:30], y[:30]), (features[30:], y[30:])]), novelty=False)
    assert_close(again.guide.loc, head.guide.loc, atol=1e-8, rtol=1e-8)


def test_for_classes_finishing_keeps_the_average_unless_told_otherwise():
    x, y = make_classes()
    network, head = make_network(), make_head(3, likelihood=CategoricalLikelihood())
    train_by_hand(network, head, x, y)
    before = q_of(head)
    head.finish([(x, y)], network)
    assert_same(q_of(head), before)
    head.finish([(x, y)], network, final_pass=True)
    assert (head.guide.mean != before["mean"]).any()


# What is refused


def test_without_the_number_of_rows_there_is_no_head():
    with pytest.raises(TypeError, match="`num_data` must be given, the number of rows of the trai"):
        DAKHead(4, 3)


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [
    ((4, 1), {}, ValueError, "at least 2 for classes; got 1. For numbers pass `likelihood=Gauss"),
    ((4, 3), {"num_data": 0}, ValueError, "`num_data`"),
    ((4, 3), {"guide": "mean"}, ValueError, "`guide` must be one of .*'mean_field'"),
    ((4, 3), {"units": 3}, TypeError, "`units` is no option of DAK; those are num_units, level"),
    ((4, 3), {"feature_extractor": nn.Identity()}, TypeError, "is no option of DAK"),
    ((4, 1), {"likelihood": StudentTLikelihood(), "objective": "trace"}, NotImplementedError,
     "A NaturalGuide learns from the exact q"),
])  # fmt: skip
def test_wrong_arguments_are_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        DAKHead(*arguments, **({"num_data": NUM_ROWS} | options))


@pytest.mark.parametrize(("features", "y", "message"), [
    (torch.randn(5, 3), torch.zeros(5, dtype=torch.long), "shape \\(N, feature_dim=4\\)"),
    (torch.randn(5, 2, 4), torch.zeros(5, dtype=torch.long), "Flatten or pool"),
    (torch.zeros(5, 4).long(), torch.zeros(5, dtype=torch.long), "torch.int64"),
    (torch.randn(5, 4), torch.zeros(4, dtype=torch.long), "one row each per datum; got 5, 4"),
    (torch.randn(5, 4), torch.full((5,), 3), "`y` must lie between 0 and 2"),
    (torch.randn(61, 4), torch.zeros(61, dtype=torch.long), "at most num_data=60"),
    (torch.randn(0, 4), torch.zeros(0, dtype=torch.long), "at least one row"),
])  # fmt: skip
def test_wrong_batches_are_refused(features, y, message):
    head = make_head(3, likelihood=CategoricalLikelihood())
    with pytest.raises(ValueError, match=message):
        head.loss(features, y)


def test_a_batch_that_is_no_pair_is_refused_at_the_end():
    with pytest.raises(TypeError, match="must be a pair \\(features, y\\); got Tensor"):
        make_head().finish([torch.randn(5, 4)])


# The compiler

COMPILED = """
import torch
from torch import nn
from pyro_dak import DAKHead
from torch._dynamo.utils import counters

torch.set_default_dtype(torch.float64)
x, y = torch.randn(64, 3), torch.randint(0, 3, (64,))

class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = DAKHead(4, 3, num_data=64, num_units=3, **options)

    def forward(self, x, y):
        return self.head.loss(self.network(x), y)

def train(net, loss_fn):
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for rows in torch.arange(64).split(16) * 2:
        optimizer.zero_grad()
        loss_fn(x[rows], y[rows]).backward()
        optimizer.step()
    return net.state_dict()

def same(first, second):
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=1e-8, rtol=1e-8)

for guide in ("mean_field", "natural"):
    eager = Net(guide=guide)
    expected = train(eager, eager)
    own = Net(guide=guide, compile=True)  # the last layer, by itself
    same(expected, train(own, own))
    with torch.no_grad():
        own.eval()(x, y)  # an evaluation is not compiled
    assert dict(counters["frames"]) == {"total": 1, "ok": 1}, counters["frames"]
    assert not counters["graph_break"]
    counters.clear()
    torch._dynamo.reset()
    whole = Net(guide=guide)  # the network, around a last layer that is left as it is
    same(expected, train(whole, torch.compile(whole)))
    assert dict(counters["frames"]) == {"total": 1, "ok": 1}, counters["frames"]
    counters.clear()
    torch._dynamo.reset()
    loss = Net(guide=guide)
    loss_fn = torch.compile(loss.head.loss)
    same(expected, train(loss, lambda x, y: loss_fn(loss.network(x), y)))
    counters.clear()
    torch._dynamo.reset()
"""


@pytest.mark.slow
@scenarios.compiles_training
def test_compiled_losses_are_the_same_and_compiled_once():
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    scenarios.run_alone(COMPILED)
