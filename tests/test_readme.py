import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
LINKS = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)


def test_readme_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    assert BLOCKS
    names: dict[str, object] = {}
    for block in BLOCKS:  # later blocks use what earlier ones made
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize("link", LINKS)
def test_readme_links_exist(link):
    assert (ROOT / link).exists()
