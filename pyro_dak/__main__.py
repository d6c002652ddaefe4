"""The entry point of `pyro-dak` and `python -m pyro_dak`."""

import importlib
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        cli = importlib.import_module("pyro_dak.tables.cli")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pyro_dak"):
            raise
        sys.exit(
            f"Error: pyro-dak needs {error.name}; install it with `pip install pyro_dak[cli]`."
        )
    except KeyboardInterrupt:  # importing takes seconds
        sys.exit("Interrupted.")
    cli.app()


if __name__ == "__main__":
    main()
