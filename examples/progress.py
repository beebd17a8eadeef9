"""Show on the terminal that a computation is still running, after two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_SECONDS = 2.0


@contextmanager
def sign_of_life(label: str, quiet_seconds: float = QUIET_SECONDS) -> Iterator[None]:
    """Show ``label`` and the time so far on a terminal, by tqdm if it is installed."""
    done = threading.Event()
    clock = threading.Thread(target=_tick, args=(label, done, quiet_seconds), daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()


def _tick(label: str, done: threading.Event, quiet_seconds: float) -> None:
    start = time.perf_counter()
    if done.wait(quiet_seconds) or not sys.stderr.isatty():
        return
    try:
        from tqdm import tqdm
    except ImportError:
        while True:
            print(f"  ... {label}: {time.perf_counter() - start:.0f} s so far", file=sys.stderr)
            if done.wait(quiet_seconds):
                return
    line = {"bar_format": "  ... {desc}: {elapsed} so far", "leave": False, "file": sys.stderr}
    with tqdm(desc=label, delay=quiet_seconds, **line) as bar:
        bar.start_t = bar.start_t - (time.perf_counter() - start)
        bar.refresh()
        while not done.wait(0.5):
            bar.refresh()
