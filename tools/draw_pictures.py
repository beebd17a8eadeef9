"""Draw the pictures of README.md and docs/ from committed measurements. Needs the extra plot.

python tools/draw_pictures.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import float8, method_pictures, sweep_pictures  # noqa: E402
from cuflash import _cli  # noqa: E402

RESULTS, SWEEPS = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "sweeps"
PICTURES = ROOT / "docs" / "pictures"
#: Sweeps in the roofline picture, each at 2,048 and 8,192 positions.
ROOFLINE = (
    "forward-sm90-d64", "forward-sm90-d128", "forward-sm90-d256", "backward-sm90-d64",
    "backward-sm90-d128", "backward-pair-sm90-d256", "forward-tf32-sm90-d64-float32",
    "backward-dkv-tf32-sm90-d64-float32",
)  # fmt: skip


def newest(pattern: str) -> str:
    """The newest committed result that matches a pattern: its name ends in its date."""
    return str(max(RESULTS.glob(pattern), key=lambda path: (path.stem[-10:], path.name)))


def pictures() -> dict[str, list[str]]:
    """Arguments of ``python -m cuflash plot`` for each picture."""
    sweep = str(SWEEPS / "h100-forward-sm90-d128.jsonl")
    lengths = ("-2048", "")
    swept = [str(SWEEPS / f"h100-{name}{end}.jsonl") for name in ROOFLINE for end in lengths]
    return {
        "speed-forward": ["speed", newest("h*0-forward-*.json"), "--pass", "fwd"],
        "speed-backward": ["speed", newest("h*0-backward-*.json"), "--pass", "bwd"],
        "heatmap": ["heatmap", sweep],
        "parallel": ["parallel", sweep],
        "roofline": ["roofline", *swept, "--memory", newest("h*0-memory-*.json")],
        "memory": ["memory", newest("h*0-allocations-*.json"), "--pass", "bwd"],
        "io": ["io", newest("h*0-io-*.json")],
    }


def figures() -> dict[str, sweep_pictures.Figure]:
    """Figures of docs/method.md and docs/accuracy.md."""
    moved, held = (
        json.loads(Path(newest(f"h*0-{topic}-*.json")).read_text())
        for topic in ("io", "allocations")
    )
    return {
        "tiling": method_pictures.tiling(),
        "costs": method_pictures.costs(moved, held),
        "float8": float8.picture(json.loads(Path(newest("cpu-float8-*.json")).read_text())),
    }


def draw(folder: Path) -> None:
    """Draw every picture as an SVG, the only format that the documents show."""
    for name, arguments in pictures().items():
        if status := _cli.main(["plot", *arguments, "--out", str(folder / name)]):
            raise SystemExit(status)
    for name, figure in (drawn := figures()).items():
        sweep_pictures.save(figure, folder / name)
    for name in (*pictures(), *drawn):
        (folder / f"{name}.png").unlink(missing_ok=True)


if __name__ == "__main__":
    draw(PICTURES)
