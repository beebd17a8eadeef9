"""Is the plan of the transport example optimal, and would its check notice if it were not?"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import array_device
import colour_transfer
import numpy as np
import optimal_transport
import pytest
from optimal_transport import DensePlan, Plan, first_plan, sinkhorn_step, solve


def clouds(n=40, m=50):
    rng = np.random.default_rng(1)
    return rng.random((n, 3)) - 0.4, 0.7 * rng.random((m, 3)) - 0.3


def plan_matrix(plan):
    """Return P, whose rows sum to 1/n and columns to 1/m in a solution."""
    exponents = plan.scale * plan.x @ plan.y.T - plan.phi[:, None] - plan.psi
    return np.exp(exponents) / exponents.size


def test_steps_are_those_of_the_textbook():
    x, y = clouds()
    rng = np.random.default_rng(2)
    phi, psi = 3 * rng.standard_normal(len(x)), 3 * rng.standard_normal(len(y))
    moved, error = sinkhorn_step(Plan(x, y, 0.05, phi, psi), 1.3)
    wanted, wanted_error = sinkhorn_step(DensePlan(x, y, 0.05, phi, psi), 1.3)
    np.testing.assert_allclose(moved.psi, wanted.psi, rtol=1e-11)
    np.testing.assert_allclose(error, wanted_error, rtol=1e-10)


@pytest.mark.parametrize(
    ("epsilon", "moved"), [(0.05, 0.0), (0.03, 2.0), (0.03, -2.0), (2e-4, 2.0), (2e-4, -2.0)]
)
def test_potentials_of_the_textbook_also_beyond_what_exp_holds(epsilon, moved):
    """Potentials are the textbook's, even where all of a row underflow or an element overflows."""
    x, y = clouds(40, 40)
    phi = psi = np.full(40, moved / epsilon)
    plan, dense = (kind(x, y, epsilon, phi, psi) for kind in (Plan, DensePlan))
    np.testing.assert_allclose(dense.phi_of_psi(), plan.phi_of_psi(), rtol=1e-11)
    np.testing.assert_allclose(dense.psi_of_phi(), plan.psi_of_phi(), rtol=1e-11)
    np.testing.assert_allclose(dense.mean_for(x, y), plan.mean_for(x, y), rtol=1e-9)


@pytest.mark.parametrize("relaxation", [1.0, 1.7])
def test_rows_and_columns_of_the_last_plan(relaxation):
    x, y = clouds()
    plans = list(solve(first_plan(x, y), 0.02, tolerance=1e-5, relaxation=relaxation))
    plan, error = plans[-1]
    p = plan_matrix(plan)
    np.testing.assert_allclose(p.sum(axis=1), 1 / len(x), rtol=1e-12)
    off = abs(p.sum(axis=0) - 1 / len(y)).sum()
    np.testing.assert_allclose(off, error, rtol=1e-6)
    assert 0 < error < 1e-4
    before, row_error = plans[-3]
    p = plan_matrix(before)
    following_error = plans[-2][1]
    np.testing.assert_allclose(abs(p.sum(axis=1) - 1 / len(x)).sum(), following_error, rtol=1e-6)
    assert following_error < 1e-5 <= row_error


def test_the_plan_is_nearly_the_best_assignment():
    """The plan costs at most epsilon log n above the least (Peyre and Cuturi 2019, prop. 4.1)."""
    from scipy.optimize import linear_sum_assignment

    x, y = clouds(60, 60)
    costs = ((x[:, None] - y) ** 2).sum(axis=-1)
    least = costs[linear_sum_assignment(costs)].mean()
    epsilon = 0.003
    *_, (plan, _) = solve(first_plan(x, y), epsilon, tolerance=1e-4, relaxation=1.8)
    found = (plan_matrix(plan) * costs).sum()
    assert 0.99 * least < found < least + epsilon * math.log(60)


def test_another_epsilon_keeps_the_potentials():
    plan = first_plan(*clouds())
    moved = replace(plan, psi=plan.psi + 1).at(0.5)
    g = (plan.y * plan.y).sum(axis=-1) - 0.5 * moved.psi
    np.testing.assert_allclose(g, -2.0, rtol=1e-12)
    *_, (plan, error) = solve(plan, 10.0, tolerance=1e-9)  # above that of the first plan
    assert (plan.epsilon, error < 1e-9) == (10, True)


def sinkhorn_of_logarithms(x, y, epsilon, steps):
    """Return the plan by potentials f and g of a cost matrix, without code of the example."""
    from scipy.special import logsumexp

    kernel = -(np.linalg.norm(x[:, None] - y, axis=-1) ** 2) / epsilon
    g = np.zeros(len(y))
    for _ in range(steps):
        f = math.log(len(y)) - logsumexp(kernel + g, axis=1)
        g = math.log(len(x)) - logsumexp(kernel + f[:, None], axis=0)
    f = math.log(len(y)) - logsumexp(kernel + g, axis=1)
    return np.exp(kernel + f[:, None] + g) / kernel.size


