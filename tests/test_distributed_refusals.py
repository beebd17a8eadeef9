"""Are options that differ, and calls that ranks cannot make, refused with an answer that helps?"""

from __future__ import annotations

import numpy as np
import pytest

import cuflash
from cuflash import distributed
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
