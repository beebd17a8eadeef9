"""What do the functions return?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cuflash._arrays import Array


class AttentionResult(NamedTuple):
    """Attention output and the logarithm of each row's sum of exponentials.

    Attributes
    ----------
    out : array, batch + (m, d_v)
        Weighted values, in the caller's axes order.
    lse : array, batch + (m,)
        Natural logarithm of the sum of exp of the final scores; float32 (float64 for float64).
        For a query that sees no key -inf, or the sink; -inf in rows beyond ``q_lengths``.
    """

    out: Array
    lse: Array


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients by input; ``None`` where not asked for.

    Each has exactly the shape and dtype of its input.
    """

    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dbias: Array | None = None
    dslopes: Array | None = None
    dsink: Array | None = None
    dscale: Array | None = None


class Saved(NamedTuple):
    """What a gradient reads beside operands: cotangents, and results of the forward."""

    dout: Array
    out: Array
    lse: Array
    dlse: Array | None = None
