"""What does one process of the tests of real processes do? Started by test_distributed_processes.

python distributed_rank.py CASE RANK SIZE ADDRESS
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from cuflash import distributed, reference

LIMITS = {"init_timeout": 10.0, "op_timeout": 2.0, "liveness_timeout": 1.5}


def arrays():
    """Return q, k, v and a cotangent of the whole call, which are equal on all ranks."""
    return np.random.default_rng(0).standard_normal((4, 2, 6, 192, 8))


def shares(comm):
    """Check forward and gradient of each method, and that a second run gives the same bits."""
    whole = arrays()
    truth = reference.attention(*whole[:3], causal=True)
    right = reference.attention_backward(whole[3], *whole[:3], causal=True)
    q, k, v, dout = (distributed.shard(a, comm=comm) for a in whole)
    for method in ("all_gather", "ring", "ulysses"):
        runs = []
        for _ in range(2):
            how = {"comm": comm, "method": method, "causal": True}
            out, pullback = distributed.attention_vjp(q, k, v, **how)
            runs.append((out, *pullback(dout)))
        found = [distributed.unshard(a, comm=comm) for a in runs[0]]
        for a, b in zip(found, (truth, right.dq, right.dk, right.dv), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*runs, strict=True))
    print("sent", comm.sent)


def rounds(comm, at=None, act=None):
    """Call attention for ever; before the third call, rank ``at`` runs the action of the case."""
    q = distributed.shard(arrays()[0], comm=comm)
    for number in range(10_000):
        if number == 2 and comm.rank == at:
            print("acts", flush=True)
            act()
        distributed.attention(q, q, q, comm=comm, method="ring")


def killed(comm):
    rounds(comm, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped(comm):
    rounds(comm, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def stuck(comm):
    rounds(comm, 1, lambda: time.sleep(60))


def raises(comm):
    """Raise an error on one rank, which reaches the other ranks with the name of that rank."""
    q = distributed.shard(arrays()[0], comm=comm)
    distributed.attention(q.astype(int) if comm.rank == 1 else q, q, q, comm=comm)


def disagrees(comm):
    q = distributed.shard(arrays()[0], comm=comm)
    distributed.attention(q, q, q, comm=comm, causal=comm.rank == 1)


def leaves(comm):
    """Close one rank properly while another rank waits for it."""
    if comm.rank == 1:
        comm.close()
        return
    rounds(comm)


def exits(comm):
    """Leave without a call of close, rank 1 later than the others."""
    q = distributed.shard(arrays()[0], comm=comm)
    distributed.attention(q, q, q, comm=comm)
    time.sleep(comm.rank % 2)
    print("exits", time.time(), flush=True)


class Uncaught(BaseException):
    """What :func:`main` does not catch."""


def ends(comm):
    """Raise on one rank, between calls, what ends its process."""

    def end():
        raise Uncaught("rank 1 ends")

    rounds(comm, 1, end)


def forks(comm):
    """Use and close the communicator in a child of rank 1, which lives on; the parent goes on."""
    q = distributed.shard(arrays()[0], comm=comm)
    if comm.rank == 1:
        parent = os.getpid()
        if os.fork() == 0:
            try:
                distributed.attention(q, q, q, comm=comm)
            except distributed.CommunicationError as error:
                print("child", error, flush=True)
            comm.close()
            os.close(1)
            os.close(2)
            while os.getppid() == parent:
                time.sleep(0.1)
            time.sleep(4)  # the other rank has to learn at once that rank 1 died
            os._exit(0)
        time.sleep(0.5)
    distributed.attention(q, q, q, comm=comm)
    print("right", flush=True)
    rounds(comm, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def main(case, rank, size, address):
    """Run a case, and print the error that it raised and the seconds that passed until then."""
    begin = time.monotonic()
    secret = "another secret" if case == "wrong secret" and rank == 1 else "one secret"
    limits = LIMITS | ({"init_timeout": 2.0} if case in ("missing", "wrong secret") else {})
    try:
        comm = distributed.connect(
            rank, size, address=address, secret=secret, transport="host", **limits
        )
        begin = time.monotonic()
        globals()[case](comm)
    except Exception as error:
        print(type(error).__name__, getattr(error, "rank", None), error, sep="|")
    print("seconds", time.monotonic() - begin)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
