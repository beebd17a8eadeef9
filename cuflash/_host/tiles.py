"""Which tiles is a call on the CPU made of, and which memory holds their products?

Arrays are canonical views, batch axes first. Python loops over leading batch axes. A tile carries
as many entries as keep it small, so that many short sequences take few Python steps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cuflash._arrays import Array, Triple
from cuflash._host.cores import pieces_for, worth
from cuflash._host.scores import Entry, Scores, Tile, arithmetic
from cuflash._problem.operand import canonical_view
from cuflash._problem.options import Options
from cuflash._problem.philox import Origin
from cuflash._problem.problem import Problem

#: Most queries and keys of a tile: its scores and their operands stay in cache. (D128)
BLOCK_M = BLOCK_N = 512
TILE_ELEMENTS = BLOCK_M * BLOCK_N  # most scores of a tile, of all its entries together
_BESIDE_WINDOWS = 256  # most queries of a tile with a window, so that most see most of its keys
_PIECES_A_THREAD = 4  # several, so that threads end at about the same time
_GRADIENT_PIECES = 8  # of a batch with fewer entries, if there is enough work
ALIGNMENT = 64  # the first and last key of a window are rounded to multiples of this

Piece = tuple[Entry, slice]  # entries that a tile carries together, and their rows


class Workspace:
    """Memory of one thread for the results of tiles, allocated once for each name."""

    def __init__(self) -> None:
        self._bytes: dict[str, Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Uninitialised memory, valid until the next call with this name."""
        size = math.prod(shape) * dtype.itemsize
        found = self._bytes.get(name)
        if found is None or found.size < size:
            found = self._bytes[name] = np.empty(size, np.uint8)
        return found[:size].view(dtype).reshape(shape)

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return sum(array.size for array in self._bytes.values())


_KEPT_WORKSPACES, _KEPT_BYTES = 4, 2**22
_kept: list[Workspace] = []


@contextlib.contextmanager
def workspace() -> Iterator[Workspace]:
    """Lend memory that nobody else uses meanwhile.

    A few workspaces are kept for later calls: page faults of new memory would take half of the time
    of a short call. (D129)
    """
    try:
        lent = _kept.pop()
    except IndexError:
        lent = Workspace()
    yield lent
    if len(_kept) < _KEPT_WORKSPACES and lent.size <= _KEPT_BYTES:
        _kept.append(lent)


class Parts:
    """Gives parts of the batch: scores, queries, and keys and values in the dtype of sums."""

    def __init__(self, problem: Problem, qkv: Triple, options: Options, origin: Origin) -> None:
        self._problem, self._options, self._origin = problem, options, origin
        operands = zip(qkv, (problem.q, problem.k, problem.v), strict=True)
        self._qkv = [canonical_view(a, o) for a, o in operands]

    def of(self, entry: Entry) -> tuple[Scores, Array, Array, Array]:
        """Scores, q, k and v of some entries."""
        q, k, v = self._qkv
        dtype = arithmetic(self._problem.dtype)
        wide = (_unrepeated(a[entry]).astype(dtype, copy=False) for a in (k, v))
        scores = Scores(self._problem, self._options, entry, np, self._origin)
        return scores, q[entry], *wide


