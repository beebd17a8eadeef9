"""Does a space have exactly the legal configurations, and are their facts the compiler's?"""

from __future__ import annotations

import math
import random
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import tuning
from cuflash._ahead import kernels_of
from cuflash._jit import compilation, cubin_cache
from cuflash._jit.source import kernels_dir
from cuflash._kernels import config as kernel_config
from cuflash._kernels import registry, wgmma
from cuflash._select import hardware, measured
from cuflash.tuning import _kernels
from support.tuned_problems import PROBLEMS, WORK

HOPPER = [name for name in _kernels.KERNELS if name.endswith("sm90")]
SIZES = {
    **{name: (64, 128) for name in HOPPER if "tf32" in name},
    "backward_sm90": (64, 128),
    "backward_pair_sm90": (256,),
    **{name: (64, 96, 128) for name in _kernels.KERNELS if name.endswith("partners")},
    **{name: (1, 3, 8) for name in _kernels.KERNELS if name.endswith("narrow")},
}
PORTABLE = [name for name in _kernels.KERNELS if name.endswith("sm80")]


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """Give every test an empty kernel cache of its own."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)


def test_widths_are_those_that_can_be_multiplied():
    text = (kernels_dir() / "ptx" / "wgmma_products.cuh").read_text()
    scores = text[
        text.index("// n is the number of columns of scores: the") : text.index("of dk and dq.")
    ]
    found = re.findall(r"^CUFLASH_PTX_WGMMA_SS\((\d+)", scores, re.M)
    assert tuple(map(int, found)) == wgmma.WIDTHS


def test_texts_of_products_number_their_registers():
    text = (kernels_dir() / "ptx" / "wgmma_products.cuh").read_text()
    text += (kernels_dir() / "ptx" / "wgmma_k_major.cuh").read_text()
    for numbers in re.findall(r"^CUFLASH_PTX_WGMMA_\w+\((?:wgmma.*?\", )?(\d.*)\)", text, re.M):
        columns, registers, *others = map(int, numbers.split(","))
        assert columns == 2 * registers
        assert others == list(range(registers, registers + len(others)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [
        (kernel, head_dim)
        for kernel in _kernels.KERNELS
        for head_dim in SIZES.get(kernel, (64, 128, 256))
    ],
)
def test_the_shipped_configuration_is_a_member(kernel, head_dim):
    work = replace(PROBLEMS[kernel], head_dim=head_dim, head_dim_v=head_dim)
    found = tuning.space(work, kernel, arch="sm_90a")
    assert found.kernel == kernel
    assert found.default_key in found
    assert found.candidate(found.default_key).config == found.default


def test_one_pass_is_tuned_where_it_runs():
    with pytest.raises(ValueError, match="expected a kernel that supports this problem"):
        tuning.space(replace(WORK, arrays=("mask",), softcap=3.0), "backward_sm90", arch="sm_90a")
    found = tuning.space(WORK, "backward_sm90", arch="sm_90a")
    row = measured.Row(
        measured.key_of(found.default, found.hardware.name), (("keys_in_registers", 1),)
    )
    before = dict(measured.in_use())
    measured.replace_rows({row.key: row})
    try:
        chosen = kernels_of(WORK, found.hardware, backward=True)[2]
    finally:
        measured.replace_rows(before)
    assert chosen == found.default.replace(keys_in_registers=True)
    unordered = found.default.replace(deterministic=False)
    assert measured.options_of(unordered) != measured.options_of(found.default)


@pytest.mark.long
@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("arch", hardware.ARCHITECTURES)
def test_every_architecture_holds_every_legal_configuration(kernel, arch):
    limits = hardware.typical(arch).limits
    found = tuning.space(WORK, kernel, arch=arch)
    assert len(found) > 10
    for candidate in found:
        config = candidate.config
        assert config.smem_bytes <= limits.block_smem
        assert config.blocks_per_sm * (config.smem_bytes + 1024) <= limits.multiprocessor_smem
        assert config.blocks_per_sm * config.num_threads <= limits.threads


@pytest.mark.long
@pytest.mark.parametrize("kernel", _kernels.KERNELS)
def test_every_other_combination_says_why_it_is_none(kernel):
    found = tuning.space(PROBLEMS[kernel], kernel, arch="sm_90a")
    refused = [c for c in found.candidates if c.config is None]
    assert refused or len(found) == math.prod(map(len, found.parameters.values()))
    assert all(c.refusal and "self." not in c.refusal for c in refused)
    assert {c.key for c in refused}.isdisjoint(c.key for c in found)
    assert len(refused) + len(found) == len(found.candidates)
    keys = [c.key for c in found.candidates]
    assert len(set(keys)) == len(keys)


#: Problems whose spaces are compared with all values that can be asked for.
OTHERS = [
    *((kernel, {}) for kernel in _kernels.KERNELS),
    *((kernel, {"dtype": dtype, "head_dim": d, "head_dim_v": d})
      for kernel in PORTABLE
      for dtype, d in (("float16", 16), ("float16", 256), ("float32", 64), ("float32", 128),
                       ("float64", 16), ("float64", 64), ("float64", 256))),
    *((kernel, {"head_dim": 64, "head_dim_v": 64, "dropout": 0.1})
      for kernel in ("forward_sm90", "backward_dq_sm90", "backward_dkv_sm90")),
    ("forward_tf32_sm90", {"head_dim": 64, "head_dim_v": 64, "precision": "tf32"}),
    ("forward_narrow", {"dtype": "float64", "head_dim": 8, "head_dim_v": 8}),
]  # fmt: skip
#: More values of each parameter than any kernel has.
BEYOND = {
    "block_m": range(8, 1025, 8),
    "block_n": range(8, 1025, 8),
    "num_warps": range(-1, 35),
    "blocks_per_sm": range(-1, 35),
    "num_stages": range(-1, 34),
    "num_q_stages": range(4),
    "overlap_quarters": range(-1, 7),
    "scores_ahead": (-1, 0, 1, 2),
    "keys_in_registers": (-1, 0, 1, 2),
}


def fits(config, limits) -> bool:
    """Return whether an SM holds the thread blocks that the configuration asks for."""
    blocks, threads = config.blocks_per_sm, config.num_threads
    granted = min(255, 65_536 // max(blocks * threads, 1) // 8 * 8)
    return (
        config.smem_bytes <= limits.block_smem
        and blocks >= 1
        and blocks * (config.smem_bytes + 1024) <= limits.multiprocessor_smem
        and blocks * threads <= limits.threads
        and blocks <= limits.blocks
        and _kernels.lane_registers(config) <= granted
    )


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "given"), OTHERS)
def test_no_legal_configuration_is_left_out(kernel, given):
    """A configuration is legal if and only if it is in the space.

    Tried are the space's tiles, others by one or two parameters, and drawn ones.
    """
    found = tuning.space(replace(PROBLEMS[kernel], **given), kernel, arch="sm_90a")
    chance = random.Random(kernel)
    legal = [dict(zip(found.parameters, c.values, strict=True)) for c in found]
    beyond = {name: BEYOND[name] for name in found.parameters}
    sides = range(16, 1025, 16)
    asked = [{name: chance.choice(values) for name, values in beyond.items()} for _ in range(2000)]
    for own in chance.sample(legal, min(len(legal), 20)):
        asked += [own | {name: value} for name, values in beyond.items() for value in values]
        asked += [
            own | {side: rows, "num_warps": warps}
            for side in ("block_m", "block_n") if "num_warps" in own
            for rows in chance.sample(sides, 16) for warps in beyond["num_warps"]
        ]  # fmt: skip
    for own in chance.sample(legal, min(len(legal), 2)):
        asked += [own | {"block_m": m, "block_n": n} for m in sides for n in sides]
    seen, keys = set(), {c.key for c in found}
    for values in asked:
        try:
            is_legal = fits(_kernels.with_tile(found.default, values), found.hardware.limits)
        except ValueError:
            is_legal = False
        key = ",".join(map(str, values.values()))
        assert is_legal == (key in keys), values
        seen.add(is_legal)
    assert seen == {True, False}


@pytest.mark.parametrize("kernel", ["forward_sm80", "backward_dq_sm80", "backward_dkv_sm80"])
def test_sides_are_as_wide_as_the_kernels_bits(kernel):
    """Sides are at most as wide as a lane has bits for columns: wider tiles are masked wrongly."""
    default = tuning.space(WORK, kernel, arch="sm_90a").default
    side = "block_m" if kernel == "backward_dkv_sm80" else "block_n"
    with pytest.raises(ValueError, match=f"{side} = 144 must be one of"):
        default.replace(**{side: 144})
    on_cores = {"simt": True, "blocks_per_sm": 1, "num_warps": 1}
    owned = "block_n" if side == "block_m" else "block_m"
    default.replace(**on_cores, **{owned: 512, side: 16})
    with pytest.raises(ValueError, match=f"{owned} = 528 must be at most 512"):
        default.replace(**on_cores, **{owned: 528, side: 16})


@pytest.mark.parametrize("wrong", [None, 3, "bfloat16", [3], {"batch": 1}])
def test_what_is_no_problem_is_named(wrong):
    with pytest.raises(TypeError, match=r"workload: got \w+, expected a cuflash\.tuning\.Workload"):
        tuning.space(wrong, arch="sm_90a")
    with pytest.raises(TypeError, match=r"workloads: got \w+, expected a cuflash\.tuning\.Workl"):
        cuflash.compile(wrong, arch="sm_90a")


@pytest.mark.parametrize("wrong", [3, [("block_n", (96,))], {"block_n": 96}, {"block_n": None}])
def test_values_to_try_are_lists_by_name(wrong):
    with pytest.raises(TypeError, match=r"parameters: got .*, expected "):
        tuning.space(WORK, arch="sm_90a", parameters=wrong)


@pytest.mark.long
@pytest.mark.parametrize("kernel", _kernels.KERNELS)
def test_values_beyond_any_kernel_are_refused(kernel):
    for name in tuning.space(PROBLEMS[kernel], kernel, arch="sm_90a").parameters:
        of_rows = name in ("block_m", "block_n", "num_warps", "blocks_per_sm")
        for value in (-(2**70), -1, 2**70, *[0] * of_rows):
            asked = {"arch": "sm_90a", "parameters": {name: [value]}}
            with pytest.raises(ValueError, match=r"^parameters: got .*, none of them legal"):
                tuning.space(PROBLEMS[kernel], kernel, **asked)


def test_a_value_that_is_named_twice_is_tried_once():
    tried = {"block_n": (128, 96, 128), "num_stages": (2,)}
    found = tuning.space(WORK, "forward_sm90", arch="sm_90a", parameters=tried)
    assert found.parameters["block_n"] == (128, 96)
    keys = [c.key for c in found.candidates]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("tried", "reason"),
    [
        ({"num_stages": (1,)}, "num_stages=1 must be at least 2"),
        ({"overlap_quarters": (9,)}, "overlap_quarters=9 must be from 0 to 4"),
        ({"block_n": (256,)}, "block_n = 256 must be one of (32, 48, 64, 80, 96, 112, 128)"),
        ({"num_stages": (13,)}, "KiB of shared memory, a block has 227 KiB"),
        ({"block_n": ()}, "got 0 combinations, none of them legal"),
    ],
)
def test_where_nothing_is_legal_the_reason_is_that_of_what_was_asked_for(tried, reason):
    with pytest.raises(ValueError, match="none of them legal") as error:
        tuning.space(WORK, "forward_sm90", arch="sm_90a", parameters=tried)
    assert reason in str(error.value)


def test_tiles_that_would_hang_are_left_out_with_the_reason():
    """Tiles that hang are left out with the reason, such as dq's of test_tuning_checking at 96."""
    for heads_kv, head_dim in ((2, 96), (8, 64), (8, 128)):
        work = replace(WORK, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim)
        found = tuning.space(work, "backward_dq_sm90", arch="sm_90a")
        legal = {(c.config.num_stages, c.config.scores_ahead) for c in found}
        assert {(2, False), (3, True)} <= legal
        assert (2, True) not in legal
        tried = {"block_m": (128,), "block_n": (64,), "num_stages": (2,), "scores_ahead": (0, 1)}
        found = tuning.space(work, "backward_dq_sm90", arch="sm_90a", parameters=tried)
        assert [c.config.scores_ahead for c in found] == [False]
        (refused,) = (c for c in found.candidates if c.config is None)
        assert refused.refusal.startswith("num_stages=2 must be at least 3 with scores_ahead: ")


