"""Where do ranks learn who they are?"""

from __future__ import annotations

import contextlib
import socket
import threading

import numpy as np
import pytest

from cuflash import distributed
from cuflash.distributed import _launchers

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7",
            "MASTER_PORT": "29500"}  # fmt: skip
SLURM = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NNODES": "2",
         "SLURM_JOB_NODELIST": "gpu[03-04,9]", "SLURM_JOB_ID": "1234567"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1"}  # fmt: skip
JOB = "\0Slurm job 1234567 step 0"
#: A step on one of the job's nodes, and one on two of them.
STEP = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu09"}
STEPS = STEP | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[04,9]"}


@pytest.mark.parametrize(
    ("environment", "rank", "size", "address", "device", "run"),
    [
        (TORCHRUN, 3, 4, "10.0.0.7:29501", 1, ""),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "a7"}, 3, 4, "10.0.0.7:29501", 1, "\0a7"),
        (SLURM, 9, 16, "gpu03:24567", 1, JOB),
        (SLURM | {"SLURM_NNODES": "1"}, 9, 16, "127.0.0.1:24567", 1, JOB),
        (SLURM | STEP, 9, 16, "127.0.0.1:27594", 1, "\0Slurm job 1234567 step 3"),
        (SLURM | STEPS, 9, 16, "gpu04:27594", 1, "\0Slurm job 1234567 step 3"),
        (OPEN_MPI, 1, 2, "127.0.0.1:29400", 1, ""),
        (OPEN_MPI | {"PMIX_NAMESPACE": "7.1"}, 1, 2, "127.0.0.1:29400", 1, "\x007.1"),
        (OPEN_MPI | {"CUFLASH_ADDRESS": "a:5"}, 1, 2, "a:5", 1, ""),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0, 2, "127.0.0.1:29400", 0, ""),
    ],
)
def test_variables_of_launchers(monkeypatch, environment, rank, size, address, device, run):
    monkeypatch.setattr(_launchers, "connect", lambda rank, size, **options: (rank, size, options))
    found = distributed.from_environment(environment | {"CUFLASH_SECRET": "a secret"})
    secret = b"a secret" + run.encode()
    assert found == (rank, size, {"secret": secret, "address": address, "device": device})


def test_two_steps_of_a_slurm_job_do_not_join():
    """Rank 0 of a step and rank 1 of another, at one address and with one secret, refuse."""
    errors = {}
    how = {"secret": "long enough", "transport": "host", "init_timeout": 1.5}
    how["address"] = f"127.0.0.1:{_launchers.free_port()}"

    def join(rank):
        step = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_ID": str(rank)}
        try:
            distributed.from_environment({"SLURM_JOB_ID": "4711"} | step, **how).close()
        except distributed.CommunicationError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(errors) == {0, 1}
    assert "ranks that did not connect in time: 1; 1 connections were refused" in errors[0]
    assert errors[1] == "rank 0 does not know the secret, or is of another run"


def test_arguments_go_before_variables(monkeypatch):
    monkeypatch.setattr(_launchers, "connect", lambda rank, size, **options: options)
    given = {"address": "b:6", "secret": b"my secret", "device": 3}
    environment = TORCHRUN | {"CUFLASH_ADDRESS": "a:5", "CUFLASH_SECRET": "a secret"}
    assert distributed.from_environment(environment, **given) == given


def test_an_address_of_six_bytes_in_brackets():
    assert _launchers._place("[::1]:29400") == ("::1", 29400)


def test_ranks_of_mpi_have_the_secret_and_the_port_of_the_first():
    told, ready = [], threading.Event()

    class Mpi:
        def __init__(self, rank):
            self.rank = rank

        def Get_rank(self):
            return self.rank

        def Get_size(self):
            return 2

        def bcast(self, value, root):
            if self.rank == root:
                told.append(value)
                ready.set()
            else:
                assert value is None
            assert ready.wait(10)
            return told[0]

    found = {}

    def join(rank):
        with contextlib.closing(
            distributed.from_mpi(Mpi(rank), transport="host", init_timeout=10.0)
        ) as comm:
            found[rank] = comm.agree({rank: b"%d" % rank})

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: [b"0", b"1"], 1: [b"0", b"1"]}
    assert len(told[0][0]) >= 32


def test_no_launcher():
    with pytest.raises(RuntimeError, match="no launcher has set RANK"):
        distributed.from_environment({})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("gpu[03-05,9],login1", "gpu03"), ("n1,n2", "n1"), ("x[7]-ib", "x7-ib")],
)
def test_first_host(nodes, first):
    assert _launchers.first_host(nodes) == first


