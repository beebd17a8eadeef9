"""Is a result as exact as its arithmetic allows? The one oracle of every numerical test.

T is the definition (`cuflash.reference`) on the inputs exactly as stored, in float64, or longdouble
for float64 inputs. M is `support.model_flash`. A is the result under test. No number below is
tuned: each is a property of the arithmetic or follows from the derivation.

The rules, per tensor (out and every gradient)
----------------------------------------------
R1  |A - T| <= 2 * max|M - T| + ulp(max|T|) + E           tensors that are a sample (see there)
R2  rms(A - T) <= 1.25 * rms(M - T) + min(rms(E), c(n) * rms(M' - T))    same, whole and per head;
                                                          gradients 1.5
R3  probe (v one-hot or v >= 0): |A - T| <= eps * |T| + 2 * E + 8 * smallest normal
R4  lse: |A - T| <= 4 * eps_acc * max(1, |T|) + E
R5  rows with nothing visible are +0 with lse = -inf and gradient 0; results are finite exactly
    where the definition, rounded to the dtype, is
R7  rms(A - T) <= 2 * rms(Z) + rms(Y)                     dq and dk of float32 that are a sample
R6  |A - T| <= W + ulp(max|T|) + E, and the same for M: no correct arithmetic can be further off,
    so that a broken M cannot widen R1, and small tensors, where max|M - T| may be 0 by luck,
    still have a rule

E bounds elementwise what the accumulator may lose, W what the declared roundings to the operand
dtype may lose at worst. Where the elements of a large tensor are concerned, the roundings of W
average out, in A as in M: R1 and R2 are the sharp rules there. M' is M without any rounding to
the operand dtype: a sample of what the accumulator loses in some order of summation. With n the
longest sum, another order loses at most c(n) times as much: a walk of n roundings against one.

A gradient is a function of the out and lse that it is given. M gets the same ones: the rounding of
out moves delta for a whole row at once, and with it every key of a column, so that two roundings of
one out would be compared as one sample and not as many.

*Sample.* The rows of a tensor (its last axis) have independent roundings; the energy of a row's
error varies by at most sqrt(2) of its mean, as that of a single normal variable. With r rows of
equal energy the ratio of two such totals varies by sqrt(4 / r), and 5 of these standard deviations
stay below f^2 - 1 for r >= (10 / (f^2 - 1))^2: 316 rows for f = 1.25 and 64 for 1.5. So R1 and R2
are for tensors of at least SAMPLE elements whose rows, weighted by the energy of M - T, count as so
many: (sum of energies)^2 / (sum of their squares). Where nearly all rows see nothing, or one
key, a large tensor is no sample.

E: "kappa" and "G"
------------------
u = eps/2 of the accumulator. A sum of n terms x_i errs by at most c(n) * u * sum|x_i|: n - 1 in
the worst case, and 3 * sqrt(n) for roundings of mean 0 (variance at most u^2/3 each, so this is
5 standard deviations of a random walk; Higham and Mary 2019, theorem 2.8).
c(n) = min(n, 3 sqrt(n)).

*Exponent.* With S = |scale| * sum|q||k|, a score errs by at most
    e = u * ((c(d) + 4) * S + 8 * softcap + 4 * (|bias| + |slope| * distance) + 2 * |score - lse|)
c(d) S for the dot product, 4 S for rounding scale, its product with log2(e), and the product with
the score; 8 softcap for a tanh formed as 1 - 2/(1 + exp 2x), whose error is absolute; 4 |bias| for
conversion, sum and change of base, the same for ALiBi; the last for the difference itself. For the
sink s, a score without a product, e = u * (4 |s| + 2 |s - lse|). This is the note's kappa,
kept per pair (m, n): one scalar for the whole tensor would let a single far-off key (bias -6e4, or
finfo.min) blind the rule for every other.

*Probability.* P = exp(score - lse) and sum(exp) share the errors: the relative error of a
normalised weight is at most
    r = e + sum_n(P e) + u * (2 c(n) + 16 + 2 |lse|)          (the sum includes the sink)
(numerator, denominator, both sums over keys, 4 ulp each for exp and the rescaling by running
maxima, and for the backward the rounding of lse when it is stored).

*Dropout.* K is the factor of a weight: 0 where dropped, else 1 / (1 - p). Rounding K, and the
product with it, add 2 u to r.

*Results*, first order; X = K |dout| |v|^T, X' = sum_n(P X), y = |dlse|:
    out    sum_n P K r |v|                                            lse    sum_n(P e) + u c(n)
    dv     sum_m P K (r + u c(m)) |dout|
    dS     P [ (r + 4u)(X + X' + y) + u (c(e) + 2)(X + X') + sum_n(P r X) ]
    dS_raw dS error * t' + P (X + X' + y) u (2 (c(d) + 4) S t' / softcap + 16),  t' = 1 - tanh^2
    dq     |scale| * sum_n [ dS_raw error + u (c(n) + 4) P (X + X' + y) t' ] |k|;  dk likewise
    dbias  dS error;  dslope  sum_mn (dS error * distance);  dscale  sum_mn (dS_raw error * |q||k|)
    dsink  sum_m P_sink [ (r + 4u)(X' + y) + u (c(e) + 2) X' + sum_n(P r X) ], r of the sink
plus u * c(count) of what is summed over broadcast axes and head groups, and the smallest normal
number of the accumulator per P and per summed term (GPU code flushes subnormals). These are the
note's kappa * G: each is evaluated on absolute values, so that exact cancellation is no trap.
T's own error is the same expression with its own eps and is added.

Z, Y: roundings have no sign
----------------------------
E adds errors up as if all pushed the same way. Sums that are rounded do not: where numbers have
one sign, those that tensor cores cut off do, and dp - delta, a small difference of large sums,
shows it. A sum of n terms, each rounding at most u sum|x| with variance u^2/3 of that, has an
error of variance at most n u^2/3 (sum|x|)^2; errors of different sums are independent. With
g(n) = sqrt(n/3), elementwise and in first order,
    dp     a = u g(e) X                                            of each pair
    delta  b^2 = (u g(e) X')^2 + sum_e (|dout| u (g(n) + 4) sum_n P K |v|)^2      of each row
    s      c = u g(d) S |dS|                            of each pair, what moves P in dS
    dq     Z^2 = scale^2 [ sum_n (P^2 a^2 + c^2) k^2 + b^2 (sum_n P k)^2
                           + (u g(n) sum_n |dS| |k|)^2 ]
    dk     Z^2 = scale^2 [ sum_m (P^2 (a^2 + b^2) + c^2) q^2 + (u g(m) sum_m |dS| |q|)^2 ]
where dS = P (dp - delta). Y is what may be common to many pairs: roundings of scale, of lse and of
delta's and dS's own, u (4 S + |lse| + 8 + g(n)) |dS|, times |k| or |q|, added up as in E.

W: declared roundings
---------------------
w = eps/2 of the operand dtype, t = half its smallest subnormal (0 for float32 and float64):
    out  sum_n (w P + t) K |v|        dv  sum_m (w P + t) K |dout|
    delta   w |dout| |out| + sum_n (w P + t) X
    dq   |scale| * sum_n [ w |dS_raw| + t + P t' delta's ] |k|;  dk likewise
    dbias, dslope, dscale, dsink: only through delta, P times its W in place of dS
(probabilities and score gradients are rounded once, before their products; delta = dout . out is
formed from the rounded out of rounded probabilities. An unnormalised probability exp(s - running
max) is at least P, so that t is enough.)

*TF32*, where a call asks for it: an operand of a product loses a part of at most z = 2^-10 of
itself (a cut after 11 significant bits; to round takes half of that), two operands z' = 2 z + z^2
of the product. A score is off by at most e = z' S, and with it, normalised or against a given lse,
P by a part of at most r = e + sum_n(P e). Added to W, and for lse to R4:
    out    sum_n P (r + z') K |v|         dv  sum_m P (r + z') K |dout|         lse  sum_n(P e)
    delta  D = sum_n P (r + z') X
    dS     P [ r (X + X' + y) + z' X + D ]
    dS_raw dS t' + P (X + X' + y) 2 t' e / softcap
    dq     |scale| * sum_n [ dS_raw + z' P (X + X' + y) t' ] |k|;  dk, dscale likewise
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from ml_dtypes import finfo

from cuflash import reference
from support import model_flash
from support.problems import FIELDS

#: Elements that a sample has at least.
SAMPLE = 4096
#: Scores of a call from which on its batch entries are looked at one after the other: the system
#: takes longer to provide and to clear larger arrays than it takes to compute them.
TOGETHER = 1 << 20
OUT_RMS, GRADIENT_RMS = 1.25, 1.5
#: Options under which R7 is stated: without them a score is a product and a weight is kept.
PLAIN = {"causal", "offset", "window", "scale", "mask", "kv_lengths", "q_lengths", "enable_gqa"}


@dataclass
class Tensor:
    """One result: truth T, models M and M', bounds E (accumulator) and W (declared roundings)."""

    name: str
    truth: np.ndarray
    model: np.ndarray
    unrounded: np.ndarray
    accumulation: np.ndarray
    rounding: np.ndarray
    dtype: np.dtype
    rms_factor: float


