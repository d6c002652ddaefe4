"""One self-contained HTML page from everything under the results directory.

    python -m experiments.report
    python -m experiments.report --results results/demo --out results/demo/report.html

Every folder with results becomes a section: its tables (Markdown files), its figures, and its runs
(json files) with their scores, configuration and commit. Tables sort at a click on a heading. The
page asks nothing of the network: styles, script and pictures are in the file.
"""

import base64
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Annotated, Any

import markdown
import typer

from experiments.results import git_commit, read_json

__all__ = ["Run", "Section", "collect", "render", "write_page"]

_TEMPLATE = Path(__file__).with_name("report_template.html")
_FIGURES = {".png": "image/png", ".svg": "image/svg+xml"}
_FEW = 20  # so many runs are shown at once, more at a click
_SKIPPED = "checkpoints"  # folders of what a stopped run goes on from


@dataclass(frozen=True)
class Run:
    """One json: where it is, where it comes from, and its scores, one set or one per model."""

    name: str
    commit: str
    status: str
    config: dict[str, Any]
    scores: dict[str, dict[str, float]]


@dataclass
class Section:
    """What lies in one folder."""

    name: str
    tables: list[Path] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def collect(results: Path) -> list[Section]:
    """Sections in the order of their names; runs in subfolders belong to the top folder."""
    sections: dict[str, Section] = {}
    for path in sorted(results.rglob("*")):
        relative = path.relative_to(results)
        if not path.is_file() or _SKIPPED in relative.parts or path.name.startswith("."):
            continue
        name = relative.parts[0] if len(relative.parts) > 1 else results.name
        section = sections.setdefault(name, Section(name))
        if path.suffix == ".md":
            section.tables.append(path)
        elif path.suffix in _FIGURES:
            section.figures.append(path)
        elif path.suffix == ".json":
            _add_run(section, path, str(relative.with_suffix("")))
    return [section for _, section in sorted(sections.items()) if _has_content(section)]


def _has_content(section: Section) -> bool:
    return bool(section.tables or section.figures or section.runs or section.damaged)


def _add_run(section: Section, path: Path, name: str) -> None:
    content = read_json(path)
    if content is None:
        section.damaged.append(name)
        return
    config = content.get("config", {})
    section.runs.append(
        Run(
            name,
            str(content.get("commit", "unknown")),
            str(content.get("status", "finished")),
            config if isinstance(config, dict) else {"config": config},
            _scores(content.get("metrics", {})),
        )
    )


def _scores(metrics: Any) -> dict[str, dict[str, float]]:
    """Numbers of a run by model; a run of one model has the name ""."""
    if not isinstance(metrics, dict):
        return {"": {}}
    by_model = {name: _numbers(value) for name, value in metrics.items() if isinstance(value, dict)}
    by_model = {name: values for name, values in by_model.items() if values}
    own = _numbers(metrics)
    return by_model if by_model and not own else {"": own}


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def render(sections: list[Section], results: Path) -> str:
    """The page."""
    runs = [run for section in sections for run in section.runs]
    commits = Counter(run.commit for run in runs)
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
        names = ", ".join(section.damaged)
        parts.append(f'<p class="warning">Not readable as json: {escape(names)}</p>')
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
    source = f"data:{_FIGURES[path.suffix]};base64,{data}"
    return f'<figure><img alt="{name}" src="{source}"><figcaption>{name}</figcaption></figure>'


def _run_table(runs: list[Run]) -> str:
    names = list(dict.fromkeys(n for run in runs for s in run.scores.values() for n in s))
    heads = ["run", *names, "status", "commit", "configuration"]
    rows = "".join(_row(run, label, names) for run in runs for label in run.scores)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    table = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll"><table class="sortable">{table}</table></div>'


def _row(run: Run, label: str, names: list[str]) -> str:
    values = run.scores[label]
    cells = [escape(f"{run.name} {label}".strip())]
    cells += [_number(values[name]) if name in values else "" for name in names]
    config = escape(json.dumps(run.config, indent=1, default=str))
    cells += [escape(run.status), f"<code>{escape(run.commit)}</code>"]
    cells += [f"<details><summary>show</summary><pre>{config}</pre></details>"]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def write_page(results: Path, out: Path) -> list[Section]:
    """Write the page, whole or not at all; returns what is on it."""
    sections = collect(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.write_text(render(sections, results))
    os.replace(temporary, out)
    return sections


def main(
    results: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("results"),
    out: Annotated[Path | None, typer.Option(help="The page; report.html beside them.")] = None,
) -> None:
    """Write the page and print where it is."""
    if not results.is_dir():
        raise typer.BadParameter(f"{results} is not a directory.", param_hint="--results")
    path = out or results / "report.html"
    for line in _summary(write_page(results, path)):
        print(line)
    print(path)


def _summary(sections: list[Section]) -> Iterator[str]:
    for s in sections:
        line = f"{s.name}: {len(s.runs)} runs, {len(s.tables)} tables, {len(s.figures)} figures"
        yield line + (f", {len(s.damaged)} not readable" if s.damaged else "")


if __name__ == "__main__":
    typer.run(main)
