"""Write the tables of README.md and of documents that follow from code and measurements.

python tools/readme_tables.py [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import short_commit  # noqa: E402
from benchmarks.option_costs import CHANGES, PLAIN  # noqa: E402
from benchmarks.peers import OURS  # noqa: E402
from benchmarks.shapes import is_training  # noqa: E402
from cuflash._ahead import kernels_of  # noqa: E402
from cuflash._kernels import config  # noqa: E402
from cuflash._problem import checks, options  # noqa: E402
from cuflash._select import hardware  # noqa: E402
from cuflash.tuning._workload import Workload  # noqa: E402

SHOWN_SEQLENS = (512, 2048, 8192)
#: Topics of the files that hold the shapes of training, by pass.
TOPICS = {"fwd": "forward", "bwd": "backward"}
RESULTS = ROOT / "benchmarks" / "results"
MISTAKES = ROOT / "tests" / "mutants_report.json"


def support() -> str:
    """What runs where, from the tables that the library itself consults."""
    widest = config.HEAD_DIMS[-1]
    lines = ["| arrays | dtypes | head_dim, head_dim_v | device |", "|--|--|--|--|"]
    every = ", ".join(dtype.name for dtype in checks.FLOATS)
    lines.append(f"| NumPy | {every} | any | CPU |")
    devices = "compute capability 5.0 and above; tensor cores from 8.0 on"
    lines.append(f"| CuPy | {every} | 1 to {widest} each | {devices} |")
    names = ", ".join(f"`{name}`" for name in options.OPTION_NAMES)
    lines += ["", f"Score options, on both: {names}."]
    return "\n".join(lines)


def numbers() -> str:
    """Five figures for somebody who has two minutes, the unfavourable ones included."""
    lines = ["| measured | result |", "|--|--|"]
    for pass_, name in (("fwd", "forward"), ("bwd", "gradient")):
        result = newest(TOPICS[pass_])
        cells: dict[tuple[Any, ...], dict[str, float]] = {}
        for row in filter(is_training, result["rows"] if result else ()):
            if row["pass"] == pass_:
                cell = row["head_dim"], row["causal"], row["seqlen_q"]
                cells.setdefault(cell, {})[row["impl"]] = row["tflops"]
        ratios: dict[int, list[float]] = {}
        for (head_dim, *_), cell in sorted(cells.items()):
            peer = max(cell[impl] for impl in cell if impl not in OURS)
            ratios.setdefault(head_dim, []).append(cell["cuflash"] / peer)
        every = [ratio for own in ratios.values() for ratio in own]
        means = ", ".join(f"{statistics.geometric_mean(own):.2f}" for own in ratios.values())
        most = max(cell["cuflash"] for cell in cells.values())
        lines.append(
            f"| {name}, bfloat16, head sizes {', '.join(map(str, ratios))} ({dated(result)}) | "
            f"up to {most:.0f} TFLOP/s; {means} times the speed of the fastest of cuDNN, "
            f"FlashAttention-2 and -4; slower in {sum(r < 1 for r in every)} of {len(every)} "
            "cells |"
        )
    fastest, smallest = naive_factors()
    lines.append(
        f"| dense attention in CuPy, float16 ({dated(newest('naive'))}) | forward "
        f"{fastest['fwd']}, gradient {fastest['bwd']} times as slow; {smallest['fwd']} and "
        f"{smallest['bwd']} times as much memory |"
    )
    result = newest("accuracy")
    errors = {
        (row["impl"], row["dtype"]): row["out"]
        for row in result["rows"]
        if (row["sweep"], row["family"], row["precision"]) == ("family", "normal", "ieee")
    }
    shown = ", ".join(
        f"{dtype} {errors['cuflash', dtype]:.1e} (dense {errors['naive', dtype]:.1e})"
        for dtype in ("float64", "float32", "bfloat16")
    )
    lines.append(f"| relative error of the output, normal inputs ({dated(result)}) | {shown} |")
    result = newest("overhead")
    ms = {row["options"]: row["ms"] for row in result["rows"] if row["pass"] == "fwd"}
    lines.append(
        f"| one call, beside its kernel ({dated(result)}) | {1e3 * ms['known arrays']:.0f} us; the "
        f"first ever compiles for {ms['cold'] / 1e3:.1f} s, the first of a later process takes "
        f"{ms['warm from disk']:.0f} ms |"
    )
    return "\n".join(lines)


def dated(result: dict[str, Any]) -> str:
    """The device and the day of a result, in few words."""
    meta = result["meta"]
    return f"{' '.join(meta['device'].split()[1:2])}, {meta['date']}"


def newest(topic: str) -> dict[str, Any] | None:
    """The newest committed result of a topic on an H100."""
    files = sorted(RESULTS.glob(f"h100-{topic}-????-??-??.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def speed() -> str:
    """Median times of the newest committed runs, forward and backward, beside the peers."""
    results = {pass_: newest(topic) for pass_, topic in TOPICS.items()}
    found = [result for result in results.values() if result]
    if not found:
        return "No measurement is committed."
    shown: list[tuple[str, str]] = []
    cells: dict[tuple[int, bool, int], dict[tuple[str, str], float]] = {}
    for pass_, result in results.items():
        for row in filter(is_training, result["rows"] if result else ()):
            column = pass_, row["impl"]
            if row["pass"] != pass_ or row["seqlen_q"] not in SHOWN_SEQLENS:
                continue
            if column not in shown:
                shown.append(column)
            cell = cells.setdefault((row["head_dim"], row["causal"], row["seqlen_q"]), {})
            cell[column] = row["tflops"]
    device = found[0]["meta"]["device"]
    runs = "; ".join(
        f"{pass_} {result['meta']['date']}, {short_commit(result['meta']['commit'])}"
        for pass_, result in results.items()
        if result
    )
    lines = [
        f"{device} ({runs}); bfloat16, 16,384 tokens, heads x head_dim = 2048, TFLOP/s "
        "(backward counted as 2.5 forwards, causal as half):",
        "",
        "| head_dim, mask, seqlen | " + " | ".join(f"{p} {i}" for p, i in shown) + " |",
        "|--" * (1 + len(shown)) + "|",
    ]
    for (head_dim, causal, seqlen), cell in sorted(cells.items()):
        values = [cell.get(column) for column in shown]
        texts = ["-" if v is None else f"{v:.0f}" for v in values]
        mask = "causal" if causal else "full"
        lines.append(f"| {head_dim} {mask} {seqlen} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """The least and the most of some factors, or the one."""
    texts = list(dict.fromkeys(f"{value:.0f}" for value in (min(values), max(values))))
    return " to ".join(texts)


def measured(topic: str) -> tuple[dict[str, Any], str]:
    """The newest result of a topic, and where and when it was measured, with a link to its rows."""
    result = newest(topic)
    if result is None:
        raise SystemExit(f"no result of the topic {topic} is committed")
    meta = result["meta"]
    file = sorted(RESULTS.glob(f"h100-{topic}-????-??-??.md"))[-1].relative_to(ROOT).as_posix()
    where = f"{meta['device']}, {meta['date']}, {short_commit(meta['commit'])}"
    return result, f"{where}, [rows](../{file})"


def wrapped(text: str) -> str:
    """A paragraph in lines of the width of our documents; links stay whole."""
    return textwrap.fill(text, 104, break_long_words=False, break_on_hyphens=False)


def naive_factors() -> tuple[dict[str, str], dict[str, str]]:
    """Time and memory of the unfused computation as multiples of ours, by pass."""
    result, _ = measured("naive")
    shape = ("head_dim", "seqlen_q", "causal", "pass")
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    bytes_: dict[tuple[Any, ...], dict[str, float]] = {}
    for kept, rows, value in ((times, result["rows"], "ms"), (bytes_, result["memory"], "bytes")):
        for row in rows:
            kept.setdefault(tuple(row[name] for name in shape), {})[row["impl"]] = row[value]
    fastest, smallest = {}, {}
    for pass_ in ("fwd", "bwd"):
        cells = [cell for cell in times if cell[-1] == pass_ and "naive" in times[cell]]
        fastest[pass_] = spread([times[cell]["naive"] / times[cell]["cuflash"] for cell in cells])
        smallest[pass_] = spread([bytes_[c]["naive"] / bytes_[c]["cuflash"] for c in cells])
    return fastest, smallest


def naive() -> str:
    """How much faster and smaller than the unfused computation."""
    result, where = measured("naive")
    fastest, smallest = naive_factors()
    texts = [
        f"the {name} is {fastest[pass_]} times as fast and holds {smallest[pass_]} times less "
        "memory besides its inputs"
        for pass_, name in (("fwd", "forward"), ("bwd", "gradient"))
    ]
    cells = {(row["head_dim"], row["seqlen_q"], row["causal"]) for row in result["rows"]}
    head_dims, seqlens = (
        " and ".join(str(value) for value in sorted({cell[axis] for cell in cells}))
        for axis in (0, 1)
    )
    masks = {True: "causal", False: "full"}
    kinds = " and ".join(masks[value] for value in sorted({cell[2] for cell in cells}))
    return wrapped(
        "Compared with the same attention written in CuPy's operations "
        f"({result['rows'][0]['dtype']}, head size {head_dims}, seqlen {seqlens}, {kinds}; "
        f"{where}), {texts[0]}; {texts[1]}."
    )


def between(values: list[float], digits: int = 0) -> str:
    """The least and the most of some figures."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def precise() -> str:
    """Speed of float32, TF32 and float64, and of logsumexp over points in space."""
    result, where = measured("precise")
    cells: dict[tuple[str, str], dict[tuple[int, bool], dict[str, dict[str, Any]]]] = {}
    for row in result["rows"]:
        kind = "TF32" if row["precision"] == "tf32" else row["dtype"]
        shapes = cells.setdefault((kind, row["pass"]), {})
        shapes.setdefault((row["head_dim"], row["causal"]), {})[row["impl"]] = row

    def tflops(kind: str, pass_: str) -> str:
        return between([cell["cuflash"]["tflops"] for cell in cells[kind, pass_].values()])

    def faster(kind: str, pass_: str, than: str) -> str:
        found = cells[kind, pass_].values()
        return between([cell[than]["ms"] / cell["cuflash"]["ms"] for cell in found], 1)

    last = {}  # KeOps was not there in every run
    for path in sorted(RESULTS.glob("h100-points-????-??-??.json")):
        points = json.loads(path.read_text(encoding="utf-8"))
        last |= {(row["impl"], row["dtype"]): (row, points["meta"]) for row in points["rows"]}
    pairs = last["cuflash", "float32"][0]["points"]

    def both(impl: str) -> str:
        meta = last[impl, "float32"][1]
        ms = (f"{last[impl, dtype][0]['ms']:.0f}" for dtype in ("float32", "float64"))
        return (
            f"{' ms in float32 and '.join(ms)} ms in float64 "
            f"({meta['date']}, {short_commit(meta['commit'])})"
        )

    head = wrapped(
        "Other dtypes at head sizes 64 and 128, seqlen 4096, full and causal "
        f"({where}). The peer of float32 is PyTorch's memory-efficient kernel without TF32; the "
        "peer of float64 is PyTorch's unfused form, which stores matrices of M x N:"
    )
    rows = ["| arithmetic | forward | gradient |", "|--|--|--|"]
    kinds = (("float32", "float32", "eff"), ("TF32", "float32 by one TF32 product", None),
             ("float64", "float64", "math"))  # fmt: skip
    for kind, name, peer in kinds:
        texts = [
            f"{tflops(kind, pass_)} TFLOP/s"
            + (f", {faster(kind, pass_, peer)} times as fast as the peer" if peer else "")
            for pass_ in ("fwd", "bwd")
        ]
        rows.append(f"| {name} | {' | '.join(texts)} |")
    points_in_space = wrapped(
        f"`logsumexp` over {pairs:,} x {pairs:,} points of three coordinates with a bias of keys "
        f"takes {both('cuflash')}; KeOps takes {both('keops')}."
    )
    return "\n".join([head, "", *rows, "", points_in_space])


