"""How long do the import of the library, its first call and its second call take?

overhead.py runs this in a process of its own; it prints one JSON object, milliseconds by name. The
arrays of the first call are on the device before its time begins, so CuPy is imported and CUDA's
context exists. The time ends when the device has finished, and includes everything that cuflash
imports, looks up, compiles or loads.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np  # imported first: its time is not part of the import of cuflash

start = time.perf_counter()
import cuflash  # noqa: E402

imported = time.perf_counter()


def main(dtype: str, pass_: str) -> dict[str, float]:
    """Time the first and the second call, each until the device has finished."""
    import cupy

    from cuflash.tuning._workload import DTYPES

    host = np.random.default_rng(0).standard_normal((4, 1, 8, 128, 64)).astype(DTYPES[dtype])
    q, k, v, dout = (cupy.asarray(a.view(np.uint8)).view(host.dtype) for a in host)

    def synchronized(call: Callable[[], Any]) -> float:
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        call()
        cupy.cuda.Device().synchronize()
        return 1e3 * (time.perf_counter() - begin)

    def forward() -> Any:
        return cuflash.attention(q, k, v, causal=True, return_lse=True)

    def backward(out: Any, lse: Any) -> Any:
        return cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)

    calls = {"fwd": forward, "fwd+bwd": lambda: backward(*forward())}
    call = calls.get(pass_) or functools.partial(backward, *forward())
    return {"first": synchronized(call), "second": synchronized(call)}


if __name__ == "__main__":
    times = {"import": 1e3 * (imported - start)}
    if len(sys.argv) == 3:
        times |= main(*sys.argv[1:])
    print(json.dumps(times))
