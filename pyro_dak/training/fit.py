"""`fit`: train any model with any guide by any objective."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyro.infer import ELBO, Trace_ELBO
from torch import Tensor, nn

from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.inference.objectives import (
    AnalyticELBO,
    ClosedFormELBO,
    JensenELBO,
    LocalReparamELBO,
)
from pyro_dak.model.batches import Unpacking
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.inputs import check_model, check_network
from pyro_dak.model.latent_sites import check_sites
from pyro_dak.model.likelihoods import GaussianLikelihood
from pyro_dak.model.missing import Missing, with_missing
from pyro_dak.model.modes import local_parameters
from pyro_dak.model.rows import Inputs, device_of, num_rows, row_shape, take, to_device
from pyro_dak.prediction.novelty import (
    MAX_REFERENCE_ROWS,
    features_of,
    in_random_order,
    novelty_of_features,
)
from pyro_dak.training.checkpoint import MAX_BYTES, Checkpoints, Newest, blaming
from pyro_dak.training.data import Data, LoaderData, ResidentData, training_data
from pyro_dak.training.describe import set_up_guide
from pyro_dak.training.held_out import hold_out
from pyro_dak.training.loop import Run, frozen, one_process, seeded
from pyro_dak.training.natural import NaturalLoss, build_learner
from pyro_dak.training.optimizers import Schedule
from pyro_dak.training.plan import History, Plan, TrainingError
from pyro_dak.training.start import check_start
from pyro_dak.training.tracking import Tracking
from pyro_dak.validation import (
    check_choice,
    check_integer,
    check_kind,
    check_path,
    check_positive,
    check_seed,
)

__all__ = ["History", "TrainingError", "build_objective", "fit"]


def build_objective(objective: str | ELBO, model: DAK, guide: nn.Module) -> ELBO:
    """The objective of this name: "closed_form", "jensen", "local", "trace" or "auto".

    "auto" is the closed form where the likelihood has one, and draws of f for other likelihoods. It
    is Pyro's `Trace_ELBO` with 8 vectorised particles where q(f) is not Gaussian: for other guides,
    and with a prior on `shrinkage`.
    """
    if isinstance(objective, ELBO):
        return objective
    check_choice("objective", objective, ("auto", "closed_form", "jensen", "local", "trace"))
    if objective == "auto":
        is_gaussian = isinstance(guide, GaussianGuide) and not model.has_shrinkage
        closed = "closed_form" if model.likelihood.has_closed_form else "local"
        objective = closed if is_gaussian else "trace"
    if objective == "trace":
        return Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)
    classes = {"closed_form": ClosedFormELBO, "jensen": JensenELBO, "local": LocalReparamELBO}
    return classes[objective]()


def fit(
    model: DAK,
    guide: nn.Module,
    data: Any,
    *,
    objective: str | ELBO = "auto",
    epochs: int = 100,
    batch_size: int = 512,
    learning_rate: float = 1e-2,
    last_layer_learning_rate: float | None = 1e-2,
    optimizer: str = "adam",
    last_layer_optimizer: str | None = "adam",
    schedule: str | Schedule = "one_cycle",
    weight_decay: float = 0.0,
    decay_last_layer: bool = False,
    clip_norm: float | None = 10.0,
    validation: Any = None,
    patience: int | None = None,
    fixed_features: bool = False,
    num_data: int | None = None,
    target: str | None = None,
    unpack: Callable[[Any], Any] | None = None,
    missing: Missing | None = None,
    callbacks: Sequence[Callable[[int, dict[str, float]], None]] = (),
    compile: bool = False,
    final_pass: bool | None = None,
    evaluate: bool = True,
    novelty: bool = True,
    seed: int | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 1,
    checkpoint_steps: int | None = None,
    keep_last: int = 2,
    resume_from: str | Path | None = None,
    on_interrupt: str = "raise",
    accelerator: str = "auto",
    devices: int | str | None = None,
    precision: Any = None,
    strategy: str = "auto",
    timeout: float = 300.0,
    loggers: Any = (),
    progress: bool = True,
) -> History:
    """Train model and guide together by maximising a lower bound of the evidence.

    Model and guide are changed in place and left in eval mode, without a calibration that the model
    had from before (see `calibrate`). The same seed on the same machine gives the same result, and
    so does a run that was stopped and resumed (if a loader draws random numbers while it loads
    rows, resume at the end of an epoch). Under several processes, started by `fabric run` or
    `torchrun`, each process takes a share of every batch, and the result is that of one process, up
    to draws and layers that look at the whole batch, such as BatchNorm.

    Args:
        guide: a guide of the model's sites.
        data: a pair of tensors (x, y), kept on the device, or an iterable of batches (x, y). An x
            is a tensor, or a tuple or dictionary of tensors, which the network gets as its
            arguments (see `pyro_dak.model.rows`). A dictionary of tensors with `target` is a pair
            too. `ParquetRows` are read from files, in constant memory.
        objective: an ELBO, or a name (see `build_objective`).
        epochs: passes over the data.
        batch_size: rows per step, over all processes; ignored for an iterable.
        learning_rate: rate of the network at the peak of the schedule.
        last_layer_learning_rate: rate of guide, scales and noise at the peak, whatever that of the
            network is; None for that of the network.
        optimizer: optimiser of the network, "adam", "adamw", "sgd" or "adadelta".
        last_layer_optimizer: optimiser of guide, scales and noise; None for that of the network.
            The KL moves the scales of q by gradients of order 1 / N per datum, which "sgd" and
            "adadelta" hardly follow; "adam" does, whatever their size.
        schedule: "one_cycle", "cosine", "constant", "step", or a function of
            (step, total steps, steps per epoch).
        weight_decay: weight decay of the network.
        decay_last_layer: whether weight decay acts on guide, scales and noise too.
        clip_norm: bound of the norm of the gradient of the loss per datum, or None.
        validation: a pair (x, y), a loader of batches like those of `data`, which is read for each
            score, or the share of the training rows to hold out, of `ParquetRows` at most about
            100,000 rows.
        patience: number of epochs without a better validation score after which training stops and
            goes back to the best weights.
        fixed_features: whether to train embedding and last layer on features that are computed
            once; the extractor stays as it is.
        num_data: rows in all, for an iterable that does not say. A `DataLoader` says it by its
            sampler: the rows that it draws from if it shuffles, else those of an epoch.
        target: the entry of dictionaries that is y, such as "labels"; the others are x.
        unpack: a function from a batch to (x, y), for batches that are neither a pair nor a
            dictionary, such as `lambda batch: ((batch[0], batch[1]), batch[2])`.
        missing: what marks targets that are missing, of training and of held-out rows: "nan", or
            for class labels an integer such as -100. They do not count in the likelihood: of a row
            with several outputs those that are there count.
        callbacks: called after each epoch with its number and its row of the history.
        compile: whether to compile the loss; where that fails, it warns and goes on without.
        final_pass: whether a `NaturalGuide` takes its posterior from one more pass over all rows at
            the end, so that it belongs to the final features. By default it does so for
            `GaussianLikelihood`, where the result is the exact posterior with covariance="joint",
            and with "shared" if the outputs share their noise. For classes the average over the
            last passes of training predicted held-out rows better. Other guides ignore it.
        evaluate: whether to evaluate the bound of the final model, `History.final`, by one more
            pass over the data without gradients.
        novelty: whether to learn at the end, by one more pass over the inputs, how training rows
            look, so that predictions say how strange other rows are (see `learn_novelty`). Rows
            are compared with those of `validation`, if there are at least 200.
        seed: seed of batches and draws.
        checkpoint_dir: directory for checkpoints; none are written without it.
        checkpoint_every: number of epochs between checkpoints.
        checkpoint_steps: number of steps between further checkpoints inside long epochs; by default
            there are none.
        keep_last: number of checkpoints to keep.
        resume_from: a directory of checkpoints, or one checkpoint, to go on from, with the same
            data and settings. Of several checkpoints the newest undamaged one is taken. If it is
            `checkpoint_dir` and holds none yet, the run starts.
        on_interrupt: what a first Ctrl-C does, after the step that it falls into and a checkpoint,
            if there is a `checkpoint_dir`: "raise" a KeyboardInterrupt that says how to go on, or
            "return" the history of the half-trained model, for notebooks. A second one raises at
            once. SIGTERM raises in any case.
        accelerator: as in Lightning Fabric, which is needed for what is not one process on one
            device in the precision of the model (extra `distributed`).
        devices: as in Lightning Fabric; by default one, or what its launcher says.
        precision: as in Lightning Fabric.
        strategy: as in Lightning Fabric.
        timeout: seconds that a process waits for the others at most, if `torchrun` or `fit` itself
            started them with the strategy "ddp"; then it raises, and the run can be resumed.
        loggers: loggers of Lightning Fabric, or one of them. The first process gives them the
            settings at the start, and the row of the history with all learning rates after each
            epoch. One that fails is left out with a warning, and the run goes on.
        progress: whether to show a bar.

    Raises:
        TrainingError: if the loss becomes NaN or infinite, or if inputs or targets have a scale
            with which training makes no sense, or if another process is gone.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, with a `history`, so that a script does not go
            on with a half-trained model.
        BlockingIOError: if another run writes its checkpoints to `checkpoint_dir`.
    """
    check_choice("on_interrupt", on_interrupt, ("raise", "return"))
    check_model(model)
    check_guide(model, guide)
    check_seed("seed", seed)
    check_kind("callbacks", callbacks, Iterable, "a list of functions")
    callbacks = [*callbacks]
    for callback in callbacks:
        check_kind("callbacks", callback, Callable, "functions of epoch and row")
    if patience is not None and validation is None:
        raise ValueError(
            "`patience` needs `validation`: a pair (x, y), a loader, or a share like 0.1."
        )
    unpacking = Unpacking(target, unpack)
    plan = Plan(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        last_layer_learning_rate=last_layer_learning_rate,
        optimizer=optimizer,
        last_layer_optimizer=last_layer_optimizer,
        schedule=schedule,
        weight_decay=weight_decay,
        decay_last_layer=decay_last_layer,
        clip_norm=clip_norm,
        patience=patience,
        fixed_features=fixed_features,
    )
    checkpoints = _checkpoints(
        checkpoint_dir, checkpoint_every, checkpoint_steps, keep_last, resume_from
    )
    newest = _newest(checkpoint_dir, resume_from, model, guide)
    check_positive("timeout", timeout)
    tracking = Tracking(loggers)
    fabric = _launch(
        timeout, accelerator=accelerator, devices=devices, precision=precision, strategy=strategy
    )
    plan = replace(plan, seed=fabric.broadcast(_seed(seed, newest)))
    elbo = build_objective(objective, model, guide)
    with (
        _claimed(checkpoints, fabric),
        torch.enable_grad(),
        seeded(plan.seed + fabric.global_rank, fabric.device),
        local_parameters(model, guide),
        frozen(model.feature_extractor, fixed_features),
        with_missing(model.likelihood, missing),
        tracking.failing(fabric),
    ):
        model.to(fabric.device)
        guide.to(fabric.device)
        data, held_out = hold_out(model, data, validation, plan.seed, fabric, unpacking)
        batches, first, rows = training_data(model, data, plan, num_data, fabric, unpacking)
        batches.held_out = held_out
        if not fixed_features:  # whose network has run already
            check_network(model, first)
            _warn_if_statistics_move(model.feature_extractor)
        model.input_shape = model.input_shape or row_shape(first)
        with explaining(model, guide=guide):
            set_up_guide(guide, model, to_device(take(first, slice(2)), fabric.device))
            if isinstance(elbo, AnalyticELBO):
                check_sites(model, first)
        loss = build_learner(model, guide, elbo, fixed_features, compile)
        if newest is None:
            with explaining(model, guide=guide):
                check_start(loss, *rows, batches.num_rows, not isinstance(batches, LoaderData))
        score_fn = None if held_out is None else partial(loss.score, held_out)
        model.calibration = model.novelty = None  # they belonged to the weights from before
        run = Run(loss, batches, plan, score_fn, checkpoints, fabric)
        if newest is not None:
            run.resume(newest.path, newest)
        tracking.start(run)
        is_synchronized = model.scaling.is_synchronized
        model.scaling.is_synchronized = fabric.world_size > 1
        try:
            with run.naming_lost_processes(timeout):
                watchers = [tracking.epoch, *callbacks]
                history = run.run(watchers, progress, keep_bar=True, on_interrupt=on_interrupt)
                if final_pass is None:
                    final_pass = isinstance(model.likelihood, GaussianLikelihood)
                if final_pass and isinstance(loss, NaturalLoss) and history.status != "interrupted":
                    loss.renew(batches, fabric, plan.seed)
                if evaluate and history.status != "interrupted":
                    history.final = loss.evaluate(batches, fabric, plan.seed)
            tracking.finish(history)
        finally:
            model.scaling.is_synchronized = is_synchronized
            model.eval()
            guide.eval()
        if novelty and history.status != "interrupted":
            _learn_novelty(model, guide, batches, first, plan, progress and fabric.is_global_zero)
    model.scaling.warn_if_dead(model.num_input_units)
    return history


def _warn_if_statistics_move(network: nn.Module) -> None:
    """Warn about a network that trains nothing, and whose running statistics would move."""
    is_frozen = not any(parameter.requires_grad for parameter in network.parameters())
    moving = [n for n, part in network.named_modules() if getattr(part, "track_running_stats", 0)]
    if is_frozen and moving:
        warnings.warn(
            f"No parameter of the network is trained, but training mode moves the running "
            f"statistics of `{moving[0]}`. Pass `fixed_features=True` to leave the network as it "
            "is; features are then computed once.",
            stacklevel=3,
        )


def _learn_novelty(
    model: DAK, guide: nn.Module, batches: Data, first: Inputs, plan: Plan, progress: bool
) -> None:
    """Learn how the training rows look; every process does it alike, for all rows.

    A trained model is worth more than this, so what goes wrong is a warning.
    """
    try:
        if plan.fixed_features and isinstance(batches, ResidentData):
            features, rows = batches.x, first
            assert isinstance(features, Tensor)
            if num_rows(rows) == len(features):  # tensors: in a random order, as below
                order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
                features = features[order.to(features.device)]
                rows = take(rows, order[:MAX_REFERENCE_ROWS].to(device_of(rows)))
            rows = to_device(rows, features.device)
        elif isinstance(batches, ResidentData):
            features, rows = features_of(model, in_random_order(batches.x), progress)
        else:
            features, rows = features_of(model, batches.inputs(plan.seed), progress)
        kept = batches.held_out
        held_out = None if kept is None else kept.sample(MAX_REFERENCE_ROWS)
        model.novelty = novelty_of_features(model, guide, features, rows, held_out)
    except NotImplementedError:
        return  # its network samples, and `predict` refuses it in so many words
    except Exception as error:
        warnings.warn(
            f"Predictions will not say how strange rows are, because that could not be learned: "
            f"{error} Call `learn_novelty`, or pass `novelty=False` to leave it out.",
            stacklevel=3,
        )


def _checkpoints(
    directory: str | Path | None,
    every: int,
    steps: int | None,
    keep_last: int,
    resume_from: str | Path | None,
) -> Checkpoints | None:
    check_integer("checkpoint_every", every, minimum=1)
    if steps is not None:
        check_integer("checkpoint_steps", steps, minimum=1)
    check_integer("keep_last", keep_last, minimum=1)
    if resume_from is not None:
        check_path("resume_from", resume_from)
    if directory is None:
        return None
    check_path("checkpoint_dir", directory)
    if resume_from is None and Checkpoints.named(Path(directory)):
        raise ValueError(
            f"`checkpoint_dir` ({directory}) holds checkpoints of an earlier run. Pass it as "
            "`resume_from` too to go on with that run, or name another directory."
        )
    return Checkpoints(Path(directory), every, keep_last, steps)


@contextmanager
def _claimed(checkpoints: Checkpoints | None, fabric: Any) -> Iterator[None]:
    """Hold the directory of the checkpoints for this run; if that fails, every process raises."""
    with ExitStack() as stack:
        if checkpoints is not None:
            problem = None
            if fabric.is_global_zero:
                try:
                    stack.enter_context(checkpoints.claimed())
                except OSError as error:
                    problem = error
            if problem := fabric.broadcast(problem):
                raise problem
        yield


def _launch(timeout: float, **options: Any) -> Any:
    """Fabric with its processes running; it finds those that `fabric run` or `torchrun` started.

    A run that needs nothing of it, by one process on one device, does without.
    """
    device = _only_device(**options)
    if device is not None:
        return one_process(device)
    try:  # here, because it takes longer than all the rest of the package together
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import DDPStrategy
    except ModuleNotFoundError as error:
        raise ImportError(
            "Several processes or devices, and other precisions and strategies, need Lightning "
            "Fabric, which is not installed. Run `pip install 'pyro_dak[distributed]'`."
        ) from error
    is_launched = bool(os.environ.get("LT_CLI_USED"))  # by `fabric run`, which also says how
    if options["devices"] is None:
        options["devices"] = "auto" if is_launched else 1
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if not is_launched and world_size > 1:  # `torchrun`
            devices = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            options |= {"devices": devices, "num_nodes": world_size // devices}
            if options["strategy"] == "auto":
                options["strategy"] = "ddp"
    if options["strategy"] == "ddp" and not is_launched:  # else its launcher made the strategy
        options["strategy"] = DDPStrategy(timeout=timedelta(seconds=min(timeout, 1e8)))
    fabric = Fabric(**options)
    if not is_launched:
        fabric.launch()
    return fabric


def _only_device(
    accelerator: Any, devices: Any, precision: Any, strategy: Any
) -> torch.device | None:
    """The device of a run by one process on one device, as Fabric would choose it; else None."""
    is_started = bool(os.environ.get("LT_CLI_USED")) or any(
        os.environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_NTASKS")
    )
    is_alone = devices is None or (isinstance(devices, int) and devices == 1)
    is_plain = precision is None and isinstance(strategy, str) and strategy == "auto"
    if is_started or not (is_alone and is_plain and isinstance(accelerator, str)):
        return None
    found = {
        "mps": torch.backends.mps.is_available(),
        "cuda": torch.cuda.is_available(),
        "cpu": True,
    }
    for name in found if accelerator == "auto" else [accelerator]:
        if found.get(name):
            return torch.device(name, 0) if name == "cuda" else torch.device(name)
    return None


def _newest(
    checkpoint_dir: str | Path | None, resume_from: str | Path | None, *modules: nn.Module
) -> Newest | None:
    """The checkpoint to go on from; None at the start of a run, also of one that is to go on."""
    if resume_from is None:
        return None
    path = Path(resume_from)
    is_own = checkpoint_dir is not None and path.resolve() == Path(checkpoint_dir).resolve()
    is_start = is_own and not Checkpoints.named(path)
    size = sum(tensor.nbytes for part in modules for tensor in part.state_dict().values())
    return None if is_start else Checkpoints.read_newest(path, MAX_BYTES + 16 * size)


def _seed(seed: int | None, newest: Newest | None) -> int:
    """The seed given, that of the run to go on with, or a random one."""
    if seed is not None:
        return int(seed)
    if newest is not None:
        with blaming(newest.path):
            seed = newest.contents.config["trainer"]["settings"]["seed"]
            check_integer("seed", seed, minimum=0, maximum=2**63)
            return int(seed)
    return int(torch.randint(2**31, ()))
