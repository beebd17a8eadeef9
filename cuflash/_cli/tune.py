"""Which tiles are fastest for a problem on this device?"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from cuflash import tuning
from cuflash._cli.info import no_device
from cuflash._cli.problem_arguments import (
    add_problem,
    listed,
    positive,
    positive_number,
    problem_of,
)
from cuflash._select import hardware
from cuflash._timing.clock import WITHIN_ROUNDS
from cuflash.tuning._kernels import KERNELS
from cuflash.tuning._strategies import strategy_of
from cuflash.tuning._sweep import Compiled

SUMMARY = "sweep the configurations of a kernel, and keep the fastest"
EXAMPLES = """\
examples:
  python -m cuflash tune --head-dim 128 --causal                  # everything that is legal
  python -m cuflash tune --budget 40 --strategy random
  python -m cuflash tune --parameters block_m=128 block_n=96,112,128 --file h100.jsonl
  python -m cuflash tune --kernel backward_dkv_sm90 --strategy genetic_algorithm --budget 60
  python -m cuflash tune --list --arch sm_80 --parameters num_warps=4 blocks_per_sm=2    # no GPU
  python -m cuflash tune --save                                   # into the table of this user

Interrupt it with Ctrl-C; the same command continues at the end of its file. Without a GPU the space
is listed and compiled, without CuPy or NVRTC it is only listed. The extra tune installs the
strategies of kernel-tuner.

exit status: 0 done, 1 nothing was timed, no configuration is correct, or a listed one was not
compiled, 2 a wrong argument or file, 130 interrupted
"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command."""
    add_problem(p)
    group = p.add_argument_group("sweep")
    group.add_argument("--kernel", choices=tuple(KERNELS), help="default: the forward that runs")
    group.add_argument(
        "--parameters", nargs="+", default=[], metavar="NAME=VALUES",
        help="values to try instead of all: block_n=96,128",
    )  # fmt: skip
    group.add_argument("--strategy", default="exhaustive", help="exhaustive (default), random, ...")
    group.add_argument("--budget", type=positive, help="most configurations to time")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--file", type=Path, help="rows, one JSON object a line (default: a new name)"
    )
    group.add_argument(
        "--no-check", dest="check", action="store_false", help="do not compare with the reference"
    )
    group.add_argument(
        "--time-limit", type=positive_number, default=30.0, help="seconds for each configuration"
    )
    group.add_argument(
        "--budget-ms", type=positive_number, default=60.0,
        help=f"ms of timing for each configuration, {WITHIN_ROUNDS} (default: 60)",
    )  # fmt: skip
    group.add_argument(
        "--processes", type=positive, help="processes that compile (default: one for each core)"
    )
    group.add_argument("--arch", help="list for this architecture, sm_90a; nothing is timed")
    group.add_argument("--list", action="store_true", help="list and compile, time nothing")
    group.add_argument("--save", action="store_true", help="keep the best in this user's table")
    group.add_argument("--kernel-tuner", type=Path, metavar="JSON", help="also write its format")
    group.add_argument("--json", action="store_true", help="print JSON, progress to stderr")


def run(arguments: argparse.Namespace) -> int:
    """Sweep, or list the configurations if nothing can be timed."""
    work = problem_of(arguments)
    strategy_of(arguments.strategy)  # refuses a wrong name before anything is compiled
    found = tuning.space(
        work, arguments.kernel, arch=arguments.arch, parameters=parameters_of(arguments.parameters)
    )
    if arguments.list or arguments.arch is not None:
        return 0 if _list(found, arguments) else 1
    if hardware.present() is None:
        later = (
            "; the same command on a machine with a GPU finds the compiled kernels if the kernel "
            "cache is shared"
        )
        compiled = _list(found, arguments)
        print(f"nothing was timed: {no_device()}{later if compiled else ''}", file=sys.stderr)
        return 1
    file = arguments.file or tuning.default_file(found)
    names = ("strategy", "budget", "seed", "check", "time_limit", "budget_ms", "processes")
    given = {name: getattr(arguments, name) for name in names}
    result = tuning.sweep(work, found, file=file, **given)
    if arguments.kernel_tuner:
        tuning.write_cache(result, arguments.kernel_tuner)
    try:
        best = result.best
    except ValueError as error:  # about the results, not about the arguments
        _report(result, None, file, as_json=arguments.json)
        print(f"cuflash: {error}", file=sys.stderr)
        return 1
    if arguments.save:
        print(f"kept in {tuning.save(result)}", file=sys.stderr)
    _report(result, best, file, as_json=arguments.json)
    return 0


