"""Which rank is this process, of how many, and where do they connect? mpirun, torchrun, Slurm."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from cuflash import __version__
from cuflash._arrays import imported_cupy
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem.checks import finite
from cuflash._problem.foreign_keywords import explain_unknown_keywords
from cuflash.distributed._communicator import CommunicationError, Communicator
from cuflash.distributed._copies import Peers, are_peers
from cuflash.distributed._gpus import devices_of
from cuflash.distributed._layout import counted, counted_rank
from cuflash.distributed._links import joined
from cuflash.distributed._nccl import Nccl, NcclDevices, nccl_module
from cuflash.distributed._processes import Processes

SECRET = "CUFLASH_SECRET"
TRANSPORTS = ("nccl", "host")
_SLURM_PORTS = range(20000, 30000)
_BETWEEN_STEPS = 1009  # ports; jobs of near numbers run at once and have ports side by side
_LEAST_SECRET = 8
_LONGEST = 1e6  # seconds; timeouts of sockets are limited to 24 days


@explain_unknown_keywords
def connect(
    rank: int,
    size: int,
    *,
    address: str = "127.0.0.1:29400",
    secret: str | bytes | None = None,
    transport: str = "nccl",
    device: int | None = None,
    init_timeout: float = 120.0,
    op_timeout: float = 300.0,
    liveness_timeout: float = 10.0,
) -> Communicator:
    """Join processes; each process calls this with its own rank.

    Parameters
    ----------
    rank, size : int
        The rank of this process, and the number of processes.
    address : str
        ``"host:port"`` where rank 0 listens. Other machines cannot reach the default.
    secret : str or bytes
        At least 8 characters, known to all ranks and to nobody else. The default is the environment
        variable ``CUFLASH_SECRET``.
    transport : {"nccl", "host"}
        ``"nccl"`` for CuPy arrays, ``"host"`` for NumPy arrays.
    device : int, optional
        The GPU. The default is the rank modulo the number of GPUs that this process sees.
    init_timeout, op_timeout, liveness_timeout : float
        Seconds within which all ranks must connect, within which an operation must end, and within
        which a rank must give a sign of life.

    Returns
    -------
    communicator
        ``close()`` leaves; so does ``with contextlib.closing(communicator):``.

    Raises
    ------
    TypeError, ValueError
        For an invalid rank, an address without a port, or a missing secret.
    CommunicationError
        If a rank does not connect in time, has another secret, version of cuflash, CuPy or NCCL, or
        transport, shares a GPU with another rank, or fails or leaves while NCCL starts.

    Examples
    --------
    >>> from cuflash import distributed
    >>> comm = distributed.connect(0, 1, secret="a secret", transport="host")
    >>> comm.size
    1
    >>> comm.close()
    """
    rank, size = counted_rank(rank, size)
    transport = _word("transport", transport, TRANSPORTS)
    place, known = _place(address), _secret(secret)
    device = rank if device is None else counted("device", device, 0)
    to_join = _seconds("init_timeout", init_timeout)
    limits = {
        "op_timeout": _seconds("op_timeout", op_timeout),
        "liveness_timeout": _seconds("liveness_timeout", liveness_timeout),
    }
    software = {"cuflash": __version__, "transport": transport}
    if transport == "nccl":
        software["CuPy"] = _require_nccl().__version__
        software["NCCL"] = str(nccl_module().get_version())
    links = joined(rank, size, place, known, to_join, software)
    control = Processes(rank, size, links, **limits)
    if transport == "host":
        return control
    try:
        return _over_nccl(control, device, to_join)
    except BaseException as error:
        if not isinstance(error, CommunicationError):
            text = f"rank {rank} raised while NCCL started: {type(error).__name__}: {error}"
            control.fail(rank, text)
        control.close()
        raise


def from_environment(
    environment: Mapping[str, str] | None = None, /, **options: Any
) -> Communicator:
    """Join the processes that torchrun, Slurm's srun or mpirun has started.

    Parameters
    ----------
    environment : mapping of str to str, optional
        The default is ``os.environ``. torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
        MASTER_PORT (the port is MASTER_PORT + 1). Slurm: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID,
        SLURM_STEP_NODELIST (the port is computed from SLURM_JOB_ID and SLURM_STEP_ID). Open MPI and
        MPICH: their ranks and sizes, with CUFLASH_ADDRESS. CUFLASH_ADDRESS overrides all other
        addresses. Ranks also prove that they belong to the same run: SLURM_JOB_ID and
        SLURM_STEP_ID, torchrun's TORCHELASTIC_RUN_ID, or Open MPI's PMIX_NAMESPACE.
    **options
        As in :func:`connect`; ``device`` is the local rank unless it is given.

    Returns
    -------
    communicator

    Raises
    ------
    RuntimeError
        If no launcher has set its variables.
    TypeError, ValueError, CommunicationError
        As :func:`connect`.

    Examples
    --------
    >>> from cuflash import distributed
    >>> alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29400"}
    >>> comm = distributed.from_environment(alone, secret="a secret", transport="host")
    >>> comm.rank, comm.size
    (0, 1)
    >>> comm.close()
    """
    found: Any = os.environ if environment is None else environment
    if not isinstance(found, Mapping):
        expected = "None or a mapping of str to str, as os.environ"
        raise wrong_type("environment", type(found).__name__, expected)
    rank, size, local, address, run = _launched(found)
    options.setdefault("address", found.get("CUFLASH_ADDRESS", address))
    transport = options.get("transport", "nccl")
    if isinstance(transport, str) and transport == "nccl":
        options.setdefault("device", local)
    secret = options.get("secret")
    secret = _secret(found.get(SECRET) if secret is None else secret)
    # Two runs that started with the same CUFLASH_SECRET shall not join each other.
    options["secret"] = secret + b"\0" + run.encode() if run else secret
    return connect(rank, size, **options)


def from_mpi(mpi: Any, /, *, address: str | None = None, **options: Any) -> Communicator:
    """Join the processes of an mpi4py communicator, which broadcasts a new secret and the port.

    Parameters
    ----------
    mpi : mpi4py.MPI.Comm
        For example ``MPI.COMM_WORLD``. It is only used to join.
    address : str, optional
        The default is a free port of 127.0.0.1, which works if all ranks are on one machine. For
        several machines, ``"host:port"`` of rank 0.
    **options
        As in :func:`connect`.

    Returns
    -------
    communicator

    Raises
    ------
    TypeError, ValueError, CommunicationError
        As :func:`connect`.

    Examples
    --------
    >>> from cuflash import distributed
    >>> class Alone:  # as MPI.COMM_SELF
    ...     Get_rank, Get_size = lambda self: 0, lambda self: 1
    ...     bcast = lambda self, value, root: value
    >>> comm = distributed.from_mpi(Alone(), transport="host")
    >>> comm.close()
    """
    if not all(hasattr(mpi, name) for name in ("Get_rank", "Get_size", "bcast")):
        raise wrong_type("mpi", shown(mpi), "a communicator of mpi4py, as MPI.COMM_WORLD")
    rank, size = mpi.Get_rank(), mpi.Get_size()
    place = f"127.0.0.1:{free_port()}" if address is None else address
    made = (secrets.token_hex(), place) if rank == 0 else None
    secret, place = mpi.bcast(made, root=0)
    return connect(rank, size, address=place, secret=secret, **options)


def from_devices(devices: Any, /, *, transport: str = "auto") -> Communicator:
    """Ranks on several GPUs of this process. Functions then take and return lists.

    Parameters
    ----------
    devices : list of int
        Numbers of GPUs.
    transport : {"auto", "copy", "nccl"}
        ``"copy"`` needs GPUs that can access each other's memory (peers): copy engines, which
        need no SM, move the arrays. ``"auto"`` is ``"copy"`` for peers, else ``"nccl"``.

    Returns
    -------
    communicator

    Raises
    ------
    TypeError, ValueError
        Unless ``devices`` is a list of different GPUs, or for copies between GPUs that are not
        peers.
    ImportError
        If CuPy, or NCCL where it is used, is not installed.

    Examples
    --------
    >>> from cuflash import distributed
    >>> comm = distributed.from_devices([0, 1])  # doctest: +SKIP
    >>> q = distributed.shard(q, comm=comm)  # doctest: +SKIP
    """
    transport = _word("transport", transport, ("auto", "copy", "nccl"))
    numbers = devices_of(devices)
    peers = transport != "nccl" and are_peers(numbers)
    if transport == "copy" and not peers:
        wrong = f"GPUs {shown(list(numbers))}, some of which are not peers"
        raise wrong_value("devices", wrong, 'peers for transport="copy"', 'use transport="nccl"')
    if peers:
        return Peers(numbers)
    _require_nccl()
    return NcclDevices.of(numbers)


def _over_nccl(control: Processes, device: int, init_timeout: float) -> Communicator:
    cupy = _require_nccl()
    return Nccl(control, device % cupy.cuda.runtime.getDeviceCount(), init_timeout)


def _require_nccl() -> Any:
    """Return CuPy; ImportError unless it has NCCL."""
    fix = "install cuflash[cuda12,nccl12] or cuflash[cuda13,nccl13]"
    try:
        nccl = nccl_module()
    except ImportError as error:
        raise ImportError(f'transport="nccl" needs CuPy; {fix}') from error
    if not nccl.available:
        raise ImportError(f'transport="nccl": CuPy finds no NCCL; {fix}')
    return imported_cupy()


def _launched(found: Mapping[str, str]) -> tuple[int, int, int, str, str]:
    """Rank, size, local rank, address and run, of the first launcher that left its variables."""
    for (rank_of, size_of, local_of), meeting_of in _LAUNCHERS.items():
        if rank_of in found and size_of in found:
            rank, size = _number(found, rank_of), _number(found, size_of)
            return rank, size, _number(found, local_of, rank), *meeting_of(found)
    raise RuntimeError(
        "no launcher has set RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK or PMI_RANK; "
        "start with torchrun, srun or mpirun, or call cuflash.distributed.connect(rank, size)"
    )


def _number(found: Mapping[str, str], name: str, default: int = 0) -> int:
    """The number in a launcher's variable."""
    text = found.get(name, default)
    try:
        return int(text)
    except (TypeError, ValueError):
        raise wrong_value(name, shown(text), "an int, as launchers set it") from None


