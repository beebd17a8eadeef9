"""Is a forward right whose thread blocks share the keys of a tile? Every such kernel, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash._jit.compilation import compile_static
from cuflash._kernels import split_keys
from cuflash._problem.problem import describe
from cuflash._select import hardware
from cuflash._select.choose import choose
from cuflash.testing._budget import Budget
from support import chosen, memory
from support.problems import Call, make_call, run

#: kernel on Hopper, and a label -> (dtype, queries, keys, head size)
KERNELS = {
    "forward_sm90": (np.float16, 100, 4096, 64),
    "forward_sm90, 128": (np.float16, 130, 2300, 128),
    "forward_sm90, 256": (np.float16, 70, 2100, 256),
    "forward_sm80": (np.float16, 3, 4096, 64),
    "forward_sm80, 128": (np.float16, 20, 2100, 128),
    "forward_sm80, 64 rows": (np.float16, 40, 2100, 64),
    "forward_sm80, 256": (np.float16, 9, 2300, 256),
    "forward_sm80, cluster": (np.float16, 3, 700, 64),
    "forward_sm80, cluster of 64 rows": (np.float16, 40, 2048, 64),
    "forward_sm80, cluster of 96 rows": (np.float16, 77, 4096, 64),
    "forward_sm80, cluster, 128": (np.float16, 2, 1000, 128),
    "forward_sm80, cluster, 256": (np.float16, 1, 600, 256),
    "forward_sm80, cluster, float32": (np.float32, 5, 512, 64),
    "forward_sm80, cluster, float64": (np.float64, 2, 1000, 64),
    "forward_sm80, float64": (np.float64, 70, 2100, 40),
    "forward_tf32_sm90": (np.float32, 130, 4096, 64),
    "forward_tf32_sm90, 128": (np.float32, 70, 2100, 128),
    "forward_narrow": (np.float32, 300, 4096, 3),
    "forward_narrow, float64": (np.float64, 100, 2100, 8),
}
#: Options that a kernel of Hopper refuses. `forward_sm80` splits the keys of these calls.
REFUSED = {
    "forward_sm90, 256": {"the rest"},
    "forward_tf32_sm90": {"the rest"},
    "forward_tf32_sm90, 128": {"bias", "mask", "segments", "the rest"},
}


#: Options that a cluster of this many rows refuses, too: there `forward_sm90` splits the keys, and
#: another kernel combines the results.
WITHOUT_CLUSTERS = {
    "forward_sm80, cluster of 96 rows": {
        "sink", "a sink alone", "bias", "mask", "segments", "the rest",
    }
}  # fmt: skip


def options_of(rows: int, keys: int) -> dict[str, dict[str, Any]]:
    """Return every option that reads arrays except formulas, for a batch of 2 with 2 heads."""
    rng = np.random.default_rng(2)
    return {
        "causal": {"causal": True},
        "window": {"window": (keys // 7, 3), "offset": keys // 2},
        "sink": {"sink": np.array([1.5, -2.0], np.float32)},
        "a sink alone": {
            "sink": np.array([1.5, -2.0], np.float32),
            "kv_lengths": np.array([[0], [keys]]),
        },
        "lengths": {"kv_lengths": np.array([[5], [keys - 7]]), "causal": True},
        "bias": {"bias": rng.standard_normal((rows, keys)).astype(np.float32)},
        "mask": {"mask": rng.random((2, 1, rows, keys)) < 0.01},
        "segments": {
            "segment_ids": (
                rng.integers(0, 3, (2, 1, rows)), np.sort(rng.integers(0, 3, (2, 1, keys))),
            )
        },
        "the rest": {
            "alibi_slopes": np.array([0.1, 0.02], np.float32), "softcap": 4.0, "dropout": 0.3,
            "seed": 3,
        },
    }  # fmt: skip


def call_of(kernel: str, options: dict[str, Any]) -> Call:
    """Return a call, whose arrays are aligned to 16 bytes where Hopper's copy engine needs it."""
    dtype, rows, keys, d = KERNELS[kernel]
    shapes = (2, 2, rows, d), (2, 2, keys, d), (2, 2, keys, d)
    for_sm90 = "sm90" in kernel or kernel in WITHOUT_CLUSTERS
    lead = memory.ALIGNED if for_sm90 else memory.BAND
    return make_call("normal", 1, np.dtype(dtype), *shapes, options=options, wrt=(), lead=lead)


