"""How fast is each variant, beside our bfloat16 forward? 16,384 tokens, hidden size 2048.

    python trials/fp8/time.py [--head-dim 128] [--seqlen 8192] [--options] [--warm]

Every call of a cell is a CUDA graph; they are timed in turns by the library's own clock. `--options`
times calls with options by the row of the table; `--warm` compiles and times nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from ml_dtypes import bfloat16
from variants import VARIANTS, used

import cuflash
from cuflash._timing.clock import DeviceClock

TOKENS, HIDDEN = 16_384, 2048
SEQLENS = (512, 2048, 8192)
NAMES = ("q_scale", "k_scale", "v_scale")
MASKS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}}


def options_of(heads: int, seqlen: int) -> dict[str, dict[str, Any]]:
    slopes = np.exp2(-np.arange(1, heads + 1) / 2).astype(np.float32)
    return {
        "window": {"window": (seqlen // 4, 0)},
        "sink": {"sink": cupy.zeros(heads, np.float32)},
        "kv_lengths": {"kv_lengths": cupy.full((1, 1), seqlen - 300)},
        "lengths, causal": {"kv_lengths": cupy.full((1, 1), seqlen - 300), "causal": True},
    }


def normal(shape: tuple[int, ...], seed: int) -> Any:
    """Numbers of which a part is drawn, and repeated in other places."""
    count = int(np.prod(shape))
    drawn = np.random.default_rng(seed).standard_normal(count // 8 + 3, dtype=np.float32)
    return cupy.tile(cupy.asarray(drawn), 8)[:count].reshape(shape)


def measure(clock: Any, head_dim: int, seqlen: int, own: dict[str, Any], variants: Any,
            warm: bool) -> dict[str, float]:  # fmt: skip
    """Milliseconds by name."""
    shape = (TOKENS // seqlen, HIDDEN // head_dim, seqlen, head_dim)
    calls: dict[str, Callable[[], Any]] = {}
    with clock.scope():
        from_float = cupy.ElementwiseKernel(
            "float32 x", "uint16 y", "y = (unsigned short)((__float_as_uint(x) + 0x8000u) >> 16)",
            "to_bfloat16",
        )  # fmt: skip
        wide = [from_float(normal(shape, seed)).view(bfloat16) for seed in range(3)]
        out = cupy.empty(shape, bfloat16)
        made = [cuflash.quantize(a) for a in wide]
        scales = {n: m.scale for n, m in zip(NAMES, made, strict=True)}
        calls["bfloat16"] = clock.capture([lambda: cuflash.attention(*wide, out=out, **own)])
        results = {}
        for name, changes in variants.items():
            results[name] = to = cupy.empty(shape, bfloat16)
            with used(changes):
                calls[name] = clock.capture(
                    [lambda to=to: cuflash.attention(*(m.array for m in made), out=to, **own,
                                                     **scales)]
                )  # fmt: skip
        if warm:
            return {}
        if not own:
            from cuflash._launch import float8

            wides = [cupy.empty(shape, bfloat16) for _ in range(3)]
            calls["dequantise q, k, v"] = lambda: [
                float8.dequantized("q", m.array, m.scale, w) for m, w in zip(made, wides)
            ]
        found = clock.measure(calls, budget_ms=40.0)
    return {name: measured.ms for name, measured in found.items()}


def main() -> int:
    """Measure, print."""
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--head-dim", type=int, choices=VARIANTS, action="append")
    p.add_argument("--seqlen", type=int, choices=SEQLENS, action="append")
    p.add_argument("--options", action="store_true")
    p.add_argument("--warm", action="store_true")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    clock, rows = DeviceClock(), []
    for head_dim in a.head_dim or (64, 128):
        ratios: dict[str, list[float]] = {}
        for seqlen in a.seqlen or SEQLENS:
            cells = options_of(HIDDEN // head_dim, seqlen) if a.options else MASKS
            for mask, own in cells.items():
                variants = {"table": {}} if a.options else VARIANTS[head_dim]
                try:
                    ms = measure(clock, head_dim, seqlen, own, variants, a.warm)
                except Exception as error:
                    print(
                        f"{head_dim} {seqlen} {mask}: {type(error).__name__}: {error}", flush=True
                    )
                    continue
                flop = 4 * TOKENS * seqlen * HIDDEN / (2 if mask == "causal" else 1)
                for name, took in ms.items():
                    ratios.setdefault(name, []).append(ms["bfloat16"] / took)
                    rows.append({"head_dim": head_dim, "seqlen": seqlen, "mask": mask,
                                 "name": name, "ms": took, "tflops": flop / took / 1e9})  # fmt: skip
                    print(f"{head_dim:3} {seqlen:6} {mask:15} {name:34} {took:7.3f} ms "
                          f"{flop / took / 1e9:5.0f} TFLOP/s  {ms['bfloat16'] / took:.3f}",
                          flush=True)  # fmt: skip
        for name, found in ratios.items():
            mean = statistics.geometric_mean(found)
            print(f"{head_dim:3} {name:34} {mean:.3f} times the speed of bfloat16", flush=True)
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
