"""Which pictures show a sweep, a comparison and the movement of bytes? By matplotlib (extra plot).

Every function returns a figure; :func:`save` writes PNG and SVG.
"""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cuflash._bench import io_model
from cuflash._errors import problem_with
from cuflash._select.hardware import peak_of, peak_products
from cuflash.tuning._rows import Sweep
from cuflash.tuning._space import space

Figure = Any
#: One colour for each implementation and level, told apart by all kinds of eyes (Okabe and Ito).
_COLOURS = {
    "cuflash": "#0072B2", "cuflash-unordered": "#000000", "fa2": "#E69F00", "cudnn": "#009E73",
    "fa4": "#CC79A7", "flex": "#56B4E9", "eff": "#D55E00", "naive": "#999999",
    "math": "#F0E442",
}  # fmt: skip
_LEVELS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")
_NAMES = {
    "cuflash-unordered": "cuflash, deterministic=False", "fa2": "FlashAttention-2 (torch)",
    "cudnn": "cuDNN (torch)", "fa4": "FlashAttention-4", "flex": "FlexAttention",
    "eff": "memory-efficient (torch)", "naive": "unfused",
    "math": "unfused (torch)",
}  # fmt: skip
_SMALLEST_MARK = 3.2  # points
_ONE_PLACE = 0.1  # of logarithms: marks that far apart overlap
_ONE_LINE = 0.02  # of values: lines that close cannot be told apart
_MEMORY_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure as Drawn
    except ImportError:
        raise ImportError('matplotlib is not installed: pip install "cuflash[plot]"') from None
    return Drawn(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG; their paths."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    # The same data give the same bytes: no date, no random names.
    with rc_context({"svg.hashsalt": "cuflash", "svg.fonttype": "none"}):
        figure.savefig(files[0], dpi=120, metadata={"Software": None})
        figure.savefig(files[1], metadata={"Date": None})
    return files


def heat_map(found: Sweep, across: str = "block_n", along: str = "block_m") -> Figure:
    """TFLOP/s of the best configuration of each tile; what cannot run says why."""
    names = list(found.header["parameters"])
    for name in (across, along):
        if name not in names:
            raise problem_with(
                "heat map", ValueError, got=repr(name), expected=f"one of {', '.join(names)}"
            )
    if across == along:
        raise problem_with(
            "heat map", ValueError, got=f"{across} both across and along",
            expected=f"two of {', '.join(names)}",
        )  # fmt: skip
    columns, rows = (sorted(found.header["parameters"][name]) for name in (across, along))
    others = [name for name in names if name not in (across, along)]
    speed = np.full((len(rows), len(columns)), np.nan)
    texts: dict[tuple[int, int], str] = {}
    refusals = _refusals(found, across, along)
    shipped = dict(zip(names, map(int, found.header["default"].split(",")), strict=True))
    for y, value_y in enumerate(rows):
        for x, value_x in enumerate(columns):
            own = [
                row for row in found.rows
                if (row["values"][across], row["values"][along]) == (value_x, value_y)
            ]  # fmt: skip
            timed = [row for row in own if row["status"] == "ok"]
            if timed:
                best = min(timed, key=lambda row: float(row["relative"]))
                speed[y, x] = found.tflops(best)
                spilled = best.get("facts", {}).get("spill_bytes", 0)
                texts[y, x] = f"{speed[y, x]:.0f}"
                texts[y, x] += f"\n{spilled} B spilled" if spilled else ""
            else:
                reason = own[0]["status"].replace("_", " ") if own else ""
                texts[y, x] = reason or refusals.get((value_x, value_y), "not tried")
    figure = _figure(max(1.7 + 1.15 * len(columns), 5.0), 2.0 + 0.8 * len(rows))
    from matplotlib import colormaps

    axes = figure.add_subplot()
    colours = colormaps["viridis"].with_extremes(bad="#e8e8e8")
    image = axes.imshow(speed, cmap=colours, aspect="auto", origin="lower")
    middle = (np.nanmin(speed) + np.nanmax(speed)) / 2 if np.isfinite(speed).any() else 0.0
    for (y, x), text in texts.items():
        if np.isfinite(speed[y, x]):
            colour = "black" if speed[y, x] > middle else "white"
            axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=9)
    for centre, y, width, text in _reasons(speed, texts):
        lines, size = textwrap.wrap(text, 14 * width), 6.5 if width == 1 else 9
        axes.text(centre, y, "\n".join(lines), ha="center", va="center", fontsize=size)
    gain = f"best: {found.best_relative:.3f} of the time of shipped, compared once more"
    best_values = found.best["values"]
    for values, colour, label in ((shipped, "white", "shipped"), (best_values, "#ff4b00", gain)):
        if values[across] in columns and values[along] in rows:
            inset = 0.42 if values is shipped else 0.46  # both are seen where they are one
            place = columns.index(values[across]), rows.index(values[along])
            _frame(axes, *place, inset, colour, label)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(f"{across}\n(best over {', '.join(others)})")
    axes.set_ylabel(along)
    axes.set_title(
        f"{found.kernel}, {found.workload} {found.workload.dtype}\n{found.device}", fontsize=9
    )
    figure.legend(loc="outside lower center", fontsize=8, facecolor="#b0b0b0")
    figure.colorbar(image, label="TFLOP/s")
    return figure