@pytest.mark.long
@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("float32", "tf32"),
                                                  ("float64", "ieee")])  # fmt: skip
def test_wide_dtypes_have_spaces_of_their_own(kernel, head_dim, dtype, precision):
    work = replace(WORK, dtype=dtype, precision=precision, head_dim=head_dim, head_dim_v=head_dim)
    found = tuning.space(work, kernel, arch="sm_90a")
    assert found.default_key in found
    assert {c.config.dtype for c in found} == {dtype}
    assert {c.config.precision for c in found} == {precision}
    assert {c.config.wide_float64 for c in found} == {dtype == "float64"}
    assert ("tf32" in measured.options_of(found.default)) == (precision == "tf32")
    with pytest.raises(ValueError, match="expected a kernel that supports this problem"):
        tuning.space(work, "forward_sm90", arch="sm_90a")


def test_two_hundred_configurations_of_hopper_at_head_size_128():
    assert len(tuning.space(WORK, "forward_sm90", arch="sm_90a")) >= 200


@pytest.mark.long
@pytest.mark.parametrize("kernel", _kernels.KERNELS)
def test_configurations_travel_as_json(kernel):
    import json

    for candidate in tuning.space(PROBLEMS[kernel], kernel, arch="sm_90a"):
        text = json.dumps(_kernels.config_as_json(candidate.config))
        assert _kernels.config_from_json(json.loads(text)) == candidate.config
        assert tuple(_kernels.tile_of(candidate.config).values()) == candidate.values


