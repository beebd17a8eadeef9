"""How is work done in processes that may fail or hang, while this one goes on?

A child reads one JSON object a line and answers each with one. Whoever waits longer than it wants
to ends the child; the next request starts another one. A child whose parent is gone ends at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

Answer = dict[str, Any]
_LAST_WORDS = 2000  # characters of standard error that a failure quotes


class Failure(Exception):
    """No answer came: ``kind`` is "hang" or "crash"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Child:
    """A process that answers; it is started when it is first asked, and again after a failure."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._last_words = ""

    @property
    def running(self) -> bool:
        """Whether there is a process that remembers what it was told."""
        return self._process is not None and self._process.poll() is None

    @property
    def identity(self) -> object:
        """Another one after every start."""
        return self._process

    def ask(self, request: Answer, time_limit: float) -> Answer:
        """The answer, or a Failure after ``time_limit`` seconds or the end of the process."""
        if not self.running:
            self._start()
        process = self._process
        if process is None or process.stdin is None:
            raise Failure("crash", "the process did not start")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError:
            raise self._ended() from None
        try:
            line = self._answers.get(timeout=time_limit)
        except queue.Empty:
            self.close()
            raise Failure("hang", f"no answer within {time_limit:g} s") from None
        if line is None:
            raise self._ended()
        answer: Answer = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _start(self) -> None:
        self.close()
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join((package, *(p for p in sys.path if p)))
        self._answers, self._last_words = queue.SimpleQueue(), ""
        process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, encoding="utf-8", env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._process = process
        for target in (self._listen, self._note):
            stream = process.stdout if target == self._listen else process.stderr
            threading.Thread(target=target, args=(stream, self._answers), daemon=True).start()

    def _listen(self, stream: IO[str], answers: queue.SimpleQueue[str | None]) -> None:
        with contextlib.suppress(ValueError, OSError):  # closed
            for line in stream:
                answers.put(line)
        answers.put(None)

    def _note(self, stream: IO[str], _: queue.SimpleQueue[str | None]) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in stream:
                self._last_words = (self._last_words + line)[-_LAST_WORDS:]

    def _ended(self) -> Failure:
        process = self._process
        code = None if process is None else process.wait()
        words = self._last_words.strip().splitlines()
        self.close()
        return Failure("crash", f"exit status {code}: {words[-1] if words else 'no message'}")


def ask_many(
    command: Sequence[str], requests: Sequence[Answer], processes: int, time_limit: float
) -> Iterator[tuple[int, Answer | Failure]]:
    """Answers with the numbers of their requests, as they come, from several children."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(requests)):
        waiting.put(number)
    done: queue.SimpleQueue[tuple[int, Answer | Failure]] = queue.SimpleQueue()
    children = [Child(command) for _ in range(min(processes, len(requests)))]
    stopped = threading.Event()

    def work(child: Child) -> None:
        while not stopped.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, child.ask(requests[number], time_limit)))
            except Failure as failure:
                done.put((number, failure))

    threads = [threading.Thread(target=work, args=(child,), daemon=True) for child in children]
    try:
        for thread in threads:
            thread.start()
        for _ in requests:
            yield done.get()
    finally:
        stopped.set()
        for child in children:
            child.close()


def serve(answer: Callable[[Answer], Answer]) -> None:
    """Be the child: answer every line, leave when the parent is gone.

    What is printed goes to standard error. Ctrl-C reaches both, and is the parent's to act on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # even while the device does not come back

    threading.Thread(target=listen, daemon=True).start()
    while True:
        replies.write(json.dumps(answer(json.loads(requests.get()))) + "\n")
        replies.flush()
