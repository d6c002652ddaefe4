"""The page that explains a model: complete, self-contained, and safe whatever the columns hold."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from pyro_dak import DAKAdditiveClassifier, DAKAdditiveRegressor, DAKClassifier, DAKRegressor
from pyro_dak.tables.cli import app
from pyro_dak.tables.explain import additive_page, dependence_page

HOSTILE = '<script>alert("1")</script>'
IMAGE = "'\"><img src=x onerror=alert(1)>"
FORMULA = r"$\frac{$ \x00"
SMALL = {"hidden_layer_sizes": (8,), "num_units": 4, "level": 3, "epochs": 3, "progress": False}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def table(num_rows=80, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=num_rows), rng.uniform(size=num_rows)
    words = rng.choice(["plain", IMAGE, "漢字 \u202e", FORMULA], num_rows)
    y = np.sin(a) + (words == "plain") + a * b + 0.1 * rng.normal(size=num_rows)
    b[::9] = np.nan
    frame = pd.DataFrame({HOSTILE: a, FORMULA: b, IMAGE: words})
    return frame, y


class Tags(HTMLParser):
    """The tags of a page, their attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def check(page):
    """The page runs and fetches nothing, and shows hostile names as text."""
    found = Tags(page)
    assert not {"script", "iframe", "link", "object", "form"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    addresses = [value for name, value in found.attributes if name in ("src", "href")]
    assert addresses
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert "default-src 'none'" in page
    text = "".join(found.texts)
    assert HOSTILE in text
    assert IMAGE in text
    return text


def test_page_of_an_additive_regressor_has_all_parts_and_is_safe():
    frame, y = table()
    model = DAKAdditiveRegressor(level=3, pairs=[(0, 1), (0, 2)]).fit(frame, y)
    text = check(additive_page(model, frame, y, title=HOSTILE, target=IMAGE, row=9))
    for part in ("Importances", "Columns", "Calibration", "Row 9", "prediction", "RMSE"):
        assert part in text
    assert "Where it is missing" in text
    explained = model.explain(frame.iloc[[9]])
    for number in (explained.prediction[0], *explained.contributions[0]):
        assert f"{number:.4g}" in text


@pytest.mark.parametrize("num_classes", [2, 3])
def test_page_of_an_additive_classifier(num_classes):
    frame, y = table()
    labels = np.array([HOSTILE, IMAGE, "other"])[np.digitize(y, [0, 1])]
    labels = labels if num_classes == 3 else np.where(labels == "other", IMAGE, labels)
    model = DAKAdditiveClassifier(level=2).fit(frame, labels)
    text = check(additive_page(model, frame, labels))
    assert "accuracy" in text
    assert "log odds" in text


@pytest.mark.parametrize("kind", [DAKRegressor, DAKClassifier])
def test_page_of_networks_has_partial_dependence_and_novelty(kind):
    frame, y = table(150)
    y = y if kind is DAKRegressor else np.where(y > 0.5, HOSTILE, "no")
    model = kind(2, **SMALL, random_state=0).fit(frame, y)
    text = check(dependence_page(model, frame, y, title=HOSTILE, target=IMAGE))
    assert "Partial dependence" in text
    assert "stranger than" in text


def test_partial_dependence_of_an_additive_function_is_its_term():
    """Seen through `dependence_page`, an additive model has its own shape functions."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"a": rng.normal(size=100), "b": rng.normal(size=100)})
    y = frame["a"] ** 2 + frame["b"]
    model = DAKAdditiveRegressor(level=3).fit(frame, y)
    text = "".join(Tags(dependence_page(model, frame, y)).texts)
    explained = model.explain(frame.iloc[[0]])
    background = frame.iloc[np.sort(np.random.default_rng(0).permutation(100)[:200])].iloc[:50]
    others = model.explain(background).contributions.mean(0)
    assert f"{explained.contributions[0, 0] - others[0]:.4g}" in text


def test_without_targets_there_is_no_calibration():
    frame, y = table()
    model = DAKAdditiveRegressor(level=2).fit(frame, y)
    assert "RMSE" not in additive_page(model, frame)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("is_additive", [True, False])
def test_command_writes_the_page(tmp_path, is_additive):
    frame, y = table(60)
    frame = frame.rename(columns={FORMULA: "b"}).assign(y=y)
    frame.to_csv(tmp_path / "table.csv", index=False)
    options = ["--additive", "--pairs", 1] if is_additive else ["--epochs", 2]
    fit = ["fit", tmp_path / "table.csv", "--target", "y", "--out", tmp_path / "model", "--quiet"]
    assert run(*fit, *options).exit_code == 0
    explain = ["explain", tmp_path / "model", tmp_path / "table.csv", "--out", tmp_path / "p.html"]
    result = run(*explain)
    assert result.exit_code == 0, result.output + str(result.exception)
    check((tmp_path / "p.html").read_text(encoding="utf-8"))
    again = run(*explain)
    assert again.exit_code == 1
    assert "exists" in again.stderr
    far = run(*explain, "--row", 60, "--force")
    assert far.exit_code == 1
    assert "there is no row 60" in far.stderr
    for command in ("evaluate", "predict"):
        assert run(command, tmp_path / "model", tmp_path / "table.csv").exit_code == 0
    assert "regression" in run("info", tmp_path / "model").stdout


def test_pairs_need_an_additive_model(tmp_path):
    result = run("fit", "x.csv", "--target", "y", "--out", tmp_path / "m", "--pairs", 2)
    assert result.exit_code == 2


@pytest.mark.parametrize("option", ["--epochs", "--ensemble-size", "--seed"])
def test_options_of_networks_are_refused_for_additive_models(option, tmp_path):
    arguments = ("fit", "x.csv", "--target", "y", "--out", tmp_path / "m", "--additive")
    result = run(*arguments, option, 2)
    assert result.exit_code == 2
    assert option in result.stderr
    assert "is for networks" in result.stderr


@pytest.mark.slow
def test_a_browser_shows_the_page(tmp_path):
    """Chromium draws all pictures, and runs nothing that a name of a column holds."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("there is no chromium here")
    frame, y = table()
    model = DAKAdditiveRegressor(level=3, pairs=1).fit(frame, y)
    page = tmp_path / "page.html"
    page.write_text(additive_page(model, frame, y, title=HOSTILE), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,2000"]
    picture = tmp_path / "page.png"
    options = {"check": True, "capture_output": True, "timeout": 120}
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], **options)
    image = pytest.importorskip("matplotlib.image").imread(picture)
    assert image.shape[:2] == (2000, 1200)
    # Pictures below each other: ink of the palette, in many rows of the page.
    is_ink = np.abs(image[..., :3] - np.array([0x1B, 0x49, 0x65]) / 255).max(-1) < 0.1
    assert (is_ink.any(1)).mean() > 0.2
    dump = subprocess.run([*command, "--dump-dom", page.as_uri()], text=True, **options).stdout
    assert len(re.findall(r"<img ", dump)) == page.read_text(encoding="utf-8").count("<img ")
    assert "<script" not in dump
