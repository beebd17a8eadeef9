"""How close does a forward with few queries come to the time of copying its keys?

Each shape is timed interleaved with a copy of 1 GiB in device memory. Keys in pages, and sequences
with lengths on the device, are compared with calls of cuflash on contiguous keys ("in order").
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

import cuflash
from benchmarks.cells import Run, measure_cell, time_cell
from benchmarks.peers import IMPLEMENTATIONS, Cuflash, Implementation, Make, Unsupported
from benchmarks.report import grid, shape_text, workload_of
from cuflash._timing.clock import Call, Measurement
from cuflash.tuning import Workload
from cuflash.tuning._workload import DTYPES

Array = Any
#: batch, query heads, key/value heads, queries, keys
GENERATED = (
    (16, 32, 8, 1, 8192),
    (64, 32, 8, 1, 4096),
    (1, 32, 32, 1, 65_536),
    (1, 32, 8, 1, 131_072),
    (1, 32, 8, 4, 131_072),
)
#: Cross-attention over many keys, as in a Perceiver, with more queries than "few".
CROSS = ((1, 8, 8, 512, 50_000), (1, 8, 8, 77, 4096))
STEP = Workload(1, 8, 8, 1, 512, 64, 64, "bfloat16")
SHAPES = [
    STEP,
    *(Workload(*shape, 64, 64, "bfloat16") for shape in CROSS),
    *(Workload(*shape, d, d, "bfloat16") for d in (64, 128, 256) for shape in GENERATED),
]
#: Shapes that are also measured with keys in pages, and the page sizes.
PAGED = [
    (Workload(*GENERATED[0], 128, 128, "bfloat16"), (16, 1, 64, 256)),
    *((Workload(*s, d, d, "bfloat16"), (16,)) for d in (64, 256) for s in GENERATED[:2]),
    *((Workload(*s, 128, 128, "bfloat16"), (16,)) for s in GENERATED[1:4]),
    (Workload(*GENERATED[4], 128, 128, "bfloat16", causal=True), (16,)),
    (STEP, (16,)),
    (Workload(4, 8, 8, 2048, 2048, 64, 64, "bfloat16", causal=True), (16,)),
]
SHORTEST = 17  # the shortest of sequences with different lengths
#: Shapes that are also measured with keys of 8 bits.
KEYS_OF_8_BITS = [Workload(*shape, d, d, "bfloat16") for d in (64, 128, 256) for shape in GENERATED]
RAGGED = Workload(16, 32, 8, 1, 100_000, 128, 128, "bfloat16")
PACKED = Workload(32, 8, 8, 1, 100_000, 128, 128, "bfloat16")
COPIED_BYTES = 1 << 30
COPY = "a copy of 1 GiB"
SHOWN_PAGES = "pages of 16"
SHOWN_8_BITS, WIDENED = "in 8 bits", "in 16 bits"
SHAPE = ("batch, heads, key heads", "queries", "keys", "head size")


class InOrder(Cuflash):
    """Contiguous keys, with ``lengths`` (if given) as an array on the device."""

    name = "in order"

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self.lengths = lengths

    def padded(self, work: Workload, pass_: str, xp: ModuleType) -> Make:
        if not self.lengths:
            return super().padded(work, pass_, xp)
        lengths = xp.asarray(np.asarray(self.lengths, np.int32)[:, None])
        options = cuflash.Options(**work.score_options(xp), kv_lengths=lengths)

        def make(q: Array, k: Array, v: Array, dout: Array) -> Call:
            given = {"options": options, "out": xp.empty_like(dout)}
            size = cuflash.workspace_size(q, k, v, options=options)
            given["workspace"] = xp.empty(size, np.uint8) if size else None
            return functools.partial(cuflash.attention, q, k, v, **given)

        return make


class InPages(InOrder):
    """Keys in pages in random order, with lengths on the device."""

    def __init__(self, page_size: int, lengths: Sequence[int] = ()) -> None:
        super().__init__(lengths)
        self.page_size, self.name = page_size, f"pages of {page_size}"

    def padded(self, work: Workload, _pass: str, xp: ModuleType) -> Make:
        options = cuflash.Options(**work.score_options(xp))
        filled = self.lengths or [work.seqlen_k] * work.batch
        lengths = xp.asarray(np.asarray(filled, np.int32))

        def make(q: Array, k: Array, v: Array, dout: Array) -> Call:
            pages = work.batch * work.seqlen_k // self.page_size
            order = np.random.default_rng(0).permutation(pages)
            table = xp.asarray(order.argsort().astype(np.int32).reshape(work.batch, -1))
            k_pages, v_pages = (self._in_pages(a)[xp.asarray(order)].view(a.dtype) for a in (k, v))
            arrays = q, k_pages, v_pages
            given = {"options": options, "out": xp.empty_like(dout)}
            size = cuflash.workspace_size(*arrays, options=options, page_table=table)
            given["workspace"] = xp.empty(size, np.uint8) if size else None
            return functools.partial(cuflash.attention_paged, *arrays, table, lengths, **given)

        return make

    def _in_pages(self, rows: Array) -> Array:
        """(batch, heads, keys, d) as pages in order, viewed as unsigned integers."""
        batch, heads, keys, d = rows.shape
        if keys % self.page_size:
            raise Unsupported(f"{keys} keys are no whole pages of {self.page_size}")
        bits = rows.view(f"u{rows.itemsize}").reshape(batch, heads, -1, self.page_size, d)
        return bits.swapaxes(1, 2).reshape(-1, heads, self.page_size, d)


class In8Bits(InOrder):
    """Keys and values of float8_e4m3fn with a scale, or the same numbers in the dtype of q."""

    def __init__(self, *, widened: bool = False) -> None:
        super().__init__()
        self.widened, self.name = widened, WIDENED if widened else SHOWN_8_BITS

    def padded(self, work: Workload, _pass: str, xp: ModuleType) -> Make:
        def make(q: Array, k: Array, v: Array, dout: Array) -> Call:
            given, options = {"out": xp.empty_like(dout)}, work.score_options(xp)
            (k, k_scale), (v, v_scale) = map(cuflash.quantize, (k, v))
            if self.widened:
                values = np.arange(256, dtype=np.uint8).view(k.dtype).astype(np.float32)
                table = xp.asarray(values)
                k, v = ((table[a.view(np.uint8)] * s).astype(q.dtype)
                        for a, s in ((k, k_scale), (v, v_scale)))  # fmt: skip
            else:
                options |= {"k_scale": k_scale, "v_scale": v_scale}
            given["options"] = cuflash.Options(**options)
            size = cuflash.workspace_size(q, k, v, options=given["options"])
            given["workspace"] = xp.empty(size, np.uint8) if size else None
            return functools.partial(cuflash.attention, q, k, v, **given)

        return make


class Packed(Cuflash):
    """Packed sequences: only keys within the lengths, and the queries of each sequence."""

    name = "packed"

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def padded(self, work: Workload, _pass: str, xp: ModuleType) -> Make:
        options = cuflash.Options(**work.score_options(xp))
        ends_k = xp.asarray(np.cumsum((0, *self.lengths), dtype=np.int32))
        ends_q = xp.arange(work.batch + 1, dtype=np.int32) * work.seqlen_q

        def make(q: Array, k: Array, v: Array, dout: Array) -> Call:
            def packed(rows: Array, lengths: Sequence[int]) -> Array:
                own = [a[:, :n] for a, n in zip(rows.view(f"u{rows.itemsize}"), lengths,
                                                strict=True)]  # fmt: skip
                return xp.concatenate(own, axis=1).view(rows.dtype)

            whole = [work.seqlen_q] * work.batch
            arrays = packed(q, whole), packed(k, self.lengths), packed(v, self.lengths)
            out = packed(dout, whole)
            ends = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
            size = cuflash.workspace_size(*arrays, options=options, **ends)
            room = xp.empty(size, np.uint8) if size else None
            call = functools.partial(
                cuflash.attention_varlen, *arrays, *ends.values(),
                options=options, out=out, workspace=room,
            )  # fmt: skip
            shape = (work.heads_q, work.batch, work.seqlen_q, work.head_dim_v)
            return lambda: call().reshape(shape).swapaxes(0, 1)

        return make


def measure_decode(run: Run) -> None:
    """Measure every shape; note its bytes per time relative to a copy's."""
    copy = {COPY: copier(run.xp, run.clock)}
    for dtype in run.dtypes:
        for work in SHAPES:
            first, own = len(run.rows), replace(work, dtype=dtype)
            copied = measure_cell(run, own, "fwd", beside=copy)[COPY]
            for row in run.rows[first:]:
                words = f"{row['impl']} {dtype} {shape_text(row)}"
                note_share(run, words, workload_of(row).input_bytes("fwd"), row["ms"], copied)
        for work, sizes in PAGED:
            _measure_keys(run, replace(work, dtype=dtype), [InOrder(), *map(InPages, sizes)], copy)
        for work in KEYS_OF_8_BITS if dtype in ("float16", "bfloat16") else ():
            own = replace(work, dtype=dtype)
            _measure_keys(run, own, [In8Bits(widened=True), In8Bits()], copy)
        for work, kind in ((RAGGED, functools.partial(InPages, 16)), (PACKED, Packed)):
            lengths = lengths_up_to(work.seqlen_k, work.batch)
            among = [InOrder(lengths), kind(lengths)]
            _measure_keys(run, replace(work, dtype=dtype), among, copy, lengths)


