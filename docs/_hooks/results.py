"""Tables and figures under results/ as parts of the site, so that pages can link to them."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\]\((?:\.\./)+results/")


def on_files(files: Files, config: Any) -> Files:
    """Add the tables and figures, which lie beside the folder of the documentation."""
    root = Path(config.docs_dir).parent
    for pattern in ("*/table.md", "*/figures/*.png"):
        for path in sorted((root / "results").glob(pattern)):
            uri = path.relative_to(root).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **arguments: Any) -> str:
    """In the repository, links lead out of docs/; on the site, results/ lies inside it."""
    up = "../" * page.file.src_uri.count("/")
    return _LINK.sub(f"]({up}results/", markdown)
