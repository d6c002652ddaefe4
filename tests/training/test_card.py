"""Model cards: what hubs read in them, and that nobody's own text is lost."""

import hashlib
import re

import pytest
import torch
from huggingface_hub import CommitOperationAdd, ModelCard, RepoCard
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from huggingface_hub.utils import filter_repo_objects

from pyro_dak import CategoricalLikelihood, CheckpointError, load, save, write_card
from tests.training.runs import make_data, make_model, train


@pytest.fixture
def folder(tmp_path):
    model, guide = make_model()
    train(model, guide, epochs=1)
    return save(model, guide, tmp_path / "model")


def test_a_hub_reads_library_task_and_licence(folder):
    path = write_card(
        folder, title="Houses", text="Prices of Ulm.", license="mit", datasets=["a/b: c"],
        metrics={"NLPD | test": 1.23456},
    )  # fmt: skip
    card = ModelCard.load(path)
    data = card.data.to_dict()
    assert data["library_name"] == "pyro_dak"
    assert data["pipeline_tag"] == "tabular-regression"
    assert data["license"] == "mit"
    assert data["datasets"] == ["a/b: c"]
    assert "uncertainty" in data["tags"]
    assert card.text.lstrip().startswith("# Houses\n\nPrices of Ulm.")
    assert r"| NLPD \| test | 1.235 |" in card.text
    assert "| units | 3 |" in card.text


def test_the_folder_has_the_layout_that_a_hub_expects_and_is_pushed_whole(folder):
    write_card(folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["README.md", "SHA256SUMS", CONFIG_NAME, SAFETENSORS_SINGLE_FILE]
    # `upload_folder` pushes what it does not filter, each as such an operation.
    pushed = filter_repo_objects(names, ignore_patterns=[".git", ".git/*", "*/.git", "**/.git/**"])
    operations = [CommitOperationAdd(name, folder / name) for name in pushed]
    assert [operation.path_in_repo for operation in operations] == names
    assert all(operation.upload_info.size > 0 for operation in operations)
    assert RepoCard.load(folder / "README.md").data.to_dict()["library_name"] == "pyro_dak"


def test_the_code_of_a_card_loads_the_model(folder, monkeypatch):
    text = write_card(folder).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(folder.parent)
    names = {"x": make_data()[0]}
    exec(code, names)
    assert torch.equal(names["model"].layer.log_unit_scale, load(folder)[0].layer.log_unit_scale)


def test_a_card_is_kept_when_the_model_is_saved_again_and_replaced_only_on_demand(folder):
    model, guide = make_model()
    path = write_card(folder, text="first")
    path.write_text(path.read_text() + "my own words\n")
    own = hashlib.sha256(path.read_bytes()).hexdigest()
    save(model, guide, folder, overwrite=True)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == own
    load(folder)  # an edited card is no damage
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_card(folder, text="second")
    assert "my own words" in path.read_text()
    assert "second" in write_card(folder, text="second", overwrite=True).read_text()


def test_classes_have_their_task_and_folders_without_a_model_get_no_card(tmp_path):
    model, guide = make_model(likelihood=CategoricalLikelihood(), num_outputs=2)
    model.input_shape = (3,)
    card = write_card(save(model, guide, tmp_path / "classes"))
    assert "pipeline_tag: tabular-classification" in card.read_text()
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError):
        write_card(tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
    only_a_card = tmp_path / "card"
    only_a_card.mkdir()
    (only_a_card / "README.md").write_text("mine")
    with pytest.raises(FileExistsError, match="not a saved model"):
        save(model, guide, only_a_card, overwrite=True)
    card.unlink()
    card.mkdir()
    with pytest.raises(FileExistsError, match="not a saved model"):
        save(model, guide, card.parent, overwrite=True)
