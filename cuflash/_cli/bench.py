"""How fast is it, next to what else is importable?"""

from __future__ import annotations

import argparse
import sys

SUMMARY = "time calls next to whatever peers are importable, or the device's memory"
EXAMPLES = ""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command."""
    from cuflash._bench import command

    command.add_arguments(p)


def run(arguments: argparse.Namespace) -> int:
    """Measure."""
    from cuflash._bench import command

    return command.measure(arguments, f"python -m cuflash {' '.join(sys.argv[1:])}")
