import json

import pytest
import torch

from experiments import demo, prior
from tests.experiments.test_experiments import invoke


def test_the_prior_is_drawn_and_the_path_printed(tmp_path, capsys):
    out = tmp_path / "deep" / "prior.png"
    prior.main(["--quick", "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert str(out) in capsys.readouterr().out


# GPyTorch: torch.jit at import, jitter and float32 on tiny data.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_demo_ends_with_a_table_and_existing_files(tmp_path):
    torch.set_default_dtype(torch.float32)
    output = invoke(demo.main, "--quick", "--out", tmp_path)
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("data "))
    table = [line.split()[0] for line in lines[start + 1 : start + 10]]
    assert table == ["toy"] * 4 + ["digits"] * 2 + ["diabetes"] * 3
    paths = [line.split()[1] for line in lines if line.startswith(("figure ", "report "))]
    assert len(paths) == 5
    assert [path for path in paths if not (tmp_path / path).stat().st_size] == []
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png") == 4
    content = json.loads((tmp_path / "toy" / "scores.json").read_text())
    assert f"RMSE {content['metrics']['DAK']['rmse_inside']:.3f}" in output
