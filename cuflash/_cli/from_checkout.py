"""Commands that need a checkout, because their code is in its folder ``benchmarks/``.

The installed package does not have this folder: comparisons with peers, pictures and counters of a
device are for developers of kernels. Without the folder a command says in one line where to get it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from types import ModuleType

from cuflash._jit.source import kernels_dir


def module(name: str) -> ModuleType:
    """Import a module of ``benchmarks/``; ImportError unless this is a checkout."""
    checkout = kernels_dir().parent
    if not (checkout / "benchmarks" / "command.py").is_file():
        raise ImportError(
            "the benchmarks are not part of the installed package: run this in a checkout of the "
            "sources of cuflash, which has the folder benchmarks/"
        )
    if sys.path[:1] != [str(checkout)]:  # goes before any other package called benchmarks
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
        """Describe the command, or say that it needs a checkout."""
        try:
            module(self.module).add_arguments(p)
        except ImportError as absent:
            p.epilog = str(absent)
            p.set_defaults(any_words=True)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command."""
        return int(module(self.module).run(arguments))


bench = FromCheckout(
    "command",
    "time calls and installed peers, or the device's memory (in a checkout)",
)
plot = FromCheckout("plot", "draw sweeps and benchmarks, PNG and SVG")
