"""How does attention run over a sequence that is split among several GPUs or processes?

Each rank calls the same functions on its own rows: see docs/distributed.md. There is no global
state: the communicator is an argument.
"""

from cuflash.distributed._attention import attention, attention_backward, attention_vjp
from cuflash.distributed._communicator import CommunicationError
from cuflash.distributed._explain import explain
from cuflash.distributed._launchers import connect, from_devices, from_environment, from_mpi
from cuflash.distributed._layout import positions
from cuflash.distributed._rows import shard, unshard
from cuflash.distributed._simulated import simulated

CommunicationError.__module__ = __name__

__all__ = [
    "CommunicationError", "attention", "attention_backward", "attention_vjp", "connect", "explain",
    "from_devices", "from_environment", "from_mpi", "positions", "shard", "simulated", "unshard",
]  # fmt: skip
