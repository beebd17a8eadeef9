"""One call of attention as a value: arrays, options, and the names of the wanted gradients.

Arrays are canonical: batch axes, then sequence and feature.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from cuflash._arrays import is_cupy
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem import checks
from cuflash.testing import _families as families

OwnCall = TypeVar("OwnCall", bound="Call")


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """One forward and backward call.

    Attributes
    ----------
    q : array, batch + (m, d)
        Queries.
    k : array, batch + (n, d)
        Keys.
    v : array, batch + (n, d_v)
        Values.
    dout : array, batch + (m, d_v)
        Cotangent of the result, with the whole batch shape.
    dlse : array, batch + (m,), or None
        Cotangent of lse.
    options : dict
        Score options: the keywords of :class:`cuflash.Options`.
    wrt : tuple of str
        The inputs whose gradients are computed.
    tf32 : bool
        Whether TF32 products are permitted.
    float8 : bool
        Whether weights may be rounded to float8_e4m3fn, as for 8-bit operands; q, k and v are then
        the dequantised operands.
    origin : str
        The family and the seed of the arrays, for messages.

    Examples
    --------
    >>> import numpy as np, cuflash, cuflash.testing
    >>> call = cuflash.testing.make_call("normal", 0, "float32", (2, 5, 8), (2, 7, 8), (2, 7, 4))
    >>> out = cuflash.attention(*call.qkv, **call.options)
    >>> cuflash.testing.assert_attention_close(out, *call.qkv, **call.options)
    >>> call.dtype, call.lse_dtype, call.batch, call.group_size
    (dtype('float32'), dtype('float32'), (2,), 1)
    >>> masked = call.with_options(causal=True, sink=np.zeros(2)).but(wrt=("q", "sink"))
    >>> list(masked.option_arrays), masked.array("sink").shape, masked.to(np).wrt
    (['sink'], (2,), ('q', 'sink'))
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    dlse: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    wrt: tuple[str, ...] = ("q", "k", "v")
    tf32: bool = False
    float8: bool = False
    origin: str = ""

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        """Queries, keys and values."""
        return self.q, self.k, self.v

    @property
    def dtype(self) -> Any:
        """The dtype of the result: the widest of q, k and v, to which they promote."""
        return max((a.dtype for a in self.qkv), key=lambda own: own.itemsize)

    @property
    def lse_dtype(self) -> np.dtype[Any]:
        """float64 for float64, otherwise float32."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @property
    def group_size(self) -> int:
        """Number of query heads of each key/value head."""
        if not self.options.get("enable_gqa"):
            return 1
        return int(self.q.shape[-3] // self.k.shape[-3])

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """The batch shape of the result."""
        own = [self.q.shape[:-2]]
        for array in (self.k, self.v):
            shape = array.shape[:-2]
            own.append((*shape[:-1], shape[-1] * self.group_size) if shape else shape)
        return np.broadcast_shapes(*own)

    @cached_property
    def option_arrays(self) -> dict[str, Any]:
        """Options that are arrays; segment_ids are split into segment_ids_q and segment_ids_k."""
        named = dict(self.options)
        pair = named.pop("segment_ids", ())
        named |= dict(zip(("segment_ids_q", "segment_ids_k"), pair, strict=False))
        return {name: value for name, value in named.items() if hasattr(value, "strides")}

    def array(self, name: str) -> Any:
        """The input called ``name``; for scale, an array with the shape of its gradient."""
        if name == "scale":
            return np.zeros(())
        return self.options[name] if name in self.options else getattr(self, name)

    def but(self: OwnCall, **changes: Any) -> OwnCall:
        """The same call with some fields replaced."""
        return replace(self, **changes)

    def with_options(self: OwnCall, **changes: Any) -> OwnCall:
        """The same call with some score options replaced; None removes one."""
        merged = {**self.options, **changes}
        return replace(self, options={n: v for n, v in merged.items() if v is not None})

    def to(self: OwnCall, xp: ModuleType) -> OwnCall:
        """The same call with arrays of ``xp``, NumPy or CuPy."""
        if xp is not np and xp is not sys.modules.get("cupy", np):
            raise wrong_type("xp", shown(xp), "the module numpy or cupy")

        def moved(value: Any) -> Any:
            if isinstance(value, tuple) and any(hasattr(part, "strides") for part in value):
                return tuple(map(moved, value))
            if not hasattr(value, "strides"):
                return value
            return value.get() if xp is np and is_cupy(value) else xp.asarray(value)

        arrays = {name: moved(getattr(self, name)) for name in ("q", "k", "v", "dout", "dlse")}
        return self.but(**arrays, options={n: moved(v) for n, v in self.options.items()})

    def __repr__(self) -> str:
        def text(value: Any) -> str:
            if hasattr(value, "strides"):
                return f"{value.dtype}{list(value.shape)}"
            if isinstance(value, tuple):
                return f"({', '.join(map(text, value))})"
            return repr(value)

        parts = [f"{name}={text(self.array(name))}" for name in ("q", "k", "v", "dout")]
        parts += [f"{name}={text(value)}" for name, value in self.options.items()]
        others = [f for f in fields(self) if f.name not in ("q", "k", "v", "dout", "options")]
        values = {f.name: (getattr(self, f.name), f.default) for f in others}
        parts += [
            f"{n}={text(value)}" for n, (value, usual) in values.items() if value is not usual
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """How Hypothesis prints a drawn call."""
        printer.text(repr(self))


def make_call(
    family: str,
    seed: int,
    dtype: Any,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    **fields: Any,
) -> Call:
    """Make a call with inputs of one family; the same seed gives the same call.

    Parameters
    ----------
    family : str
        A name from :data:`FAMILIES`.
    seed : int
        Seed of NumPy's generator.
    dtype : dtype, or tuple of three
        Dtypes of q, k and v; dout has the dtype to which they promote.
    q, k, v : tuple of int
        Shapes, batch + (sequence, feature).
    **fields
        Other attributes of :class:`Call`, except dout and origin.

    Returns
    -------
    Call
        A call with NumPy arrays; dout has the whole batch shape.

    Raises
    ------
    TypeError, ValueError
        For an unknown family, and for an invalid seed, dtype or shape.

    Examples
    --------
    >>> import cuflash.testing
    >>> cuflash.testing.make_call("normal", 3, "float16", (4, 8), (6, 8), (6, 2)).dout.shape
    (4, 2)
    """
    if not isinstance(family, str) or family not in families.FAMILIES:
        wrong = wrong_value if isinstance(family, str) else wrong_type
        raise wrong("family", shown(family), f"one of {', '.join(families.FAMILIES)}")
    seed = checks.seed("seed", seed)
    rng = np.random.default_rng(seed)
    shapes = [checks.shape_of(name, shape) for name, shape in zip("qkv", (q, k, v), strict=True)]
    q, k, v = shapes
    if not q[-1]:
        raise wrong_value("q", shown(q), "a head_dim of at least 1")
    if not isinstance(fields.get("options", {}), Mapping):
        got = type(fields["options"]).__name__
        raise wrong_type("options", got, "a mapping, the keywords of cuflash.Options")
    arrays = families.make(family, rng, _three(dtype), q, k, v)
    call = Call(*arrays, dout=arrays[0], origin=f"{family}, seed {seed}", **fields)
    try:
        shape = (*call.batch, q[-2], v[-1])
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise wrong_value("q, k, v", shown(shapes), "batch axes that broadcast") from error
    return call.but(dout=families.make_dout(family, rng, call.dtype, shape))


def _three(dtype: Any) -> tuple[np.dtype[Any], ...]:
    """The dtypes of q, k and v."""
    expected = "a floating dtype, or a tuple of three"
    given = dtype if isinstance(dtype, tuple) else (dtype,) * 3
    if len(given) != 3:
        raise wrong_value("dtype", shown(dtype), expected)
    found = tuple(checks.dtype_of("dtype", own, expected) for own in given)
    for own in found:
        if own not in checks.FLOATS:
            raise wrong_type("dtype", str(own), expected)
    return found
