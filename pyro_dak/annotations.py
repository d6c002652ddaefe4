"""Shapes in annotations, such as `Float[Tensor, "n p"]`: those of jaxtyping where it is installed.

The tests execute them. Users need no jaxtyping: without it `Float[Tensor, "n p"]` is `Tensor`.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["Bool", "Float", "Int"]

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ModuleNotFoundError:

        class _Shaped:
            """An array with a shape that nobody checks."""

            def __class_getitem__(cls, array_and_shape: tuple[Any, str]) -> Any:
                return array_and_shape[0]

        Bool = Float = Int = _Shaped
