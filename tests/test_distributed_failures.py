"""Where calls of ranks differ, or one raises within a call: do all learn it, and is none wrong?"""

from __future__ import annotations

import contextlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cuflash
from cuflash import __version__, distributed
from cuflash.distributed import _attention, _handshake, _parts, _run
from cuflash.distributed._simulated import Simulated
from support.shards import in_threads

X = np.random.default_rng(0).standard_normal((2, 8, 4))
IDS = np.zeros(8, int), np.zeros(16, int)

HOSTS = {"host": lambda score, *_: score, "host_grad": lambda score, *_: score}
HALF, SAME, FLAT = (
    cuflash.ScoreMod(text, grad=grad, **HOSTS)
    for text, grad in (("score / 2", "0.5f"), ("score", "1.0f"), ("score", "0.0f"))
)


def forward(comm, **words):
    return distributed.attention(X, X, X, comm=comm, **words)


def gradient(comm, dout=X, **words):
    out, lse = forward(comm, return_lse=True)
    return distributed.attention_backward(dout, X, X, X, out, lse, comm=comm, **words)


def whole(comm, x=X, **words):
    return distributed.unshard(x, comm=comm, **words)


#: name -> call of one rank, call of the other, and the argument that differs.
DIFFERENT = {
    "segments": (forward, {}, forward, {"segment_ids": IDS}, "segment_ids"),
    "function": (forward, {}, whole, {}, "function"),
    "dlse": (gradient, {}, gradient, {"dlse": X[..., 0]}, "dlse"),
    "dtype of dout": (gradient, {}, gradient, {"dout": X.astype("f4")}, "dout"),
    "wrt": (gradient, {}, gradient, {"wrt": ("q", "k")}, "wrt"),
    "formula": (forward, {"score_mod": HALF}, forward, {"score_mod": SAME}, "score_mod"),
    "formula of a gradient": (forward, {"score_mod": SAME}, forward, {"score_mod": FLAT},
                              "score_mod"),
    "axis": (whole, {}, whole, {"axis": -1}, "axis"),
    "layout": (whole, {}, whole, {"layout": "contiguous"}, "layout"),
    "dtype": (whole, {}, whole, {"x": X.astype("f4")}, "x without rows"),
    "dtype of k": (
        lambda comm, **_: distributed.attention(X, X, X, comm=comm), {},
        lambda comm, **_: distributed.attention(X, X.astype("f4"), X, comm=comm), {},
        "k without rows",
    ),
}  # fmt: skip


def next_call_is_right(comm):
    """Return whether the next call is right: nothing sent before may be taken for a part of it."""
    y = X + 1 + comm.rank
    out = whole(comm, distributed.attention(y, y, y, comm=comm, method="ring"))
    y = whole(comm, y)
    return np.allclose(out, cuflash.attention(y, y, y), atol=1e-12)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_are_refused_alike(name, swapped):
    *calls, what = DIFFERENT[name]
    calls = calls[2:] + calls[:2] if swapped else calls

    def run(comm):
        call, words = calls[2 * comm.rank : 2 * comm.rank + 2]
        with pytest.raises(ValueError, match="all ranks make the same call") as found:
            call(comm, **words)
        return str(found.value), next_call_is_right(comm)

    found = in_threads(2, run)
    assert found[0] == found[1]
    assert found[0][0].startswith(what), found
    assert found[0][1]


@pytest.mark.parametrize(
    ("call", "words", "kind", "message"),
    [
        (forward, {"layout": "striped"}, ValueError, "layout: got 'striped'"),
        (forward, {"method": "rings"}, ValueError, "method: got 'rings'"),
        (forward, {"return_lse": 1}, TypeError, "return_lse: got 1"),
        (forward, {"axes": 3}, TypeError, "axes: got 3"),
        (forward, {"precision": "tf16"}, ValueError, "precision: got 'tf16'"),
        (forward, {"precision": np.float32}, TypeError, "precision: got <class"),
        (forward, {"q_lengths": 10**5000}, ValueError, ""),  # JSON cannot hold the number
        (gradient, {"deterministic": 1}, TypeError, "deterministic: got 1"),
        (gradient, {"wrt": "q"}, TypeError, "wrt: got 'q'"),
        (whole, {"layout": 0}, TypeError, "layout: got 0"),
        (whole, {"axis": 3}, ValueError, "axis: got 3"),
    ],
)
def test_what_one_rank_refuses_reaches_the_other(call, words, kind, message):
    def run(comm):
        wrong = comm.rank == 1
        expected = kind if wrong else distributed.CommunicationError
        told = message if wrong else f"rank 1 refused the call: {kind.__name__}: {message}"
        with pytest.raises(expected, match=f"^{re.escape(told)}"):
            call(comm, **words if wrong else {})
        return next_call_is_right(comm)

    assert in_threads(2, run) == [True, True]


