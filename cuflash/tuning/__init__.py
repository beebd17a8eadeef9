"""Which tiles are fastest on this device? Spaces of configurations, sweeps, and their use.

>>> from cuflash import tuning
>>> work = tuning.Workload(2, 16, 16, 4096, 4096, 128, 128, "bfloat16", causal=True)
>>> len(tuning.space(work, arch="sm_90a")) > 200
True
"""

from cuflash._select.override import BackwardConfigs
from cuflash.tuning._facts import Facts
from cuflash.tuning._kernel_tuner import read_cache, write_cache
from cuflash.tuning._rows import Sweep, load
from cuflash.tuning._space import Candidate, Space, space
from cuflash.tuning._sweep import Progress, default_file, sweep
from cuflash.tuning._table import save, use, user_table
from cuflash.tuning._workload import Workload

__all__ = [
    "BackwardConfigs",
    "Candidate",
    "Facts",
    "Progress",
    "Space",
    "Sweep",
    "Workload",
    "default_file",
    "load",
    "read_cache",
    "save",
    "space",
    "sweep",
    "use",
    "user_table",
    "write_cache",
]