@pytest.mark.long
@pytest.mark.parametrize("kernel", _kernels.KERNELS)
def test_every_field_of_a_tile_is_a_parameter(kernel):
    """Every field of a tile is a parameter, except fields that say what a kernel computes."""
    what = {"sink", "grad_k", "grad_v", "deterministic", "shared_keys", "partners"}
    what |= {"split_keys", "split_queries", "split_rows", "joins", "paged", "overlaps"}
    what |= {"clusters", "bias_stages", "mask_stages", "grad_bias", "holds_bias", "kv_dtype"}
    what |= {"finishes_dq"}
    if kernel.endswith("narrow"):  # has one buffer
        what |= {"width", "width_v", "key_bias", "num_stages"}
    kind = _kernels.KERNELS[kernel]
    parts = {name: part for name, part in kind.parts.items() if name not in kernel_config.SCORED}
    own = {field for part in parts.values() for field in part._fields}
    assert own - what <= set(kind.tunables)
    assert set(kind.tunables) <= set(measured.TILE_FIELDS)
    found = tuning.space(PROBLEMS[kernel], kernel, arch="sm_90a")
    types = {name: type(getattr(found.default, name)) for name in found.parameters}
    for candidate in found:
        values = {name: type(getattr(candidate.config, name)) for name in found.parameters}
        assert values == types


