"""The measured implementations: cuflash and its alternatives, on the same arrays."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

import cuflash
from cuflash._arrays import array_module
from cuflash._timing.clock import Call
from cuflash.tuning._workload import PASSES, Workload

Array = Any
Make = Callable[..., Call]


class Unsupported(Exception):
    """An implementation does not support this workload; the text says why."""


@dataclass
class Prepared:
    """Calls that are ready to be timed, each on its own copy of the inputs."""

    calls: list[Call]
    result: Callable[[], Array]  # runs one call; returns an array of the inputs' library
    capture: Callable[[Any, Sequence[Call]], Call]  # (clock, calls) -> replay


class Implementation:
    """One way to compute attention; subclasses define the modules they need and their calls."""

    name: str

    needs: tuple[str, ...] = ()  # modules
    deterministic: tuple[str, ...] = PASSES  # passes with the same bits in every run
    sequence_first = False  # whether its layout is (batch, seqlen, heads, dim)
    packed: Callable[[Workload, str, ModuleType], Make] | None = None  # as `padded`, for sequences

    def laid_out(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The same operands, stored in the layout that :meth:`prepare` needs without a copy."""
        if not self.sequence_first:
            return tuple(arrays)
        xp = array_module(arrays[0])
        return tuple(xp.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in arrays)

    def absent(self, xp: ModuleType) -> str:
        """Return why it cannot be measured on this machine; empty if it can."""
        if self.needs and xp is np:
            return "it needs a GPU"
        for module in self.needs:
            try:
                importlib.import_module(module)
            except Exception as error:
                return f"{module} cannot be imported ({type(error).__name__}: {error})"[:160]
        return ""

    def prepare(self, work: Workload, pass_: str, inputs: Sequence[tuple[Array, ...]]) -> Prepared:
        """Build one call for each set of inputs; raise Unsupported."""
        if work.seqlens and pass_ != "fwd":
            raise Unsupported("only the forward of packed sequences is measured")
        kind = self.packed if work.seqlens else self.padded
        if kind is None:
            raise Unsupported("no packed sequences")
        make = kind(work, pass_, array_module(inputs[0][0]))
        calls = [make(*arrays) for arrays in inputs]
        return Prepared(calls, lambda: self.array_of(calls[0](), work), self.capture)

    def padded(self, work: Workload, pass_: str, xp: ModuleType) -> Make:
        """Return a function that makes a call from q, k, v and dout; the call returns out or dq."""
        raise NotImplementedError

    def array_of(self, found: Any, _work: Workload) -> Array:
        """Turn what a call returns into an array of the inputs' library."""
        return found

    def capture(self, clock: Any, calls: Sequence[Call]) -> Call:
        """Capture calls in a graph; return a function that replays it."""
        replay: Call = clock.capture(calls)
        return replay

    def results(
        self, work: Workload, q: Array, k: Array, v: Array, dout: Array
    ) -> dict[str, Array]:
        """Compute out, dq, dk and dv once; raise Unsupported."""
        raise NotImplementedError


def _refuse_options(work: Workload) -> None:
    """Raise for options on which peers are not compared."""
    if work.precision == "tf32":
        raise Unsupported("compared without TF32")
    if work.window is not None:
        raise Unsupported("no window")
    if not work.plain:
        raise Unsupported("causal masks alone are compared")