def on_hopper(kernel: str, name: str) -> tuple[str, bool, bool]:
    """Return the kernel of a case on Hopper, whether it splits keys, and whether in clusters."""
    refused = name in REFUSED.get(kernel, ())
    if name in WITHOUT_CLUSTERS.get(kernel, ()):
        return "forward_sm90", True, False
    return "forward_sm80" if refused else kernel.split(",")[0], True, "cluster" in kernel


def facts_of(config: Any) -> tuple[str, bool, bool]:
    return config.kernel, config.split_keys, getattr(config, "clusters", False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", *options_of(1, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_parts_of_the_keys_add_up(kernel: str, name: str) -> None:
    import cupy

    from support.portable import planned_kernels

    _, rows, keys, _ = KERNELS[kernel]
    call = call_of(kernel, {"plain": {}, **options_of(rows, keys)}[name])
    with planned_kernels() as configs:
        result = run(cupy, call, backward=False, with_out=True)
    if hardware.present().hopper:
        (config,) = (own for own in configs if own.computes == "out")
        assert facts_of(config) == on_hopper(kernel, name)
    Budget(call).check_forward(result.out, result.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_do_not_depend_on_what_memory_held(kernel: str) -> None:
    import cupy

    call = call_of(kernel, {"causal": True, "offset": 100})
    q, k, v = (cupy.asarray(a) for a in (call.q, call.k, call.v))
    problem = describe(call.q, call.k, call.v, cuflash.Options(**call.options))
    if hardware.present().hopper:
        config = chosen.forward_of(problem, hardware.present())
        assert facts_of(config) == on_hopper(kernel, "causal")
    size = cuflash.workspace_size(q, k, v, **call.options)
    found = set()
    for byte in (0xFF, 0x45) * 10:
        workspace = cupy.full(size, byte, cupy.uint8)
        out, lse = cuflash.attention(q, k, v, return_lse=True, workspace=workspace, **call.options)
        found.add(out.tobytes() + lse.tobytes())
    assert len(found) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if "cluster" in kernel])
def test_a_cluster_has_the_bits_of_two_kernels(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    import cupy

    from cuflash._launch import plan_cache

    options: dict[str, Any] = {"causal": True}
    if "96 rows" not in kernel:
        options["sink"] = cupy.asarray([1.5, -2.0], np.float32)
    call = call_of(kernel, {})
    q, k, v = map(cupy.asarray, (call.q, call.k, call.v))
    step, *_ = choose(describe(q, k, v, cuflash.Options(**options)), hardware.present())
    assert step.config.clusters

    def bits() -> tuple[bytes, ...]:
        plan_cache.forget()
        results = cuflash.attention(q, k, v, return_lse=True, config=step.config, **options)
        return tuple(array.tobytes() for array in results)

    found = bits()
    monkeypatch.setattr(split_keys, "in_clusters", lambda _: False)
    monkeypatch.setattr(split_keys, "wanted", lambda _: True)
    monkeypatch.setattr(split_keys, "parts_of", lambda *_: step.splits)
    assert bits() == found
    plan_cache.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_packed_sequences_of_few_queries(d: int) -> None:
    import cupy

    rng = np.random.default_rng(7)
    rows, keys = np.array([1, 3, 0, 2, 1]), np.array([17, 9000, 40, 0, 2700])
    ends = [np.cumsum([0, *n]) for n in (rows, keys)]
    q, k, v = (rng.standard_normal((2, n.sum(), d)).astype(np.float16) for n in (rows, keys, keys))
    on_device = [cupy.asarray(x) for x in (q, k, v, *ends)]
    given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), on_device[3:], strict=True))
    size = cuflash.workspace_size(*on_device[:3], causal=True, **given)
    assert size > 0
    found = set()
    for byte in (0xFF, 0x45) * 10:
        workspace = cupy.full(size, byte, cupy.uint8)
        out, lse = cuflash.attention_varlen(
            *on_device, causal=True, return_lse=True, workspace=workspace
        )
        found.add(out.tobytes() + lse.tobytes())
    assert len(found) == 1
    for i in range(rows.size):
        own_q, own_k = (slice(end[i], end[i + 1]) for end in ends)
        if rows[i]:
            call = Call(
                q[:, own_q], k[:, own_k], v[:, own_k], q[:, own_q],
                options={"causal": True}, wrt=(),
            )  # fmt: skip
            Budget(call).check_forward(out[:, own_q].get(), lse[:, own_q].get())


