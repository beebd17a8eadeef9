"""Write the tables in README.md and docs/ that are generated from code and measurements.

python tools/readme_tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import decode, float8  # noqa: E402
from benchmarks.accuracy import markdown as errors  # noqa: E402
from benchmarks.everyday import markdown as by_kind  # noqa: E402
from benchmarks.machine import short_commit  # noqa: E402
from benchmarks.option_costs import CHANGES, PLAIN  # noqa: E402
from benchmarks.peers import OURS  # noqa: E402
from benchmarks.report import grid, workload_of  # noqa: E402
from benchmarks.shapes import is_training  # noqa: E402
from cuflash._ahead import kernels_of  # noqa: E402
from cuflash._kernels import config  # noqa: E402
from cuflash._problem import checks, options  # noqa: E402
from cuflash._select import hardware  # noqa: E402

SHOWN_SEQLENS = (512, 2048, 8192)
#: Topics of the result files with the shapes of training, by pass.
TOPICS = {"fwd": "forward", "bwd": "backward"}
RESULTS = ROOT / "benchmarks" / "results"
MISTAKES = ROOT / "tests" / "mutants_report.json"


def support() -> str:
    """What runs on which device, from the tables that the library itself uses."""
    every = ", ".join(dtype.name for dtype in checks.FLOATS)
    devices = "compute capability 5.0 and above (run on H100 and H200); tensor cores from 8.0 on"
    lines = grid(
        ("arrays", "dtypes", "head_dim, head_dim_v", "device"),
        ("NumPy", every, "any", "CPU"),
        ("CuPy", every, f"1 to {config.HEAD_DIMS[-1]} each", devices),
    )
    names = ", ".join(f"`{name}`" for name in options.OPTION_NAMES)
    return "\n".join([*lines, "", f"Score options, on both: {names}."])


def newest(topic: str) -> tuple[dict[str, Any], Path]:
    """The newest committed result of a topic on any GPU, and its file."""
    files = by_date(RESULTS.glob(f"h[0-9]*0-{topic}-????-??-??.json"))
    if not files:
        raise SystemExit(f"no result of the topic {topic} is committed")
    return json.loads(files[-1].read_text(encoding="utf-8")), files[-1]


def by_date(files: Iterable[Path]) -> list[Path]:
    """Results, the newest last: their names end in dates."""
    return sorted(files, key=lambda path: (path.stem[-10:], path.name))


def measured(topic: str) -> tuple[dict[str, Any], str]:
    """The newest result of a topic, and where and when it was measured, with a link to its rows."""
    result, path = newest(topic)
    meta, file = result["meta"], path.with_suffix(".md").relative_to(ROOT).as_posix()
    where = f"{meta['device']}, {meta['date']}, {short_commit(meta['commit'])}"
    return result, f"{where}, [rows](../{file})"


def wrapped(text: str) -> str:
    """Wrap a paragraph to the width of the documents, without breaking links."""
    return textwrap.fill(text, 104, break_long_words=False, break_on_hyphens=False)


def by_cell(rows: Iterable[dict[str, Any]], *fields: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """For each cell (values of ``fields``): its rows by implementation."""
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in fields), {})[row["impl"]] = row
    return cells


def factors(cells: Iterable[dict[str, Any]], peer: str, of: str = "ms") -> list[float]:
    """How many times as much time (or another field) a peer takes, for each cell."""
    return [cell[peer][of] / cell["cuflash"][of] for cell in cells]


def between(values: Iterable[float], digits: int = 0) -> str:
    """Text of the least and the largest value; only one if both are printed alike."""
    values = list(values)
    ends = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return " to ".join(dict.fromkeys(ends))


def mask_of(causal: bool) -> str:
    """The word for the mask in tables."""
    return "causal" if causal else "full"


def numbers() -> str:
    """The main figures for the README, including unfavourable ones."""
    table = [("measured", "result")]
    for pass_, name in (("fwd", "forward"), ("bwd", "gradient")):
        result, path = newest(TOPICS[pass_])
        rows = [row for row in result["rows"] if is_training(row) and row["pass"] == pass_]
        ratios: dict[int, list[float]] = {}
        for (d, *_), cell in sorted(by_cell(rows, "head_dim", "causal", "seqlen_q").items()):
            peer = max(row["tflops"] for impl, row in cell.items() if impl not in OURS)
            ratios.setdefault(d, []).append(cell["cuflash"]["tflops"] / peer)
        every = [ratio for own in ratios.values() for ratio in own]
        means = ", ".join(f"{statistics.geometric_mean(own):.2f}" for own in ratios.values())
        most = max(row["tflops"] for row in rows if row["impl"] == "cuflash")
        table.append(
            (
                f"{name}, bfloat16, head sizes {', '.join(map(str, ratios))} "
                f"({dated(result, path)})",
                f"up to {most:.0f} TFLOP/s; {means} times the speed of the fastest of cuDNN, "
                f"FlashAttention-2 and -4; slower in {sum(r < 1 for r in every)} of {len(every)} "
                "cells",
            )
        )
    result, path = newest("naive")
    (slower, larger), (slower_bwd, larger_bwd) = naive_factors(result).values()
    table.append(
        (
            f"dense attention in CuPy, float16 ({dated(result, path)})",
            f"forward {slower}, gradient {slower_bwd} times as slow; {larger} and {larger_bwd} "
            "times as much memory",
        )
    )
    result, path = newest("accuracy")
    errors = {
        (row["impl"], row["dtype"]): row["out"]
        for row in result["rows"]
        if (row["sweep"], row["family"], row["precision"]) == ("family", "normal", "ieee")
    }
    shown = ", ".join(
        f"{dtype} {errors['cuflash', dtype]:.1e} (dense {errors['naive', dtype]:.1e})"
        for dtype in ("float64", "float32", "bfloat16")
    )
    table.append((f"relative error of the output, normal inputs ({dated(result, path)})", shown))
    result, path = newest("overhead")
    ms = {row["options"]: row["ms"] for row in result["rows"] if row["pass"] == "fwd"}
    table.append(
        (
            f"one call, beside its kernel ({dated(result, path)})",
            f"{1e3 * ms['known arrays']:.0f} us; the first ever compiles for "
            f"{ms['cold'] / 1e3:.1f} s, the first of a later process takes "
            f"{ms['warm from disk']:.0f} ms",
        )
    )
    return "\n".join(grid(*table))


def bars() -> str:
    """The picture of the forward as text, in a comment; a package index shows it instead."""
    result, _ = newest(TOPICS["fwd"])
    found = {
        row["impl"]: row["tflops"]
        for row in result["rows"]
        if is_training(row)
        and (row["head_dim"], row["causal"], row["seqlen_q"]) == (128, False, 8192)
    }
    day = f"{result['meta']['device'].split()[1]}, {result['meta']['date']}"
    lines = [
        f"{name:8} {'█' * round(tflops / 20)} {tflops:.0f}"
        for name, tflops in sorted(found.items(), key=lambda item: -item[1])
    ]
    head = f"forward, bfloat16, head size 128, 8192 tokens, TFLOP/s ({day})"
    return "\n".join(["<!--", "```text", head, *lines, "```", "-->"])


def dated(result: dict[str, Any], path: Path) -> str:
    """The device and the date of a result, as a link to its rows."""
    meta, shown = result["meta"], path.with_suffix(".md")
    file = (shown if shown.exists() else path).relative_to(ROOT).as_posix()
    return f"[{meta['device'].split()[1]}, {meta['date']}]({file})"


def speed() -> str:
    """Speeds of the newest committed runs, forward and backward, with the peers."""
    shown: list[tuple[str, str]] = []
    cells: dict[tuple[int, bool, int], dict[tuple[str, str], str]] = {}
    runs = []
    for pass_, topic in TOPICS.items():
        result, _ = newest(topic)
        meta = result["meta"]
        runs.append(f"{pass_} {meta['date']}, {short_commit(meta['commit'])}")
        for row in filter(is_training, result["rows"]):
            if row["pass"] == pass_ and row["seqlen_q"] in SHOWN_SEQLENS:
                cell = cells.setdefault((row["head_dim"], row["causal"], row["seqlen_q"]), {})
                cell[pass_, row["impl"]] = f"{row['tflops']:.0f}"
                shown = list(dict.fromkeys([*shown, (pass_, row["impl"])]))
    lines = grid(
        ["head_dim, mask, seqlen", *(" ".join(column) for column in shown)],
        *(
            [f"{d} {mask_of(causal)} {n}", *(cell.get(column, "-") for column in shown)]
            for (d, causal, n), cell in sorted(cells.items())
        ),
    )
    head = (
        f"{meta['device']} ({'; '.join(runs)}); bfloat16, 16,384 tokens, heads x head_dim = 2048, "
        "TFLOP/s (backward counted as 2.5 forwards, causal as half):"
    )
    return "\n".join([head, "", *lines])


def naive_factors(result: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Time and memory of the unfused computation relative to cuflash, by pass."""
    axes = ("head_dim", "seqlen_q", "causal", "pass")
    times, held = (by_cell(result[kind], *axes) for kind in ("rows", "memory"))
    found = {}
    for pass_ in ("fwd", "bwd"):
        cells = [cell for cell, row in times.items() if cell[-1] == pass_ and "naive" in row]
        slower = between(factors((times[cell] for cell in cells), "naive"))
        found[pass_] = slower, between(factors((held[cell] for cell in cells), "naive", "bytes"))
    return found


