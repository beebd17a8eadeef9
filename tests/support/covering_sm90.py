"""Which calls are the rows of levels whose forward is one of Hopper's kernels?

Beside them is the portable kernel, for keys of 8 bits and queries of 16.

A row is a text of the levels that are not the first of their factor: ``"causal, grouped, sink"``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

import cuflash
from cuflash import Options
from cuflash._api import float8, paged
from cuflash._problem.float8 import E4M3
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import Problem, describe
from cuflash._select import hardware
from cuflash._select.choose import choose
from cuflash.testing import assert_attention_close
from support import memory
from support.host_device import on_device
from support.memory import Placement
from support.problems import CANONICAL, SEQUENCE_OUTSIDE_HEADS, Call, Results, packed, unpacked

HEADS = 4
#: (entries, queries, keys): partial blocks, full ones, rows of several heads in a tile, split keys,
#: more tiles than a Hopper GPU has SMs.
SIZES = {
    "": (2, 168, 280),
    "full blocks": (2, 256, 384),
    "few queries": (2, 5, 280),
    "many keys": (2, 72, 2200),
    "many entries": (33, 380, 136),
    "few queries on many keys": (2, 5, 2200),
}
PAGES = {"pages of 16": 16, "pages of 128": 128}
OPTIONS: dict[str, tuple[str, ...]] = {
    "position": ("everything", "causal", "window", "left window"),
    "offset": ("aligned at the end", "offset", "offset of each entry"),
    "heads": ("heads of their own", "grouped", "shared keys"),
    "mask": ("no mask", "mask", "mask of each head"),
    "bias": ("no bias", "bias", "bias of keys"),
    "slopes": ("no slopes", "slopes"),
    "softcap": ("no softcap", "softcap"),
    "sink": ("no sink", "sink"),
    "dropout": ("no dropout", "dropout"),
    "segments": ("no segments", "segments"),
    "queries": ("all queries", "q_lengths"),
    "keys": ("all keys", "kv_lengths"),
    "scale": ("default scale", "negative scale"),
    "layout": ("dense", "sequence outside heads"),
    "lse": ("lse", "no lse"),
}
#: The factors of each kernel. A row that names no level of a factor has the first.
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "forward_sm90": {
        "dtype": ("float16", "bfloat16"),
        "d": ("64", "16 80", "128", "192 128", "256"),
        "size": tuple(SIZES)[:5],
        "order": ("in order", "packed", *PAGES),
        "result": ("same dtype", "float32 out"),
        **OPTIONS,
    },
    "forward_tf32_sm90": {
        "precision": ("ieee", "tf32"),
        "d": ("64", "40 100", "128"),
        "size": tuple(SIZES)[:4],
        "order": ("in order", "packed"),
        **OPTIONS,
    },
    "forward_fp8_sm90": {
        "d": ("128", "64", "112 24"),
        "size": tuple(SIZES)[:4],
        "order": ("in order", "packed"),
        "factors": ("no factors", "factors of each head"),
        "result": ("same dtype", "float16 out"),
        **OPTIONS,
    },
    "forward_sm80": {
        "dtype": ("float16", "bfloat16"),
        "d": ("64", "128", "40 200"),
        "size": ("few queries", "few queries on many keys"),
        "order": ("in order", *PAGES),
        "factors": ("no factors", "factors of each head"),
        **OPTIONS,
    },
}
_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
#: Dtypes of results other than the dtype of q (bfloat16 for operands of 8 bits).
RESULTS = {"float32 out": np.dtype(np.float32), "float16 out": np.dtype(np.float16)}
_OF_KERNEL = {"forward_tf32_sm90": np.dtype(np.float32), "forward_fp8_sm90": np.dtype(E4M3)}

Levels = dict[str, str]


def levels_of(kernel: str, row: str) -> Levels:
    """Return the level of every factor."""
    named = [level for level in row.split(", ") if level]
    factor = {level: name for name, of in FACTORS[kernel].items() for level in of}
    found = {name: of[0] for name, of in FACTORS[kernel].items()} | {factor[n]: n for n in named}
    assert len({factor[level] for level in named}) == len(named), f"two levels of one factor: {row}"
    return found


def pairs(kernel: str) -> Iterator[tuple[str, str]]:
    """Yield every two levels of two factors."""
    for first, second in itertools.combinations(FACTORS[kernel].values(), 2):
        yield from itertools.product(first, second)


def call_of(kernel: str, levels: Levels, drawn: Callable[..., np.ndarray]) -> Call:
    """Return the call of a row, with keys in order; ``drawn`` returns elements of a shape."""
    d, d_v = (levels["d"].split() * 2)[:2]
    batch, m, n = SIZES[levels["size"]]
    if page := PAGES.get(levels.get("order", "")):
        n = -(-n // page) * page
    dtype = _OF_KERNEL.get(kernel) or _DTYPES[levels["dtype"]]
    heads_k = {"grouped": HEADS // 2, "shared keys": 1}.get(levels["heads"], HEADS)
    shapes = (HEADS, m, int(d)), (heads_k, n, int(d)), (heads_k, n, int(d_v))
    of_keys = np.dtype(E4M3) if kernel == "forward_sm80" else dtype
    q, k, v = (
        drawn((batch, *shape)).astype(np.float32).astype(own)
        for shape, own in zip(shapes, (dtype, of_keys, of_keys), strict=True)
    )
    options = _options(levels, drawn, batch, m, n, dtype)
    if levels.get("factors") == "factors of each head":
        options |= {
            f"{name}_scale": np.exp2(np.arange(heads, dtype=np.float32) % 3 - 1)[:, None, None]
            for name, heads in zip("qkv", (HEADS, heads_k, heads_k), strict=True)
            if name != "q" or dtype == E4M3
        }
    call = Call(
        q, k, v, dout=np.empty((batch, HEADS, m, int(d_v)), dtype), options=options,
        tf32=levels.get("precision") == "tf32", lead=memory.ALIGNED,
    )  # fmt: skip
    if levels.get("order") == "packed":
        call = packed(call)
    outside = levels["layout"] == "sequence outside heads"
    return call.but(axes=SEQUENCE_OUTSIDE_HEADS) if outside else call


def _options(
    levels: Levels, drawn: Callable[..., np.ndarray], batch: int, m: int, n: int, dtype: Any
) -> dict[str, Any]:
    def floats(*shape: int) -> np.ndarray:
        return drawn(shape).astype(np.float32)

    def some(*shape: int) -> np.ndarray:
        return drawn(shape) < 0.8

    def of_entries(*values: int) -> np.ndarray:
        return np.resize(np.array(values, np.int32), (batch, 1))

    def ids(*shape: int) -> np.ndarray:
        return np.sort(some(*shape)).astype(np.int32)

    of_keys = np.float32 if dtype == E4M3 else dtype
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "causal": lambda: {"causal": True},
        "window": lambda: {"window": (70, 30)},
        "left window": lambda: {"window": (70, None)},
        "offset": lambda: {"offset": 40},
        "offset of each entry": lambda: {"offset": of_entries(90, -20)},
        "grouped": lambda: {"enable_gqa": True},
        "mask": lambda: {"mask": some(batch, 1, m, n)},
        "mask of each head": lambda: {"mask": some(batch, HEADS, m, n)},
        "bias": lambda: {
            "bias": np.where(some(HEADS, m, n), floats(HEADS, m, n), np.float32(-np.inf))
        },
        "bias of keys": lambda: {"bias": floats(1, n).astype(of_keys)},
        "slopes": lambda: {"alibi_slopes": floats(HEADS) / 4},
        "softcap": lambda: {"softcap": 4.0},
        "sink": lambda: {"sink": np.array([0.5, -np.inf, -2.0, 3.0], np.float32)},
        "dropout": lambda: {"dropout": 0.25, "seed": 2**40 + 3},
        "segments": lambda: {"segment_ids": (ids(batch, 1, m), ids(n))},
        "q_lengths": lambda: {"q_lengths": of_entries(7 * m // 8, m // 2)},
        "kv_lengths": lambda: {"kv_lengths": of_entries(n // 2, 15 * n // 16)},
        "negative scale": lambda: {"scale": -0.1},
    }
    options: dict[str, Any] = {}
    for level in levels.values():
        if level in made:
            options |= made[level]()
    return options


class InPages:
    """The keys of a call in pages, and the other arguments of `cuflash.attention_paged`."""

    def __init__(self, call: Call, size: int, axes: Any) -> None:
        batch, n = call.k.shape[0], call.k.shape[-2]
        order = np.random.default_rng(0).permutation(batch * n // size)
        self.table = order.reshape(batch, n // size).astype(np.int32)
        self.options = dict(call.options)
        lengths = self.options.pop("kv_lengths", n)
        self.lengths = np.broadcast_to(np.asarray(lengths).reshape(-1), batch).astype(np.int32)
        pages = [self._of(a, size, order) for a in (call.k, call.v)]
        self.arrays = [
            np.ascontiguousarray(np.moveaxis(a, (-2, -1), pair))
            for a, pair in zip((call.q, *pages), axes, strict=False)
        ]

    @staticmethod
    def _of(array: np.ndarray, size: int, order: np.ndarray) -> np.ndarray:
        """Return keys (batch, heads, n, d) as (pages, heads, size, d), numbered by ``order``."""
        batch, heads, n, d = array.shape
        parts = array.reshape(batch, heads, n // size, size, d).swapaxes(1, 2)
        found = np.empty((batch * (n // size), heads, size, d), array.dtype)
        found[order] = parts.reshape(found.shape)
        return found


def steps_of(kernel: str, levels: Levels) -> tuple[Any, ...]:
    """Return the launches of a row's forward on Hopper."""
    return choose(described(kernel, levels), hardware.typical("sm_90"))


