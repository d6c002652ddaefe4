"""The layers of the package, read from its imports."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyro_dak"

# The rooms of the package, from the ground up: a room imports rooms before it, and itself.
ORDER = (
    "annotations",
    "validation",
    "drawing",
    "registry",
    "boards",
    "fast",
    "additive",
    "model",
    "inference",
    "prediction",
    "training",
    "diagnostics",
    "acting",
    "botorch",
    "tables",
)
TORCH_ONLY = ("annotations", "validation", "registry", "fast", "additive")
# Who may use the fast twins of the plain formulas.
USERS_OF_FAST = ("additive/", "fast/", "prediction/freeze.py", "training/loop.py")
# Methods that write a file at the path that they get.
WRITERS = ("save_file", "savefig", "to_csv", "to_parquet", "write_bytes", "write_text")
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in FILES
    if path.name != "__main__.py"
)


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_names(path):
    """Dotted names of all that a file imports, wherever in the file; relative ones resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def roots(path):
    return {name.split(".")[0] for name in imported_names(path)}


def files_of(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def test_there_is_a_room_for_every_package():
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} <= set(
        ORDER
    )


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_room_imports_rooms_before_it_only(path):
    if room_of(path) == "__main__":
        return
    allowed = set(ORDER[: ORDER.index(room_of(path)) + 1])
    names = (name.split(".") for name in imported_names(path))
    rooms = {name[1] for name in names if name[0] == "pyro_dak"}
    assert rooms <= allowed


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_mathematics_knows_no_pyro(path):
    assert room_of(path) not in TORCH_ONLY or "pyro" not in roots(path)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_speed_has_one_seam(path):
    uses_fast = any(name.startswith("pyro_dak.fast") for name in imported_names(path))
    assert not uses_fast or str(path.relative_to(PACKAGE)).startswith(USERS_OF_FAST)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_room_imports_private_names_of_another(path):
    own = f"pyro_dak.{room_of(path)}"
    foreign = {name for name in imported_names(path) if not name.startswith(own)}
    assert [n for n in foreign if n.startswith("pyro_dak.") and "._" in n] == []


@pytest.mark.parametrize("folder", ["pyro_dak", "models", "guides", "benchmarks"])
def test_nothing_imports_the_experiments(folder):
    assert [path.name for path in files_of(folder) if "experiments" in roots(path)] == []


@pytest.mark.parametrize("board", ["models", "guides"])
def test_boards_stand_on_the_package_alone(board):
    others = {"models", "guides", "experiments", "benchmarks", "tests"} - {board}
    assert [path.name for path in files_of(board) if roots(path) & others] == []


@pytest.mark.parametrize("board", ["models", "guides"])
def test_boards_import_their_own_files_relatively(board):
    """In an installed wheel a board has another name: it is a part of `pyro_dak.boards`."""
    trees = {path.name: ast.parse(path.read_text()) for path in files_of(board)}
    absolute = [
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
        if (node.module or "").split(".")[0] == board
    ]
    assert absolute == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_jaxtyping_has_one_seam(path):
    """Users need no jaxtyping: shapes in annotations come from `pyro_dak.annotations`."""
    assert "jaxtyping" not in roots(path) or path.name == "annotations.py"


def writes(path):
    """The calls that write a file elsewhere than at a temporary path."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            text, name = ast.unparse(node), ast.unparse(node.func).split(".")[-1]
            is_opened = name == "open" and any(f"'{mode}" in text for mode in "wx")
            is_written = name in WRITERS and isinstance(node.func, ast.Attribute)
            if (is_opened or is_written) and "temporary" not in text:
                yield text


@pytest.mark.parametrize("folder", ["pyro_dak", "models", "guides", "experiments", "benchmarks"])
def test_all_files_are_written_whole(folder):
    """Whoever writes a file does so through `write_whole`, which hands out a temporary path."""
    texts = {text for path in files_of(folder) for text in writes(path)}
    allowed = {
        "result.to_csv(sys.stdout, index=False)",
        "Path('/proc/self/clear_refs').write_text('5')",
    }
    assert texts - allowed == set()


def test_the_package_imports_no_board():
    others = {"models", "guides", "benchmarks", "tests"}
    assert [path.name for path in files_of("pyro_dak") if roots(path) & others] == []


# GPyTorch, which BoTorch imports, uses torch.jit.
@pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
@pytest.mark.parametrize("module", ["pyro_dak", *MODULES])
def test_public_names_are_sorted_and_exist(module):
    module = importlib.import_module(module)
    if not hasattr(module, "__all__") and module.__file__.endswith("__init__.py"):
        return  # a room whose modules are imported one by one

    def constants_classes_functions(name):
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert module.__all__ == sorted(module.__all__, key=constants_classes_functions)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_importing_the_package_changes_nothing_and_says_nothing():
    code = (
        "import torch, pyro\n"
        "def state():\n"
        "    return (torch.get_default_dtype(), torch.get_num_threads(),\n"
        "            torch.initial_seed(), torch.get_rng_state().sum().item(),\n"
        "            torch.is_grad_enabled(), pyro.settings.get())\n"
        "before = state()\n"
        "import pyro_dak\n"
        "assert state() == before, (before, state())\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
