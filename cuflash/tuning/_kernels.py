"""Which kernels can be tuned, by which parameters, and how does a configuration travel as JSON?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash._errors import wrong_value
from cuflash._kernels.config import (
    BackwardConvertConfig,
    BackwardKVConfig,
    BackwardKVPartnersConfig,
    BackwardKVSm90Config,
    BackwardOnePassConfig,
    BackwardPairConfig,
    BackwardQConfig,
    BackwardQPartnersConfig,
    BackwardQSm90Config,
    BackwardScoreConfig,
    DeltaConfig,
    ForwardConfig,
    ForwardNarrowConfig,
    ForwardSm90Config,
    KernelConfig,
    SegmentBoundsConfig,
    TileConfig,
)
from cuflash._kernels.config_tf32_sm90 import (
    BackwardKVTf32Sm90Config,
    BackwardQTf32Sm90Config,
    ForwardTf32Sm90Config,
)
from cuflash._kernels.score_config import ScoreConfig
from cuflash._select.measured import with_values

_PORTABLE = ("block_m", "block_n", "num_warps", "blocks_per_sm")
_STAGED = ("block_m", "block_n", "num_stages")

#: What can be chosen of each kernel, in the order of the keys of a sweep.
PARAMETERS: dict[type[TileConfig], tuple[str, ...]] = {
    ForwardSm90Config: (*_STAGED, "num_q_stages", "overlap_quarters"),
    ForwardConfig: (*_PORTABLE, "num_stages"),
    BackwardQSm90Config: (*_STAGED, "scores_ahead"),
    BackwardKVSm90Config: (*_STAGED, "scores_ahead"),
    BackwardOnePassConfig: (*_STAGED, "keys_in_registers"),
    BackwardPairConfig: (*_STAGED, "keys_in_registers"),
    BackwardQConfig: _PORTABLE,
    BackwardKVConfig: _PORTABLE,
    BackwardQPartnersConfig: _PORTABLE,
    BackwardKVPartnersConfig: _PORTABLE,
    ForwardTf32Sm90Config: _STAGED,
    BackwardQTf32Sm90Config: _STAGED,
    BackwardKVTf32Sm90Config: _STAGED,
    ForwardNarrowConfig: _PORTABLE,
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
        raise wrong_value("kernel", repr(name), f"one of {', '.join(KERNELS)}")
    return KERNELS[name]


def tile_of(config: TileConfig) -> dict[str, int]:
    """Values of the parameters, in order; truth values as 0 and 1."""
    return {name: int(getattr(config, name)) for name in PARAMETERS.get(type(config), ())}


def with_tile(config: TileConfig, values: Mapping[str, Any]) -> TileConfig:
    """The configuration with other values; a ValueError names what is unknown or illegal."""
    known = PARAMETERS[type(config)]
    for name, value in values.items():
        if name not in known:
            raise wrong_value(
                "parameter", repr(name), f"one of {', '.join(known)} of {kernel_name(config)}"
            )
        if not isinstance(value, int):
            raise wrong_value(name, repr(value), "an int")
        if isinstance(getattr(config, name), bool) and value not in (0, 1):
            raise wrong_value(name, repr(value), "0 or 1")
    return with_values(config, values)


def config_as_json(config: KernelConfig) -> dict[str, Any]:
    """All fields and the kernel's name."""
    return {"kernel": kernel_name(config), **config.values()}


def config_from_json(given: Mapping[str, Any]) -> Any:
    """The configuration of :func:`config_as_json`, after JSON made lists of tuples."""
    values = dict(given)
    kind = _ALL[values.pop("kernel")]
    if "formulas" in values:
        values["formulas"] = tuple((name, text) for name, text in values["formulas"])
    if "score" in kind.__dataclass_fields__:
        values["score"] = ScoreConfig(**{name: values.pop(name) for name in ScoreConfig._fields})
    return kind(**values)