def test_rows_of_a_bias_of_which_another_rank_has_one():
    comm, x = distributed.simulated(2), [X, X]
    bias = [np.zeros((1, 16)), np.zeros((8, 16))]
    for pair, rank in ((bias, 1), (bias[::-1], 0)):
        with pytest.raises(ValueError, match=f"bias: got 8 rows on rank {rank}, expected one row"):
            distributed.attention(x, x, x, comm=comm, bias=pair)


def test_as_many_values_as_keys():
    comm, x, y = distributed.simulated(2), [X, X], [np.ones((2, 16, 4))] * 2
    with pytest.raises(ValueError, match="v: got 32 values, expected one for each of 16 keys"):
        distributed.attention(x, x, y, comm=comm)


def test_another_version_is_named(monkeypatch):
    comm = distributed.simulated(2)
    agree = comm.agree

    def older(facts):
        first, second = agree(facts)
        return [first, second.replace(f'"{__version__}"'.encode(), b'"0.0.1"')]

    monkeypatch.setattr(comm, "agree", older)
    with pytest.raises(ValueError, match=r"cuflash: got '0\.0\.1' on rank 1"):
        whole(comm, [X, X])


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_a_rank_that_raises_within_a_call_ends_it_on_all(method):
    """All ranks raise the error of one rank, and nothing sent before is taken for the next call."""

    def out_of_memory(score, *_):
        raise MemoryError("no memory is left")

    def run(comm):
        host = out_of_memory if comm.rank == 1 else lambda score, *_: score
        formula = cuflash.ScoreMod("score", grad="1.0f", host=host, host_grad=lambda s, *_: s)
        errors = []
        for options in ({"score_mod": formula}, {}, {}):
            with pytest.raises((MemoryError, distributed.CommunicationError)) as found:
                whole(comm, forward(comm, method=method, **options))
            errors.append(found.value)
        return errors

    for rank, (first, *later) in enumerate(in_threads(2, run)):
        assert isinstance(first, MemoryError) == (rank == 1), first
        for error in later if rank == 1 else [first, *later]:
            assert error.rank == 1
            assert "rank 1 raised in the middle of a call: MemoryError: no memory" in str(error)


