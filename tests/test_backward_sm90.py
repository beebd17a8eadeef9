"""Is the gradient on Hopper what the definition says, for everything that its kernels support?

Each case asks for the kernels by a configuration. A configuration that a call cannot use is an
error.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash._problem.formulas import formulas_of
from cuflash._problem.problem import describe
from cuflash.testing import _families as families
from cuflash.testing._budget import Budget
from cuflash.tuning import BackwardConfigs
from support import chosen, problems
from support.hopper import CASES, ROWS, SHAPES, in_every_shape, make
from support.memory import to_device

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

from cuflash._launch import plan_cache  # noqa: E402
from support.portable import planned_launchers, portable_kernels  # noqa: E402

ALL = ("q", "k", "v")


@pytest.fixture(autouse=True)
def hopper():
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the device has no wgmma")


def upload(array):
    return to_device(cupy, array)


def forms(q, k, v, options, wrt=ALL):
    """Return configurations of all usable forms; "one pass" is there for three gradients only."""
    problem = replace(describe(q, k, v, options), formulas=formulas_of(options))
    of_queries = chosen.one("backward_dq_sm90", problem)
    of_keys = chosen.passes("backward_dkv_sm90", problem, frozenset(wrt))
    assert of_queries is not None
    assert of_keys is not None
    found = {"two kernels": BackwardConfigs(q=of_queries, kv=of_keys[0] if of_keys else None)}
    together = chosen.fused(problem, deterministic=True)
    if together is not None and set(wrt) == set(ALL):
        found["one pass"] = BackwardConfigs(qkv=together)
    return found


def differentiate(dout, q, k, v, out, lse, *, wrt=ALL, dlse=None, deterministic=True, **keywords):
    """Return form -> input -> gradient, each written over NaN."""
    options = cuflash.Options(**keywords)
    gradients = {}
    for form, config in forms(q, k, v, options, wrt).items():
        room = {
            f"d{n}": upload(np.full(x.shape, np.nan, x.dtype))
            for n, x in zip("qkv", (q, k, v), strict=True)
        }
        found = cuflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, options=options, config=config,
            grads_out=cuflash.Gradients(**{n: room[n] for n in room if n[1:] in wrt}),
            deterministic=deterministic,
        )  # fmt: skip
        gradients[form] = {name: getattr(found, f"d{name}") for name in wrt}
    return gradients


def given(call):
    """Return the options of a call, with its arrays on the device."""
    on_device = {}
    for name, value in call.options.items():
        if isinstance(value, np.ndarray):
            value = upload(value)
        elif name == "segment_ids":
            value = tuple(upload(ids) for ids in value)
        on_device[name] = value
    return on_device


def check(call, deterministic=True, budget=None):
    """Check one call against the budget; return its arrays, its options and the gradients by form.

    A ``budget`` may be passed if it is of the same call: it depends on out and lse, whose bits
    never change.
    """
    arrays = [upload(call.array(name)) for name in ("dout", "q", "k", "v")]
    options = given(call)
    arrays += cuflash.attention(*arrays[1:], return_lse=True, **options)
    dlse = None if call.dlse is None else upload(call.dlse)
    found = differentiate(
        *arrays, wrt=call.wrt, dlse=dlse, deterministic=deterministic, **options
    )  # fmt: skip
    budget = budget or Budget(call)
    for gradients in found.values():
        budget.check_backward(
            {name: x.get() for name, x in gradients.items()},
            given=(arrays[4].get(), arrays[5].get()),
        )
    return arrays, options, found


def assert_same_bits(a, b):
    for form in a:
        for name in a[form]:
            assert a[form][name].get().tobytes() == b[form][name].get().tobytes(), (form, name)


@pytest.mark.parametrize(("head_dims", "name"), CASES, ids=str)
def test_within_budget(head_dims, name):
    for call in in_every_shape(head_dims, name):
        check(call)


@pytest.mark.parametrize("family", families.OF_EVERY_DTYPE)
@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_every_family_of_inputs(family, head_dims, dtype):
    """Every family is within the budget, in order and, where one pass is usable, in any order."""
    cases = ((SHAPES[1], {}), (SHAPES[1], {"causal": True}), (SHAPES[0], {"softcap": 30.0}))
    for shape, options in cases:
        call = make(head_dims, shape, options, dtype, family)
        budget = Budget(call)
        arrays, on_device, found = check(call, budget=budget)
        if "one pass" not in found:
            continue
        config = forms(*arrays[1:4], cuflash.Options(**on_device))["one pass"]
        unordered = cuflash.attention_backward(
            *arrays, config=config, deterministic=False, **on_device
        )
        budget.check_backward(
            {name: getattr(unordered, f"d{name}").get() for name in ALL},
            given=(arrays[4].get(), arrays[5].get()),
        )


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("family", ["normal", "lse_minus_120"])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_tails(head_dims, family, options):
    """Partial tiles are within the budget where exp would overflow for a padded score of 0."""
    sizes = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 193)
    for rows, keys in zip(sizes, (193, 17, 129, 1, 65, 63, 128, 64, 127, 16, 15), strict=True):
        check(make(head_dims, ((2,), rows, keys), options, np.float16, family))


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("wrt", [("q",), ("k",), ("v",), ("q", "v"), ("k", "v")], ids="".join)
def test_some_of_the_gradients(head_dims, wrt):
    call = make(head_dims, SHAPES[1], {"causal": True}, np.float16)
    *_, everything = check(call)
    *_, found = check(call.but(wrt=wrt))
    for name, gradient in found["two kernels"].items():
        assert gradient.get().tobytes() == everything["two kernels"][name].get().tobytes()


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_gradient_of_lse(head_dims):
    call = make(head_dims, SHAPES[1], {"window": (100, 0)})
    dlse = np.random.default_rng(2).standard_normal(call.q.shape[:-1]).astype(np.float32)
    check(call.but(dlse=dlse))


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 30)}], ids=str)
def test_lengths_hide_what_lies_beyond(head_dims, options):
    rng = np.random.default_rng(7)
    rows, keys = 300, 400
    lengths = {
        "q_lengths": rng.integers(0, rows + 1, (6, 1)),
        "kv_lengths": rng.integers(0, keys + 1, (6, 1)),
    }
    lengths["q_lengths"][1], lengths["kv_lengths"][2] = 0, 0
    call = make(head_dims, ((6, 2), rows, keys), {**options, **lengths})
    arrays, on_device, found = check(call)
    dout, q, k, v = (call.array(name).copy() for name in ("dout", "q", "k", "v"))
    for entry in range(6):
        q[entry, :, lengths["q_lengths"][entry, 0] :] = np.nan
        dout[entry, :, lengths["q_lengths"][entry, 0] :] = np.nan
        k[entry, :, lengths["kv_lengths"][entry, 0] :] = np.nan
        v[entry, :, lengths["kv_lengths"][entry, 0] :] = np.inf
    poisoned = [upload(x) for x in (dout, q, k, v)]
    assert_same_bits(differentiate(*poisoned, *arrays[4:], **on_device), found)


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 5)}], ids=str)
def test_what_some_rows_see_reaches_those_rows_only(head_dims, value, options):
    call = make(head_dims, ((2, 3), 300, 300), options, np.float16)
    dout, k, v = call.dout.copy(), call.k.copy(), call.v.copy()
    v[:, 0, 170, 5] = value
    k[:, 1, 90] = value
    dout[:, 2, 201, 3] = value
    check(call.but(dout=dout, k=k, v=v))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_mask(head_dim):
    mask = np.random.default_rng(1).random((2, 1, 200, 333)) < 0.6
    mask[0, :, 17] = False
    call = make((head_dim, head_dim), ((2, 3), 200, 333), {"mask": mask, "causal": True})
    arrays, on_device, found = check(call)
    check(make((head_dim, head_dim), ((2, 3), 200, 333), {"mask": mask, "softcap": 3.0}))
    dout, q = call.dout.copy(), call.q.copy()
    dout[0, :, 17], q[0, :, 17] = np.nan, np.inf  # these rows see nothing
    poisoned = [upload(dout), upload(q)]
    assert_same_bits(differentiate(*poisoned, *arrays[2:], **on_device), found)


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_dropout(head_dims):
    shape = ((2, 3), 300, 400)
    slopes = np.array([0.3, 0.0, -0.05], np.float32)
    check(make(head_dims, shape, {"dropout": 0.3, "seed": 5}, np.float16))
    check(make(head_dims, shape, {"dropout": 0.8, "seed": 2**40 + 1, "causal": True}))
    check(
        make(head_dims, shape, {"dropout": 0.5, "seed": 7, "softcap": 3.0, "alibi_slopes": slopes})
    )


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bias(head_dims, dtype):
    rng = np.random.default_rng(6)
    shape = ((2, 3), 300, 400)
    of_pairs = rng.standard_normal((3, 300, 400)).astype(dtype)
    of_pairs[:, :, 370:] = of_pairs[1, 13] = -np.inf
    of_keys = rng.standard_normal((2, 1, 1, 400)).astype(dtype)
    of_keys[..., 100:120] = -np.inf
    odd = {"bias": of_pairs[..., :399], "mask": rng.random((300, 399)) < 0.7}
    check(make(head_dims, shape, {"bias": of_pairs}))
    check(make(head_dims, shape, {"bias": of_keys, "causal": True}, np.float16))
    check(make(head_dims, ((2, 3), 300, 399), {**odd, "dropout": 0.2, "seed": 1}))


def not_called(*_, **__):
    raise AssertionError("a formula of the CPU path")


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_formulas(head_dims):
    """ALiBi and a window as formulas are within the budget; the offset of these shapes is 100."""
    slopes = cupy.array([0.3, 0.0, -0.05], np.float32)
    call = make(head_dims, ((2, 3), 300, 400), {"alibi_slopes": slopes.get(), "window": (None, 9)})
    arrays = [upload(call.array(name)) for name in ("dout", "q", "k", "v")]
    options = {
        "score_mod": cuflash.ScoreMod(
            "score - slopes[h] * abs(q + 100 - k)", grad="1.0f", arrays={"slopes": slopes},
            host=not_called, host_grad=not_called,
        ),
        "mask_mod": cuflash.MaskMod("k <= q + 109", host=not_called),
    }  # fmt: skip
    arrays += cuflash.attention(*arrays[1:], return_lse=True, **options)
    budget, given = Budget(call), (arrays[4].get(), arrays[5].get())
    for gradients in differentiate(*arrays, **options).values():
        budget.check_backward({name: x.get() for name, x in gradients.items()}, given=given)


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_slopes_and_segments(head_dims):
    rng = np.random.default_rng(5)
    slopes = np.array([0.3, 0.0, -0.05], np.float32)
    ids = tuple(np.sort(rng.integers(0, 4, n)) for n in (300, 400))
    shape = ((2, 3), 300, 400)
    check(make(head_dims, shape, {"alibi_slopes": slopes, "causal": True}))
    check(make(head_dims, shape, {"segment_ids": ids}))
    check(make(head_dims, shape, {"alibi_slopes": slopes, "segment_ids": ids, "softcap": 5.0}))


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 5)}], ids=str)
def test_packed_sequences(head_dims, options):
    """Each sequence has the bits that it has alone, whatever its neighbours hold."""
    call = make(head_dims, ((2,), 700, 800), options, np.float16)
    dout, q, k, v = (upload(call.array(name)) for name in ("dout", "q", "k", "v"))
    ends = ([0, 77, 77, 400, 700], [0, 200, 200, 201, 800])
    cu_q, cu_k = (cupy.array(e) for e in ends)
    out, lse = cuflash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)

    def differentiate_packed(form):
        config = forms(q, k, v, cuflash.Options(**options))[form]
        return cuflash.attention_varlen_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, config=config, **options
        )

    before = differentiate_packed("one pass")
    q[:, 400:410], dout[:, 400:410] = np.nan, np.nan
    k[:, 201:211], v[:, 201:211] = np.inf, np.nan
    found = differentiate_packed("two kernels")
    after, others = differentiate_packed("one pass"), {"q": slice(400), "k": slice(201)}
    for name, rows in (others | {"v": others["k"]}).items():
        now, then = (getattr(x, f"d{name}")[:, rows].get() for x in (after, before))
        assert now.tobytes() == then.tobytes(), name
    ends_q, ends_k = ends
    pairs = zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
    for i, (a, b, c, d) in enumerate(pairs):
        if a == b or i == 3:
            continue
        rows, keys = slice(a, b), slice(c, d)
        alone = differentiate(
            dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, rows],
            **options,
        )  # fmt: skip
        packed = {"q": found.dq[:, rows], "k": found.dk[:, keys], "v": found.dv[:, keys]}
        assert_same_bits({"two kernels": packed}, alone)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_grouped_heads(head_dim, options):
    check(problems.make_call(
        "normal", 3, bfloat16, (2, 6, 200, head_dim), (2, 2, 300, head_dim), (2, 2, 300, head_dim),
        options={**options, "enable_gqa": True},
    ))  # fmt: skip


def test_groups_of_different_lengths():
    lengths = np.array([[3, 150, 200, 0, 64, 199]])
    check(problems.make_call(
        "normal", 3, np.float16, (2, 6, 200, 64), (2, 2, 300, 64), (2, 2, 300, 64),
        options={"causal": True, "enable_gqa": True, "q_lengths": lengths},
    ))  # fmt: skip


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_sequence_before_heads_and_rows_with_room_behind(head_dims):
    call = make(head_dims, ((2, 3), 200, 333), {"causal": True})
    arrays, options, found = check(call)
    names = ("dout", "q", "k", "v")
    swapped = [upload(np.swapaxes(call.array(n), 1, 2)).swapaxes(1, 2) for n in names]
    wide = []
    for a in (call.array(name) for name in names):
        room = np.pad(a, ((0, 0),) * 3 + ((8, 16),), constant_values=np.nan)
        wide.append(upload(room)[..., 8 : 8 + a.shape[-1]])
    for given_arrays in (swapped, wide):
        assert_same_bits(differentiate(*given_arrays, *arrays[4:], **options), found)


def assert_same_bits_a_thousand_times(differentiate):
    """Check the bits with more tiles than SMs, some of which a second stream occupies at times."""
    busy = cupy.cuda.Stream(non_blocking=True)
    with busy:
        load = cupy.ones((2048, 2048), np.float32)
    differs = cupy.zeros((), np.bool_)
    want = differentiate()
    for i in range(1000):
        if i % 10 == 0:
            with busy:
                load @ load
        found = differentiate()
        for name in ALL:
            now, first = (getattr(gradients, f"d{name}") for gradients in (found, want))
            differs |= (now.view(np.int16) != first.view(np.int16)).any()
    busy.synchronize()
    assert not differs


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("kv_heads", [12, 4], ids=["heads", "groups"])
@pytest.mark.not_rehearsed
def test_the_same_bits_beside_a_busy_stream(head_dims, kv_heads):
    d, d_v = head_dims
    call = problems.make_call(
        "normal", 3, bfloat16, (2, 12, 900, d), (2, kv_heads, 1100, d), (2, kv_heads, 1100, d_v),
        options={"causal": True, "enable_gqa": kv_heads < 12},
    )  # fmt: skip
    arrays = [upload(call.array(name)) for name in ("dout", "q", "k", "v")]
    options = cuflash.Options(**call.options)
    arrays += cuflash.attention(*arrays[1:], options=options, return_lse=True)
    for config in forms(*arrays[1:4], options).values():
        assert_same_bits_a_thousand_times(
            functools.partial(cuflash.attention_backward, *arrays, options=options, config=config)
        )


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.not_rehearsed
def test_the_same_bits_of_packed_sequences_beside_a_busy_stream(head_dims):
    call = make(head_dims, ((12,), 2000, 2100), {})
    arrays = [upload(call.array(name)) for name in ("dout", "q", "k", "v")]
    ends = [cupy.array(e) for e in ([0, 77, 77, 900, 2000], [0, 200, 200, 1001, 2100])]
    arrays += cuflash.attention_varlen(*arrays[1:], *ends, causal=True, return_lse=True)
    assert_same_bits_a_thousand_times(
        functools.partial(cuflash.attention_varlen_backward, *arrays, *ends, causal=True)
    )


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.not_rehearsed
def test_two_streams_share_the_processors(head_dim, deterministic):
    """Tiles wait for tiles drawn before, yet two calls that share the SMs both finish."""
    arrays, options, want = check(
        make((head_dim, head_dim), ((2, 12), 900, 1100), {"causal": True})
    )
    options = cuflash.Options(**options)
    differentiate_on_stream = functools.partial(
        cuflash.attention_backward, *arrays, options=options, deterministic=deterministic,
        config=forms(*arrays[1:4], options)["one pass"] if deterministic else None,
    )  # fmt: skip
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    found = []
    for _ in range(50):
        for stream in streams:
            with stream:
                found.append(differentiate_on_stream())
    for stream in streams:
        stream.synchronize()
    names = ALL if deterministic else ("k", "v")
    for gradients in found:
        assert_same_bits(
            {"one pass": {name: getattr(gradients, f"d{name}") for name in names}},
            {"one pass": {name: want["one pass"][name] for name in names}},
        )


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("kv_heads", [12, 4], ids=["heads", "groups"])
def test_sums_in_any_order(head_dims, options, dtype, kv_heads):
    """Without a fixed order dk and dv keep their bits, and dq changes by at most two units."""
    d, d_v = head_dims
    call = problems.make_call(
        "normal", 3, dtype, (2, 12, 900, d), (2, kv_heads, 1100, d), (2, kv_heads, 1100, d_v),
        options={**options, "enable_gqa": kv_heads < 12},
    )  # fmt: skip
    budget = Budget(call)
    arrays, on_device, want = check(call, budget=budget)
    want = want["one pass"]
    bits = 16 if dtype is bfloat16 else 13  # significant bits of float32 that the dtype lacks
    unit = float(np.spacing(abs(want["q"]).max().astype(np.float32).get())) * 2**bits
    for _ in range(20):
        found = differentiate(*arrays, deterministic=False, **on_device)["one pass"]
        for name in ("k", "v"):
            assert found[name].get().tobytes() == want[name].get().tobytes()
        difference = found["q"].astype(np.float32) - want["q"].astype(np.float32)
        assert float(abs(difference).max()) <= 2 * unit
    check(call, deterministic=False, budget=budget)


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("repeated", [(-2,), (-1,), (-4, -3), (-4, -3, -2, -1)], ids=str)
def test_dout_of_stride_0(head_dims, repeated):
    call = make(head_dims, SHAPES[1], {"causal": True})
    part = call.dout[tuple(slice(1) if axis in repeated else slice(None) for axis in range(-4, 0))]
    dout = np.broadcast_to(part, call.dout.shape)
    arrays, options, _ = check(call.but(dout=dout))
    arrays[0] = cupy.broadcast_to(upload(part), dout.shape)
    found = cuflash.attention_backward(*arrays, **options)
    Budget(call.but(dout=dout)).check_backward(
        {name: getattr(found, f"d{name}").get() for name in ALL},
        given=(arrays[4].get(), arrays[5].get()),
    )


def test_neighbours_leave_the_bits_alone():
    """Values of other batch entries change no bit, though their number decides how rows split."""
    arrays, options, found = check(make((128, 128), ((3, 7), 300, 350), {"causal": True}))
    one = (slice(1, 2), slice(3, 4))
    others = [x.copy() for x in arrays]
    for other, own in zip(others, arrays, strict=True):
        other[...] = np.nan
        other[one] = own[one]
    beside = differentiate(*others, **options)
    for gradients in (found, beside):
        for form in gradients:
            gradients[form] = {name: x[one] for name, x in gradients[form].items()}
    assert_same_bits(beside, found)


@pytest.mark.parametrize("name", ["none", "causal", "lengths"])
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128)], ids=str)
def test_two_kernels_have_the_bits_of_the_portable_ones(head_dims, name):
    """Both kernels sum 16 rows at a time in the same order, so that their bits are equal."""
    for call in in_every_shape(head_dims, name):
        arrays, options, found = check(call)
        with portable_kernels():
            portable = cuflash.attention_backward(*arrays, **options)
        together = {n: getattr(portable, f"d{n}") for n in ALL}
        assert_same_bits({"two kernels": together}, found)


def test_config_decides_which_kernels_run(monkeypatch):
    call = make((64, 64), SHAPES[1], {})
    arrays = [upload(call.array(name)) for name in ("dout", "q", "k", "v")]
    arrays += cuflash.attention(*arrays[1:], return_lse=True)
    problem = describe(*arrays[1:4], cuflash.Options())
    portable = BackwardConfigs(
        q=chosen.portable("backward_dq_sm80", problem, 227 * 1024, 16),
        kv=chosen.portable_kv(problem, 227 * 1024, 16, frozenset(ALL))[0],
    )
    hopper, together = forms(*arrays[1:4], cuflash.Options()).values()
    smaller = BackwardConfigs(q=hopper.q.replace(block_n=64), kv=hopper.kv.replace(block_m=64))
    one_pass = [True, False]  # does the kernel load by tensor maps?
    for config, mapped in (
        (portable, [False, False]),
        (hopper, [True, True]),
        (smaller, [True, True]),
        (together, one_pass),
        (portable.q, [True, False]),  # config of one kernel: dk and dv come first
        (portable.kv, [False, True]),
        (smaller.q, [True, True]),
        (together.qkv, one_pass),
        (None, one_pass),
    ):
        monkeypatch.setattr(plan_cache, "_plans", {})
        gradients = cuflash.attention_backward(*arrays, config=config)
        assert [step.maps is not None for step in planned_launchers()[1:]] == mapped
        Budget(call).check_backward(
            {name: getattr(gradients, f"d{name}").get() for name in ALL},
            given=(arrays[4].get(), arrays[5].get()),
        )


def test_what_they_cannot_serve_goes_to_the_portable_kernels():
    call = make((64, 64), SHAPES[0], {})
    arrays = [upload(call.array(name)) for name in ("dout", "q", "k", "v")]
    arrays += cuflash.attention(*arrays[1:], return_lse=True)
    config, together = forms(*arrays[1:4], cuflash.Options()).values()
    moved = upload(np.append(call.q[:1, :1, :1, :1], call.q))[1:].reshape(call.q.shape)
    apart = upload(np.pad(call.dout, ((0, 0),) * 3 + ((0, 2),)))[..., :64]
    for place, array in ((1, moved), (0, apart)):
        changed = [array if i == place else x for i, x in enumerate(arrays)]
        halves = BackwardConfigs(q=config.q), BackwardConfigs(kv=config.kv)
        for given_config in (config, *halves, together):
            with pytest.raises(ValueError, match="config"):
                cuflash.attention_backward(*changed, config=given_config)
        gradients = cuflash.attention_backward(*changed)
        Budget(call).check_backward(
            {name: getattr(gradients, f"d{name}").get() for name in ALL},
            given=(arrays[4].get(), arrays[5].get()),
        )


def test_graphs():
    arrays, options, want = check(make((128, 128), ((2, 12), 300, 350), {"causal": True}))
    options = cuflash.Options(**options)
    workspace = cupy.empty(
        cuflash.workspace_size(*arrays[1:4], options=options, backward=True), np.uint8
    )
    for form, config in forms(*arrays[1:4], options).items():
        room = {f"d{name}": cupy.empty_like(x) for name, x in want[form].items()}
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            cuflash.attention_backward(
                *arrays, options=options, grads_out=cuflash.Gradients(**room),
                workspace=workspace, config=config,
            )  # fmt: skip
            graph = stream.end_capture()
            for _ in range(3):
                for x in room.values():
                    x.fill(np.nan)
                graph.launch(stream)
                stream.synchronize()
                assert_same_bits({form: {n: room[f"d{n}"] for n in ALL}}, want)


@pytest.mark.parametrize("head_dim", [32, 64, 72, 128])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (100, 30)}, {"softcap": 20.0}, {"dropout": 0.2, "seed": 3},
     {"kv_lengths": 90, "causal": True}],
    ids=str,
)  # fmt: skip
def test_dq_has_the_same_bits_whichever_kernel_stores_it(head_dim, options):
    """In short sequences the last tile stores dq, but not where TMA cannot: at odd addresses."""
    causal, window = "causal" in options, "window" in options
    options = cuflash.Options(**options)
    rng = cupy.random.default_rng(7)
    for (batch, heads), m, n in (((40, 8), 256, 256), ((150, 4), 77, 100), ((70, 8), 300, 200)):
        shapes = [(batch, heads, rows, head_dim) for rows in (m, m, n, n)]
        dout, q, k, v = (rng.standard_normal(s, cupy.float32).astype(np.float16) for s in shapes)
        q[0, 0, m // 2, 0] = np.inf  # rows of dq that are computed again
        k[1, 1, n // 3, 1] = np.nan
        out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
        found, stored = [], []
        for first_column in (0, 1):
            room = cupy.full((*q.shape[:-1], head_dim + 8), np.nan, q.dtype)
            dq = room[..., first_column : first_column + head_dim]
            plan_cache.forget()
            cuflash.attention_backward(
                dout, q, k, v, out, lse, options=options, grads_out=cuflash.Gradients(dq=dq)
            )
            found.append(dq.get())
            stored += ["dq" in mapped_by(launch) for launch in planned_launchers() if launch.maps]
            assert np.isnan(room[..., first_column + head_dim :].get()).all()
        assert found[0].tobytes() == found[1].tobytes(), (m, n)
        narrow = head_dim == 32 and (window or (n > 128 and not causal))
        assert stored == [not narrow, False]


def mapped_by(launch):
    """Return the names of the operands of a launch that have tensor maps."""
    return [launch.names[number] for number in launch.maps.pointers]
