"""Which kernels are there? One line each; for each result the best kernel comes first."""

# ruff: noqa: F401, I001
from __future__ import annotations

from cuflash._kernels.config import KernelConfig

# out
from cuflash._kernels.forward_sm90 import ForwardSm90Config
from cuflash._kernels.forward_fp8_sm90 import ForwardFp8Sm90Config
from cuflash._kernels.forward_narrow import ForwardNarrowConfig
from cuflash._kernels.forward_tf32_sm90 import ForwardTf32Sm90Config
from cuflash._kernels.forward_sm80 import ForwardConfig

# dq, dk and dv in one pass
from cuflash._kernels.backward_sm90 import BackwardOnePassConfig
from cuflash._kernels.backward_pair_sm90 import BackwardPairConfig

# dk and dv
from cuflash._kernels.backward_dkv_sm90 import BackwardKVSm90Config
from cuflash._kernels.backward_dkv_tf32_sm90 import BackwardKVTf32Sm90Config
from cuflash._kernels.backward_dkv_narrow import BackwardKVNarrowConfig
from cuflash._kernels.backward_dkv_partners import BackwardKVPartnersConfig
from cuflash._kernels.backward_dkv_sm80 import BackwardKVConfig

# dq
from cuflash._kernels.backward_dq_sm90 import BackwardQSm90Config
from cuflash._kernels.backward_dq_tf32_sm90 import BackwardQTf32Sm90Config
from cuflash._kernels.backward_dq_narrow import BackwardQNarrowConfig
from cuflash._kernels.backward_dq_partners import BackwardQPartnersConfig
from cuflash._kernels.backward_dq_sm80 import BackwardQConfig

# steps before or after these kernels
from cuflash._kernels.segment_bounds import SegmentBoundsConfig
from cuflash._kernels.forward_combine import CombineConfig
from cuflash._kernels.backward_delta import DeltaConfig
from cuflash._kernels.backward_dscore_sm80 import BackwardScoreConfig
from cuflash._kernels.backward_convert import BackwardConvertConfig
from cuflash._kernels.quantize import QuantizeConfig
from cuflash._kernels.backward_combine import BackwardCombineConfig

# KV cache and rotary embedding
from cuflash._kernels.cache_grow import CacheGrowConfig
from cuflash._kernels.cache_write import CacheWriteConfig
from cuflash._kernels.cache_take import CacheTakeConfig
from cuflash._kernels.rotary import RotaryConfig

#: Kernels by name, in the order of the lines above.
KERNELS: dict[str, type[KernelConfig]] = {
    kernel.kernel: kernel for kernel in tuple(globals().values()) if getattr(kernel, "kernel", "")
}


def kernels_for(result: str) -> tuple[type[KernelConfig], ...]:
    """The kernels that compute one result, best first."""
    return tuple(kernel for kernel in KERNELS.values() if kernel.computes == result)
