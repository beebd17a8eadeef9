"""Does every problem get a legal plan: kernel, grid, strides? Checked without a GPU."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import Options
from cuflash._kernels import tf32_sm90, wgmma
from cuflash._kernels.backward_convert import BackwardConvertConfig
from cuflash._kernels.backward_delta import DeltaConfig
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.narrow import WIDEST
from cuflash._kernels.registry import KERNELS
from cuflash._kernels.request import Request, needs_simt
from cuflash._launch import grid as launch_grid
from cuflash._problem.layout import Layout
from cuflash._problem.operand import Operand
from cuflash._problem.problem import Problem, describe
from cuflash._select import hardware as select_hardware
from cuflash._select.choose import LaunchStep
from support import chosen

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._kernels import params
from cuflash._launch import plan, run
from support.chosen import backward_of, forward_of

SMALLEST, AMPERE, HOPPER = SMEM_LIMITS = (99 * 1024, 163 * 1024, 227 * 1024)
DTYPES = (bfloat16, np.float16, np.float32, np.float64)
SUMS = (("bias", "pairs"), ("bias", "keys"), ("alibi_slopes", "queries"), ("scale", "queries"))
WANTED = (frozenset("qkv"), frozenset("k"), frozenset("qv"))
NUM_PROBLEMS = 30_000


def walked(grid: launch_grid.Grid, num_operands: int) -> list[tuple[int, ...]]:
    """Return offsets of all operands in the order of the launches, as in scheduler.cuh."""
    found = []
    for start in grid.offsets():
        for flat in range(grid.num_owners * grid.entries_per_owner):
            offset, rest = list(start or (0,) * num_operands), flat
            for axis in range(len(grid.axes) - 1, -1, -1):
                extent, strides = grid.axes[axis]
                index = rest % extent if axis else rest
                rest //= extent
                offset = [o + index * s for o, s in zip(offset, strides, strict=True)]
            found.append(tuple(offset))
    return found


def random_axes(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Return extents, strides of three operands and summed axes; neighbours can often be merged."""
    ndim = int(rng.integers(0, 10))
    batch = tuple(int(n) for n in rng.choice([1, 2, 3], ndim))
    summed = tuple(bool(s) for s in rng.random(ndim) < 0.3)
    strides = []
    for _ in range(3):
        steps, step = [], int(rng.integers(1, 5)) * 2
        for extent in reversed(batch):
            steps.append(0 if rng.random() < 0.2 else step)
            step *= extent * int(rng.choice([1, 1, 1, 2]))
        strides.append(tuple(reversed(steps)))
    return batch, strides, summed


def test_every_batch_entry_is_walked_once_and_owners_stay_together() -> None:
    rng = np.random.default_rng(0)
    peeled = merged = 0
    for _ in range(1500):
        batch, strides, summed = random_axes(rng)
        grid = launch_grid.plan_grid(batch, strides, summed, 1)
        assert len(grid.axes) <= params.MAX_BATCH_AXES
        owned = [range(n) if not s else [0] for n, s in zip(batch, summed, strict=True)]
        looped = [range(n) if s else [0] for n, s in zip(batch, summed, strict=True)]
        expected = [
            tuple(
                sum((i + j) * s for i, j, s in zip(owner, loop, step, strict=True))
                for step in strides
            )
            for owner in itertools.product(*owned)
            for loop in itertools.product(*looped)
        ]
        assert walked(grid, 3) == expected
        peeled += bool(grid.peeled)
        merged += len(grid.axes) < sum(n > 1 for n in batch) - len(grid.peeled)
    assert peeled > 10
    assert merged > 100


def test_a_grid_past_the_limit_is_split() -> None:
    batch, strides = (40_000, 70_000), [(70_000 * 8, 4), (0, 4)]
    grid = launch_grid.plan_grid(batch, strides, (False, False), 1)
    assert grid.num_owners == 70_000
    assert len(grid.offsets()) == 40_000
    assert grid.offsets()[2] == (2 * 70_000 * 8, 0)


