"""Sweep the tiles for tools/shipped_tiles.py on this device, problem by problem.

    python tools/sweep_tiles.py OUT                    # all sweeps that OUT does not have
    python tools/sweep_tiles.py OUT --only 'backward*float16*' --seconds 500
    python tools/sweep_tiles.py OUT --list

Each problem is swept at two lengths, since a shipped tile is used for every length. The values are
close to those of the tables; older files have more values. docs/tuning.md describes a sweep of all
values. A problem with only one legal tile is not swept.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.shapes import MODEL_WIDTH, TOKENS  # noqa: E402
from cuflash import tuning  # noqa: E402
from cuflash._timing.machine import device_slug  # noqa: E402

LENGTHS = (8192, 2048)
Values = Mapping[str, Sequence[int]]
#: Values to try, by kernel and head size. All legal values are tried for kernels not listed here.
TRIED: dict[str, dict[int, Values]] = {
    "forward_sm90": {
        64: {"block_m": (128, 192), "block_n": (112, 128), "num_stages": (3, 4),
             "num_q_stages": (2,), "overlap_quarters": (0, 1, 4)},
        96: {"block_m": (128, 192), "block_n": (112, 128), "num_stages": (2, 3),
             "num_q_stages": (2,), "overlap_quarters": (0, 2, 4)},
        128: {"block_m": (128, 192), "block_n": (64, 80, 96, 112, 128), "num_stages": (2, 3),
              "num_q_stages": (2,), "overlap_quarters": (0, 2, 4)},
        192: {"block_m": (128,), "block_n": (80, 96, 112, 128), "num_q_stages": (1,)},
        256: {"block_m": (128,), "block_n": (64, 80, 96), "num_q_stages": (1,)},
    },
    "forward_sm80": {
        64: {"block_m": (64, 128), "block_n": (32, 48, 64), "num_warps": (4, 8),
             "blocks_per_sm": (1, 2)},
        128: {"block_m": (64, 128), "block_n": (16, 32, 48), "num_warps": (4, 8),
              "blocks_per_sm": (1,)},
    },
    "backward_dq_partners": {
        64: {"block_m": (32, 64, 128), "block_n": (32, 64), "num_warps": (4, 8)},
    },
    "backward_dkv_partners": {
        64: {"block_m": (32, 64), "block_n": (32, 64, 128), "num_warps": (4, 8)},
    },
    "backward_dq_sm90": {
        64: {"block_n": (96, 112, 128), "num_stages": (2, 3)},
        96: {"block_m": (128,), "block_n": (64, 80, 96, 112), "num_stages": (2, 3)},
        128: {"block_n": (64, 80, 96, 112), "num_stages": (2, 3)},
        192: {"block_m": (128,), "block_n": (32, 48, 64, 80), "num_stages": (2, 3)},
        256: {"block_m": (128,), "block_n": (32, 48, 64), "num_stages": (2, 3)},
    },
    "backward_dkv_sm90": {
        64: {"block_m": (64, 80, 96), "block_n": (128,), "num_stages": (2, 3)},
        96: {"block_m": (48, 64, 80), "block_n": (128,), "num_stages": (2, 3)},
        128: {"block_m": (32, 48, 64), "block_n": (128,), "num_stages": (2, 3)},
        256: {"block_m": (32, 48, 64), "block_n": (128,), "num_stages": (2, 3)},
    },
    "forward_narrow": {
        3: {"block_m": (256, 512, 1024), "block_n": (64, 128), "num_warps": (4, 8),
            "blocks_per_sm": (2, 3, 4)},
    },
}  # fmt: skip
_HALVES = ("bfloat16", "float16")


class Swept(NamedTuple):
    """One sweep: a kernel and a problem."""

    kernel: str
    workload: tuning.Workload

    @property
    def name(self) -> str:
        """Name of the sweep's file, without the device."""
        work = self.workload
        dims = [work.head_dim] + [work.head_dim_v] * (work.head_dim_v != work.head_dim)
        words = [self.kernel, "d" + "-".join(map(str, dims))]
        words += [work.dtype] * (work.dtype != "bfloat16")
        words += ["tf32"] * (work.precision == "tf32") + ["causal"] * work.causal
        words += ["unordered"] * (not work.deterministic) + ["softcap"] * (work.softcap is not None)
        words += ["window"] * (work.window is not None) + list(work.arrays)
        words += [str(work.seqlen_k)] * (work.seqlen_k != LENGTHS[0])
        return "-".join(words).replace("_", "-")

    @property
    def tried(self) -> Values:
        """The values to try, by parameter."""
        return TRIED.get(self.kernel, {}).get(self.workload.head_dim, {})


