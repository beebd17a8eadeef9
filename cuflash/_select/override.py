"""Which tiles may a caller pass as ``config=``, and for which kernels?"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from cuflash._errors import problem_with
from cuflash._kernels.config import KernelConfig
from cuflash._select import measured
from cuflash._select.hardware import Hardware

AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)


class BackwardConfigs(NamedTuple):
    """Tiles that override the choice for the backward passes, and decide which kernels run.

    Attributes
    ----------
    q, kv, qkv : configuration or None
        Of a kernel that computes dq, dk and dv, or all three in one pass.

    Examples
    --------
    >>> from cuflash import tuning
    >>> work = tuning.Workload(2, 16, 16, 4096, 4096, 128, 128, "bfloat16")
    >>> tiles = tuning.space(work, "backward_dq_sm90", arch="sm_90a")
    >>> own = tuning.BackwardConfigs(q=next(iter(tiles)).config)  # for attention_backward(config=)
    >>> own.q.kernel, own.kv
    ('backward_dq_sm90', None)
    """

    q: KernelConfig | None = None
    kv: KernelConfig | None = None
    qkv: KernelConfig | None = None


def of_forward(config: Any) -> KernelConfig | None:
    """The tile of a forward, or None; a TypeError for anything else."""
    if config is None or _result_of(config) == "out":
        return config  # type: ignore[no-any-return]
    raise _refusal("config", config, "a configuration of a forward kernel, such as ForwardConfig")


def of_backward(config: Any) -> BackwardConfigs | None:
    """The tiles of a gradient, or None. A configuration of one kernel gets a field to itself."""
    if config is None:
        return None
    if _field_of(config):
        return BackwardConfigs(**{_field_of(config): config})
    if not _has_several(config):
        raise _refusal(
            "config", config, "a configuration of a gradient's kernel, such as BackwardQConfig, or "
            "a cuflash.tuning.BackwardConfigs",
        )  # fmt: skip
    for field, own in config._asdict().items():
        if own is not None and _field_of(own) != field:
            expected = f"None or a configuration of a kernel that computes d{field}"
            raise _refusal(f"config.{field}", own, expected)
    return config  # type: ignore[no-any-return]


def _result_of(config: Any) -> str:
    """What the kernel of a configuration computes; empty for anything else."""
    return str(getattr(config, "computes", ""))


def _field_of(config: Any) -> str:
    """The field of ``BackwardConfigs`` for a configuration; empty for anything else."""
    field = _result_of(config).removeprefix("d")
    return field if field in BackwardConfigs._fields else ""


def _has_several(config: Any) -> bool:
    return getattr(config, "_fields", ()) == BackwardConfigs._fields


def _refusal(argument: str, config: Any, expected: str) -> Exception:
    fix = "take the config of a candidate of cuflash.tuning.space"
    if _result_of(config) == "out":
        fix = "pass it to attention"
    elif _field_of(config) or _has_several(config):
        fix = "pass it to attention_backward"
    got = config.__class__.__name__
    return problem_with(argument, TypeError, got=got, expected=expected, fix=fix)


def with_override(
    chosen: AnyConfig,
    config: KernelConfig | None,
    hardware: Hardware,
    of_any_device: KernelConfig | None = None,
) -> AnyConfig:
    """``chosen`` with the tile of the caller's ``config``, or else of a user's measured table.

    Fields that the problem determines stay. ``config`` is of the same kernel. ``of_any_device`` has
    the tile that a measured row names as the one that it replaces; by default it is ``chosen``.
    """
    if config is None:
        own = of_any_device or chosen
        return measured.applied(chosen, hardware.name, hardware.limits.block_smem, own)
    try:
        return chosen.replace(**measured.tile_fields(config))
    except ValueError as error:
        got = f"{config.__class__.__name__} with {measured.tile_text(config)}"
        raise problem_with(
            "config", ValueError, got=got,
            expected="a tile that is legal for this call", fix=str(error).replace("self.", ""),
        ) from None  # fmt: skip