def test_contiguous_operands_have_one_axis() -> None:
    strides = [(24, 8, 2), (240, 80, 20)]
    assert len(launch_grid.plan_grid((2, 3, 4), strides, (False,) * 3, 1).axes) == 1


@pytest.mark.parametrize(
    ("strides", "columns", "bits", "expected"),
    [
        ((128, 2), 64, 0, 16),
        ((128, 2), 64, 8, 8),
        ((128, 2), 64, 2, 2),
        ((72, 2), 36, 0, 8),
        ((80, 2), 36, 0, 8),
        ((66, 2), 33, 0, 2),
        ((-128, 2), 64, 0, 16),
        ((0, 2), 64, 0, 16),
        ((2, 128), 64, 0, 2),
        ((128, 4), 32, 0, 2),
        ((128, -2), 64, 0, 2),
    ],
)
def test_the_widest_legal_copy(
    strides: tuple[int, int], columns: int, bits: int, expected: int
) -> None:
    assert Layout(2, (4096,), *strides).copy_bytes(columns, bits) == expected


def base_problem() -> Problem:
    q, k, v = (np.zeros((2, 3, n, 16), bfloat16) for n in (4, 5, 5))
    return describe(q, k, v, Options())


def random_problem(base: Problem, rng: np.random.Generator) -> Problem:
    """Draw all that selection depends on; no array is allocated."""
    batch = tuple(int(n) for n in rng.choice([1, 2, 8, 1000, 70_000], 2))
    summed = [tuple(bool(s) for s in rng.random(2) < 0.3) for _ in range(3)]

    def operand(old: Operand, own: tuple[bool, ...]) -> Operand:
        return replace(old, summed=own)

    def maybe(dtype: Any, shape: tuple[int, ...] = batch) -> Operand | None:
        if rng.random() < 0.9:
            return None
        return Operand(np.dtype(dtype), shape, (0, 0), (False, False))

    ids, ends = maybe(np.int32), maybe(np.int64, (5,))
    dtype = np.dtype(DTYPES[rng.integers(4)])
    return replace(
        base,
        batch=batch,
        batch_shape=batch,
        seqlen_q=int(2 ** rng.uniform(0, 20)),
        seqlen_k=int(2 ** rng.uniform(0, 20)),
        head_dim=int(rng.choice([rng.integers(1, 257), 3, 64, 128])),
        head_dim_v=int(rng.choice([rng.integers(0, 257), 3, 64, 128])),
        dtype=dtype,
        precision="tf32" if rng.random() < 0.3 else None,
        q=operand(base.q, summed[0]),
        k=operand(base.k, summed[1]),
        v=operand(base.v, summed[2]),
        out=replace(base.out, dtype=np.dtype(np.float32) if rng.random() < 0.1 else dtype),
        bias=maybe(np.float32),
        mask=maybe(np.bool_),
        alibi_slopes=maybe(np.float32),
        sink=maybe(bfloat16),
        segment_ids_q=ids,
        segment_ids_k=ids,
        offset=maybe(np.int32),
        q_lengths=maybe(np.int64),
        kv_lengths=maybe(np.int32),
        window_left=7 if rng.random() < 0.3 else None,
        window_right=0 if rng.random() < 0.5 else None,
        scale=float(rng.choice([0.125, 0.125, -1.0, 0.0, 1e-38, 1e35])),
        softcap=20.0 if rng.random() < 0.1 else None,
        dropout=0.25 if rng.random() < 0.1 else 0.0,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
    )


