"""What is the optimal plan between two clouds of points, if its matrix is too large to store?

Entropic optimal transport (Cuturi 2013, https://arxiv.org/abs/1306.0895) between n points x and
m points y of equal weights, at the cost |x - y|^2, has the plan

    P_ij = exp((f_i + g_j - |x_i - y_j|^2) / epsilon) / (n m),   rows sum to 1/n, columns to 1/m.

The squares |x_i|^2 and |y_j|^2 can be part of the potentials. With phi_i = (|x_i|^2 - f_i) /
epsilon and psi_j = (|y_j|^2 - g_j) / epsilon,

    n m P_ij = exp(2 x_i.y_j / epsilon - phi_i - psi_j).

The phi for which the rows have the right sums is a `logsumexp` with the other potential as a bias
of keys:

    phi_i = log sum_j exp(2 x_i.y_j / epsilon - psi_j - log m).

This is Sinkhorn's step. The plan is applied to values of y by `attention` with the same bias.
Neither stores an n x m matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cuflash

Array = Any


@dataclass(frozen=True)
class Plan:
    """A plan between x (n, d) and y (m, d), by its potentials phi (n,) and psi (m,)."""

    x: Array
    y: Array
    epsilon: float
    phi: Array
    psi: Array

    @property
    def scale(self) -> float:
        """The factor of x.y in the exponent."""
        return 2 / self.epsilon

    def phi_of_psi(self) -> Array:
        """Return the phi for which the rows have the right sums."""
        return cuflash.logsumexp(self.x, self.y, scale=self.scale, bias=key_bias(self.psi))

    def psi_of_phi(self) -> Array:
        """Return the psi for which the columns have the right sums."""
        return cuflash.logsumexp(self.y, self.x, scale=self.scale, bias=key_bias(self.phi))

    def mean_for(self, points: Array, values: Array) -> Array:
        """Return means of the values (m, e) of y, with the weights of the plan for any points."""
        return cuflash.attention(points, self.y, values, scale=self.scale, bias=key_bias(self.psi))

    def transposed(self) -> Plan:
        """Return the plan from y to x."""
        return replace(self, x=self.y, y=self.x, phi=self.psi, psi=self.phi)

    def at(self, epsilon: float) -> Plan:
        """Return the plan with the same f and g and another epsilon."""
        # phi = (|x|^2 - f) / epsilon: only the denominator changes.
        ratio = self.phi.dtype.type(self.epsilon / epsilon)
        return replace(self, epsilon=epsilon, phi=ratio * self.phi, psi=ratio * self.psi)


class DensePlan(Plan):
    """The same plan computed as in textbooks, with f, g and a matrix of costs."""

    def phi_of_psi(self) -> Array:
        """Return the phi for which the rows have the right sums."""
        exponents = self._exponents(self.x)
        largest = exponents.max(axis=-1)
        means = np.exp(exponents - largest[:, None]).mean(axis=-1)
        f = -self.epsilon * (largest + np.log(means))
        return ((self.x**2).sum(axis=-1) - f) / self.epsilon

    def psi_of_phi(self) -> Array:
        """Return the psi for which the columns have the right sums."""
        return self.transposed().phi_of_psi()

    def mean_for(self, points: Array, values: Array) -> Array:
        """Return means of the values (m, e) of y, with the weights of the plan for any points."""
        exponents = self._exponents(points)
        weights = np.exp(exponents - exponents.max(axis=-1, keepdims=True))
        return weights @ values / weights.sum(axis=-1, keepdims=True)

    def _exponents(self, points: Array) -> Array:
        """Return (g - costs) / epsilon, which may be out of range for `exp` if epsilon is small."""
        costs = ((points[:, None] - self.y) ** 2).sum(axis=-1)
        g = (self.y**2).sum(axis=-1) - self.epsilon * self.psi
        return (g - costs) / self.epsilon


def key_bias(potential: Array) -> Array:
    """Return a bias (1, keys), which is the same for every query."""
    return (-potential - potential.dtype.type(math.log(len(potential))))[None]


def first_plan(x: Array, y: Array, epsilon: float = 2.0, kind: type[Plan] = Plan) -> Plan:
    """Start from f = 0 and g = 0."""
    phi, psi = ((z * z).sum(axis=-1) / z.dtype.type(epsilon) for z in (x, y))
    return kind(x, y, epsilon, phi, psi)


def sinkhorn_step(plan: Plan, relaxation: float = 1.0) -> tuple[Plan, float]:
    """Return the next plan, and the mass that was in the wrong rows of the given plan.

    A relaxation between 1 and 2 makes each step larger, so that fewer steps are needed if epsilon
    is small (Thibault et al. 2017, https://arxiv.org/abs/1711.01851).
    """
    over = plan.phi.dtype.type(relaxation)
    missing = plan.phi_of_psi() - plan.phi
    # Row i sums to exp(missing_i) / n.
    error = float(abs(np.expm1(missing)).mean())
    plan = replace(plan, phi=plan.phi + over * missing)
    plan = replace(plan, psi=plan.psi + over * (plan.psi_of_phi() - plan.psi))
    return plan, error


def solve(
    plan: Plan,
    epsilon: float,
    *,
    tolerance: float,
    relaxation: float = 1.0,
    steps_before: int = 3,
    max_steps: int = 500,
) -> Iterator[tuple[Plan, float]]:
    """Yield plans and their errors until less than ``tolerance`` of the mass is in wrong rows.

    A few steps are made with the plan's own epsilon, then with smaller and smaller ones down to
    ``epsilon``: each finds a good start for the next. At the end the plan is yielded with the right
    sums of rows; its error is then the mass in the wrong columns.
    """
    halvings = max(0, math.ceil(math.log2(plan.epsilon / epsilon)))
    for value in np.geomspace(plan.epsilon, epsilon, halvings + 1).tolist()[:-1]:
        plan = plan.at(value)
        for _ in range(steps_before):
            plan, error = sinkhorn_step(plan)
            yield plan, error
    plan = plan.at(epsilon)
    for _ in range(max_steps):
        plan, error = sinkhorn_step(plan, relaxation)
        yield plan, error
        if error < tolerance:
            break
    plan = replace(plan, phi=plan.phi_of_psi())
    yield plan, float(abs(np.expm1(plan.psi_of_phi() - plan.psi)).mean())
