"""The shape and options of a problem that is measured or tuned."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from cuflash._errors import shown, wrong_value
from cuflash._problem.option_table import ARRAYS, of_stages
from cuflash._problem.options import Options
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import Problem, describe

Array = Any
DTYPES = {t.__name__: np.dtype(t) for t in (np.float16, bfloat16, np.float32, np.float64)}
#: The forward, the gradient after it, and both calls one after the other.
PASSES = ("fwd", "bwd", "fwd+bwd")
PRECISIONS = ("ieee", "tf32")
#: Options of a score that are arrays.
ARRAY_OPTIONS = (
    *(o.name for o in of_stages() if o.arrays and o.name != "offset" and o.stage != "operand"),
    "key_bias",
)
_OF_PAIRS = tuple(name for name, (_, core) in ARRAYS.items() if core == "mn")
#: Two forms of one option: a value for each pair of query and key, or for each key.
_BIASES = {"bias", "key_bias"}
#: Kernels that compute dq, dk and dv in one pass.
ONE_PASS = ("backward_sm90", "backward_pair_sm90")


def _is_number(value: Any, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value, int) and value >= 0


def _is_window(value: Any) -> bool:
    if not isinstance(value, tuple):
        return value is None
    return len(value) == 2 and all(side is None or _is_count(side) for side in value)


Check = Callable[[Any], bool]


def _is_among(words: Iterable[str]) -> Check:
    return lambda value: isinstance(value, str) and value in words


def _is_tuple_of(right: Check) -> Check:
    return lambda value: isinstance(value, tuple) and all(map(right, value))


_SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")
#: Check of each field, and the words for allowed values.
_FIELDS: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(_SIZES, (lambda value: _is_count(value) and value > 0, "a positive int")),
    "head_dim_v": (_is_count, "an int >= 0"),
    "dtype": (_is_among(DTYPES), f"one of {', '.join(DTYPES)}"),
    **dict.fromkeys(("causal", "deterministic"), (lambda value: isinstance(value, bool), "a bool")),
    "window": (_is_window, "None or a tuple (left, right), each None or an int >= 0"),
    "precision": (_is_among(PRECISIONS), '"ieee" or "tf32"'),
    "layout": (_is_among(["bhsd"]), '"bhsd"'),
    "softcap": (
        lambda value: value is None or (_is_number(value) and 0 < value < math.inf),
        "None or a finite positive number",
    ),
    "dropout": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "arrays": (
        _is_tuple_of(_is_among(ARRAY_OPTIONS)),
        f"a tuple of names among {', '.join(ARRAY_OPTIONS)}",
    ),
    "seqlens": (_is_tuple_of(_is_count), "a tuple of ints >= 0"),
}


@dataclass(frozen=True)
class Workload:
    """One shape with its options: everything in a row of results except the results.

    Examples
    --------
    >>> from cuflash import tuning
    >>> work = tuning.Workload(8, 32, 8, 4096, 4096, 128, 128, "bfloat16", causal=True)
    >>> print(work)
    b8 h32/8 4096x4096 d128 causal
    >>> work.score_options(), work.plain, work.bounds()
    ({'causal': True, 'enable_gqa': True}, True, (None, 0))
    >>> work.visible_pairs() == 4096**2 / 2, work.flops("bwd") / work.flops("fwd")
    (True, 2.5)
    >>> work.kernel_flops("backward_dq_sm80") / work.kernel_flops("forward_sm80")
    1.5
    >>> work.input_bytes("fwd"), work.option_bytes(), work.problem().out_shape
    (671088640, 0, (8, 32, 4096, 128))
    >>> tuning.Workload.from_json(work.as_json()) == work
    True

    Packed sequences, and arrays to run them with:

    >>> import numpy as np
    >>> packed = tuning.Workload(1, 2, 2, 7, 7, 4, 4, "float32", seqlens=(3, 4))
    >>> [alone.seqlen_q for alone in packed.sequences()]
    [3, 4]
    >>> q, k, v, dout = packed.inputs(np)[0]
    >>> q.shape, q.dtype
    ((1, 2, 7, 4), dtype('float32'))
    """

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int  # 0 for logsumexp, which has no values
    dtype: str
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    precision: str = "ieee"
    layout: str = "bhsd"
    deterministic: bool = True
    softcap: float | None = None
    dropout: float = 0.0
    arrays: tuple[str, ...] = ()  # options given as arrays, of ARRAY_OPTIONS
    seqlens: tuple[int, ...] = ()  # of packed sequences: seqlen_q and seqlen_k are their sum

    def __post_init__(self) -> None:
        for name, (is_right, expected) in _FIELDS.items():
            value = getattr(self, name)
            if not is_right(value):
                raise wrong_value(name, shown(value), expected)
        if self.heads_q % self.heads_kv:
            raise wrong_value("heads_kv", self.heads_kv, f"a divisor of {self.heads_q}")
        whole = (self.seqlen_q, self.seqlen_k)
        if self.seqlens and whole != (sum(self.seqlens),) * 2:
            got = f"{self.seqlens} of {whole[0]} queries, {whole[1]} keys"
            raise wrong_value("seqlens", got, "lengths whose sum is both")
        if set(self.arrays) >= _BIASES:
            raise wrong_value("arrays", "bias and key_bias", "one of them: a call has one bias")

    def sequences(self) -> list[Workload]:
        """Every packed sequence as a workload of its own."""
        return [dataclasses.replace(self, seqlen_q=n, seqlen_k=n, seqlens=()) for n in self.seqlens]

    def bounds(self) -> tuple[int | None, int | None]:
        """Sides of the window, limited by ``causal`` and by the lengths of the arrays."""
        left, right = self.window or (None, None)
        longest = max(self.seqlen_q, self.seqlen_k)
        return (
            None if left is None else min(left, longest),
            0 if self.causal else None if right is None else min(right, longest),
        )

    def visible_pairs(self) -> float:
        """Number of visible query-key pairs per head.

        Causal with equal lengths counts as exactly one half, as in publications. For any other mask
        the visible pairs are counted.
        """
        if self.seqlens:
            return sum(alone.visible_pairs() for alone in self.sequences())
        if self.window is None and not self.causal:
            return float(self.seqlen_q * self.seqlen_k)
        if self.window is None and self.seqlen_q == self.seqlen_k:
            return self.seqlen_q * self.seqlen_k / 2
        return float(seen_by(self, 1).rows())

    def flops(self, pass_: str) -> float:
        """Floating-point operations as usually counted: backward is 2.5 times forward."""
        return self.kernel_flops("forward") * {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}[pass_]

    def kernel_flops(self, kernel: str, grads: str = "kv") -> float:
        """Operations of the products that a kernel, such as "backward_dq_sm80", computes.

        ``grads`` says which of dk and dv a pass of a dk/dv kernel computes.
        """
        d, d_v = self.head_dim, self.head_dim_v
        if kernel in ONE_PASS:
            width = 3 * d + 2 * d_v
        elif kernel.startswith("forward"):
            width = d + d_v
        elif "_dq_" in kernel:
            width = 2 * d + d_v
        else:
            width = {"kv": 2 * (d + d_v), "k": 2 * d + d_v, "v": d + d_v}[grads]
        return 2 * self.batch * self.heads_q * width * self.visible_pairs()

    @property
    def plain(self) -> bool:
        """Whether only a causal mask or a window changes the scores."""
        return not numbers_of(self) and not self.arrays

    def input_bytes(self, pass_: str) -> int:
        """The least number of bytes that one call reads and writes."""
        rows = self.heads_q * self.seqlen_q + self.heads_kv * self.seqlen_k
        forward = self.batch * rows * (self.head_dim + self.head_dim_v)
        return DTYPES[self.dtype].itemsize * forward * (1 if pass_ == "fwd" else 2)

    def option_bytes(self) -> int:
        """Bytes of the options that are arrays."""
        options = self.score_options(filled=False).values() if self.arrays else ()
        each = [a for given in options for a in (given if isinstance(given, tuple) else (given,))]
        return sum(a.nbytes for a in each if isinstance(a, np.ndarray))

    def inputs(self, xp: ModuleType, copies: int = 1, seed: int = 0) -> list[tuple[Array, ...]]:
        """Sets of q, k, v, dout: standard normal, rounded, (batch, heads, seqlen, dim)."""
        random = xp.random.RandomState(seed)
        shapes = (
            (self.batch, self.heads_q, self.seqlen_q, self.head_dim),
            (self.batch, self.heads_kv, self.seqlen_k, self.head_dim),
            (self.batch, self.heads_kv, self.seqlen_k, self.head_dim_v),
            (self.batch, self.heads_q, self.seqlen_q, self.head_dim_v),
        )
        wide = {} if xp is np else {"dtype": np.float32}

        def drawn(shape: tuple[int, ...]) -> Array:
            draw = random.standard_normal if shape[-1] else xp.zeros  # cuRAND may refuse size 0
            return draw((copies, *shape), **wide).astype(DTYPES[self.dtype])

        return list(zip(*map(drawn, shapes), strict=True))

    def score_options(self, xp: ModuleType = np, *, filled: bool = True) -> dict[str, Any]:
        """The option keywords of the call; the values of arrays are the same every time.

        Unless ``filled``, arrays with a value for each query-key pair take no memory.
        """
        given: dict[str, Any] = {"causal": True} if self.causal else {}
        given |= {"window": self.window} if self.window else {}
        given |= {"enable_gqa": True} if self.heads_q != self.heads_kv else {}
        given |= numbers_of(self) | ({"seed": 0} if self.dropout else {})
        random = np.random.default_rng(0)
        for name in self.arrays:
            if name in _OF_PAIRS and not filled:
                kind = np.dtype(bool) if name == "mask" else DTYPES[self.dtype]
                array: Any = _unfilled((self.seqlen_q, self.seqlen_k), kind)
            else:
                array = self._array(name, random, xp)
            given["bias" if name in _BIASES else name] = array
        return given

    def _array(self, name: str, random: np.random.Generator, xp: ModuleType) -> Any:
        m, n, heads = self.seqlen_q, self.seqlen_k, self.heads_q
        if name == "mask":
            return xp.asarray(random.random((m, n), np.float32) < 0.9)
        if name in _BIASES:
            rows = m if name == "bias" else 1
            cast = random.standard_normal((rows, n), np.float32).astype(DTYPES[self.dtype])
            # CuPy may not know a dtype of ml_dtypes, so the array is copied as bytes.
            return cast if xp is np else xp.asarray(cast.view(np.uint8)).view(cast.dtype)
        if name == "segment_ids":
            return tuple(xp.asarray(np.arange(s) * 8 // s, np.int32) for s in (m, n))
        if name in ("q_lengths", "kv_lengths"):
            longest = m if name == "q_lengths" else n
            lengths = np.linspace(longest // 2 + 1, longest, self.batch)
            return xp.asarray(lengths[:, None].astype(np.int32))
        if name == "alibi_slopes":
            return xp.asarray(2.0 ** -np.linspace(1, 8, heads, dtype=np.float32))
        extents: tuple[int, ...] = (m, n) if name in _OF_PAIRS else (heads,)
        return xp.asarray(random.standard_normal(extents, np.float32))

    def problem(self) -> Problem:
        """The validated problem of the call; no array is filled, and none takes memory.

        Packed sequences are described with int32 ``cu_seqlens``.
        """
        kind, batch = DTYPES[self.dtype], self.batch
        q = _unfilled((batch, self.heads_q, self.seqlen_q, self.head_dim), kind)
        k = _unfilled((batch, self.heads_kv, self.seqlen_k, self.head_dim), kind)
        v = _unfilled((batch, self.heads_kv, self.seqlen_k, self.head_dim_v), kind)
        options = Options(**self.score_options(filled=False))
        if not self.seqlens:
            return describe(q, k, v, options, precision=self.precision)
        ends = dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_k"), np.cumsum((0, *self.seqlens), dtype=np.int32)
        )
        return describe_packed(q, k, v, options, ends, axes=None, precision=self.precision)

    def __str__(self) -> str:
        def both(one: int, other: int) -> str:
            return f"{one}" if one == other else f"{one}/{other}"

        heads, dims = both(self.heads_q, self.heads_kv), both(self.head_dim, self.head_dim_v)
        words = [f"b{self.batch}", f"h{heads}", f"{self.seqlen_q}x{self.seqlen_k}", f"d{dims}"]
        words.append("causal" if self.causal else "full")
        words += [] if self.window is None else [f"window {self.window}"]
        words += [f"{name} {value:g}" for name, value in numbers_of(self).items()]
        words += [f"in {len(self.seqlens)} sequences"] if self.seqlens else []
        return " ".join((*words, *self.arrays))

    def as_json(self) -> dict[str, Any]:
        """The fields, as values that JSON supports."""
        return dict(json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Workload:
        """The inverse of :meth:`as_json`."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            got = f"unknown {', '.join(unknown)}"
            raise wrong_value("workload", got, f"fields among {', '.join(sorted(known))}")
        given = dict(fields)
        for name in ("window", "arrays", "seqlens"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        return cls(**given)


Workload.__module__ = "cuflash.tuning"  # the public name, for pickles and errors
#: Options of a score that are numbers.
NUMBERS = tuple(o.name for o in of_stages() if o.number and hasattr(Workload, o.name))


def numbers_of(work: Workload) -> dict[str, float]:
    """The options that are numbers and are set, by name."""
    return {name: getattr(work, name) for name in NUMBERS if getattr(work, name)}


def _unfilled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """A placeholder for an array in C order, of which only the layout is read."""
    steps = list(itertools.accumulate(shape[:0:-1], int.__mul__, initial=dtype.itemsize))
    if steps[-1] * shape[0] >= 1 << 63:
        got = f"an array of {' x '.join(map(str, shape))}"
        raise wrong_value("problem", got, "arrays of fewer than 2^63 bytes")
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, steps[::-1])


