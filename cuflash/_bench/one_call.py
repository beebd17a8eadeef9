"""Two forward calls of a problem, in a process that a profiler watches: the first one compiles."""

from __future__ import annotations

import json
import sys

from cuflash._bench.workload import Workload


def main(given: str) -> None:
    """Run the problem whose fields are given as JSON."""
    import cupy

    import cuflash

    work = Workload.from_json(json.loads(given))
    ((q, k, v, _),) = work.inputs(cupy)
    options = cuflash.Options(**work.score_options(cupy))
    for _ in range(2):
        cuflash.attention(q, k, v, options=options, return_lse=True)
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
