"""The command line. Each command has a module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuflash import __version__
from cuflash._cli import cache, explain, info, tune
from cuflash._cli.from_checkout import bench, plot
from cuflash._errors import CompileError

#: Exit statuses beside 0: a command found something wrong, was called wrongly, was interrupted.
FOUND_WRONG, ASKED_WRONG, INTERRUPTED = 1, 2, 130
_COMMANDS: dict[str, Any] = {
    "info": info,
    "bench": bench,
    "tune": tune,
    "plot": plot,
    "cache": cache,
    "explain": explain,
}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = argparse.ArgumentParser(
        prog="cuflash" if Path(sys.argv[0]).stem == "cuflash" else "python -m cuflash",
        description="Exact attention on arrays: what is here, how fast it is, which tiles to take.",
        epilog="exit status: 0 done, 1 something was found wrong, 2 a wrong argument or file, "
        "130 interrupted",
    )
    p.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = p.add_subparsers(required=True, metavar="command")
    for name, command in _COMMANDS.items():
        own = commands.add_parser(
            name, help=command.SUMMARY, description=command.SUMMARY, epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    p = parser()
    if not (sys.argv[1:] if argv is None else argv):
        p.print_help(sys.stderr)
        return ASKED_WRONG
    arguments, unknown = p.parse_known_args(argv)
    if unknown and not hasattr(arguments, "any_words"):  # set by a command that is not installed
        p.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = arguments.run(arguments)
    except (ValueError, TypeError, NotImplementedError, FileNotFoundError) as error:
        print(f"cuflash: {error}", file=sys.stderr)
        return ASKED_WRONG
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND_WRONG
    except (RuntimeError, CompileError, ImportError, OSError, MemoryError) as error:
        print(f"cuflash: {error}", file=sys.stderr)
        return FOUND_WRONG
    except KeyboardInterrupt:
        print("cuflash: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status
