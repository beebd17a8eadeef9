"""What specialises the kernels of float32 on Hopper's tensor cores? As in _config."""

from __future__ import annotations

from cuflash._kernels.config import BackwardKVConfig, BackwardQConfig, ForwardConfig, TileConfig


def _check_tf32_sm90(config: TileConfig, own: int, num_stages: int, num_warps: int = 12) -> None:
    """Whether two warpgroups own 64 rows each of ``own``, and others split what is streamed."""
    if config.dtype != "float32":
        raise ValueError(f"{config.dtype=} must be float32")
    if own != 128 or config.num_warps != num_warps:
        raise ValueError(f"{own} rows, {config.num_warps=}: must be 128 and {num_warps}")
    if num_stages < 1:
        raise ValueError(f"{num_stages=} must be at least 1")
    if config.column_parts != 1:
        raise ValueError(f"{config.column_parts=} must be 1")
    if not {config.head_dim, config.head_dim_v} <= {64, 128}:
        raise ValueError(f"{config.head_dim=}, {config.head_dim_v=} must be 64 or 128")


class ForwardTf32Sm90Config(ForwardConfig):
    """``forward_tf32_sm90.cu``: float32 by warpgroups of 64 query rows, two that split k and v."""

    source = "forward_tf32_sm90.cu"
    entry = "cuflash_forward_tf32_sm90"
    streams = (32, 64)

    num_stages: int  # buffers of k and of v

    def __post_init__(self) -> None:
        TileConfig.__post_init__(self)
        _check_tf32_sm90(self, self.block_m, self.num_stages, num_warps=16)
        if self.precision == "tf32" and self.block_n != 64:
            raise ValueError(f"block_n = {self.block_n} must be 64: there is no product of others")

    @property
    def rows(self) -> int:
        """Eight warps have none, the others 16 each."""
        return 16 * self.num_warps

    @property
    def smem_bytes(self) -> int:
        """The q tile, rings of the TF32 parts of k and v, and a KiB of barriers."""
        streamed = self.num_stages * self.parts * self.block_n * (self.head_dim + self.head_dim_v)
        return self.element_bytes * (self.block_m * self.head_dim + streamed) + 1024


class BackwardQTf32Sm90Config(BackwardQConfig):
    """``backward_dq_tf32_sm90.cu``: float32 on Hopper, one warpgroup splits keys and values."""

    source = "backward_dq_tf32_sm90.cu"
    entry = "cuflash_backward_dq_tf32_sm90"
    streams = (32, 64)

    num_stages: int  # buffers of k and of v

    def __post_init__(self) -> None:
        TileConfig.__post_init__(self)
        _check_tf32_sm90(self, self.block_m, self.num_stages)

    @property
    def rows(self) -> int:
        """Four warps have none, the others 16 each."""
        return 16 * self.num_warps

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout, rings of TF32 parts of k, v and k transposed, a KiB of barriers."""
        kept = self.block_m * (self.head_dim + self.head_dim_v)
        streamed = 2 * self.head_dim + self.head_dim_v
        streamed *= self.num_stages * self.parts * self.block_n
        return self.element_bytes * (kept + streamed) + 1024


class BackwardKVTf32Sm90Config(BackwardKVConfig):
    """``backward_dkv_tf32_sm90.cu``: float32 on Hopper, one warpgroup splits q and dout."""

    source = "backward_dkv_tf32_sm90.cu"
    entry = "cuflash_backward_dkv_tf32_sm90"
    streams = (32, 64)

    num_stages: int  # buffers of q and of dout

    def __post_init__(self) -> None:
        BackwardKVConfig.__post_init__(self)
        _check_tf32_sm90(self, self.block_n, self.num_stages)
        hidden = self.mask or self.mask_mod or not self.bias == self.segment_ids == "none"
        if hidden and self.block_m != 32:
            raise ValueError(f"block_m = {self.block_m} must be 32 where single pairs are hidden")

    @property
    def rows(self) -> int:
        """Four warps have none, the others 16 each."""
        return 16 * self.num_warps

    @property
    def smem_bytes(self) -> int:
        """Tiles of k and v; rings of TF32 parts of q, dout and their transposes, and of rows."""
        kept, streamed = self.head_dim, self.head_dim
        if self.grad_k:
            kept += self.head_dim_v
            streamed += self.head_dim + self.head_dim_v
        if self.grad_v:
            streamed += self.head_dim_v
        streamed *= self.num_stages * self.parts
        rest = self.num_stages * (8 * self.block_m + 5 * 16)
        tiles = self.element_bytes * (self.block_n * kept + self.block_m * streamed)
        return tiles + -(-rest // 1024) * 1024