def described(kernel: str, levels: Levels) -> Problem:
    """Return the problem of a row on a GPU."""
    call = call_of(kernel, levels, np.zeros)
    axes = call.axes or CANONICAL
    qkv = [
        on_device(np.ascontiguousarray(np.moveaxis(array, (-2, -1), pair)))
        for array, pair in zip(call.qkv, axes, strict=False)
    ]
    out = None
    if wanted := RESULTS.get(levels.get("result", "")):
        out = on_device(np.moveaxis(call.dout, (-2, -1), axes[3]).astype(wanted, order="C"))
    own = Options(**call.options)
    options = float8._of_entries(own, [own.q_scale, own.k_scale, own.v_scale], qkv[0], axes)
    if size := PAGES.get(levels.get("order", "")):
        in_pages = InPages(call, size, axes)
        names = ("q", "k_pages", "v_pages", "page_table")
        given = dict(zip(names, map(on_device, (*in_pages.arrays, in_pages.table)), strict=True))
        own, *_, problem = paged._described(
            given, on_device(in_pages.lengths), replace(options, kv_lengths=None), axes, None, out
        )
        return paged._for_kernels(problem, own)[0]
    precision = "tf32" if call.tf32 else None
    if not call.sequences:
        return describe(*qkv, options, axes=axes, precision=precision, out=out)
    ends = {
        f"cu_seqlens_{name}": on_device(np.linspace(0, rows, call.sequences + 1, dtype="i4"))
        for name, rows in (("q", call.q.shape[-2]), ("k", call.k.shape[-2]))
    }
    return describe_packed(*qkv, options, ends, axes=axes, precision=precision, out=out)


