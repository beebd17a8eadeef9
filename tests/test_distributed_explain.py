"""Does explain tell what a sharded call would do, and name what it cannot tell?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cuflash import distributed

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
        ({"q": 8}, "q: got 8, expected a tuple of ints from 0 on, two or more"),
        ({"q": (8, -1, 16)}, r"q: got \(8, -1, 16\), expected a tuple of ints"),
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


def test_the_longest_sequence_follows_from_the_bytes_of_a_token():
    """Of the ring by hand: q, k, v, out and lse, float32 sums of out and lse, a part of them, and
    keys and values of two ranks."""
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
