"""The command line: `pyro-dak fit`, `predict`, `evaluate`, `explain`, `info`, `export`.

Data go to stdout or to a file; messages and progress go to stderr. The exit code is 0 if all went
well, 1 after a failure, with one line that says what is wrong, and 2 after wrong usage. Output that
exists is replaced only with `--force`.
"""

import functools
import importlib.metadata
import json
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sklearn.base import is_regressor

from pyro_dak.diagnostics.calibration import coverage_curve
from pyro_dak.diagnostics.plots import plot_coverage, plot_reliability
from pyro_dak.diagnostics.scores import accuracy, brier_score, rmse
from pyro_dak.tables.additive import DAKAdditiveClassifier, DAKAdditiveRegressor
from pyro_dak.tables.additive_files import read_additive, stored_name, write_additive
from pyro_dak.tables.estimators import DAKClassifier, DAKRegressor
from pyro_dak.tables.explain import additive_page, dependence_page
from pyro_dak.tables.exported import prediction_columns, read_table_model
from pyro_dak.tables.files import (
    STANDARD,
    TableError,
    check_writable,
    is_parquet,
    read_table,
    shown_name,
    write_table,
)
from pyro_dak.tables.predictive import Array
from pyro_dak.tables.saving import read_estimator, write_estimator
from pyro_dak.tables.schema import (
    Columns,
    Target,
    check_columns,
    check_table,
    learn_target,
    numbers_of_classes,
    targets,
    typed,
)
from pyro_dak.tables.streaming import LARGE_TABLE, TableRows, fit_files, is_large
from pyro_dak.training.checkpoint import CheckpointError, check_replaceable, load
from pyro_dak.training.export import ExportError, Format
from pyro_dak.training.export import export as export_model
from pyro_dak.training.files import write_whole
from pyro_dak.validation import import_optional

__all__ = ["app"]

_LEAST_ROWS = 10
_ESTIMATORS = {"DAKClassifier": DAKClassifier, "DAKRegressor": DAKRegressor}
_ADDITIVE = {
    "DAKAdditiveClassifier": DAKAdditiveClassifier,
    "DAKAdditiveRegressor": DAKAdditiveRegressor,
}

# Errors whose message says all.
_EXPECTED = CheckpointError | ExportError | ImportError | OSError | TableError

# The options in front of the command set this at every call.
_settings = {"debug": False}

