"""Write the tables of README.md and docs/accuracy.md that follow from code and measurements.

python tools/readme_tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuflash import _config, _options, _problem  # noqa: E402
from cuflash._bench.machine import short_commit  # noqa: E402

SHOWN_SEQLENS = (512, 2048, 8192)
TOKENS, MODEL_WIDTH = 16_384, 2048
#: Topics of the files that hold the shapes of training, by pass.
TOPICS = {"fwd": "forward", "bwd": "backward"}
RESULTS = ROOT / "benchmarks" / "results"


def support() -> str:
    """What runs where, from the tables that the library itself consults."""
    widest = _config.HEAD_DIMS[-1]
    lines = ["| arrays | dtypes | head_dim, head_dim_v | device |", "|--|--|--|--|"]
    every = ", ".join(dtype.name for dtype in _problem.FLOATS)
    lines.append(f"| NumPy | {every} | any | CPU |")
    devices = "compute capability 5.0 and above; tensor cores from 8.0 on"
    lines.append(f"| CuPy | {every} | 1 to {widest} each | {devices} |")
    names = ", ".join(f"`{name}`" for name in _options.OPTION_NAMES)
    lines += ["", f"Score options, on both: {names}."]
    return "\n".join(lines)


def newest(topic: str) -> dict[str, Any] | None:
    """The newest committed result of a topic."""
    files = sorted(RESULTS.glob(f"*-{topic}-????-??-??.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def is_training(row: dict[str, Any]) -> bool:
    """Whether the row is one of the shapes that the table shows."""
    return (
        row["batch"] * row["seqlen_q"] == TOKENS
        and row["heads_q"] * row["head_dim"] == MODEL_WIDTH
        and row["heads_q"] == row["heads_kv"]
        and row["head_dim"] == row["head_dim_v"]
        and row["seqlen_q"] == row["seqlen_k"]
        and row["seqlen_q"] in SHOWN_SEQLENS
    )


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
            if row["pass"] != pass_:
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
    file = sorted(RESULTS.glob(f"*-{topic}-????-??-??.md"))[-1].relative_to(ROOT).as_posix()
    where = f"{meta['device']}, {meta['date']}, {short_commit(meta['commit'])}"
    return result, f"{where}, [rows]({file})"


def wrapped(text: str) -> str:
    """A paragraph in lines of the width of our documents; links stay whole."""
    return textwrap.fill(text, 104, break_long_words=False, break_on_hyphens=False)


def naive() -> str:
    """Time and memory of the unfused computation as multiples of ours, by pass."""
    result, where = measured("naive")
    shape = ("head_dim", "seqlen_q", "causal", "pass")
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    bytes_: dict[tuple[Any, ...], dict[str, float]] = {}
    for kept, rows, value in ((times, result["rows"], "ms"), (bytes_, result["memory"], "bytes")):
        for row in rows:
            kept.setdefault(tuple(row[name] for name in shape), {})[row["impl"]] = row[value]
    texts = []
    for pass_, name in (("fwd", "forward"), ("bwd", "gradient")):
        cells = [cell for cell in times if cell[-1] == pass_ and "naive" in times[cell]]
        faster = spread([times[cell]["naive"] / times[cell]["cuflash"] for cell in cells])
        smaller = spread([bytes_[cell]["naive"] / bytes_[cell]["cuflash"] for cell in cells])
        texts.append(
            f"{name} {faster} times as fast with {smaller} times less memory beside the inputs"
        )
    head_dims, seqlens = (
        " and ".join(str(value) for value in sorted({cell[axis] for cell in times}))
        for axis in (0, 1)
    )
    masks = {True: "causal", False: "full"}
    kinds = " and ".join(masks[value] for value in sorted({cell[2] for cell in times}))
    return wrapped(
        "Against the same attention made of CuPy's own operations "
        f"({result['rows'][0]['dtype']}, head size {head_dims}, seqlen {seqlens}, {kinds}; "
        f"{where}): {texts[0]}, {texts[1]}."
    )


def waiting() -> str:
    """What a call costs beside the device."""
    result, where = measured("overhead")
    ms = {(row["pass"], row["options"]): row["ms"] for row in result["rows"]}
    slowest = next((label for _, label in ms if label.startswith("warm from disk, ")), None)
    warm = f"{ms['fwd', 'warm from disk']:.0f} ms where the store has the kernel"
    if slowest:
        number = slowest.rpartition(" ")[2]
        warm += f" (median of {number} processes; slowest {ms['fwd', slowest]:.0f})"
    return wrapped(
        f"A call takes {1e3 * ms['fwd', 'known arrays']:.0f} us of the host, "
        f"{1e3 * ms['fwd', 'new arrays']:.0f} with arrays that it has not seen. "
        f"The first call of a process takes {ms['fwd', 'cold'] / 1e3:.1f} s, "
        f"{(ms['fwd', 'cold'] + ms['bwd', 'cold']) / 1e3:.1f} with the gradient, and {warm}; "
        f"`import cuflash` takes {ms['fwd', 'import']:.0f} ms on top of NumPy ({where})."
    )


def accuracy() -> str:
    """Errors by dtype and family of inputs, of the newest committed run of each device."""
    from benchmarks.accuracy import markdown

    newest = {path.name.split("-")[0]: path for path in sorted(RESULTS.glob("*-accuracy-*.json"))}
    return "\n\n".join(
        markdown(json.loads(path.read_text(encoding="utf-8"))) for path in newest.values()
    )


#: The tables of each document.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"support": support, "speed": speed, "naive": naive, "waiting": waiting},
    "docs/accuracy.md": {"accuracy": accuracy},
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