def portable_configs(problem: Problem, number: int, copy_bytes: int) -> list[KernelConfig]:
    """Return portable kernels; only where shared memory is too small do they use CUDA cores."""
    limit, wanted = SMEM_LIMITS[number % 3], WANTED[number % 3]
    given = (problem, limit, copy_bytes)
    wide = max(problem.head_dim, problem.head_dim_v) if problem.dtype == np.float64 else 0
    found: list[KernelConfig] = [
        DeltaConfig.of(problem, problem.out.dtype, copy_bytes, grad_lse=bool(number % 2))
    ]
    by_partners = {"smem_limit": limit, "copy_bytes": copy_bytes, "capability": 80}
    of_keys: Any = chosen.passes("backward_dkv_partners", problem, wanted, **by_partners)
    of_keys = of_keys or chosen.portable_kv(*given, wanted)
    scores = chosen.scores(*given, *SUMS[number % 4])
    forward, of_queries = (
        chosen.portable("forward_sm80", *given),
        chosen.one("backward_dq_partners", problem, **by_partners)
        or chosen.portable("backward_dq_sm80", *given),
    )
    found += [forward, of_queries, *of_keys, scores]
    assert sum(c.grad_k for c in of_keys) == ("k" in wanted)
    assert sum(c.grad_v for c in of_keys) == ("v" in wanted)
    assert not forward.simt or (limit == SMALLEST and wide > 192)
    gradients = any(c.simt for c in (of_queries, *of_keys, scores))
    assert not gradients or wide > {SMALLEST: 128, AMPERE: 192}[limit]
    assert all(c.smem_bytes <= limit for c in found)
    return found


def hopper_configs(problem: Problem, number: int) -> list[KernelConfig]:
    """Return Hopper's own kernels; they only refuse problems for reasons that `eligible` names."""
    found: list[KernelConfig] = []
    forward = chosen.one("forward_sm90", problem, num_sms=(1, 132)[number % 2])
    assert (forward is None) == bool(KERNELS["forward_sm90"].eligible(Request(problem)))
    of_queries = chosen.one("backward_dq_sm90", problem)
    of_keys = chosen.passes("backward_dkv_sm90", problem, WANTED[number % 3])
    together = chosen.fused(problem, deterministic=bool(number % 2))
    if wgmma.why_not_halves(Request(problem)):
        assert of_queries is of_keys is together is None
    if together is not None:
        assert None not in (of_queries, of_keys), "what one pass serves, two serve, too"
        found += [together, BackwardConvertConfig.after(together)]
    found += [c for c in (forward, of_queries, *(of_keys or ())) if c is not None]
    assert all(c.smem_bytes <= HOPPER for c in found)
    return found


def float32_configs(problem: Problem, number: int, copy_bytes: int) -> list[KernelConfig]:
    """Return the float32 kernels of Hopper, and the kernels of narrow heads for any device."""
    forward = chosen.one("forward_tf32_sm90", problem, copy_bytes=copy_bytes)
    assert (forward is None) == bool(KERNELS["forward_tf32_sm90"].eligible(Request(problem)))
    of_queries = chosen.one("backward_dq_tf32_sm90", problem, copy_bytes=copy_bytes)
    of_keys = chosen.passes(
        "backward_dkv_tf32_sm90", problem, copy_bytes=copy_bytes, keys=WANTED[number % 3]
    )
    if tf32_sm90.why_not(Request(problem)):
        assert of_queries is of_keys is None
    found = [c for c in (forward, of_queries, *(of_keys or ())) if c is not None]
    assert all(c.smem_bytes <= HOPPER for c in found)
    given = {"copy_bytes": copy_bytes, "num_sms": (1, 132)[number % 2]}
    narrow = [
        chosen.one(name, problem, **given) for name in ("forward_narrow", "backward_dq_narrow")
    ]
    narrow += chosen.passes("backward_dkv_narrow", problem, WANTED[number % 3], **given) or ()
    for config in filter(None, narrow):
        assert config.smem_bytes <= SMALLEST
        assert max(problem.head_dim, problem.head_dim_v) <= WIDEST
        assert (config.width, config.width_v) == (problem.head_dim, problem.head_dim_v)
    return [*found, *filter(None, narrow)]


