"""How does a kernel start? From an argument list that is packed once for each set of addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from cupy_backends.cuda.api import driver

from cuflash._compile import Kernel

_LIMIT = 64  # of a launch; a kilobyte each
Addresses = tuple[int, ...]


class KnownArguments:
    """Argument lists of one launch, by the addresses in them: repeated calls find theirs."""

    def __init__(self) -> None:
        self._known: dict[Addresses, ctypes.c_char_p] = {}

    def at(self, addresses: Addresses, pack: Callable[[Addresses], bytes]) -> ctypes.c_char_p:
        """The list for these addresses: one argument, the parameters that ``pack`` gives.

        A char* is all of it that the driver reads. The caller holds it until it has launched.
        """
        found = self._known.get(addresses)
        if found is None:
            found = ctypes.c_char_p(pack(addresses))
            if len(self._known) >= _LIMIT:
                self._known.clear()
            self._known[addresses] = found
        return found


def start(kernel: Kernel, grid: int, arguments: ctypes.c_char_p, stream: int) -> None:
    """Launch ``grid`` blocks of threads on ``stream``."""
    driver.launchKernel(
        kernel.pointer, grid, 1, 1, kernel.num_threads, 1, 1,
        kernel.smem_bytes, stream, ctypes.addressof(arguments), 0,
    )  # fmt: skip