class Cuflash(Implementation):
    """The library itself. It writes into given arrays, so that the call can be put into a graph."""

    name = "cuflash"
    ordered = True  # whether gradients are bitwise the same in every run

    def padded(self, work: Workload, pass_: str, xp: ModuleType) -> Make:
        self._refuse_another_order(pass_)
        given: dict[str, Any] = {"options": cuflash.Options(**work.score_options(xp))}
        given["precision"] = "tf32" if work.precision == "tf32" else None
        ordered = self.ordered and work.deterministic

        def room(q: Array, k: Array, v: Array, *, backward: bool) -> Array | None:
            size = cuflash.workspace_size(q, k, v, backward=backward, **given)
            return xp.empty(size, np.uint8) if size else None

        def make(q: Array, k: Array, v: Array, dout: Array) -> Call:
            pair, forward_room = _outputs(q, v), room(q, k, v, backward=False)

            def forward() -> Array:
                return cuflash.attention(
                    q, k, v, return_lse=True, out=pair, workspace=forward_room,
                    deterministic=ordered, **given,
                ).out  # fmt: skip

            if pass_ == "fwd":
                return forward
            forward()
            grads = cuflash.Gradients(*(xp.empty_like(a) for a in (q, k, v)))
            backward_room = room(q, k, v, backward=True)

            def backward() -> Array:
                return cuflash.attention_backward(
                    dout, q, k, v, *pair, grads_out=grads, workspace=backward_room,
                    deterministic=ordered, **given,
                ).dq  # fmt: skip

            return backward if pass_ == "bwd" else lambda: (forward(), backward())[1]

        return make

    def packed(self, work: Workload, pass_: str, xp: ModuleType) -> Make:
        self._refuse_another_order(pass_)
        options = cuflash.Options(**work.score_options())

        def make(q: Array, k: Array, v: Array, _: Array) -> Call:
            ends, pair = xp.asarray(np.cumsum((0, *work.seqlens))), _outputs(q, v)
            return lambda: (
                cuflash.attention_varlen(
                    q, k, v, ends, ends, options=options, return_lse=True, out=pair
                ).out
            )

        return make

    def results(
        self, work: Workload, q: Array, k: Array, v: Array, dout: Array
    ) -> dict[str, Array]:
        out, pullback = cuflash.attention_vjp(
            q, k, v,
            options=cuflash.Options(**work.score_options(array_module(q))),
            precision="tf32" if work.precision == "tf32" else None,
            deterministic=self.ordered and work.deterministic,
        )  # fmt: skip
        grads = pullback(dout)
        return {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}

    def _refuse_another_order(self, pass_: str) -> None:
        if pass_ == "fwd" and not self.ordered:
            raise Unsupported("a forward has one order")


def _outputs(q: Array, v: Array) -> tuple[Array, Array]:
    """Empty arrays for out and lse."""
    xp, wide = array_module(q), np.float64 if q.dtype == np.float64 else np.float32
    return xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype), xp.empty(q.shape[:-1], wide)


class CuflashUnordered(Cuflash):
    """The library with ``deterministic=False``: dq is summed in any order."""

    name = "cuflash-unordered"
    needs = ("cupy",)
    deterministic = ("fwd",)
    ordered = False


class Naive(Implementation):
    """Attention written without a library: the whole matrix of scores, softmax in float32."""

    name = "naive"

    def padded(self, work: Workload, pass_: str, xp: ModuleType) -> Make:
        _refuse_options(work)
        scale, m, n = 1 / math.sqrt(work.head_dim), work.seqlen_q, work.seqlen_k
        mask = ~xp.tri(m, n, n - m, dtype=bool) if work.causal else None

        def make(q: Array, k: Array, v: Array, dout: Array) -> Call:
            if pass_ == "fwd":
                return lambda: naive_forward(q, k, v, mask, scale)[0]
            if pass_ == "bwd":
                p = naive_forward(q, k, v, mask, scale)[1]
                return lambda: naive_backward(dout, q, k, v, p, scale)[0]
            return lambda: naive_backward(
                dout, q, k, v, naive_forward(q, k, v, mask, scale)[1], scale
            )[0]

        return make

    def capture(self, _clock: Any, _calls: Sequence[Call]) -> Call:
        raise Unsupported("its temporaries come from CuPy's pool, where a graph cannot hold them")

    def results(
        self, work: Workload, q: Array, k: Array, v: Array, dout: Array
    ) -> dict[str, Array]:
        _refuse_options(work)
        if work.causal:
            raise Unsupported("full attention alone is compared")
        scale = 1 / math.sqrt(work.head_dim)
        out, p = naive_forward(q, k, v, None, scale)
        found = (out, *naive_backward(dout, q, k, v, p, scale))
        rounded = (array.astype(q.dtype, copy=False) for array in found)
        return dict(zip(("out", "dq", "dk", "dv"), rounded, strict=True))