def _beside_torchrun(found: Mapping[str, str]) -> tuple[str, str]:
    """The port above that of torchrun, which listens at its own, and torchrun's name of the run."""
    host, port = found.get("MASTER_ADDR", "127.0.0.1"), _number(found, "MASTER_PORT", 29399) + 1
    return f"{host}:{port}", found.get("TORCHELASTIC_RUN_ID", "")


def _of_slurm(found: Mapping[str, str]) -> tuple[str, str]:
    """The first host and a port that follows from job and step, which name the run.

    Several steps (calls of srun) of a job may run at once, each on some of the job's nodes.
    """
    job, step = _number(found, "SLURM_JOB_ID"), _number(found, "SLURM_STEP_ID")
    port = _SLURM_PORTS[(job + _BETWEEN_STEPS * step) % len(_SLURM_PORTS)]
    nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in found else "SLURM_JOB_NODELIST"
    count = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in found else "SLURM_NNODES"
    several = _number(found, count, 1) > 1
    host = first_host(found.get(nodes, ""), nodes) if several else "127.0.0.1"
    return f"{host}:{port}", f"Slurm job {job} step {step}"


def _loopback(found: Mapping[str, str]) -> tuple[str, str]:
    return "127.0.0.1:29400", found.get("PMIX_NAMESPACE", "")