def naive() -> str:
    """How much faster than the unfused computation, and with how much less memory."""
    result, where = measured("naive")
    fwd, bwd = (
        f"the {name} is {faster} times as fast and holds {smaller} times less memory besides its "
        "inputs"
        for name, (faster, smaller) in zip(
            ("forward", "gradient"), naive_factors(result).values(), strict=True
        )
    )
    head_dims, seqlens, masks = (
        sorted({row[axis] for row in result["rows"]}) for axis in ("head_dim", "seqlen_q", "causal")
    )
    return wrapped(
        "Compared with the same attention written in CuPy's operations "
        f"({result['rows'][0]['dtype']}, head size {' and '.join(map(str, head_dims))}, seqlen "
        f"{' and '.join(map(str, seqlens))}, {' and '.join(map(mask_of, masks))}; "
        f"{where}), {fwd}; {bwd}."
    )


def precise() -> str:
    """Speed of float32, TF32 and float64, and of logsumexp over points in space."""
    result, where = measured("precise")
    head = wrapped(
        "Other dtypes at head sizes 64 and 128, seqlen 4096, full and causal "
        f"({where}). The peer of float32 is PyTorch's memory-efficient kernel without TF32; the "
        "peer of float64 is PyTorch's unfused form, which stores matrices of M x N:"
    )

    def text(dtype: str, precision: str, pass_: str, peer: str | None) -> str:
        kind = (dtype, precision, pass_)
        rows = [r for r in result["rows"] if (r["dtype"], r["precision"], r["pass"]) == kind]
        cells = by_cell(rows, "head_dim", "causal").values()
        found = f"{between(cell['cuflash']['tflops'] for cell in cells)} TFLOP/s"
        times = peer and f", {between(factors(cells, peer), 1)} times as fast as the peer"
        return found + (times or "")

    kinds = (
        ("float32", "float32", "ieee", "eff"),
        ("float32 by one TF32 product", "float32", "tf32", None),
        ("float64", "float64", "ieee", "math"),
    )
    lines = grid(
        ("arithmetic", "forward", "gradient"),
        *(
            (name, *(text(dtype, precision, pass_, peer) for pass_ in ("fwd", "bwd")))
            for name, dtype, precision, peer in kinds
        ),
    )
    last = {}  # newest row of each implementation: not every run had KeOps
    for path in by_date(RESULTS.glob("h[0-9]*0-points-????-??-??.json")):
        points = json.loads(path.read_text(encoding="utf-8"))
        last |= {(row["impl"], row["dtype"]): (row, points["meta"]) for row in points["rows"]}

    def both(impl: str) -> str:
        meta = last[impl, "float32"][1]
        ms = (f"{last[impl, dtype][0]['ms']:.0f}" for dtype in ("float32", "float64"))
        return (
            f"{' ms in float32 and '.join(ms)} ms in float64 "
            f"({meta['date']}, {short_commit(meta['commit'])})"
        )

    pairs = last["cuflash", "float32"][0]["points"]
    points_in_space = wrapped(
        f"`logsumexp` over {pairs:,} x {pairs:,} points of three coordinates with a bias of keys "
        f"takes {both('cuflash')}; KeOps takes {both('keops')}."
    )
    return "\n".join([head, "", *lines, "", points_in_space])


