"""The gallery: its scripts run, its pages say what they compute, and its links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from pyro_dak.validation import import_optional

import_optional("matplotlib").use("Agg")
ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
SCRIPTS = sorted(path.stem for path in GALLERY.glob("*.py"))
# Numbers with which a page takes a second or two. What it claims is of its own numbers.
FEW = {
    "classes": {"EPOCHS": 1},
    "network": {"EPOCHS": 1},
    "online": {"DAYS": 33, "ROUNDS": 20},
    "optimisation": {"ROUNDS": 1},
    "posterior": {"EPOCHS": 5, "DRAWS": 20},
    "program": {"STEPS": 2},
    "table": {"EPOCHS": 1, "LEVEL": 2},
    "toy": {"EPOCHS": 2},
}


def load_hook():
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs/_hooks/gallery.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


gallery = load_hook()

EXAMPLE = '''"""# A title

An introduction to [toy](toy.py).
"""

# %%
# Some text.

HEIGHT = 3


def area(width):
    return HEIGHT * width


print(area(2))

# %% [figure] A line.

import matplotlib.pyplot as plt

plt.plot([0, 1], [0, HEIGHT])

# %% [check]

total = float(area(4))
assert total == 12

# %%
# In all {{total:.1f}} of {{HEIGHT}}.
'''


@pytest.fixture
def example(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE)
    return script


def test_a_script_becomes_a_page(example, tmp_path):
    import_optional("matplotlib.pyplot").figure()  # left open by someone else
    gallery.run(example, tmp_path)
    page = (tmp_path / "page.md").read_text()
    assert "# A title\n\nAn introduction to [toy](toy.md)." in page
    assert "    return HEIGHT * width\n\n\nprint(area(2))\n```\n\n```text\n6\n```" in page
    assert "![A line.](example-1.png)" in page
    assert page.index("example-1.png") < page.index("    plt.plot")
    assert "assert" not in page
    assert "In all 12.0 of 3." in page
    assert "[example.py](example.py), took 1 seconds" in page
    assert (tmp_path / "example-1.png").stat().st_size > 0


def test_other_numbers_leave_the_claims_out(example, tmp_path):
    assert gallery.run(example, tmp_path, {"HEIGHT": 5})["total"] == 20
    assert "In all 20.0 of 5." in (tmp_path / "page.md").read_text()
    with pytest.raises(ValueError, match=r"must be among \['HEIGHT'\]; got \['WIDTH'\]"):
        gallery.run(example, tmp_path, {"WIDTH": 5})


def test_a_claim_that_does_not_hold_stops_the_page(example, tmp_path):
    example.write_text(EXAMPLE.replace("== 12", "== 13"))
    with pytest.raises(AssertionError) as error:
        gallery.run(example, tmp_path)
    line = 1 + EXAMPLE.splitlines().index("assert total == 12")
    assert error.traceback[-1].lineno + 1 == line


def test_an_unknown_cell_is_refused(example, tmp_path):
    example.write_text(EXAMPLE.replace("[check]", "[checks]"))
    with pytest.raises(ValueError, match=r"\[figure\] or \[check\]; got # %% \[checks\]"):
        gallery.run(example, tmp_path)


def test_a_page_is_kept_until_its_script_changes(example, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "CACHE", tmp_path / "kept")
    folder = gallery.build(example)
    assert sorted(path.name for path in folder.iterdir()) == ["example-1.png", "page.md"]
    (folder / "page.md").write_text("kept")
    assert (gallery.build(example) / "page.md").read_text() == "kept"
    example.write_text(EXAMPLE.replace("Some text", "Other text"))
    assert folder.name != f"example-{gallery._digest(example)}"
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [folder.name]


def run_page(name, folder, numbers=None):
    torch.set_default_dtype(torch.float32)
    return gallery.run(GALLERY / f"{name}.py", folder, numbers)


# GPyTorch, which BoTorch imports, uses torch.jit.
@pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_runs_with_few_numbers(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(name, tmp_path, FEW[name])
    pictures = [path for path in tmp_path.glob(f"{name}-*.png")]
    assert (tmp_path / "page.md").read_text().count("![") == len(pictures) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_runs_and_its_claims_hold(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(name, tmp_path)
    assert "{{" not in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_is_short_and_ends_with_what_to_read_next(name):
    cells = list(gallery.read_cells((GALLERY / f"{name}.py").read_text()))
    texts = [cell.text for cell in cells]
    assert "**Read next:**" in texts[-1]
    assert sum(len(text.split()) for text in texts) <= 420
    assert sum(cell.code.count("\n") for cell in cells if cell.kind == "") <= 90
    assert all(cell.caption for cell in cells if cell.kind == "figure")
    links = re.findall(r"\]\(([^)#]+)", "".join(texts))
    assert [link for link in links if not (GALLERY / link).exists()] == []


def test_the_index_has_all_pages_and_the_navigation_too():
    index = (GALLERY / "index.md").read_text()
    assert sorted(match[2] for match in gallery._CARD.finditer(index)) == SCRIPTS
    navigation = re.findall(r"gallery/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(navigation) == sorted(["index", *SCRIPTS])
    titles = {match[2]: match[1] for match in gallery._CARD.finditer(index)}
    for name, title in titles.items():
        assert (GALLERY / f"{name}.py").read_text().startswith(f'"""# {title}\n')
