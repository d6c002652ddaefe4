import pytest

from experiments import demo, prior
from experiments.runs import read_runs
from tests.experiments.command import invoke


def test_the_prior_is_drawn_and_the_path_printed(tmp_path, capsys):
    out = tmp_path / "deep" / "prior.png"
    prior.main(["--quick", "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert str(out) in capsys.readouterr().out


# GPyTorch: torch.jit at import, jitter and float32 on tiny data.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_demo_ends_with_a_table_and_existing_files(tmp_path):
    output = invoke(demo.main, "--quick", "--out", tmp_path)
    lines = output.splitlines()
    table = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert [cell for cell in table if cell] == ["toy"] * 4 + ["digits"] * 3 + ["diabetes"] * 3
    fits = [line for line in lines if line.endswith(" s")]
    assert len(fits) == 10
    assert lines[: len(fits)] == fits  # nothing else is printed before the table
    paths = [line.split()[1] for line in lines if line.startswith(("figure ", "report "))]
    assert len(paths) == 5
    assert [path for path in paths if not (tmp_path / path).stat().st_size] == []
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png") == 4
    runs = {run["config"]["model"]: run for run in read_runs(tmp_path / "toy")}
    assert f"RMSE {runs['DAK + residual']['metrics']['rmse_inside']:.3f}" in output
