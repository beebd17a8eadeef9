"""Is a configuration complete, checked, and read by the CUDA sources field by field?"""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import FrozenInstanceError

import pytest

from cuflash._jit.source import kernels_dir
from cuflash._kernels.config import HEAD_DIMS, KernelConfig, fields_text
from cuflash._kernels.registry import KERNELS
from cuflash._kernels.score_config import ScoreConfig

SCORE = ScoreConfig(
    window_left=False, window_right=True, scale_in_exponent=True, softcap=False, bias="none",
    alibi_slopes="none", mask=False, segment_ids="none", offset="value", q_lengths="none",
    kv_lengths="none", score_mod=False, mask_mod=False, formulas=(), dropout=False,
    cu_seqlens="none",
)  # fmt: skip
COMMON = {"dtype": "float16", "out_dtype": "float16", "copy_bytes": 16, "head_dim_v": 64}
TILE = {
    **COMMON, **SCORE._asdict(), "num_warps": 4, "head_dim": 96, "block_m": 64, "block_n": 128,
    "blocks_per_sm": 2, "precision": "ieee", "split_columns": 1,
    "wide_float64": False, "simt": False,
}  # fmt: skip
TF32 = {
    **TILE, "dtype": "float32", "out_dtype": "float32", "num_warps": 12, "head_dim": 128,
    "num_stages": 1, "block_m": 128, "block_n": 64,
}  # fmt: skip
ForwardConfig = KERNELS["forward_sm80"]
CONFIGS: tuple[KernelConfig, ...] = (
    ForwardConfig(**TILE, sink="none", num_stages=2),
    KERNELS["backward_dq_sm80"](**TILE),
    KERNELS["backward_dkv_sm80"](**TILE, grad_k=True, grad_v=False, shared_keys=True),
    KERNELS["backward_delta"](**COMMON, num_warps=4, block_m=64, grad_lse=True),
    KERNELS["forward_sm90"](
        **{**TILE, "num_warps": 12, "block_m": 128}, num_stages=3, num_q_stages=2,
        overlap_quarters=2, sink="float32",
    ),
    KERNELS["backward_dscore_sm80"](**TILE, grad_of="bias", sums_to="keys"),
    KERNELS["backward_dq_sm90"](
        **{**TILE, "num_warps": 12, "block_m": 128}, num_stages=3, scores_ahead=True
    ),
    KERNELS["backward_dkv_sm90"](
        **{**TILE, "num_warps": 12}, num_stages=3, scores_ahead=False, grad_k=True, grad_v=True
    ),
    KERNELS["segment_bounds"](num_warps=8, segment_ids="int32"),
    KERNELS["backward_sm90"](
        **{**TILE, "num_warps": 16, "head_dim": 128}, num_stages=2,
        keys_in_registers=True, deterministic=True,
    ),
    KERNELS["backward_pair_sm90"](
        **{**TILE, "num_warps": 16, "head_dim": 256, "head_dim_v": 256, "block_n": 64},
        num_stages=2, keys_in_registers=False, deterministic=True,
    ),
    KERNELS["backward_convert"](**TILE),
    KERNELS["forward_narrow"](
        **{**TILE, "block_m": 512}, sink="none", width=3, width_v=0, key_bias=True
    ),
    KERNELS["backward_dq_narrow"](
        **{**TILE, "block_m": 512}, width=3, width_v=0, key_bias=True
    ),
    KERNELS["backward_dkv_narrow"](
        **{**TILE, "block_n": 512}, width=3, width_v=0, key_bias=True, grad_k=True, grad_v=True
    ),
    KERNELS["forward_tf32_sm90"](**{**TF32, "num_warps": 16}, sink="none"),
    KERNELS["backward_dq_tf32_sm90"](**TF32),
    KERNELS["backward_dkv_tf32_sm90"](
        **{**TF32, "block_m": 32, "block_n": 128}, grad_k=True, grad_v=True, shared_keys=True
    ),
    KERNELS["backward_dq_partners"](**TILE | {"num_warps": 8}),
    KERNELS["backward_dkv_partners"](
        **TILE | {"num_warps": 8}, grad_k=True, grad_v=True, shared_keys=True
    ),
    KERNELS["forward_combine"](**COMMON),
    KERNELS["quantize"](
        dtype="float16", out_dtype="float8_e4m3fn", head_dim=64, block_m=64, rotates=True,
        writes=False,
    ),
    KERNELS["forward_fp8_sm90"](
        **{**TILE, "dtype": "float8_e4m3fn", "num_warps": 12, "block_m": 128}, num_stages=2,
        overlap_quarters=2, sink="none",
    ),
    KERNELS["cache_grow"](page_words=1024),
    KERNELS["cache_write"](dtype="float16", rotation="none"),
    KERNELS["cache_take"](),
    KERNELS["rotary"](dtype="float16", rotation="halves", positions="int32"),
    KERNELS["backward_combine"](**TILE | {"block_n": 16}),
)  # fmt: skip


