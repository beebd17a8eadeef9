"""What changes the machine code of a kernel? Frozen configurations, one per kernel.

Every field becomes one ``#define CUFLASH_<FIELD>``, read by ``kernels_cu/config.cuh`` alone.
Shapes, strides, lengths, scale and window bounds are run-time parameters and not here: a new shape
never recompiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, Self

from cuflash._kernels.frozen import Frozen
from cuflash._kernels.score_config import Floats, Integers, ScoreConfig

#: Of q, k and v, or of results.
Dtype = Literal["float16", "bfloat16", "float32", "float64"]
#: Of products of float32.
Precision = Literal["ieee", "tf32"]
GradOf = Literal["bias", "alibi_slopes", "scale"]
#: A sum for each pair, for each key over its queries, or for each query over its keys.
SumsTo = Literal["pairs", "keys", "queries"]

#: What a padded tile width may be.
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)

#: Columns of scores that ``kernels_cu/ptx/wgmma_ss.cuh`` multiplies: tools/gen_wgmma.py.
WGMMA_WIDTHS = (32, 48, 64, 80, 96, 112, 128)

#: Shared memory that the system keeps for itself in every block of threads.
RESERVED_SMEM = 1024
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class KernelConfig(Frozen):
    """What all kernels have; a subclass is one kernel."""

    source: ClassVar[str]
    entry: ClassVar[str]
    params: ClassVar[str]  # CUDA name of its parameter struct
    #: "out", "dq", "dkv" or "dqkv"; or a step on the way: "bounds", "delta", "convert", "sums".
    computes: ClassVar[str]
    tensor_maps: ClassVar[bool] = False  # does Hopper's copy engine load operands by them?

    num_warps: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_warps <= 32:
            raise ValueError(f"{self.num_warps=} must be from 1 to 32")

    @property
    def kernel(self) -> str:
        """Name of the kernel, the source without its suffix: "forward_sm90"."""
        return self.source.removesuffix(".cu")

    @property
    def real_bytes(self) -> int:
        """Bytes of a score, a statistic or a sum."""
        return 4

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.num_warps

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 0

    def __getattr__(self, name: str) -> Any:
        """A field of a part, which is read like one of the configuration's own."""
        if name in ScoreConfig._fields and "score" in vars(self):
            return getattr(vars(self)["score"], name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read older pickles, too, in which the score options are fields of their own."""
        score = {name: state[name] for name in ScoreConfig._fields if name in state}
        vars(self).update({name: value for name, value in state.items() if name not in score})
        if score:
            vars(self)["score"] = ScoreConfig(**score)

    def values(self) -> dict[str, Any]:
        """All fields by name, each part's among them."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        score = named.pop("score", None)
        return named if score is None else named | score._asdict()

    def replace(self, **changes: Any) -> Self:
        """The configuration with other values, fields of parts among them."""
        score = {name: changes.pop(name) for name in ScoreConfig._fields if name in changes}
        if score:
            changes["score"] = self.score._replace(**score)
        return replace(self, **changes)

    def defines(self) -> dict[str, str]:
        """Macros that specialise the source, one per field but texts, and the derived size."""
        named = self.values() | {"smem_bytes": self.smem_bytes}
        named.pop("formulas", None)
        return {f"CUFLASH_{name.upper()}": _spelled(value) for name, value in named.items()}


class SegmentBoundsConfig(KernelConfig):
    """``segment_bounds.cu``."""

    source = "segment_bounds.cu"
    entry = "cuflash_segment_bounds"
    params = "SegmentBoundsParams"
    computes = "bounds"

    segment_ids: Integers


class OperandConfig(KernelConfig):
    """A kernel that reads q, k, v, out or their gradients."""

    dtype: Dtype
    out_dtype: Dtype
    copy_bytes: int  # widest copy that strides and alignment of every operand allow
    head_dim_v: int

    def __post_init__(self) -> None:
        KernelConfig.__post_init__(self)
        if self.copy_bytes not in (2, 4, 8, 16):
            raise ValueError(f"{self.copy_bytes=} must be 2, 4, 8 or 16")
        if self.copy_bytes < self.element_bytes:
            raise ValueError(f"{self.copy_bytes=} is less than an element of {self.dtype}")
        if self.head_dim_v not in HEAD_DIMS:
            raise ValueError(f"{self.head_dim_v=} must be one of {HEAD_DIMS}")

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of q, k and v."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def real_bytes(self) -> int:
        """As wide as an element, or float32."""
        return max(4, self.element_bytes)


class DeltaConfig(OperandConfig):
    """``backward_delta.cu``; ``out_dtype`` is what out is read in."""

    source = "backward_delta.cu"
    entry = "cuflash_backward_delta"
    params = "DeltaParams"
    computes = "delta"

    block_m: int
    grad_lse: bool


class TileConfig(OperandConfig):
    """A kernel that computes scores tile by tile."""

    owned: ClassVar[str] = "block_m"  # the side whose rows the results of a block are
    cluster_blocks: ClassVar[int] = 1  # thread blocks that share a tile
    other_warps: ClassVar[int] = 0  # own no rows, where the tile decides how many warps there are
    #: Rows of the other side that a block may have: a lane has 32 bits for its columns of a row,
    #: ``ColumnBits`` of score/score.cuh.
    streams: ClassVar[Sequence[int]] = range(16, 129, 16)
    most_on_cuda_cores: ClassVar[int] = 512  # rows of simt/global_tile.cuh

    precision: Precision
    wide_float64: bool  # are there products of float64 of 16 rows, as from sm_90 on?
    cuda_cores: bool = False  # do they multiply, operands where they lie?
    head_dim: int
    block_m: int
    block_n: int
    blocks_per_sm: int
    column_parts: int  # blocks of threads that share a tile, each with its own columns
    score: ScoreConfig

    def __post_init__(self) -> None:
        OperandConfig.__post_init__(self)
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"{self.head_dim=} must be one of {HEAD_DIMS}")
        for name, value in (("block_m", self.block_m), ("block_n", self.block_n)):
            if value <= 0 or value % 16:
                raise ValueError(f"{name} = {value} must be a positive multiple of 16")
            if name != self.owned and value not in self.streams:
                raise ValueError(f"{name} = {value} must be one of {(*self.streams,)}")
            if name == self.owned and self.cuda_cores and value > self.most_on_cuda_cores:
                raise ValueError(f"{name} = {value} must be at most {self.most_on_cuda_cores}")
        for name, value in (("blocks_per_sm", self.blocks_per_sm),
                            ("column_parts", self.column_parts)):  # fmt: skip
            if value < 1:
                raise ValueError(f"{name} = {value} must be positive")
        if self.result_columns % (16 * self.column_parts):
            raise ValueError(f"{self.result_columns} columns, {self.column_parts=}: not by 16")
        if self.rows % (16 * self.num_warps):
            raise ValueError(f"{self.rows} rows must be split evenly over {self.num_warps=} by 16")
        self.score.check()

    @property
    def own_rows(self) -> int:
        """Rows of a tile's results."""
        return int(getattr(self, self.owned))

    @property
    def rows(self) -> int:
        """Rows that the warps of a block divide among themselves."""
        return self.block_m

    @property
    def parts(self) -> int:
        """TF32 numbers that add up to an element where tensor cores multiply it."""
        splits = (self.dtype, self.precision, self.cuda_cores) == ("float32", "ieee", False)
        return 2 if splits else 1

    def tile_bytes(self, rows: int, columns: int) -> int:
        """Shared memory of one operand; CUDA cores read it where it lies."""
        return 128 if self.cuda_cores else self.element_bytes * rows * columns

    @property
    def result_columns(self) -> int:
        """Columns of the result, which blocks of threads may share."""
        return self.head_dim