@pytest.mark.parametrize("call", [forward, whole])
@pytest.mark.parametrize("when", ["sent nothing", "sent"])
def test_an_interrupt_in_the_handshake_ends_the_communicator(call, when):
    """A rank that is interrupted and calls again must not be one message ahead of the other."""

    def interrupted(*_):
        raise KeyboardInterrupt

    def run(comm):
        whole(comm, forward(comm))
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 0:
                patch.setattr(comm, "agree" if when == "sent nothing" else "_received", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    call(comm)
        call(comm)
        return call(comm)

    for error in in_threads(2, run):
        assert isinstance(error, distributed.CommunicationError)
        assert "rank 0 raised in the middle of a call: KeyboardInterrupt" in str(error), error


@pytest.mark.parametrize("call", [forward, whole])
def test_a_call_in_a_second_thread_is_refused(call):
    """Messages of two calls at a time have one queue, so each would take the other's rows."""

    def run(comm):
        errors = []

        def second(score, *_):
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join(10)
            return score

        def attempt():
            try:
                call(comm)
            except Exception as error:
                errors.append(error)

        host = second if comm.rank == 0 else lambda score, *_: score
        formula = cuflash.ScoreMod("score", grad="1.0f", host=host, host_grad=lambda s, *_: s)
        with pytest.raises(distributed.CommunicationError, match="expected one call at a time"):
            whole(comm, forward(comm, score_mod=formula, method="ring"))
        return errors

    first, other = in_threads(2, run)
    assert first
    assert isinstance(first[0], RuntimeError), first
    assert str(first[0]).startswith("comm: got a call of rank 0 during another one"), first
    assert other == []


def test_a_call_in_a_second_thread_of_simulated_ranks_is_refused():
    comm, x = distributed.simulated(2), [X, X]
    with (
        comm.call(),
        ThreadPoolExecutor() as pool,
        pytest.raises(RuntimeError, match=r"^comm: got"),
    ):
        pool.submit(distributed.unshard, x, comm=comm).result(10)
    assert distributed.unshard(x, comm=comm)[0].shape == (2, 16, 4)


def test_ranks_of_one_process_go_on_after_one_has_raised():
    comm, x = distributed.simulated(2), [X, X]
    formula = cuflash.ScoreMod(
        "score", grad="1.0f", host=lambda *_: 1 / 0, host_grad=lambda s, *_: s
    )
    with pytest.raises(ZeroDivisionError):
        distributed.attention(x, x, x, comm=comm, score_mod=formula)
    assert distributed.attention(x, x, x, comm=comm)[0].shape == X.shape


def test_results_are_made_on_the_device_of_their_rank(monkeypatch):
    """The gradients of a rank are rounded to the dtypes of its inputs on its own device."""

    class OnDevices(Simulated):
        current = None

        @contextlib.contextmanager
        def on(self, rank):
            self.current = rank
            yield
            self.current = None

    comm, places = OnDevices(2), []
    in_dtype = _attention.in_dtype
    monkeypatch.setattr(
        _attention, "in_dtype", lambda *a: places.append(comm.current) or in_dtype(*a)
    )
    x = [X, X]
    out = distributed.attention(x, x, x, comm=comm, return_lse=True)
    distributed.attention_backward(
        x, x, x, x, [o.out for o in out], [o.lse for o in out], comm=comm, wrt=("q", "v")
    )
    assert places == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("hosts", "together"),
    [("aaaa", None), ("aabb", 2), ("abab", 1), ("aab", 1), ("aaab", 1), ("abcd", 1), ("a", None),
     ("aabbcc", 2), ("aaabbb", 3), ("abba", 1)],
)  # fmt: skip
def test_neighbours_on_a_host(hosts, together):
    """None: one host. 1: one rank each, unequal numbers, or ranks of a host are not neighbours."""
    assert _run.ranks_per_host(list(hosts)) == together


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaaa"])
def test_heads_stay_within_a_host(hosts, monkeypatch):
    """Heads are exchanged within a host where the ranks' host names say which ranks share it."""
    comm, x = distributed.simulated(4), [np.ones((4, 4, 8))] * 4
    agree = comm.agree

    def told(facts):
        name = rb'"host": "[^"]*"'
        return [re.sub(name, b'"host": "%c"' % ord(h), text)
                for h, text in zip(hosts, agree(facts), strict=True)]  # fmt: skip

    monkeypatch.setattr(comm, "agree", told)
    distributed.attention(x, x, x, comm=comm)
    ring_alone = {(a, b) for a in range(4) for b in range(4) if a != b}
    within = {(0, 1), (1, 0), (2, 3), (3, 2)}
    between = {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert set(comm.sent) == (within | between if hosts == "aabb" else ring_alone)


def test_the_rank_with_the_least_memory_decides(monkeypatch):
    comm, x = distributed.simulated(2), [np.ones((4, 64, 8))] * 2
    memory, asked = {0: 1 << 30, 1: 5}, []
    chosen = _run.chosen
    monkeypatch.setattr(comm, "free_memory", memory.get)
    monkeypatch.setattr(_run, "chosen", lambda *a: asked.append(a[3]) or chosen(*a))
    distributed.attention(x, x, x, comm=comm)
    assert asked == [5, 5]


@pytest.mark.parametrize("name", ["causal", "dout", "wrt"])
def test_ranks_that_repeat_different_calls_compare_them(name):
    """Ranks compare different known calls: one repeats the first, the other the second."""
    both = {
        "causal": ({"causal": True}, {"causal": False}),
        "dout": ({}, {"dout": X.astype("f4")}),
        "wrt": ({"wrt": ("k",)}, {"wrt": ("q",)}),
    }[name]
    call = forward if name == "causal" else gradient

    def run(comm):
        for words in both:
            call(comm, **words)
        with pytest.raises(ValueError, match=f"^{name}: got .* on rank 1, expected .* on rank 0"):
            call(comm, **both[comm.rank])
        return next_call_is_right(comm)

    assert in_threads(2, run) == [True, True]


@pytest.mark.parametrize("words", [{"layout": "contiguous"}, {"method": "ring"}, {"causal": True}])
def test_another_call_of_the_same_arrays_is_compared(words):
    comm, x = distributed.simulated(2), [X, X]
    for number, more in enumerate(({}, words, {}), start=1):
        distributed.attention(x, x, x, comm=comm, **more)
        assert comm.agreements.number == min(number, 2)


def test_agreements_are_forgotten(monkeypatch):
    monkeypatch.setattr(_handshake, "_KEPT", 4)
    comm, x = distributed.simulated(2), [X, X]
    for number in range(12):
        distributed.attention(x, x, x, comm=comm, scale=1.0 + number)
        assert len(comm.agreements.known) <= 4 * comm.size
    assert comm.agreements.number == 12


@pytest.mark.parametrize(
    ("heads", "message"), [((4, 4, 1), "4 key/value heads"), ((1, 4, 4), "4 query heads")]
)
@pytest.mark.parametrize("method", ["ulysses", "usp"])
def test_arrays_of_other_numbers_of_heads(heads, message, method):
    """Unequal numbers of heads are refused, as the heads that a rank needs are then undefined."""
    comm = distributed.simulated(4)
    q, k, v = ([np.ones((n, 4, 8))] * 4 for n in heads)
    with pytest.raises(NotImplementedError, match=f"{message}, which"):
        distributed.attention(q, k, v, comm=comm, method=method)
    assert distributed.attention(q, k, v, comm=comm)[0].shape == (4, 4, 8)


def test_a_pullback_is_the_gradient_of_its_call():
    comm, x = distributed.simulated(2), [X, X + 1]
    words = {"comm": comm, "causal": True, "axes": [(-2, -1)] * 4, "layout": "contiguous"}
    results, pullback = distributed.attention_vjp(x, x, x, return_lse=True, **words)
    outs, lses = [r.out for r in results], [r.lse for r in results]
    given = {"dlse": lses, "wrt": ("v", "q")}
    expected = distributed.attention_backward(x, x, x, x, outs, lses, **given, **words)
    for found, right in zip(pullback(x, **given), expected, strict=True):
        for one, other in zip(found, (right.dv, right.dq), strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_every_block_is_computed_as_asked(method, monkeypatch):
    """precision and deterministic reach every block. On the CPU both only permit something."""
    told = []

    def noting(run):
        def noted(problem, *given, deterministic=None, **named):
            told.append((problem.precision, deterministic))
            return run(problem, *given, **named)

        return noted

    for name in ("run_forward", "run_backward"):
        monkeypatch.setattr(_parts, name, noting(getattr(_parts, name)))
    x = [X.astype("f4")] * 2
    how = {"comm": distributed.simulated(2), "method": method, "precision": "tf32"}
    out, pullback = distributed.attention_vjp(x, x, x, deterministic=False, **how)
    pullback(out)
    assert set(told) == {("tf32", None), ("tf32", False)}


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_gradients_of_scale_add_up_in_float64(method, monkeypatch):
    run, blocks = _parts.run_backward, []

    def counted(problem, qkv, options, saved, gradients, **how):
        run(problem, qkv, options, saved, gradients, **how)
        gradients["scale"][...] = 1 + 2**-40
        blocks.append(problem)

    monkeypatch.setattr(_parts, "run_backward", counted)
    x, comm = [X.astype("f4")] * 2, distributed.simulated(2)
    out, pullback = distributed.attention_vjp(x, x, x, comm=comm, method=method)
    for gradients in pullback(out, wrt=("scale",)):
        assert gradients.dscale == len(blocks) * (1 + 2**-40)
    assert len(blocks) > 1
