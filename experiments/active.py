"""Active learning: how fast errors fall when a model chooses the rows to be labelled.

    python -m experiments.active
    python -m experiments.active --dataset energy --seeds 2
    python -m experiments.active --quick

Every strategy starts from the same 20 labelled rows and adds 20 at a time up to 200, then predicts
the same test rows. Energy and yacht are regression, with errors in standard deviations of the
target; MNIST is ten classes from 32 principal components of its images, with the share of wrong
labels. The area under the curve is the mean error over the ten sizes.

"DAK" chooses batches jointly, with `method="integrated"`: the rows whose labels lower the variance
over all rows the most, which for classes is weighed by what labels tell. "DAK, random" is the same
model with random rows, and "DAK, variance" takes those of the largest variance. For classes the
model is a layer on fixed features, the leading kernel principal components of the pool, which see
no labels. For regression the rows are chosen by a model whose lengthscales stay closer to their
prior than those of the model that predicts: with 20 labels the evidence is sure of too much. What
was chosen, on splits that are not in the table: the features and the scale of their prior on splits
100 and 101 of MNIST; that prior of the lengthscales on splits 100 to 102 of energy.

The network has two hidden layers; "NN, entropy" takes the rows with the largest entropy of its
prediction, which for regression is that of a normal distribution whose variance it learns; "MC
dropout" takes those with the largest variance, or mutual information, over 50 passes with dropout.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from experiments.curves import by_place, draw_panels, mean_band, mean_with_error
from experiments.datasets import load_regression
from experiments.image_datasets import load_images
from experiments.peers import NetworkEnsemble
from experiments.report import announce_report, markdown_table
from experiments.runs import Job, Line, result_directory, run_all, start
from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    NaturalGuide,
    exact_posterior,
    predict,
)
from pyro_dak.acting import acquire
from pyro_dak.acting.acquire import Method
from pyro_dak.acting.surrogate import build_surrogate, maximize_evidence

HEADLINE = {"area": "area", "error": "last error"}
START, STEP, STOP = 20, 20, 200
DATASETS = ("energy", "yacht", "mnist")
_NUM_COMPONENTS = 32
# For classes: features and landmarks, the lengthscale of their kernel where the first component has
# deviation 1, and the scale of f in the prior if all features were 1.
_NUM_FEATURES, _NUM_LANDMARKS, _LENGTHSCALE, _PRIOR_SCALE = 128, 500, 2.0, 110.0
# For regression: how far lengthscales go from their prior in the model that chooses, in logarithms.
_CAUTION = 0.5


@dataclass(frozen=True)
class Data:
    """Inputs and targets of pool and test rows; targets are standardised, or labels."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def num_classes(self) -> int:
        """Classes, or 0 for regression."""
        return 0 if self.y.is_floating_point() else int(self.y.max()) + 1


def load(name: str, seed: int) -> Data:
    """A random split into pool and test rows, with inputs standardised over the pool.

    Principal components share the scale of the first one.
    """
    generator = torch.Generator().manual_seed(seed)
    if name == "mnist":
        images = load_images("mnist")
        order = torch.randperm(len(images.x_train), generator=generator)[:5000]
        x, y = images.x_train[order].flatten(1).double(), images.y_train[order]
        x_test, y_test = images.x_test.flatten(1).double(), images.y_test
        rows = torch.randperm(len(x_test), generator=generator)[:2000]
        x_test, y_test = x_test[rows], y_test[rows]
        mean = x.mean(0)
        basis = torch.linalg.eigh((x - mean).mT @ (x - mean)).eigenvectors[:, -_NUM_COMPONENTS:]
        x, x_test = (x - mean) @ basis, (x_test - mean) @ basis
    else:
        x, y = load_regression(name)
        order = torch.randperm(len(x), generator=generator)
        num_test = len(x) // 5
        x, y, x_test, y_test = (
            part[rows] for rows in (order[num_test:], order[:num_test]) for part in (x, y)
        )
        y, y_test = ((part - y.mean()) / y.std() for part in (y, y_test))
    mean, std = x.mean(0), x.std(0)
    if name == "mnist":
        std = std.amax()
    return Data((x - mean) / std, y, (x_test - mean) / std, y_test)


def _error(data: Data, prediction: Tensor) -> float:
    """RMSE, or the share of wrong labels, of predictions `(N, C)`."""
    if data.num_classes:
        return float((prediction.argmax(-1) != data.y_test).double().mean())
    return float((prediction - data.y_test).square().mean().sqrt())


# A strategy takes the data, the labelled rows, the number of rows to add and a seed. It returns the
# error on the test rows, and the rows to label next.
Strategy = Callable[[Data, Tensor, int, int], tuple[float, Tensor]]


def _others(data: Data, labelled: Tensor) -> Tensor:
    """The rows without a label."""
    is_free = torch.ones(len(data.x), dtype=torch.bool)
    is_free[labelled] = False
    return is_free.nonzero().flatten()


