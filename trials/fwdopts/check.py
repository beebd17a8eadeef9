"""Are the new ways of masks, biases and their gradients right? Every case within the error budget.

    python trials/fwdopts/check.py [--processes 12] [name ...]

Runs each case in one of several processes, since compiling takes most of the time; names select
cases that contain one of them. Prints a line for each; the exit status is the number that failed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

import numpy as np  # noqa: E402
from ml_dtypes import bfloat16  # noqa: E402

_LOWEST = float(np.finfo(np.float32).min)


def a_bias(kind: str, shape: tuple[int, ...], dtype: Any) -> Any:
    rng = np.random.default_rng(4)
    bias = rng.standard_normal(shape)
    if kind == "hides":  # keys of all rows, all keys of some rows, a triangle
        bias[..., shape[-1] // 3 : shape[-1] // 3 + 200] = -np.inf
        bias[..., 5:9, :] = -np.inf
        first = bias[..., : min(300, shape[-1])]
        first[..., ~np.tri(*first.shape[-2:], dtype=np.bool_)] = -np.inf
    elif kind == "stands for a mask":
        lowest = _LOWEST if dtype == np.float32 else -1e38
        bias = np.where(rng.random(shape) < 0.5, bias, lowest)
        bias[..., 400:] = lowest  # no key of the blocks that come first
        bias[..., 7, :] = lowest  # a row that sees all of them
    elif kind == "slopes":  # rows far below 0 in the blocks that come first
        rows, keys = (np.arange(n) for n in shape[-2:])
        bias = bias - 0.7 * np.abs(rows[:, None] - keys)
    elif kind == "rises":
        bias = bias + 40.0 * (np.arange(shape[-1])[::-1] // 128)
    return bias.astype(dtype)


def a_mask(kind: str, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(5)
    rows, keys = (np.arange(n) for n in shape[-2:])
    if kind == "band":
        return np.broadcast_to(np.abs(rows[:, None] - keys) < 90, shape).copy()
    if kind == "blocks":
        return np.broadcast_to(rows[:, None] // 100 == keys // 100, shape).copy()
    mask = rng.random(shape) < (0.02 if kind == "sparse" else 0.6)
    mask[..., 3, :] = False
    return mask


def _forward_cases() -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    bounds: dict[str, dict[str, Any]] = {
        "": {}, "causal": {"causal": True}, "lengths": {"q_lengths": 290, "kv_lengths": 1001},
    }  # fmt: skip
    for d, (name, extra) in itertools.product((64, 72, 96, 128), bounds.items()):
        for dtype in (bfloat16, np.float32):
            found[f"bias {np.dtype(dtype).name} {d} {name}"] = ("bias", d, "normal", dtype, extra)
        found[f"mask random {d} {name}"] = ("mask", d, "random", None, extra)
    for d, kind in itertools.product((64, 128), ("hides", "stands for a mask", "slopes", "rises")):
        dtype = np.float32 if d == 64 and kind != "hides" else bfloat16
        found[f"bias {kind} {d}"] = ("bias", d, kind, dtype, {})
    for d, kind in itertools.product((64, 128), ("sparse", "band", "blocks")):
        found[f"mask {kind} {d}"] = ("mask", d, kind, None, {"window": (700, 500)})
    for d in (72, 80):
        for name, extra in (*bounds.items(), ("window", {"window": (70, 20)})):
            found[f"none {d} {name}"] = ("none", d, "", None, extra)
    found["bias float16 128 sink"] = (
        "bias", 128, "normal", np.float16, {"sink": np.float32([1.0, -2.0, 0.0])},
    )  # fmt: skip
    found["bias and NaN keys"] = ("nan", 128, "hides", bfloat16, {})
    return found


def _gradient_cases() -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for d, dtype in itertools.product((32, 64, 128), (bfloat16, np.float32)):
        for name, extra in (("", {}), ("causal", {"causal": True})):
            case = ("one pass", d, "hides", dtype, extra)
            found[f"gradient bias {np.dtype(dtype).name} {d} {name}"] = case
    for d, dtype in itertools.product((32, 64), (bfloat16, np.float32)):
        for batch in ((64, 2), (2, 2)):
            case = ("dbias", d, batch, dtype, {"causal": d == 64})
            found[f"dbias {np.dtype(dtype).name} {d} batch {batch[0]}"] = case
    return found


CASES = _forward_cases() | _gradient_cases()


def run(name: str) -> tuple[str, str, float]:
    """One case; the text is empty where it is right."""
    start = time.perf_counter()
    try:
        found = _run(*CASES[name])
    except Exception:  # the parent prints what a case came to
        found = traceback.format_exc(limit=-3)
    return name, found, time.perf_counter() - start


def _run(what: str, d: int, kind: Any, dtype: Any, extra: dict[str, Any]) -> str:
    import cupy

    import cuflash
    from cuflash._launch import plan, plan_cache
    from cuflash.testing._budget import Budget
    from support import problems

    launched: list[Any] = []
    compile_kernel = plan.compile_kernel

    def noted(config: Any, device: int) -> Any:
        launched.append(config)
        return compile_kernel(config, device)

    plan.compile_kernel = noted
    plan_cache.forget()  # of an earlier case of this process: nothing would be noted
    batch, rows, keys = ((2, 3), 300, 1136)
    if what in ("one pass", "dbias"):
        batch, rows, keys = ((2, 3) if what == "one pass" else kind, 200, 264)
    options, wrt = dict(extra), ("q", "k", "v")
    if what == "mask":
        options["mask"] = a_mask(kind, (1, batch[-1], rows, keys))
    elif what == "dbias":
        own = 1 if batch[0] > 2 else batch[0]
        options["bias"] = a_bias("hides", (own, batch[-1], rows, keys), dtype)
        wrt = (*wrt, "bias")
    elif what != "none":
        options["bias"] = a_bias(kind, (1, batch[-1], rows, keys), dtype)
    element = np.float16 if dtype == np.float16 else bfloat16
    shapes = (*batch, rows, d), (*batch, keys, d), (*batch, keys, d)
    call = problems.make_call("normal", 3, element, *shapes, options=options, wrt=wrt)
    if what == "nan":
        k = call.k.copy()
        k[..., keys // 3 + 10 : keys // 3 + 100, :] = np.nan
        call = call.but(k=k)
    dout, q, k, v = (cupy.asarray(call.array(n)) for n in ("dout", "q", "k", "v"))
    on_device = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **on_device)
    (forward,) = (c for c in launched if c.computes == "out")
    if what not in ("one pass", "dbias"):
        assert forward.kernel == "forward_sm90", forward
        assert bool(forward.bias_stages) == (what in ("bias", "nan")), forward
        assert bool(forward.mask_stages) == (what == "mask"), forward
        assert d not in (72, 80) or forward.head_dim == 80, forward
    budget = Budget(call)
    budget.check_forward(out.get(), lse.get())
    if what not in ("one pass", "dbias"):
        again = cuflash.attention(q, k, v, **on_device)
        assert again.tobytes() == out.tobytes(), "other bits"
        return ""
    for deterministic in (True, False):
        grads = cuflash.attention_backward(
            dout, q, k, v, out, lse, wrt=wrt, deterministic=deterministic, **on_device
        )
        found = {n: getattr(grads, f"d{n}").get() for n in wrt}
        budget.check_backward(found, given=(out.get(), lse.get()))
    fused = next(c for c in launched if c.computes == "dqkv")
    assert fused.bias_stages or (d == 64 and dtype == np.float32), fused
    if what == "dbias":
        sums = next(c for c in launched if c.computes == "sums")
        assert sums.holds_bias, sums
        assert (sums.sums_dtype == "none") == (batch[0] > 2), sums
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    names = [n for n in CASES if not arguments.names or any(x in n for x in arguments.names)]
    failed = 0
    with multiprocessing.get_context("spawn").Pool(min(arguments.processes, 12)) as pool:
        for name, text, seconds in pool.imap_unordered(run, names, chunksize=1):
            failed += bool(text)
            print(f"{'WRONG' if text else 'right'}  {seconds:5.1f} s  {name}\n{text}", flush=True)
    print(f"{len(names) - failed} of {len(names)} right")
    return failed


if __name__ == "__main__":
    sys.exit(main())
