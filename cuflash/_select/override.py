"""What may ``config=`` be: the caller's own tiles, for which kernels?"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

from cuflash._errors import problem_with
from cuflash._kernels.config import (
    BackwardKVConfig,
    BackwardKVSm90Config,
    BackwardOnePassConfig,
    BackwardQConfig,
    BackwardQSm90Config,
    ForwardConfig,
    ForwardSm90Config,
    TileConfig,
)
from cuflash._select import measured
from cuflash._select.hardware import Hardware

AnyTileConfig = TypeVar("AnyTileConfig", bound=TileConfig)


class BackwardConfigs(NamedTuple):
    """Tiles that override the choice for the backward passes, and decide which kernels run.

    ``qkv`` is one pass for all three gradients.
    """

    q: BackwardQConfig | BackwardQSm90Config | None = None
    kv: BackwardKVConfig | BackwardKVSm90Config | None = None
    qkv: BackwardOnePassConfig | None = None


_OF_FORWARD = (ForwardConfig, ForwardSm90Config)
_OF_FIELD: dict[str, tuple[type, ...]] = {
    "q": (BackwardQConfig, BackwardQSm90Config),
    "kv": (BackwardKVConfig, BackwardKVSm90Config),
    "qkv": (BackwardOnePassConfig,),
}


def of_forward(config: Any) -> ForwardConfig | ForwardSm90Config | None:
    """The tile of a forward, or None; a TypeError for anything else."""
    if config is None or isinstance(config, _OF_FORWARD):
        return config
    raise _refusal("config", config, "a configuration of a forward kernel", _OF_FORWARD)


def of_backward(config: Any) -> BackwardConfigs | None:
    """The tiles of a gradient, or None: that of one kernel, as a sweep finds it, is its own."""
    if config is None:
        return None
    if not isinstance(config, BackwardConfigs):
        for name, kinds in _OF_FIELD.items():
            if isinstance(config, kinds):
                given: dict[str, Any] = {name: config}
                return BackwardConfigs(**given)
        expected = "a configuration of a gradient's kernel, or a cuflash.tuning.BackwardConfigs"
        raise _refusal("config", config, expected, sum(_OF_FIELD.values(), ()))
    for name, own in config._asdict().items():
        if own is not None and not isinstance(own, _OF_FIELD[name]):
            raise _refusal(f"config.{name}", own, "None or a configuration", _OF_FIELD[name])
    return config


def _refusal(argument: str, config: Any, expected: str, kinds: tuple[type, ...]) -> Exception:
    fix = "the config of a candidate of cuflash.tuning.space is one"
    if isinstance(config, _OF_FORWARD):
        fix = "attention takes it"
    elif isinstance(config, (BackwardConfigs, *sum(_OF_FIELD.values(), ()))):
        fix = "attention_backward takes it"
    names = ", ".join(kind.__name__ for kind in kinds)
    return problem_with(
        argument, TypeError, got=type(config).__name__, expected=f"{expected} ({names})", fix=fix
    )


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