def _reasons(
    speed: np.ndarray, texts: Mapping[tuple[int, int], str]
) -> list[tuple[float, int, int, str]]:
    """Where which reason is written, over how many cells: once for neighbours that share it."""
    found: list[tuple[float, int, int, str]] = []
    for y in range(speed.shape[0]):
        cells = [None if np.isfinite(speed[y, x]) else texts[y, x] for x in range(speed.shape[1])]
        first = 0
        for text, alike in itertools.groupby(cells):
            width = len(list(alike))
            if text is not None:
                found.append((first + (width - 1) / 2, y, width, text))
            first += width
    return found


def _frame(axes: Any, x: int, y: int, inset: float, colour: str, label: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (x - inset, y - inset), 2 * inset, 2 * inset, fill=False, edgecolor=colour,
            linewidth=2.5, label=label,
        )
    )  # fmt: skip


def _refusals(found: Sweep, across: str, along: str) -> dict[tuple[int, int], str]:
    """Why no configuration of a tile is legal, where none is."""
    header = found.header
    whole = space(
        found.workload, found.kernel, arch=header["arch"], parameters=header["parameters"]
    )
    reasons: dict[tuple[int, int], str] = {}
    legal = set()
    for candidate in whole.candidates:
        values = dict(zip(whole.parameters, candidate.values, strict=True))
        place = (values[across], values[along])
        if candidate.config is not None:
            legal.add(place)
        else:
            reasons.setdefault(place, candidate.refusal)
    return {place: text for place, text in reasons.items() if place not in legal}


def parallel_coordinates(found: Sweep) -> Figure:
    """A line for each configuration: through its parameters to its speed."""
    names = list(found.header["parameters"])
    timed = sorted(found.timed, key=lambda row: -row["relative"])
    if not timed:
        raise problem_with("sweep", ValueError, got="no timed row", expected="at least one")
    speeds = np.array([found.tflops(row) for row in timed])
    figure = _figure(1.6 * (len(names) + 1) + 1.2, 4.2)
    axes = figure.add_subplot()
    from matplotlib import colormaps

    low, high = speeds.min(), speeds.max()
    jitter = np.random.default_rng(0).uniform(-0.025, 0.025, (len(timed), len(names)))
    positions = {
        name: {value: i for i, value in enumerate(sorted({row["values"][name] for row in timed}))}
        for name in names
    }
    for row, speed, shift in zip(timed, speeds, jitter, strict=True):
        heights = [
            (positions[name][row["values"][name]] + 0.5) / len(positions[name]) for name in names
        ]
        share = (speed - low) / max(high - low, 1e-9)
        own = row["key"] == found.best["key"]
        axes.plot(
            [*(np.arange(len(names))), len(names)], [*(np.array(heights) + shift), share],
            color="#ff4b00" if own else colormaps["viridis"](share), alpha=1.0 if own else 0.45,
            linewidth=2.5 if own else 0.9, zorder=3 if own else 2, label="best" if own else None,
        )  # fmt: skip
    for x, name in enumerate(names):
        axes.axvline(x, color="#808080", linewidth=0.8, zorder=1)
        for value, place in positions[name].items():
            height = (place + 0.5) / len(positions[name])
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.75}
            axes.text(x + 0.03, height, str(value), fontsize=8, va="center", zorder=4, bbox=box)
    axes.axvline(len(names), color="#808080", linewidth=0.8, zorder=1)
    for share in np.linspace(0, 1, 5):
        axes.text(len(names) + 0.04, share, f"{low + share * (high - low):.0f}", fontsize=8,
                  va="center")  # fmt: skip
    axes.set_xticks(range(len(names) + 1), [*names, "TFLOP/s"])
    axes.set_yticks([])
    axes.set_xlim(-0.2, len(names) + 0.35)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.set_title(f"{found.kernel}, {found.workload}: {len(timed)} configurations\n{found.device}",
                   fontsize=9)  # fmt: skip
    axes.legend(loc="upper left", fontsize=8)
    return figure


