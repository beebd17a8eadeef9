"""What does a fresh process wait for: importing the library, its first call, its second?

Run by overhead.py in a process of its own; prints one JSON object, milliseconds by name. The first
call is timed from where its arrays lie on the device, so that CuPy is imported and CUDA's context
exists, until the device has finished; what cuflash imports, looks up, compiles or loads is in it.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np  # imported first: what counts is the time on top of NumPy

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
