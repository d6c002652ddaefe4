"""`fit`: one loop for every model, guide and objective; it knows no data set and no table."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pyro.infer import ELBO, Trace_ELBO
from torch import Tensor, nn

from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.inference.objectives import ClosedFormELBO, JensenELBO, LocalReparamELBO
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import local_parameters
from pyro_dak.training.checkpoint import read_directory
from pyro_dak.training.data import LoaderData, ResidentData, check_data, is_pair, training_data
from pyro_dak.training.describe import set_up_guide
from pyro_dak.training.loop import Run
from pyro_dak.training.loss import Loss, extract_features, frozen, use_compiled
from pyro_dak.training.optimizers import Schedule, build_optimizer, schedule_fn
from pyro_dak.training.plan import Checkpoints, History, Settings, TrainingError
from pyro_dak.validation import check_choice, check_integer, check_positive

__all__ = ["History", "TrainingError", "build_objective", "fit"]


def build_objective(objective: str | ELBO, model: DAK, guide: nn.Module) -> ELBO:
    """The objective called so: "closed_form", "jensen", "local", "trace", or the best for "auto".

    "auto" is the closed form where the likelihood has one, draws of f for other likelihoods, and
    Pyro's `Trace_ELBO` with 8 vectorised particles where q(f) is not Gaussian: for other guides,
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
    last_layer_learning_rate: float | None = None,
    optimizer: str = "adam",
    last_layer_optimizer: str | None = None,
    schedule: str | Schedule = "one_cycle",
    weight_decay: float = 0.0,
    decay_last_layer: bool = False,
    clip_norm: float | None = 10.0,
    validation: tuple[Tensor, Tensor] | float | None = None,
    patience: int | None = None,
    fixed_features: bool = False,
    num_data: int | None = None,
    callbacks: Sequence[Callable[[int, dict[str, float]], None]] = (),
    compile: bool = False,
    seed: int | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 1,
    keep_last: int = 2,
    resume_from: str | Path | None = None,
    accelerator: str = "auto",
    devices: int | str | None = None,
    precision: Any = None,
    strategy: str = "auto",
    progress: bool = True,
) -> History:
    """Train model and guide together by maximising a lower bound of the evidence.

    Model and guide are changed in place and left in eval mode. The same seed on the same machine
    gives the same result; so does a run that was stopped and resumed (a loader must draw nothing of
    its own while it loads, or resume at the end of an epoch). Under several processes, started by
    `fabric run` or `torchrun`, each takes a share of every batch, and the result is that of one
    process, up to draws and layers that look at the whole batch, such as BatchNorm.

    Args:
        model: the model.
        guide: a guide of the model's sites.
        data: a pair of tensors (x, y), kept on the device, or an iterable of batches (x, y).
        objective: an ELBO, or a name (see `build_objective`).
        epochs: passes over the data.
        batch_size: rows per step, over all processes; ignored for an iterable.
        learning_rate: of the network, at the peak of the schedule.
        last_layer_learning_rate: of guide, scales and noise; by default the same.
        optimizer: "adam", "adamw", "sgd" or "adadelta".
        last_layer_optimizer: of guide, scales and noise; by default the same. The KL moves the
            scales of q by gradients of order 1 / N per datum, which "sgd" and "adadelta" hardly
            follow; "adam" does, whatever their size.
        schedule: "one_cycle", "cosine", "constant", "step", or a function of
            (step, total steps, steps per epoch).
        weight_decay: on the network.
        decay_last_layer: whether weight decay acts on guide, scales and noise too.
        clip_norm: bound of the norm of the gradient of the loss per datum, or None.
        validation: a pair (x, y), or the share of the training rows to hold out.
        patience: stop after so many epochs without a better validation score, and go back to the
            best weights.
        fixed_features: train embedding and last layer on features computed once; the extractor
            stays as it is.
        num_data: rows in all, for an iterable of unknown length.
        callbacks: called after each epoch with its number and its row of the history.
        compile: compile the loss; goes on without, with a warning, where that fails.
        seed: of batches and draws.
        checkpoint_dir: directory for checkpoints; none are written without it.
        checkpoint_every: epochs between checkpoints.
        keep_last: checkpoints to keep.
        resume_from: a directory of checkpoints, or one checkpoint, to go on from.
        accelerator: as in Lightning Fabric.
        devices: as in Lightning Fabric; by default one, or what its launcher says.
        precision: as in Lightning Fabric.
        strategy: as in Lightning Fabric.
        progress: show a bar.

    Raises:
        TrainingError: if the loss becomes NaN or infinite.
    """
    check_integer("epochs", epochs, minimum=1)
    check_positive("learning_rate", learning_rate)
    if last_layer_learning_rate is None:
        last_layer_learning_rate = learning_rate
    check_positive("last_layer_learning_rate", last_layer_learning_rate)
    if clip_norm is not None:
        check_positive("clip_norm", clip_norm)
    if patience is not None and validation is None:
        raise ValueError("`patience` needs `validation`: a pair (x, y), or a share like 0.1.")
    checkpoints = _checkpoints(checkpoint_dir, checkpoint_every, keep_last, resume_from)
    fabric = _launch(accelerator, devices, precision, strategy)
    seed = fabric.broadcast(_seed(seed, resume_from))
    loss_objective = build_objective(objective, model, guide)
    settings = Settings(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        last_layer_learning_rate=last_layer_learning_rate,
        optimizer=optimizer,
        last_layer_optimizer=last_layer_optimizer or optimizer,
        schedule=schedule if isinstance(schedule, str) else _name_of(schedule),
        weight_decay=weight_decay,
        decay_last_layer=decay_last_layer,
        clip_norm=clip_norm,
        patience=patience,
        fixed_features=fixed_features,
        objective=type(loss_objective).__name__,
        has_validation=validation is not None,
        world_size=fabric.world_size,
        seed=seed,
    )
    cuda = [fabric.device] if fabric.device.type == "cuda" else []
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=cuda),
        local_parameters(model, guide),
        frozen(model.feature_extractor, fixed_features),
    ):
        torch.manual_seed(seed + fabric.global_rank)
        model.to(fabric.device)
        guide.to(fabric.device)
        data, held_out = _split_validation(
            model, data, validation, seed, fabric.device, fabric.world_size
        )
        batches = _batches(fabric, model, data, settings, num_data)
        first = data[0] if is_pair(data) else next(iter(data))[0]
        model.input_shape = model.input_shape or tuple(first.shape[1:])
        set_up_guide(guide, model, first[:2].to(fabric.device))
        loss = Loss(model, guide, loss_objective, fixed_features)
        if compile:
            use_compiled(loss)
        model.scaling.is_synchronized = fabric.world_size > 1
        run = Run(
            fabric,
            loss,
            _optimizer(model, guide, settings, fabric, precision),
            batches,
            held_out,
            schedule_fn(schedule),
            batches.batches_per_epoch or -(-batches.num_data // len(first)),
            settings,
            checkpoints,
        )
        if resume_from is not None:
            run.resume(Path(resume_from))
        try:
            history = run.run(callbacks, progress)
        finally:
            model.scaling.is_synchronized = False
            model.eval()
            guide.eval()
    model.scaling.warn_if_dead()
    return history


def _checkpoints(
    directory: str | Path | None, every: int, keep_last: int, resume_from: str | Path | None
) -> Checkpoints | None:
    check_integer("checkpoint_every", every, minimum=1)
    check_integer("keep_last", keep_last, minimum=1)
    if directory is None:
        return None
    if resume_from is None and Checkpoints.found(Path(directory)):
        raise ValueError(
            f"`checkpoint_dir` ({directory}) holds checkpoints of an earlier run. Pass it as "
            "`resume_from` too to go on with that run, or name another directory."
        )
    return Checkpoints(Path(directory), every, keep_last)


def _launch(accelerator: str, devices: int | str | None, precision: Any, strategy: str) -> Any:
    """Fabric, with its processes running; those that `fabric run` or `torchrun` made are found."""
    # Imported here: it takes longer than all the rest of the package together.
    from lightning_fabric import Fabric

    is_launched = bool(os.environ.get("LT_CLI_USED"))  # by `fabric run`, which also says how
    num_nodes = 1
    if devices is None:
        devices = "auto" if is_launched else 1
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if not is_launched and world_size > 1:  # `torchrun`
            devices = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            num_nodes = world_size // devices
            strategy = "ddp" if strategy == "auto" else strategy
    fabric = Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        strategy=strategy,
    )
    if not is_launched:
        fabric.launch()
    return fabric


