"""What may ``config=`` be: the caller's own tiles, for which kernels?"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

from cuflash._errors import problem_with
from cuflash._kernels.config import TileConfig
from cuflash._select import measured
from cuflash._select.hardware import Hardware

AnyTileConfig = TypeVar("AnyTileConfig", bound=TileConfig)


class BackwardConfigs(NamedTuple):
    """Tiles that override the choice for the backward passes, and decide which kernels run.

    Each is a configuration of a kernel that computes dq, dk and dv, or all three in one pass.
    """

    q: TileConfig | None = None
    kv: TileConfig | None = None
    qkv: TileConfig | None = None


def of_forward(config: Any) -> TileConfig | None:
    """The tile of a forward, or None; a TypeError for anything else."""
    if config is None or _result_of(config) == "out":
        return config  # type: ignore[no-any-return]
    raise _refusal("config", config, "a configuration of a forward kernel, as ForwardConfig")


def of_backward(config: Any) -> BackwardConfigs | None:
    """The tiles of a gradient, or None: that of one kernel, as a sweep finds it, is its own."""
    if config is None:
        return None
    if not isinstance(config, BackwardConfigs):
        field = _result_of(config).removeprefix("d")
        if field in BackwardConfigs._fields:
            return BackwardConfigs(**{field: config})
        raise _refusal(
            "config", config, "a configuration of a gradient's kernel, as BackwardQConfig, or a "
            "cuflash.tuning.BackwardConfigs",
        )  # fmt: skip
    for field, own in config._asdict().items():
        if own is not None and _result_of(own) != f"d{field}":
            expected = f"None or a configuration of a kernel that computes d{field}"
            raise _refusal(f"config.{field}", own, expected)
    return config


def _result_of(config: Any) -> str:
    """What the kernel of a configuration computes; empty for anything else."""
    return str(getattr(config, "computes", ""))


def _refusal(argument: str, config: Any, expected: str) -> Exception:
    fix = "the config of a candidate of cuflash.tuning.space is one"
    if _result_of(config) == "out":
        fix = "attention takes it"
    elif isinstance(config, BackwardConfigs) or _result_of(config) in ("dq", "dkv", "dqkv"):
        fix = "attention_backward takes it"
    got = type(config).__name__
    return problem_with(argument, TypeError, got=got, expected=expected, fix=fix)


def with_override(
    chosen: AnyTileConfig, config: TileConfig | None, hardware: Hardware
) -> AnyTileConfig:
    """The tile that the caller, or else a table of what was measured, wants instead.

    What follows from the problem stays. ``config`` is one of the same kernel.
    """
    if config is None:
        return measured.applied(chosen, hardware.name, hardware.limits.block_smem)
    names = measured.TILE_FIELDS & {f.name for f in fields(config)}
    try:
        return replace(chosen, **{name: getattr(config, name) for name in names})
    except ValueError as error:
        raise problem_with(
            "config", ValueError, got=f"{type(config).__name__} with {measured.tile_text(config)}",
            expected="a tile that is legal for this call", fix=str(error).replace("self.", ""),
        ) from None  # fmt: skip