@pytest.mark.long
@pytest.mark.parametrize("kind", [DensePlan, Plan])
def test_the_plan_is_that_of_another_solver(kind):
    x, y = clouds(250, 300)
    wanted = sinkhorn_of_logarithms(x, y, 0.03, 2000)
    np.testing.assert_allclose(wanted.sum(axis=0), 1 / len(y), rtol=1e-9)
    options = {"tolerance": 1e-11, "relaxation": 1.5, "max_steps": 2000}
    *_, (plan, _) = solve(first_plan(x, y, kind=kind), 0.03, **options)
    np.testing.assert_allclose(plan_matrix(plan), wanted, rtol=1e-7, atol=1e-14)
    means = wanted @ y / wanted.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(plan.mean_for(x, y), means, rtol=0, atol=1e-8)


def made_up_photographs():
    rng = np.random.default_rng(3)
    dark, light = rng.random((30, 40, 3)) * 0.5, 0.4 + rng.random((25, 48, 3)) * 0.6
    middle = (dark.mean(axis=(0, 1)) + light.mean(axis=(0, 1))) / 2
    return colour_transfer.Photographs((dark, light), middle)


def assert_other_colours(photographs, painted, atol):
    """Check that each painted image has the mean colour of the other photograph."""
    for after, other in zip(painted, reversed(photographs.images), strict=True):
        np.testing.assert_allclose(after.mean(axis=(0, 1)), other.mean(axis=(0, 1)), atol=atol)


def test_painted_images_have_the_colours_of_the_other():
    photographs = made_up_photographs()
    x, y = photographs.clouds(np, 300, seed=0)
    *_, (plan, _) = solve(first_plan(x, y), 0.01, tolerance=1e-3, relaxation=1.8)
    painted = photographs.painted(array_device.cpu(), plan)
    assert [image.shape for image in painted] == [image.shape for image in photographs.images]
    assert_other_colours(photographs, painted, atol=0.02)


@pytest.mark.full
def test_the_check_notices_wrong_potentials(monkeypatch, capsys):
    given = array_device.cpu(), made_up_photographs(), 0.01, 1e-3
    assert colour_transfer.check(*given)
    right = optimal_transport.key_bias
    monkeypatch.setattr(optimal_transport, "key_bias", lambda potential: right(0.999 * potential))
    assert not colour_transfer.check(*given)
    assert "NOT THE SAME" in capsys.readouterr().out


#: Arguments of a quick run.
FEW = ["--device", "cpu", "--pixels", "200", "--epsilon", "0.02"]


def test_the_program(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    assert colour_transfer.main([*FEW, "--folder", str(tmp_path)]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"china-transported.png", "flower-transported.png", "colour-transfer.jpg"}
    assert ": ok" in capsys.readouterr().out


def test_pictures_are_optional_and_photographs_are_not(tmp_path, monkeypatch, capsys):
    """Pictures may be missing, and photographs may not; both messages name the extra to install."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert colour_transfer.main(FEW) == 2
    assert "pip install '.[examples]'" in capsys.readouterr().err
    monkeypatch.setattr(colour_transfer, "load_photographs", made_up_photographs)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert colour_transfer.main([*FEW, "--folder", str(tmp_path)]) == 0
    assert "pip install '.[examples]'" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert colour_transfer.main([*FEW, "--pixels", "1201"]) == 2
    for option, text in (("--pixels", "0"), ("--epsilon", "nan"), ("--tolerance", "-1")):
        with pytest.raises(SystemExit, match="2"):
            colour_transfer.main(["--device", "cpu", option, text])


@pytest.fixture
def gpu():
    """Return the device, if it has float32 kernels."""
    device = array_device.gpu()
    if not device.serves(np.float32):
        pytest.skip("no float32 kernels for this GPU")
    return device


@pytest.mark.gpu
def test_a_plan_on_the_gpu(gpu):
    assert colour_transfer.check(gpu, made_up_photographs(), 0.01, 1e-3)


@pytest.mark.gpu
@pytest.mark.own_memory
@pytest.mark.slow
def test_every_pixel_of_both_photographs(gpu):
    """Column sums of the whole plan are right, recomputed in float64 without cuflash."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    xp, tolerance, epsilon = gpu.xp, 1e-3, 0.004
    photographs, pool = colour_transfer.load_photographs(), xp.get_default_memory_pool()
    x, y = photographs.clouds(xp, None, seed=0)
    assert len(x) == len(y) == 273_280
    pool.free_all_blocks()
    before = pool.total_bytes()
    plan = colour_transfer.find_plan(gpu, x, y, epsilon, tolerance)
    painted = photographs.painted(gpu, plan)
    assert pool.total_bytes() - before < 10**9  # freed blocks stay in the pool
    x, y, phi, psi = (a.astype(np.float64) for a in (x, y, plan.phi, plan.psi))
    sums = xp.empty_like(psi)
    for start in range(0, len(y), 256):
        part = slice(start, start + 256)
        exponents = 2 / epsilon * (x @ y[part].T) - phi[:, None] - psi[part]
        sums[part] = xp.exp(exponents).sum(axis=0) / len(x)
    assert float(abs(sums - 1).mean()) < tolerance
    assert_other_colours(photographs, painted, atol=0.01)
