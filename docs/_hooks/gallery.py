"""The gallery: each script under docs/gallery/ is run, and becomes a page with its pictures.

A script is cut into cells by lines that start with `# %%`, as editors know them. The docstring and
the comments at the head of a cell are Markdown, in which `{{name:.2f}}` is a number of the script,
formatted by Python. What a cell prints and draws follows its code.

    # %%                                    the code is shown
    # %% [figure] What the picture shows    the code is folded; the text is for those who cannot see
    # %% [check]                            runs and is not shown: it holds what the text claims

`python docs/_hooks/gallery.py SCRIPT FOLDER` runs one script. MkDocs runs all of them, in processes
with one thread each, and keeps what they give under build/gallery/ until a script or the library
changes.
"""

import ast
import contextlib
import hashlib
import html
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise, takewhile
from pathlib import Path
from textwrap import indent
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "gallery"
# What the pages depend on, beside their scripts, this file and the library.
_PACKAGES = ("torch", "pyro-ppl", "matplotlib", "scikit-learn", "arviz", "botorch")

_CELL = re.compile(r"# %%(?: \[(\w+)\])?(?: (.*))?$")
_NUMBER = re.compile(r"\{\{(\w+)(?::([^}]*))?\}\}")
_LINK = re.compile(r"\]\(((?:gallery/|\.\./gallery/)?\w+)\.py\)")
_CARD = re.compile(r"^- \[(.+?)\]\((\w+)\.py\): (.+(?:\n  .+)*)$", re.MULTILINE)
_FIGURE = """![{caption}]({name})

"""
_FOLDED = '??? example "Code of the picture"\n\n'
_FOOT = """
---

*The script of this page, [{name}]({name}), took {seconds:.0f} seconds of one core.*
"""


@dataclass(frozen=True)
class Cell:
    """A part of a script; `line` is where its code starts in the file."""

    kind: str
    caption: str
    text: str
    code: str
    line: int


def read_cells(source: str) -> Iterator[Cell]:
    """The cells of a script, after one that holds its docstring."""
    yield Cell("", "", ast.get_docstring(ast.parse(source)) or "", "", 1)
    lines = source.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("# %%")]
    for start, end in pairwise([*starts, len(lines)]):
        match = _CELL.match(lines[start])
        if match is None or match[1] not in (None, "figure", "check"):
            raise ValueError(f"line {start + 1}: `# %%`, [figure] or [check]; got {lines[start]}")
        comments = list(takewhile(lambda line: line.startswith("#"), lines[start + 1 : end]))
        text = "\n".join(line[1:].removeprefix(" ") for line in comments)
        first = start + 1 + len(comments)
        yield Cell(match[1] or "", match[2] or "", text, "\n".join(lines[first:end]), first + 1)


