"""Which calls should be tried? Hypothesis strategies for arrays, options and whole calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem.checks import flag, integer_value, is_integer
from cuflash._problem.option_table import OPTIONS
from cuflash._problem.options import Options
from cuflash.testing._call import Call, make_call
from cuflash.testing._families import FAMILIES, OF_EVERY_DTYPE

DTYPES = {t.__name__: np.dtype(t) for t in (np.float16, bfloat16, np.float32, np.float64)}
HALVES = ("float16", "bfloat16")
#: Options that may be drawn. seed is drawn with dropout, enable_gqa with the shapes.
ALL_OPTIONS = (
    "causal", "offset", "window", "q_lengths", "kv_lengths", "scale", "softcap", "bias", "mask",
    "alibi_slopes", "segment_ids", "sink", "dropout",
)  # fmt: skip
_LARGEST = 2**20  # the largest size that may be drawn
BATCHES = ((), (2,), (1,), (3,), (2, 3), (3, 2), (2, 1, 2), (1, 4), (0,), (2, 0))
_OPERANDS = ("q", "k", "v")
_WITH_GRADIENT = tuple(option.name for option in OPTIONS if option.grad)
_Shape = tuple[int, ...]


@st.composite
def arrays(
    draw: st.DrawFn,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    families: Sequence[str] = OF_EVERY_DTYPE,
    xp: ModuleType = np,
) -> tuple[Any, Any, Any]:
    """Draw queries, keys and values of given shapes.

    Parameters
    ----------
    q, k, v : tuple of int
        Shapes, batch + (sequence, feature).
    dtypes : sequence of str
        One of them is drawn for all three arrays.
    families : sequence of str
        Names of :data:`FAMILIES`, of which one is drawn.
    xp : module
        The library of the arrays, ``numpy`` or ``cupy``.

    Returns
    -------
    strategy of (q, k, v)
        Hypothesis shrinks the choice of dtype, family and seed, not single elements.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> import cuflash, cuflash.testing
    >>> @settings(max_examples=5, database=None)
    ... @given(cuflash.testing.arrays((2, 5, 8), (2, 7, 8), (2, 7, 4)))
    ... def test_shape(qkv):
    ...     assert cuflash.attention(*qkv).shape == (2, 5, 4)
    >>> test_shape()
    """
    dtype = draw(_one_of("dtypes", dtypes, DTYPES))
    family = draw(_one_of("families", families, FAMILIES))
    return make_call(family, draw(_seeds()), DTYPES[dtype], q, k, v).to(xp).qkv


@st.composite
def options(
    draw: st.DrawFn,
    q: Sequence[int],
    k: Sequence[int],
    *,
    names: Collection[str] = ALL_OPTIONS,
    dtype: str = "float32",
    xp: ModuleType = np,
) -> Options:
    """Draw score options for queries and keys of given shapes.

    Parameters
    ----------
    q, k : tuple of int
        Shapes, batch + (sequence, feature), with the same batch shape.
    names : collection of str
        The options that may be set; each of them is set or not.
    dtype : str
        The dtype of bias, slopes and sink, unless float32 is drawn for them.
    xp : module
        The library of the arrays, ``numpy`` or ``cupy``.

    Returns
    -------
    strategy of Options
        Arrays have all axes of the batch, or fewer that broadcast.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> import numpy as np, cuflash, cuflash.testing
    >>> q = np.ones((2, 5, 8))
    >>> @settings(max_examples=5, database=None)
    ... @given(cuflash.testing.options(q.shape, q.shape, names=("causal", "window", "mask")))
    ... def test_weights_sum_to_one(options):
    ...     out = cuflash.attention(q, q, q, options=options)
    ...     assert (np.isclose(out, 1) | (out == 0)).all()
    >>> test_weights_sum_to_one()
    """
    _known("dtype", (dtype,), DTYPES)
    _known("names", names, ALL_OPTIONS)
    call = make_call("normal", 0, DTYPES[dtype], q, k, k)
    chosen = [name for name in ALL_OPTIONS if name in names and draw(st.booleans())]
    return Options(**call.but(options=draw(_keywords(call, chosen))).to(xp).options)


@st.composite
def calls(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    seqlens: Sequence[int] = (1, 2, 5, 15, 16, 17, 31, 32, 33, 40, 0),
    head_dims: Sequence[int] = (1, 3, 8, 17),
    values_dims: Sequence[int] = (1, 4, 8, 19, 0),
    batches: Sequence[_Shape] = BATCHES,
    group_sizes: Sequence[int] = (1, 1, 2, 3),
    broadcast: bool = True,
    options: Sequence[str] = ALL_OPTIONS,
    option_sets: Sequence[Collection[str]] | None = None,
    families: Sequence[str] = OF_EVERY_DTYPE,
    gradients: Collection[str] = (),
    mixed_dtypes: bool = True,
    xp: ModuleType = np,
) -> Call:
    """Draw a whole call: arrays, options, and what its gradient needs.

    Parameters
    ----------
    dtypes : sequence of str
        From "float16", "bfloat16", "float32" and "float64".
    seqlens, head_dims, values_dims : sequence of int
        Numbers of queries and of keys, and head sizes of q and k, and of v.
    batches : sequence of tuple of int
        Batch shapes of keys and values, heads last.
    group_sizes : sequence of int
        Query heads of each key/value head; more than one sets ``enable_gqa``.
    broadcast : bool
        Whether arrays may lack batch axes, or have one element there.
    options : sequence of str
        Score options that may be set.
    option_sets : sequence of collections of str, optional
        The options of one of these sets are set. By default each option is set or not. Every set
        may need another kernel to be compiled: give few sets on a GPU.
    families : sequence of str
        Names of :data:`FAMILIES`, of which one is drawn.
    gradients : collection of {"bias", "alibi_slopes", "sink", "scale"}
        Gradients that ``wrt`` may name beside q, k and v.
    mixed_dtypes : bool
        Whether q, k and v may have different dtypes, in one of six draws.
    xp : module
        The library of the arrays, ``numpy`` or ``cupy``.

    Returns
    -------
    strategy of Call

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> import cuflash
    >>> from cuflash.testing import assert_attention_close, calls
    >>> @settings(max_examples=5, database=None)
    ... @given(calls(options=("causal", "mask")))
    ... def test_mine(call):
    ...     result = cuflash.attention(*call.qkv, **call.options, return_lse=True)
    ...     assert_attention_close(result, *call.qkv, **call.options)
    >>> test_mine()
    """
    options = _known("options", options, ALL_OPTIONS)
    if option_sets is not None:
        sets = _several("option_sets", option_sets)
        option_sets = [_known("option_sets", names, ALL_OPTIONS) for names in sets]
    gradients = _known("gradients", gradients, _WITH_GRADIENT)
    mixed = flag("mixed_dtypes", mixed_dtypes)
    own_dtypes = draw(_dtypes(_several("dtypes", _known("dtypes", dtypes, DTYPES)), mixed=mixed))
    lengths = _number("seqlens", seqlens, 0)
    rows, keys = draw(lengths), draw(lengths)
    head_dim = draw(_number("head_dims", head_dims, 1))
    head_dim_v = draw(_number("values_dims", values_dims, 0))
    batch = draw(st.sampled_from([_batch(own) for own in _several("batches", batches)]))
    groups = _number("group_sizes", group_sizes, 1)
    group = draw(groups) if batch and batch[-1] else 1
    own = dict.fromkeys(_OPERANDS, batch)
    if flag("broadcast", broadcast):
        own = {name: draw(thinned(batch, keep_last=group > 1)) for name in _OPERANDS}
    if group > 1:
        own["q"] = (*own["q"][:-1], own["q"][-1] * group)
    call = make_call(
        draw(_one_of("families", families, FAMILIES)),
        draw(_seeds()),
        own_dtypes,
        (*own["q"], rows, head_dim),
        (*own["k"], keys, head_dim),
        (*own["v"], keys, head_dim_v),
        options={"enable_gqa": True} if group > 1 else {},
    )
    if option_sets is None:
        names = [name for name in options if draw(st.booleans())]
    else:
        present = draw(st.sampled_from(option_sets))
        names = [name for name in options if name in present]
    call = call.with_options(**draw(_keywords(call, names)))
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(_seeds()))
        dlse = rng.standard_normal((*call.batch, rows)).astype(call.lse_dtype)
        call = call.but(dlse=dlse)
    there = [n for n in _WITH_GRADIENT if n in gradients and n in (*call.option_arrays, "scale")]
    call = call.but(wrt=(*_OPERANDS, *(n for n in there if draw(st.booleans()))))
    return call.to(xp)


def _known(argument: str, names: Collection[str], known: Collection[str]) -> tuple[str, ...]:
    """Return the names if all are known: a misspelt name would never be drawn, nor tested."""
    expected = f"a tuple of names among {', '.join(map(repr, known))}"
    if not isinstance(names, Collection) or isinstance(names, str | bytes | np.ndarray):
        fix = f"write ({shown(names)},)" if isinstance(names, str) else ""
        raise wrong_type(argument, shown(names), expected, fix)
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise wrong_value(argument, shown(name), expected)
    return tuple(names)


def _several(argument: str, values: Any) -> Sequence[Any]:
    """Check that there is at least one value to draw from."""
    if not isinstance(values, tuple | list | range):
        raise wrong_type(argument, shown(values), "a tuple of values to draw from")
    if not values:
        raise wrong_value(argument, shown(values), "at least one value to draw from")
    return values


def _one_of(argument: str, names: Any, known: Collection[str]) -> st.SearchStrategy[str]:
    return st.sampled_from(_several(argument, _known(argument, names, known)))


def _number(argument: str, values: Any, least: int) -> st.SearchStrategy[int]:
    """One of several sizes."""
    expected = f"ints from {least} to {_LARGEST}"
    for value in _several(argument, values):
        if not is_integer(value):
            raise wrong_type(argument, shown(value), expected)
        if not least <= integer_value(argument, value, expected) <= _LARGEST:
            raise wrong_value(argument, shown(value), expected)
    return st.sampled_from(values)


def _batch(shape: Any) -> _Shape:
    """A checked batch shape; it may be empty."""
    expected = f"shapes of batches, tuples of ints from 0 to {_LARGEST}"
    if not isinstance(shape, tuple | list) or not all(map(is_integer, shape)):
        raise wrong_type("batches", shown(shape), expected)
    own = tuple(integer_value("batches", n, expected) for n in shape)
    if own and not 0 <= min(own) <= max(own) <= _LARGEST:
        raise wrong_value("batches", shown(shape), expected)
    return own


def _seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**16)


@st.composite
def _dtypes(draw: st.DrawFn, names: Sequence[str], *, mixed: bool) -> tuple[np.dtype[Any], ...]:
    """Dtypes of q, k and v: equal in five of six draws. float16 and bfloat16 are never mixed."""
    if not mixed or draw(st.integers(0, 5)) < 5:
        return (DTYPES[draw(st.sampled_from(tuple(names)))],) * 3
    other_half = draw(st.sampled_from(HALVES))
    own = tuple(name for name in names if name != other_half) or tuple(names)
    return tuple(DTYPES[draw(st.sampled_from(own))] for _ in _OPERANDS)


@st.composite
def thinned(draw: st.DrawFn, batch: _Shape, *, keep_last: bool = False) -> _Shape:
    """Draw a shape that broadcasts to ``batch``: without leading axes, or with axes of length 1."""
    dropped = draw(st.integers(0, max(len(batch) - keep_last, 0)))
    own = [n if draw(st.booleans()) else 1 for n in batch[dropped:]]
    if keep_last and batch:
        own[-1] = batch[-1]
    return tuple(own)


@st.composite
def _keywords(draw: st.DrawFn, call: Call, names: Collection[str]) -> dict[str, Any]:
    """Draw the options of these names, for the arrays of a call."""
    rng = np.random.default_rng(draw(_seeds()))
    rows, keys = call.q.shape[-2], call.k.shape[-2]

    def shape() -> _Shape:
        return draw(thinned(call.batch))

    def integers(low: int, high: int) -> Any:
        if draw(st.booleans()):
            return draw(st.integers(low, high))
        kind = draw(st.sampled_from((np.int32, np.int64)))
        return rng.integers(low, high + 1, shape()).astype(kind)

    def core() -> _Shape:
        return (*shape(), *draw(st.sampled_from(((rows, keys), (1, keys), (rows, 1), (1, 1)))))

    def floats(spread: float, extents: _Shape) -> Any:
        dtype = draw(st.sampled_from((np.dtype(np.float32), call.dtype)))
        return np.asarray(spread * rng.standard_normal(extents)).astype(dtype)

    def bias() -> Any:
        array = floats(1.0, core())
        if draw(st.booleans()):
            array[rng.random(array.shape) < 0.3] = -np.inf
        return array

    def segment_ids() -> tuple[Any, ...]:
        kind = draw(st.sampled_from((np.int32, np.int64)))
        shapes = [(*shape(), n) for n in (rows, keys)]
        return tuple(np.sort(rng.integers(-1, 3, own)).astype(kind) for own in shapes)

    def mask() -> Any:
        return np.asarray(rng.random(core()) < draw(st.sampled_from((0.1, 0.5, 0.95))))

    words = ("top_left", "bottom_right") if "offset" not in names else ()
    sides = st.sampled_from((None, 0, 1, 3, 16, 100))
    makers: dict[str, Callable[[], Any]] = {
        "causal": lambda: draw(st.sampled_from((True, *words))),
        "offset": lambda: integers(-rows - 2, keys + 2),
        "window": lambda: (draw(sides), draw(sides)),
        "q_lengths": lambda: integers(0, rows),
        "kv_lengths": lambda: integers(0, keys),
        "scale": lambda: draw(st.sampled_from((0.0, 0.125, 0.3, -0.25))),
        "softcap": lambda: draw(st.sampled_from((0.5, 5.0, 30.0))),
        "bias": bias,
        "mask": mask,
        "alibi_slopes": lambda: floats(0.25, shape()),
        "segment_ids": segment_ids,
        "sink": lambda: floats(2.0, shape()),
        "dropout": lambda: draw(st.sampled_from((0.1, 0.5, 0.0, 0.9, 1.0))),
        "seed": lambda: draw(st.integers(0, 2**64 - 1)),
    }
    seed = ("seed",) if "dropout" in names else ()
    return {name: makers[name]() for name in (*names, *seed)}
