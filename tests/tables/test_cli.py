"""The command line: what it writes, and that broken input gives one clear line and no damage."""

import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from pyro_dak import CheckpointError, DAKClassifier, DAKRegressor
from pyro_dak.__main__ import main
from pyro_dak.tables.cli import app
from tests import hostile


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def succeed(*arguments, stdin=None):
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result


def fail(*arguments, code=1, match=""):
    """The command fails with this code, one line on stderr, nothing on stdout, no traceback."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    if code == 1:
        assert result.stderr.startswith("Error: ")
        assert len(result.stderr.splitlines()) == 1
    assert match in result.stderr
    return result


def table(num_rows=60, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=num_rows), rng.normal(size=num_rows)
    colour = rng.choice(["red", "green", "blue"], num_rows)
    price = 3 * a + (colour == "red") + 0.1 * rng.normal(size=num_rows)
    b[::7] = np.nan
    return pd.DataFrame({"a": a, "größe b": b, "colour": colour, "price": price})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A training table, a regression model and a classification model."""
    folder = tmp_path_factory.mktemp("cli")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    frame = table()
    frame.to_csv(folder / "train.csv", index=False)
    frame.drop(columns="price").to_csv(folder / "new.csv", index=False)
    options = ("--epochs", 2, "--quiet")
    succeed("fit", folder / "train.csv", "--target", "price", "--out", folder / "model", *options)
    arguments = ("--target", "colour", "--out", folder / "classes")
    succeed("fit", folder / "train.csv", *arguments, *options)
    torch.set_default_dtype(dtype)
    return folder