def pieces(problem: Problem, at_least: int) -> list[Piece]:
    """About ``at_least`` pieces of the batch, and of queries where the batch has fewer entries."""
    if 0 in problem.k.strides[: len(problem.batch)]:
        # Each piece widens the keys that the batch shares, which only pays for many queries. (D77)
        at_least = min(at_least, max(1, math.prod(problem.batch) * problem.seqlen_q // 128))
    entries = list(_entries(problem, at_least))
    block_m, _ = blocks(problem)
    each = max(1, -(-problem.seqlen_q // block_m) // -(-at_least // len(entries)))
    rows = list(slices(0, problem.seqlen_q, each * block_m))
    return list(itertools.product(entries, rows))


def pieces_of(problem: Problem, threads: int) -> list[Piece]:
    """Pieces of a forward. They decide no bits, so that one thread takes as few as possible."""
    return pieces(problem, _pieces_of_threads(problem, threads))


def gradient_pieces(problem: Problem, threads: int, *, independent: bool) -> list[Piece]:
    """Pieces of a gradient, whose number decides the bits if they add to the same elements.

    It then depends on no threads. ``independent``: only gradients of q, k and v are wanted.
    """
    summed = any(any(getattr(problem, name).summed) for name in "qkv")
    if independent and not summed and math.prod(problem.batch) >= _GRADIENT_PIECES:
        entries = _entries(problem, _pieces_of_threads(problem, threads))
        return [(entry, slice(0, problem.seqlen_q)) for entry in entries]
    work = operations(problem)
    return pieces(problem, pieces_for(worth(2, work), _GRADIENT_PIECES, work))


def _pieces_of_threads(problem: Problem, threads: int) -> int:
    if threads == 1:
        return 1
    return pieces_for(threads, _PIECES_A_THREAD * threads, operations(problem))


def blocks(problem: Problem) -> tuple[int, int]:
    """Queries and keys of a tile: equal blocks, as few as the largest tile allows."""
    windowed = (problem.window_left, problem.window_right) != (None, None)
    most_m = min(BLOCK_M, _BESIDE_WINDOWS) if windowed else BLOCK_M
    return _block(problem.seqlen_q, most_m), _block(problem.seqlen_k, BLOCK_N)


def tiles(problem: Problem, scores: Scores, rows: slice) -> Iterator[tuple[Tile, Array | None]]:
    """Tiles in which some query of ``rows`` sees a key, with visibility; None if all pairs do.

    If lengths or offsets of entries differ, blocks of keys start at fixed places and are whole.
    Then keys that only other entries see, which ``key_range`` includes, change no bit of a row.
    (D78)
    """
    some, full = scores.key_range(rows)
    if some.start >= some.stop:
        return
    first, last = 0, problem.seqlen_k
    if scores.alike:
        first = some.start // ALIGNMENT * ALIGNMENT
        last = min(last, -(-some.stop // ALIGNMENT) * ALIGNMENT)
    _, block_n = blocks(problem)
    m = np.arange(rows.start, rows.stop)[:, None]
    for start in range(some.start // block_n * block_n, some.stop, block_n):
        cols = slice(max(start, first), min(start + block_n, last))
        tile = Tile(rows, cols, m, np.arange(cols.start, cols.stop)[None, :])
        if full.start <= cols.start and cols.stop <= full.stop:
            yield tile, None
        elif (seen := scores.visible(tile)).any():
            yield tile, seen


def product(a: Array, b: Array, seen: Array | None, finite: bool, out: Array) -> Array:
    """``a @ b``, in ``out``, with ``a`` 0 outside ``seen`` (None: all is seen).

    A non-finite element of ``b`` makes NaN of exactly the rows that see it.
    """
    if finite:
        return np.matmul(a, b, out=out)
    b_finite = np.isfinite(b)
    if seen is None:
        poisoned = ~b_finite.all(-2, keepdims=True)
    else:
        poisoned = np.matmul(seen.astype(a.dtype), (~b_finite).astype(a.dtype)) > 0
    return np.where(poisoned, np.nan, np.matmul(a, np.where(b_finite, b, 0)))


def fits(target: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether BLAS can write a product of this shape into ``target``."""
    return bool(target.shape == shape and target.dtype == dtype and target.flags.c_contiguous)


def row_maxima(scores: Array) -> Array:
    """The largest score of each row, or its first NaN. (D130)"""
    columns = scores.shape[-1]
    where = scores.argmax(-1)
    where += np.arange(0, scores.size, columns).reshape(where.shape)
    return scores.reshape(-1).take(where)


def hide(scores: Array, seen: Array | None, value: float) -> None:
    """Overwrite the scores that are not ``seen`` (None: all are) with ``value``."""
    if seen is not None:
        np.copyto(scores, scores.dtype.type(value), where=~seen)


def rows_view(problem: Problem, rows: Array) -> Array:
    """View of an array batch + (m,) in canonical order."""
    return rows.reshape(*problem.batch, problem.seqlen_q)


def largest_tile(problem: Problem) -> tuple[int, int, int]:
    """Rows, columns and head size of the largest products."""
    width = max(problem.head_dim, problem.head_dim_v)
    block_m, block_n = blocks(problem)
    return min(problem.seqlen_q, block_m), min(problem.seqlen_k, block_n), width


def operations(problem: Problem) -> float:
    """Floating-point operations of a forward without a mask."""
    pairs = math.prod(problem.batch) * problem.seqlen_q * problem.seqlen_k
    return 2.0 * pairs * (problem.head_dim + problem.head_dim_v)


def _block(length: int, most: int) -> int:
    return most if length <= most else -(-length // -(-length // most) // 16) * 16


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """A range in slices of ``size``."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _entries(problem: Problem, at_least: int) -> Iterator[Entry]:
    """Indices of the batch: integers, then one slice, so that a tile stays small."""
    batch = problem.batch
    if not batch:
        yield ()
        return
    tile = min(problem.seqlen_q, BLOCK_M) * max(1, min(problem.seqlen_k, BLOCK_N))
    most = min(TILE_ELEMENTS // tile, -(-math.prod(batch) // at_least))
    axis = len(batch) - 1
    while axis and math.prod(batch[axis:]) <= most:
        axis -= 1
    chunk = max(1, most // math.prod(batch[axis + 1 :]))
    for leading in itertools.product(*(range(n) for n in batch[:axis])):
        for part in slices(0, batch[axis], chunk):
            yield (*leading, part)


def _unrepeated(array: Array) -> Array:
    """View with extent 1 on batch axes of stride 0, so that repeated elements are widened once."""
    return array[tuple(slice(None) if stride else slice(1) for stride in array.strides[:-2])]
