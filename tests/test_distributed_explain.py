"""Which method is chosen, and does explain tell what a call would do, and what it cannot tell?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cuflash import distributed
from cuflash.distributed._traffic import Extents, candidates, chosen

SHAPE = (8, 64, 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"ranks_per_host": 0}, "ranks_per_host: got 0, expected a positive int"),
        ({"ranks_per_host": 3}, "ranks_per_host: got 3, expected a divisor of the 4 ranks"),
        ({"memory": "1 GB"}, "memory: got '1 GB', expected an int"),
        ({"dtype": "f3"}, "dtype: got 'f3', expected a floating dtype"),
        ({"size": 0}, "size: got 0, expected a positive int"),
        ({"size": 2**17}, "size: got 131072, expected at most 65536"),
        ({"memory": 2**60}, "memory: got 1152921504606846976, expected at most 281474976710656"),
        ({"q": 8}, "q: got 8, expected a tuple of at least two ints >= 0"),
        ({"q": (8, -1, 16)}, r"q: got \(8, -1, 16\), expected a tuple of at least"),
        ({"q": (2**30, 2**30, 16)}, r"q: got .*, expected at most 32 axes, and fewer than 2.60"),
        ({"k": ()}, r"k: got \(\), expected a tuple"),
    ],
)
def test_what_explain_cannot_tell_is_named(words, message):
    shapes = [words.get(name, SHAPE) for name in "qk"]
    others = {name: word for name, word in words.items() if name not in "qk"}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        distributed.explain(*shapes, **{"size": 4} | others)


def test_ranks_of_one_host_are_explained_as_such():
    def last(**words):
        return distributed.explain(SHAPE, SHAPE, size=4, **words).splitlines()[-1]

    assert last(ranks_per_host=4) == last()
    assert "several hosts" in last(ranks_per_host=2)


@pytest.mark.parametrize(("rows", "most"), [(64, 16), (65, 17), (144, 48), (2, 2)])
def test_the_most_queries_of_a_rank(rows, most):
    """explain counts a rank's most queries as `positions` does; chunks of 144 start at 16n."""
    shape = (8, rows, 16)
    text = distributed.explain(shape, shape, size=4)
    assert text.startswith(f"4 ranks, up to {most} queries each")
    held = [len(distributed.positions(rows, rank, 4)) for rank in range(4)]
    assert max(held) == most


def test_the_longest_sequence_follows_from_the_bytes_of_a_token():
    """The ring's longest sequence is that of its memory, added up by hand.

    A rank holds q, k, v, out and lse, float32 sums of out and lse, one part of both, and the keys
    and values of two ranks.
    """
    heads, heads_kv, dim, ranks = 32, 8, 128, 8
    own = 2 * dim * (2 * heads + 2 * heads_kv) + 4 * heads
    sums = 4 * dim * heads + 4 * heads * (dim + 1)
    slots = 2 * 2 * 2 * dim * heads_kv
    longest = (80 << 30) * ranks // (own + sums + slots)
    shapes = (heads, 65536, dim), (heads_kv, 65536, dim)
    lines = distributed.explain(*shapes, size=ranks, enable_gqa=True).splitlines()
    (ring,) = (line.split() for line in lines if line.startswith("ring"))
    assert int(ring[5].replace(",", "")) == longest
    assert "tokens in 80 GiB a rank" in lines[1]