def _random(data: Data, labelled: Tensor, num: int, seed: int) -> Tensor:
    others = _others(data, labelled)
    generator = torch.Generator().manual_seed(1000 * seed + len(labelled))
    return others[torch.randperm(len(others), generator=generator)[:num]]


def _largest(data: Data, labelled: Tensor, num: int, scores: Tensor) -> Tensor:
    others = _others(data, labelled)
    return others[scores[others].topk(num).indices]


class KernelComponents(nn.Module):
    """The leading principal components of rows under a Gaussian kernel, from landmarks.

    h(x) = k(x, Z) E diag(e)^{-1/2}, with the largest eigenvalues e of k(Z, Z) and their vectors E.
    So a linear function of h with independent weights is nearly a process with this kernel.
    """

    def __init__(self, landmarks: Tensor):
        super().__init__()
        self.landmarks = landmarks
        values, vectors = torch.linalg.eigh(self._kernel(landmarks))
        self.basis = (vectors / values.clamp(min=1e-9).sqrt())[:, -_NUM_FEATURES:]

    def _kernel(self, x: Tensor) -> Tensor:
        return (-0.5 * (torch.cdist(x, self.landmarks) / _LENGTHSCALE).square()).exp()

    def forward(self, x: Tensor) -> Tensor:
        """h, `(N, P)`, for x `(N, D)`."""
        return self._kernel(x) @ self.basis


def _fit_dak(
    data: Data, labelled: Tensor, log_deviation: float = 1.0
) -> tuple[DAK, Any, Callable[[Tensor], Tensor]]:
    """A model, its posterior, and what its inputs are.

    For regression the surrogate of `DAKModel`, with lengthscales up to `log_deviation` from their
    prior; for classes a unit and a linear term for each kernel component, on which the posterior is
    conditioned from the prior.
    """
    if data.num_classes:
        order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))
        features = KernelComponents(data.x[order[:_NUM_LANDMARKS]])
        P = features.basis.shape[-1]
        model = DAK(
            features,
            P,
            P,
            data.num_classes,
            level=1,
            bounds=(-1.0, 1.0),
            likelihood=CategoricalLikelihood(),
            scaling="none",
            embedding=False,
            linear_term=True,
            prior_scale=_PRIOR_SCALE,
        )
        model = model.double().eval()
        guide = NaturalGuide(model, "shared")
        guide.update(model, data.x[labelled], data.y[labelled])
        return model, guide, lambda x: x
    model = build_surrogate(data.x.shape[-1], log_deviation=log_deviation).double()
    x, y = torch.special.ndtr(data.x[labelled]), data.y[labelled]
    maximize_evidence(model, x, y)
    return model, exact_posterior(model, x, y), torch.special.ndtr


def dak(data: Data, labelled: Tensor, num: int, seed: int, method: Method | None) -> Any:
    """DAK, with rows chosen jointly by a method of `acquire`, or at random."""
    model, posterior, inputs_fn = _fit_dak(data, labelled)
    guide = posterior if data.num_classes else posterior.guide
    prediction = predict(model, guide, inputs_fn(data.x_test), novelty=False, progress=False)
    error = _error(data, prediction.probs if data.num_classes else prediction.mean)
    if method is None:
        return error, _random(data, labelled, num, seed)
    if not data.num_classes:
        model, posterior, _ = _fit_dak(data, labelled, _CAUTION)
    others = _others(data, labelled)
    options: dict[str, Any] = {"progress": False}
    if method == "integrated":
        options["target"] = inputs_fn(data.x)
    rows = acquire(model, posterior, inputs_fn(data.x[others]), num, method, **options)
    return error, others[rows]


def _fit_network(data: Data, labelled: Tensor, seed: int, dropout: float) -> NetworkEnsemble:
    torch.manual_seed(seed)
    num_outputs = data.num_classes or 2  # mean and log variance
    network = NetworkEnsemble(data.x.shape[-1], num_outputs, size=1, dropout=dropout)
    x, y = data.x[labelled], data.y[labelled]
    (network.fit if data.num_classes else network.fit_normal)(x, y, weight_decay=1e-2)
    return network


def network_entropy(
    data: Data, labelled: Tensor, num: int, seed: int, by_chance: bool = False
) -> tuple[float, Tensor]:
    """A network, with the rows of largest entropy or at random."""
    network = _fit_network(data, labelled, seed, 0.0)
    with torch.no_grad():
        outputs, pool = network(data.x_test)[0], network(data.x)[0]
    error = _error(data, outputs if data.num_classes else outputs[:, :1])
    if by_chance:
        return error, _random(data, labelled, num, seed)
    entropy = torch.special.entr(pool.softmax(-1)).sum(-1) if data.num_classes else pool[:, 1]
    return error, _largest(data, labelled, num, entropy)