#: One member: its type, its name, its value.
MEMBER = re.compile(r"static constexpr (\w+) (\w+) = (?:\1::)?(\w+);")


def members(text: str) -> dict[str, tuple[str, str]]:
    """Return type and value of each constant of a struct."""
    return {name: (kind, value) for kind, name, value in MEMBER.findall(text)}


def fields_of(config: KernelConfig) -> dict[str, tuple[str, str]]:
    return members(dict(config.texts())["config.fields"])


def test_fields_have_defaults_of_their_type_in_the_sources() -> None:
    text = (kernels_dir() / "config.cuh").read_text()
    body = text[text.index("struct Defaults") : text.index("struct Config")]
    listed = {name: kind for name, (kind, _) in members(body).items()}
    assert listed.pop("under_racecheck") == "bool"  # no field: tools/sanitize.py
    fields = [fields_of(config).items() for config in CONFIGS]
    assert {name: kind for members in fields for name, (kind, _) in members} == listed


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kernel)
def test_members_spell_every_field_and_the_size(config: KernelConfig) -> None:
    fields = {name: value for name, (_, value) in fields_of(config).items()}
    assert len(fields) == len(config.values()) - ("formulas" in config.values()) + 1
    assert fields.get("dtype", "float16") == getattr(config, "dtype", "float16")
    assert fields["smem_bytes"] == str(config.smem_bytes)
    assert not {"True", "False", "None"} & set(fields.values())


def test_asm_has_the_dtype_as_text() -> None:
    given = {dtype: fields_text({"dtype": dtype})[1] for dtype in ("float16", "bfloat16")}
    assert {dtype: text.splitlines()[-1] for dtype, text in given.items()} == {
        "float16": '#define CUFLASH_PTX_DTYPE "f16"',
        "bfloat16": '#define CUFLASH_PTX_DTYPE "bf16"',
    }


def test_a_configuration_is_a_key() -> None:
    again = ForwardConfig(**TILE, sink="none", num_stages=2)
    assert again == CONFIGS[0]
    assert hash(again) == hash(CONFIGS[0])
    assert again.replace(block_n=64) != again
    of_queries, convert = (
        KERNELS[name](**TILE) for name in ("backward_dq_sm80", "backward_convert")
    )
    assert of_queries != convert  # though their values are equal
    assert len(set(CONFIGS)) == len(CONFIGS)
    assert eval(repr(again), {"ForwardConfig": ForwardConfig}) == again


