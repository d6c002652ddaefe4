"""What a run tells its loggers: settings at the start, a row after each epoch, the end.

A trained model is worth more than its log, so a logger that fails does not end the run: it is left
out from then on, with a warning that says so.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pyro_dak.training.loop import Run
from pyro_dak.training.plan import History

__all__ = ["Tracking"]


class Tracking:
    """The loggers of one run of `fit`; the first of several processes alone calls them.

    Args:
        loggers: one or several loggers of Lightning Fabric, or others with `log_metrics(metrics,
            step)`, `log_hyperparams(params)` and `finalize(status)`.
    """

    def __init__(self, loggers: Any):
        self.loggers = [*loggers] if isinstance(loggers, list | tuple) else [loggers]
        for logger in self.loggers:
            for method in ("log_metrics", "log_hyperparams", "finalize"):
                if not callable(getattr(logger, method, None)):
                    raise TypeError(
                        "`loggers` must be loggers of Lightning Fabric, such as "
                        "lightning_fabric.loggers.CSVLogger(...), or others with the method "
                        f"`{method}`; got {type(logger).__name__}."
                    )
        self._run: Run | None = None

    @contextmanager
    def failing(self, fabric: Any) -> Iterator[None]:
        """If the run inside ends with an error, the loggers are told that it failed."""
        if not fabric.is_global_zero:
            self.loggers = []
        try:
            yield
        except BaseException:
            self._tell("finalize", "failed")
            raise

    def start(self, run: Run) -> None:
        """Log the settings of a run, of its model and of its guide."""
        self._run = run
        facts = {
            "objective": run.learner.objective,
            "num_data": run.data.num_rows,
            "world_size": run.fabric.world_size,
        }
        if self.loggers:
            described = dict(_flat(run.learner.description()))
            self._tell("log_hyperparams", run.plan.settings() | facts | described)

    def epoch(self, number: int, row: Mapping[str, float]) -> None:
        """Log the row of an epoch, with the rate of the last layer and the seconds."""
        if not self.loggers:
            return
        assert self._run is not None
        group = self._run.raw_optimizers[-1].param_groups[-1]
        more = {"last_layer_learning_rate": group["lr"], "seconds": self._run.history.seconds[-1]}
        self._tell("log_metrics", {**row, **more}, number)

    def finish(self, history: History) -> None:
        """Log the bound of the final model, and that the run has ended."""
        final = {f"final_{name}": value for name, value in (history.final or {}).items()}
        if final:
            self._tell("log_metrics", final, len(history.rows))
        self._tell("finalize", "failed" if history.status == "interrupted" else "success")

    def _tell(self, method: str, *arguments: Any) -> None:
        """Call a method of all loggers, and go on without those that fail."""
        self.loggers = [log for log in self.loggers if _succeeds(log, method, arguments)]


def _succeeds(logger: Any, method: str, arguments: Sequence[Any]) -> bool:
    call: Callable[..., Any] = getattr(logger, method)
    try:
        call(*arguments)
    except NotImplementedError:  # Fabric's CSVLogger has no place for settings
        return True
    except Exception as error:
        warnings.warn(
            f"{type(logger).__name__}.{method} failed, and the run goes on without this logger: "
            f"{type(error).__name__}: {error}",
            stacklevel=5,
        )
        return False
    return True


def _flat(description: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers and texts of nested dictionaries, by names such as model/kernel/name."""
    for name, value in description.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{name}", value
