"""Loggers of Lightning Fabric: what they get, from whom, and that a failing one harms nothing."""

import csv
import os
import signal
from typing import ClassVar

import pytest
from lightning_fabric.loggers import CSVLogger
from lightning_fabric.loggers.logger import Logger

from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.plan import Plan
from pyro_dak.training.tracking import Tracking
from tests.training.runs import OWN_OPTIMIZER, assert_same, make_model, parameters_after, train


class Recorder(Logger):
    """A logger that remembers, as one of TensorBoard or MLflow is called."""

    name, version = "recorder", 0

    def __init__(self):
        self.metrics, self.params, self.status = [], [], None

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        self.params.append(dict(params))

    def finalize(self, status):
        self.status = status


class Failing(Recorder):
    """A logger whose server goes away after the first epoch."""

    def log_metrics(self, metrics, step=None):
        if self.metrics:
            raise ConnectionError("the server is gone")
        super().log_metrics(metrics, step)


def test_a_logger_gets_settings_every_epoch_and_the_end():
    logger, (model, guide) = Recorder(), make_model()
    history = train(model, guide, loggers=logger, validation=0.2, **OWN_OPTIMIZER)
    (params,) = logger.params
    settings = Plan(epochs=3, batch_size=20, seed=0, clip_norm=10.0, **OWN_OPTIMIZER).settings()
    assert params.items() >= settings.items()
    assert params["num_data"] == 48
    assert params["objective"] == "ClosedFormELBO"
    assert params["model/kernel/name"] == "LaplaceKernel"
    assert params["guide/name"] == "MeanFieldGuide"
    *epochs, (last_step, final) = logger.metrics
    assert [step for step, _ in epochs] == [1, 2, 3]
    for (_, found), row, seconds in zip(epochs, history.rows, history.seconds, strict=True):
        assert found.items() >= row.items()
        assert {"loss", "elbo", "learning_rate", "val_nlpd", "val_rmse"} <= found.keys()
        # Both follow the schedule, from 1 and 1e-2.
        assert found["last_layer_learning_rate"] == pytest.approx(1e-2 * row["learning_rate"])
        assert found["seconds"] == seconds
    assert (last_step, final) == (3, {f"final_{k}": v for k, v in history.final.items()})
    assert logger.status == "success"


def test_files_of_fabrics_csv_logger_hold_the_history(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    history = train(*make_model(), loggers=[logger])
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv") as file:
        rows = [*csv.DictReader(file)]
    assert [float(row["elbo"]) for row in rows[:3]] == pytest.approx(history.column("elbo"))
    assert [row["step"] for row in rows] == ["1", "2", "3", "3"]
    assert float(rows[-1]["final_elbo"]) == pytest.approx(history.final["elbo"])


@pytest.mark.parametrize("epochs", [3])
def test_a_logger_that_fails_is_left_out_and_the_run_is_what_it_would_have_been(epochs):
    failing, other, (model, guide) = Failing(), Recorder(), make_model()
    message = r"Failing.log_metrics failed, and the run goes on .* ConnectionError: the server is"
    with pytest.warns(UserWarning, match=message) as told:
        train(model, guide, loggers=[failing, other], epochs=epochs)
    assert len(told) == 1
    assert_same(module_tensors(model, guide), parameters_after(epochs=epochs))
    assert len(other.metrics) == epochs + 1
    assert (failing.status, other.status) == (None, "success")


def test_a_run_that_fails_or_is_interrupted_says_so_to_its_loggers():
    def explode(epoch, row):
        raise RuntimeError("no more")

    failed, stopped = Recorder(), Recorder()
    with pytest.raises(RuntimeError, match="no more"):
        train(*make_model(), loggers=failed, callbacks=[explode])

    def interrupt(epoch, row):
        os.kill(os.getpid(), signal.SIGINT)

    train(*make_model(), loggers=stopped, callbacks=[interrupt], on_interrupt="return")
    assert [logger.status for logger in (failed, stopped)] == ["failed"] * 2
    assert [len(logger.metrics) for logger in (failed, stopped)] == [1, 1]


def test_only_the_first_process_logs():
    class Other:
        is_global_zero = False

    logger = Recorder()
    tracking = Tracking([logger])
    with tracking.failing(Other()):
        tracking.epoch(1, {"loss": 1.0})
    assert (logger.metrics, logger.params, logger.status) == ([], [], None)


class Halfway:
    """Something that logs metrics and knows nothing of settings."""

    log_metrics: ClassVar = staticmethod(print)


@pytest.mark.parametrize("loggers", [True, "csv", [Halfway()], [Recorder(), None]])
def test_what_is_no_logger_is_refused_before_training(loggers):
    with pytest.raises(TypeError, match="`loggers` must be loggers of Lightning Fabric"):
        train(*make_model(), loggers=loggers)
