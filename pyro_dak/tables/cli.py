"""The command line: `pyro-dak fit`, `predict`, `evaluate`, `info`.

Data go to stdout or a file, messages and progress to stderr. Exit codes: 0 fine, 1 failure with one
line that says what is wrong, 2 wrong usage. Existing output is replaced only with `--force`.
"""

import functools
import importlib.metadata
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from pyro_dak.tables.estimators import DAKClassifier, DAKRegressor
from pyro_dak.tables.files import TableError, check_writable, read_table, write_table
from pyro_dak.tables.saving import check_path, read_estimator, write_estimator
from pyro_dak.tables.schema import Schema, inputs, learn_schema, targets
from pyro_dak.tables.scores import calibration_plot, class_scores, regression_scores
from pyro_dak.training.checkpoint import CheckpointError

__all__ = ["app"]

_LEAST_ROWS = 10
_ESTIMATORS = {"DAKClassifier": DAKClassifier, "DAKRegressor": DAKRegressor}

# Set by the options in front of the command, at every call.
_settings = {"debug": False}

app = typer.Typer(
    name="pyro-dak",
    help="Tables in, predictions with error bars out: deep additive kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

ModelPath = Annotated[Path, typer.Argument(help="Directory written by [bold]fit[/bold].")]
Delimiter = Annotated[str | None, typer.Option(help="Of a CSV file; a comma.")]
Force = Annotated[bool, typer.Option("--force", help="Replace output that exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no messages.")]
Unknown = Annotated[
    bool, typer.Option("--ignore-unknown", help="Take unknown categories as none of the known.")
]


@app.callback(invoke_without_command=True)
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    _settings["debug"] = debug
    if version:
        print(_version())
        raise typer.Exit


def _failing_clearly(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors become one line on stderr and exit code 1, unless --debug."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if _settings["debug"]:
            return command(*args, **kwargs)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            _say("Interrupted.")
        except (CheckpointError, OSError, TableError) as error:
            _say(f"Error: {_one_line(error)}")
        except Exception as error:
            _say(f"Error: {_one_line(error)} (`pyro-dak --debug ...` shows where.)")
        raise typer.Exit(1)

    return wrapped


def _version() -> str:
    return importlib.metadata.version("pyro_dak")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


@app.command()
@_failing_clearly
def fit(
    table: Annotated[Path, typer.Argument(help="CSV or Parquet file with the training rows.")],
    target: Annotated[str, typer.Option(help="Column to predict.")],
    out: Annotated[Path, typer.Option(help="Directory for the model.")],
    task: Annotated[
        str | None, typer.Option(help="regression or classification; found from the target.")
    ] = None,
    ensemble_size: Annotated[int, typer.Option(help="Networks, trained in one pass.", min=1)] = 1,
    epochs: Annotated[int | None, typer.Option(help="Passes over the rows.", min=1)] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Column to leave out.")] = None,
    categorical: Annotated[list[str] | None, typer.Option(help="Column of categories.")] = None,
    delimiter: Delimiter = None,
    seed: Annotated[int, typer.Option(help="Same seed, same model.", min=0)] = 0,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Learn to predict a column of a table from the others."""
    if task not in (None, "regression", "classification"):
        raise typer.BadParameter("must be regression or classification.", param_hint="--task")
    _check_model_path(out, force)
    frame = read_table(table, delimiter)
    with _naming(table):
        if len(frame) < _LEAST_ROWS:
            raise TableError(f"has {len(frame)} rows; at least {_LEAST_ROWS} are needed.")
        schema = learn_schema(frame, target, task, drop or (), categorical or ())  # type: ignore[arg-type]
        y, X = targets(frame, schema), inputs(frame, schema)
        if schema.task == "classification" and len(np.unique(y.astype(str))) < 2:
            raise TableError(f"target `{target}` has one class only; there is nothing to learn.")
    kind = DAKClassifier if schema.task == "classification" else DAKRegressor
    estimator = kind(ensemble_size, epochs=epochs, random_state=seed, progress=not quiet)
    if not quiet:
        _say(f"{schema.task} of `{target}` from {X.shape[1]} columns of numbers, {len(X)} rows")
    estimator.fit(X, y)
    extra = {"table": schema.to_json(), "num_rows": len(X), "version": _version()}
    write_estimator(estimator, out, force, extra)
    if not quiet:
        _say(f"Saved to {out}")


@app.command()
@_failing_clearly
def predict(
    model: ModelPath,
    table: Annotated[Path, typer.Argument(help="CSV or Parquet file with rows to predict.")],
    out: Annotated[Path | None, typer.Option(help="File for the predictions; stdout.")] = None,
    level: Annotated[float, typer.Option(help="Probability of the interval.")] = 0.9,
    delimiter: Delimiter = None,
    ignore_unknown: Unknown = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Predict rows: mean, std and interval, or class probabilities."""
    if not 0 < level < 1:
        raise typer.BadParameter("must lie between 0 and 1.", param_hint="--level")
    if out is not None:
        check_writable(out, force)
    estimator, schema, _ = _load(model, quiet)
    X = _inputs(table, schema, delimiter, ignore_unknown)[1]
    if isinstance(estimator, DAKRegressor):
        prediction = estimator.predict_dist(X)
        lower, upper = prediction.interval(level)
        columns = {"mean": prediction.mean, "std": prediction.std, "lower": lower, "upper": upper}
    else:
        probs = estimator.predict_proba(X)
        columns = {"label": estimator.classes_[probs.argmax(-1)]}
        columns |= {f"p_{name}": probs[:, k] for k, name in enumerate(estimator.classes_)}
    result = pd.DataFrame(columns)
    if out is None:
        result.to_csv(sys.stdout, index=False)
    else:
        write_table(result, out, force)


@app.command()
@_failing_clearly
def evaluate(
    model: ModelPath,
    table: Annotated[Path, typer.Argument(help="CSV or Parquet file with rows and targets.")],
    plot: Annotated[Path | None, typer.Option(help="File for a calibration plot.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Scores as JSON.")] = False,
    delimiter: Delimiter = None,
    ignore_unknown: Unknown = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Score predictions of rows whose targets are known."""
    if plot is not None:
        check_writable(plot, force)
    estimator, schema, _ = _load(model, quiet)
    frame, X = _inputs(table, schema, delimiter, ignore_unknown)
    with _naming(table):
        y = targets(frame, schema)
        if isinstance(estimator, DAKRegressor):
            scores, curve = regression_scores(estimator.predict_dist(X), y)
        else:
            scores, curve = class_scores(estimator.predict_proba(X), y, estimator.classes_)
    if plot is not None:
        calibration_plot(curve, plot)
    _print_pairs(scores, as_json)


@app.command()
@_failing_clearly
def info(
    model: ModelPath,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what a model is: its task, columns and training."""
    estimator, schema, extra = _load(model, True)
    _print_pairs(
        {
            "task": schema.task,
            "target": schema.target,
            "numeric columns": len(schema.medians),
            "text columns": len(schema.categories),
            "training rows": extra.get("num_rows"),
            "networks": estimator.ensemble_size,
            "epochs": len(estimator.history_.rows),
            "calibration": estimator.calibration_,
            "pyro_dak": extra.get("version"),
        },
        as_json,
    )


class _naming:
    """Errors about a table inside get the name of its file."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, TableError):
            raise TableError(f"{self.path}: {error}") from error


def _check_model_path(out: Path, force: bool) -> None:
    try:
        check_path(out, force)
    except FileExistsError as error:
        raise TableError(str(error).replace("pass overwrite=True", "pass --force")) from error


def _load(model: Path, quiet: bool) -> tuple[Any, Schema, dict[str, Any]]:
    estimator, extra = read_estimator(model, _ESTIMATORS)
    if not extra or "table" not in extra:
        raise CheckpointError(
            f"{model}: was not written by `pyro-dak fit`, so its table is unknown."
        )
    estimator.set_params(progress=not quiet, device="auto")
    try:
        return estimator, Schema.from_json(extra["table"]), extra
    except ValueError as error:
        raise CheckpointError(f"{model / 'config.json'}: {error}") from error


def _inputs(
    path: Path, schema: Schema, delimiter: str | None, ignore_unknown: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    frame = read_table(path, delimiter)
    with _naming(path):
        return frame, inputs(frame, schema, ignore_unknown)


def _print_pairs(pairs: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(pairs, indent=1))
        return
    grid = Table(show_header=False, box=None)
    for name, value in pairs.items():
        grid.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(grid)