def everyday() -> str:
    """Speed relative to the fastest peer at shapes for which no tile was tuned."""
    result, where = measured("everyday")
    peers = dict.fromkeys(row["impl"] for row in result["rows"] if row["impl"] not in OURS)
    head = wrapped(
        f"Speed relative to the fastest of {', '.join(peers)} in the same run ({where}): geometric "
        'mean and least of the shapes of a kind. "In order" is deterministic, "in any order" is '
        "`deterministic=False`."
    )
    return "\n".join([head, "", by_kind(result)])


def costs() -> str:
    """How much longer a call takes with each option, and whether Hopper's kernels run it."""
    result, where = measured("options")
    hopper = hardware.typical("sm_90a")
    cells: dict[str, dict[str, tuple[float, str]]] = {}
    for row in result["rows"]:
        work, backward = workload_of(row), row["pass"] == "bwd"
        entries = [c.entry for c in kernels_of(work, hopper, backward=backward)]
        own = [e for e in entries if ("backward" in e) == backward and "sm90" in e]
        change = next(c for c in CHANGES.values() if replace(PLAIN, **c) == work)
        texts = [f"{n}={v}" for n, v in change.items() if n != "arrays"]
        name = ", ".join([*texts, *change.get("arrays", ())]) or "none"
        cells.setdefault(name, {})[row["pass"]] = (row["ms"], "" if own else " (portable)")
    plain = cells.pop("none")
    none, gradient = (f"{plain[pass_][0]:.3f} ms" for pass_ in ("fwd", "bwd"))
    portable = any(text for cell in cells.values() for _, text in cell.values())
    marked = " Cells marked (portable) did not run the Hopper kernels." if portable else ""
    head = wrapped(
        "Time of a call with one option, relative to the same call without options (bfloat16, "
        f"16 heads, 4096 x 4096, head size 128; {where}). Without options the forward takes "
        f"{none} and the gradient {gradient}. Bias and mask have a value for each pair; there "
        f"are 8 segments; `kv_lengths` is half of the keys.{marked}"
    )
    lines = grid(
        ("option", "forward", "gradient"),
        *(
            (f"`{name}`", *(f"{cell[p][0] / plain[p][0]:.2f}{cell[p][1]}" for p in ("fwd", "bwd")))
            for name, cell in sorted(cells.items(), key=lambda item: item[1]["fwd"][0])
        ),
    )
    return "\n".join([head, "", *lines])


