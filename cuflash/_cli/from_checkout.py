"""What needs a checkout? Its code is in the folder ``benchmarks/``.

The installed package lacks that folder: comparisons with peers, pictures and counters of a device
serve whoever develops kernels. Without it a command says in one line where to get it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from types import ModuleType

from cuflash._jit.source import kernels_dir


def module(name: str) -> ModuleType:
    """A module of ``benchmarks/``; an ImportError where this is no checkout."""
    checkout = kernels_dir().parent
    if not (checkout / "benchmarks" / "command.py").is_file():
        raise ImportError(
            "the benchmarks are not part of the installed package: run this in a checkout of the "
            "sources of cuflash, which has the folder benchmarks/"
        )
    if sys.path[:1] != [str(checkout)]:  # before any other package of that name
        sys.path.insert(0, str(checkout))
    from benchmarks import command, plot, profiler

    return {"command": command, "plot": plot, "profiler": profiler}[name]


@dataclass(frozen=True)
class FromCheckout:
    """A command that is described and run by a module of ``benchmarks/``."""

    module: str
    SUMMARY: str
    EXAMPLES: str = ""

    def add_arguments(self, p: argparse.ArgumentParser) -> None:
        """Describe the command, as far as it is here."""
        try:
            module(self.module).add_arguments(p)
        except ImportError as absent:
            p.epilog = str(absent)
            p.set_defaults(any_words=True)

    def run(self, arguments: argparse.Namespace) -> int:
        """Do what is asked for."""
        return int(module(self.module).run(arguments))


bench = FromCheckout(
    "command",
    "time calls and installed peers, or the device's memory (in a checkout)",
)
plot = FromCheckout("plot", "draw sweeps and benchmarks, PNG and SVG")