def naive_forward(
    q: Array, k: Array, v: Array, mask: Array | None, scale: float
) -> tuple[Array, Array]:
    """Attention by array operations: (out, probabilities), in the dtype of :func:`_multiplied`.

    ``mask`` is True where a key is invisible.
    """
    xp = array_module(q)
    q, k, v = _multiplied(q, k, v)
    wide = np.float64 if q.dtype == np.float64 else np.float32
    groups = q.shape[1] // k.shape[1]
    k, v = (xp.repeat(a, groups, axis=1) if groups > 1 else a for a in (k, v))
    s = (q @ k.swapaxes(-1, -2)).astype(wide, copy=False)
    s *= scale
    if mask is not None:
        xp.putmask(s, xp.broadcast_to(mask, s.shape), -np.inf)
    s -= s.max(-1, keepdims=True)
    xp.exp(s, out=s)
    s /= s.sum(-1, keepdims=True)
    p = s.astype(q.dtype, copy=False)
    return p @ v, p


def naive_backward(
    dout: Array, q: Array, k: Array, v: Array, p: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Gradients (dq, dk, dv) from the probabilities that the forward kept."""
    xp = array_module(q)
    dout, q, k, v = _multiplied(dout, q, k, v)
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (xp.repeat(a, groups, axis=1) if groups > 1 else a for a in (k, v))
    dv = p.swapaxes(-1, -2) @ dout
    wide = np.float64 if q.dtype == np.float64 else np.float32
    ds = (dout @ v.swapaxes(-1, -2)).astype(wide, copy=False)
    ds *= p
    ds -= p * ds.sum(-1, keepdims=True)
    ds *= scale
    ds = ds.astype(q.dtype, copy=False)
    dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q
    if groups > 1:
        dk, dv = (a.reshape(a.shape[0], heads, groups, *a.shape[2:]).sum(2) for a in (dk, dv))
    return dq, dk, dv


def _multiplied(*arrays: Array) -> tuple[Array, ...]:
    """The arrays in a dtype that NumPy and CuPy can multiply: neither multiplies bfloat16."""
    return tuple(a.astype(np.float32) if a.dtype == bfloat16 else a for a in arrays)


class Torch(Implementation):
    """An implementation that takes torch tensors, on the memory of CuPy's arrays."""

    needs: tuple[str, ...] = ("torch",)
    deterministic: tuple[str, ...] = ("fwd",)
    dtypes: tuple[str, ...] = ("float16", "bfloat16")

    def function(self, work: Workload) -> Callable[..., Any]:
        """Return f(q, k, v) -> out for tensors in the layout of `arrange`."""
        raise NotImplementedError

    def arrange(self, tensor: Any) -> Any:
        """Convert (batch, heads, seqlen, dim) to the implementation's own layout."""
        return tensor

    def padded(self, work: Workload, pass_: str, _xp: ModuleType) -> Make:
        import torch

        self._refuse(work)
        function = self.function(work)

        def make(*arrays: Array) -> Call:
            q, k, v, dout = (self.arrange(as_tensor(a)) for a in arrays)
            if pass_ == "fwd":
                return torch.no_grad()(lambda: function(q, k, v))
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            if pass_ == "fwd+bwd":
                return lambda: torch.autograd.grad(function(*leaves), leaves, dout)[0]
            out = function(*leaves)
            return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)[0]

        return make

    def packed_function(self, _work: Workload, _ends: Any) -> Callable[..., Any]:
        """Return f(q, k, v) -> out for tensors (total, heads, dim) of sequences up to ``ends``."""
        raise Unsupported("no packed sequences")

    def packed(self, work: Workload, _pass: str, _xp: ModuleType) -> Make:
        import torch

        if work.dtype not in self.dtypes:
            raise Unsupported(f"no {work.dtype}")
        ends = torch.tensor(np.cumsum((0, *work.seqlens)), dtype=torch.int32, device="cuda")
        function = self.packed_function(work, ends)

        def make(*arrays: Array) -> Call:
            operands = (as_tensor(a)[0].transpose(0, 1).contiguous() for a in arrays[:3])
            return functools.partial(function, *operands)

        return make

    def array_of(self, found: Any, work: Workload) -> Array:
        if work.seqlens:
            return as_array(found.transpose(0, 1)[None].contiguous())
        return as_array(self.arrange(found))

    def results(
        self, work: Workload, q: Array, k: Array, v: Array, dout: Array
    ) -> dict[str, Array]:
        import torch

        self._refuse(work)
        leaves = [self.arrange(as_tensor(a)).detach().requires_grad_() for a in (q, k, v)]
        out = self.function(work)(*leaves)
        grads = torch.autograd.grad(out, leaves, self.arrange(as_tensor(dout)))
        found = (as_array(self.arrange(t)) for t in (out, *grads))
        return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))

    def _refuse(self, work: Workload) -> None:
        if work.dtype not in self.dtypes:
            raise Unsupported(f"no {work.dtype}")
        _refuse_options(work)
        if work.causal and work.seqlen_q != work.seqlen_k:
            raise Unsupported("its causal mask aligns at the first key")

    def capture(self, clock: Any, calls: Sequence[Call]) -> Call:
        import torch

        for call in calls:
            call()
        clock.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(clock.stream.ptr)):
            for call in calls:
                call()
        return graph.replay


