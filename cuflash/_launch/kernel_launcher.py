"""How does a kernel start? From an argument list that is packed once for each set of addresses."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from cupy_backends.cuda.api import driver

from cuflash._jit.compilation import Kernel

_LIMIT = 64  # of a launch; a kilobyte each
Addresses = tuple[int, ...]


class Starter:
    """Starts ``grid`` blocks of threads of a kernel: repeated calls find their argument lists."""

    def __init__(self, kernel: Kernel, grid: int) -> None:
        self._kernel = kernel  # stays loaded
        self._launch = functools.partial(
            driver.launchKernel, kernel.pointer, grid, 1, 1, kernel.num_threads, 1, 1,
            kernel.smem_bytes,
        )  # fmt: skip
        self._known: dict[Addresses, tuple[int, ctypes.c_char_p]] = {}

    def start(self, addresses: Addresses, pack: Callable[[Addresses], bytes], stream: int) -> None:
        """Launch on ``stream`` with one argument, the parameters that ``pack`` gives for these."""
        found = self._known.get(addresses)
        if found is None:
            argument = ctypes.c_char_p(pack(addresses))  # a char* is all that the driver reads
            found = ctypes.addressof(argument), argument
            if len(self._known) >= _LIMIT:
                self._known.clear()
            self._known[addresses] = found
        self._launch(stream, found[0], 0)
