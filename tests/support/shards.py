"""How do simulated ranks make a call of whole arrays, and how are results put together?

In tests of sockets each rank has a thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cuflash import distributed
from cuflash._problem.option_table import FIELDS
from cuflash.distributed import _launchers

QKV = ("q", "k", "v")


def has_rows(array: Any, axis: int) -> bool:
    """Return whether an option has a value for each query, not one for all."""
    return array is not None and array.ndim >= -axis and array.shape[axis] != 1


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new NumPy arrays with NaN, as pool memory may be, so that unwritten elements show."""

    def poisoned(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def made(*given: Any, **named: Any) -> np.ndarray:
            array = make(*given, **named)
            array.reshape(-1).view(np.uint8)[...] = 0xFF
            return array

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", poisoned(np.empty))
        patch.setattr(np, "empty_like", poisoned(np.empty_like))
        yield


def in_threads(size: int, run: Callable[[Any], Any], **how: Any) -> list[Any]:
    """Return what ``run(communicator)`` returns or raises on each rank; lists have one per rank."""
    limits = {"op_timeout": 20.0, "init_timeout": 10.0, "transport": "host"}
    how = limits | {"address": f"127.0.0.1:{_launchers.free_port()}"} | how
    found: dict[int, Any] = {}

    def rank_of(rank: int) -> None:
        own = {n: a[rank] if isinstance(a, list) else a for n, a in how.items()}
        try:
            comm = distributed.connect(rank, size, secret="long enough", **own)
            with contextlib.closing(comm):
                found[rank] = run(comm)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(size)]


class Shards:
    """Cuts arguments of a whole call among simulated ranks, and joins results."""

    def __init__(self, size: int, layout: str, method: str) -> None:
        self.comm = distributed.simulated(size)
        self.how = {"comm": self.comm, "layout": layout, "method": method}

    def cut(self, array, axis=-2):
        layout = self.how["layout"]
        return distributed.shard(array, comm=self.comm, layout=layout, axis=axis)

    def whole(self, parts, axis=-2):
        layout = self.how["layout"]
        found = distributed.unshard(parts, comm=self.comm, layout=layout, axis=axis)
        assert all(np.array_equal(found[0], other, equal_nan=True) for other in found)
        return found[0]

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options, cut to the rows of each rank where they have rows."""
        own = dict(options)
        for name in ("bias", "mask"):
            if has_rows(own.get(name), -2):
                own[name] = self.cut(own[name])
        if "segment_ids" in own:
            of_queries, of_keys = own["segment_ids"]
            if has_rows(of_queries, -1):
                own["segment_ids"] = [(ids, of_keys) for ids in self.cut(of_queries, -1)]
        return own

    def forward(self, q, k, v, **options):
        own, cut = self.options(options), map(self.cut, (q, k, v))
        with poisoned_memory():
            return distributed.attention(*cut, return_lse=True, **own, **self.how)

    def gradients(self, dout, q, k, v, results, wrt, dlse=None, **options):
        own, cut = self.options(options), [*map(self.cut, (dout, q, k, v))]
        own["dlse"] = None if dlse is None else self.cut(dlse, -1)
        saved = [r.out for r in results], [r.lse for r in results]
        with poisoned_memory():
            parts = distributed.attention_backward(*cut, *saved, wrt=wrt, **own, **self.how)
        found = {}
        for name in wrt:
            own = [getattr(part, FIELDS[name]) for part in parts]
            rows = name in QKV or (name == "bias" and has_rows(options["bias"], -2))
            if name == "bias" and not rows and all(part.shape[-2] == 1 for part in cut[1]):
                found[name] = sum(own)  # the row of a rank with one query is its own
                continue
            found[name] = self.whole(own) if rows else own[0]
            assert rows or all(np.array_equal(own[0], other) for other in own)
        return found
