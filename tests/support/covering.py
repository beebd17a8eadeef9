"""Which few calls contain every three choices together? A 3-wise covering array over the options.

A mistake of composition nearly always needs two or three options at once. `rows` chooses calls
greedily, always the same ones, until every triple of levels of every three factors is in some call.
`call_of` makes the call of a row. `EXCLUDED` lists levels that no call may have together.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from cuflash import MaskMod, ScoreMod
from cuflash._problem.option_table import OPTIONS, Option
from cuflash.testing._strategies import HALVES
from support.memory import Placement
from support.problems import (
    DTYPES,
    FEATURE_FIRST,
    FIELDS,
    MIXED,
    SEQUENCE_OUTSIDE_HEADS,
    Call,
    make_call,
    packed,
)

FACTORS: dict[str, tuple[str, ...]] = {
    "dtype": tuple(DTYPES),
    "operand dtypes": ("same", "k narrower", "q narrower"),
    "position": ("everything", "causal", "top left", "window", "causal window"),
    "offset": ("default", "number", "per entry"),
    "heads": ("own", "grouped", "broadcast"),
    "mask": ("none", "pairs", "keys"),
    "bias": ("none", "pairs", "keys", "queries"),
    "alibi": ("none", "per head", "per entry"),
    "softcap": ("none", "4"),
    "sink": ("none", "per head"),
    "dropout": ("none", "a quarter"),
    "segments": ("none", "some"),
    "lengths": ("none", "numbers", "per entry"),
    "packed": ("no", "yes"),
    "formulas": ("none", "score", "pairs", "both"),
    "dlse": ("none", "some"),
    "d": ("1", "3", "16", "between tiles"),
    "d_v": ("0", "1", "5", "24"),
    "layout": ("dense", "sequence outside heads", "strided", "constant axes"),
    "deterministic": ("yes", "no"),
}
#: Options that a factor names by hand, and options of operands of 8 bits (test_float8). Every other
#: option of the table is a factor by its own name.
BY_HAND = (
    "causal", "window", "offset", "enable_gqa", "mask", "bias", "alibi_slopes", "softcap", "sink",
    "dropout", "seed", "segment_ids", "q_lengths", "kv_lengths", "score_mod", "mask_mod", "scale",
    "q_scale", "k_scale", "v_scale",
)  # fmt: skip
OTHERS = {option.name: option for option in OPTIONS if option.name not in BY_HAND}
FACTORS |= dict.fromkeys(OTHERS, ("none", "some"))
#: "top_left" with an offset is a ValueError, as both set it. No dtype is narrower than 16 bits.
EXCLUDED = (
    *((("position", "top left"), ("offset", level)) for level in ("number", "per entry")),
    *itertools.product(
        (("dtype", half) for half in HALVES),
        (("operand dtypes", level) for level in ("k narrower", "q narrower")),
    ),
)
BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 21, 35
#: Head sizes between those of tiles, used in rotation.
BETWEEN_TILES = (40, 72, 80, 112, 160, 176)
KINDS = ("normal", "normal_times_3", "sparse_integers", "lse_minus_120")

Row = dict[str, str]
Triple = frozenset[tuple[str, str]]


def allowed(levels: Triple) -> bool:
    """Return whether no two of ``levels`` exclude each other."""
    return not any(levels.issuperset(pair) for pair in EXCLUDED)


def triples() -> set[Triple]:
    """Return every three levels of three factors that a call may have together."""
    found = set()
    for names in itertools.combinations(FACTORS, 3):
        for levels in itertools.product(*(FACTORS[name] for name in names)):
            triple = frozenset(zip(names, levels, strict=True))
            if allowed(triple):
                found.add(triple)
    return found


def rows() -> list[Row]:
    """Return the covering array.

    Each row starts from a triple that is not yet covered. Until every factor has a level, the level
    is added that covers the most triples with the levels of the row. A generator with a fixed seed
    breaks ties.
    """
    values = [(name, level) for name, levels in FACTORS.items() for level in levels]
    number = {value: i for i, value in enumerate(values)}
    factor = np.array([list(FACTORS).index(name) for name, _ in values])
    size = len(values)
    compatible = factor[:, None] != factor
    for first, second in EXCLUDED:
        compatible[number[first], number[second]] = compatible[number[second], number[first]] = 0
    open_ = (compatible[:, :, None] & compatible[:, None, :] & compatible[None, :, :]).astype(
        np.float32
    )  # (value, value, value): 1 where the triple is not covered
    rng = np.random.default_rng(0)
    found = []
    while open_.any():
        start = np.argmax(open_ * (1 + rng.random(open_.shape, np.float32)))
        chosen = [int(i) for i in np.unravel_index(start, open_.shape)]
        possible = compatible[chosen].all(0)
        while possible.any():
            has = np.zeros(size, np.float32)
            has[chosen] = 1
            gain = (open_.reshape(-1, size) @ has).reshape(size, size) @ has
            gain = np.where(possible, gain + rng.random(size), -1)
            chosen.append(int(np.argmax(gain)))
            possible &= compatible[chosen[-1]]
        open_[np.ix_(chosen, chosen, chosen)] = 0
        found.append(dict(values[i] for i in sorted(chosen)))
    return found


def call_of(row: Row, seed: int, *, times: int = 1) -> Call:
    """Return the call with the levels of ``row``, with every gradient that it has in wrt.

    Sequences, lengths and positions are ``times`` as long: 8 fill blocks of kernels. The call is
    run as it is. Where sequences are packed, `problems.unpacked` turns it and its results into a
    batch, for the definition. An operand narrower than ``dtype``, the dtype that q, k and v promote
    to, is float32 beside float64, and 16 bits beside float32.
    """
    rng = np.random.default_rng(seed)
    dtype = DTYPES[row["dtype"]]
    batch = (BATCH, HEADS)
    is_packed = row["packed"] == "yes"
    k_batch, v_batch = {
        "own": (batch, batch),
        "grouped": ((BATCH, HEADS // 2),) * 2,
        # Every packed sequence has values of its own.
        "broadcast": ((BATCH, 1), batch if is_packed else (HEADS,)),
    }[row["heads"]]
    between = BETWEEN_TILES[seed % len(BETWEEN_TILES)]
    d, d_v = between if row["d"] == "between tiles" else int(row["d"]), int(row["d_v"])
    seqlen_q, seqlen_k = times * SEQLEN_Q, times * SEQLEN_K
    narrower = {"float64": np.dtype(np.float32), "float32": DTYPES[HALVES[seed % 2]]}
    dtypes = tuple(
        narrower.get(row["dtype"], dtype) if row["operand dtypes"] == f"{name} narrower" else dtype
        for name in "qkv"
    )
    call = make_call(
        KINDS[seed % len(KINDS)],
        seed,
        dtypes,
        (*batch, seqlen_q, d),
        (*k_batch, seqlen_k, d),
        (*v_batch, seqlen_k, d_v),
        options=_options(row, rng, dtype, seed, times),
    )
    if row["dlse"] == "some":
        dlse = rng.standard_normal((*batch, seqlen_q)).astype(call.lse_dtype)
        call = call.but(dlse=dlse)
    wrt = tuple(n for n in FIELDS if n in ("q", "k", "v", "scale") or n in call.options)
    call = call.but(
        wrt=wrt, origin=f"{call.origin}, {row}", deterministic=row["deterministic"] == "yes"
    )
    return _laid_out(packed(call) if is_packed else call, row["layout"])


def _options(
    row: Row, rng: np.random.Generator, dtype: np.dtype, seed: int, times: int
) -> dict[str, Any]:
    seqlen_q, seqlen_k = times * SEQLEN_Q, times * SEQLEN_K

    def normal(*shape: int, kind: Any = np.float32) -> np.ndarray:
        return rng.standard_normal(shape).astype(kind)

    def bias() -> np.ndarray:
        array = normal(HEADS, seqlen_q, seqlen_k)
        array[rng.random(array.shape) < 0.1] = -np.inf
        return array

    sink = normal(HEADS)
    sink[1] = -np.inf
    per_entry = times * np.array([[21, 33], [11, 20]], np.int32)  # (entry, q and k)
    ids = (
        np.sort(rng.integers(0, 2, (BATCH, 1, seqlen_q))).astype(np.int32),
        np.sort(rng.integers(0, 2, seqlen_k)),
    )
    # A slope of -1 changes what a wrong sign or order does, and no bound of errors.
    flipped = {
        "score_mod": ScoreMod(
            "shift[h] * (k % 3) - score", grad="-1.0f", arrays={"shift": normal(HEADS)},
            host=lambda score, b, h, q, k, shift: shift[h] * (k % 3) - score,
            host_grad=lambda score, *_, **__: -np.ones_like(score),
        )
    }  # fmt: skip
    thinned = {
        "mask_mod": MaskMod(
            "(q + 2 * k + h + b) % 5 != 0",
            host=lambda b, h, q, k: (q + 2 * k + h + b) % 5 != 0,
        )
    }
    levels: dict[str, dict[str, dict[str, Any]]] = {
        "position": {
            "causal": {"causal": True},
            "top left": {"causal": "top_left"},
            "window": {"window": (9 * times, 5 * times)},
            "causal window": {"causal": True, "window": (9 * times, None)},
        },
        "offset": {
            "number": {"offset": 6 * times},
            "per entry": {"offset": times * np.array([[12], [3]])},
        },
        "heads": {"grouped": {"enable_gqa": True}},
        "mask": {
            "pairs": {"mask": rng.random((BATCH, 1, seqlen_q, seqlen_k)) < 0.8},
            "keys": {"mask": rng.random((1, seqlen_k)) < 0.8},
        },
        "bias": {
            "pairs": {"bias": bias()},
            "keys": {"bias": normal(1, seqlen_k, kind=dtype)},
            "queries": {"bias": normal(BATCH, 1, seqlen_q, 1)},
        },
        "alibi": {
            "per head": {"alibi_slopes": normal(HEADS) / 4},
            "per entry": {"alibi_slopes": (normal(BATCH, HEADS) / 4).astype(dtype)},
        },
        "softcap": {"4": {"softcap": 4.0}},
        "sink": {"per head": {"sink": sink}},
        "dropout": {"a quarter": {"dropout": 0.25, "seed": seed}},
        "segments": {"some": {"segment_ids": ids}},
        "lengths": {
            "numbers": {"q_lengths": 18 * times, "kv_lengths": 30 * times},
            "per entry": {"q_lengths": per_entry[:, :1], "kv_lengths": per_entry[:, 1:]},
        },
        "formulas": {"score": flipped, "pairs": thinned, "both": flipped | thinned},
    }
    for name, option in OTHERS.items():
        levels[name] = {"some": {name: _some(option, rng, seqlen_q, seqlen_k)}}
    options: dict[str, Any] = {}
    for name, of_level in levels.items():
        options |= of_level.get(row[name], {})
    return options


def _some(option: Option, rng: np.random.Generator, seqlen_q: int, seqlen_k: int) -> Any:
    """Return a value of an option of the table: an array for all heads, or a number."""
    extents = {"m": seqlen_q, "n": seqlen_k}
    for core in option.arrays.values():
        array = rng.standard_normal((HEADS, *(extents[axis] for axis in core)), np.float32)
        return array < 1 if option.compiled == "flag" else array
    return 0.5


def _laid_out(call: Call, layout: str) -> Call:
    if layout == "dense":
        return call
    if layout == "sequence outside heads":
        return call.but(axes=SEQUENCE_OUTSIDE_HEADS)
    inputs = ("q", "k", "v", "dout")
    if layout == "strided":  # axes reversed, gaps, sequences backwards
        arrays = {name: call.array(name) for name in inputs}
        arrays |= {"out": call.dout} | {"d" + name: call.array(name) for name in "qkv"}
        arrays |= call.option_arrays
        return call.but(
            axes=MIXED, placements={n: _strided(a.ndim) for n, a in arrays.items() if a.ndim > 1}
        )
    constant = {"q": (-4,), "k": (-3,), "v": (-1,), "dout": (-4, -3, -2, -1)}
    changes: dict[str, Any] = {"axes": FEATURE_FIRST, "placements": {}}
    for (name, axes), pair in zip(constant.items(), FEATURE_FIRST, strict=True):
        array = call.array(name)
        along = [axis for axis in axes if axis >= -array.ndim and array.shape[axis] > 1]
        first = array[
            tuple(slice(1) if i - array.ndim in along else slice(None) for i in range(array.ndim))
        ]
        changes[name] = np.broadcast_to(first, array.shape).copy()
        changes["placements"][name] = _constant(array.ndim, along, pair)
    return call.but(**changes)


def _strided(ndim: int) -> Placement:
    flips = tuple(axis == ndim - 2 for axis in range(ndim))
    gaps = tuple(2 if axis == ndim - 1 else 1 for axis in range(ndim))
    return Placement(tuple(reversed(range(ndim))), gaps, flips, (False,) * ndim)


def _constant(ndim: int, along: list[int], pair: tuple[int, int]) -> Placement:
    """Return a placement with stride 0 on canonical axes ``along``, and the core at ``pair``."""
    zeros = np.zeros(ndim, bool)
    zeros[along] = True
    moved = list(range(ndim))
    for canonical, axis in zip((-2, -1), pair, strict=True):
        moved[axis] = ndim + canonical
    dense = Placement.dense(ndim)
    return Placement(dense.order, dense.gaps, dense.flips, tuple(bool(zeros[i]) for i in moved))