def check_grid(problem: Problem, config: KernelConfig, rng: np.random.Generator) -> int:
    """Check that launches hold every batch entry once and stay legal; return their number."""
    of_keys = config.computes in ("dkv", "dqkv")
    rows = problem.seqlen_k if of_keys else problem.seqlen_q
    own = config.block_n if of_keys else config.block_m
    num_blocks = plan.num_tiles(problem, rows, own)
    tiles = num_blocks * (config.split_columns if "tile" in config.parts else 1)
    step, last = 2 * problem.head_dim * rows, problem.batch[1]
    strides = [(last * step * int(rng.integers(1, 3)), step), (0, step), (last * step, 0)]
    summed = problem.k.summed if of_keys else (False, False)
    grid = launch_grid.plan_grid(problem.batch, strides, summed, tiles)
    launches = math.prod(extent for extent, _ in grid.peeled)
    assert launches * grid.num_owners * grid.entries_per_owner == math.prod(problem.batch)
    assert tiles * grid.num_owners <= 2**31 - 1
    assert grid.entries_per_owner == math.prod(
        n for n, s in zip(problem.batch, summed, strict=True) if s
    )
    return launches


@pytest.mark.full
def test_thirty_thousand_problems_get_legal_kernels_and_grids() -> None:
    rng, base = np.random.default_rng(1), base_problem()
    seen: set[str] = set()
    split = 0
    for number in range(NUM_PROBLEMS):
        problem = random_problem(base, rng)
        copy_bytes = max((2, 4, 8, 16)[number % 4], problem.dtype.itemsize)
        configs = portable_configs(problem, number, copy_bytes) + hopper_configs(problem, number)
        configs += float32_configs(problem, number, copy_bytes)
        for config in configs:
            assert config.num_threads <= 1024
            assert problem.head_dim_v <= getattr(config, "head_dim_v", 256)
            if "tile" in config.parts:
                assert problem.head_dim <= config.head_dim
                assert config.scale_in_exponent == (
                    problem.softcap is problem.bias is problem.alibi_slopes is None
                    and problem.scale == 0.125
                )
        split += check_grid(problem, configs[number % len(configs)], rng) > 1
        seen.update(config.kernel for config in configs)
    assert len(seen) == 19, "some kernel was never chosen"
    assert split > 100


def test_a_tile_depends_on_neither_batch_nor_lengths() -> None:
    """A tile depends on neither batch nor lengths where keys are not split."""
    rng, base = np.random.default_rng(2), base_problem()
    for _ in range(2000):
        problem = random_problem(base, rng)
        other = replace(
            problem, batch=(3, 5), batch_shape=(3, 5), seqlen_q=17, seqlen_k=problem.seqlen_k + 9
        )
        own, of_other = (
            chosen.portable("forward_sm80", p, SMEM_LIMITS[2], 16, num_sms=0)
            for p in (problem, other)
        )
        assert own == of_other