def roofline(sweeps: Sequence[Sweep], levels: Sequence[Mapping[str, Any]] = ()) -> Figure:
    """Every measured configuration under the roofs of products, device memory and L2.

    ``levels`` are the rows of ``bench --memory``; without them device memory has its data sheet's
    speed and L2 no roof.
    """
    devices = sorted({found.device for found in sweeps})
    if len(devices) != 1:
        got = f"sweeps on {', '.join(devices)}" if devices else "no sweep"
        raise problem_with("roofline", ValueError, got=got, expected="sweeps on one device")
    peak = peak_of(devices[0])
    if peak is None:
        raise problem_with(
            "roofline", ValueError, got=devices[0], expected="a device with a known peak"
        )
    works = [found.workload for found in sweeps]
    tops = dict(sorted({peak_products(peak, w.dtype, w.precision) for w in works}, reverse=True))
    top = max(tops)
    if levels and not all({"name", "value"} <= row.keys() for row in levels):
        raise _without("a level of memory", "bench --memory")
    speed = {row["name"]: float(row["value"]) for row in levels}
    roofs = {"device memory": speed.get("device memory read", peak.gbytes)}
    if "L2 read" in speed:
        roofs["L2"] = speed["L2 read"]
    figure = _figure(7.2, 5.2 + 0.08 * len(sweeps))
    axes = figure.add_subplot()
    reach = np.geomspace(8, 2e4, 200)
    for (name, gbytes), style in zip(roofs.items(), ("-", "--"), strict=False):
        heights = np.minimum(top, reach * gbytes / 1e3)
        axes.plot(reach, heights, style, color="#404040", linewidth=1.3,
                  label=f"roof of {name}, {gbytes / 1e3:.2f} TB/s")  # fmt: skip
    for height, products in tops.items():
        axes.axhline(height, color="#404040", linewidth=0.8, linestyle=":")
        axes.text(2e4, height * 1.04, f"{height:.0f} TFLOP/s, {products}, data sheet", ha="right",
                  fontsize=8)  # fmt: skip
    over = [("o", "over bytes of device memory")]
    if "L2" in roofs and any(found.kernel.startswith("forward") for found in sweeps):
        over.append(("x", "over bytes from L2"))
    for marker, label in over:
        axes.plot([], [], marker, color="#404040", markersize=4, label=label)
    flops_of = [found.workload.kernel_flops(found.kernel) for found in sweeps]
    once_of = [io_model.least_bytes(found.workload, found.kernel) for found in sweeps]
    places = np.log(np.divide(flops_of, once_of))
    for number, (found, flops, once) in enumerate(zip(sweeps, flops_of, once_of, strict=True)):
        # Of sweeps at one place the first has the largest marks, and the last is on top.
        above = np.sum(np.abs(places[number + 1 :] - places[number]) < _ONE_PLACE)
        size = (_SMALLEST_MARK * 1.6**above) ** 2
        speeds = [found.tflops(row) for row in found.timed]
        colour = _LEVELS[number % len(_LEVELS)]
        label = f"{found.kernel} {found.workload} {found.workload.dtype}"
        axes.scatter([flops / once] * len(speeds), speeds, s=size, color=colour, linewidth=0,
                     label=label)  # fmt: skip
        if found.kernel.startswith("forward") and "L2" in roofs:
            loaded = [
                io_model.forward(
                    found.workload, row["values"]["block_m"], row["values"]["block_n"],
                    row["facts"]["smem_bytes"], boxes=found.kernel == "forward_sm90",
                ).fused
                for row in found.timed
            ]  # fmt: skip
            axes.scatter([flops / b for b in loaded], speeds, s=size, marker="x", color=colour,
                         linewidth=1.2)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    slowest = min((found.tflops(row) for found in sweeps for row in found.timed), default=min(tops))
    axes.set_ylim(slowest / 2, top * 1.4)
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(devices[0], fontsize=9)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    return figure


def speed(result: Mapping[str, Any], pass_: str = "fwd") -> Figure:
    """TFLOP/s against length, ours and peers', a panel for each head size and mask."""
    square = [r for r in result["rows"] if r.get("pass") == pass_ and _is_square(r)]
    work = Counter(_size(r) for r in square).most_common(1)
    square = [r for r in square if _size(r) == work[0][0]]
    lengths: dict[tuple[int, bool], set[int]] = {}
    for r in square:
        lengths.setdefault((r["head_dim"], r["causal"]), set()).add(r["seqlen_q"])
    rows = [r for r in square if len(lengths[r["head_dim"], r["causal"]]) > 1]
    name = {"fwd": "forward", "bwd": "gradient", "fwd+bwd": "forward and gradient"}[pass_]
    return _panels(rows, result["meta"], "tflops", "TFLOP/s", name)