#: By the variables of rank, size and local rank: where rank 0 listens, and a name of the run that
#: only its ranks have. The first that is there.
_LAUNCHERS = {
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"): _beside_torchrun,
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"): _of_slurm,
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"): _loopback,
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"): _loopback,  # MPICH
}


def first_host(nodes: str, name: str = "SLURM_JOB_NODELIST") -> str:
    """The first of Slurm's list of hosts, as ``gpu[03-05,9],login1``."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if not found:
        raise wrong_value(name, shown(nodes), "a list of hosts")
    return found[1] + (found[2] or "") + found[3]


def _place(address: Any) -> tuple[str, int]:
    expected = '"host:port" where rank 0 listens'
    if not isinstance(address, str):
        raise wrong_type("address", shown(address), expected)
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536
    try:
        host.encode("idna")  # as a socket does
    except UnicodeError:
        host = ""
    if not host or not is_port:
        raise wrong_value("address", shown(address), expected)
    return host.strip("[]"), int(port)


def _word(name: str, value: Any, words: tuple[str, ...]) -> str:
    """Check that a value is one of the words, and return it."""
    if not isinstance(value, str) or value not in words:
        wrong = wrong_value if isinstance(value, str) else wrong_type
        raise wrong(name, shown(value), " or ".join(map(repr, words)))
    return value


def _seconds(name: str, value: Any) -> float:
    """A checked timeout."""
    expected = f"seconds, above 0 and at most {_LONGEST:g}"
    number = finite(name, value, expected)
    if not 0 < number <= _LONGEST:
        raise wrong_value(name, shown(value), expected)
    return number


def _secret(secret: Any) -> bytes:
    found = os.environ.get(SECRET) if secret is None else secret
    fix = f"export {SECRET}=$(openssl rand -hex 16) before all ranks start"
    if found is None:
        raise wrong_value("secret", "none", "a secret that only the ranks know", fix)
    if not isinstance(found, str | bytes):
        raise wrong_type("secret", type(found).__name__, "a str or bytes", fix)
    if len(found) < _LEAST_SECRET:
        raise wrong_value("secret", f"{len(found)} characters", f"at least {_LEAST_SECRET}", fix)
    return found.encode() if isinstance(found, str) else found


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
