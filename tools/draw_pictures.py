"""Draw the pictures of README.md and docs/ from committed measurements: needs the extra plot.

python tools/draw_pictures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuflash import _cli  # noqa: E402

RESULTS, SWEEPS = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "sweeps"
PICTURES = ROOT / "docs" / "pictures"
#: Beside forward_sm90 at head size 128 under the roofs: there are eight colours.
BESIDE = (
    "forward-sm90-d64", "forward-sm90-d256", "backward-sm90-d64", "backward-sm90-d128",
    "backward-pair-sm90-d256", "forward-tf32-sm90-d64-float32",
    "backward-dkv-tf32-sm90-d64-float32",
)  # fmt: skip


def newest(pattern: str) -> str:
    """The last committed result of a topic."""
    return str(sorted(RESULTS.glob(pattern))[-1])


def pictures() -> dict[str, list[str]]:
    """Arguments of ``python -m cuflash plot`` for each picture."""
    sweep = str(SWEEPS / "h100-forward-sm90-d128.jsonl")
    others = [str(SWEEPS / f"h100-{name}.jsonl") for name in BESIDE]
    return {
        "speed-forward": ["speed", newest("h100-forward-*.json"), "--pass", "fwd"],
        "speed-backward": ["speed", newest("h100-backward-*.json"), "--pass", "bwd"],
        "heatmap": ["heatmap", sweep],
        "parallel": ["parallel", sweep],
        "roofline": ["roofline", sweep, *others, "--memory", newest("h100-memory-*.json")],
        "memory": ["memory", newest("h100-allocations-*.json"), "--pass", "bwd"],
        "io": ["io", newest("h100-io-*.json")],
    }


if __name__ == "__main__":
    for name, arguments in pictures().items():
        status = _cli.main(["plot", *arguments, "--out", str(PICTURES / name)])
        (PICTURES / f"{name}.png").unlink(missing_ok=True)  # documents show the SVG
        if status:
            raise SystemExit(status)