def test_every_kernel_travels():
    assert set(registry.KERNELS) == {path.stem for path in kernels_dir().glob("*.cu")}


@pytest.mark.long
@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("kernel", "tried"),
    [
        ("forward_sm90", {"block_m": (128,), "block_n": (64,), "num_stages": (2,)}),
        (
            "forward_sm80",
            {"block_m": (64,), "block_n": (16,), "num_warps": (4,), "blocks_per_sm": (1,)},
        ),
        ("backward_dq_sm90", {"block_m": (128,), "num_stages": (3,), "block_n": (48,)}),
        ("backward_dkv_sm90", {"block_n": (128,), "num_stages": (2,), "block_m": (48,)}),
        ("backward_dq_sm80", {"block_m": (64,), "block_n": (32,), "blocks_per_sm": (1,)}),
        ("backward_dkv_sm80", {"block_m": (16, 32), "block_n": (64,), "blocks_per_sm": (1,)}),
        ("backward_dq_partners", {"block_m": (32,), "block_n": (32,)}),
        ("backward_dkv_partners", {"block_m": (32,), "block_n": (16, 32)}),
        ("forward_tf32_sm90", {"num_stages": (1,)}),
        ("backward_dkv_sm80", {"block_m": (64,), "block_n": (64, 128), "blocks_per_sm": (1,)}),
        ("forward_narrow", {"num_warps": (4,), "block_n": (128,), "blocks_per_sm": (2,)}),
    ],
)
def test_what_is_legal_compiles_and_facts_are_those_of_the_compiler(kernel, tried):
    found = tuning.space(PROBLEMS[kernel], kernel, arch="sm_90a", parameters=tried)
    assert len(found) >= 2
    seen = []
    facts = found.compile(processes=2, progress=lambda done, total: seen.append((done, total)))
    assert [f.error for f in facts.values()] == [""] * len(found)
    assert seen[0] == (0, len(found))
    assert seen[-1] == (len(found), len(found))
    candidate = next(iter(found))
    arch = compilation.architecture(candidate.config, "90")
    report = compilation.compile_static(candidate.config, arch)
    own = facts[candidate.key]
    assert (own.registers, own.spill_bytes) == (report.registers, report.spill_bytes)
    assert own.smem_bytes == candidate.config.smem_bytes
    assert own.blocks_per_multiprocessor >= 1
    stored = cubin_cache.load(compilation.stored_name(candidate.config, arch))
    assert stored == report.cubin


