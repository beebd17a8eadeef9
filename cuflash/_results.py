"""What do the functions return?"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, overload

from cuflash._arrays import Array, deeply_copied

if TYPE_CHECKING:  # defaults of type variables came with Python 3.13
    from typing_extensions import TypeVar as WithDefault

    ArrayT = WithDefault("ArrayT", default=Any)
    OptionT = WithDefault("OptionT", default=Any)
    PullbackT = WithDefault("PullbackT", default=Any)
else:
    ArrayT, OptionT, PullbackT = map(TypeVar, ("ArrayT", "OptionT", "PullbackT"))

_ABSENT: Any = None


class AttentionResult(NamedTuple, Generic[ArrayT]):
    """Attention output and the logarithm of each row's sum of exponentials.

    Attributes
    ----------
    out : array, batch + (m, d_v)
        Weighted sums of the values, in the caller's order of axes.
    lse : array, batch + (m,)
        Natural logarithm of each row's sum of exp(score), over the final scores; float32, or
        float64 for float64 inputs. If a query sees no key, lse is its sink, or -inf without a sink.
        In rows beyond ``q_lengths`` lse is -inf.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.ones((2, 4)), np.ones((3, 4)), np.ones((3, 1))
    >>> out, lse = cuflash.attention(q, k, v, return_lse=True)
    >>> lse - np.log(3)  # the scores are all 2
    array([2., 2.])
    """

    out: ArrayT
    lse: Array


@dataclass(frozen=True, slots=True)
class Gradients(Generic[ArrayT, OptionT]):
    """Gradients with respect to the inputs; ``None`` for inputs that ``wrt`` does not name.

    Each has exactly the shape and dtype of its input. Iteration yields the gradients in the order
    of ``wrt``: ``dq, dk, dv = pullback(dout)``.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> out, pullback = cuflash.attention_vjp(np.ones((2, 4)), np.ones((3, 4)), np.ones((3, 1)))
    >>> gradients = pullback(np.ones_like(out), wrt=("v",))
    >>> gradients.dv.shape, gradients.dq is None
    ((3, 1), True)
    """

    dq: ArrayT = _ABSENT
    dk: ArrayT = _ABSENT
    dv: ArrayT = _ABSENT
    dbias: OptionT = _ABSENT
    dslopes: OptionT = _ABSENT
    dsink: OptionT = _ABSENT
    dscale: OptionT = _ABSENT
    #: Names of fields in the order of ``wrt``. If empty, iteration yields all that are not None.
    order: tuple[str, ...] = field(default=(), kw_only=True, repr=False, compare=False)

    def __iter__(self) -> Iterator[ArrayT]:
        order = getattr(self, "order", ())  # version 0.1 did not pickle it
        if not order:
            order = [name for name in _GRADIENTS if getattr(self, name) is not None]
        return iter([getattr(self, name) for name in order])

    def __reduce__(self) -> Any:
        """Pickle fields by name, so that some can be added; version 0.1 pickled a list of seven."""
        values = {name: getattr(self, name) for name in _GRADIENTS}
        return functools.partial(type(self), **values, order=getattr(self, "order", ())), ()

    __deepcopy__ = deeply_copied


_GRADIENTS = ("dq", "dk", "dv", "dbias", "dslopes", "dsink", "dscale")


class Pullback(Protocol[PullbackT]):
    """Type of the function that :func:`attention_vjp` returns with its result."""

    @overload
    def __call__(self, dout: Any, /, *, dlse: Any = ...) -> Gradients[PullbackT, None]: ...
    @overload
    def __call__(self, dout: Any, /, *, dlse: Any = ..., wrt: tuple[str, ...]) -> Gradients: ...
    def __call__(self, dout: Any, /, *, dlse: Any = None, wrt: Any = ()) -> Any:
        """Gradients of the call with respect to the inputs in ``wrt``, by default q, k and v."""


class Saved(NamedTuple):
    """Arrays that a gradient reads besides the operands: cotangents and results of the forward."""

    dout: Array
    out: Array
    lse: Array
    dlse: Array | None = None
