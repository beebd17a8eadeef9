"""How fast would attention be on more GPUs than were measured? A model, which no run has checked.

    python benchmarks/projection.py --ranks 1024 --per-host 8

A step computes with the keys of another group of ranks while the keys of the next group arrive and,
in the gradient, while float32 gradients are sent back. A step takes the longer of computation and
transfer, plus a fixed time for launches and differences between ranks. ``usp`` exchanges heads
within a host before and after all steps; in ``ring`` each rank is a group. Arguments are the speed
of one GPU, the share of it that two ranks of a host keep, the speeds of links, and the fixed time.
Defaults of the speed and of the share are measurements of H200; those of the links and of the fixed
time are assumed. docs/distributed.md has a table of their sources.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

ELEMENT, SUM = 2, 4  # bytes
HEAD_DIM = 128


@dataclass(frozen=True)
class Machine:
    """Speeds, in units per second."""

    forward: float  # floating-point operations of one GPU
    gradient: float
    kept: tuple[float, float]  # shares of these two speeds that remain in weak scaling
    within: float  # bytes that a GPU sends and receives at the same time, within a host
    between: float  # the same between hosts
    step: float  # fixed seconds of a step


def seconds(
    machine: Machine, tokens: int, ranks: int, across: int, heads: tuple[int, int], gradient: bool
) -> float:
    """Seconds of one causal layer of ``tokens`` in all; ``across`` ranks exchange heads."""
    heads_q, heads_kv = heads
    groups, rows = ranks // across, tokens // ranks * across
    own_q, own_kv = heads_q / across, max(heads_kv / across, 1)
    products, speed = (10, machine.gradient) if gradient else (4, machine.forward)
    computes = products * rows * rows * own_q * HEAD_DIM / 2 / speed / machine.kept[gradient]
    elements = 2 * rows * own_kv * HEAD_DIM
    moves = elements * (ELEMENT + (SUM if gradient else 0)) / machine.between
    steps = groups * (max(computes, moves) + machine.step)
    if across == 1:
        return steps
    arrays = 5 if gradient else 2  # like q: q and out; in the gradient q, dout, out, dq
    to_heads = rows / across * HEAD_DIM * ELEMENT * (arrays * heads_q + 2 * max(heads_kv, across))
    return steps + to_heads * (across - 1) / across / machine.within


def main(argv: Sequence[str] | None = None) -> int:
    """Print speeds as shares of that of equally many single GPUs."""
    parser = argparse.ArgumentParser(description="Projected scaling of attention.")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--tflops", type=float, nargs=2, default=(658.0, 498.0),
                        help="of one GPU, causal: forward, gradient")  # fmt: skip
    parser.add_argument("--kept", type=float, nargs=2, default=(0.946, 0.996),
                        help="shares of that in weak scaling")  # fmt: skip
    parser.add_argument("--gbytes", type=float, nargs=2, default=(300.0, 45.0),
                        help="a second: within a host, between hosts")  # fmt: skip
    parser.add_argument("--step-us", type=float, default=50.0)
    given = parser.parse_args(argv)
    (forward, gradient), (within, between) = given.tflops, given.gbytes
    machine = Machine(
        1e12 * forward, 1e12 * gradient, tuple(given.kept),
        1e9 * within, 1e9 * between, 1e-6 * given.step_us,
    )  # fmt: skip
    print(f"projected, not measured: {given.ranks} GPUs, causal, head size {HEAD_DIM}")
    print(
        f"{'tokens':>10}{'heads':>8}{'method':>8}{'forward':>10}{'gradient':>10}{'forward, s':>12}"
    )
    for heads in ((32, 8), (32, 32)):
        for tokens in (1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24):
            for method, across in (("ring", 1), ("usp", given.per_host)):
                found = [
                    seconds(machine, tokens, given.ranks, across, heads, g) for g in (False, True)
                ]
                ideal = [p * tokens**2 * heads[0] * HEAD_DIM / 2 / c / given.ranks
                         for p, c in ((4, machine.forward), (10, machine.gradient))]  # fmt: skip
                shares = [i / s for i, s in zip(ideal, found, strict=True)]
                print(f"{tokens:10}{f'{heads[0]}/{heads[1]}':>8}{method:>8}{shares[0]:10.0%}"
                      f"{shares[1]:10.0%}{found[0]:10.3f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
