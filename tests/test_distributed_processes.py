"""Do real processes meet over sockets, compute the same, and name the rank that fails in time?"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("distributed_rank.py")
ROOT = PROGRAM.parents[1]


def free_address():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def started(case, size, ranks=None):
    """Start the ranks; return rank -> process."""
    address = free_address()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    return {
        rank: subprocess.Popen(
            [sys.executable, str(PROGRAM), case, str(rank), str(size), address],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in (range(size) if ranks is None else ranks)
    }  # fmt: skip


def told(processes, timeout=40.0):
    """Wait for all processes; return rank -> printed lines."""
    lines = {}
    try:
        for rank, process in processes.items():
            out, err = process.communicate(timeout=timeout)
            lines[rank] = out.splitlines()
            assert process.returncode == 0, err
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()
    return lines


def raised(lines):
    """Return kind, rank and text of the error, and the seconds until it was raised."""
    (error,) = (line for line in lines if "|" in line)
    kind, rank, text = error.split("|", 2)
    return kind, rank, text, float(lines[-1].split()[1])


@pytest.mark.parametrize("size", [2, 3])
def test_processes_compute_attention(size):
    """Three methods are right in processes. In the ring later ranks see fewer keys of others."""
    lines = told(started("shares", size))
    sent = [int(lines[rank][0].removeprefix("sent ")) for rank in range(size)]
    (step,) = {earlier - later for earlier, later in itertools.pairwise(sent)}
    assert 0 < step < sent[-1]


@pytest.mark.parametrize(
    ("case", "within", "word"),
    [
        ("killed", 5.0, "died"),
        ("stopped", 5.0, "sent no heartbeat for 1.5 s"),
        ("stuck", 6.0, "rank 1 is stuck"),
        ("leaves", 5.0, "has left"),
    ],
)
def test_a_rank_that_fails_is_named_on_all_survivors(case, within, word):
    processes = started(case, 3)
    failing = processes.pop(1)
    try:
        for lines in told(processes).values():
            kind, rank, text, seconds = raised(lines)
            assert (kind, rank) == ("CommunicationError", "1"), text
            assert word in text
            assert seconds < within
    finally:
        failing.send_signal(signal.SIGKILL)
        failing.communicate()


def test_an_error_of_one_rank_reaches_the_others():
    lines = told(started("raises", 3))
    assert raised(lines[1])[0] == "TypeError"
    for rank in (0, 2):
        kind, who, text, seconds = raised(lines[rank])
        assert (kind, who) == ("CommunicationError", "1")
        assert "rank 1 refused the call: TypeError: q: got dtype int64" in text
        assert seconds < 1


def test_different_calls_raise_alike():
    for lines in told(started("disagrees", 3)).values():
        kind, _, text, seconds = raised(lines)
        assert kind == "ValueError"
        assert "causal: got True on rank 1, expected False as on rank 0" in text
        assert seconds < 1


def test_a_missing_rank_is_named():
    began = time.monotonic()
    lines = told(started("missing", 3, ranks=[0, 2]))
    kind, rank, text, seconds = raised(lines[0])
    assert (kind, rank) == ("CommunicationError", "1")
    assert "ranks that did not connect in time: 1" in text
    assert seconds < 4
    assert raised(lines[2])[:3] == (kind, rank, text)
    assert time.monotonic() - began < 20


def test_a_wrong_secret_is_refused():
    lines = told(started("wrong secret", 2))
    kind, _, text, seconds = raised(lines[1])
    assert kind == "WrongSecretError"
    assert "rank 0 does not know the secret, or is of another run" in text
    assert seconds < 1
    assert (
        "ranks that did not connect in time: 1; 1 connections were refused" in raised(lines[0])[2]
    )


def test_processes_exit_without_close():
    """Threads and connections of a communicator that is not closed do not keep a process."""
    for rank, lines in told(started("exits", 3)).items():
        assert time.time() - float(lines[0].split()[1]) < 10, rank


def test_a_rank_that_raises_and_ends_ends_the_others():
    processes = started("ends", 3)
    failing = processes.pop(1)
    for lines in told(processes).values():
        kind, rank, text, seconds = raised(lines)
        assert (kind, rank) == ("CommunicationError", "1"), text
        assert seconds < 5
    _, errors = failing.communicate(timeout=20)
    assert failing.returncode == 1
    assert errors.endswith("Uncaught: rank 1 ends\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_neither_uses_nor_ends_the_communicator():
    """The connections of rank 1 end when it is killed, though its child lives."""
    processes = started("forks", 2)
    failing = processes.pop(1)
    try:
        lines = told(processes)[0]
        out, _ = failing.communicate(timeout=20)
    finally:
        failing.kill()
        failing.communicate()
    _, rank, text, _ = raised(lines)
    assert (lines[0], rank) == ("right", "1"), lines
    assert "died: its connection to rank 0 ended" in text
    parent = "child this process was forked from rank 1, which alone can use the communicator"
    assert parent in out.splitlines()
