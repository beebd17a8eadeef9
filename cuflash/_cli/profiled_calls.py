"""Calls of several problems, one launch of each, in a process that a profiler watches.

With ``--backward`` the gradient of each, too, behind its forward.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cuflash.tuning._workload import Workload


def main(*, backward: bool) -> None:
    """Run what comes on standard input: a list of pairs, a problem's fields and a tile or null."""
    import cupy

    import cuflash
    from cuflash import tuning
    from cuflash.tuning._kernels import with_tile

    for given, tile in json.load(sys.stdin):
        work = Workload.from_json(given)
        ((q, k, v, dout),) = work.inputs(cupy)
        common: dict[str, Any] = {
            "options": cuflash.Options(**work.score_options(cupy)),
            "precision": "tf32" if work.precision == "tf32" else None,
            "deterministic": work.deterministic,
        }
        config = None
        if tile is not None:
            kernel = "forward_sm80" if "num_warps" in tile else None
            config = with_tile(tuning.space(work, kernel).default, tile)
        out, lse = cuflash.attention(q, k, v, return_lse=True, config=config, **common)
        if backward:
            cuflash.attention_backward(dout, q, k, v, out, lse, **common)
        cupy.cuda.Device().synchronize()
        del q, k, v, dout, out, lse
        cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main(backward="--backward" in sys.argv[1:])