@pytest.mark.long
@pytest.mark.nvrtc
@pytest.mark.parametrize("kernel", _kernels.KERNELS)
def test_legal_configurations_compile(kernel):
    """Legal configurations compile: two drawn ones and the largest, of drawn dtypes and options."""
    chance, others = random.Random(kernel), [own for name, own in OTHERS if name == kernel]
    given = chance.choice(others)
    found = tuning.space(replace(PROBLEMS[kernel], **given), kernel, arch="sm_90a")
    largest = max(found, key=lambda c: c.config.block_m * c.config.block_n * c.config.num_warps)
    chosen = [*chance.sample(list(found), min(len(found), 2)), largest]
    facts = found.compile(chosen, processes=2)
    assert [own.error for own in facts.values()] == [""] * len(facts), given


@pytest.mark.nvrtc
def test_facts_are_taken_from_the_store_the_second_time():
    tried = {"block_m": (128,), "block_n": (96,), "num_stages": (2,), "overlap_quarters": (0,)}
    first = tuning.space(WORK, "forward_sm90", arch="sm_90a", parameters=tried)
    facts = first.compile(processes=1)
    again = tuning.space(WORK, "forward_sm90", arch="sm_90a", parameters=tried)
    seen = []
    assert again.compile(progress=lambda done, total: seen.append(done)) == facts
    assert seen == list(range(len(facts) + 1))


@pytest.mark.nvrtc
def test_what_does_not_compile_is_a_fact():
    tried = {"block_m": (128,), "block_n": (48,), "num_stages": (2,), "overlap_quarters": (0,)}
    found = tuning.space(WORK, "forward_sm90", arch="sm_90a", parameters=tried)
    candidate = next(iter(found))
    # Legal by its numbers, but this kernel multiplies 16-bit numbers only.
    broken = replace(candidate, config=candidate.config.replace(dtype="float32"))
    found.candidates[:] = [broken]
    (facts,) = found.compile(processes=1).values()
    assert "error: " in facts.error
    assert facts.registers == 0


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("kernel", "given", "tried", "message"),
    [
        (
            "backward_dkv_sm80",
            {"dropout": 0.1},
            {"block_m": 80, "num_warps": 4},
            r"block_m = 80 must be one of \(16, 32, 48, 64\)",
        ),
        (
            "backward_dkv_partners",
            {},
            {"block_m": 96, "num_warps": 2},
            "at most .*=64: one thread loads",
        ),
        ("backward_dkv_partners", {}, {"block_m": 48}, "block_m = 48 must be one of"),
        ("backward_dq_partners", {}, {"block_n": 48}, "block_n = 48 must be one of"),
        ("backward_dq_partners", {}, {"num_warps": 1, "block_m": 16}, "num_warps = 1 must be even"),
        (
            "backward_dkv_partners",
            {},
            {"num_warps": 1, "block_n": 16, "block_m": 32},
            "num_warps = 1 must be even",
        ),
        ("backward_dkv_sm90", {"dropout": 0.1}, {"block_m": 80}, "at most 64 with dropout"),
        ("forward_sm90", {}, {"block_n": 16}, "block_n = 16 must be one of"),
        ("forward_sm90", {}, {"block_n": 144}, "block_n = 144 must be one of"),
        ("backward_dq_sm90", {}, {"block_n": 144}, "block_n = 144 must be one of"),
        ("backward_dkv_sm90", {}, {"block_m": 144}, "block_m = 144 must be one of"),
        ("forward_tf32_sm90", {"precision": "tf32"}, {"block_n": 32}, "the only size with TF32"),
        ("backward_dkv_tf32_sm90", {"arrays": ("segment_ids",)}, {"block_m": 64}, "must be 32"),
    ],
)
def test_what_a_source_refuses_is_no_legal_tile(monkeypatch, kernel, given, tried, message):
    """A tile that the source refuses is refused by name, and without the check by the compiler."""
    work = replace(PROBLEMS[kernel], head_dim=64, head_dim_v=64, **given)
    default = tuning.space(work, kernel, arch="sm_90a").default
    with pytest.raises(ValueError, match=message):
        _kernels.with_tile(default, tried)
    monkeypatch.setattr(default.__class__, "check", lambda self: None)
    monkeypatch.setattr(kernel_config.KernelConfig, "_check_rows", lambda self: None)
    illegal = _kernels.with_tile(default, tried)
    with pytest.raises(cuflash.CompileError):
        compilation.compile_static(illegal, "sm_90a")