def _is_square(row: Mapping[str, Any]) -> bool:
    """Whether a row is one point of a line over lengths: self-attention of whole heads."""
    pairs = (("seqlen_q", "seqlen_k"), ("heads_q", "heads_kv"), ("head_dim", "head_dim_v"))
    same = all(row[a] == row[b] for a, b in pairs)
    options = any(row.get(name) for name in ("softcap", "dropout", "arrays", "seqlens"))
    return same and not options and row["window"] is None and row["tflops"] is not None


def _size(row: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens and width, which are the same along a line."""
    return row["batch"] * row["seqlen_q"], row["heads_q"] * row["head_dim"]


def memory(result: Mapping[str, Any], pass_: str = "fwd") -> Figure:
    """Bytes that a call takes beside its inputs, against length."""
    rows = [r for r in result.get("memory", ()) if r["pass"] == pass_]
    name = "forward" if pass_ == "fwd" else "forward and gradient"
    return _panels(rows, result["meta"], "bytes", "bytes beside the inputs", name)


def _panels(
    rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], value: str, unit: str, name: str
) -> Figure:
    if not rows:
        raise _without(unit, "bench that has it")
    head_dims = sorted({row["head_dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    figure = _figure(max(2.9 * len(head_dims) + 0.9, 5.4), max(2.5 * len(masks) + 1.1, 4.4))
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
            for number, (impl, points) in enumerate(lines.items()):
                if points:
                    # Of levels that are one the first is the widest, and the last is dashed.
                    one = [value == "bytes" and _are_one(points, p) for p in lines.values()]
                    below, above = any(one[:number]), sum(one[number + 1 :])
                    usual = 2.2 if impl == "cuflash" and not above else 1.2
                    (drawn[impl],) = axes.plot(
                        *zip(*points, strict=True), "--o" if below and not above else "-o",
                        color=_COLOURS.get(impl, "#000000"),
                        markersize=3.5 * 1.65**above, linewidth=usual * 2.1**above,
                    )  # fmt: skip
            axes.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=9)
            axes.set_xscale("log", base=2)
            lengths = sorted({row["seqlen_q"] for row in rows})
            axes.set_xticks(lengths, [_short(n) for n in lengths], fontsize=8)
            axes.grid(alpha=0.25)
            if value == "bytes":
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda count, _: _bytes(count))
    for row_of_axes in grid:
        row_of_axes[0].set_ylabel(unit)
    for axes in grid[-1]:
        axes.set_xlabel("seqlen")
    if value != "bytes":
        grid[0][0].set_ylim(bottom=0)
    where = f"{meta['device']}, {meta['date']}"
    between = ", " if len(head_dims) > 1 else "\n"
    figure.suptitle(f"{name}, {rows[0]['dtype']}{between}{where}", fontsize=10)
    figure.legend(
        drawn.values(), [_NAMES.get(impl, impl) for impl in drawn], loc="outside lower center",
        ncols=min(len(drawn), 4 if len(head_dims) > 1 else 3), fontsize=8,
    )  # fmt: skip
    return figure


def _are_one(points: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]) -> bool:
    """Whether lines lie on each other wherever both are."""
    one, other = dict(points), dict(others)
    both = one.keys() & other.keys()
    return bool(both) and all(abs(one[n] - other[n]) <= _ONE_LINE * other[n] for n in both)


def _without(what: str, whose: str) -> Exception:
    """The error of a result of another kind."""
    return problem_with(
        "result", ValueError, got=f"no row with {what}", expected=f"a result of {whose}"
    )


def _short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def movement(result: Mapping[str, Any]) -> Figure:
    """Bytes of forwards against length: the IO model as lines, what ncu counted as marks."""
    rows = [row for row in result["rows"] if "loaded" in row]
    if not rows:
        raise _without("bytes of a forward", "bench --io")
    tiles = sorted({(row["block_m"], row["kernel"]) for row in rows})
    figure = _figure(7.2, 4.8)
    axes = figure.add_subplot()

    def line(name: str, own: Sequence[Mapping[str, Any]], **given: Any) -> None:
        points = sorted({(row["seqlen"], row[name]) for row in own})
        axes.plot(*zip(*points, strict=True), **given)

    line("unfused", rows, color="#999999", linestyle=":", label="unfused, device memory")
    for colour, (block_m, kernel) in zip(_LEVELS, tiles, strict=False):
        own = [row for row in rows if (row["block_m"], row["kernel"]) == (block_m, kernel)]
        dashes = "--" if kernel.endswith("_sm90") else "-"  # tiles of as many rows load as much
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
    axes.set_xticks(lengths, [_short(n) for n in lengths])
    ticks = axes.get_yticks()
    axes.set_yticks(ticks, [_bytes(t) for t in ticks])
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


def _bytes(count: float) -> str:
    for size, unit in _MEMORY_UNITS:
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"
