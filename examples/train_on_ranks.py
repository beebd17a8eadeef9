"""Does training on several ranks follow the loss curve of training on one?

One layer of attention learns to recall words: at each position it must predict the word that
followed the last occurrence of the current word. Each rank holds some rows of the sequence, in the
zigzag layout, and gradients of the weights are summed over ranks. Rank 0 also trains on the whole
sequence, by `cuflash.attention`, and compares the losses.

    python examples/train_on_ranks.py --ranks 2                       # processes on the CPU
    torchrun --nproc-per-node 2 examples/train_on_ranks.py --gpu      # one GPU for each process

Processes of a launcher must share the environment variable CUFLASH_SECRET. With --ranks the program
starts the processes itself and makes a secret.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash
from cuflash import distributed

Array = Any
HEADS, WIDTH, WORDS = 4, 32, 6
RATE = 0.3
OPTIONS: dict[str, Any] = {"causal": True, "axes": [(-3, -1)] * 4}
#: Ranks sum over keys in parts, so float32 losses differ in their last digits.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


@dataclass(frozen=True)
class Task:
    """Features (n, features) and targets (n, words) of one sequence."""

    features: np.ndarray
    targets: np.ndarray


def recall(length: int, seed: int) -> Task:
    """Draw words; the target of a place is the word after the last occurrence of its word."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, WORDS, length)
    one_hot = np.eye(WORDS)
    behind: dict[int, int] = {}
    targets = np.zeros((length, WORDS))
    for place in range(1, length):
        behind[int(words[place - 1])] = int(words[place])
        if int(words[place]) in behind:
            targets[place, behind[int(words[place])]] = 1
    before = np.roll(one_hot[words], 1, axis=0)
    place = np.arange(length)[:, None] / length
    return Task(np.concatenate([one_hot[words], before, place], axis=1), targets)


def initial_weights(features: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights for q, k, v and the output."""
    rng = np.random.default_rng(seed)
    shapes = dict.fromkeys(("q", "k", "v"), (features, HEADS * WIDTH))
    shapes["out"] = (HEADS * WIDTH, WORDS)
    return {n: rng.standard_normal(s) / np.sqrt(s[0]) for n, s in shapes.items()}


def loss_and_gradients(
    weights: dict[str, Array],
    features: Array,
    targets: Array,
    rows: int,
    attend: Callable[..., Any],
) -> tuple[Array, dict[str, Array]]:
    """The part of these rows in the mean squared error over all ``rows``, and its gradients."""
    heads = (features.shape[0], HEADS, WIDTH)
    q, k, v = ((features @ weights[name]).reshape(heads) for name in ("q", "k", "v"))
    mixed, pullback = attend(q, k, v)
    mixed = mixed.reshape(features.shape[0], -1)
    error = mixed @ weights["out"] - targets
    dprediction = 2 * error / rows
    dmixed = (dprediction @ weights["out"].T).reshape(heads)
    found = {
        n: features.T @ d.reshape(features.shape[0], -1)
        for n, d in zip(("q", "k", "v"), pullback(dmixed), strict=True)
    }
    return (error**2).sum() / rows, found | {"out": mixed.T @ dprediction}


def attend_whole(q: Array, k: Array, v: Array) -> Any:
    """Attention in one process, and its pullback."""
    return cuflash.attention_vjp(q, k, v, **OPTIONS)


def train(
    xp: Any,
    task: Task,
    dtype: str,
    steps: int,
    attend: Callable[..., Any],
    cut: Callable[[Array], Array] = lambda whole: whole,
    total: Callable[[Array], Array] = lambda part: part,
) -> list[float]:
    """Train by gradient descent with momentum; return the losses.

    ``cut`` takes the rows of a rank from a whole array; ``total`` sums an array over all ranks.
    """
    features, targets = (cut(xp.asarray(a.astype(dtype))) for a in (task.features, task.targets))
    weights = {
        n: xp.asarray(w.astype(dtype)) for n, w in initial_weights(task.features.shape[1]).items()
    }
    velocity = {n: xp.zeros_like(w) for n, w in weights.items()}
    losses = []
    for _ in range(steps):
        rows = len(task.features)
        loss, gradients = loss_and_gradients(weights, features, targets, rows, attend)
        losses.append(float(total(loss.reshape(1))[0]))
        for name, gradient in gradients.items():
            velocity[name] = 0.9 * velocity[name] - RATE * total(gradient)
            weights[name] = weights[name] + velocity[name]
    return losses


def run_rank(arguments: argparse.Namespace) -> int:
    """Train in one process of a launcher."""
    transport, xp = "host", np
    if arguments.gpu:
        import cupy

        transport, xp = "nccl", cupy
    task = recall(arguments.tokens, seed=1)
    with contextlib.closing(distributed.from_environment(transport=transport)) as comm:

        def attend(q: Array, k: Array, v: Array) -> Any:
            return distributed.attention_vjp(q, k, v, comm=comm, **OPTIONS)

        def cut(whole: Array) -> Array:
            return distributed.shard(whole, comm=comm, axis=0)

        def total(part: Array) -> Array:
            every = distributed.unshard(part[None], comm=comm, layout="contiguous", axis=0)
            return every.sum(0)

        ours = train(xp, task, arguments.dtype, arguments.steps, attend, cut, total)
        if comm.rank > 0:
            return 0
        one = train(xp, task, arguments.dtype, arguments.steps, attend_whole)
        return show(ours, one, comm.size, TOLERANCE[arguments.dtype])


def show(ours: Sequence[float], one: Sequence[float], size: int, tolerance: float) -> int:
    """Print both curves; return 0 if they agree and the loss fell."""
    print(f"{'step':>6}{f'{size} ranks':>14}{'one':>14}{'difference':>14}")
    for step in sorted({*range(0, len(one), max(len(one) // 6, 1)), len(one) - 1}):
        difference = abs(ours[step] - one[step])
        print(f"{step + 1:6}{ours[step]:14.8f}{one[step]:14.8f}{difference:14.1e}")
    worst = float(np.max(np.abs(np.subtract(ours, one)) / np.asarray(one)))
    agree = worst <= tolerance and ours[-1] < ours[0]
    print(f"{'the curves agree' if agree else 'THE CURVES DO NOT AGREE'}: {worst:.1e} at most")
    return 0 if agree else 1


def start_ranks(number: int, argv: Sequence[str]) -> int:
    """Start the processes that a launcher would start."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": str(number), "CUFLASH_ADDRESS": f"127.0.0.1:{port}"}
    common |= {"CUFLASH_SECRET": secrets.token_hex()}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *argv], env=os.environ | common | {"RANK": str(rank)}
        )
        for rank in range(number)
    ]
    return max(abs(process.wait()) for process in processes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank, or start all ranks; 0: the curves agree."""
    parser = argparse.ArgumentParser(description="Training on ranks that share a sequence.")
    parser.add_argument("--ranks", type=int, help="processes to start, without a launcher")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank, over NCCL")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float64")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--steps", type=int, default=100)
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    if arguments.ranks:
        common = ["--dtype", arguments.dtype, "--tokens", str(arguments.tokens)]
        common += ["--steps", str(arguments.steps)] + ["--gpu"] * arguments.gpu
        return start_ranks(arguments.ranks, common)
    return run_rank(arguments)


if __name__ == "__main__":
    sys.exit(main())
