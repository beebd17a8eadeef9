"""Which portable kernels compute gradients? Tables and tiles as in ``_select/portable.py``.

Operands that do not fit into shared memory are multiplied on CUDA cores, where they lie.
"""

from __future__ import annotations

from typing import Any

from cuflash._kernels.config import (
    BackwardKVConfig,
    BackwardKVPartnersConfig,
    BackwardQConfig,
    BackwardQPartnersConfig,
    BackwardScoreConfig,
    GradOf,
    SumsTo,
)
from cuflash._kernels.score_config import needs_score_math
from cuflash._problem.problem import Problem
from cuflash._select import portable
from cuflash._select.portable_tiles import Tables, Tiles


def backward_q_config(
    problem: Problem,
    smem_limit: int,
    copy_bytes: int,
    *,
    cuda_cores: bool = False,
) -> BackwardQConfig:
    """Choose the kernel of dq that every architecture has."""
    fields = portable._fields(problem, copy_bytes, problem.dtype) | {"cuda_cores": cuda_cores}
    tables = portable._tables(problem, cuda_cores)
    tiles = tables.backward_q_general if needs_score_math(problem) else tables.backward_q
    parts = portable._parts(fields["head_dim"], _own_columns(problem, tables))
    rows = portable._rows(tiles, fields)
    configs = [BackwardQConfig(**fields, **t, column_parts=parts) for t in rows]
    chosen = portable._fitting(configs, smem_limit)
    return chosen or backward_q_config(problem, smem_limit, copy_bytes, cuda_cores=True)


def backward_kv_configs(
    problem: Problem,
    smem_limit: int,
    copy_bytes: int,
    wanted: frozenset[str],
    *,
    cuda_cores: bool = False,
) -> tuple[BackwardKVConfig, ...]:
    """Choose the passes that compute dk, dv or both.

    One pass computes both if k and v are summed over the same batch axes, so that it walks the same
    queries for both, and if registers hold both sums.
    """
    fields = portable._fields(problem, copy_bytes, problem.dtype) | {"cuda_cores": cuda_cores}
    tables = portable._tables(problem, cuda_cores)
    widest = max(fields["head_dim"], fields["head_dim_v"])
    tiles = tables.backward_kv_general if needs_score_math(problem) else tables.backward_kv
    rows = portable._rows(tiles, fields)
    chosen: list[BackwardKVConfig] = []
    for names in portable._kv_passes(problem, wanted, together=widest <= tables.widest_pair):
        columns = fields["head_dim" if "k" in names else "head_dim_v"]
        parts = portable._parts(columns, _own_columns(problem, tables))
        own = _kv_fields(problem, names) | {"column_parts": parts}
        configs = [BackwardKVConfig(**fields, **tile, **own) for tile in rows]
        fitting = portable._fitting(configs, smem_limit)
        if fitting is None:
            return backward_kv_configs(problem, smem_limit, copy_bytes, wanted, cuda_cores=True)
        chosen.append(fitting)
    return tuple(chosen)


def backward_q_partners(
    problem: Problem, smem_limit: int, copy_bytes: int, *, cuda_cores: bool
) -> BackwardQPartnersConfig | None:
    """Choose the kernel of dq in which two warps share rows; None where it does not serve."""
    fields = portable._fields(problem, copy_bytes, problem.dtype) | {"cuda_cores": cuda_cores}
    rows = _partner_rows(portable._tables(problem, cuda_cores).partners_q, problem, fields)
    configs = [BackwardQPartnersConfig(**fields, **t, column_parts=1) for t in rows]
    return next((config for config in configs if portable._fits(config, smem_limit)), None)


def backward_kv_partners(
    problem: Problem, smem_limit: int, copy_bytes: int, wanted: frozenset[str], *, cuda_cores: bool
) -> tuple[BackwardKVPartnersConfig, ...] | None:
    """Choose the passes for dk, dv or both in which two warps share keys; None as for dq."""
    fields = portable._fields(problem, copy_bytes, problem.dtype) | {"cuda_cores": cuda_cores}
    passes = portable._kv_passes(problem, wanted, together=True)
    rows = _partner_rows(portable._tables(problem, cuda_cores).partners_kv, problem, fields)
    for tile in rows:
        own = fields | tile | {"column_parts": 1}
        configs = tuple(
            BackwardKVPartnersConfig(**own, **_kv_fields(problem, names)) for names in passes
        )
        if all(portable._fits(config, smem_limit) for config in configs):
            return configs
    return None


def _kv_fields(problem: Problem, names: list[str]) -> dict[str, Any]:
    """What a pass for ``names`` of dk and dv is told of them."""
    return {
        "shared_keys": portable._shares_keys(problem, names),
        "grad_k": "k" in names,
        "grad_v": "v" in names,
    }


def backward_score_config(
    problem: Problem,
    smem_limit: int,
    copy_bytes: int,
    grad_of: GradOf,
    sums_to: SumsTo,
    *,
    cuda_cores: bool = False,
) -> BackwardScoreConfig:
    """Choose the kernel of the gradients of bias, slopes and scale."""
    fields = portable._fields(problem, copy_bytes, problem.dtype) | {"cuda_cores": cuda_cores}
    fields |= {"grad_of": grad_of, "sums_to": sums_to, "column_parts": 1}
    rows = portable._rows(portable._tables(problem, cuda_cores).backward_score, fields)
    chosen = portable._fitting([BackwardScoreConfig(**fields, **t) for t in rows], smem_limit)
    return chosen or backward_score_config(
        problem, smem_limit, copy_bytes, grad_of, sums_to, cuda_cores=True
    )


def _partner_rows(
    tiles: Tiles | None, problem: Problem, fields: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of ``tiles``, none where more than bounds and a product takes registers."""
    if needs_score_math(problem) or problem.cu_seqlens_q is not None:
        return []
    widest = max(fields["head_dim"], fields["head_dim_v"])
    return [t._asdict() for t in (tiles or {}).get(widest, ())]


def _own_columns(problem: Problem, tables: Tables) -> int:
    """Columns of a gradient that registers hold."""
    if needs_score_math(problem):
        return tables.own_columns_backward_general
    return tables.own_columns_backward