def snapshot(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_predictions_are_those_of_the_estimator(files, tmp_path):
    out = tmp_path / "p.csv"
    succeed("predict", files / "model", files / "new.csv", "--out", out, "--quiet")
    found = pd.read_csv(out)
    assert list(found) == ["mean", "std", "lower", "upper", "novelty"]
    to_stdout = succeed("predict", files / "model", files / "new.csv", "--quiet").stdout
    assert to_stdout == out.read_text()
    model = DAKRegressor.load(files / "model")
    X = pd.read_csv(files / "new.csv")
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(found["mean"], mean)
    np.testing.assert_allclose(found["std"], std)
    interval = model.predict_interval(X, 0.9)
    np.testing.assert_allclose(found[["lower", "upper"]], interval)
    np.testing.assert_allclose(found["novelty"], model.predict_dist(X).novelty)


def test_classes_are_found_from_the_column_and_predicted(files):
    lines = succeed("predict", files / "classes", files / "train.csv", "--quiet").stdout
    header, *rows = lines.splitlines()
    assert header == "label,p_blue,p_green,p_red,novelty"
    for row in rows:
        label, *probs, novelty = row.split(",")
        assert 0 < float(novelty) <= 1
        assert abs(sum(map(float, probs)) - 1) < 1e-6
        assert label == ["blue", "green", "red"][int(np.argmax(list(map(float, probs))))]
    assert isinstance(DAKClassifier.load(files / "classes"), DAKClassifier)


def test_parquet_gives_what_csv_gives(files, tmp_path):
    pd.read_csv(files / "new.csv").to_parquet(tmp_path / "new.parquet")
    out = tmp_path / "out.parquet"
    succeed("predict", files / "model", tmp_path / "new.parquet", "--out", out, "--quiet")
    csv = succeed("predict", files / "model", files / "new.csv", "--quiet").stdout
    np.testing.assert_allclose(
        pd.read_parquet(out), np.loadtxt(csv.splitlines()[1:], delimiter=",")
    )


def test_fit_ends_with_one_table_on_stderr_and_info_repeats_it(files, tmp_path):
    out = tmp_path / "model"
    arguments = ("fit", files / "train.csv", "--target", "price", "--out", out, "--epochs", 2)
    result = succeed(*arguments)
    assert result.stdout == ""
    first, *lines = result.stderr.splitlines()
    assert first == "Learning `price` from 60 rows ..."
    pairs = {line[:17].strip(): line[17:].strip() for line in lines}
    assert pairs["task"] == "regression"
    assert pairs["training rows"] == "60"
    assert (pairs["numeric columns"], pairs["text columns"]) == ("2", "1")
    assert pairs["epochs"] == str(len(DAKRegressor.load(out).history_.rows))
    assert {"target", "networks", "held-out NLPD", "calibration", "tails"} < pairs.keys()
    assert "saved to" in pairs
    shown = succeed("info", out).stdout.splitlines()
    assert [line.split() for line in shown] == [line.split() for line in lines[: len(shown)]]


def test_quiet_says_nothing(files, tmp_path):
    arguments = ("fit", files / "train.csv", "--target", "colour", "--out", tmp_path / "model")
    result = succeed(*arguments, "--epochs", 2, "--quiet")
    assert (result.stdout, result.stderr) == ("", "")


def test_held_out_score_is_that_of_the_history(files):
    classes = DAKClassifier.load(files / "classes").history_
    about = json.loads(succeed("info", files / "classes", "--json").stdout)
    assert about["held-out NLL, penalised"] == classes.rows[classes.best_epoch - 1]["val_score"]
    model = DAKRegressor.load(files / "model")
    score = model.history_.rows[model.history_.best_epoch - 1]["val_score"]
    about = json.loads(succeed("info", files / "model", "--json").stdout)
    in_units_of_the_target = score + np.log(np.sqrt(2 * np.pi) * model.y_scale_[0])
    assert about["held-out NLPD"] == pytest.approx(in_units_of_the_target)


def test_a_table_too_small_to_hold_out_rows_has_no_score(tmp_path):
    table(15).to_csv(tmp_path / "t.csv", index=False)
    arguments = ("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "model")
    succeed(*arguments, "--epochs", 1, "--quiet")
    assert json.loads(succeed("info", tmp_path / "model", "--json").stdout)["held-out NLPD"] is None
    assert "held-out NLPD    -" in succeed("info", tmp_path / "model").stdout


def test_scores_of_a_regression_are_those_of_its_predictions(files):
    X = pd.read_csv(files / "train.csv")
    y = X.pop("price").to_numpy()
    prediction = DAKRegressor.load(files / "model").predict_dist(X)
    residuals = y - prediction.mean
    expected = {
        "rows": 60,
        "rmse": np.sqrt(np.mean(residuals**2)),
        "mae": np.mean(np.abs(residuals)),
        "r2": 1 - np.mean(residuals**2) / np.var(y),
        "nlpd": -np.mean(prediction.log_prob(y)),
    }
    for level in (50, 90, 95):
        lower, upper = prediction.interval(level / 100)
        expected[f"coverage_{level}"] = np.mean((y >= lower) & (y <= upper))
    found = json.loads(succeed("evaluate", files / "model", files / "train.csv", "--json").stdout)
    assert found == pytest.approx(expected)


def test_scores_of_classes_are_those_of_their_probabilities(files, tmp_path):
    X = pd.read_csv(files / "train.csv")
    y = X.pop("colour")
    model = DAKClassifier.load(files / "classes")
    probs, is_label = model.predict_proba(X), y.to_numpy()[:, None] == model.classes_
    expected = {
        "rows": 60,
        "accuracy": model.score(X, y),
        "nll": -np.log(probs[is_label]).mean(),
        "brier": ((probs - is_label) ** 2).sum(-1).mean(),
    }
    plot = tmp_path / "calibration.svg"
    arguments = ("evaluate", files / "classes", files / "train.csv", "--json", "--plot", plot)
    assert json.loads(succeed(*arguments).stdout) == pytest.approx(expected)
    assert "<svg" in plot.read_text()


def test_evaluate_refuses_new_classes_and_plots_of_unknown_kinds(files, tmp_path):
    table().assign(colour="mauve").to_csv(tmp_path / "t.csv", index=False)
    match = "classes that were not there in training: ['mauve']"
    fail("evaluate", files / "classes", tmp_path / "t.csv", match=match)
    arguments = ("evaluate", files / "model", files / "train.csv", "--plot", tmp_path / "p.xyz")
    fail(*arguments, match="use .png, .pdf or .svg")


def test_evaluate_prints_scores_and_draws_the_calibration(files, tmp_path):
    plot = tmp_path / "calibration.png"
    arguments = ("evaluate", files / "model", files / "train.csv", "--quiet")
    scores = json.loads(succeed(*arguments, "--json", "--plot", plot).stdout)
    y = pd.read_csv(files / "train.csv")["price"]
    mean = pd.read_csv(
        io.StringIO(succeed("predict", files / "model", files / "train.csv", "--quiet").stdout)
    )["mean"]
    assert scores["rmse"] == pytest.approx(np.sqrt(np.mean((y - mean) ** 2)))
    assert plot.read_bytes()[:4] == b"\x89PNG"
    fail(*arguments, "--plot", plot, match="--force")
    assert "rmse" in succeed(*arguments).stdout
    classes = ("evaluate", files / "classes", files / "train.csv", "--quiet", "--json")
    assert 0 <= json.loads(succeed(*classes).stdout)["accuracy"] <= 1


def test_info_says_what_a_model_is(files):
    about = json.loads(succeed("info", files / "model", "--json").stdout)
    assert (about["task"], about["target"]) == ("regression", "price")
    assert (about["numeric columns"], about["text columns"]) == (2, 1)


def test_same_seed_same_model(files, tmp_path):
    arguments = ("--target", "price", "--epochs", 2, "--quiet", "--seed", 0)
    succeed("fit", files / "train.csv", "--out", tmp_path / "again", *arguments)
    for name in ("config.json", "model.safetensors"):
        first, second = (folder / name for folder in (files / "model", tmp_path / "again"))
        assert first.read_bytes() == second.read_bytes()


def test_bom_crlf_and_another_delimiter_are_read(files, tmp_path):
    text = pd.read_csv(files / "new.csv").to_csv(index=False, sep=";", lineterminator="\r\n")
    (tmp_path / "new.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    arguments = ("predict", files / "model", tmp_path / "new.csv", "--quiet")
    fail(*arguments, match="--delimiter ';'")
    expected = succeed("predict", files / "model", files / "new.csv", "--quiet").stdout
    assert succeed(*arguments, "--delimiter", ";").stdout == expected


def test_existing_output_is_kept_without_force(files, tmp_path):
    before = snapshot(files)
    arguments = (files / "train.csv", "--target", "price", "--epochs", 1, "--quiet")
    fail("fit", *arguments, "--out", files / "model", match="--force")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    fail("fit", *arguments, "--out", tmp_path / "mine", "--force", match="left as it is")
    fail("predict", files / "model", files / "new.csv", "--out", files / "new.csv", match="--force")
    assert snapshot(files) == before
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_output_that_cannot_be_written_is_seen_before_training(files, tmp_path, monkeypatch):
    monkeypatch.setattr(DAKRegressor, "fit", lambda *arguments: pytest.fail("it was trained"))
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    data = (files / "train.csv", "--target", "price", "--force", "--out")
    fail("fit", *data, tmp_path / "file" / "model", match="is not a directory")
    fail("fit", *data, tmp_path / "pipe", match="is a named pipe")
    fail("fit", *data, tmp_path / "file", match="is not a saved model")
    monkeypatch.setattr("os.access", lambda path, mode, **_: not mode & os.W_OK)
    fail("fit", *data, tmp_path / "new" / "model", match="is not writable")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def test_hostile_models_are_refused_or_described(files, tmp_path):
    def read(directory):
        result = run("info", directory)
        if result.exit_code == 1:
            assert len(result.stderr.splitlines()) == 1
            assert "--debug" not in result.stderr  # it was expected
            raise CheckpointError(result.stderr)
        assert result.exit_code == 0

    assert hostile.failures(files / "model", tmp_path, read, seed=0, count=80) == []


def test_force_replaces_a_model(files, tmp_path):
    out = tmp_path / "model"
    arguments = ("fit", files / "train.csv", "--out", out, "--epochs", 1, "--quiet")
    succeed(*arguments, "--target", "price")
    succeed(*arguments, "--target", "colour", "--force")
    assert json.loads(succeed("info", out, "--json").stdout)["target"] == "colour"


BROKEN = {
    "missing target": (lambda: table().drop(columns="price"), "no column `price`"),
    "no rows": (lambda: table(0), "no rows"),
    "one row": (lambda: table(1), "at least 10"),
    "NaN in the target": (lambda: table().assign(price=[np.nan, *range(59)]), "missing values"),
    "inf in the target": (lambda: table().assign(price=[np.inf, *range(59)]), "infinite"),
    "inf in a column": (lambda: table().assign(a=[-np.inf, *range(59)]), "infinite"),
    "mixed types": (lambda: table().assign(a=["x", *range(59)]), "mixes numbers and text"),
    "only the target": (lambda: table()[["price"]], "nothing to learn"),
    "an empty column": (lambda: table().assign(a=np.nan), "is empty"),
    "names": (lambda: table(300).assign(a=[f"n{i}" for i in range(300)]), "looks like names"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_training_table(case, tmp_path):
    make, match = BROKEN[case]
    make().to_csv(tmp_path / "t.csv", index=False)
    arguments = (tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "model", "--quiet")
    fail("fit", *arguments, "--epochs", 1, match=match)
    assert not (tmp_path / "model").exists()


BYTES = {
    "empty": (b"", "is empty"),
    "blank": (b"\n\n", "is empty"),
    "binary": (b"\x00\x01\x02" * 100, "binary file"),
    "not UTF-8": (b"a,price\n\xff\xfe,1\n", "not UTF-8"),
    "ragged": (b"a,price\n1,2\n1,2,3,4\n", "cannot be read as CSV"),
    "wrong delimiter": (b"a;b;price\n1;2;3\n", "--delimiter ';'"),
    "repeated names": (b"a,price,price\n1,2,3\n", "several columns called `price`"),
}


@pytest.mark.parametrize("case", BYTES)
def test_broken_file(case, files, tmp_path):
    data, match = BYTES[case]
    (tmp_path / "t.csv").write_bytes(data)
    (tmp_path / "t.parquet").write_bytes(data)
    arguments = ("--target", "price", "--out", tmp_path / "model", "--quiet")
    fail("fit", tmp_path / "t.csv", *arguments, match=match)
    fail("fit", tmp_path / "t.parquet", *arguments, match="Parquet")
    fail("predict", files / "model", tmp_path / "t.csv")
    assert not (tmp_path / "model").exists()


def test_files_that_are_not_there_and_directories(files, tmp_path):
    arguments = ("--target", "price", "--out", tmp_path / "model", "--quiet")
    fail("fit", tmp_path / "none.csv", *arguments, match="no such file")
    fail("fit", tmp_path, *arguments, match="is a directory")
    fail("predict", tmp_path / "none", files / "new.csv", match="no such directory")
    fail("predict", tmp_path, files / "new.csv", match="config.json")
    fail("predict", files / "new.csv", files / "new.csv", match="is not an ONNX file")
    fail("predict", files / "model", files / "new.csv", "--out", tmp_path, match="is a directory")
    out = tmp_path / "no" / "p.csv"
    fail("predict", files / "model", files / "new.csv", "--out", out, match="does not exist")


NEW = {
    "unknown category": (lambda t: t.assign(colour="mauve"), "not there in training"),
    "lost column": (lambda t: t.drop(columns="a"), "lacks 1 columns"),
    "text for numbers": (lambda t: t.assign(a="x"), "must hold numbers"),
    "infinity": (lambda t: t.assign(a=np.inf), "infinite"),
    "no rows": (lambda t: t[:0], "no rows"),
}


@pytest.mark.parametrize("case", NEW)
def test_broken_rows_to_predict(case, files, tmp_path):
    change, match = NEW[case]
    change(table()).to_csv(tmp_path / "new.csv", index=False)
    before = snapshot(files)
    out = tmp_path / "p.csv"
    arguments = (files / "model", tmp_path / "new.csv")
    fail("predict", *arguments, "--out", out, "--quiet", match=match)
    fail("evaluate", *arguments, "--quiet", match=match)
    assert not out.exists()
    assert snapshot(files) == before


def test_unknown_categories_can_be_ignored_and_missing_values_are_filled_in(files, tmp_path):
    rows = table().assign(colour="mauve", a=np.nan)
    rows.to_csv(tmp_path / "new.csv", index=False)
    arguments = ("predict", files / "model", tmp_path / "new.csv", "--ignore-unknown", "--quiet")
    assert len(succeed(*arguments).stdout.splitlines()) == 61


def test_damaged_model_is_named(files, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    fail("predict", tmp_path / "model", files / "new.csv", match="model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{")
    fail("info", tmp_path / "model", match="config.json")


@pytest.mark.slow
def test_ten_thousand_columns(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(12, 10_000))).add_prefix("x").assign(y=range(12))
    frame.to_csv(tmp_path / "wide.csv", index=False)
    arguments = ("--target", "y", "--out", tmp_path / "model", "--epochs", 1, "--quiet")
    succeed("fit", tmp_path / "wide.csv", *arguments, "--task", "regression")
    lines = succeed("predict", tmp_path / "model", tmp_path / "wide.csv", "--quiet").stdout
    assert len(lines.splitlines()) == 13


@pytest.mark.parametrize(
    "arguments",
    [
        ("fit", "t.csv"),
        ("fit", "t.csv", "--target", "y", "--out", "m", "--task", "guess"),
        ("fit", "t.csv", "--target", "y", "--out", "m", "--epochs", "0"),
        ("predict", "m", "t.csv", "--level", "2"),
        ("nonsense",),
        ("predict", "m"),
    ],
)
def test_wrong_usage_exits_with_two(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fail(*arguments, code=2).stderr != ""


def test_debug_shows_the_error_itself(tmp_path):
    result = run("--debug", "info", tmp_path)
    assert result.exit_code == 1
    assert not isinstance(result.exception, SystemExit)


def test_unexpected_errors_are_one_line_too(files, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the sky\nfell")

    monkeypatch.setattr("pyro_dak.tables.cli.check_table", broken)
    fail("predict", files / "model", files / "new.csv", match="Error: the sky fell (`pyro-dak")


def test_interrupt_is_a_failure(files, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("pyro_dak.tables.cli.check_table", interrupted)
    result = run("predict", files / "model", files / "new.csv")
    assert (result.exit_code, result.stderr) == (1, "Interrupted.\n")


def test_tables_go_through_standard_input_and_output(files, tmp_path):
    train, new = ((files / name).read_bytes() for name in ("train.csv", "new.csv"))
    out = ("--out", tmp_path / "model")
    succeed("fit", "-", "--target", "price", *out, "--epochs", 2, "--quiet", stdin=train)
    expected = succeed("predict", files / "model", files / "new.csv", "--quiet").stdout
    for options in ((), ("--out", "-")):
        arguments = ("predict", tmp_path / "model", "-", *options, "--quiet")
        assert succeed(*arguments, stdin=new).stdout == expected
    arguments = (files / "model", "--quiet")
    scores = succeed("evaluate", files / "model", "-", "--quiet", stdin=train).stdout
    assert scores == succeed("evaluate", files / "model", files / "train.csv", "--quiet").stdout
    result = run("predict", files / "model", "-", stdin=b"a,b\n1\n")
    assert result.stderr.startswith("Error: standard input: cannot be read as CSV")
    fail("fit", "-", "--target", "y", "--out", "-", code=2, match="--out")
    fail("evaluate", files / "model", "-", "--plot", "-", code=2, match="--plot")


def test_json_has_null_where_a_score_is_no_number(files, tmp_path):
    table().assign(price=1.0).to_csv(tmp_path / "t.csv", index=False)
    text = succeed("evaluate", files / "model", tmp_path / "t.csv", "--json").stdout
    assert json.loads(text, parse_constant=pytest.fail)["r2"] is None


def test_no_terminal_obeys_what_stands_in_files(tmp_path):
    name = "pri\x1b[31mce\x07\u202e"
    frame = table().rename(columns={"price": name})
    frame.to_csv(tmp_path / "t.csv", index=False)
    out = tmp_path / "mo\x1b[2Jdel"
    arguments = ("fit", tmp_path / "t.csv", "--out", out, "--epochs", 1, "--target")
    shown = [succeed(*arguments, name).stderr, succeed("info", out).stdout]
    shown.append(fail("predict", out, tmp_path / "\x1bnone.csv").stderr)
    frame.drop(columns="a").to_csv(tmp_path / "new.csv", index=False)
    shown.append(
        fail("predict", out, tmp_path / "new.csv", match=r"pri\x1b[31mce\x07\u202e").stderr
    )
    for text in shown:
        assert all(c.isprintable() or c == "\n" for c in text)


def test_labels_of_a_table_to_evaluate_may_be_written_otherwise(tmp_path):
    frame = table().assign(price=["0", "1"] * 30)
    frame.to_csv(tmp_path / "t.csv", index=False)
    out = tmp_path / "model"
    succeed("fit", tmp_path / "t.csv", "--target", "price", "--out", out, "--epochs", 1, "--quiet")
    expected = succeed("evaluate", out, tmp_path / "t.csv", "--json").stdout
    frame.assign(price=["0.0", "1.0"] * 30).to_csv(tmp_path / "t.csv", index=False)
    assert succeed("evaluate", out, tmp_path / "t.csv", "--json").stdout == expected


def test_a_reader_that_goes_away_is_no_error_of_ours(files, tmp_path):
    pd.concat([table()] * 100).to_csv(tmp_path / "many.csv", index=False)
    arguments = [
        sys.executable,
        "-m",
        "pyro_dak",
        "predict",
        files / "model",
        tmp_path / "many.csv",
    ]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"mean,std,lower,upper,novelty\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_an_interrupt_of_the_start_is_a_failure(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    with pytest.raises(SystemExit, match=r"^Interrupted\.$"):
        main()


def test_missing_packages_are_named_without_traceback():
    code = "import sys; sys.modules['typer'] = None; from pyro_dak.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: pyro-dak needs typer; install it with")