@dataclass
class Forward:
    """What out and lse are compared with; ``lse_error`` bounds what exponents add to R4."""

    out: Tensor
    lse: np.ndarray
    lse_error: np.ndarray
    visible: np.ndarray  # whether a row has a key


class BudgetError(AssertionError):
    """A result outside the budget; the message names the rule and the worst element."""


def sum_error(terms: int) -> float:
    """c(n): how many u * sum|x| a sum of ``terms`` terms may lose."""
    return min(float(terms), 3 * terms**0.5)


class Budget:
    """The budget of one call: `check_forward`, `check_backward`, `check_probe`."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.accumulator = model_flash.accumulator(call.dtype)
        double = self.accumulator == np.float64
        self.truth_dtype = np.dtype(np.longdouble if double else np.float64)
        eps, truth_eps = np.finfo(self.accumulator).eps, np.finfo(self.truth_dtype).eps
        self.u = float(eps / 2 * (1 + truth_eps / eps))
        half = np.dtype(call.dtype).itemsize == 2
        self.w = float(finfo(call.dtype).eps) / 2 if half else 0.0
        self.t = float(finfo(call.dtype).smallest_subnormal) / 2 if half else 0.0
        self.z = (1 + 2.0**-10) ** 2 - 1 if call.tf32 else 0.0  # z' of the derivation
        self.tiny = float(np.finfo(self.accumulator).tiny)
        self.given: tuple[np.ndarray, np.ndarray] | None = None

    @cached_property
    def inputs(self) -> model_flash.Expanded:
        return model_flash.expand(self.call, np.float64)

    @cached_property
    def entries(self) -> tuple[Any, ...]:
        """Calls of the batch entries, where these are many elements and have nothing in common."""
        c = self.call
        scores = math.prod(c.batch) * c.q.shape[-2] * c.k.shape[-2]
        whole = all(a.shape[:-2] == c.batch for a in (c.q, c.k, c.v, c.dout))
        numbered = {"dropout", "score_mod", "mask_mod"} & set(c.options)
        apart = whole and not numbered and not c.option_arrays and set(c.wrt) <= {"q", "k", "v"}
        if not c.batch or not apart or scores < TOGETHER:
            return ()

        def entry(i: tuple[int, ...]) -> Any:
            dlse = None if c.dlse is None else c.dlse[i]
            return c.but(q=c.q[i], k=c.k[i], v=c.v[i], dout=c.dout[i], dlse=dlse)

        return tuple(map(entry, np.ndindex(c.batch)))

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """One result of all batch entries."""

        def stacked(name: str) -> np.ndarray:
            return self.stacked([getattr(tensor, name) for tensor in tensors])

        names = ("truth", "model", "unrounded", "accumulation", "rounding")
        return replace(tensors[0], **{name: stacked(name) for name in names})

    def stacked(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """An array over the whole batch."""
        return np.stack(arrays).reshape(*self.call.batch, *arrays[0].shape)

    @cached_property
    def forward(self) -> Forward:
        """Of all batch entries."""
        if self.entries:
            parts = [Budget(entry).forward for entry in self.entries]
            rows = ([getattr(p, n) for p in parts] for n in ("lse", "lse_error", "visible"))
            return Forward(self.joined([p.out for p in parts]), *map(self.stacked, rows))
        error = (self.mean_error + self.tf32_mean)[..., 0]
        return Forward(self.out, self.truth.lse, error, self.inputs.visible.any(-1))

    @cached_property
    def truth(self) -> Any:
        """The definition's out and lse."""
        c = self.call
        return reference.attention(
            c.q, c.k, c.v, return_lse=True, dtype=self.truth_dtype.type, **c.options
        )

    @cached_property
    def model(self) -> tuple[np.ndarray, np.ndarray]:
        """Model-flash's out and lse."""
        return model_flash.forward(self.model_inputs)

    @cached_property
    def unrounded(self) -> tuple[np.ndarray, np.ndarray]:
        """The same without roundings to the operand dtype."""
        return model_flash.forward(self.model_inputs, rounding=False)

    @cached_property
    def model_inputs(self) -> model_flash.Expanded:
        return model_flash.expand(self.call, self.accumulator)

    @cached_property
    def lse(self) -> np.ndarray:
        """Truth's lse in float64, 0 where it is not finite."""
        return np.nan_to_num(self.truth.lse.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)

    @cached_property
    def p(self) -> np.ndarray:
        """Probabilities, (batch, m, n), 0 where invisible or not finite."""
        x = self.inputs
        scores = np.nan_to_num(model_flash.final_scores(self.call))
        seen = np.isfinite(self.truth.lse)[..., None]
        with np.errstate(over="ignore", invalid="ignore"):
            p = np.exp(scores - self.lse[..., None])
        return np.where(x.visible & seen & np.isfinite(p), p, 0.0)

    @cached_property
    def score_sum(self) -> np.ndarray:
        """S = |scale| sum|q||k|, (batch, m, n)."""
        x = self.inputs
        return abs(x.scale) * (np.abs(x.q) @ np.abs(x.k).swapaxes(-1, -2))

    @cached_property
    def exponent_error(self) -> np.ndarray:
        """e of the derivation, 0 where P is 0 (an error there changes nothing)."""
        x, u = self.inputs, self.u
        with np.errstate(divide="ignore"):
            distance = np.where(self.p > 0, np.abs(np.log(self.p)), 0.0)
        e = (sum_error(x.q.shape[-1]) + 4) * self.score_sum
        added = np.abs(x.bias) + np.abs(x.slopes) * x.distance + np.abs(x.shift)
        e = e + 8 * (x.softcap or 0.0) + 4 * added + 2 * distance
        return np.where(self.p > 0, u * e, 0.0)

    @cached_property
    def sink(self) -> tuple[np.ndarray, np.ndarray]:
        """P and e of the sink, (batch, m, 1); both 0 where there is none."""
        sink, lse = self.inputs.sink, self.lse[..., None]
        there = np.isfinite(sink) & np.isfinite(self.truth.lse)[..., None]
        score = np.where(there, sink, 0.0)
        p = np.where(there, np.exp(np.where(there, score - lse, 0.0)), 0.0)
        return p, np.where(there, self.u * (4 * np.abs(score) + 2 * np.abs(score - lse)), 0.0)

    @cached_property
    def mean_error(self) -> np.ndarray:
        """sum_n(P e), the sink included, (batch, m, 1)."""
        p, e = self.sink
        return (self.p * self.exponent_error).sum(-1, keepdims=True) + p * e

    @cached_property
    def relative_error(self) -> np.ndarray:
        """r of the derivation, (batch, m, n)."""
        return self.exponent_error + self.row_error

    @cached_property
    def row_error(self) -> np.ndarray:
        """What r adds to e, (batch, m, 1)."""
        constant = 2 * sum_error(self.p.shape[-1]) + 16 + 2 * np.abs(self.lse[..., None])
        return self.mean_error + self.u * (constant + 2 * (self.inputs.kept_scale != 1))

    @cached_property
    def factor(self) -> np.ndarray:
        """K of the derivation, (batch, m, n)."""
        return self.inputs.kept * self.inputs.kept_scale

    @cached_property
    def tf32_mean(self) -> np.ndarray:
        """sum_n(P e) of TF32, (batch, m, 1)."""
        return self.z * (self.p * self.score_sum).sum(-1, keepdims=True)

    @cached_property
    def tf32_weight(self) -> np.ndarray:
        """P r of TF32, (batch, m, n)."""
        return self.p * (self.z * self.score_sum + self.tf32_mean)

    @cached_property
    def out(self) -> Tensor:
        x = self.inputs
        v = np.abs(x.v)
        accumulation = ((self.p * self.relative_error + self.tiny * x.visible) * self.factor) @ v
        lost = (self.w + self.z) * self.p + self.t * x.visible + self.tf32_weight
        rounding = (lost * self.factor) @ v
        return Tensor(
            "out", self.truth.out, self.model[0], self.unrounded[0], accumulation, rounding,
            self.call.dtype, OUT_RMS,
        )  # fmt: skip

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """One Tensor per gradient asked for in ``call.wrt``."""
        if self.entries:
            parts = []
            for number, entry in zip(np.ndindex(self.call.batch), self.entries, strict=True):
                part = Budget(entry)
                if self.given is not None:
                    part.given = self.given[0][number], self.given[1][number]
                parts.append(part.gradients)
            return {name: self.joined([part[name] for part in parts]) for name in self.call.wrt}
        c, x, u, w, p = self.call, self.inputs, self.u, self.w, self.p
        wrt = c.wrt
        exact = reference.attention_backward(
            c.dout, c.q, c.k, c.v, self.truth.out, self.truth.lse, dlse=c.dlse, wrt=wrt,
            dtype=self.truth_dtype.type, **c.options,
        )  # fmt: skip
        model = model_flash.backward(self.model_inputs, *(self.given or self.model))
        unrounded = model_flash.backward(self.model_inputs, *self.unrounded, rounding=False)
        q, k, v, dout = (np.abs(a) for a in (x.q, x.k, x.v, x.dout))
        rows, keys, features, values = p.shape[-2], p.shape[-1], q.shape[-1], v.shape[-1]
        r = self.relative_error
        factor = self.factor
        products = factor * (dout @ v.swapaxes(-1, -2))
        mean = (p * products).sum(-1, keepdims=True)
        y = np.abs(x.dlse)[..., None]
        reach = products + mean + y
        delta_error = (p * r * products).sum(-1, keepdims=True)
        ds = p * (
            (r + 4 * u) * reach + u * (sum_error(values) + 2) * (products + mean) + delta_error
        )
        sink_p, sink_e = self.sink
        sink = sink_p * (
            (sink_e + self.row_error + 4 * u) * (mean + y)
            + u * (sum_error(values) + 2) * mean
            + delta_error
        )
        tanh = np.zeros_like(p)
        steep = 0.0
        if x.softcap is not None:
            raw = x.scale * (x.q @ x.k.swapaxes(-1, -2))
            tanh = np.tanh(raw / x.softcap)
            steep = 2 * (sum_error(features) + 4) * self.score_sum / x.softcap * (1 - tanh**2) + 16
        slope = 1 - tanh**2
        draw = ds * slope + p * reach * u * steep
        out = np.abs(np.nan_to_num(self.truth.out.astype(np.float64), posinf=0.0, neginf=0.0))
        delta_w = w * (dout * out).sum(-1, keepdims=True)
        z, weight = self.z, self.tf32_weight
        lost = (w + z) * p + self.t * x.visible + weight
        delta_w = delta_w + (lost * products).sum(-1, keepdims=True)
        ds_w = weight * reach + p * (z * products + delta_w)
        raw_w = slope * (ds_w + z * p * reach)
        if x.softcap is not None:
            raw_w = raw_w + p * reach * 2 * slope * z * self.score_sum / x.softcap
        draw_w = raw_w + w * p * slope * reach + self.t * x.visible
        raw_sum = q @ k.swapaxes(-1, -2)
        flushed = self.tiny * x.visible

        def times(array: np.ndarray, terms: int) -> np.ndarray:
            return array + u * (sum_error(terms) + 4) * p * reach * slope + flushed * (1 + reach)

        scale = abs(x.scale)
        accumulation = {
            "q": lambda: scale * (times(draw, keys) @ k),
            "k": lambda: scale * (times(draw, rows).swapaxes(-1, -2) @ q),
            "v": lambda: (
                ((p * (r + u * sum_error(rows)) + flushed) * factor).swapaxes(-1, -2) @ dout
            ),
            "bias": lambda: ds + flushed * (1 + reach),
            "alibi_slopes": lambda: ((ds + flushed * (1 + reach)) * x.distance).sum((-1, -2)),
            "sink": lambda: (sink + self.tiny * (1 + mean + y))[..., 0].sum(-1),
            "scale": lambda: times(draw, features) * raw_sum,
        }
        rounding = {
            "q": lambda: scale * (draw_w @ k),
            "k": lambda: scale * (draw_w.swapaxes(-1, -2) @ q),
            "v": lambda: (lost * factor).swapaxes(-1, -2) @ dout,
            "bias": lambda: ds_w,
            "alibi_slopes": lambda: (ds_w * x.distance).sum((-1, -2)),
            "sink": lambda: (sink_p * (delta_w + self.tf32_mean * (mean + y)))[..., 0].sum(-1),
            "scale": lambda: raw_w * raw_sum,
        }
        magnitude = {
            "q": lambda: scale * ((p * reach * slope) @ k),
            "k": lambda: scale * ((p * reach * slope).swapaxes(-1, -2) @ q),
            "v": lambda: (p * factor).swapaxes(-1, -2) @ dout,
            "bias": lambda: p * reach,
            "alibi_slopes": lambda: (p * reach * x.distance).sum((-1, -2)),
            "sink": lambda: (sink_p * (mean + y))[..., 0].sum(-1),
            "scale": lambda: p * reach * slope * raw_sum,
        }

        def tensor(name: str) -> Tensor:
            count = x.fold_count(name)
            summed = u * sum_error(count) if count > 1 else 0.0
            bound = accumulation[name]() + summed * magnitude[name]()
            return Tensor(
                FIELDS[name],
                getattr(exact, FIELDS[name]),
                model[name],
                unrounded[name],
                x.fold(name, bound),
                x.fold(name, rounding[name]()),
                c.array(name).dtype,
                GRADIENT_RMS,
            )

        return {name: tensor(name) for name in wrt}

    def check_forward(
        self, out: np.ndarray, lse: np.ndarray | None = None, truth: Any = None
    ) -> None:
        """R1, R2, R4, R5 and R6; ``truth`` replaces T where a property predicts it."""
        own = self.forward
        self._check(own.out if truth is None else _with_truth(own.out, truth.out), out)
        blank = np.asarray(out)[~own.visible]
        if blank.size and (np.any(blank != 0) or np.any(np.signbit(blank))):
            raise BudgetError(f"R5: out of a row with nothing visible is not +0\n{self.call!r}")
        if lse is not None:
            self._check_lse(np.asarray(lse), own.lse if truth is None else truth.lse)

    def check_backward(
        self,
        gradients: Mapping[str, np.ndarray],
        truth: Mapping[str, np.ndarray] | None = None,
        given: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """R1, R2, R5 and R6 of every gradient in ``call.wrt``, given by input name."""
        if given is not None:
            self.given = tuple(a.astype(self.accumulator) for a in given)
        for name, tensor in self.gradients.items():
            expected = tensor if truth is None else _with_truth(tensor, truth[name])
            self._check(expected, gradients[name])
            if truth is None:
                self._check_signs(expected, name, np.asarray(gradients[name]))

    def signless(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Z and Y of the derivation for dq or dk."""
        x, u, p = self.inputs, self.u, self.p
        q, k, v, dout = (np.abs(a) for a in (x.q, x.k, x.v, x.dout))
        rows, keys = p.shape[-2:]

        def g(terms: int) -> float:
            return u * math.sqrt(terms / 3)

        products = dout @ v.swapaxes(-1, -2)
        mean = (p * products).sum(-1, keepdims=True)
        delta = (x.dout * np.nan_to_num(self.truth.out.astype(np.float64))).sum(-1, keepdims=True)
        ds = np.abs(p * (x.dout @ x.v.swapaxes(-1, -2) - delta))
        of_pair = p * g(v.shape[-1]) * products
        of_out = dout * (g(keys) + 4 * u) * (p @ v)
        of_row = (g(v.shape[-1]) * mean) ** 2 + (of_out**2).sum(-1, keepdims=True)
        of_score = g(q.shape[-1]) * self.score_sum * ds
        common = u * (4 * self.score_sum + np.abs(self.lse[..., None]) + 8) + g(keys)
        common = ds * common
        if name == "q":
            square = (of_pair**2 + of_score**2) @ k**2 + of_row * (p @ x.k) ** 2
            square = square + (g(keys) * (ds @ k)) ** 2
            shared = common @ k
        else:
            square = ((of_pair**2 + of_score**2) + p**2 * of_row).swapaxes(-1, -2) @ q**2
            square = square + (g(rows) * (ds.swapaxes(-1, -2) @ q)) ** 2
            shared = common.swapaxes(-1, -2) @ q
        return abs(x.scale) * np.sqrt(square), abs(x.scale) * shared

    def _check_signs(self, tensor: Tensor, name: str, actual: np.ndarray) -> None:
        """R7."""
        c = self.call
        plain = c.dtype == np.float32 and not c.tf32 and c.dlse is None and set(c.options) <= PLAIN
        if name not in ("q", "k") or not plain or c.array(name).dtype != np.float32:
            return  # a gradient that is rounded to 16 bits errs by that
        if actual.shape != getattr(self.inputs, name).shape:
            return
        error = actual.astype(np.float64) - tensor.truth
        if not np.isfinite(error).all() or not _is_sample(error, tensor.rms_factor):
            return
        random, shared = map(_rms, self.signless(name))
        if _rms(error) > 2 * random + shared:
            raise BudgetError(
                f"R7: rms of the error of {tensor.name} is {_rms(error):.3g}, roundings make "
                f"{random:.3g} and {shared:.3g}\n{c!r}"
            )

    def check_probe(self, out: np.ndarray) -> None:
        """R3: with v >= 0 no cancellation can hide an error, so it is bounded relative to T."""
        if np.any(self.inputs.v < 0):
            raise ValueError("a probe needs v >= 0")
        exact = self.truth.out
        eps = float(finfo(self.call.dtype).eps) if self.w else 16 * self.u
        floor = 8 * float(finfo(self.call.dtype).smallest_normal)
        bound = eps * np.abs(exact) + 2 * self.out.accumulation + floor
        self._compare("R3", "out", out, exact, bound)

    def _check(self, tensor: Tensor, actual: np.ndarray) -> None:
        actual = np.asarray(actual)
        if actual.shape != tensor.truth.shape:
            raise BudgetError(
                f"{tensor.name}: shape {actual.shape}, expected {tensor.truth.shape}\n{self.call!r}"
            )
        if not actual.size:
            return
        with np.errstate(over="ignore"):
            finite = np.isfinite(tensor.truth.astype(tensor.dtype))
        self._check_finite(tensor.name, actual, finite)
        if not finite.any():
            return
        wide = tensor.truth.dtype
        zero = np.zeros((), wide)
        truth = np.where(finite, tensor.truth, zero)
        error = np.where(finite, actual.astype(wide) - truth, zero)
        model_error = np.where(finite, tensor.model.astype(wide) - truth, zero)
        ulp = _ulp(np.abs(truth).max(), tensor.dtype)
        limit = tensor.rounding + ulp + tensor.accumulation
        if np.any(np.abs(model_error) > limit):
            self._fail("R6 (model-flash itself)", tensor.name, tensor.model, truth, limit)
        self._compare("R6", tensor.name, actual, truth, limit, finite)
        if not _is_sample(model_error, tensor.rms_factor):
            return
        sharp = 2 * np.abs(model_error).max() + ulp + tensor.accumulation
        self._compare("R1", tensor.name, actual, truth, sharp, finite)
        unrounded_error = np.where(finite, tensor.unrounded.astype(wide) - truth, zero)
        accumulation = np.where(finite, tensor.accumulation, 0)
        self._check_rms(tensor, error, model_error, unrounded_error, accumulation)

    def _check_rms(
        self,
        tensor: Tensor,
        error: np.ndarray,
        model_error: np.ndarray,
        unrounded_error: np.ndarray,
        accumulation: np.ndarray,
    ) -> None:
        c = self.call
        longest = sum_error(max(*c.q.shape[-2:], c.k.shape[-2], c.v.shape[-1]))
        parts = {"whole": ()}
        if error.ndim > 2:
            heads = ((f"head {i}", i) for i in np.ndindex(error.shape[:-2]))
            parts |= {h: i for h, i in heads if _is_sample(model_error[i], tensor.rms_factor)}
        for part, index in parts.items():
            got, model = _rms(error[index]), _rms(model_error[index])
            lost = min(_rms(accumulation[index]), longest * _rms(unrounded_error[index]))
            limit = tensor.rms_factor * model + lost
            if got > limit:
                raise BudgetError(
                    f"R2: rms of the error of {tensor.name} ({part}) is {got:.3g}, allowed "
                    f"{limit:.3g}; model-flash has {model:.3g}\n{self.call!r}"
                )

    def _check_lse(self, actual: np.ndarray, exact: np.ndarray) -> None:
        if actual.shape != exact.shape:
            raise BudgetError(f"lse: shape {actual.shape}, expected {exact.shape}\n{self.call!r}")
        hidden = np.isneginf(exact)
        if np.any(np.isneginf(actual) != hidden):
            where = np.argwhere(np.isneginf(actual) != hidden)[0]
            raise BudgetError(f"R5: lse is -inf or not, wrongly, at {tuple(where)}\n{self.call!r}")
        finite = np.isfinite(exact)
        self._check_finite("lse", actual, finite)
        keys = self.call.k.shape[-2]
        truth = np.where(finite, exact, 0)
        bound = 8 * self.u * np.maximum(1, np.abs(truth)).astype(np.float64)
        bound = bound + self.forward.lse_error + self.u * sum_error(keys)
        self._compare("R4", "lse", actual, truth, bound, finite)

    def _check_finite(self, name: str, actual: np.ndarray, finite: np.ndarray) -> None:
        wrong = np.isfinite(actual.astype(np.float64)) != finite
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            expected = "a finite value" if finite[index] else "a non-finite value"
            raise BudgetError(
                f"R5: {name}{list(index)} is {actual[index]}, expected {expected} "
                f"({int(wrong.sum())} of {wrong.size} positions wrong)\n{self.call!r}"
            )

    def _compare(
        self,
        rule: str,
        name: str,
        actual: np.ndarray,
        truth: np.ndarray,
        bound: np.ndarray,
        finite: np.ndarray | bool = True,
    ) -> None:
        if np.asarray(actual).shape != truth.shape:
            raise BudgetError(f"{name}: shape {actual.shape}, expected {truth.shape}")
        excess = np.where(finite, np.abs(actual.astype(truth.dtype) - truth), 0) > bound
        if excess.any():
            self._fail(rule, name, np.where(finite, actual, 0), truth, bound)

    def _fail(
        self, rule: str, name: str, actual: np.ndarray, truth: np.ndarray, bound: np.ndarray
    ) -> None:
        bound = np.broadcast_to(bound, truth.shape)
        error = np.abs(actual.astype(truth.dtype) - truth)
        ratio = error / np.maximum(bound, np.finfo(np.float64).tiny)
        worst = np.unravel_index(np.argmax(ratio), ratio.shape)
        raise BudgetError(
            f"{rule}: {name}{[int(i) for i in worst]} is {actual[worst]}, expected "
            f"{truth[worst]:.9g}: off by {error[worst]:.3g}, allowed {bound[worst]:.3g}; "
            f"{int((error > bound).sum())} of {error.size} elements are outside\n{self.call!r}"
        )


def _is_sample(model_error: np.ndarray, rms_factor: float) -> bool:
    if model_error.size < SAMPLE:
        return False
    energies = np.square(model_error.astype(np.float64)).sum(-1)
    fourth = float(np.square(energies).sum())
    return fourth > 0 and energies.sum() ** 2 / fourth >= (10 / (rms_factor**2 - 1)) ** 2


def _with_truth(tensor: Tensor, truth: np.ndarray) -> Tensor:
    return replace(tensor, truth=truth)


def _ulp(magnitude: Any, dtype: np.dtype) -> float:
    """Distance of neighbouring numbers of ``dtype`` at ``magnitude``.

    In float32 that to zero is the smallest normal number: GPU code flushes what is smaller (D93).
    """
    info = finfo(dtype)
    least = float(info.smallest_normal if dtype == np.float32 else info.smallest_subnormal)
    if float(magnitude) == 0:
        return least
    exponent = np.floor(np.log2(float(magnitude)))
    return max(float(2.0**exponent) * float(info.eps), least)


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) if array.size else 0.0
