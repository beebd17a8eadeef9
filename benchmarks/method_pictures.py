"""Pictures that explain the method: how scores are tiled, and what that saves.

Each picture is returned as a matplotlib figure; ``docs/method.md`` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.pictures import COLOURS, in_bytes, short_length
from benchmarks.sweep_pictures import Figure, new_figure
from cuflash._select.hardware import peak_of, peak_products

FUSED, UNFUSED = COLOURS["cuflash"], COLOURS["naive"]
_MARKED = "#E69F00"
CARD_BYTES = 24e9
LONGEST = 32_768


def tiling(rows: int = 8, block_m: int = 4, block_n: int = 4, head_dim: int = 4) -> Figure:
    """Draw which blocks of q, k, v and out one tile of scores belongs to."""
    figure = new_figure(7.2, 6.6)
    axes = figure.add_subplot()
    left, top = 0.0, 0.0  # corner of the scores; y grows downwards
    gap = 1.1
    places = {
        "q": (left - gap - head_dim, top, head_dim, rows),
        "kᵀ": (left, top - gap - head_dim, rows, head_dim),
        "scores": (left, top, rows, rows),
        "v": (left, top + rows + gap, rows, head_dim),
        "out": (left + rows + gap, top, head_dim, rows),
    }
    chosen = {
        "q": (0, block_m, head_dim, block_m),
        "kᵀ": (block_n, 0, block_n, head_dim),
        "scores": (block_n, block_m, block_n, block_m),
        "v": (block_n, 0, block_n, head_dim),
        "out": (0, block_m, head_dim, block_m),
    }
    for name, (x, y, width, height) in places.items():
        dashed = "--" if name == "scores" else "-"  # dashed: never in memory as a whole
        _cells(axes, x, y, width, height, "white", dashed)
        dx, dy, w, h = chosen[name]
        _cells(axes, x + dx, y + dy, w, h, _MARKED if name == "scores" else "#9fc9e6", "-")
    middle = top + 1.5 * block_m
    for text, x, y in (
        (f"q ({rows}, {head_dim})", left - gap - head_dim / 2, top + 1),
        ("one block\nof queries\nstays", left - gap - head_dim / 2, middle),
        (f"k, transposed ({head_dim}, {rows})", left + rows / 2, top - gap - head_dim - 0.6),
        ("a block\nof keys", left + 1.5 * block_n, top - gap - head_dim / 2),
        (f"scores ({rows}, {rows}):\nnever stored", left + rows / 2, top + block_m / 2),
        ("one tile,\non the chip", left + 1.5 * block_n, middle),
        ("the next\nfollows", left + block_n / 2, middle - 1),
        (f"v, transposed ({head_dim}, {rows})", left + rows / 2,
         top + rows + gap + head_dim + 0.6),
        ("its values", left + 1.5 * block_n, top + rows + gap + head_dim / 2),
        (f"out ({rows}, {head_dim})", left + rows + gap + head_dim / 2, top + 1),
        ("written once,\nafter the last\nblock of keys", left + rows + gap + head_dim / 2, middle),
    ):  # fmt: skip
        axes.text(x, y, text, ha="center", va="center", fontsize=12)
    arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 2}
    start, end = (left + 0.6, middle + 0.6), (left + block_n - 0.1, middle + 0.6)
    axes.annotate("", end, start, arrowprops=arrow)
    axes.set_xlim(left - gap - head_dim - 0.1, left + rows + gap + head_dim + 0.1)
    axes.set_ylim(top + rows + gap + head_dim + 1.1, top - gap - head_dim - 1.1)
    axes.set_aspect("equal")
    axes.set_axis_off()
    return figure


def _cells(
    axes: Any, x: float, y: float, width: float, height: float, colour: str, style: str
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=colour, edgecolor="#404040", linestyle=style)
    )


def costs(moved: Mapping[str, Any], held: Mapping[str, Any]) -> Figure:
    """Draw FLOP, bytes moved, FLOP per byte and memory held, against length.

    ``moved`` is a result of ``bench --io``, ``held`` one of ``bench --set memory``. Lines of bytes
    are the IO model and marks are counters. Memory is extrapolated to :data:`LONGEST` positions by
    a polynomial through its marks.
    """
    rows = [row for row in moved["rows"] if row["kernel"] == "forward_sm90"]
    rows = [row for row in rows if row["block_m"] == rows[0]["block_m"]]
    heads, head_dim = 16, 128  # as in benchmarks/io_grid.py
    lengths = np.array([row["seqlen"] for row in rows])
    flop = 4.0 * heads * head_dim * lengths**2
    fused = np.array([row["read_once"] + row["stored"] for row in rows], float)
    unfused = np.array([row["unfused"] for row in rows], float)
    counted = np.array(
        [
            row["measured"]["device memory read"] + row["measured"]["device memory write"]
            for row in rows
        ]
    )
    figure = new_figure(7.6, 7.0)
    ((products, traffic), (intensity, memory)) = figure.subplots(2, 2)
    products.plot(lengths, flop, color=UNFUSED, linewidth=6)
    products.plot(lengths, flop, color=FUSED, linewidth=2)
    _label(products, lengths, flop, "fused and unfused", "black", (10, -4), "left", 2)
    products.set_title("FLOP of a forward")
    traffic.plot(lengths, unfused, color=UNFUSED)
    traffic.plot(lengths, fused, color=FUSED)
    traffic.plot(lengths, counted, "+", color=FUSED, markersize=10)
    _label(traffic, lengths, unfused, "unfused", UNFUSED, (-8, 0), "right", 3)
    _label(traffic, lengths, fused, "cuflash\n(+ counted)", FUSED, (8, -14), "left", 2)
    traffic.set_title("bytes of device memory moved")
    intensity.plot(lengths, flop / unfused, color=UNFUSED)
    intensity.plot(lengths, flop / fused, color=FUSED)
    intensity.plot(lengths, flop / counted, "+", color=FUSED, markersize=10)
    peak = peak_of(moved["meta"]["device"])
    assert peak is not None
    needed = peak_products(peak, "bfloat16", "ieee")[0] * 1e3 / peak.gbytes
    intensity.axhline(needed, color="black", linestyle=":")
    limit = f"{needed:.0f}: below, memory is\nwhat an H100 waits for"
    intensity.text(lengths[-1], needed * 0.9, limit, ha="right", va="top", fontsize=9)
    _label(intensity, lengths, flop / unfused, "unfused", UNFUSED, (0, 12), "center", 3)
    _label(intensity, lengths, flop / fused, "cuflash", FUSED, (-8, 4), "right", 3)
    intensity.set_title("FLOP per byte")
    _memory(memory, held, heads)
    for axes in (products, traffic, intensity, memory):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [n for n in (512, 2048, 8192, LONGEST) if n <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [short_length(n) for n in ticks])
        axes.set_xlabel("seqlen")
        axes.grid(alpha=0.25)
    for axes in (traffic, memory):
        axes.yaxis.set_major_formatter(lambda count, _: in_bytes(count))
    figure.suptitle(
        f"16 heads, head size 128, bfloat16, {moved['meta']['device']}, {moved['meta']['date']} and"
        f" {held['meta']['date']}", fontsize=9,
    )  # fmt: skip
    return figure


def _memory(axes: Any, held: Mapping[str, Any], heads: int) -> None:
    """Draw the memory of forward and gradient with inputs: measured marks, and fitted lines.

    Lines are dashed where they are computed alone.
    """
    for impl, colour, name in (("naive", UNFUSED, "unfused"), ("cuflash", FUSED, "cuflash")):
        lengths, counted = held_bytes(held["memory"], impl, heads)
        for style, first, last in (("-", lengths[0], lengths[-1]), ("--", lengths[-1], LONGEST)):
            reach = np.geomspace(first, last, 40)
            axes.plot(reach, at_lengths(lengths, counted, reach), style, color=colour)
        axes.plot(lengths, counted, "o", color=colour, markersize=4)
        _label(axes, lengths, counted, name, colour, (-8, 4), "right", 2)
    axes.axhline(CARD_BYTES, color="black", linestyle=":")
    ends = end_of_card(held["memory"], heads)
    axes.text(540, CARD_BYTES * 1.2, f"24 GB: unfused ends at {ends:,.0f}", fontsize=8)
    axes.set_title("memory of forward and gradient")


def held_bytes(
    rows: Sequence[Mapping[str, Any]], impl: str, heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths, and bytes of one sequence of ``heads`` heads with q, k, v and dout."""
    own = [row for row in rows if (row["impl"], row["pass"]) == (impl, "bwd")]
    lengths = np.array([row["seqlen_q"] for row in own], float)
    share = np.array([heads / (row["batch"] * row["heads_q"]) for row in own])
    inputs = np.array([4 * 2 * heads * row["seqlen_q"] * row["head_dim"] for row in own])
    return lengths, share * [row["bytes"] for row in own] + inputs


def at_lengths(lengths: np.ndarray, counted: np.ndarray, reach: Any) -> np.ndarray:
    """Bytes at other lengths, by a polynomial a n^2 + b n fitted to the counted bytes."""
    terms = np.stack([lengths**2, lengths], axis=-1) / counted[:, None]  # relative residuals
    factors = np.linalg.lstsq(terms, np.ones(len(lengths)), rcond=None)[0]
    reach = np.asarray(reach, float)
    return factors[0] * reach**2 + factors[1] * reach


def end_of_card(rows: Sequence[Mapping[str, Any]], heads: int, impl: str = "naive") -> float:
    """The length at which a sequence fills :data:`CARD_BYTES`."""
    reach = np.geomspace(1024, 2**24, 20_000)
    return float(np.interp(CARD_BYTES, at_lengths(*held_bytes(rows, impl, heads), reach), reach))


def _label(
    axes: Any, x: Any, y: Any, text: str, colour: str, shift: tuple[int, int], side: str, at: int
) -> None:
    """Write the name of a line beside one of its points."""
    axes.annotate(
        text, (x[at], y[at]), shift, textcoords="offset points", ha=side, va="center",
        color=colour, fontsize=11,
    )  # fmt: skip
