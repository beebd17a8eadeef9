"""Forward calls of several problems, one launch each, in a process that a profiler watches."""

from __future__ import annotations

import json
import sys

from cuflash._bench.workload import Workload


def main() -> None:
    """Run what comes on standard input: a list of pairs, a problem's fields and a tile or null."""
    import cupy

    import cuflash
    from cuflash import tuning
    from cuflash.tuning._kernels import with_tile

    for given, tile in json.load(sys.stdin):
        work = Workload.from_json(given)
        ((q, k, v, _),) = work.inputs(cupy)
        options = cuflash.Options(**work.score_options(cupy))
        config = None
        if tile is not None:
            kernel = "forward_sm80" if "num_warps" in tile else None
            config = with_tile(tuning.space(work, kernel).default, tile)
        cuflash.attention(q, k, v, options=options, return_lse=True, config=config)
        cupy.cuda.Device().synchronize()
        del q, k, v
        cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
