"""Write the tables of README.md and docs/accuracy.md that follow from code and measurements.

python tools/readme_tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
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
    lines.append(f"| CuPy | {every} | 1 to {widest} each | compute capability 8.0 and above |")
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


def accuracy() -> str:
    """Errors by dtype and family of inputs, of the newest committed run of each device."""
    from benchmarks.accuracy import markdown

    newest = {path.name.split("-")[0]: path for path in sorted(RESULTS.glob("*-accuracy-*.json"))}
    return "\n\n".join(
        markdown(json.loads(path.read_text(encoding="utf-8"))) for path in newest.values()
    )


#: The tables of each document.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"support": support, "speed": speed},
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
