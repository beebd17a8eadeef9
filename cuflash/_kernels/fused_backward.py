"""What do both one-pass kernels share? On Hopper they compute dq, dk and dv in one pass."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels import look_ups, portable, split_queries, wgmma
from cuflash._kernels.config import HEAD_DIMS, SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import register_pressure
from cuflash._kernels.tables import Row, smallest

#: The fastest tiles of benchmarks/sweeps on an H100 SXM: up to head size 128 of backward_sm90,
#: above of backward_pair_sm90.
#: A tile: block_m, block_n, num_stages, keys_in_registers.
ROWS = (
    Row("", (32, 32), (128, 128, 2, True), "D143"),
    Row("", (64, 64), (128, 128, 2, True), "D101"),
    Row("", (96, 96), (64, 128, 3, False), "D101"),
    Row("", (128, 128), (64, 128, 2, False), "D101"),
    Row("", (192, 128), (64, 64, 2, False), "D101"),
    Row("", (192, 192), (64, 64, 2, False), "D101"),
    Row("", (256, 256), (64, 64, 2, False), "D101"),
)
WIDEST_ALONE = 128  # largest padded head size whose dk and dv one thread block holds
_WIDEST_WITH_BIAS = 96  # the same beside a bias in global memory, or a bias and two other options
#: Buffers, each of 32 rows of a 16-bit bias or of a mask, by padded head size: all that fit (D190).
_BIAS_STAGES, _MASK_STAGES = {32: 4, 64: 3, 128: 4}, {32: 4, 64: 4, 96: 2, 128: 4}


class Own(NamedTuple):
    """Fields of the one-pass kernels alone."""

    num_stages: int  # buffers of q and of dout
    keys_in_registers: bool  # are k and v of a tile kept as operands in registers?
    deterministic: bool  # do tiles of keys add to dq in a fixed order?
    split_queries: bool = False  # do several thread blocks share the queries of a tile of keys?
    split_rows: bool = False  # do they share even the queries of one batch entry?
    bias_stages: int = 0  # buffers of a bias in shared memory; 0: read from global memory
    mask_stages: int = 0  # buffers of a mask in shared memory; 0: read from global memory
    grad_bias: bool = False  # does it also write the gradient of a bias, one pair an element?
    finishes_dq: bool = False  # does the tile that adds last to a block of dq round and store it?


class AllGradientsConfig(wgmma.WarpgroupsConfig):
    """A one-pass kernel: four warps load and write, and one warpgroup multiplies dq."""

    computes = "dqkv"
    parts = SCORED | {"own": Own}
    tunables = ("block_m", "block_n", "num_stages", "keys_in_registers")
    owned = "block_n"  # queries are streamed
    other_warps = 8

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Why the kernel cannot serve a request; empty where it can.

        Refused are head sizes without registers for dk, dv and a part of dq, and options that
        leave too few registers for them.
        """
        problem, pair = request.problem, cls.cluster_blocks == 2
        reason = wgmma.why_not_halves(request) or wgmma.why_not_broadcast(request)
        reason = reason or wgmma.first_reason(
            (problem.k.summed != problem.v.summed, "k and v are broadcast along different axes"),
            (problem.head_dim_v > problem.head_dim, "registers hold no head_dim_v above head_dim"),
            (
                not portable.shares_keys(problem, "kv"),
                "batch entries that are summed into one result have different keys",
            ),
            (
                _lacks_registers(request),
                "registers do not hold a bias with these strides or this many options",
            ),
            (
                pair and _walks_far(request),
                "registers do not hold bounds or other options beside segments",
            ),
        )
        if not reason and pair != (smallest(ROWS, problem)[0] > WIDEST_ALONE):
            return "the other one-pass kernel is for this head size"
        return reason

    def check(self) -> None:
        super().check()
        if self.grad_bias and not self.can_write_bias:
            raise ValueError(f"{self.grad_bias=}: the kernel cannot compute this bias's gradient")
        if self.finishes_dq and not (self.deterministic and self.segment_ids == "none"):
            raise ValueError(f"{self.finishes_dq=}: it is not known which tile adds last")

    @property
    def starts_early(self) -> bool:
        """Whether it starts while ``backward_delta.cu`` runs: always."""
        return True

    @property
    def can_write_bias(self) -> bool:
        """Can the kernel store ds as the gradient of a bias?

        ds has to be the gradient of what is added to a score, in all blocks that queries see. At
        128 columns bounds and slopes leave no registers to store it.
        """
        takes_registers = self.window_left or self.window_right or self.alibi_slopes != "none"
        return (
            self.cluster_blocks == 1
            and not (self.head_dim > _WIDEST_WITH_BIAS and takes_registers)
            and self.bias == self.dtype
            and not self.softcap
            and not self.score_mod
            and (self.segment_ids, self.cu_seqlens) == ("none", "none")
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        fields = wgmma.fields(cls, request, ROWS)
        fields["bias_stages"], fields["mask_stages"] = bias_stages(request), mask_stages(request)
        ordered = cls(**fields, deterministic=True)
        if request.deterministic or split_queries.finishes_dq(
            request.problem, ordered, request.num_sms, share=2
        ):
            return (ordered,)  # the order costs nothing
        return (ordered.replace(deterministic=False),)


def bias_stages(request: Request) -> int:
    """Buffers of a 16-bit bias in shared memory; 0: the bias is read from global memory."""
    bias = request.problem.bias
    comes = bias is not None and bias.dtype.itemsize == 2 and look_ups.bias_comes(request)
    return _BIAS_STAGES.get(smallest(ROWS, request.problem)[0], 0) if comes else 0


def mask_stages(request: Request) -> int:
    """Buffers of a mask that hides probabilities; 0: the mask is read from global memory."""
    problem = request.problem
    others = (problem.bias, problem.softcap, problem.formulas, problem.cu_seqlens_q)
    alone = all(other is None for other in others)
    comes = alone and look_ups.come_by_rows(problem.mask, request)
    return _MASK_STAGES.get(smallest(ROWS, problem)[0], 0) if comes else 0


def _lacks_registers(request: Request) -> bool:
    """Are there no registers for a bias, or above head size 128 for three options?"""
    problem = request.problem
    width, pressure = smallest(ROWS, problem)[0], register_pressure(problem)
    if width > WIDEST_ALONE and problem.bias is not None:
        lengths = problem.q_lengths is not None or problem.kv_lengths is not None
        return pressure > 0 or (problem.window_left is not None and lengths)
    if width > WIDEST_ALONE:
        return pressure > 2
    if problem.bias is None or width <= _WIDEST_WITH_BIAS:
        return False
    return pressure > 1 or not bias_stages(request)


def _walks_far(request: Request) -> bool:
    """Do walks of a pair over segments spill registers?"""
    problem = request.problem
    if problem.segment_ids_q is None:
        return False
    bounds = (
        problem.window_left, problem.offset, problem.q_lengths, problem.kv_lengths,
        problem.cu_seqlens_q,
    )  # fmt: skip
    bounded = any(bound is not None for bound in bounds)
    if smallest(ROWS, problem)[0] == HEAD_DIMS[-1]:
        bounded |= problem.window_right is not None
    return bounded or register_pressure(problem) > 1


def wins(config: KernelConfig) -> bool:
    """Whether one pass is the default where it can serve: docs/backward-sm90.md.

    Up to head size 128 it is not for a mask in global memory beside a bias, which is not measured,
    nor at 128 beside other options of scores, where registers spill. (D20, D190)
    """
    if config.head_dim > WIDEST_ALONE or config.mask_stages or not config.mask:
        return True
    if config.bias != "none":
        return False
    arrays = config.alibi_slopes, config.segment_ids
    formulas = config.score_mod or config.mask_mod
    alone = arrays == ("none", "none") and not config.softcap and not formulas
    return config.head_dim < WIDEST_ALONE or alone
