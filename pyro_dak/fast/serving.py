"""Mean and variance of f at many inputs, for weights that do not change any more.

This is what `fast.fused` computes in training, with fewer operations and nothing kept for a
gradient; and the affine map from a network's last layer to the units as one product.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pyro_dak.annotations import Float
from pyro_dak.fast.fused import Intervals, sinh_ratio, two_nodes
from pyro_dak.fast.transforms import needs_plain_operations

__all__ = ["FixedMoments", "KeptResults", "affine_units", "are_plain"]

# So many numbers of each quantity are computed at a time. Larger tensors go back to the system as
# soon as they are done with, and to get them anew costs more than to compute what is in them.
_MAX_NUMBERS = 2**16
# Results of more numbers than this are not kept.
_MAX_KEPT_NUMBERS = 2**20

# Up to so many unit inputs per function there is one sum over gathered rows: more of them take
# longer than the calls that this saves.
_MAX_FEW = 2**10

# Nodes are added outside the grid from this many rows on, and this many for each node of a unit:
# for fewer rows they cost more than they save.
_MANY_ROWS, _MANY_ROWS_PER_NODE = 2048, 8


class _Nodes(NamedTuple):
    """Moments of each unit at adjacent nodes, from node `low` to the one after node `high`.

    `parts` are mean, variance and twice the covariance with the next node, and then mean and
    variance of the next node, `(F, P T - 1)` each. `origin`, `(P, 1)`, says where node 0 of each
    unit is, or would be.
    """

    parts: tuple[Tensor, ...]
    low: int
    high: int
    origin: Tensor


def _nodes(table: Tensor, low: int) -> _Nodes:
    """The nodes of a table `(3, F, P, T)` whose first one is node `low`."""
    P, T = table.shape[-2:]
    flat = table.flatten(2)
    pairs = torch.cat([flat[..., :-1], flat[:2, :, 1:]]).unbind()
    starts = torch.arange(-low, P * T - low, T, dtype=torch.int32, device=table.device)
    return _Nodes(pairs, low, low + T - 2, starts.unsqueeze(-1))


class _Memory:
    """Where blocks of rows are computed: new memory for each block would cost more than the sums.

    Args:
        size: how many unit inputs a block has at most.
        like: a tensor of the dtype and on the device of the inputs.
    """

    def __init__(self, size: int, like: Tensor):
        self.floats = like.new_empty(5, size).unbind()
        self.places = like.new_empty(size, dtype=torch.int32)


def _pick(out: Tensor, table: Tensor, places: Tensor) -> Tensor:
    """The numbers of a table `(T,)` at some places, in `out`, which is like these."""
    torch.index_select(table, 0, places.view(-1), out=out.view(-1))
    return out


def _fill_sinh_ratio(out: Tensor, a: Tensor, spare: Tensor, intervals: Intervals) -> None:
    """Write `fused.sinh_ratio` of a to `out`, for a delta that is a number."""
    coefficients, last = intervals.coefficients, intervals.last_coefficient
    if isinstance(last, Tensor) or not coefficients:
        out.copy_(sinh_ratio(a, intervals))
        return
    squares = torch.square(a, out=spare)
    torch.add(coefficients[-2], squares, alpha=last, out=out)
    for c in coefficients[-3::-1]:
        torch.addcmul(c, out, squares, out=out)
    out.mul_(a)


class _NodeRows(NamedTuple):
    """The nodes as rows of a table, for sums over rows with weights.

    Of each node of all units there is the row (mean, 0), and further down (0, variance), and (0,
    twice the covariance with the next node), of 2 F numbers each. `places`, `(5, P)`, say which
    rows a unit would take in interval 0: mean, next mean, variance, covariance, next variance.
    """

    table: Tensor
    places: Tensor


def _node_rows(table: Tensor) -> _NodeRows:
    """The rows of a table `(3, F, P, T)` whose first node is node 0."""
    _, F, P, T = table.shape
    rows = table.new_zeros(3, P * T, 2, F)
    rows[0, :, 0] = table[0].flatten(1).mT
    rows[1:, :, 1] = table[1:].flatten(2).mT
    starts = torch.tensor([0, 1, P * T, 2 * P * T, P * T + 1], device=table.device)
    units = torch.arange(0, P * T, T, device=table.device)
    return _NodeRows(rows.flatten(0, 1).flatten(1), starts.unsqueeze(-1) + units)


class KeptResults:
    """The last result for each owner, kept while the tensors it was made from have the same values.

    Values are compared, and not versions: `tensor.data` changes values without leaving a trace.
    NaNs equal nothing, so that nothing is kept for them. An owner is a module, which may go away.
    """

    def __init__(self) -> None:
        self._results: WeakKeyDictionary[nn.Module, tuple[Any, Sequence[Tensor], Any]]
        self._results = WeakKeyDictionary()

    def __call__(
        self, owner: nn.Module, make: Callable[..., Any], constants: object, *tensors: Tensor
    ) -> Any:
        """make(*tensors), or what it returned before for these constants.

        Constants are the same if they are one object, or equal tuples of numbers. `make` gets
        copies of the tensors, to which nobody else writes.
        """
        if needs_plain_operations():
            return make(*tensors)
        then, values, result = self._results.get(owner, (None, (), None))
        is_same = then is constants or (type(then) is tuple and then == constants)
        if is_same and len(values) == len(tensors) and all(map(_equal, values, tensors)):
            return result
        with torch.inference_mode(False), torch.no_grad():
            values = [tensor.detach().clone() for tensor in tensors]
            result = make(*values)
        if sum(value.numel() for value in values) <= _MAX_KEPT_NUMBERS:
            self._results[owner] = constants, values, result
        return result


def _equal(kept: Tensor, now: Tensor) -> bool:
    return kept.dtype == now.dtype and kept.device == now.device and torch.equal(kept, now)


class FixedMoments:
    """h -> mean and variance of sum_p g_p(h_p), from moments of the g_p at the nodes.

    The twin of `fused.interpolated_moments` without a gradient. Nodes 1 to M lie in the grid. In
    the interval after node j, with the weights w0 and w1 of its two nodes,

        mean = w0 mean_j + w1 mean_{j+1},
        variance = w0 (w0 var_j + 2 w1 cov_j) + w1^2 var_{j+1}.

    No term of the variance is negative. Outside the nodes g decays by exp(-delta) a spacing, so
    that the outermost node has the weight r = exp(-distance / lengthscale). Since

        sinh((1 - a) delta) + exp(-delta) sinh(a delta) = exp(-a delta) sinh(delta),

    interpolation gives the same between further nodes, each exp(-delta) times the one before it.
    For many inputs M such nodes are added on either side; unless an input lies beyond even these,
    there is no exponential to compute.

    Args:
        table: mean, variance and twice the covariance with the next node, of nodes 0 to M + 1,
            `(3, F, P, M + 2)`, of which the first and the last continue g as above.
        intervals: of the grid, in the dtype and on the device of the inputs.
    """

    def __init__(self, table: Tensor, intervals: Intervals):
        self.table, self.intervals = table, intervals
        self.near = _nodes(table, 0)
        self.far: _Nodes | None = None
        self.rows: _NodeRows | None = None

    def __call__(
        self, h: Float[Tensor, "n p"]
    ) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"]]:
        """Mean and variance. A NaN shows in its own row."""
        if torch.compiler.is_compiling():
            return self._for_compiler(h)
        if h.numel() <= _MAX_FEW * self.table.shape[1]:
            moments = self._of_few(h)
            if moments is not None:
                return moments
        mean, var = self._of_blocks(h, self.table.shape[1], True)
        return mean.mT, var.mT

    def means(self, h: Float[Tensor, "n p"], num_functions: int) -> Float[Tensor, "n k"]:
        """The means of the first functions alone."""
        return self._of_blocks(h, num_functions, False)[0].mT

    def _of_blocks(self, h: Tensor, num_functions: int, has_variance: bool) -> Tensor:
        """Means and variances `(2, F, N)` of the first functions, or means alone, `(1, F, N)`."""
        N, P = h.shape
        are_many = len(h) >= max(_MANY_ROWS, _MANY_ROWS_PER_NODE * self.intervals.num_nodes)
        num_rows = max(1, min(N, _MAX_NUMBERS // max(1, P)))
        memory = _Memory(num_rows * P, h)
        result = h.new_empty(1 + has_variance, num_functions, N)
        for block, out in zip(h.split(num_rows), result.split(num_rows, -1), strict=True):
            self._of_block(block, are_many, memory, out)
        return result

    def _of_few(self, h: Tensor) -> tuple[Tensor, Tensor] | None:
        """The moments in as few operations as possible, or None if some h is outside the nodes."""
        if h.device.type != "cpu" or h.numel() == 0:
            return None
        x = (h - self.intervals.low).div_(self.intervals.spacing)
        low, high = torch.aminmax(x)
        if not (self.near.low <= low.item() and high.item() < self.near.high + 1):
            return None
        if self.rows is None:
            self.rows = _node_rows(self.table)
        j = x.floor()
        a = x.sub_(j)
        w1, w0 = sinh_ratio(torch.stack((a, 1 - a)), self.intervals).unbind()
        weights = torch.stack((w0, w1, w0 * w0, w0 * w1, w1 * w1), 1).flatten(1)  # (N, 5 P)
        places = (j.long().unsqueeze(1) + self.rows.places).reshape(-1)
        starts = torch.arange(0, len(places), weights.shape[1])
        moments, *_ = torch.embedding_bag(
            self.rows.table, places, starts, per_sample_weights=weights.reshape(-1)
        )
        mean, var = moments.chunk(2, 1)
        return mean, var

    def _of_block(self, h: Tensor, are_many: bool, memory: "_Memory", out: Tensor) -> None:
        """Write `_of_blocks` of a block of rows to `out`."""
        N, P = h.shape
        x, j, w0, w1, spare = (part[: N * P].view(P, N) for part in memory.floats)
        places = memory.places[: N * P].view(P, N)
        torch.sub(h.mT, self.intervals.low, out=x).div_(self.intervals.spacing)
        nodes, is_near = self.near, are_many and self._is_near(x)
        if is_near:
            assert self.far is not None
            nodes = self.far
        else:
            torch.clamp(x, nodes.low, nodes.high, out=j)
            beyond = x - j
            x.copy_(j)
        places.copy_(torch.floor(x, out=j)).add_(nodes.origin)
        a = x.sub_(j)
        _fill_sinh_ratio(w1, a, spare, self.intervals)
        _fill_sinh_ratio(w0, torch.sub(1, a, out=j), spare, self.intervals)
        if not is_near:
            w0.mul_(beyond.abs_().mul_(-self.intervals.delta).exp_())  # w1 is 0 where this is not 1
            places.clamp_(0, nodes.parts[0].shape[1] - 1)  # of a NaN
        own, other = x, j  # which are not needed any more
        # Torch picks numbers from a vector faster than from a matrix: one function at a time.
        for f, mean in enumerate(out[0]):
            _pick(own, nodes.parts[0][f], places).mul_(w0)
            torch.sum(own.addcmul_(w1, _pick(other, nodes.parts[3][f], places)), 0, out=mean)
        w1_squared = torch.square(w1, out=spare)
        for f, var in enumerate(out[1] if len(out) > 1 else ()):
            _pick(own, nodes.parts[1][f], places).mul_(w0)
            own.addcmul_(w1, _pick(other, nodes.parts[2][f], places)).mul_(w0)
            own.addcmul_(w1_squared, _pick(other, nodes.parts[4][f], places))
            torch.sum(own, 0, out=var)

    def _is_near(self, x: Tensor) -> bool:
        """Whether all of x lies between nodes inside and outside the grid; makes these nodes."""
        if x.device.type != "cpu":
            return False
        if self.far is None:
            self.far = self._continued()
        low, high = torch.aminmax(x)
        return self.far.low <= low.item() and high.item() <= self.far.high

    def _continued(self) -> _Nodes:
        """The nodes with M more on either side, each exp(-delta) times its neighbour."""
        M = self.intervals.num_nodes
        steps = torch.arange(1, M + 2, dtype=torch.float64)
        rho = (-self.intervals.delta * steps).exp()
        # Means decay by rho over so many spacings, variances and covariances by its square.
        decay = torch.stack([rho, rho**2, rho**2]).view(3, 1, 1, -1).to(self.table)
        before = self.table[..., :1] * decay[..., :-1].flip(-1)
        after = self.table[..., -1:] * decay
        return _nodes(torch.cat([before, self.table, after], -1), -M)

    def _for_compiler(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The same in plain operations, of which the compiler makes one loop over h."""
        j, (w0, w1) = two_nodes(h.mT.unsqueeze(0), None, self.intervals)
        places = (self.near.origin + j[0]).long()
        mean0, var0, cov, mean1, var1 = (part[:, places] for part in self.near.parts)
        mean = w0 * mean0 + w1 * mean1
        var = w0 * (w0 * var0 + w1 * cov) + w1 * w1 * var1
        return mean.sum(1).mT, var.sum(1).mT


