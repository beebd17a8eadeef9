"""Are options that differ, and calls that ranks cannot make, refused with an answer that helps?"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import distributed
from cuflash.distributed import _parts, _rows, _run
from cuflash.distributed._layout import chunks_of
from cuflash.distributed._traffic import Extents, chosen
from support.shards import in_threads

X = np.random.default_rng(0).standard_normal((2, 16, 4))
ROWS, KEYS = np.zeros(8, int), np.zeros(16, int)
HOSTS = {"host": lambda score, *_, **__: score, "host_grad": lambda score, *_, **__: score}


def formula(name="table", dtype="f4", shape=(2,)):
    return cuflash.ScoreMod("score", grad="1.0f", arrays={name: np.zeros(shape, dtype)}, **HOSTS)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("score_mod.arrays", formula(), formula(name="other")),
        ("score_mod.arrays", formula(), formula(dtype="f8")),
        ("score_mod.arrays", formula(), formula(shape=(5,))),
        ("alibi_slopes", np.array([1.0, 2.0]), np.array([1.0, 3.0])),
        ("sink", np.array([1.0, 2.0]), np.array([2.0, 2.0])),
        ("bias", np.zeros((1, 16)), np.ones((1, 16))),
        ("mask", np.ones((1, 16), bool), np.zeros((1, 16), bool)),
        ("segment_ids", (ROWS, KEYS), (ROWS, KEYS + 1)),
        ("segment_ids", (ROWS[:1], KEYS), (ROWS[:1] + 1, KEYS)),
    ],
)
def test_options_of_other_values_are_refused_on_all_ranks(name, one, other):
    """Formula arrays have equal names, dtypes and shapes; arrays for all queries equal values."""

    def run(comm):
        own = distributed.shard(X, comm=comm)
        option = {name.split(".")[0]: (one, other)[comm.rank]}
        with pytest.raises(ValueError, match="all ranks make the same call") as found:
            distributed.attention(own, own, own, comm=comm, **option)
        option = {name.split(".")[0]: one}
        assert distributed.attention(own, own, own, comm=comm, **option).shape == (2, 8, 4)
        return str(found.value)

    first, second = in_threads(2, run)
    assert first == second
    assert first.startswith(name), first


def test_options_of_own_rows_may_have_other_values():
    """Also one row on each rank: it is the rank's own if every rank has one query."""

    def run(comm):
        for rows in (1, 8):
            q, option = X[:, :rows], np.full((rows, 16), float(comm.rank))
            k = distributed.shard(X, comm=comm, layout="contiguous")
            distributed.attention(q, k, k, comm=comm, layout="contiguous", bias=option)
        return True

    assert in_threads(2, run) == [True, True]


@pytest.fixture
def origins(monkeypatch):
    """As on a GPU: first query and key of each block that is computed."""
    found, forward, backward = [], _parts.run_forward, _parts.run_backward
    monkeypatch.setattr(_run, "is_cupy", lambda _: True)
    for name, run in (("run_forward", forward), ("run_backward", backward)):

        def noted(*given, origin, run=run, **words):
            found.append((origin.query, origin.key))
            words.pop("deterministic", None)
            return run(*given, origin=origin, **words)

        monkeypatch.setattr(_parts, name, noted)
    return found


DROPOUT = {"dropout": 0.5, "seed": 1}


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "size", "able"),
    [
        (2, 40, 40, 2, {"ulysses"}),
        (1, 128, 20, 2, {"all_gather"}),
        (1, 128, 128, 2, {"all_gather", "ring"}),
        (2, 64, 64, 4, {"usp"}),  # groups of two ranks have 16 rows in a row
        (4, 64, 64, 4, {"usp", "ulysses"}),
        (4, 24, 24, 4, {"ulysses"}),
    ],
)
def test_dropout_is_refused_by_methods_whose_blocks_begin_elsewhere(
    heads, queries, keys, size, able, origins
):
    """A GPU draws dropout for 16 queries and keys. auto takes a method that can; errors name it."""
    comm = distributed.simulated(size)
    whole = [np.random.default_rng(i).standard_normal((heads, n, 4))
             for i, n in enumerate((queries, keys, keys))]  # fmt: skip
    parts = [distributed.shard(x, comm=comm) for x in whole]
    expected = cuflash.attention(*whole, **DROPOUT)
    for method in ("auto", "all_gather", "ring", "ulysses", "usp"):
        how = {"comm": comm, "method": method, **DROPOUT}
        if method not in able | {"auto"}:
            with pytest.raises(NotImplementedError, match=f"^method: {method!r} does") as told:
                distributed.attention(*parts, **how)
            named = set(re.findall(r"'(\w+)'", str(told.value).split("; use ")[1]))
            assert named == able | {"auto"}, told.value
            continue
        out, pullback = distributed.attention_vjp(*parts, **how)
        assert np.allclose(distributed.unshard(out, comm=comm)[0], expected)
        pullback(out)
        assert origins
        assert not any(q % 16 or k % 16 for q, k in origins), method
        origins.clear()


