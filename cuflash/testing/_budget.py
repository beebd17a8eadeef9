"""Is a result as exact as its arithmetic allows? Every numerical test uses this error budget.

T is the truth: the definition (`cuflash.reference`) on the inputs exactly as stored, in float64, or
longdouble for float64 inputs. M is the model `_model_flash.py`. A is the result under test. No
number below is tuned: each is a property of the arithmetic or follows from the derivation.

The rules, per tensor (out and every gradient)
----------------------------------------------
R1  |A - T| <= 2 * max|M - T| + ulp(max|T|) + E           tensors that are a sample (see below)
R2  rms(A - T) <= 1.25 * rms(M - T) + min(rms(E), c(n) * rms(M' - T))    as R1, whole and per head;
                                                          1.5 for gradients
R3  probe (v one-hot or v >= 0): |A - T| <= eps * |T| + 2 * E + 8 * smallest normal
R4  lse: |A - T| <= 4 * eps_acc * max(1, |T|) + E
R5  rows with nothing visible are +0 with lse = -inf and gradient 0; results are finite exactly
    where the definition, rounded to the dtype, is finite
R7  rms(A - T) <= 2 * rms(Z) + rms(Y)                     dq and dk of float32 that are a sample
R6  |A - T| <= W + ulp(max|T|) + E, and the same for M: no correct arithmetic can be further off.
    So a broken M cannot widen R1, and small tensors, where max|M - T| may be 0 by luck, still
    have a rule

E bounds the error of the accumulator elementwise. W is the worst case of the declared roundings to
the operand dtype. In a large tensor these roundings average out, in A as in M: there R1 and R2 are
the sharp rules. M' is M without any rounding to the operand dtype: one sample of the accumulator's
error, in some order of summation. With n the longest sum, the error of another order is at most
c(n) times as large: a random walk of n roundings against one rounding.

A gradient is a function of given arrays out and lse. M is given the same arrays as A: the rounding
of out changes delta for a whole row at once, and thereby the gradients of all keys, so that two
different roundings of out would count as one sample and not as many.

*Sample.* The rows of a tensor (its last axis) have independent roundings. The energy of a row's
error varies by at most sqrt(2) of its mean, like the square of a single normal variable. With r
rows of equal energy the ratio of two totals varies by sqrt(4 / r), and 5 of these standard
deviations stay below f^2 - 1 for r >= (10 / (f^2 - 1))^2: 316 rows for f = 1.25 and 64 for 1.5. So
R1 and R2 apply to tensors of at least SAMPLE elements with at least this effective number of rows,
which is (sum of energies)^2 / (sum of their squares) for the energies of M - T. A large tensor in
which nearly all rows see nothing, or one key, is not a sample.

E: errors of the accumulator
----------------------------
u = eps/2 of the accumulator. The error of a sum of n terms x_i is at most c(n) * u * sum|x_i|:
n - 1 in the worst case, and 3 * sqrt(n) for roundings of mean 0 (variance at most u^2/3 each, so
this is 5 standard deviations of a random walk; Higham and Mary 2019, theorem 2.8).
c(n) = min(n, 3 sqrt(n)).

*Exponent.* With S = |scale| * sum|q||k|, the error of a score is at most
    e = u * ((c(d) + 4) * S + 8 * softcap + 4 * (|bias| + |slope| * distance) + 2 * |score - lse|)
c(d) S for the dot product, 4 S for rounding scale, its product with log2(e), and the product with
the score; 8 softcap for a tanh computed as 1 - 2/(1 + exp 2x), whose error is absolute; 4 |bias|
for conversion, sum and change of base, the same for ALiBi; the last term for the difference itself.
For the sink s, a score without a product, e = u * (4 |s| + 2 |s - lse|). This bound is kept per
pair (m, n): with one scalar for the whole tensor, a single extreme key (bias -6e4, or finfo.min)
would make the rule useless for all others.

*Probability.* P = exp(score - lse) and sum(exp) share the errors: the relative error of a
normalised weight is at most
    r = e + sum_n(P e) + u * (2 c(n) + 16 + 2 |lse|)          (the sum includes the sink)
(numerator, denominator, both sums over keys, 4 ulp each for exp and for the rescaling by running
maxima, and, for the backward, the rounding of lse when it is stored).

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
plus u * c(count) for sums over broadcast axes and head groups, and the smallest normal number of
the accumulator per P and per summed term (GPU code flushes subnormals). Each term is evaluated on
absolute values, so that exact cancellation does not make the bound too small. T's own error is the
same expression with T's eps and is added.

Z, Y: errors of random sign
---------------------------
E adds errors as if all had the same sign. Rounded sums do not have such errors. Sums that tensor
cores cut off do if the numbers have one sign, and dp - delta, a small difference of large sums,
shows it. A sum of n terms, each rounding at most u sum|x| with variance u^2/3 of that, has an
error of variance at most n u^2/3 (sum|x|)^2; errors of different sums are independent. With
g(n) = sqrt(n/3), elementwise and in first order,
    dp     a = u g(e) X                                            of each pair
    delta  b^2 = (u g(e) X')^2 + sum_e (|dout| u (g(n) + 4) sum_n P K |v|)^2      of each row
    s      c = u g(d) S |dS|                            of each pair, its effect on dS through P
    dq     Z^2 = scale^2 [ sum_n (P^2 a^2 + c^2) k^2 + b^2 (sum_n P k)^2
                           + (u g(n) sum_n |dS| |k|)^2 ]
    dk     Z^2 = scale^2 [ sum_m (P^2 (a^2 + b^2) + c^2) q^2 + (u g(m) sum_m |dS| |q|)^2 ]
where dS = P (dp - delta). Y has the errors that many pairs may have in common: the roundings of
scale, of lse, of delta and of dS, u (4 S + |lse| + 8 + g(n)) |dS|, times |k| or |q|, added as in E.

W: declared roundings
---------------------
w = eps/2 of the operand dtype, t = half its smallest subnormal (0 for float32 and float64):
    out  sum_n (w P + t) K |v|        dv  sum_m (w P + t) K |dout|
    delta   w |dout| |out| + sum_n (w P + t) X
    dq   |scale| * sum_n [ w |dS_raw| + t + P t' (W of delta) ] |k|;  dk likewise
    dbias, dslope, dscale, dsink: only through delta, P times its W in place of dS
(Probabilities and score gradients are rounded once, before their products. delta = dout . out is
computed from the rounded out of rounded probabilities. An unnormalised probability exp(s - running
max) is at least P, so that t is enough.)

*TF32*, if a call allows it: the relative error of an operand of a product is at most z = 2^-10 (a
cut after 11 significant bits; rounding would halve it), so that of the product is at most
z' = 2 z + z^2. The error of a score is at most e = z' S. The relative error that this makes in P,
normalised or with a given lse, is at most r = e + sum_n(P e). Added to W, and for lse to R4:
    out    sum_n P (r + z') K |v|         dv  sum_m P (r + z') K |dout|         lse  sum_n(P e)
    delta  D = sum_n P (r + z') X
    dS     P [ r (X + X' + y) + z' X + D ]
    dS_raw dS t' + P (X + X' + y) 2 t' e / softcap
    dq     |scale| * sum_n [ dS_raw + z' P (X + X' + y) t' ] |k|;  dk, dscale likewise

*Operands of 8 bits* add no rounding of their own: T is computed from the dequantised operands.
Weights, times 2^8, are rounded to float8_e4m3fn: for out w = 2^-4, t = 2^-18. Hopper's tensor cores
sum 32 products x at once: these and the sum so far are cut off 13 bits below the largest of them,
and so is their sum (Xie et al. 2025, MMA-Sim). In a step from sum s to sum s' the error is at most
    2^-13 (33 sqrt(s^2 + sum x^2) + |s'|).
The error of a score is e = |scale| times the sum of this over the steps, in place of z' S. For out,
sums over 128 keys are added in float32, and z' = 4 * 34 * 2^-13.
Gradients are computed from the dequantised arrays and follow the rules of their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash._arrays import Array
from cuflash.testing._bounds import Bounds, Tensor, sum_error
from cuflash.testing._model_flash import finfo

#: The least number of elements of a sample.
SAMPLE = 4096
#: R7 applies to calls with no other options than these: a score is a product, and no weight drops.
PLAIN = {"causal", "offset", "window", "scale", "mask", "kv_lengths", "q_lengths", "enable_gqa"}


class BudgetError(AssertionError):
    """A result outside the budget; the message names the rule and the worst element."""


class Budget(Bounds):
    """The budget of one call: `check_forward`, `check_backward`, `check_probe`."""

    def check_forward(self, out: Array, lse: Array | None = None, truth: Any = None) -> None:
        """Check R1, R2, R4, R5 and R6; ``truth`` replaces T if a property predicts the result."""
        own = self.forward
        self._check(own.out if truth is None else replace(own.out, truth=truth.out), out)
        blank = np.asarray(out)[~own.visible]
        if blank.size and (np.any(blank != 0) or np.any(np.signbit(blank))):
            raise BudgetError(f"R5: out of a row with nothing visible is not +0\n{self.call!r}")
        if lse is not None:
            self._check_lse(np.asarray(lse), own.lse if truth is None else truth.lse)

    def check_backward(
        self,
        gradients: Mapping[str, Array],
        truth: Mapping[str, Array] | None = None,
        given: tuple[Array, Array] | None = None,
    ) -> None:
        """Check R1, R2, R5, R6 and R7 of every gradient in ``call.wrt``, given by input name."""
        if given is not None:
            out, lse = given
            self.given = out.astype(self.accumulator), lse.astype(self.accumulator)
        if self.call.float8:
            Budget(self.call.but(float8=False)).check_backward(gradients, truth, given)
            return
        for name, tensor in self.gradients.items():
            expected = tensor if truth is None else replace(tensor, truth=truth[name])
            self._check(expected, gradients[name])
            if truth is None:
                self._check_signs(expected, name, np.asarray(gradients[name]))

    def _check_signs(self, tensor: Tensor, name: str, actual: Array) -> None:
        """Check R7."""
        c = self.call
        plain = c.dtype == np.float32 and not c.tf32 and c.dlse is None and set(c.options) <= PLAIN
        if name not in ("q", "k") or not plain or c.array(name).dtype != np.float32:
            return  # R7 has no term for the rounding of a gradient to 16 bits
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

    def check_probe(self, out: Array) -> None:
        """Check R3: with v >= 0 nothing cancels, so the error is bounded relative to T."""
        if np.any(self.inputs.v < 0):
            raise ValueError("a probe needs v >= 0")
        exact = self.truth.out
        eps = 2 * self.w or 16 * self.u
        floor = 8 * float(finfo(self.call.dtype).smallest_normal)
        bound = eps * np.abs(exact) + 2 * self.out.accumulation + floor
        self._compare("R3", "out", out, exact, bound)

    def _check(self, tensor: Tensor, actual: Array) -> None:
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
        error: Array,
        model_error: Array,
        unrounded_error: Array,
        accumulation: Array,
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

    def _check_lse(self, actual: Array, exact: Array) -> None:
        if actual.shape != exact.shape:
            raise BudgetError(f"lse: shape {actual.shape}, expected {exact.shape}\n{self.call!r}")
        hidden = np.isneginf(exact)
        if np.any(np.isneginf(actual) != hidden):
            where = np.argwhere(np.isneginf(actual) != hidden)[0]
            raise BudgetError(f"R5: lse is wrongly -inf or not at {tuple(where)}\n{self.call!r}")
        finite = np.isfinite(exact)
        self._check_finite("lse", actual, finite)
        keys = self.call.k.shape[-2]
        truth = np.where(finite, exact, 0)
        bound = 8 * self.u * np.maximum(1, np.abs(truth)).astype(np.float64)
        bound = bound + self.forward.lse_error + self.u * sum_error(keys)
        self._compare("R4", "lse", actual, truth, bound, finite)

    def _check_finite(self, name: str, actual: Array, finite: Array) -> None:
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
        actual: Array,
        truth: Array,
        bound: Array,
        finite: Array | bool = True,
    ) -> None:
        if np.asarray(actual).shape != truth.shape:
            raise BudgetError(f"{name}: shape {actual.shape}, expected {truth.shape}")
        excess = np.where(finite, np.abs(actual.astype(truth.dtype) - truth), 0) > bound
        if excess.any():
            self._fail(rule, name, np.where(finite, actual, 0), truth, bound)

    def _fail(self, rule: str, name: str, actual: Array, truth: Array, bound: Array) -> None:
        bound = np.broadcast_to(bound, truth.shape)
        error = np.abs(actual.astype(truth.dtype) - truth)
        ratio = error / np.maximum(bound, np.finfo(np.float64).tiny)
        worst = np.unravel_index(np.argmax(ratio), ratio.shape)
        raise BudgetError(
            f"{rule}: {name}{[int(i) for i in worst]} is {actual[worst]}, expected "
            f"{truth[worst]:.9g}: off by {error[worst]:.3g}, allowed {bound[worst]:.3g}; "
            f"{int((error > bound).sum())} of {error.size} elements are outside\n{self.call!r}"
        )


def _is_sample(model_error: Array, rms_factor: float) -> bool:
    if model_error.size < SAMPLE:
        return False
    energies = np.square(model_error.astype(np.float64)).sum(-1)
    fourth = float(np.square(energies).sum())
    return fourth > 0 and energies.sum() ** 2 / fourth >= (10 / (rms_factor**2 - 1)) ** 2


def _ulp(magnitude: Any, dtype: np.dtype[Any]) -> float:
    """Distance of neighbouring numbers of ``dtype`` at ``magnitude``.

    At zero in float32 it is the smallest normal number: GPU code flushes smaller ones (D93).
    """
    info = finfo(dtype)
    least = float(info.smallest_normal if dtype == np.float32 else info.smallest_subnormal)
    if float(magnitude) == 0:
        return least
    exponent = np.floor(np.log2(float(magnitude)))
    return max(float(2.0**exponent) * float(info.eps), least)


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) if array.size else 0.0
