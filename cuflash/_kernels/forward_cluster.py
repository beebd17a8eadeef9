"""``forward_cluster.cu``: the forward of few queries over a few hundred keys, by clusters."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels import portable, split_keys, wgmma
from cuflash._kernels.config import SCORED
from cuflash._kernels.forward_sm80 import ForwardConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import Floats, dtype_of
from cuflash._kernels.tables import Row
from cuflash._problem.problem import HALVES

#: block_m, block_n, num_warps, blocks_per_sm: what registers hold with all options.
ROWS = (
    Row("half", 16, ((64, 64, 4, 2),)),
    Row("half", 32, ((64, 64, 4, 2),)),
    Row("half", 64, ((64, 64, 4, 2),)),
    Row("half", 96, ((64, 64, 4, 2),)),
    Row("half", 128, ((64, 64, 4, 2),)),
)
PARTS = 8  # thread blocks of a cluster, as many as every device has
_FIRST_WITH_CLUSTERS = 90


class Own(NamedTuple):
    sink: Floats
    num_stages: int = 2
    split_keys: bool = True
    in_cluster: bool = True


class ForwardClusterConfig(ForwardConfig):
    """``forward_cluster.cu``: eight thread blocks share the keys of a tile, and combine them."""

    kernel = "forward_cluster"
    parts = SCORED | {"own": Own}
    tunables = ()
    combines = True

    @classmethod
    def eligible(cls, request: Request) -> str:
        problem = request.problem
        few_keys = split_keys.BOUNDS.of_cluster <= problem.seqlen_k < split_keys.BOUNDS.fewest
        tiles = portable.num_tiles(problem, split_keys.FEW_ROWS)
        return wgmma.first_reason(
            (request.capability < _FIRST_WITH_CLUSTERS, "there are clusters from sm_90 on"),
            (problem.dtype not in HALVES, "it was measured for 16 bits alone"),
            (problem.cu_seqlens_q is not None, "sequences of many lengths have keys of many"),
            (wgmma.widest(problem) > 128, "no tile is wider than 128"),
            (not few_keys, "keys are too few to be shared, or too many for eight blocks"),
            (not split_keys.few(problem), "queries are many"),
            (PARTS * tiles > request.num_sms, "there are tiles enough"),
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        own = portable.fields(cls, request) | {"sink": dtype_of(request.problem.sink)}
        values = portable.candidates(cls, ROWS, request, own)
        return portable.fitting(cls, values, request.smem_limit)
