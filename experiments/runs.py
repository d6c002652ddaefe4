"""Runs on disk: what a run is, which runs are there already, and how a new one is recorded.

The runs of an experiment are the lines of `results/<experiment>/runs.jsonl`. A line holds the name
of the experiment, the configuration of the run, the commit it was made with, and what came out.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import typer

from experiments import screen
from models.shared.recipe import Recipe
from pyro_dak.training.files import write_whole

__all__ = [
    "DRAFTS",
    "FILE",
    "RESULTS",
    "Job",
    "Line",
    "Recorder",
    "RunFn",
    "UncommittedChangesError",
    "damaged_lines",
    "git_commit",
    "read_runs",
    "result_directory",
    "run_all",
    "scores_by_model",
    "start",
    "write_text",
]

_ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("results")
DRAFTS = RESULTS / "draft"  # git ignores it
FILE = "runs.jsonl"
# These settings change no result.
_IDLE = ("device", "progress", "data_root")

Line = dict[str, Any]


class UncommittedChangesError(RuntimeError):
    """A run cannot be recorded, because no commit holds the code that makes it."""


@dataclass(frozen=True)
class Job:
    """One run: a model on a data set with a seed, and everything else that decides its result.

    Args:
        experiment: the module of `experiments` that makes the run and its table.
        dataset: the data, or the problem.
        model: the model, or "all" where several are measured side by side.
        seed: the seed.
        settings: all other settings, as json can hold them. A recipe is under "recipe".
    """

    experiment: str
    dataset: str
    model: str
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, line: Line) -> "Job":
        """The job of a recorded run."""
        settings = dict(line["config"])
        own = {name: settings.pop(name) for name in ("dataset", "model", "seed")}
        return cls(line["experiment"], **own, settings=settings)

    @property
    def config(self) -> dict[str, Any]:
        """The job as its line tells it."""
        config = {"dataset": self.dataset, "model": self.model, "seed": self.seed} | self.settings
        return json.loads(json.dumps(config))

    @property
    def recipe(self) -> Recipe:
        """The recipe among the settings."""
        return Recipe(**self.settings["recipe"])

    @property
    def key(self) -> str:
        """Jobs with the same key have the same result.

        A setting that is None, False or empty counts as left out, and so does what changes no
        result: the device and the bars.
        """
        config = self.config
        if "recipe" in config:
            filled = asdict(Recipe()) | config["recipe"]  # older lines lack newer settings
            config["recipe"] = {k: v for k, v in filled.items() if k not in _IDLE}
        kept = {k: v for k, v in config.items() if k not in _IDLE and not _is_empty(v)}
        return json.dumps({"experiment": self.experiment} | kept, sort_keys=True)

    @property
    def name(self) -> str:
        """A name for files: the model, the seed, and ten digits that stand for the settings."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:10]
        return f"{self.dataset}-{self.model}-seed{self.seed}-{digest}".replace(" ", "_")


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value == {} or value == []


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _changed_files() -> list[str]:
    """Tracked Python files with changes that are not committed."""
    status = _git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return [line.split(maxsplit=1)[1] for line in status.splitlines()]


