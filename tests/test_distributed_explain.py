"""Does explain tell what a sharded call would do, and name what it cannot tell?"""

from __future__ import annotations

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
    ],
)
def test_what_explain_cannot_tell_is_named(words, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        distributed.explain(SHAPE, SHAPE, **{"size": 4} | words)


def test_ranks_of_one_host_are_explained_as_such():
    def last(**words):
        return distributed.explain(SHAPE, SHAPE, size=4, **words).splitlines()[-1]

    assert last(ranks_per_host=4) == last()
    assert "several hosts" in last(ranks_per_host=2)
