"""Tables and figures from the recorded runs, and everything on one self-contained HTML page.

    python -m experiments.report
    python -m experiments.report --results results/demo

For every `results/<experiment>/runs.jsonl` the module of the experiment writes `table.md` and what
it draws into `figures/`. Then every folder becomes a section of the page: its table, its figures,
and its runs with their scores, configuration and commit. Tables sort at a click on a heading. The
page asks nothing of the network: styles, script and pictures are in the file.
"""

import base64
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import markdown
import typer

from experiments import screen
from experiments.runs import (
    FILE,
    RESULTS,
    Line,
    damaged_lines,
    git_commit,
    read_runs,
    scores_by_model,
    write_text,
)
from pyro_dak.training.files import write_whole

__all__ = [
    "Section",
    "add_spread",
    "announce_report",
    "collect",
    "markdown_table",
    "newest",
    "render",
    "save_figure",
    "write_page",
    "write_report",
]

# Each has `table(runs) -> str`, and may have `draw(runs, figures) -> list of paths`.
EXPERIMENTS = (
    "ablation",
    "active",
    "additive",
    "bandit",
    "bench",
    "classifiers",
    "cost",
    "coverage",
    "estimators",
    "hmc",
    "images",
    "optimization",
    "toy",
    "uci",
)
_TEMPLATE = Path(__file__).with_name("report_template.html")
_KINDS = {".png": "image/png", ".svg": "image/svg+xml"}
_FEW = 20  # so many runs are shown at once, more at a click


def write_report(directory: Path) -> list[Path]:
    """Write the table and the figures of the runs in a directory, and return their paths."""
    runs = read_runs(directory)
    name = runs[-1]["experiment"] if runs else None
    if name not in EXPERIMENTS:
        return []
    module = import_module(f"experiments.{name}")
    paths = [write_text(directory / "table.md", module.table(runs))]
    if hasattr(module, "draw"):
        paths += module.draw(runs, directory / "figures")
    return paths


def announce_report(directory: Path) -> None:
    """Write the report of a directory, and say which files were written."""
    for path in write_report(directory):
        screen.say(f"written {path}")


def newest(runs: Sequence[Line], place_fn: Callable[[Line], Hashable]) -> list[Line]:
    """Of the runs that have one place in a table, the last one."""
    return list({place_fn(run): run for run in runs}.values())