class ForwardConfig(TileConfig):
    """``forward_sm80.cu``."""

    source = "forward_sm80.cu"
    entry = "cuflash_forward_sm80"
    params = "ForwardParams"
    computes = "out"

    sink: Floats
    num_stages: int = 2  # buffers of k and of v

    def __post_init__(self) -> None:
        TileConfig.__post_init__(self)
        if self.num_stages not in (1, 2):
            raise ValueError(f"{self.num_stages=} must be 1 or 2")

    @property
    def result_columns(self) -> int:
        """Those of out."""
        return self.head_dim_v

    @property
    def smem_bytes(self) -> int:
        """The q tile, one or two stages of k and v."""
        own_columns = self.head_dim_v // self.column_parts
        streamed = self.tile_bytes(self.block_n, self.head_dim)
        streamed += self.tile_bytes(self.block_n, own_columns)
        stages = self.num_stages * self.parts
        return self.tile_bytes(self.block_m, self.head_dim) + stages * streamed


class ForwardNarrowConfig(ForwardConfig):
    """``forward_narrow.cu``: rows of a thread, on CUDA cores."""

    source = "forward_narrow.cu"
    entry = "cuflash_forward_narrow"
    streams = range(16, 513, 16)  # keys of a sum: as many as sums, of 262,144 keys
    most_on_cuda_cores = 2**15  # a thread has its rows in registers

    width: int  # true head sizes
    width_v: int
    key_bias: bool  # is a bias kept with its key, since all queries share it?

    def __post_init__(self) -> None:
        TileConfig.__post_init__(self)
        if self.block_m % self.num_threads or self.column_parts != 1:
            raise ValueError(f"{self.block_m=} by {self.num_threads=}, {self.column_parts=} by 1")
        if not 1 <= self.width <= 8 or not 0 <= self.width_v <= 8:
            raise ValueError(f"{self.width=} must be from 1 to 8, {self.width_v=} from 0 to 8")

    @property
    def smem_bytes(self) -> int:
        """A block of keys, values and biases, by four numbers."""
        numbers = self.width + self.width_v + self.key_bias
        return self.real_bytes * self.block_n * 4 * -(-numbers // 4)


class ForwardSm90Config(TileConfig):
    """``forward_sm90.cu``: warpgroups of 64 query rows each, and one that loads and stores."""

    source = "forward_sm90.cu"
    entry = "cuflash_forward_sm90"
    params = "ForwardSm90Params"
    computes = "out"
    tensor_maps = True
    streams = WGMMA_WIDTHS
    other_warps = 4

    sink: Floats
    num_stages: int  # buffers of k and of v
    num_q_stages: int  # 2: results are staged in one while the other is used
    overlap_quarters: int  # of the exponentials, that run before p v has to be done; 0: none

    def __post_init__(self) -> None:
        TileConfig.__post_init__(self)
        _check_warpgroups(self.owned, self.block_m, self.other_warps, self.num_warps)
        if self.num_stages < 2 or self.num_q_stages not in (1, 2):
            raise ValueError(f"{self.num_stages=} must be at least 2, {self.num_q_stages=} 1 or 2")
        if self.overlap_quarters not in range(5):
            raise ValueError(f"{self.overlap_quarters=} must be from 0 to 4")
        if self.num_q_stages == 2 and self.head_dim_v > self.head_dim:
            raise ValueError(f"{self.head_dim_v=} does not fit into a tile of q: {self.head_dim=}")

    @property
    def rows(self) -> int:
        """Four warps have none, the others 16 each."""
        return 16 * self.num_warps

    @property
    def smem_bytes(self) -> int:
        """Rings of q, k and v in panels of 64 columns, and a KiB of barriers."""
        panels, panels_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        rows = self.num_q_stages * self.block_m * panels
        rows += self.num_stages * self.block_n * (panels + panels_v)
        return self.element_bytes * 64 * rows + 1024


class BackwardQConfig(TileConfig):
    """``backward_dq_sm80.cu``."""

    source = "backward_dq_sm80.cu"
    entry = "cuflash_backward_dq_sm80"
    params = "BackwardParams"
    computes = "dq"

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout, two stages of k and v, or one of their TF32 parts."""
        return sum(
            self.tile_bytes(self.block_m, columns) + 2 * self.tile_bytes(self.block_n, columns)
            for columns in (self.head_dim, self.head_dim_v)
        )


class BackwardKVConfig(TileConfig):
    """``backward_dkv_sm80.cu``: dk, dv or both in one pass over the queries."""

    source = "backward_dkv_sm80.cu"
    entry = "cuflash_backward_dkv_sm80"
    params = "BackwardParams"
    computes = "dkv"
    owned = "block_n"  # queries are streamed
    streams: ClassVar[Sequence[int]] = range(16, 65, 16)  # KeptBits of score/dropout.cuh

    shared_keys: bool  # do all batch entries that are summed into one result share k and v?
    grad_k: bool
    grad_v: bool

    def __post_init__(self) -> None:
        TileConfig.__post_init__(self)
        if not (self.grad_k or self.grad_v):
            raise ValueError(f"{self.grad_k=}, {self.grad_v=}: nothing to compute")
        if self.block_m > self.num_threads:
            raise ValueError(f"{self.block_m=} must be at most {self.num_threads=}: one for a row")

    @property
    def result_columns(self) -> int:
        """Those of dk, or of dv alone; both are split alike."""
        return self.head_dim if self.grad_k else self.head_dim_v

    @property
    def rows(self) -> int:
        """A block owns keys and streams queries."""
        return self.block_n

    @property
    def smem_bytes(self) -> int:
        """Tiles of k and v; two stages of q, dout and the pairs (lse, delta).

        TF32 parts of q and dout take the place of a stage, unless both results are summed.
        """
        streamed = 2 * self.parts if self.grad_k and self.grad_v else 2
        tiles = sum(
            self.tile_bytes(self.block_n, columns)
            + streamed * self.tile_bytes(self.block_m, columns)
            for columns in (self.head_dim, self.head_dim_v)
        )
        return tiles + 4 * self.real_bytes * self.block_m


class BackwardQPartnersConfig(BackwardQConfig):
    """``backward_dq_partners.cu``: two warps own the same rows, each half of their columns."""

    source = "backward_dq_partners.cu"
    entry = "cuflash_backward_dq_partners"
    streams = range(32, 257, 32)  # of which a warp has half

    partners: int = 2  # warps that have the same rows

    def __post_init__(self) -> None:
        BackwardQConfig.__post_init__(self)
        if self.num_warps % 2:
            raise ValueError(f"num_warps = {self.num_warps} must be even: two have the same rows")

    @property
    def rows(self) -> int:
        """Partners have the same ones."""
        return self.partners * self.block_m

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout, a block of k and v, and ds."""
        rows = self.block_m + self.block_n
        kept = self.element_bytes * rows * (self.head_dim + self.head_dim_v)
        return kept + self.real_bytes * self.block_m * self.block_n


class BackwardKVPartnersConfig(BackwardKVConfig):
    """``backward_dkv_partners.cu``: two warps own the same keys, each half of their columns."""

    source = "backward_dkv_partners.cu"
    entry = "cuflash_backward_dkv_partners"
    streams = range(32, 129, 32)  # of which a warp has half

    partners: int = 2  # warps that have the same rows

    def __post_init__(self) -> None:
        BackwardKVConfig.__post_init__(self)
        if self.num_warps % 2:
            raise ValueError(f"num_warps = {self.num_warps} must be even: two have the same rows")

    @property
    def rows(self) -> int:
        """Partners have the same keys."""
        return self.partners * self.block_n

    @property
    def smem_bytes(self) -> int:
        """Tiles of k and v, a block of q and dout, p and ds, two of the pairs (lse, delta)."""
        rows = self.block_m + self.block_n
        kept = self.element_bytes * rows * (self.head_dim + self.head_dim_v)
        return kept + self.real_bytes * self.block_m * (2 * self.block_n + 4)


class BackwardScoreConfig(TileConfig):
    """``backward_dscore_sm80.cu``: sums of the scores' gradient."""

    source = "backward_dscore_sm80.cu"
    entry = "cuflash_backward_dscore_sm80"
    params = "BackwardParams"
    computes = "sums"

    grad_of: GradOf
    sums_to: SumsTo

    @property
    def smem_bytes(self) -> int:
        """Tiles of q, dout and parts of k and v; a sum of each column for each warp."""
        tiles = sum(
            self.tile_bytes(self.block_m, columns)
            + self.parts * self.tile_bytes(self.block_n, columns)
            for columns in (self.head_dim, self.head_dim_v)
        )
        return -(-(tiles + self.real_bytes * self.num_warps * self.block_n) // 128) * 128


class BackwardSm90Config(TileConfig):
    """A gradient kernel of Hopper: warpgroups of 64 rows of results each, and one that loads."""

    params = "BackwardSm90Params"
    tensor_maps = True
    streams = WGMMA_WIDTHS
    other_warps = 4

    num_stages: int  # buffers of what is streamed

    def __post_init__(self) -> None:
        TileConfig.__post_init__(self)
        blocks = self.own_rows // getattr(self, self.owned)
        _check_warpgroups(self.owned, self.own_rows, self.other_warps, self.num_warps, blocks)
        if self.num_stages < 2:  # a buffer is released when the next one is in use
            raise ValueError(f"{self.num_stages=} must be at least 2")

    @property
    def rows(self) -> int:
        """As many as all warps would have by 16."""
        return 16 * self.num_warps

    def _panel_bytes(self, rows: int, *head_dims: int) -> int:
        """Tiles in panels of 64 columns."""
        return self.element_bytes * rows * sum(64 * -(-head_dim // 64) for head_dim in head_dims)


class BackwardQSm90Config(BackwardSm90Config):
    """``backward_dq_sm90.cu``."""

    source = "backward_dq_sm90.cu"
    entry = "cuflash_backward_dq_sm90"
    computes = "dq"

    scores_ahead: bool  # are those of the next block multiplied while ds of this one is computed?

    def __post_init__(self) -> None:
        BackwardSm90Config.__post_init__(self)
        if self.scores_ahead and self.num_stages < 3:  # that kernel would wait for itself (D28)
            raise ValueError(
                f"{self.num_stages=} must be at least 3 with scores ahead: the next block is "
                "waited for before the last one's buffer is released"
            )

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout, rings of k and v, and a KiB of barriers."""
        rows = self.block_m + self.num_stages * self.block_n
        return self._panel_bytes(rows, self.head_dim, self.head_dim_v) + 1024


class BackwardKVSm90Config(BackwardSm90Config):
    """``backward_dkv_sm90.cu``: dk, dv or both in one pass over the queries."""

    source = "backward_dkv_sm90.cu"
    entry = "cuflash_backward_dkv_sm90"
    computes = "dkv"
    owned = "block_n"  # queries are streamed

    scores_ahead: bool  # as of BackwardQSm90Config
    grad_k: bool
    grad_v: bool

    def __post_init__(self) -> None:
        BackwardSm90Config.__post_init__(self)
        if not (self.grad_k or self.grad_v):
            raise ValueError(f"{self.grad_k=}, {self.grad_v=}: nothing to compute")
        if self.dropout and self.block_m > 64:  # KeptBits of score/dropout.cuh
            raise ValueError(f"block_m = {self.block_m} must be at most 64 with dropout")

    @property
    def smem_bytes(self) -> int:
        """Tiles of k and v, rings of q, dout, lse and delta, and barriers, in whole KiB."""
        kept = self._panel_bytes(self.block_n, self.head_dim)
        kept += self._panel_bytes(self.block_n if self.grad_k else 8, self.head_dim_v)
        streamed = self._panel_bytes(self.block_m, self.head_dim, self.head_dim_v)
        rest = self.num_stages * (8 * self.block_m + 16) + 16
        return kept + self.num_stages * streamed + -(-rest // 1024) * 1024


class BackwardOnePassConfig(BackwardSm90Config):
    """``backward_sm90.cu``: all gradients in one pass, dq as sums that tiles of keys add to."""

    source = "backward_sm90.cu"
    entry = "cuflash_backward_sm90"
    computes = "dqkv"
    owned = "block_n"  # queries are streamed
    other_warps = 8  # four that load and write, a warpgroup that multiplies dq

    keys_in_registers: bool  # are k and v of a tile?
    ordered: bool  # do tiles add one after the other?

    def __post_init__(self) -> None:
        BackwardSm90Config.__post_init__(self)
        if self.block_m % 64 or self.block_m // 64 * -(-self.head_dim // 64) != 2:
            raise ValueError(
                f"{self.block_m=} by {self.head_dim=} must be two parts of dq: 64 rows, 64 columns"
            )

    @property
    def smem_bytes(self) -> int:
        """Tiles of k and v, rings of q, dout, lse and delta; two of ds; dq; whole KiB."""
        kept = self._panel_bytes(self.block_n, self.head_dim, self.head_dim_v)
        streamed = self._panel_bytes(self.block_m, self.head_dim, self.head_dim_v)
        rest = self.num_stages * (8 * self.block_m + 16) + 16
        loaded = kept + self.num_stages * streamed + -(-rest // 1024) * 1024
        ds = 2 * self._panel_bytes(self.block_n, self.block_m)
        return loaded + ds + 4 * self.block_m * self.head_dim + 1024


class BackwardPairConfig(BackwardOnePassConfig):
    """``backward_pair_sm90.cu``: the same, by two blocks of threads of ``block_n`` keys each."""

    source = "backward_pair_sm90.cu"
    entry = "cuflash_backward_pair_sm90"
    other_warps = 8  # four that load and keep turns, a warpgroup that multiplies dq
    cluster_blocks = 2

    def __post_init__(self) -> None:
        BackwardSm90Config.__post_init__(self)
        if self.block_m != 64 or self.block_n != 64 or self.keys_in_registers:
            raise ValueError("a warpgroup holds 64 queries by 64 keys, and no keys in registers")
        if self.head_dim % 64 or self.head_dim_v % 64 or self.head_dim < 128:
            raise ValueError(f"{self.head_dim=} and {self.head_dim_v=} must be panels of 64")

    @property
    def own_rows(self) -> int:
        """Keys of both blocks of threads."""
        return 2 * self.block_n

    @property
    def smem_bytes(self) -> int:
        """As of one block of threads; half of the other's keys, ds of both; whole KiB."""
        kept = self._panel_bytes(self.block_n, self.head_dim, self.head_dim_v)
        streamed = self._panel_bytes(self.block_m, self.head_dim, self.head_dim_v)
        rest = self.num_stages * (8 * self.block_m + 16) + 16
        loaded = kept + self.num_stages * streamed + -(-rest // 1024) * 1024
        shared = self._panel_bytes(self.block_n, self.head_dim // 2, 64, 64)
        return loaded + shared + 1024


class BackwardConvertConfig(TileConfig):
    """``backward_convert.cu``: dq from its sums; tiles are those of the kernel that added."""

    source = "backward_convert.cu"
    entry = "cuflash_backward_convert"
    params = "BackwardParams"
    computes = "convert"

    @property
    def rows(self) -> int:
        """Rows are dealt out to threads, not to warps."""
        return 16 * self.num_warps


def _check_warpgroups(
    name: str, rows: int, other_warps: int, num_warps: int, blocks: int = 1
) -> None:
    """Refuse rows that no two or three warpgroups own, and warps that registers do not serve.

    ``blocks`` of threads own the rows together, ``name`` is what one of them has.
    """
    if rows not in (128, 192):
        raise ValueError(
            f"{name} = {rows // blocks} must be {128 // blocks} or {192 // blocks}: two or three "
            "warpgroups of 64 rows" + (f" in {blocks} blocks of threads" if blocks > 1 else "")
        )
    if rows // 16 + other_warps > 16:
        raise ValueError(
            f"{name} = {rows} with {other_warps} warps beside: registers serve 16 warps at most"
        )
    if rows // 16 + other_warps != num_warps:
        raise ValueError(f"{name} = {rows} takes {rows // 16 + other_warps} warps, {num_warps=}")


def _spelled(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
