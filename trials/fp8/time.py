"""How fast is each variant, beside our bfloat16 forward and cuDNN's of 8 bits?

    python trials/fp8/time.py [--head-dim 128] [--seqlen 8192] [--json FILE]

Needs an H100. 16,384 tokens, hidden size 2048, as in docs/speed.md. Every call of a cell is a CUDA
graph; they are timed in turns by the library's own clock. cuDNN is timed where its Python frontend
(`import cudnn`) and torch are there; that call was written without a GPU.
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
from variants import CAUSAL, VARIANTS, used

import cuflash
from cuflash._timing.clock import DeviceClock
from support.float8 import on_gpu

TOKENS, HIDDEN = 16_384, 2048
SEQLENS = (2048, 4096, 8192, 16_384)
NAMES = ("q_scale", "k_scale", "v_scale")


def graph_of(stream: Any, call: Callable[[], Any]) -> Callable[[], None]:
    """What replays a call; compiled before it is captured."""
    call()
    stream.synchronize()
    stream.begin_capture()
    call()
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def cudnn_call(q: Any, k: Any, v: Any, *, causal: bool) -> Callable[[], Any]:
    """The forward of 8 bits of cuDNN; arrays are (batch, heads, seqlen, head_dim) of torch."""
    import cudnn
    import torch

    one = torch.ones((1, 1, 1, 1), device="cuda")
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    operands = [graph.tensor_like(x) for x in (q, k, v)]
    scales = [graph.tensor_like(one) for _ in range(6)]
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        *operands, *scales, is_inference=True, attn_scale=q.shape[-1] ** -0.5,
        use_causal_mask=causal,
    )  # fmt: skip
    out = torch.empty_like(q)
    o.set_output(True).set_dim(out.shape).set_stride(out.stride())
    largest = [torch.empty_like(one) for _ in range(2)]
    for tensor in (amax_s, amax_o):
        tensor.set_output(True).set_dim(one.shape).set_stride(one.stride())
        tensor.set_data_type(cudnn.data_type.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    given = dict(zip(operands, (q, k, v), strict=True)) | dict.fromkeys(scales, one)
    given |= {o: out, amax_s: largest[0], amax_o: largest[1]}
    workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
    return lambda: graph.execute(given, workspace)


def measure(clock: DeviceClock, head_dim: int, seqlen: int, causal: bool) -> dict[str, float]:
    """Milliseconds by name."""
    shape = (TOKENS // seqlen, HIDDEN // head_dim, seqlen, head_dim)
    rng = np.random.default_rng(0)
    x = [rng.standard_normal(shape, dtype=np.float32).astype(bfloat16) for _ in range(3)]
    calls: dict[str, Callable[[], Any]] = {}
    with clock.scope():
        wide = [cupy.asarray(a) for a in x]
        out = cupy.empty(shape, bfloat16)
        calls["bfloat16"] = graph_of(
            clock.stream, lambda: cuflash.attention(*wide, causal=causal, out=out)
        )
        made = [cuflash.quantize(a) for a in x]
        narrow = [on_gpu(cupy, m.array) for m in made]
        scales = {n: cupy.asarray(m.scale) for n, m in zip(NAMES, made, strict=True)}
        results = {}
        for name, changes in VARIANTS[head_dim].items():
            results[name] = own = cupy.empty(shape, bfloat16)
            with used(changes):
                calls[name] = graph_of(
                    clock.stream,
                    lambda own=own: cuflash.attention(*narrow, causal=causal, out=own, **scales),
                )
        try:
            import torch

            tensors = [
                torch.as_tensor(a.view(np.uint8), device="cuda").view(torch.float8_e4m3fn)
                for a in narrow
            ]
            calls["cudnn"] = cudnn_call(*tensors, causal=causal)
            calls["cudnn"]()
        except Exception as error:
            calls.pop("cudnn", None)
            print(f"cudnn: {type(error).__name__}: {error}")
        found = clock.measure(calls, budget_ms=400.0)
    return {name: measured.ms for name, measured in found.items()}


def main() -> int:
    """Measure, print."""
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--head-dim", type=int, choices=VARIANTS, action="append")
    p.add_argument("--seqlen", type=int, choices=SEQLENS, action="append")
    p.add_argument("--json", type=Path)
    arguments = p.parse_args()
    clock, rows = DeviceClock(), []
    for head_dim in arguments.head_dim or VARIANTS:
        ratios: dict[str, list[float]] = {}
        for seqlen in arguments.seqlen or SEQLENS:
            for causal in CAUSAL:
                ms = measure(clock, head_dim, seqlen, causal)
                flop = 4 * TOKENS * seqlen * HIDDEN / (2 if causal else 1)
                for name, own in ms.items():
                    ratios.setdefault(name, []).append(ms["bfloat16"] / own)
                    rows.append({"head_dim": head_dim, "seqlen": seqlen, "causal": causal,
                                 "name": name, "ms": own, "tflops": flop / own / 1e9})  # fmt: skip
                    mask = "causal" if causal else "full  "
                    speed = f"{own:7.3f} ms {flop / own / 1e9:5.0f} TFLOP/s"
                    print(f"{head_dim:3} {seqlen:6} {mask} {name:28} {speed}", flush=True)
        for name, own in ratios.items():
            mean = statistics.geometric_mean(own)
            print(f"{head_dim:3} {name:28} {mean:.3f} times the speed of bfloat16", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