app = typer.Typer(
    name="pyro-dak",
    help="Tables in, predictions with error bars out: deep additive kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

ModelPath = Annotated[Path, typer.Argument(help="The directory that [bold]fit[/bold] has written.")]
Delimiter = Annotated[
    str | None, typer.Option(help=r"Separates columns of a CSV; \t is a tab. Else a comma.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace output that exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress and no messages.")]
Unknown = Annotated[bool, typer.Option("--ignore-unknown", help="Allow unknown categories.")]


@app.callback(invoke_without_command=True)
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    _settings["debug"] = debug
    if version:
        print(_version())
        raise typer.Exit


def _failing_clearly(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors become one line on stderr and exit code 1, except with --debug."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if _settings["debug"]:
            return command(*args, **kwargs)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            _say("Interrupted.")
        except Exception as error:
            is_expected = isinstance(error, _EXPECTED)
            message = " ".join(str(error).split()) or type(error).__name__
            hint = "" if is_expected else " (`pyro-dak --debug ...` shows where.)"
            _say(f"Error: {message}{hint}")
        raise typer.Exit(1)

    return wrapped


def _version() -> str:
    return importlib.metadata.version("pyro_dak")


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(_printable(text), markup=False, soft_wrap=True)


def _printable(text: str) -> str:
    """A text without control characters, which names in tables and files may hold.

    They are shown as Python writes them, so that no terminal obeys them.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _has_bars(quiet: bool) -> bool:
    """Whether to show progress bars: they are for terminals, and would fill a file with lines."""
    return not quiet and sys.stderr.isatty()


@app.command()
@_failing_clearly
def fit(
    table: Annotated[
        Path, typer.Argument(help="A CSV or Parquet file with training rows, a folder, or -.")
    ],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    out: Annotated[Path, typer.Option(help="The directory for the model.")],
    task: Annotated[str | None, typer.Option(help="regression or classification.")] = None,
    ensemble_size: Annotated[
        int | None, typer.Option(help="The number of networks; 5.", min=1)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the rows.", min=1)] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out.")] = None,
    categorical: Annotated[list[str] | None, typer.Option(help="A column of categories.")] = None,
    additive: Annotated[bool, typer.Option("--additive", help="A sum of columns instead.")] = False,
    pairs: Annotated[int, typer.Option(help="With --additive: pairs of columns.", min=0)] = 0,
    delimiter: Delimiter = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same networks; 0.", min=0)
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Learn to predict one column of a table from the others.

    The task is found from the target unless it is given. `--drop` and `--categorical` may be given
    several times. A table called - is read from standard input. `--additive` fits a sum of
    functions of single columns, and of at most so many pairs of them, instead of networks.

    A folder of Parquet files is one table. From ten million numbers on, Parquet files are not read
    into memory at once, but part by part in each epoch.
    """
    if out == STANDARD:
        raise typer.BadParameter("a model is a directory, so it has a name.", param_hint="--out")
    if task not in (None, "regression", "classification"):
        raise typer.BadParameter("must be regression or classification.", param_hint="--task")
    if pairs and not additive:
        raise typer.BadParameter("is for --additive only.", param_hint="--pairs")
    networks = {"--ensemble-size": ensemble_size, "--epochs": epochs, "--seed": seed}
    given = [name for name, value in networks.items() if value is not None]
    if additive and given:
        raise typer.BadParameter(
            "is for networks. With --additive there is one model, without epochs and without "
            "chance. Leave one of the two out.",
            param_hint=" / ".join(given),
        )
    check_replaceable(out, force, "--force")
    options = {"epochs": epochs, "random_state": seed or 0, "progress": _has_bars(quiet)}
    ensemble_size = 5 if ensemble_size is None else ensemble_size
    if is_parquet(table) and is_large(table):
        if additive:
            raise TableError(
                f"{table}: has more than {LARGE_TABLE:,} numbers, which --additive would need in "
                "memory; fit a part of its rows, or leave --additive out."
            )
        estimator, aim, num_rows = _fit_files(
            table, target, task, drop or (), categorical or (), ensemble_size, options, quiet
        )
    else:
        X, y, aim = _training_rows(table, delimiter, target, task, drop, categorical)
        estimator, num_rows = _estimator(aim.task, additive, pairs, ensemble_size, options), len(X)
        if not quiet:  # in a terminal, a bar of the training follows and vanishes at its end
            _say(f"Learning `{target}` from {num_rows} rows ...")
        estimator.fit(X, y)
    extra = {"table": aim.to_json(), "num_rows": num_rows, "version": _version()}
    (write_additive if additive else write_estimator)(estimator, out, force, extra)
    if not quiet:
        _print_pairs(_facts(estimator, aim, extra) | {"saved to": out}, Console(stderr=True))


def _training_rows(
    table: Path,
    delimiter: str | None,
    target: str,
    task: str | None,
    drop: list[str] | None,
    categorical: list[str] | None,
) -> tuple[pd.DataFrame, Array, Target]:
    """Inputs and targets of a table that is read into memory, and what the target is."""
    frame = read_table(table, delimiter)
    with _naming(table):
        if len(frame) < _LEAST_ROWS:
            raise TableError(f"has {len(frame)} rows; at least {_LEAST_ROWS} are needed.")
        check_columns(frame, [target])
        X = typed(frame, [target, *(drop or ())], categorical or ())
        if X.shape[1] == 0:
            raise TableError(
                f"has no column beside the target `{target}`; there is nothing to learn."
            )
        aim = learn_target(frame, target, task)  # type: ignore[arg-type]
        y = targets(frame, aim)
        del frame  # its texts take more memory than all that follows
        if aim.task == "classification" and len(np.unique(y)) < 2:
            raise TableError(f"target `{target}` has one class only; there is nothing to learn.")
    return X, y, aim


def _estimator(
    task: str, additive: bool, pairs: int, ensemble_size: int, options: dict[str, Any]
) -> Any:
    """The estimator for a task, not yet fitted."""
    has_classes = task == "classification"
    if additive:
        return (DAKAdditiveClassifier if has_classes else DAKAdditiveRegressor)(pairs=pairs)
    return (DAKClassifier if has_classes else DAKRegressor)(ensemble_size, **options)


def _fit_files(
    table: Path,
    target: str,
    task: str | None,
    drop: Collection[str],
    categorical: Collection[str],
    ensemble_size: int,
    options: dict[str, Any],
    quiet: bool,
) -> tuple[Any, Target, int]:
    """An estimator fitted to Parquet files that are not read into memory, and its target."""
    with _naming(table):
        rows = TableRows(table, target, task, [*drop], categorical, options["progress"])
    estimator = _estimator(rows.aim.task, False, 0, ensemble_size, options)
    if not quiet:
        num_files = len({group.path for group in rows.groups})
        _say(
            f"Learning `{target}` from {rows.num_rows:,} rows, which are more than "
            f"{LARGE_TABLE:,} numbers: in each epoch they are read from {num_files} files, "
            f"{rows.buffer_bytes / 2**20:.0f} MiB at a time ..."
        )
    with _naming(table):
        return fit_files(estimator, rows), rows.aim, rows.num_rows


@app.command()
@_failing_clearly
def predict(
    model: Annotated[
        Path, typer.Argument(help="The directory that fit has written, or an exported ONNX file.")
    ],
    table: Annotated[
        Path, typer.Argument(help="A CSV or Parquet file with rows to predict, or -.")
    ],
    out: Annotated[Path | None, typer.Option(help="The file for predictions; else stdout.")] = None,
    level: Annotated[float, typer.Option(help="The probability of the interval.")] = 0.9,
    delimiter: Delimiter = None,
    ignore_unknown: Unknown = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Predict rows: mean, standard deviation and interval, or class probabilities.

    The column novelty is small for strange rows: 0.01 is stranger than 99 % of usual rows.
    A table called - is read from standard input.
    """
    if not 0 < level < 1:
        raise typer.BadParameter("must lie between 0 and 1.", param_hint="--level")
    if out is not None and out != STANDARD:
        check_writable(out, force)
    is_exported = model.exists() and not model.is_dir()
    predictor: Any = read_table_model(model) if is_exported else _load(model, quiet)[0]
    X = _inputs(table, predictor.columns_, delimiter, ignore_unknown)[1]
    with _naming(table):
        prediction = predictor.predict_dist(X)
    classes = getattr(predictor, "classes_", None)
    has_intervals = not is_exported or predictor.has_intervals
    result = pd.DataFrame(prediction_columns(prediction, classes, level, has_intervals))
    if out is None or out == STANDARD:
        result.to_csv(sys.stdout, index=False)
        sys.stdout.flush()
    else:
        write_table(result, out, force)


@app.command()
@_failing_clearly
def evaluate(
    model: ModelPath,
    table: Annotated[
        Path, typer.Argument(help="A CSV or Parquet file with rows and targets, or -.")
    ],
    plot: Annotated[Path | None, typer.Option(help="The file for a calibration plot.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    delimiter: Delimiter = None,
    ignore_unknown: Unknown = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Score the predictions of rows whose targets are known.

    A table called - is read from standard input.
    """
    if plot == STANDARD:
        raise typer.BadParameter("a plot goes to a file.", param_hint="--plot")
    if plot is not None:
        check_writable(plot, force)
    estimator, target, _ = _load(model, quiet)
    frame, X = _inputs(table, estimator.columns_, delimiter, ignore_unknown)
    with _naming(table):
        y = targets(frame, target)
        score = _score_regression if is_regressor(estimator) else _score_classes
        scores, draw = score(estimator, X, y)
    if plot is not None:
        _write_plot(draw, plot, force)
    _print_pairs({"rows": len(y)} | scores, Console(), as_json)


@app.command()
@_failing_clearly
def explain(
    model: ModelPath,
    table: Annotated[Path, typer.Argument(help="A CSV or Parquet file with rows, or -.")],
    out: Annotated[Path, typer.Option(help="The file for the page, such as page.html.")],
    row: Annotated[int, typer.Option(help="The row to take apart; the first is 0.", min=0)] = 0,
    delimiter: Delimiter = None,
    ignore_unknown: Unknown = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Show what a model has learned, on one HTML page that needs no network.

    It has a curve with its band for every column, how much each matters, one row taken apart, and
    the calibration, if the table has the target. A table called - is read from standard input.
    """
    if out == STANDARD:
        raise typer.BadParameter("a page goes to a file.", param_hint="--out")
    check_writable(out, force)
    estimator, target, _ = _load(model, quiet)
    frame, X = _inputs(table, estimator.columns_, delimiter, ignore_unknown)
    with _naming(table):
        if row >= len(frame):
            raise TableError(f"has {len(frame)} rows; there is no row {row}, counted from 0.")
        y = targets(frame, target) if target.name in frame.columns else None
        if y is not None and not is_regressor(estimator):
            y = estimator.classes_[_known_labels(estimator, y).numpy()]
        page_fn = additive_page if type(estimator).__name__ in _ADDITIVE else dependence_page
        title = f"What predicts {target.name}"
        page = page_fn(estimator, X, y, title=title, target=target.name, row=row)
    write_whole(
        out,
        lambda temporary: temporary.write_text(page, encoding="utf-8"),
        lambda: check_writable(out, force),
    )


@app.command()
@_failing_clearly
def export(
    model: ModelPath,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="The ONNX file to write.")] = None,
    torch_file: Annotated[
        Path | None, typer.Option("--torch", help="The torch.export file to write, a .pt2.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="A CSV or Parquet file with rows to compare at, or -.")
    ] = None,
    delimiter: Delimiter = None,
    ignore_unknown: Unknown = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write a model to one file that predicts without pyro_dak.

    An ONNX file needs no Python, and `predict` takes it too. The file is compared with the model,
    at the rows of --check or else at made-up rows, and written only if they agree.
    """
    files: list[tuple[Format, Path]] = [("onnx", onnx)] if onnx is not None else []
    files += [("torch", torch_file)] if torch_file is not None else []
    if not files:
        raise typer.BadParameter("say where to export to.", param_hint="--onnx or --torch")
    for _, path in files:
        if path == STANDARD:
            raise typer.BadParameter("a model goes to a file.", param_hint="--onnx or --torch")
        check_writable(path, force)
    if stored_name(model) is None:  # what `pyro_dak.save` has written
        if check is not None:
            raise typer.BadParameter("is for models of `pyro-dak fit`.", param_hint="--check")
        loaded = load(model)
        reports = [export_model(*loaded, path, kind, overwrite=force) for kind, path in files]
    else:
        estimator, target, _ = _load(model, quiet)
        x = None
        if check is not None:
            x = _inputs(check, estimator.columns_, delimiter, ignore_unknown)[1]
        options: dict[str, Any] = {"x": x, "overwrite": force, "target": target.name}
        reports = [estimator.export(path, kind, **options) for kind, path in files]
    for report in () if quiet else reports:
        differences = [f"{name} {value:.1e}" for name, value in report.differences.items()]
        facts = {"saved to": report.path, "fingerprint": report.fingerprint[:16]}
        rows = f"greatest difference at {report.num_rows} rows"
        _print_pairs(facts | {rows: ", ".join(differences)}, Console(stderr=True))


@app.command()
@_failing_clearly
def info(
    model: ModelPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Say what a model is: its task, columns and training."""
    _print_pairs(_facts(*_load(model, True)), Console(), as_json)


def _facts(estimator: Any, target: Target, extra: dict[str, Any]) -> dict[str, Any]:
    """What was learned, by name: `fit` prints it at its end, and `info` later."""
    if type(estimator).__name__ in _ADDITIVE:
        return _additive_facts(estimator, target, extra)
    rows, best = estimator.history_.rows, estimator.history_.best_epoch
    facts = {
        "task": target.task,
        "target": target.name,
        "numeric columns": len(estimator.columns_.medians),
        "text columns": len(estimator.columns_.categories),
        "training rows": extra.get("num_rows"),
        "networks": estimator.ensemble_size,
        "epochs": len(rows),
    }
    score = None if best is None else rows[best - 1]["val_score"]
    if target.task == "classification":
        facts |= {"held-out NLL, penalised": score, "calibration": estimator.calibration_}
    else:
        if score is not None:  # it lacks a constant, and is that of standardised targets
            score += 0.5 * math.log(2 * math.pi) + math.log(float(estimator.y_scale_[0]))
        tails = _tails(estimator.tail_df_)
        facts |= {"held-out NLPD": score, "calibration": estimator.calibration_, "tails": tails}
    return facts | {"pyro_dak": extra.get("version")}


def _tails(df: float) -> str:
    return "normal" if math.isinf(df) else f"Student-t, {df:g} degrees of freedom"


def _additive_facts(estimator: Any, target: Target, extra: dict[str, Any]) -> dict[str, Any]:
    """What an additive estimator has learned, by name."""
    facts = {
        "task": target.task,
        "target": target.name,
        "numeric columns": len(estimator.columns_.medians),
        "text columns": len(estimator.columns_.categories),
        "pairs of columns": len(estimator.term_names_) - estimator.n_features_in_,
        "training rows": extra.get("num_rows"),
    }
    if target.task == "regression":
        facts |= {"noise": estimator.noise_scale_, "tails": _tails(estimator.tail_df_)}
    return facts | {"pyro_dak": extra.get("version")}


# The scores of a table, and a function that draws their calibration into axes.
Evaluation = tuple[dict[str, float], Callable[[Any], Any]]


def _score_regression(estimator: Any, X: pd.DataFrame, y: Array) -> Evaluation:
    prediction = estimator.predict_dist(X)
    residuals = y - prediction.mean
    spread = float(np.sum((y - y.mean()) ** 2))
    pit = torch.from_numpy(prediction.cdf(y))
    levels = (0.5, 0.9, 0.95)
    coverage = coverage_curve(pit, torch.tensor(levels, dtype=pit.dtype)).tolist()
    scores = {
        "rmse": float(rmse(torch.from_numpy(y), torch.from_numpy(prediction.mean))),
        "mae": float(np.mean(np.abs(residuals))),
        "r2": 1 - float(np.sum(residuals**2)) / spread if spread > 0 else math.nan,
        "nlpd": float(-prediction.log_prob(y).mean()),
    }
    scores |= {f"coverage_{100 * p:.0f}": c for p, c in zip(levels, coverage, strict=True)}
    return scores, lambda ax: plot_coverage(pit, ax=ax)


def _known_labels(estimator: Any, y: Array) -> torch.Tensor:
    """The numbers of the classes of targets, or an error if one was not there in training."""
    labels = torch.from_numpy(numbers_of_classes(y, estimator.classes_))
    unknown = sorted({str(label) for label in y[labels.numpy() < 0]})
    if unknown:
        raise TableError(f"target has classes that were not there in training: {unknown[:5]}.")
    return labels


def _score_classes(estimator: Any, X: pd.DataFrame, y: Array) -> Evaluation:
    labels = _known_labels(estimator, y)
    probs = torch.from_numpy(estimator.predict_proba(X))
    at_label = probs.gather(-1, labels.unsqueeze(-1))
    scores = {
        "accuracy": float(accuracy(labels, probs)),
        "nll": float(-at_label.clamp(min=1e-300).log().mean()),
        "brier": float(brier_score(labels, probs)),
    }
    return scores, lambda ax: plot_reliability(labels, probs, ax=ax)


def _write_plot(draw: Callable[[Any], Any], path: Path, force: bool) -> None:
    """Draw into new axes and write them to a file of the type that its name ends in."""
    figure = import_optional("matplotlib.figure").Figure(figsize=(4, 4), layout="constrained")
    draw(figure.add_subplot())
    kind = path.suffix.lower().lstrip(".") or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise TableError(f"{path}: cannot be drawn as `{kind}`; use .png, .pdf or .svg.")
    write_whole(
        path,
        lambda temporary: figure.savefig(temporary, format=kind, dpi=150),
        lambda: check_writable(path, force),
    )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the name of the file in front of errors about the table in it."""
    try:
        yield
    except TableError as error:
        raise TableError(f"{shown_name(path)}: {error}") from error


def _load(model: Path, quiet: bool) -> tuple[Any, Target, dict[str, Any]]:
    """The estimator, the target of its table, and all that was stored with them."""
    is_additive = stored_name(model) in _ADDITIVE
    estimator, extra = (
        read_additive(model, _ADDITIVE) if is_additive else read_estimator(model, _ESTIMATORS)
    )
    if not extra or "table" not in extra:
        raise CheckpointError(
            f"{model}: was not written by `pyro-dak fit`, so its table is unknown."
        )
    if not is_additive:
        estimator.set_params(progress=_has_bars(quiet), device="auto")
    try:
        if estimator.columns_ is None:  # earlier versions stored the columns with the target
            columns = Columns.from_json(extra["table"])
            if len(columns.encoded_names) != estimator.n_features_in_:
                raise ValueError("has other columns than the model.")
            estimator.columns_, estimator.n_features_in_ = columns, len(columns.names)
            estimator.feature_names_in_ = np.array(columns.names, dtype=object)
        return estimator, Target.from_json(extra["table"]), extra
    except ValueError as error:
        raise CheckpointError(f"{model / 'config.json'}: {error}") from error


def _inputs(
    path: Path, columns: Columns, delimiter: str | None, ignore_unknown: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A table, and its input columns, which fit those of the training table."""
    frame = read_table(path, delimiter)
    with _naming(path):
        check_table(frame, columns, ignore_unknown)
        return frame, frame[columns.names]


def _print_pairs(pairs: dict[str, Any], console: Console, as_json: bool = False) -> None:
    if as_json:  # which has no word for NaN and infinity
        is_number = {k: not isinstance(v, float) or math.isfinite(v) for k, v in pairs.items()}
        pairs = {name: value if is_number[name] else None for name, value in pairs.items()}
        print(json.dumps(pairs, indent=1, allow_nan=False))
        return
    grid = Table(show_header=False, box=None)
    for name, value in pairs.items():
        text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        grid.add_row(name, Text(_printable(text), overflow="fold"))
    console.print(grid)