def run(script: Path, folder: Path, numbers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The names that a script leaves. Its page.md and its pictures are written to the folder.

    Args:
        numbers: values for constants of the script, such as fewer epochs. What its checks assert is
            of its own numbers, and is then left out.
    """
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    cells = list(read_cells(script.read_text(encoding="utf-8")))
    _check_known(cells, numbers or {})
    plt.close("all")  # what others have left open is no picture of this page
    parts, start = [], time.process_time()
    with plt.rc_context(_style()):
        for cell in cells:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(_compiled(cell, script, numbers or {}), names)
            parts.append(_markdown(cell, names, printed.getvalue(), _pictures(script, folder)))
    foot = _FOOT.format(name=script.name, seconds=max(1, time.process_time() - start))
    (folder / "page.md").write_text("---\nhide: [toc]\n---\n\n" + "".join(parts) + foot)
    return names


def _check_known(cells: list[Cell], numbers: Mapping[str, Any]) -> None:
    assigned = {name for cell in cells for name in re.findall(r"^([A-Z_]+) = ", cell.code, re.M)}
    if not set(numbers) <= assigned:
        raise ValueError(f"`numbers` must be among {sorted(assigned)}; got {sorted(numbers)}.")


def _compiled(cell: Cell, script: Path, numbers: Mapping[str, Any]) -> Any:
    """The code of a cell, with other values for its constants and with the lines of the file."""
    tree = ast.parse(cell.code, str(script))
    tree.body = [node for node in tree.body if not (numbers and isinstance(node, ast.Assert))]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id in numbers:
                value = ast.Constant(numbers[node.targets[0].id])
                node.value = ast.copy_location(value, node.value)
    return compile(ast.increment_lineno(tree, cell.line - 1), str(script), "exec")


def _pictures(script: Path, folder: Path) -> list[str]:
    """Names of the pictures that the open figures are written to; the figures are closed."""
    import matplotlib.pyplot as plt

    first = 1 + len(list(folder.glob(f"{script.stem}-*.png")))
    names = [f"{script.stem}-{i}.png" for i, _ in enumerate(plt.get_fignums(), first)]
    for name, number in zip(names, plt.get_fignums(), strict=True):
        plt.figure(number).savefig(folder / name)
    plt.close("all")
    return names


def _markdown(cell: Cell, names: dict[str, Any], printed: str, pictures: list[str]) -> str:
    """Text, code, what it printed and what it drew; of folded code, the pictures come first."""
    code = cell.code.strip()
    if cell.kind == "check":
        return ""
    text = _NUMBER.sub(lambda match: format(names[match[1]], match[2] or ""), cell.text)
    code = f"```python\n{code}\n```\n" if code else ""
    output = f"```text\n{printed.rstrip()}\n```\n" if printed else ""
    drawn = "".join(_FIGURE.format(caption=cell.caption, name=name) for name in pictures)
    if cell.kind == "figure":
        code = _FOLDED + indent(code, "    ")
        return f"{to_pages(text)}\n\n{drawn}{output}\n{code}\n"
    return f"{to_pages(text)}\n\n{code}\n{output}\n{drawn}"


def to_pages(markdown: str) -> str:
    """In the repository links lead to scripts, and on the site to their pages."""
    return _LINK.sub(r"](\1.md)", markdown)


def _style() -> dict[str, Any]:
    """The look of all pictures, that of the plots of the library."""
    from cycler import cycler

    from pyro_dak.drawing import INK, MUTED, PALETTE, RULE

    colors = {f"{name}.color": MUTED for name in ("xtick", "ytick")}
    return colors | {
        "axes.edgecolor": RULE,
        "axes.labelcolor": MUTED,
        "axes.prop_cycle": cycler(color=PALETTE),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": INK,
        "axes.titlelocation": "left",
        "axes.titlesize": 10.5,
        "figure.constrained_layout.use": True,
        "figure.figsize": (8.0, 3.0),
        "font.size": 9.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "legend.labelcolor": MUTED,
        "lines.linewidth": 1.8,
        "savefig.dpi": 160,
    }


def build(script: Path) -> Path:
    """The folder with the page of a script: the one that is kept, or a new one."""
    folder = CACHE / f"{script.stem}-{_digest(script)}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        made = Path(temporary) / "page"
        made.mkdir()
        one = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, str(script), str(made)]
        options = {"env": os.environ | one, "cwd": made, "capture_output": True, "text": True}
        done = subprocess.run(command, check=False, **options)
        if done.returncode:
            from mkdocs.exceptions import PluginError

            raise PluginError(f"{script.name} does not run:\n{done.stderr[-3000:]}")
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(folder)
    return folder


def _digest(script: Path) -> str:
    """A name for all that a page depends on."""
    digest = hashlib.sha256(sys.version.encode())
    for package in _PACKAGES:
        digest.update(version(package).encode())
    for path in [script, Path(__file__), *sorted((ROOT / "pyro_dak").rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the scripts, and the files that these have written."""
    from mkdocs.structure.files import File

    scripts = sorted((Path(config.docs_dir) / "gallery").glob("*.py"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        folders = list(pool.map(build, scripts))
    for script, folder in zip(scripts, folders, strict=True):
        for path in sorted(folder.iterdir()):
            name = f"{script.stem}.md" if path.name == "page.md" else path.name
            files.append(File.generated(config, f"gallery/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **arguments: Any) -> str:
    """The list of scripts on the page of the gallery becomes cards; other links lead to pages."""
    uri = page.file.src_uri
    if uri == "gallery/index.md":
        cards = [_card(match) for match in _CARD.finditer(markdown)]
        head, tail = markdown[: markdown.index("- [")], _CARD.split(markdown)[-1]
        return f'{head}<div class="gallery">\n{"".join(cards)}</div>\n{tail}'
    return markdown if uri.startswith("gallery/") else to_pages(markdown)


def _card(match: re.Match[str]) -> str:
    title, name, text = match.groups()
    words = " ".join(text.split())
    words = html.escape(words[0].upper() + words[1:])
    return (
        f'<a href="{name}.html"><img src="{name}-1.png" alt="">'
        f"<strong>{html.escape(title)}</strong><span>{words}</span></a>\n"
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
