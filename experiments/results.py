"""Results of runs on disk: one json each, written whole or not at all, read back by key."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["git_commit", "read_json", "read_runs", "write_json"]

_ROOT = Path(__file__).resolve().parent.parent


def git_commit() -> str:
    """The commit of the working tree, with "+changes" if it has any, or "unknown"."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` under a temporary name first, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a result, or None if there is none or it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_runs(directory: Path) -> Iterator[dict[str, Any]]:
    """All results below a directory, in the order of their paths."""
    for path in sorted(directory.rglob("*.json")):
        content = read_json(path)
        if content is not None:
            yield content