def test_a_number_of_processes_that_is_none_is_refused():
    with pytest.raises(ValueError, match="processes: got 0, expected a positive int"):
        tuning.space(WORK, "forward_sm90", arch="sm_90a").compile(processes=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "forward_sm70"}, "kernel: got 'forward_sm70', expected one of forward_sm90"),
        ({"arch": "sm_71"}, "arch: got 'sm_71', expected one of sm_50"),
        ({"parameters": {"tile": (1,)}}, "parameters: got 'tile', expected one of block_m"),
        ({"arch": "sm_80", "kernel": "forward_sm90"}, "got forward_sm90 on NVIDIA A100"),
        ({"parameters": {"block_n": (100,)}}, "none of them legal"),
        ({"parameters": {"block_n": (100,)}}, "; 128,100,2,2,4: block_n = 100 must be a positive"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match="expected") as error:
        tuning.space(WORK, **{"arch": "sm_90a", **change})
    assert message in str(error.value)


def test_illegal_tiles_are_named():
    default = tuning.space(WORK, arch="sm_90a").default
    with pytest.raises(ValueError, match="parameter: got 'block_k', expected one of block_m"):
        _kernels.with_tile(default, {"block_k": 64})
    with pytest.raises(ValueError, match="block_n = 100 must be a positive multiple of 16"):
        _kernels.with_tile(default, {"block_n": 100})
    with pytest.raises(ValueError, match="block_n: got '96', expected an int"):
        _kernels.with_tile(default, {"block_n": "96"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch: got 0, expected a positive int"),
        ({"heads_kv": 3}, "heads_kv: got 3, expected a divisor of 8"),
        ({"dtype": "int8"}, "dtype: got 'int8', expected one of float16"),
        ({"arrays": ("colour",)}, "arrays: got ('colour',), expected a tuple of names among bias"),
        ({"layout": "xxxx"}, "layout: got 'xxxx', expected \"bhsd\""),
        ({"deterministic": "x"}, "deterministic: got 'x', expected a bool"),
        ({"window": (1,)}, "window: got (1,), expected None or a tuple (left, right)"),
    ],
)
def test_wrong_workloads_are_named(change, message):
    with pytest.raises(ValueError, match="expected") as error:
        replace(WORK, **change)
    assert message in str(error.value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text()
    | st.binary() | st.sampled_from(("causal", "bias", "float32", "ieee", "bhsd", WORK, int)),
    lambda inner: st.tuples(inner, inner) | st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(tuning.Workload)])
@settings(max_examples=40)
@given(value=ANYTHING)
def test_a_workload_takes_no_field_unchecked(field, value):
    """A workload's field is valid, described and kept by JSON, or an error that names the field."""
    sizes = {"heads_q", "heads_kv", "seqlen_q", "seqlen_k", "seqlens"}  # which depend on each other
    error = None
    try:
        work = replace(WORK, **{field: value})
    except ValueError as caught:
        error = str(caught)
    if error is None:
        assert tuning.Workload.from_json(work.as_json()) == work
        assert hash(work) == hash(replace(work))
        assert str(work)
    else:
        assert error.split(":")[0] in ({field} | sizes if field in sizes else {field})


def test_occupancy_is_the_scarcest_of_three():
    limits = hardware.typical("sm_90").limits
    assert hardware.occupancy(limits, 128, 1024, 32) == 16  # by threads
    assert hardware.occupancy(limits, 128, 100 * 1024, 32) == 2  # by shared memory
    assert hardware.occupancy(limits, 128, 1024, 255) == 2  # by registers
    assert hardware.occupancy(limits, 384, 190 * 1024, 168) == 1


@pytest.mark.gpu
def test_the_table_of_limits_is_what_the_device_says():
    found = hardware.present()
    assert found is not None
    table = hardware.typical(found.arch)
    assert found.limits == table.limits
    if found.name == table.name:
        assert (found.multiprocessors, found.l2_bytes) == (table.multiprocessors, table.l2_bytes)
        assert found.peak == table.peak
