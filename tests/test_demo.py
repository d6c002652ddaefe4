from experiments import prior


def test_demo_draws_the_prior_and_prints_where(tmp_path, capsys):
    out = tmp_path / "deep" / "prior.png"
    prior.main(["--quick", "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert str(out) in capsys.readouterr().out