@pytest.mark.parametrize("method", ["auto", "ring"])
def test_dropout_that_no_method_can_draw_is_refused_before_anything_moves(method, origins):
    comm, x = distributed.simulated(2), np.ones((40, 4))
    parts = distributed.shard(x, comm=comm)
    message = f"^method: '{method}' does not support dropout .*; use at least 32 rows on each rank"
    with pytest.raises(NotImplementedError, match=message):
        distributed.attention(parts, parts, parts, comm=comm, method=method, **DROPOUT)
    assert not comm.sent
    assert not origins
    distributed.attention(parts, parts, parts, comm=comm)
    even = distributed.shard(np.ones((64, 4)), comm=comm)
    distributed.attention(even, even, even, comm=comm, **DROPOUT)


def test_dropout_on_several_hosts_takes_what_can():
    """Neither the ring nor groups within a host can draw it: of the rest the fewest bytes."""
    held = chunks_of(24, 4, "zigzag")
    extents = Extents(24, 24, (4, 8), (4, 8), (4, 8), (4, 8), np.dtype("f4"), drawn=(held, held))
    own, why = chosen("auto", extents, 4, None, per_host=2)
    assert (own.method, "fewest bytes" in why) == ("ulysses", True)


@pytest.mark.parametrize(
    ("dtype", "scales"), [("float8_e4m3fn", {}), ("float8_e5m2", {}), ("bfloat16", {"k_scale": 2})]
)
def test_8_bits_are_refused_by_calls_and_by_explain(dtype, scales):
    shape, comm = (2, 16, 4), distributed.simulated(2)
    x = [np.zeros(shape, getattr(ml_dtypes, dtype))] * 2
    with pytest.raises(NotImplementedError, match="8-bit q, k, v on several ranks") as of_call:
        distributed.attention(x, x, x, comm=comm, **scales)
    with pytest.raises(NotImplementedError, match=re.escape(str(of_call.value))):
        distributed.explain(shape, shape, size=2, dtype=dtype, **scales)


def _call(name, comm, x, words):
    if name == "explain":
        return distributed.explain(X.shape, X.shape, size=2, **words)
    if name.endswith("shard"):
        return getattr(distributed, name)(X if name == "shard" else x, comm=comm)
    saved = (x, [a[..., 0] for a in x]) if name == "attention_backward" else ()
    first = (x,) if name == "attention_backward" else ()
    return getattr(distributed, name)(*first, x, x, x, *saved, comm=comm, **words)


@pytest.mark.parametrize("keyword", ["out", "grads_out", "workspace", "config"])
@pytest.mark.parametrize("name", ["attention", "attention_backward", "attention_vjp", "explain"])
def test_parameters_that_only_one_gpu_has_are_named(name, keyword):
    with pytest.raises(TypeError, match=f"^{keyword}: got an unknown keyword") as found:
        _call(name, distributed.simulated(2), [X, X], {keyword: None})
    assert "leave it out: ranks" in str(found.value)
    assert f"attention(q, k, v, {keyword}=...)" not in str(found.value)


@pytest.mark.parametrize("name", ["attention", "attention_backward", "shard", "unshard"])
def test_functions_in_a_captured_stream_are_refused_by_name(name, monkeypatch):
    """Both modules ask before they compute. The refusal itself is the one of quantize."""
    comm, x = distributed.simulated(2), [X, X]

    def refuse(library, function):
        assert library is np
        raise RuntimeError(f"{function}: cannot allocate")

    for module in (_run, _rows):
        monkeypatch.setattr(module, "refuse_captured", refuse)
    with pytest.raises(RuntimeError, match=f"^distributed.{name}: cannot allocate"):
        _call(name, comm, x, {})
    assert not comm.sent
