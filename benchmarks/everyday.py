"""How fast are shapes for which no tiles were tuned, compared with other libraries?

    python -m cuflash bench --topic everyday --set everyday,bias

tools/readme_tables.py makes tables of docs/speed.md from the result.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

from benchmarks.peers import OURS
from benchmarks.report import grid, workload_of
from cuflash.tuning import Workload


def _shape(
    batch: int, heads: int | tuple[int, int], seqlen: int | tuple[int, int], head_dim: int,
    *, v: int | None = None, causal: bool = False,
) -> Workload:  # fmt: skip
    heads = heads if isinstance(heads, tuple) else (heads, heads)
    seqlen = seqlen if isinstance(seqlen, tuple) else (seqlen, seqlen)
    return Workload(batch, *heads, *seqlen, head_dim, v or head_dim, "bfloat16", causal=causal)


#: Shapes for which no tile was tuned, one or a few of each kind that users have.
EVERYDAY = {
    "head sizes 16 to 224": [
        *(_shape(4, 2048 // d, 4096, d) for d in (16, 32, 40, 48, 72, 80, 112, 160, 224)),
        *(_shape(4, 2048 // d, 4096, d, causal=True) for d in (72, 80, 160)),
        _shape(8, 64, 2048, 32),
        _shape(128, 8, 512, 32),
        _shape(2, 16, 8192, 96, causal=True),
        _shape(4, 8, 4096, 192),
    ],
    "head size 192, values of 128": [_shape(4, 16, 4096, 192, v=128, causal=True)],
    "shared heads: multi-query, grouped": [
        *(_shape(1, (32, 1), n, d, causal=c) for n, d, c in
          ((2048, 128, False), (4096, 64, True), (4096, 128, True), (16_384, 128, True))),
        *(_shape(1, (32, 2), 4096, d, causal=True) for d in (64, 128)),
        *(_shape(1, (48, 8), n, 128, causal=True) for n in (2048, 4096)),
    ],
    "few queries, keys or tiles": [
        *(_shape(8, 8, mn, 64) for mn in ((4096, 77), (77, 4096))),
        *(_shape(1, 8, mn, 64) for mn in ((512, 50_000), (50_000, 512), (2048, 2048))),
    ],
    "vision and short text": [
        _shape(128, 12, 197, 64),
        _shape(64, 16, 577, 64),
        _shape(512, 8, 64, 64),
        _shape(16, 8, 256, 64, causal=True),
    ],
    "odd lengths": [
        _shape(2, 32, 7777, 64, causal=True),
        _shape(4, 16, (3333, 5001), 128),
        _shape(4, 8, 2500, 256, causal=True),
    ],
}  # fmt: skip
BIASES = "a bias and its gradient"
#: The compared passes and variants of cuflash, by column title.
COMPARED = {
    "forward": ("fwd", "cuflash"),
    "gradient in order": ("bwd", "cuflash"),
    "in any order": ("bwd", "cuflash-unordered"),
}


def markdown(result: dict[str, Any]) -> str:
    """Speed relative to the fastest peer: by kind of shape, and in each cell below 1."""
    times: dict[tuple[Workload, str], dict[str, float]] = defaultdict(dict)
    for row in result["rows"]:
        shape = replace(workload_of(row), deterministic=True)  # one cell for both orders
        times[shape, row["pass"]][row["impl"]] = row["ms"]
    kinds = {shape: kind for kind, shapes in EVERYDAY.items() for shape in shapes}
    ratios: dict[str, dict[tuple[str, str], list[float]]] = {
        kind: defaultdict(list) for kind in (*EVERYDAY, BIASES)
    }
    slower = []
    for (shape, pass_), ms in times.items():
        peer = min(ms.keys() - OURS, key=ms.__getitem__)
        own = {name: ms[peer] / ms[name] for name in OURS if name in ms}
        for name, ratio in own.items():
            ratios[kinds.get(shape, BIASES)][pass_, name].append(ratio)
        if round(own["cuflash"], 2) < 1:
            both = (f"{own[name]:.2f}" if name in own else "-" for name in OURS)
            slower.append([f"{pass_} {shape}", *both, peer])
    lines = []
    for kind, found in ratios.items():
        lines.append([kind, str(len(found["bwd", "cuflash"]))])
        for cells in (found[compared] for compared in COMPARED.values()):
            figures = (statistics.geometric_mean(cells), min(cells)) if cells else ()
            lines[-1] += [f"{figure:.2f}" for figure in figures] or ["-", "-"]
    columns = (text for name in COMPARED for text in (name, "least"))
    return "\n".join(
        [
            *grid(["kind of shape", "shapes", *columns], *lines), "",
            *grid(["slower than a peer", "in order", "in any order", "fastest peer"], *slower),
        ]
    )  # fmt: skip
