"""The largest error of a layout that rounding explains, for each precision."""

from dataclasses import dataclass
from typing import Literal

Precision = Literal["float64", "float32", "bf16"]


@dataclass(frozen=True)
class Tolerance:
    """Relative errors that rounding explains. A larger error is a bug.

    The tolerances apply to every step. Errors of tensors are max |a − b| / max |b|, where the
    divisor is at least `floor` times the largest max |b| of all parameters. The floor is needed for
    gradients that are zero in theory, such as the gradient of a bias before a batch norm: their
    computed values are only rounding errors. For AdamW's updates the floor is 1, because AdamW
    moves all parameters about equally far.
    """

    loss: float  # also the tolerance of the global norm of the gradient
    gradient: float
    update: float  # change of a parameter since the start
    buffer: float  # for example running statistics of norms
    eps: float  # AdamW's eps as a fraction of the root mean square of all gradients
    floor: float


# The reference is always float64. A sum of n terms in another order differs by about √n × u, where
# u is the rounding unit of the type. Over all layers and steps, this error becomes a few tens of
# times larger. The check must find wrong factors and a missing sample in a step. With the default
# sizes, these bugs cause errors above 1e-2.
TOLERANCES: dict[Precision, Tolerance] = {
    # u = 1.1e-16: rounding gives 1e-15 to 1e-12.
    "float64": Tolerance(1e-10, gradient=1e-10, update=1e-10, buffer=1e-10, eps=1e-2, floor=1e-3),
    # u = 6e-8: rounding gives 1e-8 (loss), 1e-6 (gradients), 1e-4 (updates: for a parameter of 1
    # that has moved by 1e-3, the relative rounding error of the distance is 6e-5).
    "float32": Tolerance(1e-5, gradient=1e-4, update=1e-3, buffer=1e-4, eps=1e-2, floor=1e-2),
    # u = 4e-3 (8 bits of mantissa) in every activation: a small gradient may have the wrong sign,
    # so eps is as large as the gradients. The check finds wrong factors, but not a missing sample.
    "bf16": Tolerance(1e-2, gradient=1e-1, update=2e-1, buffer=1e-1, eps=1.0, floor=1e-1),
}