def parameters_of(given: list[str]) -> dict[str, list[int]]:
    """Values by name, from words such as NAME=VALUE,VALUE."""
    found: dict[str, list[int]] = {}
    for text in given:
        name, _, values = text.partition("=")
        if name in found:
            raise ValueError(f"parameters: got {name} twice, expected {name}=VALUE,VALUE once")
        try:
            found[name] = listed(int)(values)
        except argparse.ArgumentTypeError:
            raise ValueError(f"parameters: got {text!r}, expected NAME=VALUE,VALUE") from None
    return found


def _list(found: Any, arguments: argparse.Namespace) -> bool:
    """Print the space; return whether all of it compiles."""
    chosen = list(found)[: arguments.budget]
    facts: dict[str, tuning.Facts] = {}
    try:
        facts = found.compile(chosen, processes=arguments.processes, progress=Compiled())
    except ImportError as error:  # facts that need no compiler are printed in any case
        print(f"cuflash: nothing was compiled: {error}", file=sys.stderr)
    right = all(c.key in facts and not facts[c.key].error for c in chosen)
    if arguments.json:
        print(json.dumps({
            "kernel": found.kernel,
            "device": found.hardware.name,
            "arch": found.hardware.arch,
            "default": found.default_key,
            "configs": [
                {"key": c.key, "values": dict(zip(found.parameters, c.values, strict=True)),
                 "num_threads": c.config.num_threads, **_facts_of(c, facts.get(c.key))}
                for c in chosen
            ],
            "refused": {c.key: c.refusal for c in found.candidates if c.config is None},
        }))  # fmt: skip
        return right
    work = f"{found.workload} {found.workload.dtype}"
    print(f"{found.kernel} for {found.hardware.name} ({found.hardware.arch}): {work}")
    print("shared memory and threads of a block; registers of a thread, bytes of them spilled;")
    print("blocks and warps of an SM; seconds to compile; warnings of ptxas")
    titles = f"{'KiB':>7}{'threads':>9}{'regs':>6}{'spill':>7}{'blocks':>8}{'warps':>7}{'s':>6}"
    print(f"{','.join(found.parameters)}\n{'':<18}{titles}")
    for c in chosen:
        mark = "  <- shipped" if c.key == found.default_key else ""
        print(f"{c.key:<18}{_line(c, facts.get(c.key)).rstrip()}{mark}")
    refused = len(found.candidates) - len(found)
    print(f"{len(found)} legal, {refused} combinations are not (--json says why)")
    return right


def _facts_of(candidate: Any, own: Any) -> dict[str, Any]:
    """Facts in values that JSON supports; None for those that need a compiler."""
    smem_bytes = candidate.config.smem_bytes
    unknown = dict.fromkeys(tuning.Facts(smem_bytes).as_json()) | {"smem_bytes": smem_bytes}
    return unknown if own is None else dict(own.as_json())


def _line(candidate: Any, own: Any) -> str:
    if own is not None and own.error:
        return f"  {own.error}"
    known = f"{candidate.config.smem_bytes / 1024:7.1f}{candidate.config.num_threads:9}"
    if own is None:
        return f"{known}{'?':>6}{'?':>7}{'?':>8}{'?':>7}{'?':>6}"
    blocks, warps = own.blocks_per_multiprocessor, own.warps_per_multiprocessor
    compiled = f"{own.registers:6}{own.spill_bytes:7}{blocks:8}{warps:7}{own.compile_seconds:6.1f}"
    return f"{known}{compiled}  {' '.join(own.warnings)}"


def _report(result: Any, best: Any, file: Path, *, as_json: bool) -> None:
    states = Counter(row["status"] for row in result.rows)
    final = result.finals[-1] if result.finals else None
    if as_json:
        print(json.dumps({"file": str(file), "best": best, "states": states, "final": final}))
        return
    print(f"{file}: {', '.join(f'{count} {state}' for state, count in sorted(states.items()))}")
    print(f"default {result.header['default']}")
    if best is None:
        return
    print(f"best    {best['key']}  {best['values']}")
    if final and best["key"] in final["ms"]:
        ms = final["ms"][best["key"]]
        print(f"{ms:.4g} ms against {final['default_ms']:.4g} ms of the default, all interleaved")
