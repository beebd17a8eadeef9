"""Write the tables of README.md that follow from the code and from committed measurements.

python tools/readme_tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuflash import _config, _options, _problem  # noqa: E402

SHOWN_SEQLENS = (512, 2048, 8192)
RESULTS = ROOT / "benchmarks" / "results"


def support() -> str:
    """What runs where, from the tables that the library itself consults."""
    widest = _config.HEAD_DIMS[-1]
    lines = ["| arrays | dtypes | head_dim, head_dim_v | device |", "|--|--|--|--|"]
    every = ", ".join(dtype.name for dtype in _problem.FLOATS)
    halves = ", ".join(dtype.name for dtype in _problem.HALVES)
    lines.append(f"| NumPy | {every} | any | CPU |")
    lines.append(f"| CuPy | {halves} | 1 to {widest} each | compute capability 8.0 and above |")
    names = ", ".join(f"`{name}`" for name in _options.OPTION_NAMES)
    lines += ["", f"Score options, on both: {names}."]
    return "\n".join(lines)


def state(commit: str) -> str:
    """What was measured, shortened: a commit, or the digest of the sources where git was absent."""
    kind, _, digest = commit.rpartition(" ")
    changed = " and changes" if digest.endswith("-dirty") else ""
    return f"{kind or 'commit'} {digest[:9]}{changed}"


def speed() -> str:
    """Median times of the newest committed run of the training shapes."""
    files = sorted(RESULTS.glob("*-training-*.json"))
    if not files:
        return "No measurement is committed."
    result = json.loads(files[-1].read_text(encoding="utf-8"))
    meta = result["meta"]
    rows = [row for row in result["rows"] if row["seqlen_q"] in SHOWN_SEQLENS]
    shown = [
        (p, i)
        for p in ("fwd", "bwd")
        for i in ("cuflash", "fa2", "cudnn")
        if any((r["pass"], r["impl"]) == (p, i) for r in rows)
    ]
    lines = [
        f"{meta['device']}, {meta['date']}, {state(meta['commit'])}; {rows[0]['dtype']}, "
        "16,384 tokens, heads x head_dim = 2048, TFLOP/s "
        "(backward counted as 2.5 forwards, causal as half):",
        "",
        "| head_dim, mask, seqlen | " + " | ".join(f"{p} {i}" for p, i in shown) + " |",
        "|--" * (1 + len(shown)) + "|",
    ]
    cells: dict[tuple[int, bool, int], dict[tuple[str, str], float]] = {}
    for row in rows:
        cell = cells.setdefault((row["head_dim"], row["causal"], row["seqlen_q"]), {})
        cell[row["pass"], row["impl"]] = row["tflops"]
    for (head_dim, causal, seqlen), cell in sorted(cells.items()):
        values = [cell.get(column) for column in shown]
        texts = ["-" if v is None else f"{v:.0f}" for v in values]
        mask = "causal" if causal else "full"
        lines.append(f"| {head_dim} {mask} {seqlen} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"support": support, "speed": speed}


def filled(text: str) -> str:
    """``text`` with every table between its markers made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: made by tools/readme_tables.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no markers of {name}")
        new = f"{begin}\n{table()}\n{end}"
        text = pattern.sub(lambda _, new=new: new, text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if stale")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = filled(old)
    if arguments.check:
        return int(old != new)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
