"""Which kernels can be tuned, by which parameters, and how does a configuration travel as JSON?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cuflash._config import (
    BackwardConvertConfig,
    BackwardKVConfig,
    BackwardKVPartnersConfig,
    BackwardKVSm90Config,
    BackwardKVTf32Sm90Config,
    BackwardOnePassConfig,
    BackwardPairConfig,
    BackwardQConfig,
    BackwardQPartnersConfig,
    BackwardQSm90Config,
    BackwardQTf32Sm90Config,
    BackwardScoreConfig,
    DeltaConfig,
    ForwardConfig,
    ForwardNarrowConfig,
    ForwardSm90Config,
    ForwardTf32Sm90Config,
    KernelConfig,
    SegmentBoundsConfig,
    TileConfig,
)
from cuflash._errors import problem_with
from cuflash._tuned import with_values

#: Widths of s that ``kernels_cu/ptx/wgmma_shared_a.cuh`` multiplies: tools/gen_wgmma.py.
WGMMA_WIDTHS = (32, 48, 64, 80, 96, 112, 128)
_HOPPER_ROWS = (64, 128, 192, 256)  # of which two or three warpgroups are legal
_STAGES = tuple(range(2, 9))
_PORTABLE_ROWS = (32, 64, 96, 128, 192, 256)
_PORTABLE_WIDTHS = tuple(range(16, 144, 16))
_PORTABLE = {
    "block_m": _PORTABLE_ROWS,
    "block_n": _PORTABLE_WIDTHS,
    "num_warps": (2, 4, 8),
    "blocks_per_sm": (1, 2, 3, 4),
}
_FORWARD = _PORTABLE | {"num_stages": (1, 2)}
_PORTABLE_KV = _PORTABLE | {"block_m": _PORTABLE_WIDTHS, "block_n": _PORTABLE_ROWS}
_TF32 = {"block_m": (128,), "block_n": (32, 64), "num_stages": (1, 2, 3, 4)}
_GRADIENT = {"num_stages": _STAGES, "scores_ahead": (0, 1)}

#: Values to try; whether a combination is legal is for ``_config.py`` and the device to say.
PARAMETERS: dict[type[TileConfig], dict[str, tuple[int, ...]]] = {
    ForwardSm90Config: {
        "block_m": _HOPPER_ROWS,
        "block_n": WGMMA_WIDTHS,
        "num_stages": _STAGES,
        "num_q_stages": (1, 2),
        "overlap_quarters": (0, 1, 2, 3, 4),
    },
    ForwardConfig: _FORWARD,
    BackwardQSm90Config: {"block_m": _HOPPER_ROWS, "block_n": WGMMA_WIDTHS, **_GRADIENT},
    BackwardKVSm90Config: {"block_m": WGMMA_WIDTHS, "block_n": _HOPPER_ROWS, **_GRADIENT},
    BackwardOnePassConfig: {
        "block_m": (64, 128),
        "block_n": _HOPPER_ROWS,
        "num_stages": _STAGES,
        "keys_in_registers": (0, 1),
    },
    BackwardPairConfig: {
        "block_m": (64, 128),
        "block_n": (64, 128),
        "num_stages": _STAGES,
        "keys_in_registers": (0, 1),
    },
    BackwardQConfig: _PORTABLE,
    BackwardKVConfig: _PORTABLE_KV,
    BackwardQPartnersConfig: _PORTABLE,
    BackwardKVPartnersConfig: _PORTABLE_KV,
    ForwardTf32Sm90Config: _TF32,
    BackwardQTf32Sm90Config: _TF32,
    BackwardKVTf32Sm90Config: _TF32 | {"block_m": (32, 64), "block_n": (128,)},
    ForwardNarrowConfig: {
        "block_m": (128, 256, 384, 512),
        "block_n": (32, 64, 128, 256),
        "num_warps": (4, 8),
        "blocks_per_sm": (1, 2, 3, 4),
    },
}
KERNELS: dict[str, type[TileConfig]] = {
    kind.source.removesuffix(".cu"): kind for kind in PARAMETERS
}

#: Kernels that have no tile to choose, or no sweep that chooses it, travel, too.
_FIXED: tuple[type[KernelConfig], ...] = (
    DeltaConfig,
    BackwardScoreConfig,
    BackwardConvertConfig,
    SegmentBoundsConfig,
)
_ALL: dict[str, type[KernelConfig]] = {
    **KERNELS,
    **{kind.source.removesuffix(".cu"): kind for kind in _FIXED},
}


def kernel_name(config: KernelConfig) -> str:
    """The source without its suffix: "forward_sm90"."""
    return config.source.removesuffix(".cu")


def kernel_type(name: str) -> type[TileConfig]:
    """The configuration of a kernel; a ValueError that lists the known ones."""
    if name not in KERNELS:
        raise problem_with(
            "kernel", ValueError, got=repr(name), expected=f"one of {', '.join(KERNELS)}"
        )
    return KERNELS[name]


def tile_of(config: TileConfig) -> dict[str, int]:
    """Values of the parameters, in order; truth values as 0 and 1."""
    return {name: int(getattr(config, name)) for name in PARAMETERS.get(type(config), {})}


def with_tile(config: TileConfig, values: Mapping[str, Any]) -> TileConfig:
    """The configuration with other values; a ValueError names what is unknown or illegal."""
    known = PARAMETERS[type(config)]
    for name, value in values.items():
        if name not in known:
            raise problem_with(
                "parameter", ValueError, got=repr(name),
                expected=f"one of {', '.join(known)} of {kernel_name(config)}",
            )  # fmt: skip
        if not isinstance(value, int):
            raise problem_with(name, ValueError, got=repr(value), expected="an int")
    return with_values(config, values)


def config_as_json(config: KernelConfig) -> dict[str, Any]:
    """All fields and the kernel's name."""
    named = {f.name: getattr(config, f.name) for f in fields(config)}
    return {"kernel": kernel_name(config), **named}


def config_from_json(given: Mapping[str, Any]) -> Any:
    """The configuration of :func:`config_as_json`, after JSON made lists of tuples."""
    values = dict(given)
    kind = _ALL[values.pop("kernel")]
    if "formulas" in values:
        values["formulas"] = tuple((name, text) for name, text in values["formulas"])
    return kind(**values)
