"""Which compiled kernels are cached, and are they intact? Also compiles and removes kernels."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
from pathlib import Path
from typing import Any

import cuflash
from cuflash import _cupy
from cuflash._cli.problem_arguments import listed, positive
from cuflash._jit import cubin_cache
from cuflash.tuning._workload import Workload

SUMMARY = "list, verify, warm or clear the store of compiled kernels"
EXAMPLES = """\
examples:
  python -m cuflash cache list
  python -m cuflash cache verify --folder /shared/kernels
  python -m cuflash cache warm --arch sm_90a --head-dims 64,128 --backward --folder /shared/kernels
  CUFLASH_KERNELS=/shared/kernels python train.py     # the kernels of a folder, on every node
  python -m cuflash cache clear

warm needs no GPU. It compiles the kernels that a batch of 16 with 16 heads and 4096 queries and
keys runs, for every dtype and head size named, with and without causal. It leaves out tiles of
small batches, another head_dim_v, packed sequences, windows and other score options,
precision="tf32", deterministic=False. cuflash.compile(workloads) compiles any problem.
"""
#: Files of the cache, and temporary files of a process that was killed while it wrote.
_FILE = re.compile(r"([0-9a-f]{64}\.(cubin|json)|compiler\.json)(\.\w{8}\.tmp)?")
_ENTRY = re.compile(rb"\.text\.(cuflash_\w+)")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command."""
    p.add_argument("action", choices=("list", "verify", "warm", "clear"))
    p.add_argument("--folder", type=Path, help="another folder than the store of this machine")
    p.add_argument("--arch", help="warm: for devices of this architecture (default: the one here)")
    p.add_argument("--head-dims", type=listed(int), default=[64, 128], help="warm: default 64,128")
    p.add_argument("--dtypes", type=listed(str), default=["bfloat16", "float16"], help="warm")
    p.add_argument("--backward", action="store_true", help="warm: also gradients")
    p.add_argument("--processes", type=positive, help="warm: default one for each core")
    p.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action."""
    folder = arguments.folder or _cupy.folder()
    if arguments.action == "warm":
        return _warm(arguments)
    if arguments.action == "verify" and arguments.folder and not folder.is_dir():
        raise FileNotFoundError(f"folder: got {folder}, expected an existing folder")
    rows = _rows(folder)
    if arguments.action == "clear":
        return _clear(arguments, folder, rows)
    wrong = [row for row in rows if not row["whole"]]
    status = int(bool(wrong) and arguments.action == "verify")
    if arguments.json:
        print(json.dumps({"folder": str(folder), "kernels": rows}, indent=1))
        return status
    for row in rows if arguments.action == "list" else ():
        print(f"{row['name'][:16]}  {row['bytes']:>8}  {row['date']}  {row['entry']}")
    for row in wrong:
        print(f"{row['name']} {row['problem']}")
    total = sum(row["bytes"] for row in rows)
    print(f"{folder}: {len(rows)} kernels, {total / 1e6:.1f} MB, {len(wrong)} unusable")
    return status


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("*.cubin")):
        if not _FILE.fullmatch(path.name):
            continue
        problem = cubin_cache.problem_of(path)
        entry = None if problem else _ENTRY.search(cubin_cache.read(path))
        status = path.lstat()
        changed = dt.datetime.fromtimestamp(status.st_mtime, dt.UTC)
        rows.append({
            "name": path.stem,
            "entry": entry[1].decode() if entry else "unknown",
            "bytes": status.st_size,
            "date": changed.isoformat(sep=" ", timespec="minutes"),
            "whole": not problem,
            "problem": problem,
        })  # fmt: skip
    return rows


def _clear(arguments: argparse.Namespace, folder: Path, rows: list[dict[str, Any]]) -> int:
    """Remove the files of the cache, and no others."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _FILE.fullmatch(path.name) and (path.is_symlink() or not path.is_dir()):
            path.unlink(missing_ok=True)
    found = json.dumps({"folder": str(folder), "removed": len(rows)})
    print(found if arguments.json else f"{folder}: {len(rows)} kernels removed")
    return 0


def _warm(arguments: argparse.Namespace) -> int:
    works = [
        Workload(16, 16, 16, 4096, 4096, d, d, dtype, causal=causal)
        for d in arguments.head_dims
        for dtype in arguments.dtypes
        for causal in (False, True)
    ]
    files = cuflash.compile(
        works, arch=arguments.arch, folder=arguments.folder, backward=arguments.backward,
        processes=arguments.processes,
    )  # fmt: skip
    unique = sorted({str(path) for path in files})
    ready = f"{Path(unique[0]).parent}: {len(unique)} kernels are ready"
    print(json.dumps({"files": unique}, indent=1) if arguments.json else ready)
    return 0
