"""Does score/score.cuh compute for every pair what the definition says? By a host compiler.

It computes scores with every option, their slopes, sinks and the bits of dropout, as the exact
paths of the kernels use them: from the same text, without a GPU and without attention.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import MaskMod, Options, ScoreMod
from cuflash._jit import source as jit_source
from cuflash._kernels import params as kernel_params
from cuflash._kernels.config import fields_text
from cuflash._problem import philox
from cuflash._problem.formulas import formulas_of
from cuflash._problem.operand import canonical_view
from cuflash._problem.problem import describe
from cuflash.reference._score import score_and_slopes
from support import chosen

pytest.importorskip("cupy", reason="CuPy is not installed")

import test_philox

from cuflash._launch import score_params

SUPPORT = Path(__file__).parent / "support"
COMPILER = shutil.which("g++") or shutil.which("clang++")
HOST_PTX = ("arithmetic", "mma_sync", "special", "tma")  # replaced by host_ptx.h
HOST_TEXTS = tuple((f"ptx/{n}.cuh", f'#include "{SUPPORT}/host_ptx.h"\n') for n in HOST_PTX)
BATCH, HEADS, ROWS, KEYS = 2, 3, 37, 41
AMP = np.array([0.5, -1.0, 2.0])
SQUARE = ScoreMod(
    "score * score * amp[h] + b * q - k",
    grad="2 * score * amp[h]",
    arrays={"amp": AMP},
    host=lambda score, b, h, q, k, amp: score * score * amp[h] + b * q - k,
    host_grad=lambda score, b, h, q, k, amp: 2 * score * amp[h],
)
FIFTHS = MaskMod("(q + k) % 5 != h", host=lambda b, h, q, k: (q + k) % 5 != h)
SEED = 2**40 + 7


def on_the_edge(entry: int, q: int, k: int) -> float:
    """Return the largest dropout probability that keeps this score."""
    return test_philox.bits(entry, q, k, SEED) / 65536


#: Options; arrays are given by their dtype.
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "alibi": {"alibi_slopes": np.float32, "offset": 5},
    "softcap": {"softcap": 1.0},  # some products exceed the polynomial's bound
    "high softcap": {"softcap": 50.0, "scale": -0.4},
    "softcap, no polynomial": {"softcap": 1e30},
    "alibi, far": {"alibi_slopes": bfloat16, "offset": np.array([[7], [-(1 << 40)]])},
    "segments": {"segment_ids": np.int64, "causal": True},
    "formulas": {"score_mod": SQUARE, "mask_mod": FIFTHS, "softcap": 4.0},
    "dropout": {"dropout": on_the_edge(4, 20, 33), "sink": bfloat16},
    "every": {
        "alibi_slopes": np.float64, "segment_ids": np.int32, "sink": np.float64, "dropout": 0.3,
        "bias": np.float32, "mask": np.bool_, "softcap": 4.0, "window": (9, 4),
        "score_mod": SQUARE, "mask_mod": FIFTHS, "kv_lengths": np.array([[20], [33]]),
        "q_lengths": np.array([30, 37, 0]), "offset": np.array([[3], [-2]]),
    },
}  # fmt: skip


def options_of(case: dict[str, Any]) -> Options:
    """Fill in the arrays of a case."""
    rng = np.random.default_rng(5)
    shapes = {
        "alibi_slopes": (BATCH, HEADS), "sink": (HEADS,), "bias": (HEADS, ROWS, KEYS),
        "mask": (BATCH, 1, 1, KEYS),
    }  # fmt: skip
    given = dict(case)
    for name in shapes.keys() & given.keys():
        given[name] = rng.standard_normal(shapes[name]).astype(given[name])
    if "bias" in given:
        given["bias"][rng.random(given["bias"].shape) < 0.1] = -np.inf
    if "mask" in given:
        given["mask"] = rng.random(given["mask"].shape) < 0.9
    if "segment_ids" in given:
        ids = (rng.integers(0, 2, shape) for shape in ((BATCH, 1, ROWS), (KEYS,)))
        given["segment_ids"] = tuple(a.astype(given["segment_ids"]) for a in ids)
    return Options(**given, seed=SEED)


class Probed(ctypes.Structure):
    """Mirrors the struct of the probe."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("products", "scores", "slopes", "exponents", "kept", "sinks")
    ]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", CASES)
