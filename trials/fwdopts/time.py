"""How long do masks and biases take, the new way and the old, beside none and beside PyTorch?

    python trials/fwdopts/time.py [--seconds 300] [--rounds 6] [group ...]

Variants of a row run in turns, several rounds; a figure is the least of the rounds' medians. The
old way is the same tree with the new choice switched off. Groups: forward, gradient, dbias, width.
Peers are left out where PyTorch is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import cupy  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import cuflash  # noqa: E402
from cuflash._kernels import backward_dscore_sm80, forward_sm90, fused_backward  # noqa: E402
from cuflash._launch import plan_cache  # noqa: E402
from cuflash._select import score_sums  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)
Call = Callable[[], Any]


@contextlib.contextmanager
def the_old_way() -> Iterator[None]:
    """Masks and biases where they lie, sums of a bias's gradient in float32, no tile of 80."""
    rows = tuple(row for row in forward_sm90.ROWS if row.head_dims != (80, 80))
    plan_cache.forget()
    with (
        mock.patch.object(forward_sm90, "look_up_stages", lambda _request: {}),
        mock.patch.object(forward_sm90, "ROWS", rows),
        mock.patch.object(fused_backward, "bias_stages", lambda _request: 0),
        mock.patch.object(backward_dscore_sm80, "WIDEST_AHEAD", 0),
        mock.patch.object(score_sums, "_dealt_out", lambda _problem, own, _num_sms: own),
    ):
        yield
    plan_cache.forget()


def captured(call: Call) -> Call:
    """A forward as a graph, without the host's time."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    graph.upload(stream)
    stream.synchronize()
    return lambda: graph.launch(stream=cupy.cuda.get_current_stream())


def milliseconds(call: Call, repeats: int) -> float:
    """Median of some runs, by events."""
    times = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end))
    return float(np.median(times))


def arrays(shape: tuple[int, ...], *more: tuple[int, ...], dtype: Any = BF16) -> list[Any]:
    rng = cupy.random.default_rng(1)
    return [rng.standard_normal(s, np.float32).astype(dtype) for s in (shape, *more)]


def forward_of(shape: tuple[int, ...], options: dict[str, Any]) -> Call:
    q, k, v = arrays(shape, shape, shape)
    out, lse = cupy.empty(shape, BF16), cupy.empty(shape[:-1], np.float32)
    return lambda: cuflash.attention(q, k, v, out=(out, lse), return_lse=True, **options)


def gradient_of(shape: tuple[int, ...], options: dict[str, Any], wrt: tuple[str, ...]) -> Call:
    q, k, v, dout = arrays(shape, shape, shape, shape)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    return lambda: cuflash.attention_backward(dout, q, k, v, out, lse, wrt=wrt, **options)


def peers_of(shape: tuple[int, ...], options: dict[str, Any], wrt: tuple[str, ...]) -> dict:
    """Calls of PyTorch's attention by backend; empty without PyTorch."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    tensors = [
        torch.from_dlpack(x.view(np.uint16)).view(torch.bfloat16)
        for x in arrays(shape, shape, shape, shape)
    ]
    q, k, v, dout = tensors
    bias = options.get("bias", options.get("mask"))
    if bias is not None:
        if bias.dtype == BF16:
            bias = torch.from_dlpack(bias.view(np.uint16)).view(torch.bfloat16)
        elif bias.dtype == np.bool_:
            bias = torch.from_dlpack(bias.view(np.uint8)).view(torch.bool)
        else:
            bias = torch.from_dlpack(bias)
        bias = bias.expand(*shape[:-2], *bias.shape[-2:])
    stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)
    leaves = [q, k, v] + ([bias.clone()] if "bias" in wrt else [])
    found = {}
    for name, backend in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION), ("eff", SDPBackend.EFFICIENT_ATTENTION),
        ("math", SDPBackend.MATH),
    ):  # fmt: skip
        if name == "math" and np.prod(shape[:-1]) * shape[-2] > 1 << 30:
            continue

        def forward(backend: Any = backend) -> Any:
            with torch.cuda.stream(stream), sdpa_kernel(backend):
                mask = leaves[3] if "bias" in wrt else bias
                return torch.nn.functional.scaled_dot_product_attention(*leaves[:3], mask)

        try:
            if not wrt:
                with torch.no_grad():
                    forward()
                found[name] = torch.no_grad()(forward)
                continue
            for leaf in leaves:
                leaf.requires_grad_(True)
            out = forward()

            def backward(out: Any = out) -> Any:
                with torch.cuda.stream(stream):
                    return torch.autograd.grad(out, leaves, dout, retain_graph=True)

            backward()
            found[name] = backward
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0][:90]}")
    return found