def test_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace has two numbers per query, and on Hopper float32 dq and a turn for each block."""
    q = np.zeros((2, 3, 70, 64), np.float16)
    problem = describe(q, q, q, Options())
    monkeypatch.setattr(run, "runtime", SimpleNamespace(getDevice=lambda: 0))
    statistics = 8 * 2 * 3 * 70
    with select_hardware.assumed(select_hardware.typical("sm_80")):
        assert run.workspace_size(problem, "forward") == 0
        assert run.workspace_size(problem, "backward") == statistics
    sums, turns = 4 * 2 * 3 * 80 * 64, 4 * (1 + 2 * 3)  # rows in slices of 16
    with select_hardware.assumed(select_hardware.typical("sm_90")):
        assert run.workspace_size(problem, "backward") == statistics + sums + turns + 128


def test_operands_stay_where_they_lie_where_shared_memory_is_too_small() -> None:
    problem = replace(base_problem(), dtype=np.dtype(np.float64), head_dim=256, head_dim_v=256)
    assert not chosen.portable("backward_dq_sm80", problem, 227 << 10, 16).simt
    assert chosen.portable("backward_dq_sm80", problem, 99 << 10, 16).simt


def laid_out(problem: Problem, padding: int) -> Problem:
    """Return the problem with q, k and v in its dtype, and ``padding`` elements between rows."""
    size = problem.dtype.itemsize
    moved = {}
    widths = {"q": problem.head_dim, "k": problem.head_dim, "v": problem.head_dim_v}
    for name, columns in widths.items():
        strides = (0, 0, (columns + padding) * size, size)
        moved[name] = replace(getattr(problem, name), dtype=problem.dtype, strides=strides)
    return replace(problem, **moved)


@pytest.mark.long
def test_no_architecture_refuses_a_problem() -> None:
    rng, base = np.random.default_rng(3), base_problem()
    simt = set()
    for number in range(400):
        problem = random_problem(base, rng)
        if number % 8 == 0:
            problem = replace(problem, head_dim=256, head_dim_v=200)
        problem = laid_out(problem, number % 2)
        for arch in select_hardware.ARCHITECTURES:
            hardware = select_hardware.typical(arch)
            on_cores = needs_simt(problem, int(hardware.capability))
            smem = hardware.limits.block_smem
            scores = chosen.scores(
                problem, smem, problem.dtype.itemsize, *SUMS[number % 4], simt=on_cores
            )
            found = [forward_of(problem, hardware), scores]
            found += backward_of(problem, hardware, WANTED[number % 3])
            assert all(c.smem_bytes <= smem for c in found)
            if any("tile" in c.parts and c.simt for c in found):
                simt.add((arch, problem.dtype.name))
    of_float64 = {arch for arch, dtype in simt if dtype == "float64"}
    assert of_float64 == {*select_hardware.ARCHITECTURES} - {"sm_90"}
    assert all(dtype == "float64" or arch < "sm_80" for arch, dtype in simt)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_operands_of_another_dtype_than_kernels_read_are_never_launched(name: str) -> None:
    """An operand of the wrong size is never launched; as promotion comes first, it is our bug."""
    problem = base_problem()
    layouts = {n: Layout.of(getattr(problem, n)) for n in ("q", "k", "v", "out")}
    layouts[name] = layouts[name]._replace(itemsize=4)
    step = LaunchStep(chosen.portable("forward_sm80", problem, SMALLEST, 2))
    prepare = functools.partial(plan.plan_launch, step, problem, layouts)
    hardware = select_hardware.typical("sm_80")
    if name == "out":  # float32 out is allowed for 16-bit inputs
        with pytest.MonkeyPatch.context() as patch:
            kernel = SimpleNamespace(pointer=0, num_threads=128, smem_bytes=0)
            patch.setattr(plan, "compile_kernel", lambda *_: kernel)
            assert prepare(hardware, 0).names[:4] == ("q", "k", "v", "out")
        return
    with pytest.raises(AssertionError, match=f"{name}: 4 bytes, not bfloat16"):
        prepare(hardware, 0)


@pytest.mark.parametrize("head_dim", [257, 1024])
def test_a_head_too_wide_is_named(head_dim: int) -> None:
    problem = replace(base_problem(), head_dim=head_dim)
    with pytest.raises(NotImplementedError, match=f"head_dim {head_dim}"):
        chosen.portable("forward_sm80", problem, SMEM_LIMITS[0], 16)


def test_strides_across_elements_are_refused() -> None:
    """Rows off the boundaries of elements are refused: a field of a packed record may have them."""
    layouts = {"bias": Layout(4, (), 6, 4)}
    with pytest.raises(ValueError, match="bias: got misaligned elements of 4 bytes"):
        plan.refuse_misaligned(layouts, {"bias": 1 << 20})
