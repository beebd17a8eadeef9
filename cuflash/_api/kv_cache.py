"""How are the keys and values of growing sequences kept?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from cuflash._api.dispatch import cache_steps
from cuflash._api.rotary import NO_ROTARY_PAIRS, RotaryPairs
from cuflash._arrays import (
    Array,
    array_module,
    contiguous,
    is_cupy,
    native,
    on_device_of,
    refuse_capture,
    same_module,
    to_int64,
)
from cuflash._errors import problem_with, shown, wrong_type, wrong_value
from cuflash._problem.checks import (
    FLOATS,
    dtype_of,
    flag,
    integer_array,
    integer_value,
    is_integer,
)
from cuflash._problem.float8 import FLOAT8, checked_scale
from cuflash._problem.foreign_keywords import explain_unknown_keywords
from cuflash._problem.options import Options
from cuflash._problem.problem import HALVES

_MOST_NUMBERS = 2**31 - 1  # page numbers are int32
#: Dtypes of elements that a cache of 8 bits rounds.
_ROUNDED = (*HALVES, np.dtype(np.float32))


class KVCache:
    """A cache for keys and values of growing sequences, which take pages as they need them.

    Its state is in four arrays, which keep their addresses. A sequence uses the pages that its row
    of ``page_table`` names, up to its length. A page that no sequence uses is free.

    Parameters
    ----------
    sequences : int
        Number of sequences. Each is empty at first.
    heads : int
        Number of heads of keys and values.
    head_dim : int
        Number of features of a key.
    max_length : int
        The most keys that one sequence can have.
    page_size : int
        Number of keys of a page, from 1 to 256.
    head_dim_v : int, optional
        Number of features of a value. Default: ``head_dim``.
    pages : int, optional
        Number of pages of all sequences together. Default: enough for every sequence to grow to
        ``max_length``.
    dtype : dtype
        float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2. For 8-bit floats pass
        ``k_scale`` and ``v_scale`` to ``append`` and :func:`attention_paged`.
    like : array, optional
        The cache uses the library and the device of this array. Default: NumPy.

    Attributes
    ----------
    k_pages : array, (pages, heads, page_size, head_dim)
    v_pages : array, (pages, heads, page_size, head_dim_v)
    page_table : int32 array, (sequences, pages of a sequence)
        Page numbers of each sequence. Numbers beyond its length have no meaning.
    lengths : int32 array, (sequences,)
        Number of keys of each sequence.
    dropped : int32 array, (sequences,)
        On a GPU, the number of keys that found no room since the cache was made.

    Notes
    -----
    On a GPU the host reads none of these arrays, and nothing is allocated. A CUDA graph can capture
    ``append`` and ``take``: each replay advances lengths, takes pages and frees pages. If a
    sequence finds no free page or reaches ``max_length``, the keys that fit are kept and
    ``dropped`` counts the others. With NumPy arrays this is a ValueError. A call on NumPy arrays
    that raises or is interrupted leaves the cache as it was. Calls on one cache must not overlap:
    hold a lock between threads, and on a GPU use one stream or order streams by events.

    Sequences take free pages in the order of sequences, the lowest page number first: the same
    calls give the same arrays.

    There is no gradient with respect to a cache: :func:`attention_vjp` needs keys and values in
    order, without pages.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> cache = cuflash.KVCache(2, 4, 64, max_length=100, dtype=np.float32)
    >>> q, k, v = rng.standard_normal((3, 2, 4, 7, 64), dtype=np.float32)
    >>> cache.append(k, v)  # seven keys of both sequences
    >>> cuflash.attention_paged(q, *cache.arrays, causal=True).shape
    (2, 4, 7, 64)
    >>> cache.take([0, 0])  # sequence 1 becomes a copy of sequence 0, in the same pages
    >>> cache.append(k[:, :, :1], v[:, :, :1], counts=[1, 0])
    >>> cache.lengths
    array([8, 7], dtype=int32)
    """

    k_pages: Array
    v_pages: Array
    page_table: Array
    lengths: Array
    dropped: Array

    @explain_unknown_keywords
    def __init__(
        self,
        sequences: int,
        heads: int,
        head_dim: int,
        /,
        *,
        max_length: int,
        page_size: int = 16,
        head_dim_v: int | None = None,
        pages: int | None = None,
        dtype: Any = np.float16,
        like: Array | None = None,
    ) -> None:
        sequences, heads = _extent("sequences", sequences), _extent("heads", heads)
        head_dim, max_length = _extent("head_dim", head_dim), _extent("max_length", max_length)
        head_dim_v = head_dim if head_dim_v is None else _extent("head_dim_v", head_dim_v)
        page_size = _extent("page_size", page_size, 256)
        of_each = -(-max_length // page_size)
        if pages is None:
            pages = _extent("pages", sequences * of_each, fix="pass pages=, or a larger page_size")
        else:
            pages = _extent("pages", pages)
        expected = f"one of {', '.join(map(str, (*FLOATS, *FLOAT8)))}"
        dtype = dtype_of("dtype", dtype, expected)
        if dtype not in (*FLOATS, *FLOAT8):
            raise wrong_type("dtype", str(dtype), expected)
        elements = pages * heads * page_size * max(head_dim, head_dim_v)
        if max(elements * dtype.itemsize, sequences * of_each * 4) >= 2**63:
            got = f"{pages} pages of {heads} x {page_size} x {max(head_dim, head_dim_v)} elements"
            raise wrong_value("pages", got, "arrays of fewer than 2^63 bytes")
        self._max_length = max_length
        with on_device_of(like):
            like = None if like is None else native("like", like)
            xp: Any = np if like is None else array_module(like)
            if xp is not np and pages > (most := cache_steps(like).most_pages()):
                raise wrong_value("pages", pages, f"at most {most} on this GPU",
                                  "pass a larger page_size")  # fmt: skip
            self.k_pages = xp.zeros((pages, heads, page_size, head_dim), dtype)
            self.v_pages = xp.zeros((pages, heads, page_size, head_dim_v), dtype)
            self.page_table = xp.zeros((sequences, of_each), np.int32)
            self.lengths = xp.zeros(sequences, np.int32)
            self.dropped = xp.zeros(sequences, np.int32)
            # Passed from step to step: old lengths, pages to copy, pages to take.
            self._starts, self._sources = xp.zeros((2, sequences), np.int32)
            self._taken = xp.zeros(pages, np.int32)
            self._old_table = xp.zeros_like(self.page_table)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, name, value) is not value:
            expected = "the existing array: arrays of a cache keep their addresses"
            fix = f"write into it: cache.{name}[...] = values"
            raise problem_with(name, AttributeError, got=type(value).__name__, expected=expected,
                               fix=fix)  # fmt: skip
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        pages, heads, size, d = self.k_pages.shape
        return (
            f"<cuflash.KVCache of {len(self.lengths)} sequences, {pages} pages of {size} keys, "
            f"{heads} heads, head_dim {d}, {self.k_pages.dtype}>"
        )

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """The arguments of :func:`attention_paged` that follow the queries."""
        return self.k_pages, self.v_pages, self.page_table, self.lengths

    @explain_unknown_keywords
    def append(
        self,
        k: Array,
        v: Array,
        counts: Any = None,
        *,
        k_scale: Any = None,
        v_scale: Any = None,
        rotary: bool = False,
        frequencies: Array | None = None,
        interleaved: bool = False,
    ) -> None:
        """Add keys and values to the end of sequences, in place.

        Parameters
        ----------
        k : array, (sequences, heads, t, head_dim)
            Keys, in the dtype of the cache. A cache of 8-bit floats takes float16, bfloat16 and
            float32, too.
        v : array, (sequences, heads, t, head_dim_v)
            Values, in the dtype of k.
        counts : integer array (sequences,), optional
            Sequence ``s`` takes the first ``counts[s]`` of its ``t`` keys. Default: all. On a GPU
            the host does not read the counts: they are clamped to the range from 0 to t.
        k_scale, v_scale : float or array broadcastable to (heads, 1, 1), optional
            Only for a cache of 8-bit floats and wider k and v: elements are divided by these scales
            and rounded as by :func:`quantize`. :func:`attention_paged` takes the same. Default: 1.
        rotary : bool
            Turn each key by its position in its sequence, as :func:`rotary` does.
        frequencies, interleaved
            As in :func:`rotary`; only with ``rotary``.

        Raises
        ------
        TypeError, ValueError
            If an array has a wrong shape or dtype, or if keys do not fit into a NumPy cache.
        RuntimeError
            If a call that a CUDA graph captures would allocate memory. Such a call needs contiguous
            arrays, int64 ``counts`` and float64 ``frequencies``.

        Notes
        -----
        If several sequences share a page, it is copied before a key is added to it.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(2, 4, 64, max_length=100, dtype=np.float32)
        >>> k, v = np.ones((2, 2, 4, 7, 64), np.float32)
        >>> cache.append(k, v, counts=[7, 3])  # all keys of sequence 0, three of sequence 1
        >>> cache.append(k[:, :, :1], v[:, :, :1], rotary=True)  # one more, turned by its position
        >>> cache.lengths
        array([8, 4], dtype=int32)

        A cache of 8 bits rounds what is appended:

        >>> from ml_dtypes import float8_e4m3fn
        >>> cache = cuflash.KVCache(2, 4, 64, max_length=100, dtype=float8_e4m3fn)
        >>> cache.append(k, v, k_scale=0.125, rotary=True)
        >>> cuflash.attention_paged(k, *cache.arrays, causal=True, k_scale=0.125).shape
        (2, 4, 7, 64)
        """
        k, v, counts = self._checked(k, v, counts)
        checked = Options(k_scale=k_scale, v_scale=v_scale)
        scales = tuple(self._scale(n, k, getattr(checked, n)) for n in ("k_scale", "v_scale"))
        pairs = NO_ROTARY_PAIRS
        if flag("rotary", rotary):
            if k.dtype in FLOAT8:
                fix = "append wider keys with k_scale=, which are turned before they are rounded"
                raise wrong_value("rotary", "True", f"False for keys of {k.dtype}", fix)
            pairs = RotaryPairs.of("k", k, frequencies, interleaved)
        elif frequencies is not None or flag("interleaved", interleaved):
            raise wrong_value("rotary", "False", "True with frequencies= or interleaved=")
        if 0 in k.shape[:3]:
            return
        with self._steps() as steps:
            steps.grow(
                self.page_table, self.lengths, self.dropped, counts, self._starts, self._sources,
                self._taken, page_size=self.k_pages.shape[2], max_length=self._max_length,
                num_tokens=k.shape[2],
            )  # fmt: skip
            steps.write(
                k, v, self.k_pages, self.v_pages, pairs.frequencies, self.page_table, self._starts,
                self.lengths, self._sources, rotation=pairs.rotation, num_pairs=pairs.num_pairs,
                scales=scales,
            )  # fmt: skip

    @explain_unknown_keywords
    def take(self, parents: Any, lengths: Any = None) -> None:
        """Let each sequence become a copy of another one, in the same pages, or become empty.

        Parameters
        ----------
        parents : integer array, (sequences,)
            Sequence ``i`` becomes what sequence ``parents[i]`` was before the call; -1 makes it
            empty. Pages that no sequence names any more become free. On a GPU the host does not
            read the numbers: they are clamped.
        lengths : integer array, (sequences,), optional
            Sequence ``i`` keeps its first ``lengths[i]`` keys. Default, or if it has fewer: all.

        Raises
        ------
        TypeError, ValueError
            If an array has a wrong shape or dtype, or if a NumPy array names an unknown sequence.
        RuntimeError
            If a call that a CUDA graph captures would allocate memory. Such a call needs contiguous
            int64 arrays.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(3, 4, 64, max_length=100, dtype=np.float32)
        >>> k, v = np.ones((2, 3, 4, 7, 64), np.float32)
        >>> cache.append(k, v, counts=[7, 5, 2])
        >>> cache.take([0, 0, -1])  # a beam search goes on from sequence 0 twice; 2 becomes empty
        >>> cache.lengths
        array([7, 7, 0], dtype=int32)
        >>> cache.take([0, 1, 2], lengths=[7, 4, 0])  # sequence 1 forgets its last three keys
        >>> cache.lengths
        array([7, 4, 0], dtype=int32)
        """
        parents = self._per_sequence("parents", parents)
        if lengths is not None:
            lengths = self._per_sequence("lengths", lengths)
        with self._steps() as steps:
            steps.take(
                self.page_table, self.lengths, self._old_table, self._starts, parents, lengths
            )

    @contextlib.contextmanager
    def _steps(self) -> Iterator[Any]:
        """Yield the functions that change the arrays; an error in the block undoes it for NumPy.

        Pages are not restored: what the block wrote into them is beyond the restored lengths.
        """
        with on_device_of(self.lengths):
            steps = cache_steps(self.lengths)
            if is_cupy(self.lengths):
                yield steps
                return
            self._check_arrays()
            before = self.page_table.copy(), self.lengths.copy()
            try:
                yield steps
            except BaseException:  # also KeyboardInterrupt
                self.page_table[...], self.lengths[...] = before
                raise

    def _check_arrays(self) -> None:
        """Raise if a caller has made NumPy arrays read-only or has written wrong lengths."""
        names = ("k_pages", "v_pages", "page_table", "lengths")
        for name, array in zip(names, self.arrays, strict=True):
            if not array.flags.writeable:
                raise wrong_value(name, "a read-only array", "an array that can be written")
        low, high = self.lengths.min(), self.lengths.max()
        most = self.page_table.shape[1] * self.k_pages.shape[2]
        if not 0 <= low <= high <= most:
            got = f"numbers from {low} to {high} in the cache"
            raise wrong_value("lengths", got, f"numbers from 0 to {most}")

    def _per_sequence(self, name: str, value: Any) -> Array:
        """One int64 number for each sequence, as an array on the device of the cache."""
        xp, sequences = array_module(self.lengths), len(self.lengths)
        expected = "an integer array, or a list of integers"
        value = integer_array(name, value, expected)
        if value.shape != (sequences,):
            raise wrong_value(name, f"shape {value.shape}", f"shape ({sequences},)")
        if is_cupy(value):
            same_module(cache=self.lengths, **{name: value})
        if is_cupy(value) and value.dtype == np.int64:
            return contiguous(name, value, np.int64)
        if xp is not np:
            refuse_capture(name, "a contiguous int64 array on the device")
        return xp.asarray(to_int64(value))

    def _checked(self, k: Any, v: Any, counts: Any) -> tuple[Array, Array, Any]:
        """The keys and values to append, and their counts; raise if they do not fit the cache."""
        given = {"k": native("k", k), "v": native("v", v)}
        xp = same_module(lengths=self.lengths, **given)
        for (name, array), pages in zip(given.items(), self.arrays, strict=False):
            dtypes = (pages.dtype, *(_ROUNDED if pages.dtype in FLOAT8 else ()))
            if array.dtype not in dtypes:
                expected = f"dtype {' or '.join(map(str, dtypes))} as the cache takes"
                raise wrong_type(name, f"dtype {array.dtype}", expected)
            if array.dtype != given["k"].dtype:
                expected = f"dtype {given['k'].dtype} as in k"
                raise wrong_type(name, f"dtype {array.dtype}", expected)
            if array.ndim != 4 or array.shape != (len(self.lengths), *pages.shape[1:2],
                                                  given["k"].shape[2], pages.shape[3]):  # fmt: skip
                expected = f"({len(self.lengths)}, {pages.shape[1]}, t, {pages.shape[3]})"
                raise wrong_value(name, f"shape {array.shape}", f"shape {expected}, t as in k")
            if any(_in_one_block(array, own) for own in self.arrays[:2]):
                got, fix = "memory of the cache", f"write {name}.copy()"
                raise wrong_value(name, got, "memory of its own", fix)
        steps = given["k"].shape[2]
        if counts is None:
            return given["k"], given["v"], None
        counts = self._per_sequence("counts", counts)
        if xp is np and counts.size and not 0 <= counts.min() <= counts.max() <= steps:
            got = f"numbers from {counts.min()} to {counts.max()}"
            raise wrong_value("counts", got, f"numbers from 0 to {steps}, the number of keys in k")
        return given["k"], given["v"], counts

    def _scale(self, name: str, k: Array, scale: Any) -> Any:
        """What elements are divided by: a number, or a contiguous float32 array (heads,)."""
        if scale is None:
            return 1.0
        if k.dtype in FLOAT8 or self.k_pages.dtype not in FLOAT8:
            got = f"a scale for {k.dtype} elements and a cache of {self.k_pages.dtype}"
            raise wrong_type(name, got, "None: only a cache of 8 bits divides wider elements")
        if isinstance(scale, float):
            return scale
        heads = self.k_pages.shape[1]
        same_module(lengths=self.lengths, **{name: scale})
        checked_scale(name, scale, (heads,), 1)
        of_heads = array_module(scale).broadcast_to(scale, (heads, 1, 1))[:, 0, 0]
        if is_cupy(scale):
            return contiguous(name, of_heads, np.float32)
        return of_heads.astype(np.float32)


def _in_one_block(array: Array, pages: Array) -> bool:
    """Whether ``array`` may be a view of ``pages``, which have a block of memory of their own."""
    if not array.size:
        return False
    if is_cupy(array):
        return bool(array.data.mem.ptr == pages.data.mem.ptr)
    return np.may_share_memory(array, pages)


def _extent(name: str, value: Any, most: int = _MOST_NUMBERS, fix: str = "") -> int:
    """An int from 1 to ``most``."""
    expected = f"an int from 1 to {most}"
    if not is_integer(value):
        raise wrong_type(name, shown(value), expected)
    number = integer_value(name, value, expected)
    if not 1 <= number <= most:
        raise wrong_value(name, shown(value), expected, fix)
    return number