def rows() -> Iterator[tuple[str, str, tuple[int, ...], dict[str, Any], tuple[str, ...]]]:
    """Group, name, shape of q, options, and the gradients, none for the forward."""
    rng = cupy.random.default_rng(2)
    n = 4096
    for d in (128, 64):
        shape = (1, 2048 // d, n, d)
        pairs = {
            "mask": {"mask": rng.random((n, n), np.float32) < 0.5},
            "band mask": {"mask": cupy.abs(cupy.arange(n)[:, None] - cupy.arange(n)) < 512},
            "bias of all heads": {"bias": rng.standard_normal((n, n), np.float32).astype(BF16)},
            "bias": {"bias": rng.standard_normal((*shape[1:3], n), np.float32).astype(BF16)},
            "float32 bias of all heads": {"bias": rng.standard_normal((n, n), np.float32)},
            "mask of each head": {"mask": rng.random((*shape[1:3], n), np.float32) < 0.5},
            "causal bias": {"bias": cupy.triu(cupy.full((n, n), -cupy.inf, np.float32), 1)},
        }
        for name, options in pairs.items():
            yield "forward", f"{name}, d {d}", shape, options, ()
        for name in ("bias of all heads", "bias", "float32 bias of all heads"):
            yield "gradient", f"{name}, d {d}", shape, pairs[name], ("q", "k", "v")
    for batch, heads, n, d in ((256, 4, 256, 32), (128, 4, 768, 32), (32, 12, 512, 64)):
        bias = rng.standard_normal((1, heads, n, n), np.float32).astype(BF16)
        wrt = ("q", "k", "v", "bias")
        yield "dbias", f"{batch} x {heads} x {n}, d {d}", (batch, heads, n, d), {"bias": bias}, wrt
    bias = rng.standard_normal((1, 16, 4096, 4096), np.float32).astype(BF16)
    yield (
        "dbias",
        "1 x 16 x 4096, d 64",
        (1, 16, 4096, 64),
        {"bias": bias},
        ("q", "k", "v", "bias"),
    )
    for d, n in ((72, 4096), (80, 4096), (72, 1024), (80, 16384)):
        yield "width", f"d {d}, {n}", (16384 // n, 16, n, d), {}, ()
        yield "width", f"d {d}, {n} causal", (16384 // n, 16, n, d), {"causal": True}, ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("groups", nargs="*")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    for group, name, shape, options, wrt in rows():
        if arguments.groups and group not in arguments.groups:
            continue
        if time.monotonic() > end:
            print("out of time")
            return
        make = gradient_of if wrt else forward_of
        given = (shape, options, wrt) if wrt else (shape, options)
        none = (shape, {}, tuple(n for n in wrt if n != "bias")) if wrt else (shape, {})
        ready = (lambda call: call) if wrt else captured  # gradients allocate their results
        calls = {"new": ready(make(*given)), "none": ready(make(*none))}
        with the_old_way():
            calls["old"] = ready(make(*given))
        if not options:
            calls.pop("none")
        calls |= peers_of(shape, options, wrt)
        best: dict[str, float] = {}
        for _ in range(arguments.rounds):
            for variant, call in calls.items():
                with the_old_way() if variant == "old" else contextlib.nullcontext():
                    call()
                    best[variant] = min(best.get(variant, np.inf), milliseconds(call, 10))
        text = "  ".join(f"{variant} {found:.3f}" for variant, found in best.items())
        cost = f"  new/none {best['new'] / best['none']:.2f}" if "none" in best else ""
        others = [best[n] for n in ("cudnn", "eff", "math") if n in best]
        ratio = f"  peer/new {min(others) / best['new']:.2f}" if others else ""
        old = f"  old/new {best['old'] / best['new']:.2f}"
        print(f"{group:8} {name:32} {text} ms{cost}{old}{ratio}", flush=True)


if __name__ == "__main__":
    main()