def costs() -> str:
    """How much longer a call takes with each option, and which kernels serve it on Hopper."""
    result, where = measured("options")
    hopper = hardware.typical("sm_90a")
    cells: dict[str, dict[str, tuple[float, str]]] = {}
    for row in result["rows"]:
        fields = {field.name: row[field.name] for field in dataclasses.fields(Workload)}
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        work = Workload(**fields | lists)
        backward = row["pass"] == "bwd"
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
    lines = [
        wrapped(
            "Time of a call with one option, relative to the same call without options (bfloat16, "
            f"16 heads, 4096 x 4096, head size 128; {where}). Without options the forward takes "
            f"{none} and the gradient {gradient}. Bias and mask have a value for each pair; there "
            f"are 8 segments; `kv_lengths` is half of the keys.{marked}"
        ),
        "",
        "| option | forward | gradient |",
        "|--|--|--|",
    ]
    for name, cell in sorted(cells.items(), key=lambda item: item[1]["fwd"][0]):
        texts = [f"{cell[p][0] / plain[p][0]:.2f}{cell[p][1]}" for p in ("fwd", "bwd")]
        lines.append(f"| `{name}` | {texts[0]} | {texts[1]} |")
    return "\n".join(lines)


def waiting() -> str:
    """What a call costs beside the device."""
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
    """How much of the fastest peer's speed the gradient has, by head size and order of sums."""
    result, where = measured("backward")
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in filter(is_training, result["rows"]):
        cell = tuple(row[name] for name in ("pass", "head_dim", "causal", "seqlen_q"))
        cells.setdefault(cell, {})[row["impl"]] = row["ms"]
    lines = [
        wrapped(
            "Speed relative to the fastest peer in the same run: geometric mean and least of all "
            "cells. bfloat16, 16,384 tokens, heads x head_dim = 2048, full and causal "
            f'({where}). "In order" is the default, deterministic; "any '
            'order" is `deterministic=False`.'
        ),
        "",
        "| calls, head_dim | cells | peers | in order | least | any order | least |",
        "|--" * 7 + "|",
    ]
    names = {"bwd": "gradient", "fwd+bwd": "forward and gradient"}
    for pass_, head_dim in sorted({cell[:2] for cell in cells}):
        own = {cell: found for cell, found in cells.items() if cell[:2] == (pass_, head_dim)}
        peers = sorted({name for found in own.values() for name in found} - set(OURS))
        texts = [f"{names[pass_]}, {head_dim}", str(len(own)), ", ".join(peers)]
        for name in OURS:
            shares = {
                cell: min(ms for peer, ms in found.items() if peer not in OURS) / found[name]
                for cell, found in own.items()
                if name in found
            }
            texts += ["-", "-"]
            if shares:
                least = min(shares, key=lambda cell: shares[cell])
                mask = "causal" if least[2] else "full"
                mean = statistics.geometric_mean(shares.values())
                texts[-2:] = [f"{mean:.2f}", f"{shares[least]:.2f} ({mask} {least[3]})"]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def accuracy() -> str:
    """Errors by dtype and family of inputs, of the newest committed run of each device."""
    from benchmarks.accuracy import markdown

    newest = {path.name.split("-")[0]: path for path in sorted(RESULTS.glob("*-accuracy-*.json"))}
    return "\n\n".join(
        markdown(json.loads(path.read_text(encoding="utf-8"))) for path in newest.values()
    )