def problems() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield pairs of a kernel and a problem for which its tiles are swept."""
    masks = [{"causal": causal} for causal in (False, True)]
    two_kernels = ("backward_dq_sm90", "backward_dkv_sm90")
    for dtype in _HALVES:
        for head_dim in (64, 96, 128, 192, 256):
            one_pass = "backward_sm90" if head_dim <= 128 else "backward_pair_sm90"
            for kernel in ("forward_sm90", one_pass):
                for mask in masks:
                    yield kernel, {"dtype": dtype, "head_dim": head_dim, **mask}
    for head_dim in (64, 128):
        for mask in masks:
            own = {"head_dim": head_dim, **mask}
            for kernel in ("forward_tf32_sm90", "backward_dq_tf32_sm90", "backward_dkv_tf32_sm90"):
                yield kernel, {"dtype": "float32", **own}
            yield "forward_tf32_sm90", {"dtype": "float32", "precision": "tf32", **own}
            for kernel in ("forward_sm80", "backward_dq_partners", "backward_dkv_partners"):
                yield kernel, {"dtype": "float64", **own}
    for mask in masks:
        for kernel in ("forward_sm90", "backward_pair_sm90"):
            yield kernel, {"head_dim": 192, "head_dim_v": 128, **mask}
        for head_dim in (64, 128):
            yield "backward_sm90", {"head_dim": head_dim, "deterministic": False, **mask}
        for head_dim in (64, 96, 128, 192, 256):
            yield "backward_dq_sm90", {"head_dim": head_dim, **mask}
        for head_dim in (64, 96, 128):
            yield "backward_dkv_sm90", {"head_dim": head_dim, **mask}
        for head_dim in (64, 128, 256):
            yield "forward_sm90", {"head_dim": head_dim, "softcap": 30.0, **mask}
        yield "forward_sm90", {"head_dim": 128, "arrays": ("alibi_slopes",), **mask}
        yield "forward_sm90", {"head_dim": 128, "arrays": ("bias",), **mask}
        for kernel in two_kernels:
            yield kernel, {"head_dim": 128, "softcap": 30.0, **mask}
            yield kernel, {"head_dim": 128, "arrays": ("alibi_slopes",), **mask}
    for kernel in two_kernels:
        for head_dim in (64, 256):
            yield kernel, {"head_dim": head_dim, "softcap": 30.0, "causal": True}
    for kernel in ("forward_sm90", "backward_sm90"):
        yield kernel, {"head_dim": 128, "window": (1023, 0)}
    yield "forward_sm80", {"dtype": "float64", "head_dim": 128, "arrays": ("alibi_slopes",)}


def sweeps() -> Iterator[Swept]:
    """Every problem at every length; points in space have lengths of their own."""
    for kernel, own in problems():
        own = {"dtype": "bfloat16", "head_dim_v": own["head_dim"], **own}
        tokens = TOKENS if own["dtype"] in _HALVES else TOKENS // 2
        heads = MODEL_WIDTH // own["head_dim"] // (2 if own["dtype"] == "float64" else 1)
        for length in LENGTHS:
            shape = (max(1, tokens // length), heads, heads, length, length)
            yield Swept(kernel, tuning.Workload(*shape, **own))
    for length in (262_144, 131_072):
        shape = (1, 1, 1, length, length)
        for arrays in (("key_bias",), ()):
            work = tuning.Workload(*shape, 3, 0, "float32", arrays=arrays)
            yield Swept("forward_narrow", work)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweeps whose files do not exist yet; the status is 1 if a sweep failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="*", help="names that match, with * and ?")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument("--budget-ms", type=float, default=20.0, help="of one configuration")
    parser.add_argument("--list", action="store_true", help="name the sweeps")
    arguments = parser.parse_args(argv)
    chosen = [found for found in sweeps() if fnmatch.fnmatch(found.name, arguments.only)]
    if arguments.list:
        print("\n".join(found.name for found in chosen))
        return 0
    failed = False
    begin = time.perf_counter()
    for found in chosen:
        space = tuning.space(found.workload, found.kernel, parameters=found.tried)
        file = arguments.out / f"{device_slug(space.hardware.name)}-{found.name}.jsonl"
        start = time.perf_counter()
        if len(space) == 1 or file.exists() or start - begin > arguments.seconds:
            continue
        try:
            result = tuning.sweep(
                found.workload, space, file=file, budget_ms=arguments.budget_ms, progress=False
            )
            said = f"{len(result.rows)}, {result.best['key']} at {result.best_relative:.3f}"
        except (RuntimeError, ValueError) as error:
            failed, said = True, f"FAILED: {error}"
        took = time.perf_counter() - start
        print(f"{found.name}: {said}, tables {space.default_key} [{took:.0f} s]", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