def _measure_keys(
    run: Run, work: Workload, among: Sequence[Implementation], beside: dict[str, Call],
    lengths: Sequence[int] = (),
) -> None:  # fmt: skip
    """Time calls of cuflash with different layouts of keys; the first is contiguous."""
    found = time_cell(run, work, "fwd", among, beside)
    moved = work.input_bytes("fwd")
    if lengths:
        unread = work.batch * work.seqlen_k - sum(lengths)
        width = work.heads_kv * (work.head_dim + work.head_dim_v)
        moved -= unread * width * DTYPES[work.dtype].itemsize
    for own in among:
        if own.name in found:
            if own.name == SHOWN_8_BITS:  # half of the bytes of k and v
                moved -= work.batch * work.seqlen_k * work.heads_kv * 2 * work.head_dim
            lie = f"{own.name}, {min(lengths)} to {max(lengths)} keys" if lengths else own.name
            ms = found[own.name].ms
            run.add(IMPLEMENTATIONS["cuflash"], work, "fwd", found[own.name], options=lie,
                    flops=not lengths)  # fmt: skip
            note_share(run, f"{work.dtype} {work}, {lie}", moved, ms, found[COPY])
            if own is not among[0]:
                times = found[among[0].name].ms / ms
                run.note(
                    f"{times:.2f} of the speed of keys {among[0].name}: {work.dtype} {work}, {lie}"
                )