def _seed(seed: int | None, resume_from: str | Path | None) -> int:
    """The seed given, that of the run to go on with, or a random one."""
    if seed is not None:
        return seed
    if resume_from is not None:
        state = read_directory(Checkpoints.newest(Path(resume_from))).config.get("trainer")
        if state is not None:
            return int(state["settings"]["seed"])
    return int(torch.randint(2**31, ()))


def _name_of(schedule: Schedule) -> str:
    """A name for a schedule of one's own, to notice another one at resuming."""
    return f"custom {getattr(schedule, '__qualname__', type(schedule).__qualname__)}"


def _split_validation(
    model: DAK, data: Any, validation: Any, seed: int, device: torch.device, world_size: int
) -> tuple[Any, tuple[Tensor, Tensor] | None]:
    """Training data and checked held-out rows on the device."""
    if validation is None:
        return data, None
    if isinstance(validation, int | float):
        if not 0 < validation < 1:
            raise ValueError(f"`validation` must be a share between 0 and 1; got {validation}.")
        if not is_pair(data):
            raise ValueError("`validation` as a share needs tensors; give a pair (x, y) instead.")
        x, y = check_data(model, *data)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
        num_held_out = max(1, round(validation * len(x)))
        if num_held_out >= len(x):
            raise ValueError(f"`validation`={validation} of {len(x)} rows leaves none to train on.")
        held_out, kept = order[:num_held_out], order[num_held_out:]
        data, validation = (x[kept], y[kept]), (x[held_out], y[held_out])
    if not is_pair(validation):
        raise TypeError(
            "`validation` must be a pair (x, y) or a share of the rows between 0 and 1; "
            f"got {type(validation).__name__}."
        )
    x, y = check_data(model, validation[0], validation[1], "validation")
    if len(x) < world_size:
        raise ValueError(f"`validation` needs a row for each of {world_size} processes.")
    return data, (x.to(device), y.to(device))


