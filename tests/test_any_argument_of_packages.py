"""Do functions of subpackages, and caches, take every value of every argument or name it?

The values are those of test_any_argument.py. One valid argument at a time is replaced. After an
error a cache is unchanged.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_any_argument import NAMED, VALUES, X

import cuflash
from cuflash import distributed, testing
from cuflash._problem.options import OPTION_NAMES

COMM = distributed.simulated(2)
ROWS = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 4, 2)
PARTS = [ROWS, ROWS]
FOUND = distributed.attention(PARTS, PARTS, PARTS, comm=COMM, return_lse=True)
OUT, LSE = cuflash.attention(X, X, X, return_lse=True)
K, V = (np.ones((2, 2, 3, d), np.float32) for d in (4, 5))
SHAPES = {"q": (2, 3, 4), "k": (2, 5, 4), "v": (2, 5, 4)}
ALONE = {"secret": "a secret", "transport": "host"}
#: Errors allowed beside NAMED: features that this version lacks, ranks that differ or fail.
ALSO_NAMED = re.compile(
    r"[\w, ]+: got .*; all ranks make the same call|.*: not available in this version"
    r"|no launcher has set RANK|the communicator|cannot listen at "
)


class Mpi:
    """A communicator of mpi4py with one process."""

    def bcast(self, value: Any, root: int) -> Any:
        return value

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1


def positional(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Return the function as one that takes ``names`` by keyword."""
    return lambda **given: function(*[given.pop(name) for name in names], **given)


def on_a_cache(method: str, **given: Any) -> None:
    """Call a method of a new cache; check that an error leaves the cache unchanged and usable."""
    cache = cuflash.KVCache(2, 2, 4, head_dim_v=5, max_length=20, page_size=3, dtype=np.float32)
    cache.append(K, V)
    before = [a.copy() for a in (*cache.arrays, cache.dropped)]
    try:
        getattr(cache, method)(**given)
    except Exception:
        for old, now in zip(before, (*cache.arrays, cache.dropped), strict=True):
            np.testing.assert_array_equal(old, now)
        cache.append(K, V)
        raise


def closed(join: Callable[..., Any]) -> Callable[..., None]:
    return lambda **given: join(**given).close()


def drawn(strategy: Callable[..., Any], **words: Any) -> None:
    """Draw two examples of a strategy."""
    quiet = settings(
        max_examples=2, database=None, phases=[Phase.generate], derandomize=True,
        suppress_health_check=list(HealthCheck), deadline=None,
    )  # fmt: skip
    quiet(given(strategy(**words))(lambda _: None))()


class Door(NamedTuple):
    """A function called by keywords, valid arguments for it, and names of its other arguments."""

    call: Callable[..., Any]
    right: dict[str, Any]
    others: tuple[str, ...] = ()


