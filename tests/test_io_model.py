"""Does the IO model predict what a walk over tiles counts, kernel by kernel?"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import cuflash
from cuflash import _cli, reference
from cuflash._cli import io_model
from cuflash._select import hardware
from cuflash._select.choose import Wanted, choose
from cuflash.tuning._workload import DTYPES, ONE_PASS, Workload, seen_by
from support.chosen import backward_of, scores

SMALL = Workload(2, 4, 2, 333, 333, 128, 128, "bfloat16", causal=True)
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"causal": False, "window": (100, 20)},
    "more keys": {"seqlen_k": 500},
    "more queries": {"seqlen_q": 500},
}
#: name -> (options of a problem, architecture, kernels after that of delta)
SCHEMES = {
    "one pass": ({"batch": 60}, "sm_90", ["backward_sm90", "backward_convert"]),
    "split queries": (
        {"batch": 1, "heads_q": 2, "heads_kv": 1, "head_dim_v": 64}, "sm_90",
        ["backward_sm90", "backward_combine", "backward_convert"],
    ),
    "pairs": (
        {"head_dim": 256, "head_dim_v": 192, "heads_kv": 4}, "sm_90",
        ["backward_pair_sm90", "backward_convert"],
    ),
    "pairs, odd panels": (
        {"head_dim": 192, "head_dim_v": 128, "heads_kv": 4}, "sm_90",
        ["backward_pair_sm90", "backward_convert"],
    ),
    "two passes": ({"head_dim": 64}, "sm_90", ["backward_dkv_sm90", "backward_dq_sm90"]),
    "three passes": (
        {"softcap": 5.0, "dropout": 0.5, "arrays": ("alibi_slopes",),
         "head_dim": 192, "head_dim_v": 160}, "sm_90",
        ["backward_dkv_sm90", "backward_dkv_sm90", "backward_dq_sm90"],
    ),
    "portable": ({}, "sm_80", ["backward_dkv_sm80", "backward_dq_sm80"]),
    "float32": (
        {"dtype": "float32", "head_dim_v": 64}, "sm_90",
        ["backward_dkv_tf32_sm90", "backward_dkv_tf32_sm90", "backward_dq_tf32_sm90"],
    ),
    "columns in parts": (
        {"dtype": "float32", "head_dim": 256, "head_dim_v": 256}, "sm_80",
        ["backward_dkv_sm80", "backward_dkv_sm80", "backward_dq_sm80"],
    ),
    "partners": (
        {"dtype": "float64", "head_dim": 64, "head_dim_v": 64}, "sm_90",
        ["backward_dkv_partners", "backward_dq_partners"],
    ),
}  # fmt: skip


def chosen(work, arch):
    """Return the kernels of a gradient."""
    return backward_of(work.problem(), hardware.typical(arch))


def backward_steps(work, arch):
    """Return the launches of a gradient."""
    return choose(work.problem(), hardware.typical(arch), wanted=Wanted.of("qkv"))


class Walk:
    """Counts what the thread blocks of one kernel load, store and add, tile by tile."""

    def __init__(self, work, config, splits, dq_sums):
        self.work, self.config, self.name = work, config, config.kernel
        self.splits, self.dq_sums = splits, dq_sums
        self.size = DTYPES[work.dtype].itemsize
        self.boxes = self.name.endswith("_sm90") and "tf32" not in self.name
        self.loaded = self.stored = self.added = 0
        options = cuflash.Options(causal=work.causal, window=work.window)
        seen = reference.visible(options, (), work.seqlen_q, work.seqlen_k)
        for _ in range(work.batch):
            for head in range(work.heads_q):
                first_of_group = head % (work.heads_q // work.heads_kv) == 0
                for _ in range(config.split_columns):
                    if "_dq_" in self.name:
                        self.queries(seen)
                    else:
                        self.keys(seen, first_of_group)

    def rows(self, number, width):
        """Load ``number`` rows of ``width`` elements."""
        self.loaded += number * width * self.size

    def statistics(self, number):
        """Load lse and delta of ``number`` queries."""
        self.loaded += number * 2 * max(4, self.size)

    def blocks(self, seen, block):
        """Return (first row, rows loaded, rows that exist) of each block with a row in ``seen``."""
        found = []
        for first in range(0, len(seen), block):
            some = seen[first : first + block]
            if some.any():
                present = len(some) if self.boxes else int(some.sum())
                found.append((first, block if self.boxes else present, present))
        return found

    def queries(self, seen):
        """Count what one head of dq loads."""
        wide = self.work.head_dim + self.work.head_dim_v
        for first in range(0, len(seen), self.config.block_m):
            own = seen[first : first + self.config.block_m]
            self.rows(self.config.block_m if self.boxes else len(own), wide)
            self.statistics(len(own))
            for _, loaded, _ in self.blocks(own.any(axis=0), self.config.block_n):
                self.rows(loaded, wide)

    def keys(self, seen, first_of_group):
        """Count what one head of dk and dv, or of all gradients, loads, stores and adds."""
        work, config = self.work, self.config
        sharers = 2 if self.name == "backward_pair_sm90" else 1
        tile, wide = sharers * config.block_n, work.head_dim + work.head_dim_v
        visited = set()
        last = {}  # the last tile that sees each block of queries
        for first in range(0, work.seqlen_k, tile):
            seen_blocks = self.blocks(seen[:, first : first + tile].any(axis=1), config.block_m)
            last |= {begin: first for begin, _, _ in seen_blocks}
        for first in range(0, work.seqlen_k, tile):
            own = seen[:, first : first + tile]
            if first_of_group:
                present = self.splits * (tile if self.boxes else own.shape[1])
                self.rows(present, work.head_dim)
                if getattr(config, "grad_k", True):
                    self.rows(present, work.head_dim_v)
                if sharers == 2:  # panels of 64 columns; the two load both halves of those
                    self.rows(present, {192: 128, 256: 128}[work.head_dim])
            for begin, loaded, present in self.blocks(own.any(axis=1), config.block_m):
                for _ in range(sharers):
                    self.rows(loaded, wide)
                    self.statistics(present)
                if self.name in ONE_PASS:
                    slices = -(-min(config.block_m, work.seqlen_q - begin) // 16)
                    place = (begin, first // tile % self.dq_sums)
                    if config.finishes_dq and last[begin] == first:
                        self.loaded += slices * 16 * work.head_dim * 4 if place in visited else 0
                        self.stored += present * work.head_dim * self.size
                        continue
                    self.stored += slices * 16 * work.head_dim * 4
                    self.added += slices * 16 * work.head_dim * 4 if place in visited else 0
                    visited.add(place)


@pytest.mark.parametrize("side", [10**30, 2**63])
def test_a_window_wider_than_arrays_sees_all(capsys, side):
    assert command(capsys, "--seqlen", "700", "--window", f"{side},{side}")[0] == 0
    work = Workload(1, 1, 1, 700, 70, 32, 32, "bfloat16")
    whole = seen_by(work, 64)
    for window in ((side, side), (None, side), (side, None)):
        seen = seen_by(replace(work, window=window), 64)
        np.testing.assert_array_equal((seen.low, seen.high), (whole.low, whole.high))


def test_a_forward_counted_by_hand():
    # Two heads, 4 tiles of 64 queries, each loading all of 256 keys: d = 32, d_v = 16, 2 bytes.
    work = Workload(1, 2, 2, 256, 256, 32, 16, "bfloat16")
    found = io_model.forward(work, 64, 64, 48 * 1024)
    assert found.loaded == 2 * (256 * 32 + 4 * 256 * (32 + 16)) * 2
    assert found.stored == 2 * (256 * 16 * 2 + 256 * 4)
    # Boxes of 96 rows and 80 keys: 3 tiles of 4 boxes.
    boxed = io_model.forward(work, 96, 80, 48 * 1024, boxes=True)
    assert boxed.loaded == 2 * (3 * 96 * 32 + 3 * 4 * 80 * (32 + 16)) * 2
    assert found.read_once == 2 * (256 * 32 + 256 * (32 + 16)) * 2
    assert (
        io_model.unfused(work)
        == 2 * 2 * (256 * (32 + 16) + 256 * (32 + 16)) * 2 // 2 + 2 * 4 * 256**2 * 2
    )
    assert found.asymptotic == 2 * 256**2 * 32 * 16 / (24 * 1024) * 2


def test_tiles_see_what_is_visible():
    work = Workload(1, 1, 1, 256, 256, 32, 32, "bfloat16", causal=True)
    seen = seen_by(work, 64)
    assert (list(seen.low), list(seen.high)) == ([0] * 4, [64, 128, 192, 256])
    assert (seen.rows(), seen.in_blocks(64), seen.in_blocks(128)) == (640, 640, 128 * 6)
    of_keys = seen_by(work, 64, keys=True)
    assert (list(of_keys.low), list(of_keys.high)) == ([0, 64, 128, 192], [256] * 4)
    window = Workload(1, 1, 1, 256, 256, 32, 32, "bfloat16", window=(0, 0))
    assert seen_by(window, 64).rows() == 256
    cut = Workload(1, 1, 1, 100, 300, 32, 32, "bfloat16")
    seen = seen_by(cut, 64)
    assert (seen.rows(), seen.in_blocks(128), seen.in_blocks(128, 300)) == (600, 768, 600)
    late = Workload(1, 1, 1, 100, 50, 32, 32, "bfloat16", causal=True)
    seen = seen_by(late, 32)
    assert list(seen.high - seen.low) == [0, 14, 46, 50]
    assert seen.in_blocks(16) == 16 + 48 + 64


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_walk_over_tiles_counts_is_predicted(scheme, mask):
    options, arch, expected = SCHEMES[scheme]
    work = replace(SMALL, **(options | MASKS[mask]))
    tiled = {step.config: step for step in backward_steps(work, arch)[1:]}
    if not (scheme.startswith("pairs") and mask == "window"):  # pairs do not support windows
        assert [c.kernel for c in tiled] == expected
    sums, parts, results = None, 0, 0
    for config, step in tiled.items():
        name, splits = config.kernel, step.splits
        found = io_model.gradient(work, config, splits, step.dq_sums)
        if name == "backward_combine":
            assert (found.loaded, found.stored) == (parts, results)
            continue
        if name == "backward_convert":  # it reads sums that were stored, not those that were added
            assert sums is not None
            left = 0 if config.finishes_dq else sums.stored - sums.added
            assert (found.loaded, found.added) == (left, 0)
            continue
        walk = Walk(work, config, splits, step.dq_sums)
        assert found.loaded == walk.loaded, name
        if name in ONE_PASS:
            sums = walk
            results = work.batch * work.heads_kv * work.seqlen_k * walk.size
            results *= work.head_dim + work.head_dim_v
            rows = work.batch * work.heads_kv * -(-work.seqlen_k // 16) * 16
            parts = 4 * splits * rows * (config.head_dim + config.head_dim_v)
            left = parts if splits > 1 else results
            assert (found.stored, found.added) == (left + walk.stored, walk.added)
        else:
            assert (found.stored, found.added) == (found.written_once, 0)


def test_the_parts_of_a_gradient_counted_by_hand():
    # Two tiles of 128 keys see four blocks of 64 queries: d = d_v = 128, 2 bytes.
    work = Workload(1, 1, 1, 256, 256, 128, 128, "bfloat16")
    operand, sums, lse = 256 * 128 * 2, 256 * 128 * 4, 256 * 4
    delta, one_pass, convert = (io_model.gradient(work, c) for c in chosen(work, "sm_90"))
    assert (delta.loaded, delta.stored) == (2 * operand + lse, 2 * lse)
    assert one_pass.loaded == 2 * operand + 2 * (2 * operand + 2 * lse)
    assert (one_pass.stored, one_pass.added) == (2 * operand + 2 * sums, sums)
    assert (one_pass.read_once, one_pass.written_once) == (
        4 * operand + 2 * lse,
        2 * operand + sums,
    )
    assert (convert.loaded, convert.stored) == (sums, operand)
    both = io_model.together([one_pass, convert])
    assert (both.loaded, both.added) == (one_pass.loaded + sums, sums)
    # q, k, v, dq, dk and dv are moved once, dout twice. P is read twice, dP and dS are written, dP
    # is read once and dS twice.
    assert io_model.unfused(work, "bwd") == 8 * operand + 7 * 256 * 256 * 2


def test_the_last_tile_that_stores_dq_counted_by_hand():
    # As above, in 800 heads: the first of two tiles stores a sum, the second loads it.
    work = Workload(100, 8, 8, 256, 256, 128, 128, "bfloat16")
    operand, sums, lse = 800 * 256 * 128 * 2, 800 * 256 * 128 * 4, 800 * 256 * 4
    _, one_pass, convert = (io_model.gradient(work, c) for c in chosen(work, "sm_90"))
    assert one_pass.loaded == 2 * operand + 2 * (2 * operand + 2 * lse) + sums
    assert (one_pass.stored, one_pass.added) == (3 * operand + sums, 0)
    assert one_pass.written_once == 3 * operand
    assert (convert.loaded, convert.stored) == (0, 0)
    (short,) = (
        io_model.gradient(replace(work, seqlen_k=100), c)
        for c in chosen(replace(work, seqlen_k=100), "sm_90")[1:2]
    )
    assert (short.added, short.stored) == (0, operand + 2 * 800 * 100 * 128 * 2)


def test_a_kernel_without_a_model_is_refused(capsys):
    work = replace(SMALL, arrays=("bias",))
    score = scores(work.problem(), 99 * 1024, 16, "bias", "pairs")
    with pytest.raises(ValueError, match="kernel: got backward_dscore_sm80, expected one of the"):
        io_model.gradient(work, score)
    cores = chosen(replace(SMALL, dtype="float64"), "sm_86")[1]
    with pytest.raises(ValueError, match="--io: got backward_dkv_sm80 on CUDA cores, expected"):
        io_model.gradient(replace(SMALL, dtype="float64"), cores)
    status, out, err = command(capsys, "--arch", "sm_86", "--dtype", "float64")
    assert (status, out) == (2, "")
    assert "--io: got forward_sm80 on CUDA cores, expected kernels that have tiles" in err


def command(capsys, *words):
    """Return exit status, stdout and stderr of ``explain --io --backward``."""
    status = _cli.main(["explain", "--no-compile", "--io", "--backward", *words])
    return status, *capsys.readouterr()


def test_explain_shows_the_gradient_kernel_by_kernel(capsys):
    words = ("--arch", "sm_90a", "--causal", "--seqlen", "1024")
    status, out, _ = command(capsys, *words, "--json")
    found = json.loads(out)
    own = found["io_gradient"]
    launched = [row["kernel"] for row in found["kernels"]]
    assert status == 0
    assert [row["kernel"] for row in own["kernels"]] == launched[1:]
    assert launched[1:] == ["backward_delta", "backward_sm90", "backward_convert"]
    for name in ("read_once", "loaded", "written_once", "stored", "added", "asymptotic"):
        assert own["sum"][name] == sum(row[name] for row in own["kernels"])
    assert own["sum"]["loaded"] > 1.4 * found["io"]["loaded"]
    assert own["sum"]["unfused"] > own["sum"]["loaded"] + own["sum"]["stored"]
    _, text, _ = command(capsys, *words)
    row = next(line for line in text.splitlines() if line.split()[:1] == ["all"])
    names = ("read_once", "loaded", "written_once", "stored")
    assert row.split()[1:] == [f"{own['sum'][name] / 1e6:.2f}" for name in names]
    assert f"added                {own['sum']['added'] / 1e6:12.2f} MB" in text
    _, text, _ = command(capsys, "--arch", "sm_80", "--arrays", "bias")
    assert "added  " not in text
    assert "MB of the gradient (IO model, which ignores bias)" in text