@pytest.mark.gpu
@pytest.mark.parametrize(("entries", "keys"), [(20, 8200), (28, 4100), (40, 2100), (80, 2100)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_tiles_of_few_rows(entries: int, keys: int, d: int) -> None:
    """80 tiles (split), 112 (pairs), 160 and 320 are right, and their bits ignore the workspace."""
    import cupy

    from support.portable import planned_kernels

    rng = cupy.random.default_rng(5)
    arrays = [rng.standard_normal((entries, 4, n, d), np.float32) for n in (3, keys, keys)]
    arrays = [a.astype(np.float16) for a in arrays]
    size, found = cuflash.workspace_size(*arrays, causal=True), set()
    for byte in (0xFF, 0x45) * 10:
        workspace = cupy.full(size, byte, cupy.uint8) if size else None
        with planned_kernels() as configs:
            out, lse = cuflash.attention(*arrays, causal=True, return_lse=True, workspace=workspace)
        found.add(out.tobytes() + lse.tobytes())
        if hardware.present().arch == "sm_90" and configs:
            assert configs[0].kernel == "forward_sm80"
            assert (configs[0].block_m, configs[0].split_keys) == (32, entries < 40)
            assert configs[0].clusters == (entries == 28 and d < 256)
    assert len(found) == 1
    for i in (0, entries - 1):
        own = slice(i, i + 1)
        q, k, v = (a[own].get() for a in arrays)
        call = Call(q, k, v, q, options={"causal": True}, wrt=())
        Budget(call).check_forward(out[own].get(), lse[own].get())


@pytest.mark.long
def test_the_kernels_of_hopper_are_these() -> None:
    """The configurations chosen for Hopper are those of this file's tables; needs no GPU."""
    for kernel, (_, rows, keys, _) in KERNELS.items():
        for name, options in {"plain": {}, **options_of(rows, keys)}.items():
            call = call_of(kernel, options)
            problem = describe(call.q, call.k, call.v, cuflash.Options(**options))
            config = chosen.forward_of(problem, hardware.typical("sm_90"))
            assert facts_of(config) == on_hopper(kernel, name)


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", *options_of(1, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_spills(kernel: str, name: str) -> None:
    _, rows, keys, _ = KERNELS[kernel]
    call = call_of(kernel, {"plain": {}, **options_of(rows, keys)}[name])
    problem = describe(call.q, call.k, call.v, cuflash.Options(**call.options))
    for step in choose(problem, hardware.typical("sm_90")):
        report = compile_static(step.config, "sm_90a" if step.config.for_sm90 else "sm_90")
        assert (report.spill_bytes, report.warnings) == (0, ())


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", *options_of(1, 1)])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("entries", [26, 35, 200])
def test_nothing_spills_where_tiles_are_many(entries: int, d: int, name: str) -> None:
    q, k = (np.empty((entries, 2, 2, n, d), np.float16) for n in (3, 4096))
    options = cuflash.Options(**{"plain": {}, **options_of(3, 4096)}[name])
    config = chosen.forward_of(describe(q, k, k, options), hardware.typical("sm_90"))
    assert (config.kernel, config.block_m, config.split_keys) == ("forward_sm80", 32, entries == 26)
    assert config.clusters == (entries == 26 and d < 256)
    report = compile_static(config, "sm_90")
    assert (report.spill_bytes, report.warnings) == (0, ())