def waiting() -> str:
    """The time of a call on the host: launch, compilation, import."""
    result, where = measured("overhead")
    ms = {(row["pass"], row["options"]): row["ms"] for row in result["rows"]}
    slowest = next((label for _, label in ms if label.startswith("warm from disk, ")), None)
    warm = f"{ms['fwd', 'warm from disk']:.0f} ms if its kernel is in the disk cache"
    if slowest:
        number = slowest.rpartition(" ")[2]
        warm += f" (median of {number} processes; slowest {ms['fwd', slowest]:.0f})"
    return wrapped(
        f"The host spends {1e3 * ms['fwd', 'known arrays']:.0f} us on a call, or "
        f"{1e3 * ms['fwd', 'new arrays']:.0f} us with arrays that it has not seen before. "
        f"The first call of a process takes {ms['fwd', 'cold'] / 1e3:.1f} s "
        f"({(ms['fwd', 'cold'] + ms['bwd', 'cold']) / 1e3:.1f} s with the gradient), or {warm}. "
        f"`import cuflash` takes {ms['fwd', 'import']:.0f} ms after NumPy ({where})."
    )


def gradient() -> str:
    """Speed of the gradient relative to the fastest peer, by head size and order of sums."""
    result, where = measured("backward")
    rows = filter(is_training, result["rows"])
    cells = by_cell(rows, "pass", "head_dim", "causal", "seqlen_q")
    head = wrapped(
        "Speed relative to the fastest peer in the same run: geometric mean and least of all "
        "cells. bfloat16, 16,384 tokens, heads x head_dim = 2048, full and causal "
        f'({where}). "In order" is the default, deterministic; "any '
        'order" is `deterministic=False`.'
    )
    names = {"bwd": "gradient", "fwd+bwd": "forward and gradient"}
    table = [["calls, head_dim", "cells", "peers", "in order", "least", "any order", "least"]]
    for pass_, head_dim in sorted({cell[:2] for cell in cells}):
        own = {cell: found for cell, found in cells.items() if cell[:2] == (pass_, head_dim)}
        peers = sorted({name for found in own.values() for name in found} - set(OURS))
        table.append([f"{names[pass_]}, {head_dim}", str(len(own)), ", ".join(peers)])
        for name in OURS:
            shares = {
                f"{mask_of(causal)} {n}": min(found[p]["ms"] for p in peers if p in found)
                / found[name]["ms"]
                for (_, _, causal, n), found in own.items()
                if name in found
            }
            least = min(shares, key=shares.__getitem__, default="")
            mean = shares and f"{statistics.geometric_mean(shares.values()):.2f}"
            table[-1] += [mean, f"{shares[least]:.2f} ({least})"] if shares else ["-", "-"]
    return "\n".join([head, "", *grid(*table)])


