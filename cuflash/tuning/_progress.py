"""How does somebody who waits see what a sweep does?"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from cuflash.tuning._rows import Row


class Progress(NamedTuple):
    """What a sweep has just done."""

    stage: str  # "compile", "time" or "final"
    done: int
    total: int
    row: Row | None = None  # the configuration that was timed, or left out of the final
    best: Row | None = None  # the fastest so far


Watcher = Callable[[Progress], None]
_QUIET_SECONDS = 3.0


class Compiled:
    """How many kernels are ready: in one line of a terminal, every few seconds in a file."""

    def __init__(self) -> None:
        self.said = -math.inf

    def __call__(self, done: int, total: int, before: str = "") -> None:
        """Say it, or leave it to a later call."""
        text = f"{before}{done} of {total} compiled"
        now = time.monotonic()
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text}" + "\n" * (done == total))
        elif done == total or now - self.said >= _QUIET_SECONDS:
            sys.stderr.write(f"{text}\n")
            self.said = now
        sys.stderr.flush()


class Lines:
    """A line on standard error for each configuration, with the best so far."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.compiled = Compiled()

    def __call__(self, now: Progress) -> None:
        """Say what has just been done."""
        spent = f"{time.monotonic() - self.start:6.1f} s  "
        if now.stage == "compile":
            self.compiled(now.done, now.total, spent)
            return
        if now.row is None:
            sys.stderr.write(f"{spent}the fastest {now.total} compared once more\n")
            return
        row, best = now.row, now.best
        if now.stage == "final":
            why = f"{row['status']}, {row['reason']}"
            sys.stderr.write(f"{spent}{row['key']} left out of the final: {why}\n")
            return
        text = row.get("reason", "")[:70]
        if row["status"] == "ok":
            text = f"{row['ms']:.4g} ms, {row['relative']:.3f} of the default's"
        leader = "" if best is None else f"  best {best['key']} {best['relative']:.3f}"
        sys.stderr.write(
            f"{spent}{now.done:>4}/{now.total}  {row['key']:<16} {row['status']:<7} "
            f"{text}{leader}\n"
        )