def affine_units(
    network: nn.Module, weight: Tensor | None, gain: Tensor, shift: Tensor, num_rows: int
) -> tuple[list[nn.Module], Tensor, Tensor]:
    """The layers of a network before its last linear one, and the affine map from there to units.

    The units are gain (W features) + shift. Where the network ends in a plain linear layer with
    features = W_l b + v, and where this pays for `num_rows` inputs, the map is one of b,

        gain (W W_l) b + (gain W v + shift),

    which takes P K multiplications a row instead of D K + P D, after P D K once for all rows.
    Layers with hooks and layers of other types, such as parametrized and quantized ones, may do
    more than their weights say, so they are left alone.

    W is `weight`, `(P, D)`, or None for the features themselves; gain and shift are `(P,)`. The
    results are layers to apply one after the other, the matrix `(P, K)`, or `(P, 1)` where there is
    no W, and the shift `(P, 1)`.
    """
    gain, shift = gain.unsqueeze(-1), shift.unsqueeze(-1)
    if weight is None:
        return [network], gain, shift
    weight = gain * weight
    if num_rows < 2:
        return [network], weight, shift
    layers = [network]
    while layers and type(layers[-1]) is nn.Sequential and are_plain((layers[-1], nn.Sequential)):
        layers[-1:] = list(layers[-1])
    last = layers.pop() if layers else network
    if type(last) is not nn.Linear or not are_plain((last, nn.Linear)):
        return [network], weight, shift
    own, is_ordinary = last.weight, type(last.bias) in (nn.Parameter, type(None))
    is_alike = own.dtype == weight.dtype and own.device == weight.device
    if not (is_ordinary and type(own) is nn.Parameter and is_alike and len(own) == weight.shape[1]):
        return [network], weight, shift
    (P, D), K = weight.shape, last.in_features
    if num_rows * (D * K + P * D - P * K) <= P * D * K:
        return [network], weight, shift
    if last.bias is not None:
        shift = shift + (weight @ last.bias).unsqueeze(-1)
    return layers, weight @ last.weight, shift


_names_of_class: Callable[[type], frozenset[str]] = functools.cache(
    lambda kind: frozenset(dir(kind))
)


def are_plain(*pairs: tuple[nn.Module, type[nn.Module]]) -> bool:
    """Whether each module is exactly of its class, with nothing hooked to it or in its place."""
    for module, kind in pairs:
        if type(module) is not kind or not _names_of_class(kind).isdisjoint(vars(module)):
            return False
        forward, backward = module._forward_hooks, module._backward_hooks
        if forward or backward or module._forward_pre_hooks or module._backward_pre_hooks:
            return False
    return True
