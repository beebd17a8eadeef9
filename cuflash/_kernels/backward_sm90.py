"""``backward_sm90.cu``: all gradients in one pass, dq as sums that tiles of keys add to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash._kernels import fused_backward, wgmma
from cuflash._problem.problem import Problem


#: Buffers of a bias in shared memory, as many as fit: by padded head size and bytes of an element.
_BIAS_STAGES = {(32, 2): 4, (32, 4): 4, (64, 2): 3, (128, 2): 4, (128, 4): 4}


class BackwardOnePassConfig(fused_backward.AllGradientsConfig):
    kernel = "backward_sm90"

    def check(self) -> None:
        super().check()
        if self.block_m % 64 or self.block_m // 64 * -(-self.head_dim // 64) != 2:
            raise ValueError(
                f"{self.block_m=} by {self.head_dim=} must be two parts of dq: 64 rows, 64 columns"
            )

    @property
    def smem_bytes(self) -> int:
        """Tiles of every kernel that owns keys, two tiles of ds, one of dq; in whole KiB."""
        ds = 2 * wgmma.panel_bytes(self, self.block_n, self.block_m)
        staged = 4 * int(self.block_m * self.head_dim) + 8192 * int(self.bias_stages)
        return wgmma.key_owner_bytes(self) + ds + staged + 1024

    @classmethod
    def bias_stages_of(cls, problem: Problem, fields: Mapping[str, Any]) -> int:
        """None where rows, or the end of keys, do not lie at multiples of 16 bytes."""
        bias = problem.bias
        if bias is None or bias.dtype.itemsize > 4:
            return 0
        *outer, column = bias.strides
        if column != bias.dtype.itemsize or any(stride % 16 for stride in outer):
            return 0
        if bias.shape[-1] % 8:
            return 0
        return _BIAS_STAGES.get((fields["head_dim"], bias.dtype.itemsize), 0)