def dropout(data: Data, labelled: Tensor, num: int, seed: int) -> tuple[float, Tensor]:
    """A network with dropout, with the rows on which its passes differ most."""
    network = _fit_network(data, labelled, seed, 0.2)
    with torch.no_grad():
        test = torch.stack([network(data.x_test)[0] for _ in range(50)])
        pool = torch.stack([network(data.x)[0] for _ in range(50)])  # (50, N, C)
    if not data.num_classes:
        scores = pool[..., 0].var(0)
        return _error(data, test.mean(0)[:, :1]), _largest(data, labelled, num, scores)
    p = pool.softmax(-1)
    total, expected = torch.special.entr(p.mean(0)).sum(-1), torch.special.entr(p).sum(-1).mean(0)
    error = _error(data, test.softmax(-1).mean(0))
    return error, _largest(data, labelled, num, total - expected)


STRATEGIES: dict[str, Strategy] = {
    "DAK": partial(dak, method="integrated"),
    "DAK, random": partial(dak, method=None),
    "DAK, variance": partial(dak, method="variance"),
    "NN, entropy": network_entropy,
    "NN, random": partial(network_entropy, by_chance=True),
    "MC dropout": dropout,
}


def run(job: Job, tell: Callable[[str], None]) -> dict[str, Any]:
    """One learning curve."""
    torch.set_num_threads(1)
    data = load(job.dataset, job.seed)
    generator = torch.Generator().manual_seed(job.seed)
    labelled = torch.randperm(len(data.x), generator=generator)[:START]
    errors = []
    for size in range(START, job.settings["stop"] + 1, STEP):
        error, rows = STRATEGIES[job.model](data, labelled, STEP, job.seed)
        errors.append(float(f"{error:.6g}"))
        tell(f"{size} labels, error {error:.4g}")
        labelled = torch.cat([labelled, rows])
    return {"metrics": {"area": statistics.fmean(errors), "error": errors[-1]}, "errors": errors}


def make_job(dataset: str, strategy: str, seed: int, stop: int = STOP) -> Job:
    """The job of one curve."""
    return Job("active", dataset, strategy, seed, {"stop": stop})


def table(runs: list[Line]) -> str:
    """Means over seeds of area and last error, and how DAK differs, as Markdown."""
    groups = by_place(runs, DATASETS, STRATEGIES)
    rows, differences = [], []
    for (dataset, strategy), group in groups.items():
        cells = [mean_with_error(group, name, 4) for name in ("area", "error")]
        rows.append([dataset, strategy, *cells, str(len(group))])
        pairs = _differences(groups.get((dataset, "DAK"), []), group)
        if strategy != "DAK" and pairs:
            better = sum(pair["metrics"]["area"] < 0 for pair in pairs)
            cell = mean_with_error(pairs, "area", 4)
            differences.append([dataset, strategy, cell, f"{better} of {len(pairs)}"])
    columns = ["data", "strategy", "area under the curve", "error at the end", "seeds"]
    text = "Errors on test rows from 20 to 200 labels, mean over seeds ± standard error."
    text = f"{text}\n\n{markdown_table(columns, rows)}\n"
    if not differences:
        return text
    columns = ["data", "against", "area of DAK minus theirs", "DAK is better"]
    paired = (
        "Differences within seeds, which share split and first labels, mean ± standard error; "
        "below zero DAK is better."
    )
    return f"{text}\n{paired}\n\n{markdown_table(columns, differences)}\n"


def _differences(ours: list[Line], theirs: list[Line]) -> list[Line]:
    """Area of ours minus that of theirs, for each seed that both have."""
    areas = {run["config"]["seed"]: run["metrics"]["area"] for run in theirs}
    return [
        {"metrics": {"area": run["metrics"]["area"] - areas[run["config"]["seed"]]}}
        for run in ours
        if run["config"]["seed"] in areas
    ]


def draw(runs: list[Line], figures: Path) -> list[Path]:
    """Learning curves, mean over seeds with standard errors."""

    def sizes(run: Line) -> list[float]:
        return [START + STEP * i for i in range(len(run["errors"]))]

    groups = by_place(runs, DATASETS, STRATEGIES)
    options: dict[str, Any] = {"labels": ("labels", "error"), "is_log": True}
    path = figures / "curves.png"
    return [draw_panels(groups, path, sizes, key="errors", band=mean_band, **options)]


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="energy, yacht, mnist; all.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Strategies; all by default.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each, from seed 0.")] = 5,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    out: Annotated[Path | None, typer.Option(help="Else results/active.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write to results/draft/active.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: one seed, 40 labels.")] = False,
) -> None:
    """Make all learning curves, then write the table and the figure."""
    jobs = [
        make_job(name, strategy, number, START + STEP if quick else STOP)
        for name in dataset or DATASETS
        for number in range(1 if quick else seeds)
        for strategy in model or STRATEGIES
    ]
    directory = result_directory("active", out, draft or quick)
    run_all(jobs, run, directory, HEADLINE, resume=resume)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