def test_every_pair(name: str, tmp_path: Path) -> None:
    assert_close = np.testing.assert_allclose
    options = options_of(CASES[name])
    rng = np.random.default_rng(6)
    q, k = (rng.standard_normal((BATCH, HEADS, n, 8)).astype(np.float16) for n in (ROWS, KEYS))
    problem = replace(describe(q, k, k, options), formulas=formulas_of(options))
    config = chosen.portable("forward_sm80", problem, 99 << 10, 16)
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    text = jit_source.flatten(str(SUPPORT / "option_probe.cu"), (*HOST_TEXTS, *config.texts()))
    source.write_text(f'#include "{SUPPORT / "host_kernel.h"}"\n{text}')
    command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", source, "-o", library]
    subprocess.run(command, check=True)

    params = np.zeros((), kernel_params.SCORE)
    score_params.fill(params, problem)
    params["dropout_seed"] = options.seed
    params["entry_number_strides"]["axis"][0] = 1
    held = []  # all arrays as (entries, ...)
    present = sorted(score_params.layouts(problem).keys() & options.arrays.keys())
    for room, option in enumerate(present, 2):  # rows per entry, different in each array
        operand = getattr(problem, option)
        core = operand.shape[2:]
        view = canonical_view(options.arrays[option], operand).reshape(BATCH * HEADS, *core)
        whole = np.zeros((BATCH * HEADS * room, *core), view.dtype)
        whole[::room] = view
        held.append(whole)
        params[option] = whole.ctypes.data
        stride = room * math.prod(core)
        if len(core) == 2:
            layout = params[f"{option}_layout"]
            layout["batch"]["axis"][0], layout["row"], layout["column"] = stride, KEYS, 1
        else:
            params[f"{option}_strides"]["axis"][0] = stride
    if options.score_mod is not None:
        params["formula_array0"] = AMP.ctypes.data

    products = np.matmul(q.astype(np.float32), np.swapaxes(k, -1, -2).astype(np.float32))
    scores, slopes, exponents = (np.empty_like(products) for _ in range(3))
    kept, sinks = np.empty(products.shape, bool), np.empty((BATCH, HEADS), np.float32)
    to = Probed(*(a.ctypes.data for a in (products, scores, slopes, exponents, kept, sinks)))
    probe = ctypes.CDLL(str(library)).probe
    probe(ctypes.c_void_p(params.ctypes.data), BATCH * HEADS, ctypes.byref(to))

    exact, _seen, slope, mod_slope = score_and_slopes(
        q.astype(np.float64), k.astype(np.float64), options, np.float64
    )
    factor = problem.scale if config.scale_in_exponent else 1.0
    np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(exact))
    visible = np.isfinite(exact)
    size = np.abs(exact[visible]).max()
    found = scores.astype(np.float64) * factor
    np.testing.assert_allclose(found[visible], exact[visible], rtol=1e-5, atol=1e-6 * size)
    if exponents.any():
        reference = 0.25 if config.scale_in_exponent else 0.25 * math.log2(math.e)
        expected = exact * math.log2(math.e) - reference
        assert_close(exponents[visible], expected[visible], rtol=1e-6, atol=1e-6 * size)
    expected = np.broadcast_to(slope * mod_slope, exact.shape)
    size = np.abs(expected[visible]).max()
    np.testing.assert_allclose(slopes[visible], expected[visible], rtol=1e-5, atol=1e-5 * size)
    bits = cuflash.dropout_mask(products.shape, options.dropout, options.seed)
    np.testing.assert_array_equal(kept, bits if options.dropout else True)
    sink = -np.inf if options.sink is None else options.sink.astype(np.float32)
    np.testing.assert_array_equal(sinks, np.broadcast_to(sink, sinks.shape))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_pairs_are_kept_as_the_definition_says(tmp_path: Path) -> None:
    """Hopper's forward keeps or drops each pair as the mask of dropout says, in every lane."""
    texts = (*HOST_TEXTS, fields_text({"dropout": True}))
    text = jit_source.flatten(str(SUPPORT / "kept_probe.cu"), texts)
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    source.write_text(f'#include "{SUPPORT / "host_kernel.h"}"\n{text}')
    command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", source, "-o", library]
    subprocess.run(command, check=True)
    probe = ctypes.CDLL(str(library)).probe
    row, key = 48, 256
    places = itertools.product((0, 5, 9, 15), (0, 9, 66, 127))
    edges = [on_the_edge(0, row + i, key + j) for i, j in places]
    assert min(edges) < 0.5 < max(edges)
    for p in (1 / 65536, 0.3, 0.5, 0.5 + 1 / 65536, 0.9, 65535 / 65536, 1.0, *edges):
        params = np.zeros((), kernel_params.SCORE)
        params["dropout_seed"] = SEED
        params["dropout_threshold"] = philox.threshold(p)
        kept = np.zeros((16, 128), bool)
        probe(ctypes.c_void_p(params.ctypes.data), row, key, ctypes.c_void_p(kept.ctypes.data))
        bits = cuflash.dropout_mask((row + 16, key + 128), p, SEED)
        np.testing.assert_array_equal(kept, bits[row:, key:], f"{p=}")
