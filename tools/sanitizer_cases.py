"""Which calls does tools/sanitize.py have compute-sanitizer watch, and by which kernels?"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


@dataclass(frozen=True)
class Case:
    """One forward and backward call; shapes are (batch, heads, seqlen, head_dim)."""

    name: str
    q: tuple[int, ...] = (1, 2, 193, 64)
    k: tuple[int, ...] = (1, 2, 193, 64)
    head_dim_v: int | None = None
    dtype: Any = np.float16
    float8: str = ""  # names of operands that are quantised before the call
    options: Mapping[str, Any] = field(default_factory=dict)  # drawn where it can be called
    keywords: Mapping[str, Any] = field(default_factory=dict)  # of a call, not of a score
    page_size: int = 0  # of a cache that keys and values are appended to; without a gradient
    ends: tuple[int, ...] = ()  # of packed sequences, from 0 on
    lead: int = 0  # elements in front: an odd number makes every vector load misaligned
    feature_first: bool = False
    dlse: bool = False
    wide_out: bool = False
    wrt: tuple[str, ...] = ("q", "k", "v")
    portable: bool = False  # all kernels are, and copy 16 bytes at a time
    arch: str = ""  # as if the device were of this one: kernels multiply on CUDA cores


def lengths(*values: int) -> np.ndarray:
    """Lengths or offsets per batch entry, heads last."""
    return np.array(values)[:, None]


def of_queries_and_keys(rng: np.random.Generator) -> Any:
    """A formula of one array for each axis, both exactly as long as it."""
    from cuflash import ScoreMod

    return ScoreMod(
        "score + of_q[q] * of_k[k]",
        grad="1.0f + 0.0f * of_q[q] * of_k[k]",
        arrays={
            "of_q": rng.standard_normal(129).astype(np.float32),
            "of_k": rng.standard_normal(150).astype(np.float32),
        },
        host=lambda score, _b, _h, q, k, of_q, of_k: score + of_q[q] * of_k[k],
        host_grad=lambda score, *_, **__: np.ones_like(score),
    )


def every_fifth_hidden(_: np.random.Generator) -> Any:
    """A formula that hides pairs."""
    from cuflash import MaskMod

    return MaskMod("(q + 2 * k) % 5 != 0", host=lambda _b, _h, q, k: (q + 2 * k) % 5 != 0)


CAUSAL = {"causal": True}
FORMULA = {"score_mod": of_queries_and_keys}
SLOPES = np.array([0.1, 0.2], np.float32)
CASES = (
    PLAIN := Case("plain"),
    Case("plain bfloat16 head_dim 128", (1, 2, 129, 128), (1, 2, 320, 128), dtype=bfloat16),
    Case("causal", (1, 2, 320, 64), (1, 2, 320, 64), options=CAUSAL),
    Case("more tiles than SMs", (1, 140, 130, 64), (1, 140, 65, 64), options=CAUSAL),
    Case("the last of several tiles stores dq", (1, 140, 130, 128), (1, 140, 257, 128)),
    Case("causal long keys", (1, 2, 65, 32), (1, 2, 300, 32), options=CAUSAL),
    Case("causal long queries", (1, 2, 300, 64), (1, 2, 65, 64), options=CAUSAL),
    Case("causal head_dim 256", (1, 1, 130, 256), (1, 1, 130, 256), options=CAUSAL),
    Case("8 bits", (1, 2, 257, 128), (1, 2, 321, 128), dtype=bfloat16, float8="qkv"),
    Case("8 bits causal", (1, 1, 257, 128), (1, 1, 257, 128), float8="qkv", options=CAUSAL),
    Case("8 bits head_dim 256", (1, 1, 257, 256), (1, 1, 257, 256), float8="qkv"),
    Case(
        "8 bits packed", (2, 257, 128), (2, 257, 128), float8="qkv", ends=(0, 100, 257),
        options=CAUSAL,
    ),
    Case("keys of 8 bits", (2, 4, 3, 128), (2, 4, 2100, 128), dtype=bfloat16, float8="kv"),
    Case("keys of 8 bits in pages", (2, 4, 5, 256), (2, 4, 2112, 256), float8="kv", page_size=16),
    Case("keys of 8 bits of a cluster", (2, 2, 20, 64), (2, 2, 700, 64), float8="kv"),
    Case("head_dim 96", (1, 2, 129, 96), (1, 2, 129, 96), dtype=bfloat16),
    Case("head_dim 192 and 128", (1, 2, 129, 192), (1, 2, 129, 192), head_dim_v=128),
    Case("head_dim 40 and 7", (1, 2, 129, 40), (1, 2, 130, 40), head_dim_v=7),
    Case("head_dim 1", (1, 2, 77, 1), (1, 2, 33, 1)),
    Case("one query", (2, 2, 1, 64), (2, 2, 257, 64)),
    Case(
        "few queries, many keys", (2, 2, 3, 64), (2, 2, 2100, 64), head_dim_v=40,
        options={"sink": SLOPES, "kv_lengths": lengths(30, 699)},
    ),
    Case("more queries, many keys", (1, 2, 100, 64), (1, 2, 2100, 64), wrt=()),
    Case(
        "few queries of a cluster", (2, 2, 3, 64), (2, 2, 700, 64), head_dim_v=40, wrt=(),
        options={"sink": SLOPES, "kv_lengths": lengths(30, 699)},
    ),
    Case("more queries of a cluster", (1, 2, 80, 64), (1, 2, 2100, 64), wrt=()),
    Case("one key", (2, 2, 257, 64), (2, 2, 1, 64)),
    Case("window", (1, 2, 257, 64), (1, 2, 257, 64), options={"window": (40, 17)}),
    Case("window left", (1, 2, 200, 64), (1, 2, 320, 64), options={"window": (70, None)}),
    Case("softcap", options={"softcap": 15.0, "causal": True}),
    Case(
        "bias float32", (1, 2, 129, 64), (1, 2, 150, 64),
        options={"bias": lambda rng: rng.standard_normal((129, 150)).astype(np.float32)},
    ),
    Case(
        "bias of the inputs' dtype with softcap", (1, 2, 129, 64), (1, 2, 150, 64), dtype=bfloat16,
        options={
            "bias": lambda rng: rng.standard_normal((1, 2, 129, 150)).astype(bfloat16),
            "softcap": 20.0,
        },
    ),
    Case(
        "mask with rows that see nothing", (1, 2, 129, 64), (1, 2, 150, 64),
        options={
            "mask": lambda rng: (rng.random((2, 129, 150)) < 0.5)
            & (np.arange(129) % 16 != 0)[:, None]
        },
    ),
    Case(
        "lengths, some of them 0", (3, 2, 150, 64), (3, 2, 170, 64),
        options={
            "q_lengths": lengths(150, 0, 31), "kv_lengths": lengths(33, 170, 0), "causal": True,
        },
    ),
    Case(
        "offsets", (2, 2, 100, 64), (2, 2, 170, 64),
        options={"offset": lengths(-20, 300), "window": (64, 0)},
    ),
    Case("grouped heads", (2, 6, 129, 64), (2, 2, 129, 64), options={"enable_gqa": True}),
    Case("keys shared by the batch", (3, 2, 129, 64), (1, 1, 129, 64), options=CAUSAL),
    Case("misaligned", lead=3, options=CAUSAL),
    Case("strided features", feature_first=True),
    Case("dlse and float32 out", dlse=True, wide_out=True),
    Case("only dq", wrt=("q",)),
    Case("only dv", wrt=("v",), options=CAUSAL),
    Case(
        "dq added in any order", (1, 2, 321, 128), (1, 2, 200, 128), dtype=bfloat16, options=CAUSAL,
        keywords={"deterministic": False},
    ),
    Case(
        "dq of grouped heads added in any order", (2, 6, 193, 64), (2, 2, 200, 64),
        options={"enable_gqa": True}, keywords={"deterministic": False},
    ),
    Case(
        "dq added in any order, head_dim 256", (1, 2, 193, 256), (1, 2, 200, 256), options=CAUSAL,
        keywords={"deterministic": False},
    ),
    Case(
        "packed sequences", (1, 2, 330, 64), (1, 2, 330, 64), options=CAUSAL,
        ends=(0, 130, 130, 131, 320),
    ),
    Case(
        "packed sequences, softcap and dropout, head_dim 256", (1, 2, 330, 256), (1, 2, 330, 256),
        options={"softcap": 20.0, "dropout": 0.2, "seed": 3}, ends=(0, 130, 130, 131, 320),
    ),
    Case(
        "segments, head_dim 192 and 128", (1, 2, 193, 192), (1, 2, 320, 192), head_dim_v=128,
        options={
            "segment_ids": lambda rng: (np.sort(rng.integers(0, 3, 193)), np.arange(320) // 110)
        },
    ),
    Case(
        "slopes of keys on both sides", (1, 2, 300, 128), (1, 2, 420, 128), dtype=bfloat16,
        options={"alibi_slopes": SLOPES},
    ),
    Case(
        "segments, slopes, a sink and dropout", (1, 2, 193, 64), (1, 2, 320, 64),
        options={
            "segment_ids": lambda rng: (np.sort(rng.integers(0, 3, 193)), np.arange(320) // 110),
            "alibi_slopes": SLOPES,
            "sink": lambda _: np.array([0.5, -1.0], np.float32),
            "dropout": 0.2,
            "seed": 3,
        },
    ),
    Case(
        "gradient of a bias", (2, 2, 129, 64), (2, 2, 150, 64), wrt=("q", "k", "v", "bias"),
        options={"bias": lambda rng: rng.standard_normal((2, 1, 150)).astype(np.float32)},
    ),
    Case(
        "gradient of a bias of each pair", (1, 2, 129, 64), (1, 2, 150, 64),
        wrt=("q", "k", "v", "bias"),
        options={
            "bias": lambda rng: rng.standard_normal((2, 129, 150)).astype(np.float16),
            "causal": True,
        },
    ),
    Case("a formula", (1, 2, 129, 64), (1, 2, 150, 64), options=FORMULA),
    Case("a formula of points", (1, 2, 129, 3), (1, 2, 150, 3), dtype=np.float32, options=FORMULA),
    Case("float32", (1, 2, 129, 64), (1, 2, 150, 64), dtype=np.float32, options=CAUSAL),
    Case("float32 head_dim 32", (1, 2, 129, 32), (1, 2, 150, 32), dtype=np.float32),
    Case(
        "float32 head_dim 128 and 40, grouped heads", (1, 4, 200, 128), (1, 2, 290, 128),
        head_dim_v=40, dtype=np.float32, options={"enable_gqa": True},
    ),
    Case(
        "float32 with strided features and rows that see nothing", (1, 2, 290, 64), (1, 2, 200, 64),
        dtype=np.float32, feature_first=True,
        options={
            "mask": lambda rng: (rng.random((2, 290, 200)) < 0.5)
            & (np.arange(290) % 16 != 0)[:, None]
        },
    ),
    Case(
        "packed sequences of float32", (1, 2, 330, 64), (1, 2, 330, 64), dtype=np.float32,
        options=CAUSAL, ends=(0, 130, 130, 131, 320),
    ),
    Case("float32 head_dim 3", (1, 2, 129, 3), (1, 2, 150, 3), dtype=np.float32),
    Case(
        "points and a bias of keys", (1, 2, 600, 3), (1, 2, 300, 3), head_dim_v=5,
        dtype=np.float64, lead=1,
        options={"bias": lambda rng: rng.standard_normal((2, 1, 300)), "causal": True},
    ),
    Case(
        "TF32 head_dim 128", (1, 2, 129, 128), (1, 2, 150, 128), dtype=np.float32,
        keywords={"precision": "tf32"},
    ),
    Case("float64", (1, 2, 129, 64), (1, 2, 150, 64), dtype=np.float64, options=CAUSAL),
    Case("float32 head_dim 256", (1, 1, 65, 256), (1, 1, 77, 256), dtype=np.float32),
    Case("float64 head_dim 256", (1, 1, 65, 256), (1, 1, 77, 256), dtype=np.float64),
    Case("portable", (1, 2, 193, 64), (1, 2, 193, 64), options=CAUSAL, portable=True),
    Case(
        "portable head_dim 128", (1, 2, 129, 128), (1, 2, 200, 128), dtype=bfloat16,
        options={"window": (70, 10)}, portable=True,
    ),
    Case(
        "portable head_dim 192 and 128", (1, 2, 129, 192), (1, 2, 150, 192), head_dim_v=128,
        options={"mask": lambda rng: rng.random((2, 129, 150)) < 0.5}, portable=True,
    ),
    Case("portable head_dim 256", (1, 1, 130, 256), (1, 1, 130, 256), portable=True),
    Case(
        "portable queries of a group's heads in one tile", (1, 8, 3, 64), (1, 2, 300, 64),
        options={"enable_gqa": True, "causal": True}, portable=True,
    ),
    Case(
        "portable float32", (1, 2, 129, 64), (1, 2, 150, 64), dtype=np.float32, options=CAUSAL,
        portable=True,
    ),
    Case(
        "portable softcap, slopes and a bias of 16 bits", (1, 2, 129, 64), (1, 2, 150, 64),
        options={
            "bias": lambda rng: rng.standard_normal((1, 2, 129, 150)).astype(np.float16),
            "softcap": 20.0, "alibi_slopes": SLOPES,
        }, portable=True,
    ),
    Case(
        "portable segments, a sink and dropout", (1, 2, 193, 64), (1, 2, 320, 64), dtype=bfloat16,
        options={
            "segment_ids": lambda rng: (np.sort(rng.integers(0, 3, 193)), np.arange(320) // 110),
            "sink": lambda _: np.array([0.5, -1.0], np.float32), "dropout": 0.2, "seed": 3,
        }, portable=True,
    ),
    Case(
        "portable lengths and offsets", (3, 2, 150, 64), (3, 2, 170, 64), dlse=True, portable=True,
        options={
            "q_lengths": lengths(150, 0, 31), "kv_lengths": lengths(33, 170, 0),
            "offset": lengths(-20, 30, 0), "window": (64, 0),
        },
    ),
    Case(
        "portable packed sequences, their dropout and gradient of a bias", (1, 2, 330, 64),
        (1, 2, 330, 64), ends=(0, 130, 130, 131, 320), wrt=("q", "k", "v", "bias"), portable=True,
        options={
            "bias": lambda rng: rng.standard_normal((2, 1, 200)).astype(np.float32),
            "dropout": 0.2, "seed": 3, "causal": True,
        },
    ),
    Case(
        "portable formulas", (1, 2, 129, 64), (1, 2, 150, 64), portable=True,
        options={**FORMULA, "mask_mod": every_fifth_hidden},
    ),
    Case(
        "portable gradients of all inputs, grouped heads", (2, 4, 129, 64), (2, 2, 150, 64),
        dtype=bfloat16, wrt=("q", "k", "v", "bias", "alibi_slopes", "sink", "scale"),
        options={
            "bias": lambda rng: rng.standard_normal((4, 129, 150)).astype(np.float32),
            "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
            "sink": lambda _: np.array([0.5, -1.0, 0.0, 2.0], np.float32), "enable_gqa": True,
        }, portable=True,
    ),
    Case(
        "pages of a cache", (3, 4, 5, 64), (3, 2, 75, 64), head_dim_v=40, page_size=16,
        options={"enable_gqa": True, "causal": True, "sink": np.ones(4, np.float32)},
    ),
    Case(
        "pages of a cache, many keys", (2, 2, 1, 128), (2, 2, 5000, 128), page_size=48,
        dtype=bfloat16, options={"window": (3000, None)},
    ),
    Case(
        "CUDA cores", (2, 4, 77, 64), (2, 2, 90, 64), head_dim_v=40, arch="sm_75",
        wrt=("q", "k", "v", "bias", "scale"),
        options={
            "bias": lambda rng: rng.standard_normal((4, 77, 90)).astype(np.float16),
            "mask": lambda rng: (rng.random((77, 90)) < 0.5) & (np.arange(77) % 16 != 0)[:, None],
            "enable_gqa": True,
        },
    ),
    Case(
        "CUDA cores of float64, misaligned", (1, 2, 77, 33), (1, 2, 90, 33), head_dim_v=70,
        dtype=np.float64, options={"window": (30, 5)}, lead=1, arch="sm_86",
    ),
)  # fmt: skip


def placed(xp: ModuleType, array: np.ndarray, case: Case) -> Any:
    """Copy to ``xp``, laid out as the case asks; every array is an allocation of its own."""
    if case.feature_first:
        array = np.ascontiguousarray(array.swapaxes(-1, -2))
    data = np.concatenate([np.zeros(case.lead, array.dtype), array.ravel()])
    raw = xp.asarray(data.view(np.uint8))[case.lead * array.itemsize :]
    view = raw.view(array.dtype).reshape(array.shape)
    return view.swapaxes(-1, -2) if case.feature_first else view


def placed_option(xp: ModuleType, value: Any) -> Any:
    """Copy the arrays of an option's value to ``xp``."""
    if isinstance(value, tuple):
        return tuple(placed_option(xp, part) for part in value)
    if hasattr(value, "arrays"):
        return replace(value, arrays={n: placed(xp, a, PLAIN) for n, a in value.arrays.items()})
    return placed(xp, value, PLAIN) if isinstance(value, np.ndarray) else value