def add_spread(summary: dict[str, Any], name: str, values: Sequence[float]) -> None:
    """Set the mean of the values under `name`, and their standard deviation under `name_std`."""
    summary[name] = statistics.fmean(values)
    summary[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else math.nan


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, without a line break at its end."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def save_figure(figure: Any, path: Path, is_tight: bool = True) -> Path:
    """Write a figure of matplotlib and close it."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    if is_tight:
        figure.tight_layout()
    kind = path.suffix.removeprefix(".")
    write_whole(path, lambda temporary: figure.savefig(temporary, format=kind, dpi=110))
    plt.close(figure)
    return path


@dataclass
class Section:
    """What lies in one folder of results."""

    name: str
    tables: list[Path] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    runs: list[Line] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)


def collect(results: Path) -> list[Section]:
    """A section for each folder that holds runs, a table or figures, in the order of names."""
    sections = []
    for directory in sorted(path for path in results.iterdir() if path.is_dir()):
        figures = sorted(p for p in directory.glob("figures/*") if p.suffix in _KINDS)
        tables, runs = sorted(directory.glob("*.md")), read_runs(directory)
        section = Section(directory.name, tables, figures, runs, damaged_lines(directory))
        if tables or figures or runs or section.damaged:
            sections.append(section)
    return sections


def render(sections: list[Section], results: Path) -> str:
    """The page."""
    runs = [run for section in sections for run in section.runs]
    commits = Counter(run["commit"] for run in runs)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = f"{len(runs)} runs under {results.name}/, page made {made} at commit {git_commit()}."
    if commits:
        counts = ", ".join(f"{commit} ({count})" for commit, count in commits.most_common())
        facts += f" Runs by commit: {counts}."
    links = "".join(f'<a href="#{escape(s.name)}">{escape(s.name)}</a>' for s in sections)
    body = "".join(_section(section) for section in sections)
    page = _TEMPLATE.read_text()
    for key, value in (("facts", escape(facts)), ("links", links), ("sections", body)):
        page = page.replace(f"<!-- {key} -->", value)
    return page


def _section(section: Section) -> str:
    parts = [f'<section id="{escape(section.name)}"><h2>{escape(section.name)}</h2>']
    parts += [_table_file(path) for path in section.tables]
    parts += [_figure(path) for path in section.figures]
    if section.damaged:
        numbers = ", ".join(map(str, section.damaged))
        parts.append(f'<p class="warning">Lines of {FILE} that cannot be read: {numbers}</p>')
    if section.runs:
        count = f"{len(section.runs)} run{'s' * (len(section.runs) != 1)}"
        is_open = " open" if len(section.runs) <= _FEW else ""
        parts.append(f"<details{is_open}><summary>{count}: scores, configuration, commit</summary>")
        parts.append(_run_table(section.runs) + "</details>")
    return "".join([*parts, "</section>\n"])


def _table_file(path: Path) -> str:
    """A Markdown file; raw HTML in it is shown as text, its headings go below the section's."""
    converter = markdown.Markdown(extensions=["tables", "fenced_code"])
    converter.preprocessors.deregister("html_block")
    converter.inlinePatterns.deregister("html")
    html = converter.convert(path.read_text(errors="replace"))
    for level in (4, 3, 2, 1):
        html = html.replace(f"<h{level}>", f"<h{level + 2}>")
        html = html.replace(f"</h{level}>", f"</h{level + 2}>")
    html = html.replace("<table>", '<div class="scroll"><table class="sortable">')
    html = html.replace("</table>", "</table></div>")
    title = "" if path.stem == "table" else f"<h3>{escape(path.stem)}</h3>"
    return title + html


def _figure(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    name = escape(path.stem)
    source = f"data:{_KINDS[path.suffix]};base64,{data}"
    return f'<figure><img alt="{name}" src="{source}"><figcaption>{name}</figcaption></figure>'


def _run_table(runs: list[Line]) -> str:
    scores = [(run, model, values) for run in runs for model, values in _scores(run)]
    names = list(dict.fromkeys(name for _, _, values in scores for name in values))
    heads = ["run", *names, "status", "commit", "configuration"]
    rows = "".join(_row(run, model, values, names) for run, model, values in scores)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    table = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll"><table class="sortable">{table}</table></div>'


def _scores(run: Line) -> list[tuple[str, dict[str, float]]]:
    return list(scores_by_model(run).items())


def _row(run: Line, model: str, values: dict[str, float], names: list[str]) -> str:
    config = run["config"]
    numbers = (f"{key} {config[key]}" for key in ("fold", "split", "seed") if key in config)
    cells = [escape(" ".join([config["dataset"], model, *numbers]))]
    cells += [_number(values[name]) if name in values else "" for name in names]
    status = "draft" if run.get("draft") else run.get("status", "finished")
    cells += [escape(status), f"<code>{escape(run['commit'])}</code>"]
    shown = escape(json.dumps(config, indent=1))
    cells += [f"<details><summary>show</summary><pre>{shown}</pre></details>"]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def write_page(results: Path, out: Path) -> list[Section]:
    """Write the page, whole or not at all, and return what is on it."""
    sections = collect(results)
    write_text(out, render(sections, results))
    return sections


def main(
    results: Annotated[Path, typer.Option(help="The directory of the results.")] = RESULTS,
    out: Annotated[Path | None, typer.Option(help="The page; else report.html there.")] = None,
) -> None:
    """Write all tables and figures, then the page, and print where it is."""
    if not results.is_dir():
        raise typer.BadParameter(f"{results} is not a directory.", param_hint="--results")
    path = out or results / "report.html"
    with screen.working("report"):
        for directory in sorted(p.parent for p in results.glob(f"*/{FILE}")):
            write_report(directory)
        sections = write_page(results, path)
    counts = [(s.name, s.runs, s.tables, s.figures, s.damaged) for s in sections]
    rows = [[name, *(str(len(parts)) for parts in lists)] for name, *lists in counts]
    columns = ["experiment", "runs", "tables", "figures", "damaged lines"]
    screen.show_table("What is on the page", columns, rows)
    screen.say(f"report  {path}")


if __name__ == "__main__":
    typer.run(main)
