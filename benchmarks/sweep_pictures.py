"""Pictures of sweeps, drawn by matplotlib, which the extra "plot" installs.

Each picture is returned as a figure; :func:`save` writes PNG and SVG. Pictures of comparisons are
in ``benchmarks/pictures.py``.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cuflash._cli import io_model
from cuflash._errors import wrong_value
from cuflash._select.hardware import peak_of, peak_products
from cuflash.tuning._rows import Sweep
from cuflash.tuning._space import space

Figure = Any
#: Colours that are distinct for colour-blind readers, too (Okabe and Ito).
LEVELS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")


def new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure as Drawn
    except ImportError:
        raise ImportError('matplotlib is not installed: pip install "cuflash[plot]"') from None
    return Drawn(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG; return the paths."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    # Equal data give equal bytes: no date, no random names.
    with rc_context({"svg.hashsalt": "cuflash", "svg.fonttype": "none"}):
        figure.savefig(files[0], dpi=120, metadata={"Software": None})
        figure.savefig(files[1], metadata={"Date": None})
    return files


def heat_map(found: Sweep, across: str = "block_n", along: str = "block_m") -> Figure:
    """TFLOP/s of the best configuration of each tile, or the reason why none runs."""
    names = list(found.header["parameters"])
    for name in (across, along):
        if name not in names:
            raise wrong_value("heat map", repr(name), f"one of {', '.join(names)}")
    if across == along:
        raise wrong_value(
            "heat map", f"{across} both across and along", f"two of {', '.join(names)}"
        )
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
    figure = new_figure(max(1.7 + 1.15 * len(columns), 5.0), 2.0 + 0.8 * len(rows))
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
            inset = 0.42 if values is shipped else 0.46  # both frames are visible on one cell
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
    """Texts with centre, row and width in cells; neighbours with the same text share one."""
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
    """Reasons of the tiles without a legal configuration."""
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
    """A line for each configuration, through its parameters to its speed."""
    names = list(found.header["parameters"])
    timed = sorted(found.timed, key=lambda row: -row["relative"])
    if not timed:
        raise wrong_value("sweep", "no timed row", "at least one")
    speeds = np.array([found.tflops(row) for row in timed])
    figure = new_figure(1.6 * (len(names) + 1) + 1.2, 4.2)
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
    """The best configuration of every sweep under the roofs of products, device memory and L2.

    A thin line goes down to the slowest configuration, with the same bytes. ``levels`` are the rows
    of ``bench --memory``. Without them the roof of device memory is its data sheet's speed, and L2
    has no roof.
    """
    devices = sorted({found.device for found in sweeps})
    if len(devices) != 1:
        got = f"sweeps on {', '.join(devices)}" if devices else "no sweep"
        raise wrong_value("roofline", got, "sweeps on one device")
    peak = peak_of(devices[0])
    if peak is None:
        raise wrong_value("roofline", devices[0], "a device with a known peak")
    works = [found.workload for found in sweeps]
    tops = dict(sorted({peak_products(peak, w.dtype, w.precision) for w in works}, reverse=True))
    top = max(tops)
    if levels and not all({"name", "value"} <= row.keys() for row in levels):
        raise without("a level of memory", "bench --memory")
    speed = {row["name"]: float(row["value"]) for row in levels}
    roofs = {"device memory": speed.get("device memory read", peak.gbytes)}
    if "L2 read" in speed:
        roofs["L2"] = speed["L2 read"]
    figure = new_figure(7.2, 5.6)
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
    over = [("o", "best tile, over bytes of device memory")]
    if "L2" in roofs and any(found.kernel.startswith("forward") for found in sweeps):
        over.append(("x", "best tile, over bytes from L2"))
    for marker, label in over:
        axes.plot([], [], marker, color="#404040", markersize=4, label=label)
    kernels = list(dict.fromkeys(_what(found) for found in sweeps))
    for name in kernels:
        colour = LEVELS[kernels.index(name) % len(LEVELS)]
        of_device, of_l2 = [], []
        for found in (found for found in sweeps if _what(found) == name):
            flops = found.workload.kernel_flops(found.kernel)
            intensity = flops / sum(io_model.least_bytes(found.workload, found.kernel))
            speeds = [found.tflops(row) for row in found.timed]
            of_device.append((intensity, max(speeds)))
            axes.vlines(intensity, min(speeds), max(speeds), color=colour, linewidth=1, alpha=0.6)
            if found.kernel.startswith("forward") and "L2" in roofs:
                row = max(found.timed, key=found.tflops)
                loaded = io_model.forward(
                    found.workload, row["values"]["block_m"], row["values"]["block_n"],
                    row["facts"]["smem_bytes"], boxes=found.kernel == "forward_sm90",
                ).fused  # fmt: skip
                of_l2.append((flops / loaded, max(speeds)))
        axes.plot(*zip(*of_device, strict=True), "o", color=colour, markersize=6, label=name)
        if of_l2:
            axes.plot(*zip(*of_l2, strict=True), "x", color=colour, markersize=7)
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


def _what(found: Sweep) -> str:
    """The label of the sweeps with one colour: everything except the length."""
    work = found.workload
    mask = ", causal" if work.causal else ""
    return f"{found.kernel}, head size {work.head_dim}, {work.dtype}{mask}"


def without(what: str, whose: str) -> Exception:
    """The error for a result of another kind."""
    return wrong_value("result", f"no row with {what}", f"a result of {whose}")
