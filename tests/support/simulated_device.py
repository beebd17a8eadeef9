"""The simulated device of tests of sweeps, as a process: times follow from a formula.

The variable SIMULATED_TROUBLE says what goes wrong with which configuration: {key: kind}. Every
timed configuration is noted in the file SIMULATED_LOG, so that tests can count.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from cuflash.tuning._kernels import config_from_json, tile_of
from cuflash.tuning._processes import serve


def milliseconds(tile: dict[str, int]) -> float:
    """Return a smooth valley with its minimum at 128 rows, 96 keys and the most buffers."""
    distance = abs(tile["block_m"] - 128) / 64 + abs(tile["block_n"] - 96) / 32
    return 1.0 + 0.1 * distance + 0.01 * (8 - tile.get("num_stages", 0))


def main() -> None:
    trouble = json.loads(os.environ.get("SIMULATED_TROUBLE", "{}"))
    log = os.environ.get("SIMULATED_LOG")
    opened: dict[str, object] = {}

    def note(text: str) -> None:
        if log:
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def timed(given: dict[str, object]) -> dict[str, object]:
        tile = tile_of(config_from_json(given))
        key = ",".join(map(str, tile.values()))
        note(key)
        kind = trouble.get(key)
        if kind == "hang":
            time.sleep(3600)
        if kind == "exit":
            os._exit(77)
        if kind == "pause":
            time.sleep(1.0)
        if kind in ("error", "wrong", "crash"):
            return {"status": kind, "reason": f"asked to be {kind}"}
        shipped = milliseconds(tile_of(config_from_json(opened["default"])))
        ms = milliseconds(tile)
        return {"status": "ok", "ms": ms, "default_ms": shipped, "relative": ms / shipped}

    def answer(request: dict[str, object]) -> dict[str, object]:
        if request["do"] == "describe":
            device = os.environ.get("SIMULATED_NAME", "simulated")
            arch = os.environ.get("SIMULATED_ARCH", "sm_90")
            return {"status": "ok", "device": device, "arch": arch, "driver": "0", "nvrtc": "0"}
        if request["do"] == "open":
            note("open")
            opened.update(request)
            if trouble.get("open"):
                return {"status": "error", "reason": "out as shipped: rms error 1"}
            return {"status": "ok"}
        if not opened:
            return {"status": "error", "reason": "nothing is open"}
        if request["do"] == "final":
            tiles = [tile_of(config_from_json(given)) for given in request["configs"]]
            return {"ms": [milliseconds(tile) for tile in tiles], "clocks": None}
        return timed(request["config"])

    serve(answer)


if __name__ == "__main__":
    main()
