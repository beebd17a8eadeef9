"""``forward_tf32_sm90.cu``: the forward of float32 on Hopper."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable, split_keys, tf32_sm90, wgmma
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import dtype_of, register_pressure


class ForwardTf32Sm90Config(tf32_sm90.Tf32Config):
    """``forward_tf32_sm90.cu``: two warpgroups own 64 queries each, two more split k and v."""

    kernel = "forward_tf32_sm90"
    params = "ForwardParams"
    computes = "out"
    parts = SCORED | {"own": portable.Forward, "held": portable.BiasInRegisters}
    other_warps = 8
    splits_keys = True

    def check(self) -> None:
        super().check()
        if self.precision == "tf32" and self.block_n != 64:
            raise ValueError(
                f"block_n = {self.block_n} must be 64, the only size with TF32 products"
            )

    @property
    def smem_bytes(self) -> int:
        """The q tile; rings of k and v in TF32 parts; a KiB of barriers."""
        streamed = self.num_stages * self.operand_parts * self.block_n
        streamed *= self.head_dim + self.head_dim_v
        return int(self.element_bytes * (self.block_m * self.head_dim + streamed)) + 1024

    @classmethod
    def eligible(cls, request: Request) -> str:
        problem = request.problem
        wide = wgmma.widest(problem) > 64
        of_scores = register_pressure(problem) > 0 or problem.bias is not None
        return tf32_sm90.why_not(request) or wgmma.first_reason(
            (
                wide and problem.segment_ids_q is not None,
                "segment ids of 64 keys spill registers at head size 128",
            ),
            (
                wide and of_scores and split_keys.wanted(request),
                "score options with split keys spill registers at head size 128",
            ),
            (
                problem.num_queries is not None,
                "queries of several heads leave the kernel's tiles half empty",
            ),
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The fastest tile of benchmarks/sweeps (H100 SXM); two stages if they fit. (D39, D43)"""
        problem = request.problem
        own = tf32_sm90.fields(cls, request, 128, 64) | {"sink": dtype_of(problem.sink)}
        bounded = problem.window_left is not None or problem.window_right is not None
        lengths = problem.q_lengths is not None or problem.kv_lengths is not None
        if wgmma.widest(problem) > 64 and lengths and not bounded:  # a held bias would spill
            own["holds_bias"] = False
        if split_keys.wanted(request):
            own |= split_keys.fields(cls, request)
        return tf32_sm90.staged(cls, request, own)