def test_the_longest_sequences_of_the_docs():
    text = (Path(__file__).parents[1] / "docs" / "distributed.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) on (\d+) \| (\d+) \| (.*) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 4
    for heads, heads_kv, ranks, cells in rows:
        q, k = ((int(h), 1 << 20, 128) for h in (heads, heads_kv))
        lines = distributed.explain(q, k, size=int(ranks), enable_gqa=True).splitlines()
        of = {line.split()[0]: line.split()[5:] for line in lines if len(line.split()) == 7}
        told = [
            ", ".join(f"{int(n.replace(',', '')) / 1e6:.1f}" for n in of[method])
            for method in ("ring", "ulysses", "all_gather")
        ]
        assert told == cells.split(" | ")


@pytest.mark.parametrize("heads_kv", [32, 8])
@pytest.mark.parametrize("size", [2, 4, 16])
def test_the_bytes_of_a_smaller_ring_of_the_docs(size, heads_kv):
    heads, dim = 32, 128
    q, kv, rows = heads * dim, 2 * heads_kv * dim, heads  # elements of a token
    forward = 2 * (2 * q + kv) + 4 * rows + 4 * q + 2 * 2 * kv
    gradient = forward + 2 * (2 * q + kv) + 4 * rows + 2 * 4 * kv
    told = []
    for kernels in (False, True):
        extents = replace(of_heads(heads, heads_kv), kernels=kernels)
        own = next(c for c in candidates(extents, size) if c.method == "ring")
        told.append([(c.taken + c.held) * size / (1 << 20) for c in (own.forward, own.backward)])
    (whole, without), (_, scratch) = told
    part = 4 * (q + rows)
    ratios = whole / forward, (whole - part) / forward, without / gradient, scratch / gradient
    ranks = "2 ranks" if size == 2 else "4 and more"
    row = f"| {heads} on {heads_kv}, {ranks} | {' | '.join(f'{r:.2f}' for r in ratios)} |"
    assert row in (Path(__file__).parents[1] / "docs" / "distributed.md").read_text("utf-8")


def test_several_hosts_exchange_heads_within_one():
    extents = Extents(64, 64, (8, 4), (8, 4), (8, 4), (8, 4), np.dtype(np.float32))
    own, _ = chosen("auto", extents, 8, None, per_host=4)
    assert (own.method, own.across) == ("usp", 4)
    few = Extents(64, 64, (3, 4), (3, 4), (3, 4), (3, 4), np.dtype(np.float32))
    assert chosen("auto", few, 8, None, per_host=4)[0].method == "ring"


def test_heads_are_exchanged_on_one_host_by_all_ranks_or_none():
    extents = Extents(64, 64, (4, 4), (4, 4), (4, 4), (4, 4), np.dtype(np.float32))
    assert chosen("auto", extents, 8, None)[0].method == "ring"
    assert chosen("usp", extents, 8, None)[0].across == 4


def of_heads(heads, heads_kv, rows=1 << 20):
    shapes = [(n, 128) for n in (heads, heads_kv, heads_kv, heads)]
    return Extents(rows, rows, *shapes, np.dtype(np.float16))


@pytest.mark.parametrize(
    ("extents", "size", "memory", "method"),
    [
        (of_heads(32, 32), 2, None, "ring"),  # keys travel while queries are multiplied
        (of_heads(32, 32, 4096), 2, None, "ring"),
        (of_heads(32, 32, 4095), 2, None, "ulysses"),
        (of_heads(32, 8, 1024), 8, None, "ring"),
        (of_heads(32, 8, 1023), 8, None, "ulysses"),
        (of_heads(32, 32), 2, 65_536 << 20, "ulysses"),
        (of_heads(32, 32), 2, (65_536 << 20) - 1, "all_gather"),
        (of_heads(32, 32), 2, 20_000 << 20, "all_gather"),  # only the forward of ulysses fits
        (of_heads(32, 8), 8, 0, "ulysses"),  # nothing fits, and it needs the least memory
        (of_heads(32, 2), 8, None, "ring"),  # it sends as many bytes as all_gather
    ],
)
def test_auto_takes_the_ring_or_the_fewest_bytes_that_fit(extents, size, memory, method):
    assert chosen("auto", extents, size, memory)[0].method == method


def test_auto_counts_results():
    """A method whose buffers alone would fit is not taken."""
    extents = of_heads(32, 8)
    own, _ = chosen("auto", extents, 2, None)
    results = (1 << 19) * (32 + 2 * 8) * 128 * 2
    assert chosen("auto", extents, 2, own.taken)[0] == own
    assert chosen("auto", extents, 2, own.taken - results)[0].method != own.method


def test_auto_takes_what_fits():
    """The ring is taken: it sends as many bytes as all_gather and keeps fewer."""
    extents = Extents(
        1 << 20, 1 << 20, (3, 128), (1, 128), (1, 128), (3, 128), np.dtype(np.float16)
    )
    assert chosen("auto", extents, 8, None)[0].method == "ring"
    assert chosen("auto", extents, 8, 1 << 30)[0].method == "ring"