def test_values_are_those_of_the_fields() -> None:
    """A configuration takes keywords and is frozen, like a frozen dataclass."""
    config = CONFIGS[0]
    values = config.values()
    assert ForwardConfig(**values) == config
    with pytest.raises(TypeError, match="unknown fields: colour"):
        ForwardConfig(**values, colour=1)
    with pytest.raises(TypeError, match="missing or unknown fields: block_m"):
        ForwardConfig(**{name: value for name, value in values.items() if name != "block_m"})
    with pytest.raises(FrozenInstanceError, match="block_m"):
        config.block_m = 32  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="block_m"):
        del config.block_m
    defaults = {"simt": False, "split_columns": 1, "num_stages": 2}
    given = {name: value for name, value in values.items() if name not in defaults}
    assert ForwardConfig(**given) == config.replace(**defaults)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_every_kernel_has_a_configuration_here() -> None:
    assert {config.kernel for config in CONFIGS} == set(KERNELS)
    for config in CONFIGS:
        names = [name for part in config.parts.values() for name in part._fields]
        assert len(set(names)) == len(names), "a field of two parts would be one member"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"copy_bytes": 3}, "copy_bytes=3"),
        ({"copy_bytes": 2, "dtype": "float32"}, "copy_bytes=2"),
        ({"split_columns": 3}, "split_columns=3"),
        ({"head_dim": 40}, "head_dim=40"),
        ({"head_dim_v": 512}, "head_dim_v=512"),
        ({"block_m": 72}, "block_m = 72"),
        ({"block_n": 0}, "block_n = 0"),
        ({"num_warps": 3}, "num_warps=3"),
        ({"num_warps": 64}, "num_warps=64"),
        ({"softcap": True}, "scale_in_exponent=True"),
        ({"alibi_slopes": "float32"}, "scale_in_exponent=True"),
    ],
)
def test_errors_name_the_field_and_its_value(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        CONFIGS[0].replace(**change)


def test_a_pass_without_result_is_refused() -> None:
    with pytest.raises(ValueError, match="grad_k=False"):
        KERNELS["backward_dkv_sm80"](**TILE, grad_k=False, grad_v=False, shared_keys=True)
    with pytest.raises(ValueError, match="grad_k=False"):
        CONFIGS[7].replace(grad_k=False, grad_v=False)


@pytest.mark.parametrize("change", [{"num_warps": 8}, {"num_stages": 1}, {"block_n": 64}])
def test_a_gradient_that_hopper_cannot_run_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        CONFIGS[7].replace(**change)


def test_scores_ahead_take_a_buffer_more_where_a_block_is_released_late() -> None:
    """dq, which releases a block after the next has come, needs a stage more than dk and dv."""
    of_q, of_keys = CONFIGS[6], CONFIGS[7].replace(scores_ahead=True)
    for config in (of_q, of_keys):
        assert config.scores_ahead
        text = (kernels_dir() / config.source).read_text()
        ahead = text[text.index("void add_block_ahead") :]
        late = ahead.index("start_scores(") < ahead.index("release_previous_block(")
        assert late == (config is of_q)
        if late:
            with pytest.raises(ValueError, match=r"num_stages=2 must be at least 3 with scores"):
                config.replace(num_stages=2)
            assert config.replace(num_stages=2, scores_ahead=False).num_stages == 2
        else:
            assert config.replace(num_stages=2).num_stages == 2


def test_shared_memory_by_hand() -> None:
    assert CONFIGS[0].smem_bytes == 2 * (64 * 96 + 2 * 128 * (96 + 64))
    assert CONFIGS[1].smem_bytes == 2 * (64 + 2 * 128) * (96 + 64)
    assert CONFIGS[2].smem_bytes == 2 * (128 + 2 * 64) * (96 + 64) + 2 * 64 * 8
    assert CONFIGS[3].smem_bytes == 0
    wide = {"dtype": "float64", "split_columns": 2}
    assert CONFIGS[0].replace(**wide).smem_bytes == 8 * (64 * 96 + 2 * 128 * (96 + 32))
    assert CONFIGS[2].replace(**wide).smem_bytes == 8 * (128 + 2 * 64) * (96 + 64) + 2 * 64 * 16
    assert CONFIGS[5].smem_bytes == 2 * (64 + 128) * (96 + 64) + 4 * 4 * 128
    assert CONFIGS[4].smem_bytes == 2 * (2 * 128 * 128 + 3 * 128 * (128 + 64)) + 1024
    assert CONFIGS[6].smem_bytes == 2 * (128 + 3 * 128) * (128 + 64) + 1024
    tiles = 2 * (128 + 3 * 64) * (128 + 64)
    assert CONFIGS[7].smem_bytes == tiles + 2048  # 3 * (2 * 4 * 64 + 2 * 8) + 2 * 8
    of_values = CONFIGS[7].replace(grad_k=False)
    assert of_values.smem_bytes == tiles + 2048 - 2 * (128 - 8) * 64


def test_tile_widths_suit_the_matrix_instruction() -> None:
    assert all(width % 16 == 0 for width in HEAD_DIMS)
    assert sorted(HEAD_DIMS) == list(HEAD_DIMS)


def test_a_part_with_the_name_of_a_field_is_no_kernel():
    with pytest.raises(TypeError, match="name both a part and a field"):
        type(
            "Wrong",
            (ForwardConfig,),
            {"parts": ForwardConfig.parts | {"bias": ForwardConfig.parts["own"]}},
        )
