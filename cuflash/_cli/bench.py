"""How fast is it, next to what else is importable?

The benchmarks are in the folder ``benchmarks/`` of a checkout, which the installed package lacks.
"""

from __future__ import annotations

import argparse
import sys

from cuflash._jit.source import kernels_dir

SUMMARY = "time calls next to whatever peers are importable, or the device's memory (in a checkout)"
EXAMPLES = ""


def find_benchmarks() -> None:
    """Make the package ``benchmarks`` importable; an ImportError where this is no checkout."""
    checkout = kernels_dir().parent
    if not (checkout / "benchmarks" / "command.py").is_file():
        raise ImportError(
            "the benchmarks are not part of the installed package: run this in a checkout of the "
            "sources of cuflash, which has the folder benchmarks/"
        )
    if sys.path[:1] != [str(checkout)]:  # before any other package of that name
        sys.path.insert(0, str(checkout))


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command, as far as it is here."""
    try:
        find_benchmarks()
    except ImportError as absent:
        p.epilog = str(absent)
        p.set_defaults(any_words=True)
        return
    from benchmarks import command

    command.add_arguments(p)


def run(arguments: argparse.Namespace) -> int:
    """Measure."""
    find_benchmarks()
    from benchmarks import command

    return command.measure(arguments, f"python -m cuflash {' '.join(sys.argv[1:])}")
