"""What keeps a problem from Hopper's kernels? A reason or nothing; the portable ones serve it then.

What layouts and addresses keep from them is not here: the copy engine decides it at launch.
"""

from __future__ import annotations

import numpy as np

from cuflash._kernels.config import HEAD_DIMS
from cuflash._kernels.score_config import register_pressure
from cuflash._problem.problem import HALVES, Problem


def against_forward(problem: Problem) -> str:
    """Why Hopper's forward does not serve a problem; empty where it does."""
    pressure, wide = register_pressure(problem), _widest(problem) > 192
    packed = problem.cu_seqlens_q is not None
    looked_up = problem.mask is not None or problem.segment_ids_q is not None
    biased, sliding = problem.bias is not None, problem.window_left is not None
    return _against_both(problem) or _first(
        (problem.formulas is not None, "nobody knows how many registers a formula takes"),
        (biased and packed, "a bias and where sequences begin spill in some case"),
        (biased and pressure > 0, "a bias spills beside options that take registers"),
        (biased and wide and sliding, "a bias and the first key of a window spill in every tile"),
        (problem.out.dtype != problem.dtype, "out has another dtype than q, whose tile it takes"),
        (problem.head_dim_v % 8 != 0, "rows of out are stored by 16 bytes"),
        (wide and packed and looked_up, "a mask or ids of packed sequences spill in every tile"),
        (wide and pressure > 1, "any two options that take registers spill in some case"),
    )


def against_tf32_forward(problem: Problem) -> str:
    """Why Hopper's forward for float32 does not serve a problem; empty where it does."""
    wide_segments = problem.segment_ids_q is not None and _widest(problem) > 64
    return against_tf32(problem) or _first(
        (wide_segments, "segment ids of 64 keys spill beside 128 columns of out"),
    )


def against_tf32(problem: Problem) -> str:
    """Why no kernel of Hopper for float32 serves a problem; empty where gradients are served."""
    options = register_pressure(problem) + (problem.bias is not None)
    options += problem.segment_ids_q is not None  # ids of both sides: two
    return _first(
        (
            problem.dtype != np.float32,
            f"Hopper's products of TF32 are for float32, not {problem.dtype}",
        ),
        (_widest(problem) > 128, "registers hold no wider result"),
        (_widest(problem) <= 32, "a tile of 64 columns would be half empty"),
        (problem.formulas is not None, "nobody knows how many registers a formula takes"),
        (options > 2, "registers hold two options that change scores"),
    )


def against_gradient(problem: Problem) -> str:
    """Why Hopper's gradient does not serve a problem; empty where it does."""
    return _against_both(problem)


def _against_both(problem: Problem) -> str:
    return _first(
        (
            problem.dtype not in HALVES,
            f"Hopper's kernels multiply 16-bit elements, not {problem.dtype}",
        ),
        (_widest(problem) > HEAD_DIMS[-1], f"no tile is wider than {HEAD_DIMS[-1]}"),
        (not problem.seqlen_k, "there are no keys, and a tensor map holds at least one row"),
    )


def crowds_gradient(problem: Problem) -> bool:
    """Do options need registers that only smaller tiles of Hopper's gradient leave?"""
    beside = sum(x is not None for x in (problem.bias, problem.formulas))
    drawn = problem.dropout > 0
    return (drawn or beside > 0) and register_pressure(problem) + beside > 2


def _widest(problem: Problem) -> int:
    return max(problem.head_dim, problem.head_dim_v)


def _first(*reasons: tuple[bool, str]) -> str:
    return next((text for applies, text in reasons if applies), "")
