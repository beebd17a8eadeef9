"""The command ``plot``: draws the results of ``tune`` and ``bench``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import META_KEYS
from cuflash._errors import problem_with, wrong_value

EXAMPLES = """\
examples:
  python -m cuflash plot heatmap h100-forward-sm90-d128.jsonl
  python -m cuflash plot heatmap sweep.jsonl --across num_stages --along block_n
  python -m cuflash plot parallel h100-forward-sm90-d128.jsonl
  python -m cuflash plot roofline sweep.jsonl other.jsonl --memory memory.json
  python -m cuflash plot speed results.json --pass bwd --out pictures/gradient
  python -m cuflash plot memory results.json
  python -m cuflash plot io io.json

heatmap, parallel and roofline take files of `tune`, those of `tune --kernel-tuner` (.json) too, the
others those of `bench` and, as it does, a checkout. matplotlib: pip install "cuflash[plot]".
"""
_KINDS = ("heatmap", "parallel", "roofline", "speed", "memory", "io")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command."""
    p.epilog = EXAMPLES
    p.add_argument("kind", choices=_KINDS)
    p.add_argument("files", nargs="+", type=Path, metavar="file")
    p.add_argument("--out", type=Path, help="path without suffix (default: that of the file)")
    p.add_argument("--across", default="block_n", help="heatmap: a parameter")
    p.add_argument("--along", default="block_m", help="heatmap: a parameter")
    p.add_argument("--memory", type=Path, help="roofline: a file of bench --memory, for its roofs")
    p.add_argument("--pass", dest="pass_", choices=("fwd", "bwd", "fwd+bwd"), default="fwd")
    p.add_argument("--json", action="store_true", help="print the paths as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Draw one picture."""
    from benchmarks import sweep_pictures

    if arguments.kind != "roofline" and len(arguments.files) > 1:
        raise ValueError(f"files: got {len(arguments.files)}, expected one for {arguments.kind}")
    figure = _drawn(arguments)
    first = arguments.files[0]
    out = arguments.out or first.with_name(f"{first.stem}-{arguments.kind}")
    files = sweep_pictures.save(figure, Path(f"{out}.png"))
    print(json.dumps([str(f) for f in files]) if arguments.json else "\n".join(map(str, files)))
    return 0


def _drawn(arguments: argparse.Namespace) -> Any:
    from benchmarks import pictures, sweep_pictures

    kind, first = arguments.kind, arguments.files[0]
    if kind == "heatmap":
        return sweep_pictures.heat_map(_sweep(first), arguments.across, arguments.along)
    if kind == "parallel":
        return sweep_pictures.parallel_coordinates(_sweep(first))
    if kind == "roofline":
        levels = read_result(arguments.memory)["rows"] if arguments.memory else []
        return sweep_pictures.roofline([_sweep(path) for path in arguments.files], levels)
    result = read_result(first)
    if kind == "io":
        return pictures.movement(result)
    draw = pictures.speed if kind == "speed" else pictures.memory
    return draw(result, arguments.pass_)


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file of ``bench``; ValueError for any other file."""
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # invalid JSON or encoding
        raise wrong_value(str(path), "no JSON", "a result of bench") from None
    content: dict[str, Any] = result if isinstance(result, dict) else {}
    meta, rows = content.get("meta"), content.get("rows", 0)
    whole = isinstance(meta, dict) and set(META_KEYS) <= set(meta) and isinstance(rows, list)
    if not whole or not all(isinstance(row, dict) for row in rows):
        raise wrong_value(str(path), "something else", 'a result of bench, "meta" and "rows"')
    return content


def _sweep(path: Path) -> Any:
    """Read a sweep of a kernel of cuflash: only these have a problem, which speeds need."""
    from cuflash.tuning import load, read_cache

    try:
        found = load(path)
    except ValueError:
        if path.suffix != ".json":
            raise
        found = read_cache(path)
    if found.header["workload"] is None:
        raise problem_with(
            str(path), ValueError, got=f"times of {found.kernel}, of which no problem is known",
            expected="a sweep of a kernel of cuflash",
        )  # fmt: skip
    return found
