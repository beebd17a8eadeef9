"""How soon do the other ranks learn that one has died, and do their devices still work?

    python benchmarks/dead_rank.py --ranks 4                                 # a GPU each, over NCCL
    python benchmarks/dead_rank.py --ranks 4 --transport host --tokens 32    # no GPU

Starts a process for each rank. All repeat ring attention; the last rank kills itself before its
third call. Every other rank reports which rank the error named, after how many seconds, and how
long a call on its own device took afterwards. The figures go into the file of `scale_out.py`. Exit
status 0: every survivor named the right rank.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cuflash  # noqa: E402
from benchmarks.scale_out import read_state, save  # noqa: E402
from cuflash import distributed  # noqa: E402
from cuflash.distributed._launchers import free_port  # noqa: E402

HEADS, HEAD_DIM, CALLS = 8, 64, 10_000
LEAST_SECONDS = 120.0  # limit for each process, which includes its start


def one_rank(arguments: argparse.Namespace) -> int:
    """Compute until a rank dies; print what the error reported."""
    rank, size = arguments.rank, arguments.ranks
    comm: Any = distributed.connect(
        rank, size, address=arguments.address, transport=arguments.transport, op_timeout=60.0
    )
    xp: Any = np
    if arguments.transport == "nccl":
        import cupy as xp  # type: ignore[no-redef]
    q = xp.ones((HEADS, arguments.tokens, HEAD_DIM), np.float16)
    found: dict[str, Any] = {"rank": rank, "named": None}
    try:
        for number in range(CALLS):
            if rank == size - 1 and number == 2:
                print(json.dumps({"died": time.time()}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            distributed.attention(q, q, q, comm=comm, method="ring", causal=True)
            if xp is not np:
                xp.cuda.get_current_stream().synchronize()
            comm.check()
    except distributed.CommunicationError as error:
        found |= {"at": time.time(), "named": error.rank, "text": str(error)}
    begin = time.perf_counter()
    out = cuflash.attention(q, q, q, causal=True)
    found["finite"] = bool(xp.isfinite(out.astype(np.float32)).all())
    found["again_s"] = time.perf_counter() - begin
    print(json.dumps(found), flush=True)
    return 0


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start all ranks and collect what they print."""
    environment = os.environ | {"CUFLASH_SECRET": secrets.token_hex()}
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, __file__, "--ranks", str(arguments.ranks), "--address", address]
    command += ["--transport", arguments.transport, "--tokens", str(arguments.tokens)]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(arguments.ranks)
    ]
    try:
        told = [
            json.loads(process.communicate(timeout=LEAST_SECONDS)[0].splitlines()[-1])
            for process in processes
        ]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    died = told.pop()["died"]
    return {
        "kind": "dead",
        "named": [each["named"] for each in told],
        "seconds": max(each.get("at", float("inf")) - died for each in told),
        "again_s": max(each["again_s"] for each in told),
        "finite": all(each["finite"] for each in told),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank, or all of them; 0 if all survivors named the rank that died."""
    parser = argparse.ArgumentParser(description="What survivors of a dead rank see.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transport", choices=("nccl", "host"), default="nccl")
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--file", type=Path, default=Path("scale-out.json"))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rank is not None:
        return one_rank(arguments)
    found = measured(arguments)
    state = read_state(arguments.file)
    state.setdefault("cells", {})[f"dead {arguments.ranks} {arguments.transport}"] = found
    save(state, arguments.file)
    print(json.dumps(found))
    right = [arguments.ranks - 1] * (arguments.ranks - 1)
    return 0 if found["named"] == right and found["finite"] else 1


if __name__ == "__main__":
    sys.exit(main())