def test_a_list_of_hosts_that_is_none_is_named():
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST: got '', expected a list of hosts"):
        distributed.from_environment(SLURM | STEPS | {"SLURM_STEP_NODELIST": ""}, **ALONE)


def test_wrong_arguments(monkeypatch):
    monkeypatch.delenv("CUFLASH_SECRET", raising=False)
    for call, kind, message in (
        ({}, ValueError, "secret: got none, .*CUFLASH_SECRET=.*openssl"),
        ({"secret": "short"}, ValueError, "secret: got 5 characters, expected at least 8"),
        ({"secret": 5}, TypeError, "secret: got int"),
        ({"secret": "long enough", "address": "host"}, ValueError, "address: got 'host'"),
        ({"secret": "long enough", "address": ":29400"}, ValueError, "address: got ':29400'"),
        ({"secret": "long enough", "address": "a:65536"}, ValueError, "address: got 'a:65536'"),
        ({"secret": "long enough", "address": 29400}, TypeError, "address: got 29400"),
        ({"transport": "mpi"}, ValueError, "transport: got 'mpi', expected 'nccl' or 'host'"),
    ):
        with pytest.raises(kind, match=message):
            distributed.connect(0, 1, **call)
    with pytest.raises(ValueError, match="rank: got 2"):
        distributed.connect(2, 2, secret="long enough")


def test_ranks_that_were_told_of_other_numbers():
    address = f"127.0.0.1:{_launchers.free_port()}"
    errors = {}

    def join(rank, size):
        how = {"secret": "long enough", "transport": "host", "init_timeout": 3.0}
        try:
            distributed.connect(rank, size, address=address, **how).close()
        except distributed.CommunicationError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=join, args=pair) for pair in ((0, 2), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(errors) == {0, 1}
    assert all("rank 1 got size 3, rank 0 got size 2" in text for text in errors.values())


ALONE = {"secret": "long enough", "transport": "host", "address": "127.0.0.1:0"}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"transport": None}, TypeError, "transport: got None, expected 'nccl' or 'host'"),
        ({"transport": np.zeros(3)}, TypeError, "transport: got array"),
        ({"device": -1}, ValueError, "device: got -1, expected an int >= 0"),
        ({"init_timeout": "1"}, TypeError, "init_timeout: got '1', expected seconds, above 0"),
        ({"op_timeout": None}, TypeError, "op_timeout: got None"),
        ({"op_timeout": 10**400}, ValueError, "op_timeout: got an int beyond"),
        ({"liveness_timeout": 0}, ValueError, "liveness_timeout: got 0, expected seconds, above 0"),
        ({"liveness_timeout": 1e7}, ValueError, "at most 1e.06"),
        ({"address": "host:²"}, ValueError, "address: got 'host:²', expected \"host:port\""),
        ({"address": "host:" + "1" * 5000}, ValueError, "address: got"),
        ({"address": "h" * 100 + ":1"}, ValueError, "address: got"),
        ({"size": 2**40}, ValueError, "size: got 1099511627776, expected at most 65536"),
        ({"timeout": 3}, TypeError, "timeout: got an unknown keyword.* did you mean op_timeout="),
    ],
)
def test_wrong_arguments_of_connect_are_named(wrong, error, message):
    with pytest.raises(error, match=message):
        distributed.connect(**{"rank": 0, "size": 1} | ALONE | wrong)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "first"}, "RANK: got 'first', expected an int, as launchers set it"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: got ''"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK: got 'x'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: got 'http'"),
        ({"RANK": "1"}, "rank: got 1, expected a rank below size, 1"),
    ],
)
def test_variables_that_are_no_numbers_are_named(variables, message):
    right = {"RANK": "0", "WORLD_SIZE": "1"}
    with pytest.raises(ValueError, match=message):
        distributed.from_environment(right | variables, **ALONE)
    with pytest.raises(TypeError, match="environment: got list, expected None or a mapping"):
        distributed.from_environment([*right], **ALONE)


def test_an_address_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        message = rf"cannot listen at {place} \(.*in use"
        with pytest.raises(distributed.CommunicationError, match=message):
            distributed.connect(0, 2, **ALONE | {"address": place})
        distributed.connect(0, 1, **ALONE | {"address": place}).close()  # alone it needs no port
