"""Pictures of comparisons with peers, and of moved bytes.

Each picture is returned as a matplotlib figure, as in ``benchmarks/sweep_pictures.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.shapes import is_square, size_of
from benchmarks.sweep_pictures import LEVELS, Figure, new_figure, without

#: Colours of implementations.
COLOURS = {
    "cuflash": "#0072B2", "cuflash-unordered": "#000000", "fa2": "#E69F00", "cudnn": "#009E73",
    "fa4": "#CC79A7", "eff": "#D55E00", "naive": "#999999",
    "math": "#F0E442",
}  # fmt: skip
NAMES = {
    "cuflash-unordered": "cuflash, deterministic=False", "fa2": "FlashAttention-2 (torch)",
    "cudnn": "cuDNN (torch)", "fa4": "FlashAttention-4",
    "eff": "memory-efficient (torch)", "naive": "unfused",
    "math": "unfused (torch)",
}  # fmt: skip
_ONE_LINE = 0.02  # relative difference of values below which two lines look like one
_MEMORY_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def speed(result: Mapping[str, Any], pass_: str = "fwd") -> Figure:
    """TFLOP/s of cuflash and peers against length, a panel for each head size and mask."""
    square = [r for r in result["rows"] if r.get("pass") == pass_ and is_square(r)]
    work = Counter(size_of(r) for r in square).most_common(1)
    square = [r for r in square if size_of(r) == work[0][0]]
    lengths: dict[tuple[int, bool], set[int]] = {}
    for r in square:
        lengths.setdefault((r["head_dim"], r["causal"]), set()).add(r["seqlen_q"])
    rows = [r for r in square if len(lengths[r["head_dim"], r["causal"]]) > 1]
    name = {"fwd": "forward", "bwd": "gradient", "fwd+bwd": "forward and gradient"}[pass_]
    return _panels(rows, result["meta"], "tflops", "TFLOP/s", name)


def memory(result: Mapping[str, Any], pass_: str = "fwd") -> Figure:
    """Bytes that a call takes beside its inputs, against length."""
    rows = [r for r in result.get("memory", ()) if r["pass"] == pass_]
    name = "forward" if pass_ == "fwd" else "forward and gradient"
    return _panels(rows, result["meta"], "bytes", "bytes beside the inputs", name)


def _panels(
    rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], value: str, unit: str, name: str
) -> Figure:
    if not rows:
        raise without(unit, "bench that has it")
    head_dims = sorted({row["head_dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    figure = new_figure(max(2.9 * len(head_dims) + 0.9, 5.4), max(2.5 * len(masks) + 1.1, 4.4))
    grid = figure.subplots(len(masks), len(head_dims), squeeze=False, sharex=True, sharey=True)
    drawn = {}
    for y, causal in enumerate(masks):
        for x, head_dim in enumerate(head_dims):
            axes = grid[y][x]
            own = [r for r in rows if (r["head_dim"], r["causal"]) == (head_dim, causal)]
            lines = {
                impl: sorted((r["seqlen_q"], r[value]) for r in own if r["impl"] == impl)
                for impl in dict.fromkeys(row["impl"] for row in rows)
            }
            if value == "bytes":
                lines = _together(lines)
            for impl, points in lines.items():
                if points:
                    first = impl.split(", ")[0]
                    (drawn[impl],) = axes.plot(
                        *zip(*points, strict=True), "-o", color=COLOURS.get(first, "#000000"),
                        markersize=4, linewidth=2.2 if first == "cuflash" else 1.4,
                    )  # fmt: skip
            axes.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=9)
            axes.set_xscale("log", base=2)
            lengths = sorted({row["seqlen_q"] for row in rows})
            axes.set_xticks(lengths, [short_length(n) for n in lengths], fontsize=8)
            axes.grid(alpha=0.25)
            if value == "bytes":
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda count, _: in_bytes(count))
    for row_of_axes in grid:
        row_of_axes[0].set_ylabel(unit)
    for axes in grid[-1]:
        axes.set_xlabel("seqlen")
    if value != "bytes":
        grid[0][0].set_ylim(bottom=0)
    where = f"{meta['device']}, {meta['date']}"
    between = ", " if len(head_dims) > 1 else "\n"
    figure.suptitle(f"{name}, {rows[0]['dtype']}{between}{where}", fontsize=10)
    names = [", ".join(NAMES.get(impl, impl) for impl in of.split(", ")) for of in drawn]
    figure.legend(
        drawn.values(), names, loc="outside lower center",
        ncols=min(len(drawn), 4 if len(head_dims) > 1 else 1), fontsize=8,
    )  # fmt: skip
    return figure


def _together(lines: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """Merge the lines of implementations with nearly equal values into one, under all names."""
    found: dict[str, Any] = {}
    for impl, points in lines.items():
        alike = next((name for name, own in found.items() if _are_one(points, own)), None)
        if alike is None:
            found[impl] = points
        else:  # keep the position of the first
            found = {f"{n}, {impl}" if n == alike else n: own for n, own in found.items()}
    return found


def _are_one(points: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]) -> bool:
    """Whether two lines are nearly equal at all common lengths."""
    one, other = dict(points), dict(others)
    both = one.keys() & other.keys()
    return bool(both) and all(abs(one[n] - other[n]) <= _ONE_LINE * other[n] for n in both)


def short_length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def movement(result: Mapping[str, Any]) -> Figure:
    """Bytes of forwards against length: lines are the IO model, marks are ncu's counters."""
    rows = [row for row in result["rows"] if "loaded" in row]
    if not rows:
        raise without("bytes of a forward", "bench --io")
    tiles = sorted({(row["block_m"], row["kernel"]) for row in rows})
    figure = new_figure(7.2, 4.8)
    axes = figure.add_subplot()

    def line(name: str, own: Sequence[Mapping[str, Any]], **given: Any) -> None:
        points = sorted({(row["seqlen"], row[name]) for row in own})
        axes.plot(*zip(*points, strict=True), **given)

    line("unfused", rows, color="#999999", linestyle=":", label="unfused, device memory")
    for colour, (block_m, kernel) in zip(LEVELS, tiles, strict=False):
        own = [row for row in rows if (row["block_m"], row["kernel"]) == (block_m, kernel)]
        dashes = "--" if kernel.endswith("_sm90") else "-"  # lines with equal block_m coincide
        line("loaded", own, color=colour, linewidth=1.4, linestyle=dashes,
             label=f"from L2, block_m {block_m} ({kernel})")  # fmt: skip
        counted = [(r["seqlen"], r["measured"]["L2 to processors"]) for r in own if "measured" in r]
        if counted:
            axes.plot(*zip(*counted, strict=True), "x", color=colour, markersize=6)
    line("read_once", rows, color="black", linewidth=1.2, label="q, k and v once")
    counted = sorted(
        (r["seqlen"], r["measured"]["device memory read"]) for r in rows if "measured" in r
    )
    if counted:
        axes.plot(*zip(*counted, strict=True), "+", color="black", markersize=7)
        axes.plot([], [], "x", color="#404040", label="counted by ncu: from L2")
        axes.plot([], [], "+", color="black", label="counted by ncu: from device memory")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({row["seqlen"] for row in rows})
    axes.set_xticks(lengths, [short_length(n) for n in lengths])
    ticks = axes.get_yticks()
    axes.set_yticks(ticks, [in_bytes(t) for t in ticks])
    values = [row[name] for row in rows for name in ("unfused", "loaded", "read_once")]
    axes.set_ylim(min(values) / 2, max(values) * 2)
    axes.set_xlabel("seqlen")
    axes.set_ylabel("bytes of one forward")
    meta = result["meta"]
    axes.set_title(
        f"16 heads, head_dim 128, bfloat16, {meta['device']}, {meta['date']}", fontsize=9
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7)
    return figure


def in_bytes(count: float) -> str:
    for size, unit in _MEMORY_UNITS:
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"