class Seen(NamedTuple):
    """For each tile, the rows of the other side that it may see: ``low`` up to before ``high``."""

    low: np.ndarray
    high: np.ndarray

    def rows(self) -> int:
        """Number of visible rows, summed over tiles."""
        return int((self.high - self.low).sum())

    def in_blocks(self, block: int, end: int | None = None) -> int:
        """Number of rows in all blocks with visible rows, cut off at ``end``."""
        low, high = self.low // block * block, -(-self.high // block) * block
        if end is not None:
            high = np.minimum(high, end)
        return int(np.where(self.high > self.low, high - low, 0).sum())


def seen_by(work: Workload, own: int, *, keys: bool = False) -> Seen:
    """The keys that each tile of ``own`` queries may see; with ``keys``, queries by key tile."""
    rows, others = work.seqlen_q, work.seqlen_k
    left, right = work.bounds()
    if keys:  # how far a query sees keys to its left is how far a key sees queries to its right
        rows, others, left, right = others, rows, right, left
    first = np.arange(0, rows, own)
    last = np.minimum(first + own, rows) - 1
    low, high = np.zeros_like(first), np.full_like(first, others)
    if left is not None:
        low = np.clip(first + others - rows - left, 0, others)
    if right is not None:
        high = np.clip(last + others - rows + right + 1, 0, others)
    return Seen(low, np.maximum(low, high))
