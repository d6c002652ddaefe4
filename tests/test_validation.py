import math
from pathlib import Path

import pytest
import torch

from pyro_dak import validation

pytestmark = pytest.mark.usefixtures("no_type_checker")

GOOD = {
    "integer": (validation.check_integer, ("n", 3, 1)),
    "integer at its maximum": (validation.check_integer, ("n", 3, 1, 3)),
    "positive": (validation.check_positive, ("s", 0.5)),
    "positive integer": (validation.check_positive, ("s", 2)),
    "bounds": (validation.check_bounds, ("b", (0, 1.5))),
    "bounds as a list": (validation.check_bounds, ("b", [-1.0, 1.0])),
    "choice": (validation.check_choice, ("c", "x", ["x", "y"])),
    "floating": (validation.check_floating, ("h", torch.zeros(2, dtype=torch.float16))),
    "probability": (validation.check_probability, ("q", 0.5)),
    "rank": (validation.check_shape, ("h", torch.zeros(2, 3), ("N", "P"), "why")),
    "shape": (validation.check_shape, ("h", torch.zeros(5, 2, 3), (2, 3), "why")),
    "last dimension": (validation.check_last_dim, ("h", torch.zeros(2, 3), 3, "why", "do")),
    "kind": (validation.check_kind, ("k", 3, int, "a number")),
    "not negative": (validation.check_not_negative, ("w", 0)),
    "real": (validation.check_real, ("r", -2.5)),
    "no seed": (validation.check_seed, ("seed", None)),
    "a negative seed": (validation.check_seed, ("seed", -3)),
    "device": (validation.check_device, ("device", "cpu")),
    "path": (validation.check_path, ("path", Path("a"))),
    "tensor": (validation.check_tensor, ("y", torch.zeros(2, dtype=torch.long))),
    "finite": (validation.check_finite, ("h", torch.zeros(2))),
    "finite and empty": (validation.check_finite, ("h", torch.zeros(0))),
    "finite on meta": (validation.check_finite, ("h", torch.zeros(2, device="meta"))),
}
integer, positive, bounds = (
    validation.check_integer,
    validation.check_positive,
    validation.check_bounds,
)
BAD = [
    (integer, ("n", 2**63, 1), ValueError, "`n` must be below 2^63; got 9223372036854775808."),
    (
        integer,
        ("n", -(2**70), 1),
        ValueError,
        "`n` must be at least 1; got -1180591620717411303424.",
    ),
    (integer, ("n", torch.ones(9, 9), 1), TypeError, "`n` must be an integer; got a Tensor."),
    (positive, ("s", 10**400), ValueError, "`s` must be positive and finite; got 1000"),
    (bounds, ("b", (0, 10**400)), ValueError, "`b` must be finite with low < high"),
    (bounds, ("b", (-1e308, 1e308)), ValueError, "`b` must be finite with low < high"),
    (
        validation.check_kind,
        ("k", "three", int, "a number, such as 3"),
        TypeError,
        "`k` must be a number, such as 3; got 'three' (str).",
    ),
    (
        validation.check_not_negative,
        ("w", -0.5),
        ValueError,
        "`w` must not be negative, and be finite; got -0.5.",
    ),
    (validation.check_real, ("r", math.inf), ValueError, "`r` must be finite; got inf."),
    (
        validation.check_seed,
        ("seed", 1.5),
        TypeError,
        "`seed` must be an integer; got 1.5 (float).",
    ),
    (
        validation.check_tensor,
        ("y", torch.eye(2).to_sparse()),
        TypeError,
        "`y` must be dense; got torch.sparse_coo. Use `y.to_dense()`.",
    ),
    (
        validation.check_has_values,
        ("x", torch.zeros(2, device="meta")),
        ValueError,
        "`x` must hold values; got a tensor on the meta device.",
    ),
    (validation.check_device, ("d", "abacus"), ValueError, "`d` must be a device that torch has"),
    (validation.check_device, ("d", []), ValueError, "`d` must be a device that torch has here"),
    (validation.check_path, ("path", 3), TypeError, "`path` must be a path: a string or a"),
    (validation.check_path, ("path", "a\0"), ValueError, "`path` must not have a null character"),
    (validation.check_probability, ("q", "0.5"), TypeError, "`q` must be a real number; got '0.5'"),
    (validation.check_choice, ("c", 3, ["x"]), ValueError, "`c` must be one of 'x'; got 3 (int)."),
    (integer, ("n", 0, 1), ValueError, "`n` must be at least 1; got 0."),
    (integer, ("n", 4, 1, 3), ValueError, "`n` must be between 1 and 3; got 4."),
    (integer, ("n", 2.0, 1), TypeError, "`n` must be an integer; got 2.0 (float)."),
    (integer, ("n", True, 1), TypeError, "`n` must be an integer; got True (bool)."),
    (positive, ("s", 0.0), ValueError, "`s` must be positive and finite; got 0.0."),
    (positive, ("s", math.nan), ValueError, "`s` must be positive and finite; got nan."),
    (positive, ("s", math.inf), ValueError, "`s` must be positive and finite; got inf."),
    (positive, ("s", "1"), TypeError, "`s` must be a real number; got '1' (str)."),
    (positive, ("s", True), TypeError, "`s` must be a real number; got True (bool)."),
    (bounds, ("b", 3.0), TypeError, "`b` must be a pair (low, high); got 3.0."),
    (bounds, ("b", (0, 1, 2)), TypeError, "`b` must be a pair (low, high); got (0, 1, 2)."),
    (bounds, ("b", (0, "1")), TypeError, "`b` must hold two real numbers; got (0, '1')."),
    (bounds, ("b", (1, 0)), ValueError, "`b` must be finite with low < high; got (1, 0)."),
    (bounds, ("b", (0, math.nan)), ValueError, "`b` must be finite with low < high"),
    (
        validation.check_choice,
        ("c", "z", ["y", "x"]),
        ValueError,
        "`c` must be one of 'x', 'y'; got 'z'.",
    ),
    (
        validation.check_floating,
        ("h", [1.0]),
        TypeError,
        "`h` must be a torch.Tensor; got list. Convert it with torch.as_tensor.",
    ),
    (
        validation.check_floating,
        ("h", torch.zeros(2, dtype=torch.bool)),
        TypeError,
        "`h` must have a floating dtype; got torch.bool. Convert it with `h.float()`",
    ),
    (
        validation.check_shape,
        ("h", torch.zeros(3), ("N", "P"), "rows x units"),
        ValueError,
        "`h` must have shape (..., N, P), rows x units; got (3,).",
    ),
    (
        validation.check_shape,
        ("h", torch.zeros(2, 4), ("N", 3), "rows x units"),
        ValueError,
        "`h` must have shape (..., N, 3), rows x units; got (2, 4).",
    ),
    (
        validation.check_probability,
        ("q", 1.0),
        ValueError,
        "`q` must lie strictly between 0 and 1; got 1.0.",
    ),
    (
        validation.check_shape,
        ("h", torch.zeros(2, 4), (2, 3), "rows x units"),
        ValueError,
        "`h` must have shape (..., 2, 3), rows x units; got (2, 4).",
    ),
    (
        validation.check_shape,
        ("h", torch.zeros(3), (2, 3), "rows x units"),
        ValueError,
        "`h` must have shape (..., 2, 3), rows x units; got (3,).",
    ),
    (
        validation.check_last_dim,
        ("h", torch.zeros(32, 16), 8, "one per additive unit", "Embed first."),
        ValueError,
        "`h` must have 8 columns, one per additive unit; got shape (32, 16). Embed first.",
    ),
    (
        validation.check_last_dim,
        ("h", torch.tensor(0.0), 8, "one per additive unit", "Embed first."),
        ValueError,
        "`h` must have 8 columns, one per additive unit; got shape (). Embed first.",
    ),
    (
        validation.check_finite,
        ("h", torch.tensor([math.nan, math.inf, -math.inf, 0.0])),
        ValueError,
        "`h` must be finite; got 1 NaN and 2 infinite of 4 values. Remove or impute",
    ),
]


@pytest.mark.parametrize(("check", "arguments"), GOOD.values(), ids=GOOD.keys())
def test_good_values_pass(check, arguments):
    assert check(*arguments) is None


@pytest.mark.parametrize(("check", "arguments", "error", "message"), BAD)
def test_bad_values_are_named_with_what_came(check, arguments, error, message):
    with pytest.raises(error) as caught:
        check(*arguments)
    assert str(caught.value).startswith(message)
