"""Kernel activations and the prior of the process that they induce, in one figure.

python -m experiments.prior [--out FILE] [--quick]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.runs import DRAFTS
from pyro_dak import DyadicGrid, KernelActivation, LaplaceKernel
from pyro_dak.training.files import write_whole

LENGTHSCALE = 0.5
INK, MUTED, SHADE = "#24292f", "#6e7781", "#f1f4f8"
PALETTE = ("#1b4965", "#2a9d8f", "#e9a03b", "#d1495b", "#7b5ea7")


def _activation(level: int) -> KernelActivation:
    return KernelActivation(DyadicGrid(level, (0.0, 1.0)), LaplaceKernel(LENGTHSCALE))


def _inputs(low: float, high: float, num_points: int) -> torch.Tensor:
    return torch.linspace(low, high, num_points, dtype=torch.float64).unsqueeze(-1)  # (N, 1)


def _style(ax: Axes, title: str, ylabel: str) -> None:
    ax.axvspan(0, 1, color=SHADE, zorder=-2, lw=0)
    ax.set_title(title, loc="left", fontsize=11, color=INK, pad=8)
    ax.set_xlabel("unit input $h$", color=MUTED)
    ax.set_ylabel(ylabel, color=MUTED)
    ax.tick_params(colors=MUTED, length=3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#d0d7de")


def draw_activations(ax: Axes, level: int, num_points: int) -> None:
    """phi_m(h), one curve per inducing point, coloured by level."""
    activation = _activation(level)
    h = _inputs(-0.3, 1.3, num_points)
    phi = activation(h).squeeze(-2)  # (N, M)
    seen = set()
    for m, point_level in enumerate(activation.grid.point_level.tolist()):
        label = None if point_level in seen else f"level {point_level}"
        seen.add(point_level)
        curve = phi[:, m].where(phi[:, m] != 0, torch.nan)
        ax.plot(h, curve, color=PALETTE[point_level - 1], lw=1.8, label=label)
    ax.plot(activation.grid.inducing_points, torch.zeros(activation.num_inducing), "|", color=INK)
    ax.legend(frameon=False, fontsize=8, labelcolor=MUTED, loc="upper right", ncols=1)
    ax.set_ylim(-0.03, 1.12)
    _style(ax, f"Activations: {level} of {activation.num_inducing} non-zero", r"$\phi_m(h)$")


def draw_samples(ax: Axes, level: int, num_points: int) -> None:
    """Draws of phi(h) z with z ~ N(0, I), and twice their standard deviation."""
    activation = _activation(level)
    h = _inputs(-1.0, 2.0, num_points)
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(5, 1, activation.num_inducing, dtype=torch.float64, generator=generator)
    g = activation.combine(h, z)  # (N, 5)
    band = 2 * (1 - activation.residual_variance(h)).sqrt().squeeze(-1)
    ax.fill_between(h.squeeze(-1), -band, band, color=PALETTE[0], alpha=0.12, lw=0, zorder=-1)
    for s, color in enumerate(PALETTE):
        ax.plot(h, g[:, s], color=color, lw=1.1)
    ax.set_ylim(-3, 3)
    _style(ax, f"Prior samples, {activation.num_inducing} inducing points", r"$g(h) = \phi(h)\,z$")


def draw_variance(ax: Axes, levels: Sequence[int], num_points: int) -> None:
    """The prior variance that the inducing points explain, and with it the residual variance."""
    h = _inputs(-1.0, 2.0, num_points)
    for level, color in zip(levels, PALETTE[3:0:-1], strict=True):
        activation = _activation(level)
        explained = activation(h).square().sum(-1)
        label = f"induced by {activation.num_inducing} point{'s' * (level > 1)}"
        ax.plot(h, explained, color=color, lw=1.8, label=label)
    total = explained + activation.residual_variance(h)
    ax.plot(h, total, color=INK, lw=1.8, ls="--", label="with residual variance")
    ax.legend(frameon=False, fontsize=8, labelcolor=MUTED, loc="upper center", ncols=2)
    ax.set_ylim(0, 1.35)
    ax.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
    _style(ax, "Prior variance in and out of the grid", r"$\mathrm{Var}\,g(h)$")


def draw(out: Path, is_quick: bool) -> None:
    """Draw the three panels into the file `out`."""
    num_points = 241 if is_quick else 2401
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        figure = Figure(figsize=(12, 3.5), layout="constrained", facecolor="white")
        axes = figure.subplots(1, 3)
        draw_activations(axes[0], 3, num_points)
        draw_samples(axes[1], 8, num_points)
        draw_variance(axes[2], (1, 2, 4), num_points)
        out.parent.mkdir(parents=True, exist_ok=True)
        options = {"format": out.suffix.removeprefix(".") or "png", "dpi": 80 if is_quick else 160}
        write_whole(out, lambda temporary: figure.savefig(temporary, **options))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments, draw, print the path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DRAFTS / "prior" / "figures" / "prior.png")
    parser.add_argument("--quick", action="store_true", help="fewer points, lower resolution")
    arguments = parser.parse_args(argv)
    draw(arguments.out, arguments.quick)
    print(f"Activations and prior samples: {arguments.out}")


if __name__ == "__main__":
    main()