class ScaledDotProduct(Torch):
    """One backend of torch.nn.functional.scaled_dot_product_attention."""

    def __init__(self, name: str, backend: str, dtypes: tuple[str, ...]) -> None:
        self.name = name
        self.backend = backend
        self.dtypes = dtypes

    def function(self, work: Workload) -> Callable[..., Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        backend = getattr(SDPBackend, self.backend)

        def call(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=work.causal, enable_gqa=work.heads_q != work.heads_kv
                )

        return call

    def bias_gradients(
        self, q: Array, k: Array, v: Array, bias: Array, dout: Array
    ) -> Callable[[], tuple[Array, Array]]:
        """Return a call for (dq, dbias) that computes dk and dv, too; entries share the bias."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        leaves = [as_tensor(array).detach().requires_grad_() for array in (q, k, v, bias)]
        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            out = scaled_dot_product_attention(
                *leaves[:3], leaves[3].expand(q.shape[0], -1, -1, -1)
            )
        cotangent = as_tensor(dout)

        def call() -> tuple[Array, Array]:
            found = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
            return as_array(found[0]), as_array(found[3])

        return call

    def packed_function(self, work: Workload, ends: Any) -> Callable[..., Any]:
        import torch

        if self.name != "fa2":
            return super().packed_function(work, ends)
        longest, kernel = max(work.seqlens), torch.ops.aten._flash_attention_forward
        return lambda q, k, v: kernel(
            q, k, v, ends, ends, longest, longest, 0.0, work.causal, False
        )[0]


class FlashAttention4(Torch):
    """The CuTe kernels of the package flash-attn-4, layout (batch, seqlen, heads, dim)."""

    name = "fa4"
    needs = ("torch", "flash_attn.cute")
    sequence_first = True

    def arrange(self, tensor: Any) -> Any:
        return tensor.transpose(1, 2).contiguous()

    def function(self, work: Workload) -> Callable[..., Any]:
        from flash_attn.cute import flash_attn_func

        def call(q: Any, k: Any, v: Any) -> Any:
            out = flash_attn_func(q, k, v, causal=work.causal)
            return out[0] if isinstance(out, tuple) else out

        return call

    def packed_function(self, work: Workload, ends: Any) -> Callable[..., Any]:
        from flash_attn.cute import flash_attn_varlen_func

        def call(q: Any, k: Any, v: Any) -> Any:
            out = flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=work.causal
            )
            return out[0] if isinstance(out, tuple) else out

        return call


HALVES = ("float16", "bfloat16")
IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (
        Cuflash(),
        CuflashUnordered(),
        Naive(),
        ScaledDotProduct("fa2", "FLASH_ATTENTION", HALVES),
        ScaledDotProduct("cudnn", "CUDNN_ATTENTION", HALVES),
        ScaledDotProduct("eff", "EFFICIENT_ATTENTION", (*HALVES, "float32")),
        ScaledDotProduct("math", "MATH", ("float32", "float64")),
        FlashAttention4(),
    )
}


#: Names of the implementations that use this library.
OURS = tuple(name for name, found in IMPLEMENTATIONS.items() if isinstance(found, Cuflash))


def as_tensor(array: Array) -> Any:
    """A torch tensor on the memory of a CuPy array; bfloat16 is passed as int16."""
    import torch

    if array.dtype == bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def as_array(tensor: Any) -> Array:
    """A CuPy array on the memory of a torch tensor."""
    import cupy
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return cupy.from_dlpack(tensor.view(torch.int16)).view(bfloat16)
    return cupy.from_dlpack(tensor)