def accuracy() -> str:
    """Errors by dtype and family of inputs, from the newest committed run of each device."""
    last = {path.name.split("-")[0]: path for path in sorted(RESULTS.glob("*-accuracy-*.json"))}
    return "\n\n".join(map(errors, (json.loads(p.read_text("utf-8")) for p in last.values())))


def float8_errors() -> str:
    """Errors of 8-bit operands, from the newest committed run."""
    last = sorted(RESULTS.glob("cpu-float8-*.json"))[-1]
    return float8.markdown(json.loads(last.read_text("utf-8")))


def mistakes() -> str:
    """How many mistakes in the kernels the GPU tests noticed; the others, with reasons."""
    said = json.loads(MISTAKES.read_text(encoding="utf-8"))
    tried = Counter(outcome["digest"][:9] for outcome in said["outcomes"]).most_common()
    sources = ", ".join(f"{digest} ({number} mistakes)" for digest, number in tried)
    head = wrapped(
        f"{said['device']}, {said['date']}, sources of digest {sources}: "
        f"the tests noticed {said['killed']} of {said['mutants']} mistakes "
        f"([outcomes](../{MISTAKES.relative_to(ROOT).as_posix()}))."
    )
    table = [("not noticed", "why")]
    for outcome in said["outcomes"]:
        kind = {"killed": None, "survived": ""}.get(outcome["outcome"], f" ({outcome['outcome']})")
        if kind is not None:
            why = outcome["expected"] or outcome["last_line"]
            table.append((outcome["name"] + kind, why))
    return "\n".join([head, "", *grid(*table)])


#: The tables of each document.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"bars": bars, "support": support, "numbers": numbers},
    "docs/support.md": {"support": support},
    "docs/speed.md": {
        "speed": speed,
        "everyday": everyday,
        "naive": naive,
        "precise": precise,
        "costs": costs,
        "waiting": waiting,
    },
    "docs/accuracy.md": {"accuracy": accuracy, "float8": float8_errors},
    "docs/backward-sm90.md": {"gradient": gradient},
    "docs/float8.md": {"decode of 8 bits": lambda: decode.of_8_bits(newest("decode-8-bits")[0])},
    "docs/flash-decoding.md": {"decode": lambda: decode.markdown(newest("decode")[0])},
    "docs/mistakes.md": {"mistakes": mistakes},
}


def filled(document: str, text: str) -> str:
    """Return ``text`` with the tables between the document's markers generated anew."""
    for name, table in TABLES[document].items():
        begin, end = f"<!-- {name}: made by tools/readme_tables.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{document} has no markers of {name}")
        new = f"{begin}\n{table()}\n{end}"
        text = pattern.sub(lambda _, new=new: new, text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if stale")
    arguments = parser.parse_args()
    stale = False
    for document in TABLES:
        path = ROOT / document
        old = path.read_text(encoding="utf-8")
        new = filled(document, old)
        stale |= old != new
        if not arguments.check:
            path.write_text(new, encoding="utf-8")
    return int(stale and arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
