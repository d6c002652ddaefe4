import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoNormal
from pyro.optim import Adam
from torch.testing import assert_close

import guides
import models
from pyro_dak import (
    DAK,
    FullRankGuide,
    LowRankGuide,
    MeanFieldGuide,
    NaturalGuide,
    UnitBlockGuide,
)
from pyro_dak.boards import Board
from tests import scenarios

KINDS = {
    "mean_field": MeanFieldGuide,
    "unit_block": UnitBlockGuide,
    "low_rank": LowRankGuide,
    "full_rank": FullRankGuide,
    "natural": NaturalGuide,
    "auto_normal": AutoNormal,
    "flow": AutoIAFNormal,
    "map": AutoDelta,
}


def test_a_new_file_is_a_new_choice(tmp_path, monkeypatch):
    package = tmp_path / "toys_board"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_private.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    board = Board("toys_board", [str(package)])
    assert board.names() == []
    (package / "double.py").write_text("def build(number, times=2):\n    return number * times\n")
    assert board.names() == ["double"]
    assert board.build("double", 3) == 6
    assert board.build("double", 3, times=5) == 15


@pytest.mark.parametrize(("board", "kind"), [(guides, "guide"), (models, "model")])
def test_an_unknown_name_lists_the_known_ones(board, kind):
    with pytest.raises(
        ValueError, match=rf"`{kind}` must be one of '{board.names()[0]}', .*'nuts'"
    ):
        board.build("nuts")


def test_the_boards_hold_the_promised_choices():
    promised = {*KINDS, "auto_low_rank", "laplace_tails"}
    assert promised <= set(guides.names())
    assert {"dak", "additive_gp"} <= set(models.names())


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_a_guide_is_built_by_name(name, kind):
    assert isinstance(guides.build(name, scenarios.gaussian_regression().model), kind)


@pytest.mark.parametrize("name", ["low_rank", "auto_low_rank"])
def test_options_reach_the_guide(name):
    assert guides.build(name, scenarios.gaussian_regression().model, rank=3).rank == 3


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword"):
        guides.build("mean_field", scenarios.gaussian_regression().model, rank=3)


def test_the_hand_written_guide_learns():
    case = scenarios.gaussian_regression(num_rows=20)
    guide = guides.build("laplace_tails", case.model, init_scale=0.05)
    objective = Trace_ELBO(16, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(case.model, guide, Adam({"lr": 0.05}), objective)
    losses = [svi.step(case.x, case.y) for _ in range(40)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert -losses[-1] < case.exact().log_evidence


def test_the_hand_written_guide_is_laplace_and_loads_cold():
    case = scenarios.gaussian_regression()
    guide = guides.build("laplace_tails", case.model, init_scale=0.3)
    q = guide.posterior("z")
    z = torch.randn(2, 2, 3)
    assert_close(q.log_prob(z), torch.distributions.Laplace(0.0, 0.3).log_prob(z).sum())
    fresh = guides.build("laplace_tails", case.model)
    fresh.load_state_dict(guide.state_dict())
    assert_close(fresh.posterior("z").log_prob(z), q.log_prob(z))


def test_dak_has_the_architecture_of_the_paper():
    model = models.build("dak", input_dim=8, num_outputs=2, feature_dim=256, num_units=5)
    shapes = [tuple(p.shape) for p in model.feature_extractor.parameters() if p.dim() == 2]
    assert shapes == [(64, 8), (32, 64), (256, 32)]
    assert model.embedding.weight.shape == (5, 256)
    assert model.num_inducing == 7
    assert model(torch.randn(10, 8)).shape == (10, 2)


def test_additive_gp_has_no_network():
    model = models.build("additive_gp", 3, bounds=(-2.0, 2.0), level=4)
    x = torch.randn(10, 3)
    assert isinstance(model, DAK)
    assert_close(model.unit_inputs(x), x)
    trained = {name for name, _ in model.named_parameters()}
    assert trained == {"layer.log_unit_scale", "likelihood.noise.log_scale"}
