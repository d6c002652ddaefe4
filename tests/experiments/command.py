"""Runs the commands of the experiments as a person would."""

import typer
from typer.testing import CliRunner


def invoke(main, *arguments):
    """The output of a command, which must succeed."""
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output
