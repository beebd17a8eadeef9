"""List the kernels that the GPU tests launch, and compile them without a GPU.

    python -m pytest -m gpu --slow --rehearse kernels.jsonl        # lists kernels, launches none
    python tools/gpu_kernels.py count kernels.jsonl
    python tools/gpu_kernels.py compile kernels.jsonl FOLDER       # with the NVRTC that CuPy uses
    CUFLASH_KERNELS=FOLDER python tools/gpu_evidence.py run OUT    # on the machine with the GPU

A folder works with any CuPy and any driver that supports the architecture. Use the same NVRTC as on
that machine, since the evidence is about the kernels that it compiles. Kernels that are already in
the folder are not changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from cuflash._jit import compilation, cubin_cache  # noqa: E402
from cuflash._select import hardware  # noqa: E402
from cuflash.tuning._facts import compile_all  # noqa: E402
from cuflash.tuning._kernels import config_from_json  # noqa: E402


def read(paths: Sequence[Path]) -> dict[Any, set[str]]:
    """The tests that launch each kernel; a kernel is (architecture, configuration)."""
    found: dict[Any, set[str]] = defaultdict(set)
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[row["arch"], config_from_json(row["config"])].add(row["test"])
    return found


def count(kernels: dict[Any, set[str]]) -> str:
    """A line for each file of tests: number of kernels, number that only this file launches."""
    files = {own: {test.partition("::")[0] for test in tests} for own, tests in kernels.items()}
    every, alone = Counter[str](), Counter[str]()
    for of in files.values():
        every.update(of)
        alone.update(of if len(of) == 1 else ())
    lines = [f"{n:5} {alone[file]:5} {file}" for file, n in every.most_common()]
    return "\n".join([*lines, f"{len(kernels):5}       in all"])


def compile_missing(kernels: dict[Any, set[str]], folder: Path, processes: int | None) -> list[str]:
    """Compile the kernels that the folder lacks; return the errors."""

    def lacking(own: Any) -> str:
        arch, config = own
        return cubin_cache.problem_of(folder / f"{compilation.shared_name(config, arch)}.cubin")

    missing = [config for arch, config in filter(lacking, kernels)]
    start = time.perf_counter()
    facts = compile_all(
        missing, hardware.typical("sm_90"), processes=processes, shared=folder, progress=_tell
    )
    took = time.perf_counter() - start
    seconds = sum(own.compile_seconds for own in facts.values())
    print(f"\n{len(facts)} compiled in {took:.0f} s, {seconds:.0f} s of one core")
    return [f"{config}: {own.error}" for config, own in facts.items() if own.error]


def _tell(ready: int, of: int) -> None:
    if sys.stdout.isatty():
        print(f"\r{ready} of {of}", end="", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Count or compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="do", required=True)
    for name in ("count", "compile"):
        own = actions.add_parser(name)
        own.add_argument("lists", type=Path, nargs="+")
        if name == "compile":
            own.add_argument("folder", type=Path)
            own.add_argument("--processes", type=int, help="default: one for each core")
    arguments = parser.parse_args(argv)
    kernels = read(arguments.lists)
    if arguments.do == "count":
        print(count(kernels))
        return 0
    errors = compile_missing(kernels, arguments.folder, arguments.processes)
    print(*errors, sep="\n", end="\n" if errors else "")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