def git_commit() -> str:
    """The commit of the working tree, with "+changes" if it has any, or "unknown" without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return f"{head}+changes" if _changed_files() else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _is_kept_by_git(path: Path) -> bool:
    """Whether a file of this name would be part of the repository."""
    path = path.resolve()
    if not path.is_relative_to(_ROOT):
        return False
    command = ["git", "-C", str(_ROOT), "check-ignore", "--quiet", str(path)]
    return subprocess.run(command, capture_output=True).returncode == 1


def result_directory(name: str, out: Path | None, is_draft: bool) -> Path:
    """Where the runs of an experiment go: `out` if given, else below results or its drafts."""
    return out or (DRAFTS if is_draft else RESULTS) / name


def start(main: Callable[..., None]) -> None:
    """Run the command of an experiment; if it must not record, say why and stop."""
    try:
        typer.run(main)
    except UncommittedChangesError as error:
        screen.say(f"Error: {error}")
        sys.exit(1)


def write_text(path: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: temporary.write_text(text))
    return path


def _read_lines(directory: Path) -> Iterator[tuple[int, Line | None]]:
    """The number and the content of each line; None for a line that cannot be read."""
    path = directory / FILE
    text = path.read_text(errors="replace") if path.is_file() else ""
    for number, row in enumerate(text.splitlines(), 1):
        if row.strip():
            try:
                line = json.loads(row)
                Job.of(line)
            except (ValueError, KeyError, TypeError):
                line = None
            yield number, line


def read_runs(directory: Path) -> list[Line]:
    """The newest line of each job, in the order of the file."""
    lines = {Job.of(line).key: line for _, line in _read_lines(directory) if line is not None}
    return list(lines.values())


def damaged_lines(directory: Path) -> list[int]:
    """The numbers of the lines that cannot be read."""
    return [number for number, line in _read_lines(directory) if line is None]


def scores_by_model(line: Line) -> dict[str, dict[str, float]]:
    """The numbers among the metrics of a run, by model: its own, or those of its parts."""
    metrics = line.get("metrics", {})
    parts = {name: _numbers(value) for name, value in metrics.items() if isinstance(value, dict)}
    parts = {name: values for name, values in parts.items() if values}
    own = _numbers(metrics)
    return parts if parts and not own else {line["config"]["model"]: own}


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class Recorder:
    """Adds lines to the runs in a directory. Several processes may do so at the same time.

    Where git keeps the file, the tree must be free of uncommitted changes, so that the commit in a
    line is that of the code that ran. Elsewhere such runs are marked as drafts.
    """

    def __init__(self, directory: Path):
        self.path = directory / FILE
        self.commit = git_commit()
        self.is_draft = self.commit.endswith("+changes")
        if self.is_draft and _is_kept_by_git(self.path):
            files = ", ".join(_changed_files()[:3])
            raise UncommittedChangesError(
                f"Runs in {directory} must name the commit that made them, and there are changes "
                f"that are not committed ({files}). Commit them, or pass --draft to write to "
                f"{DRAFTS}, which git ignores."
            )

    def record(self, job: Job, content: dict[str, Any]) -> Line:
        """Append the run as one line, under a lock, and return the line."""
        line: Line = {"experiment": job.experiment, "config": job.config, "commit": self.commit}
        line |= ({"draft": True} if self.is_draft else {}) | content
        data = (json.dumps(line) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _ends_within_a_line(file):  # a process was stopped while it wrote
                data = b"\n" + data
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return json.loads(data)


def _ends_within_a_line(file: Any) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) != b"\n")


# run_fn(job, tell) makes a run and returns what its line says besides job and commit; tell(text)
# shows how far it is.
RunFn = Callable[[Job, Callable[[str], None]], dict[str, Any]]


def run_all(
    jobs: Sequence[Job],
    run_fn: RunFn,
    directory: Path,
    headline: dict[str, str],
    *,
    resume: bool = True,
    num_workers: int = 1,
    label_fn: Callable[[Job], str] | None = None,
    has_table: bool = True,
) -> list[Line]:
    """Make the runs that are not recorded yet, record each as it comes, and return all lines.

    Every run prints one line. The table at the end has the means over runs of each model.

    Args:
        jobs: the runs to have.
        run_fn: makes one run; for several workers it must be a function of a module.
        directory: where the runs are recorded.
        headline: metrics to print, with their titles.
        resume: whether runs that are recorded are kept as they are.
        num_workers: processes that run at the same time.
        label_fn: what to call a job on the screen.
        has_table: whether the table at the end is printed.
    """
    recorder = Recorder(directory)
    label_fn = label_fn or (lambda job: f"{job.dataset} {job.model}, seed {job.seed}")
    recorded = {Job.of(line).key: line for line in read_runs(directory)} if resume else {}
    found = {job.key: recorded.get(job.key) for job in jobs}
    left = [job for job in jobs if found[job.key] is None]
    if resume:
        known = len(jobs) - len(left)
        screen.say(f"{known} of {len(jobs)} runs are recorded already; {len(left)} to make.")
    for job, content, seconds in _results(left, run_fn, num_workers, label_fn):
        line = found[job.key] = recorder.record(job, content)
        screen.say(", ".join([label_fn(job), *_summary(line, headline), f"{seconds:.0f} s"]))
    lines = [line for line in found.values() if line is not None]
    if headline and has_table:
        show_means(lines, headline)
    return lines


def _results(
    jobs: Sequence[Job], run_fn: RunFn, num_workers: int, label_fn: Callable[[Job], str]
) -> Iterator[tuple[Job, dict[str, Any], float]]:
    if num_workers == 1:
        for job in jobs:
            start = time.perf_counter()
            with screen.working(label_fn(job)) as tell:
                content = run_fn(job, tell)
            yield job, content, time.perf_counter() - start
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        futures = {pool.submit(_run_silently, run_fn, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], *future.result()


def _run_silently(run_fn: RunFn, job: Job) -> tuple[dict[str, Any], float]:
    start = time.perf_counter()
    with screen.quiet():
        content = run_fn(job, partial(str))
    return content, time.perf_counter() - start


def _summary(line: Line, headline: dict[str, str]) -> list[str]:
    values = next(iter(scores_by_model(line).values()))
    shown = [(title, values[name]) for name, title in headline.items() if name in values]
    return [f"{title} {value:.4g}" for title, value in shown[:3]]


def show_means(lines: Sequence[Line], headline: dict[str, str]) -> None:
    """Print a table with the mean of each metric over the runs of each data set and model."""
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for line in lines:
        for model, values in scores_by_model(line).items():
            groups.setdefault((line["config"]["dataset"], model), []).append(values)
    rows = []
    for (dataset, model), group in groups.items():
        cells = [dataset, model, str(len(group))]
        for name in headline:
            values = [values[name] for values in group if name in values]
            cells.append(f"{sum(values) / len(values):.4g}" if values else "")
        rows.append(cells)
    screen.show_table("Means over runs", ["data", "model", "runs", *headline.values()], rows)
