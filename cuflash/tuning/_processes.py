"""How is work done in child processes that may fail or hang, while this process goes on?

A child reads one JSON object per line and answers each with one line. If the answer takes longer
than the time limit, the child is killed, and the next request starts another one. A child ends when
its parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any

Answer = dict[str, Any]
_LAST_WORDS = 2000  # characters of standard error that a failure quotes


class Failure(Exception):
    """A child did not answer: ``kind`` is "hang" or "crash"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Child:
    """A process that answers requests. The first request starts it; so does one after a failure."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: IO[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[str] | None:
        """The running process, which keeps the state of earlier requests; None if there is none."""
        running = self._process is not None and self._process.poll() is None
        return self._process if running else None

    def ask(self, request: Answer, time_limit: float) -> Answer:
        """Return the answer; raises Failure after ``time_limit`` seconds or if the process ends."""
        process = self.process or self._started()
        if process.stdin is None:
            raise Failure("crash", "the process did not start")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError:
            raise self._ended(process) from None
        try:
            line = self._answers.get(timeout=time_limit)
        except queue.Empty:
            self.close()
            raise Failure("hang", f"no answer within {time_limit:g} s") from None
        if line is None:
            raise self._ended(process)
        answer: Answer = json.loads(line)
        return answer

    def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _started(self) -> subprocess.Popen[str]:
        self.close()
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join((package, *(p for p in sys.path if p)))
        self._answers, self._errors = queue.SimpleQueue(), tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, encoding="utf-8", env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._process = process
        given = (process.stdout, self._answers)
        threading.Thread(target=_listen, args=given, daemon=True).start()
        return process

    def _ended(self, process: subprocess.Popen[str]) -> Failure:
        """A Failure with the last line that an ended process wrote to standard error."""
        code, words = process.wait(), b""
        with contextlib.suppress(OSError, ValueError):  # closed by another thread
            if self._errors is not None:
                self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _LAST_WORDS))
                words = self._errors.read()
        self.close()
        lines = words.decode("utf-8", "replace").strip().splitlines()
        return Failure("crash", f"exit status {code}: {lines[-1] if lines else 'no message'}")


def _listen(stream: IO[str], answers: queue.SimpleQueue[str | None]) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed
        for line in stream:
            answers.put(line)
    answers.put(None)


def ask_many(
    command: Sequence[str], requests: Sequence[Answer], processes: int, time_limit: float
) -> Iterator[tuple[int, Answer | Failure]]:
    """Yield answers with the numbers of their requests, as several children complete them."""
    if not requests:
        return
    children = [Child(command) for _ in range(min(processes, len(requests)))]
    idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
    for child in children:
        idle.put(child)

    def ask(number: int) -> tuple[int, Answer | Failure]:
        child = idle.get()
        try:
            return number, child.ask(requests[number], time_limit)
        except Failure as failure:
            return number, failure
        finally:
            idle.put(child)

    pool = ThreadPoolExecutor(len(children))
    try:
        for done in as_completed([pool.submit(ask, number) for number in range(len(requests))]):
            yield done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.close()


def serve(answer: Callable[[Answer], Answer]) -> None:
    """Run as the child: answer every line, and leave when the parent is gone.

    Printed text goes to standard error. Ctrl-C reaches both processes; only the parent acts on it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # even while a device call hangs

    threading.Thread(target=listen, daemon=True).start()
    while True:
        replies.write(json.dumps(answer(json.loads(requests.get()))) + "\n")
        replies.flush()