def check_on_a_gpu(xp: Any, kernel: str, levels: Levels) -> None:
    """Run a row on poisoned memory, and check its results against the error budget."""
    rng = np.random.default_rng(0)
    call = call_of(kernel, levels, rng.standard_normal)
    axes, size = call.axes or CANONICAL, PAGES.get(levels.get("order", ""))
    given, attend, others = dict(call.options), cuflash.attention, ()
    operands = [np.moveaxis(a, (-2, -1), pair) for a, pair in zip(call.qkv, axes, strict=False)]
    if call.sequences:
        attend = cuflash.attention_varlen
        rows = (call.q.shape[-2], call.k.shape[-2])
        others = tuple(np.linspace(0, n, call.sequences + 1, dtype=np.int32) for n in rows)
    elif size:
        pages = InPages(call, size, axes)
        attend, operands, given = cuflash.attention_paged, pages.arrays, pages.options
        others = (pages.table, pages.lengths)
    placed: list[memory.Placed] = []

    def there(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(there, value))
        if not hasattr(value, "strides"):
            return value
        placed.append(memory.place(xp, value, Placement.dense(value.ndim, memory.ALIGNED), "nan"))
        return placed[-1].view

    given = {name: there(value) for name, value in given.items()}
    if wanted := RESULTS.get(levels.get("result", "")):
        out = xp.empty(np.moveaxis(call.dout, (-2, -1), axes[3]).shape, wanted)
        lse = xp.empty(call.dout.shape[:-1], np.float32)
        given["out"] = (out, lse) if levels["lse"] == "lse" else out
    found = attend(
        *map(there, operands), *map(there, others), axes=call.axes,
        precision="tf32" if call.tf32 else None, return_lse=levels["lse"] == "lse", **given,
    )  # fmt: skip
    for own in placed:
        memory.assert_unchanged("an input", own)
    out, lse = found if levels["lse"] == "lse" else (found, None)
    out = np.moveaxis(memory.to_numpy(out), axes[3], (-2, -1))
    lse = np.zeros(out.shape[:-1]) if lse is None else memory.to_numpy(lse)
    if call.sequences:
        call, result = unpacked(call, Results(out, lse, {}))
        out, lse = result.out, result.lse
    assert_attention_close(
        out if levels["lse"] == "no lse" else (out, lse), *call.qkv, **call.options,
        precision="tf32" if call.tf32 else None,
    )  # fmt: skip