def _batches(
    fabric: Any, model: DAK, data: Any, settings: Settings, num_data: int | None
) -> ResidentData | LoaderData:
    rank, world_size = fabric.global_rank, fabric.world_size
    if not settings.fixed_features:
        return training_data(
            model, data, settings.batch_size, num_data, fabric.device, rank, world_size
        )
    features, y = extract_features(model, _all_rows(model, data), fabric.device)
    return ResidentData(features, y, settings.batch_size, rank, world_size)


def _all_rows(model: DAK, data: Any, chunk_size: int = 1024) -> Iterator[tuple[Tensor, Tensor]]:
    """Every row once, in batches."""
    if is_pair(data):
        x, y = check_data(model, *data)
        yield from zip(x.split(chunk_size), y.split(chunk_size), strict=True)
    else:
        for x, y in data:
            yield check_data(model, x, y, "batch")


def _optimizer(
    model: DAK, guide: nn.Module, settings: Settings, fabric: Any, precision: Any
) -> torch.optim.Optimizer:
    network = [*model.feature_extractor.parameters()]
    network += [] if model.embedding is None else [*model.embedding.parameters()]
    last_layer = [*model.layer.parameters(), *model.likelihood.parameters(), *guide.parameters()]
    return build_optimizer(
        settings.optimizer,
        [p for p in network if p.requires_grad],
        [p for p in last_layer if p.requires_grad],
        settings.learning_rate,
        settings.last_layer_learning_rate,
        settings.weight_decay,
        settings.decay_last_layer,
        fused=fabric.device.type in ("cpu", "cuda") and "16" not in str(precision),
        last_layer_name=settings.last_layer_optimizer,
    )