def note_share(run: Run, words: str, moved: int, ms: float, copied: Measurement) -> None:
    """Note how many bytes per time a call moves, relative to the interleaved copy."""
    bytes_per_ms = 2 * COPIED_BYTES / copied.ms
    share = moved / ms / bytes_per_ms
    run.note(f"{share:.2f} of a copy's {bytes_per_ms / 1e9:.2f} TB/s: {words}")


def lengths_up_to(longest: int, count: int) -> tuple[int, ...]:
    """``count`` evenly spaced lengths in random order."""
    found = np.linspace(min(SHORTEST, longest), longest, count).astype(int)
    return tuple(np.random.default_rng(0).permutation(found).tolist())


def copier(xp: ModuleType, clock: Any) -> Call:
    """A call that copies 1 GiB within device memory, or host memory."""
    source, target = xp.zeros(COPIED_BYTES, "u1"), xp.empty(COPIED_BYTES, "u1")
    if xp is np:
        return functools.partial(np.copyto, target, source)
    move = target.data.copy_from_device_async
    return lambda: move(source.data, COPIED_BYTES, clock.stream)


def of_8_bits(result: dict[str, Any]) -> str:
    """A table with the time of each shape for keys of 16 and of 8 bits with the same numbers."""
    times: dict[Workload, dict[str, float]] = {}
    for row in result["rows"]:
        times.setdefault(workload_of(row), {})[row["options"]] = row["ms"]
    lines = [
        [*_shape(shape), *map(_microseconds, both), f"{both[0] / both[1]:.2f}"]
        for shape, found in times.items()
        if SHOWN_8_BITS in found
        for both in [(found[WIDENED], found[SHOWN_8_BITS])]
    ]
    return "\n".join(grid((*SHAPE, "16 bits", "8 bits", "times as fast"), *lines))


def markdown(result: dict[str, Any]) -> str:
    """A table with the time of each shape, of a copy, of peers, and with keys in pages of 16."""
    shares = {
        words: share
        for note in result["notes"]
        for share, words in re.findall(r"^([\d.]+) of a copy's .*: cuflash (.*)", note)
    }
    times: dict[Workload, dict[str, str]] = {}
    for row in result["rows"]:
        if not row["options"]:
            found = times.setdefault(workload_of(row), {"of the copy": ""})
            found[row["impl"]] = _microseconds(row["ms"])
            if row["impl"] == "cuflash":
                found["of the copy"] = shares[f"{row['dtype']} {shape_text(row)}"]
        elif row["options"] == SHOWN_PAGES and workload_of(row) in times:
            times[workload_of(row)][SHOWN_PAGES] = _microseconds(row["ms"])
    shown = ("cuflash", "of the copy", "cudnn", "fa2", SHOWN_PAGES)
    lines = [[*_shape(shape), *(found.get(n, "") for n in shown)] for shape, found in times.items()]
    return "\n".join(grid((*SHAPE, *shown), *lines))


def _shape(work: Workload) -> tuple[str, ...]:
    heads = f"{work.batch}, {work.heads_q}, {work.heads_kv}"
    return heads, f"{work.seqlen_q:,}", f"{work.seqlen_k:,}", str(work.head_dim)


def _microseconds(ms: float) -> str:
    us = 1e3 * ms
    return f"{us:,.0f} us" if us >= 100 else f"{us:.1f} us"