QKV = {"q": PARTS, "k": PARTS, "v": PARTS, "comm": COMM}
SAVED = {"dout": PARTS, "out": [f.out for f in FOUND], "lse": [f.lse for f in FOUND]}
CALL = ("layout", "method", "options", "axes", "precision", "deterministic")
DOORS = {
    "KVCache": Door(
        positional(cuflash.KVCache, "sequences", "heads", "head_dim"),
        {"sequences": 2, "heads": 2, "head_dim": 4, "max_length": 20},
        ("page_size", "head_dim_v", "pages", "dtype", "like"),
    ),
    "append": Door(
        functools.partial(on_a_cache, "append"),
        {"k": K, "v": V, "rotary": True},
        ("counts", "frequencies", "interleaved"),
    ),
    "take": Door(functools.partial(on_a_cache, "take"), {"parents": [0, 1]}, ("lengths",)),
    "attention": Door(
        positional(distributed.attention, "q", "k", "v"), QKV,
        (*CALL, "return_lse", *sorted({*OPTION_NAMES} - {"dropout", "seed"})),
    ),
    "attention_backward": Door(
        positional(distributed.attention_backward, "dout", "q", "k", "v", "out", "lse"),
        SAVED | QKV, ("dlse", "wrt", *CALL),
    ),
    "shard": Door(
        positional(distributed.shard, "x"), {"x": ROWS, "comm": COMM}, ("layout", "axis")
    ),
    "unshard": Door(
        positional(distributed.unshard, "x"), {"x": PARTS, "comm": COMM}, ("layout", "axis")
    ),
    "positions": Door(distributed.positions, {"length": 8, "rank": 0, "size": 2}, ("layout",)),
    "simulated": Door(distributed.simulated, {"size": 2}),
    "explain": Door(
        positional(distributed.explain, "q", "k", "v"), {**SHAPES, "size": 2},
        ("dtype", "method", "memory", "ranks_per_host", "options", "axes"),
    ),
    "connect": Door(
        closed(distributed.connect),
        {"rank": 0, "size": 1, "address": "127.0.0.1:0", **ALONE},
        ("device", "init_timeout", "op_timeout", "liveness_timeout"),
    ),
    "from_environment": Door(
        closed(positional(distributed.from_environment, "environment")),
        {"environment": {"RANK": "0", "WORLD_SIZE": "1"}, "address": "127.0.0.1:0", **ALONE},
    ),
    "from_mpi": Door(
        closed(positional(distributed.from_mpi, "mpi")), {"mpi": Mpi(), "transport": "host"},
        ("address",),
    ),
    "assert_attention_close": Door(
        positional(testing.assert_attention_close, "actual", "q", "k", "v"),
        {"actual": OUT, "q": X, "k": X, "v": X},
        ("gradients", "dout", "dlse", "options", "axes", "precision"),
    ),
    "make_call": Door(
        testing.make_call, {"family": "normal", "seed": 0, "dtype": "float32", **SHAPES},
        ("options",),
    ),
    "arrays": Door(
        functools.partial(drawn, testing.arrays), SHAPES, ("dtypes", "families", "xp")
    ),
    "options": Door(
        functools.partial(drawn, testing.options), {n: SHAPES[n] for n in "qk"},
        ("names", "dtype", "xp"),
    ),
    "calls": Door(
        functools.partial(drawn, testing.calls), {},
        ("dtypes", "seqlens", "head_dims", "values_dims", "batches", "group_sizes", "broadcast",
         "options", "option_sets", "families", "gradients", "mixed_dtypes", "xp"),
    ),
    "Workload": Door(
        cuflash.tuning.Workload,
        {"batch": 1, "heads_q": 2, "heads_kv": 2, "seqlen_q": 4, "seqlen_k": 4, "head_dim": 8,
         "head_dim_v": 8, "dtype": "float32"},
        ("causal", "window", "precision", "layout", "deterministic", "softcap", "dropout",
         "arrays", "seqlens"),
    ),
}  # fmt: skip
#: Valid values that would take too long: ranks that never connect, positions of 2^31 rows.
NOT_TRIED = {
    ("connect", "size", "2"), ("positions", "length", "2147483648"),
    ("shard", "x", "more than memory"), ("from_mpi", "mpi", "a mock"),
    ("shard", "x", "an array of shape (1099511627776, 0)"),
    ("simulated", "size", "a mock"),
}  # fmt: skip
CASES = [(name, argument) for name, d in DOORS.items() for argument in (*d.right, *d.others)]


def works_or_says_why(name: str, wrong: dict[str, Any]) -> None:
    call, right, _ = DOORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns about numbers, Hypothesis about strategies
        try:
            call(**right | wrong)
        except AssertionError:
            if name != "assert_attention_close":
                raise
        except (TypeError, ValueError, NotImplementedError, RuntimeError, ImportError) as error:
            text = str(error)
            if not (NAMED.match(text) or ALSO_NAMED.match(text)) or len(text) > 2000:
                raise AssertionError(f"{type(error).__name__}: {text[:2000]}") from error


@pytest.mark.long
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_any_value_works_or_is_refused_by_name(name, argument):
    for label, make in VALUES.items():
        if (name, argument, label) not in NOT_TRIED:
            works_or_says_why(name, {argument: make()})


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_any_values_together_work_or_are_refused_by_name(data):
    name = data.draw(st.sampled_from(sorted(DOORS)), label="function")
    _, right, others = DOORS[name]
    names = st.sampled_from((*right, *others))
    labels = data.draw(
        st.dictionaries(names, st.sampled_from(sorted(VALUES)), max_size=3, min_size=1)
    )
    if not NOT_TRIED.isdisjoint((name, *pair) for pair in labels.items()):
        return
    works_or_says_why(name, {argument: VALUES[label]() for argument, label in labels.items()})


def test_the_right_arguments_are_right():
    for call, right, _ in DOORS.values():
        call(**right)
    assert len(CASES) > 120
