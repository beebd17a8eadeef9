# ruff: noqa: D102, C420
"""How long do masks and biases take, the new way and the old, beside none and beside PyTorch?

    python trials/fwdopts/time.py [--seconds 120] [group ...]
    python trials/fwdopts/time.py --plans          # without a GPU: which kernels each variant is
    python trials/fwdopts/time.py --compile        # fills the store of kernels, and ends

Every variant of a row is a CUDA graph of several calls, and graphs are replayed in turns: neither
the host's time nor the clocks' shows in a ratio. Groups: forward, dbias, gradient, width, narrow.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import cuflash  # noqa: E402
from cuflash._kernels import backward_dscore_sm80, forward_sm90, fused_backward  # noqa: E402
from cuflash._launch import plan_cache  # noqa: E402
from cuflash._problem.problem import describe  # noqa: E402
from cuflash._select import hardware, score_sums  # noqa: E402
from cuflash._select.choose import Wanted, choose  # noqa: E402
from cuflash.tuning._checking import difference  # noqa: E402
from cuflash.tuning._workload import Workload, _unfilled  # noqa: E402

BF16, F32, BOOL = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(bool)
GRAPH_MS = 4.0
QKV = ("q", "k", "v")


def _off_forward() -> list[Any]:
    rows = tuple(row for row in forward_sm90.ROWS if row.head_dims != (80, 80))
    return [
        mock.patch.object(forward_sm90, "look_up_stages", lambda _request: {}),
        mock.patch.object(forward_sm90, "ROWS", rows),
    ]


def _off_one_pass() -> list[Any]:
    return [mock.patch.object(fused_backward, "bias_stages", lambda _request: 0)]


def _off_sums() -> list[Any]:
    return [
        mock.patch.object(backward_dscore_sm80, "WIDEST_AHEAD", 0),
        mock.patch.object(score_sums, "_dealt_out", lambda _problem, own, _num_sms: own),
    ]


#: What of the new is turned off, or differs.
OFF: dict[str, tuple[Callable[[], list[Any]], ...]] = {
    "new": (),
    "old": (_off_forward, _off_one_pass, _off_sums),
    "new one pass": (_off_forward, _off_sums),
    "new sums": (_off_forward, _off_one_pass),
    "2 of q": (lambda: [mock.patch.object(forward_sm90, "_BIAS_BYTES", 2)],),
    "one part": (
        lambda: [
            mock.patch.object(
                score_sums, "_dealt_out",
                lambda problem, own, _num_sms: own._replace(
                    dtype=problem.bias.dtype.name, itemsize=problem.bias.dtype.itemsize
                ),
            )
        ],
    ),
}  # fmt: skip


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    plan_cache.forget()
    with contextlib.ExitStack() as stack:
        for patches in OFF.get(name, ()):
            for patch in patches():
                stack.enter_context(patch)
        yield
    plan_cache.forget()


class Row(NamedTuple):
    """A call: what differs from attention of bfloat16 over equal lengths."""

    group: str
    name: str
    shape: tuple[int, int, int, int]
    option: str = ""  # mask or bias
    of: tuple[tuple[int, ...], Any, str] = ((), None, "")  # shape, dtype and kind of its array
    wrt: tuple[str, ...] = ()
    more: tuple[str, ...] = ()  # variants beside new, old and none
    tiles: tuple[tuple[str, dict[str, Any]], ...] = ()  # variants of the tile of a forward
    causal: bool = False

    def variants(self) -> tuple[str, ...]:
        none = ("none",) if self.option else ()
        return ("new", *none, "old", *self.more, *(name for name, _ in self.tiles))


MASK_TILES = (
    ("no overlap", {"overlap_quarters": 0}),
    ("overlap 2", {"overlap_quarters": 2}),
)
WIDTH_TILES = (("overlap 2", {"overlap_quarters": 2}),)
BIAS_TILES = (
    ("overlap 2", {"overlap_quarters": 2}),
    ("2 of q", {"num_q_stages": 2}),
)
F32_TILES = (("no overlap", {"overlap_quarters": 0}), ("overlap 2", {"overlap_quarters": 2}))


def all_rows() -> Iterator[Row]:
    n, d = 4096, 128
    whole = (n, n)
    shape = (1, 16, n, d)

    def forward(group: str, shape: Any, d: int, tiles: bool) -> Iterator[Row]:
        def of(own: Any) -> Any:
            return own if tiles else F32_TILES

        yield Row(
            group, f"mask, d {d}", shape, "mask", (whole, BOOL, "random"), (), (), of(MASK_TILES)
        )
        yield Row(
            group,
            f"bias of all heads, d {d}",
            shape,
            "bias",
            (whole, BF16, ""),
            (),
            (),
            of(BIAS_TILES),
        )
        yield Row(
            group,
            f"bias, d {d}",
            shape,
            "bias",
            ((1, shape[1], n, n), BF16, ""),
            (),
            (),
            of(BIAS_TILES),
        )
        yield Row(
            group, f"float32 bias, d {d}", shape, "bias", (whole, F32, ""), (), (), of(F32_TILES)
        )
        yield Row(
            group,
            f"mask of each head, d {d}",
            shape,
            "mask",
            ((1, shape[1], n, n), BOOL, "random"),
            (),
            (),
            of(MASK_TILES),
        )
        yield Row(group, f"causal bias, d {d}", shape, "bias", (whole, F32, "causal"))
        yield Row(group, f"band mask, d {d}", shape, "mask", (whole, BOOL, "band"))

    yield from forward("forward", shape, d, True)
    for batch, heads, m, own in (
        (256, 4, 256, 32),
        (128, 4, 768, 32),
        (32, 12, 512, 64),
        (1, 16, 4096, 64),
    ):
        few = ("one part",) if m < 4096 else ()
        yield Row(
            "dbias",
            f"{batch} x {heads} x {m}, d {own}",
            (batch, heads, m, own),
            "bias",
            ((1, heads, m, m), BF16, ""),
            (*QKV, "bias"),
            ("new one pass", "new sums", *few),
        )
    for own in (128, 64):
        shape = (1, 2048 // own, n, own)
        for name, array in (("bias of all heads", whole), ("bias", (1, shape[1], n, n))):
            yield Row("gradient", f"{name}, d {own}", shape, "bias", (array, BF16, ""), QKV)
        yield Row("gradient", f"float32 bias, d {own}", shape, "bias", (whole, F32, ""), QKV)
    for own, m in ((72, 4096), (80, 4096), (72, 1024), (80, 16384)):
        for causal in (False, True):
            word = " causal" if causal else ""
            yield Row(
                "width",
                f"d {own}, {m}{word}",
                (16384 // m, 16, m, own),
                tiles=WIDTH_TILES,
                causal=causal,
            )
    yield from forward("narrow", (1, 32, n, 64), 64, False)


# ------------------------------------------------------------------------------- which kernels
def steps(row: Row, name: str, own: Any) -> tuple[Any, ...]:
    """Every kernel of a variant: of the forward, where no gradient is asked for."""
    with variant(name):
        q = _unfilled(row.shape, BF16)
        given: dict[str, Any] = {"causal": True} if row.causal else {}
        if row.option and name != "none":
            given[row.option] = _unfilled(row.of[0], row.of[1])
        problem = describe(q, q, q, cuflash.Options(**given))
        if not row.wrt:
            found = choose(problem, own)
            changes = dict(row.tiles).get(name)
            if changes is None:
                return found
            return choose(problem, own, override=found[0].config.replace(**changes))
        shapes = {n: q.shape for n in QKV}
        if "bias" in row.wrt and name != "none":
            shapes["bias"] = row.of[0]
        return choose(problem, own, wanted=Wanted(shapes, BF16, False, BF16))


def told(config: Any) -> str:
    """A kernel in one line."""
    names = (
        "block_m", "block_n", "num_stages", "num_q_stages", "overlap_quarters", "mask_stages",
        "bias_stages", "holds_bias", "blocks_per_sm", "sums_dtype", "head_dim",
    )  # fmt: skip
    return config.kernel + "".join(
        f" {n}={getattr(config, n)}" for n in names if hasattr(config, n)
    )


def kernels(rows: list[Row], own: Any) -> dict[Any, None]:
    every: dict[Any, None] = {}
    for row in rows:
        for name in row.variants():
            every |= dict.fromkeys(step.config for step in steps(row, name, own))
        for name in ("new", "none") if row.wrt else ():  # what the gradients are of
            every |= dict.fromkeys(step.config for step in steps(row._replace(wrt=()), name, own))
    return every


def compile_missing(rows: list[Row]) -> None:
    from cuflash._jit import compilation, cubin_cache
    from cuflash.tuning._facts import compile_all

    own = hardware.of_device(0)
    began = time.perf_counter()
    missing = [
        config for config in kernels(rows, own)
        if not cubin_cache.load_shared(
            compilation.shared_name(config, compilation.architecture(config, own.capability))
        )
    ]  # fmt: skip
    found = compile_all(missing, own, processes=14)
    for config, facts in found.items():
        if facts.error or facts.spill_bytes:
            print(f"  {told(config)}: {facts.error or f'spills {facts.spill_bytes} bytes'}")
    print(f"{len(missing)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)


# ------------------------------------------------------------------------------------ the calls
def array_of(xp: Any, row: Row, seed: int) -> Any:
    """The mask or bias of a row, in C order."""
    shape, dtype, kind = row.of
    random = xp.random.RandomState(seed)
    if kind == "band":
        return xp.abs(xp.arange(shape[-2])[:, None] - xp.arange(shape[-1])) < 512
    if kind == "causal":
        return xp.triu(xp.full(shape, -np.inf, F32), 1)
    if dtype == BOOL:
        return random.random_sample(shape, dtype=F32) < 0.5
    return random.standard_normal(shape, dtype=F32).astype(dtype)


class Ours:
    """Calls of cuflash, each on inputs of its own, and where they write."""

    def __init__(self, xp: Any, row: Row, inputs: list[Any], options: list[dict[str, Any]]) -> None:
        self.row, self.inputs, self.options = row, inputs, options
        q, k, v, _ = inputs[0]
        self.out = [(xp.empty(q.shape, BF16), xp.empty(q.shape[:-1], F32)) for _ in inputs]
        self.out_of_none = self.out
        if row.wrt:
            self.out = [cuflash.attention(*arrays[:3], return_lse=True, **own)
                        for arrays, own in zip(inputs, options, strict=True)]  # fmt: skip
            self.out_of_none = [
                cuflash.attention(*arrays[:3], return_lse=True) for arrays in inputs
            ]
        grads: dict[str, Any] = {
            f"d{n}": xp.empty_like(a) for n, a in zip(QKV, (q, k, v), strict=True)
        }
        self.grads = grads
        if "bias" in row.wrt:
            self.dbias = xp.empty_like(options[0]["bias"])
        sizes = [1]
        for name in ("new", "old"):
            with variant(name):
                sizes += [
                    cuflash.workspace_size(q, k, v, backward=bool(row.wrt), **own)
                    for own in (options[0], self.without(options[0]))
                ]
        self.room = xp.empty(max(sizes), np.uint8)

    def without(self, own: dict[str, Any]) -> dict[str, Any]:
        return {n: a for n, a in own.items() if n not in ("mask", "bias")}

    def calls(self, name: str, device: Any) -> list[Callable[[], Any]]:
        made, given = [], {"workspace": self.room}
        if name in dict(self.row.tiles):
            given["config"] = steps(self.row, name, device)[0].config
        outs = self.out_of_none if name == "none" else self.out
        for (q, k, v, dout), own, out in zip(self.inputs, self.options, outs, strict=True):
            own = self.without(own) if name == "none" else own
            wrt = tuple(n for n in self.row.wrt if name != "none" or n != "bias")
            if not wrt:
                made.append(lambda q=q, k=k, v=v, own=own, out=out: cuflash.attention(
                    q, k, v, return_lse=True, out=out, **given, **own
                ).out)  # fmt: skip
                continue
            grads = cuflash.Gradients(
                **self.grads, **({"dbias": self.dbias} if "bias" in wrt else {})
            )
            made.append(lambda q=q, k=k, v=v, dout=dout, own=own, out=out, wrt=wrt, grads=grads: (
                cuflash.attention_backward(
                    dout, q, k, v, *out, wrt=wrt, grads_out=grads, **given, **own
                )
            ))  # fmt: skip
        return made

    def result(self, found: Any) -> dict[str, Any]:
        if not self.row.wrt:
            return {"out": found.copy()}
        return {
            n: getattr(found, f"d{n}").copy()
            for n in self.row.wrt
            if getattr(found, f"d{n}") is not None
        }


def peers(
    row: Row, inputs: list[Any], options: list[dict[str, Any]]
) -> Iterator[tuple[str, Any, list[Any]]]:
    """Of each backend of PyTorch its implementation in benchmarks, and its calls."""
    import torch

    from benchmarks.peers import ScaledDotProduct, as_tensor

    class Beside(ScaledDotProduct):
        """Attention under a mask or a bias."""

        def function(self, work: Workload) -> Callable[..., Any]:
            from torch.nn.attention import SDPBackend, sdpa_kernel
            from torch.nn.functional import scaled_dot_product_attention

            backend, array = getattr(SDPBackend, self.backend), self.beside

            def call(q: Any, k: Any, v: Any) -> Any:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, array, is_causal=work.causal)

            return call

    b, h, n, d = row.shape
    work = Workload(b, h, h, n, n, d, d, "bfloat16", causal=row.causal)
    for name, backend in (
        ("eff", "EFFICIENT_ATTENTION"), ("cudnn", "CUDNN_ATTENTION"), ("fa2", "FLASH_ATTENTION"),
        ("math", "MATH"),
    ):  # fmt: skip
        if (name == "math" and (b * h * n * n > 1 << 29 or row.group == "width")) or (
            name == "fa2" and row.option
        ):
            continue
        own, calls = Beside(name, backend, ("bfloat16",)), []
        try:
            for arrays, given in zip(inputs, options, strict=True):
                if "bias" in row.wrt:
                    calls.append(own.bias_gradients(*arrays[:3], given["bias"], arrays[3]))
                    continue
                own.beside = None
                if row.option:
                    array = given[row.option]
                    tensor = (
                        torch.from_dlpack(array.view(np.uint8)).view(torch.bool)
                        if array.dtype == BOOL else as_tensor(array)
                    )  # fmt: skip
                    own.beside = tensor.expand(b, h, n, n)
                make = own.padded(work, "bwd" if row.wrt else "fwd", None)
                calls.append(make(*arrays))
            calls[0]()
        except Exception as error:
            print(f"  {name}: {str(error).splitlines()[0][:90]}")
            continue
        yield name, own, calls


def timed(clock: Any, row: Row, with_peers: bool) -> dict[str, float]:
    xp, device = clock.cupy, hardware.of_device(0)
    b, h, n, d = row.shape
    work = Workload(b, h, h, n, n, d, d, "bfloat16", causal=row.causal)
    beside = math.prod(row.of[0]) * row.of[1].itemsize if row.option else 0
    copies = min(
        4, clock.copies_to_leave_l2(work.input_bytes("bwd" if row.wrt else "fwd") + beside)
    )
    inputs = work.inputs(xp, copies)
    options: list[dict[str, Any]] = [
        ({"causal": True} if row.causal else {})
        | ({row.option: array_of(xp, row, i)} if row.option else {})
        for i in range(copies)
    ]
    ours = Ours(xp, row, inputs, options)
    held: list[Any] = [inputs, options, ours]
    graphs: dict[str, tuple[Any, int]] = {}
    truth: dict[str, Any] = {}
    alone: dict[str, float] = {}

    def add(name: str, calls: list[Any], capture: Callable[..., Any]) -> None:
        clock.stream.synchronize()
        calls[0]()
        about = min(clock.between_events(calls[0])[0] for _ in range(2))
        times = max(1, min(200, math.ceil(GRAPH_MS / (about * copies))))
        graphs[name] = (capture(clock, calls * times), times * copies)
        held.append(calls)

    for name in row.variants():
        try:
            with variant(name):
                calls = ours.calls(name, device)
                found = ours.result(calls[0]())
                add(name, calls, lambda clock, calls: clock.capture(calls))
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            continue
        if name == "none":
            continue
        truth = truth or found
        apart = max(difference(found[n], truth[n]) for n in truth)
        if not apart < 0.05:
            print(f"  {name}: NOT THE SAME, {apart:.2g} apart")
    if with_peers:
        for name, own, calls in peers(row, inputs, options):
            try:
                add(name, calls, own.capture)
            except Exception as error:
                print(f"  {name}: no graph, by events ({str(error).splitlines()[0][:90]})")
                alone[name] = statistics.median(clock.once(calls[0]) for _ in range(9))
    found = clock.measure_graphs(graphs, 60.0)
    return {name: own.ms for name, own in found.items()} | alone


def show(row: Row, ms: dict[str, float]) -> None:
    text = "  ".join(f"{name} {1e3 * own:.1f}" for name, own in ms.items())
    ratios = []
    if "none" in ms and "new" in ms:
        ratios.append(f"new/none {ms['new'] / ms['none']:.2f}")
    if "old" in ms and "new" in ms:
        ratios.append(f"old/new {ms['old'] / ms['new']:.2f}")
    others = {n: ms[n] for n in ("cudnn", "eff", "fa2", "math") if n in ms}
    if others and "new" in ms:
        best = min(others, key=lambda n: others[n])
        ratios.append(f"{best}/new {others[best] / ms['new']:.2f}")
    print(f"{row.group:8} {row.name:28} {', '.join(ratios)}\n    us: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("groups", nargs="*")
    given = parser.parse_args()
    rows = [row for row in all_rows() if not given.groups or row.group in given.groups]
    if given.plans:
        own = hardware.typical("sm_90")
        for row in rows:
            print(f"{row.group} {row.name}")
            for name in row.variants():
                text = ", ".join(told(s.config) + f" x{s.splits}" for s in steps(row, name, own))
                print(f"  {name:14} {text}")
        print(f"{len(kernels(rows, own))} kernels")
        return 0
    end = time.monotonic() + given.seconds
    warnings.simplefilter("ignore")  # PyTorch says of each backend why it does not serve
    compile_missing(rows)
    if given.compile:
        return 0
    from cuflash._launch import run
    from cuflash._timing.clock import DeviceClock

    if not given.no_peers:
        try:
            import torch  # noqa: F401  before the clock's scope, which makes the stream its own
        except ImportError as error:
            print(f"no peers: {error}")
            given.no_peers = True
    clock = DeviceClock()
    with mock.patch.object(run, "refuse_capture", lambda *_: None):  # arrays of the pool stay there
        for row in rows:
            if time.monotonic() > end:
                print("no time is left")
                return 1
            began = time.perf_counter()
            with clock.scope():
                ms = timed(clock, row, not given.no_peers)
            show(row, ms)
            print(f"    ({time.perf_counter() - began:.1f} s)")
            clock.cupy.get_default_memory_pool().free_all_blocks()
            torch_module = sys.modules.get("torch")
            if torch_module is not None:
                torch_module.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