def mistakes() -> str:
    """How many mistakes in the kernels the GPU tests noticed, and which they did not, and why."""
    if not MISTAKES.exists():
        return "No run of all mistakes is recorded."
    said = json.loads(MISTAKES.read_text(encoding="utf-8"))
    head = wrapped(
        f"{said['device']}, {said['date']}, sources of digest {said['digest'][:9]}: "
        f"the tests noticed {said['killed']} of {said['mutants']} mistakes "
        f"([outcomes](../{MISTAKES.relative_to(ROOT).as_posix()}))."
    )
    rest = {o["name"]: o for o in said["outcomes"] if o["outcome"] != "killed"}
    lines = ["", "| not noticed | why |", "|--|--|"] if rest else []
    for name, outcome in rest.items():
        why = outcome["expected"] or outcome["last_line"]
        kind = "" if outcome["outcome"] == "survived" else f" ({outcome['outcome']})"
        lines.append(f"| {name}{kind} | {why} |")
    return "\n".join([head, *lines])


#: The tables of each document.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"support": support, "numbers": numbers},
    "docs/support.md": {"support": support},
    "docs/speed.md": {
        "speed": speed,
        "naive": naive,
        "precise": precise,
        "costs": costs,
        "waiting": waiting,
    },
    "docs/accuracy.md": {"accuracy": accuracy},
    "docs/backward-sm90.md": {"gradient": gradient},
    "docs/mistakes.md": {"mistakes": mistakes},
}


def filled(document: str, text: str) -> str:
    """``text`` with every table of the document between its markers made anew."""
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