def run(xp: ModuleType, case: Case) -> None:
    """One case, by the kernels that it is about."""
    if xp is np or not (case.portable or case.arch):
        (run_float8 if case.float8 else run_pages if case.page_size else run_calls)(xp, case)
        return
    from support.portable import kernels_of, portable_kernels

    with kernels_of(case.arch) if case.arch else portable_kernels() as configs:
        run_calls(xp, case)
    tiled = [config for config in configs if "tile" in config.parts]
    if len(tiled) < 3 or any(config.simt != bool(case.arch) for config in tiled):
        raise SystemExit(f"{case.name}: kernels of other products ran: {configs}")
    reading = [config for config in configs if "operands" in config.parts]
    if case.portable and any(config.copy_bytes != 16 for config in reading):
        raise SystemExit(f"{case.name}: kernels of other copies ran: {configs}")


def run_float8(xp: ModuleType, case: Case) -> None:
    """Quantise operands and attend; the result must have been written."""
    import cuflash

    rng = np.random.default_rng(0)
    shapes = {"q": case.q, "k": case.k, "v": case.k}
    arrays = {n: rng.standard_normal(s).astype(case.dtype) for n, s in shapes.items()}
    attend, others, scales = cuflash.attention, (), {}
    if case.ends:
        attend, others = cuflash.attention_varlen, (np.array(case.ends),) * 2
    if case.page_size:
        batch, heads, keys, d = case.k
        pages = (batch * keys // case.page_size, heads, case.page_size, d)
        arrays |= {name: arrays[name].reshape(pages) for name in "kv"}
        numbers = np.arange(pages[0], dtype=np.int32).reshape(batch, -1)
        attend, others = cuflash.attention_paged, (numbers, np.array([keys, 17]))
        for name in case.float8:  # all pages share one factor
            arrays[name], scales[f"{name}_scale"] = cuflash.quantize(arrays[name], per="tensor")
    operands = {name: placed(xp, array, case) for name, array in arrays.items()}
    for name in case.float8 if not scales else ():
        operands[name], scales[f"{name}_scale"] = cuflash.quantize(operands[name], rotation=1)
    given = {name: placed_option(xp, scale) for name, scale in scales.items()} | case.options
    out = attend(*operands.values(), *placed_option(xp, others), **given)
    if not np.isfinite((out if xp is np else out.get()).astype(np.float32)).all():
        raise SystemExit(f"{case.name}: a result is not finite")


def run_pages(xp: ModuleType, case: Case) -> None:
    """A cache that grows, is shared and freed, and attention over its pages."""
    import cuflash

    rng = np.random.default_rng(0)
    shapes = (case.q, case.k, (*case.k[:-1], case.head_dim_v or case.k[-1]))
    q, k, v = (xp.asarray(rng.standard_normal(shape).astype(case.dtype)) for shape in shapes)
    cache = cuflash.KVCache(
        len(k), k.shape[1], k.shape[-1], max_length=k.shape[2] + 9, head_dim_v=v.shape[-1],
        page_size=case.page_size, dtype=case.dtype, like=q,
    )  # fmt: skip
    cache.append(k, v, rotary=True)
    cache.take(xp.asarray([0, *range(len(k) - 1)]))  # sequences 0 and 1 share a page
    cache.append(k[:, :, :7], v[:, :, :7], xp.asarray([*range(1, len(k) + 1)]), rotary=True)
    turned = cuflash.rotary(q, cache.lengths[:, None, None])
    options = {name: placed_option(xp, value) for name, value in case.options.items()}
    out = cuflash.attention_paged(turned, *cache.arrays, **options)
    host = out if xp is np else out.get()
    if not np.isfinite(host.astype(np.float32)).all():
        raise SystemExit(f"{case.name}: a result is not finite")


def run_calls(xp: ModuleType, case: Case) -> None:
    """Forward and backward of one case; every result must have been written.

    On a device with a forward kernel of its own, the portable kernel runs as well.
    """
    import cuflash
    from cuflash._problem.option_table import FIELDS
    from cuflash._problem.problem import describe
    from cuflash._select import hardware
    from cuflash._select.choose import PORTABLE, choose

    rng = np.random.default_rng(0)
    batch = max(case.q[0], case.k[0])
    head_dim_v = case.head_dim_v or case.k[-1]
    out_shape = (batch, case.q[1], case.q[2], head_dim_v)
    shapes = (case.q, case.k, (*case.k[:-1], head_dim_v), out_shape)
    on_host = [rng.standard_normal(shape).astype(case.dtype) for shape in shapes]
    drawn = {name: x(rng) if callable(x) else x for name, x in case.options.items()}
    q, k, v, dout = (placed(xp, array, case) for array in on_host)
    options = {name: placed_option(xp, value) for name, value in drawn.items()}
    ends = (np.array(case.ends),) * 2 if case.ends else ()
    own_ends = placed_option(xp, ends)
    forward = cuflash.attention_varlen if ends else cuflash.attention
    backward = cuflash.attention_varlen_backward if ends else cuflash.attention_backward
    room = None
    if case.wide_out:
        room = (xp.empty(out_shape, np.float32), xp.empty(out_shape[:-1], np.float32))
    out, lse = forward(q, k, v, *own_ends, return_lse=True, out=room, **case.keywords, **options)
    if xp is not np and not (ends or case.portable or case.arch):
        problem = describe(
            q, k, v, cuflash.Options(**options), precision=case.keywords.get("precision")
        )
        own = hardware.of_device(xp.cuda.runtime.getDevice())
        steps = choose(problem, own, only=PORTABLE)
        portable = next(step.config for step in steps if step.config.computes == "out")
        cuflash.attention(q, k, v, config=portable, **case.keywords, **options)
    dlse = None
    if case.dlse:
        dlse = placed(xp, rng.standard_normal(lse.shape).astype(lse.dtype), PLAIN)
    # To initcheck, what the copy engine stores is memory that nobody wrote. (D118)
    given = forward(*on_host[:3], *ends, return_lse=True, **drawn)
    given_out, given_lse = (placed(xp, array, PLAIN) for array in given)
    gradients = backward(
        dout, q, k, v, given_out.astype(out.dtype, copy=False), given_lse, *own_ends, dlse=dlse,
        wrt=case.wrt, **case.keywords, **options,
    )  # fmt: skip
    for result in (out, *(getattr(gradients, FIELDS[name]) for name in case.wrt)):
        host = result if xp is np else result.get()
        if not np.isfinite(host.astype(np.float32)).all():
            raise SystemExit(f"{case.name}: a result is not finite")
