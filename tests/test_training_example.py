"""Are the gradients of the training example right, and would its comparison notice if not?"""

from __future__ import annotations

import sys
from dataclasses import replace

import array_device
import numpy as np
import pytest
import train_transformer
import transformer
from train_transformer import Digits, Training, fused

CPU = array_device.cpu()
SMALL = transformer.Shape(seqlen=12, num_layers=2, num_heads=2, head_dim=6, num_classes=4)
SHORT = Training(shape=SMALL, steps=25, batch=16, learning_rate=5e-3)


def made_up_digits(xp=np, shape=SMALL):
    """Return noisy copies of one image per class."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, shape.num_classes, 400)
    images = rng.random((shape.num_classes, shape.seqlen))[labels]
    images = xp.asarray(images + 0.2 * rng.standard_normal(images.shape))
    labels = xp.asarray(labels)
    return Digits(images[:300], labels[:300], images[300:], labels[300:])


def test_central_differences_of_the_whole_model():
    digits = made_up_digits()
    parameters = transformer.initial_parameters(SMALL, seed=2)
    attend = fused(np, np.float64)

    def loss(moved):
        images, labels = digits.images[:5], digits.labels[:5]
        return transformer.evaluate(np, SMALL, moved, images, labels, attend)

    gradient = loss(parameters).gradient
    assert gradient.keys() == parameters.keys()
    rng = np.random.default_rng(4)
    step = 1e-5
    for name, array in parameters.items():
        assert gradient[name].shape == array.shape
        direction = rng.standard_normal(array.shape)
        ahead, behind = (loss(parameters | {name: array + h * direction}).loss
                         for h in (step, -step))  # fmt: skip
        np.testing.assert_allclose(
            (gradient[name] * direction).sum(), (ahead - behind) / (2 * step),
            rtol=1e-6, atol=1e-9, err_msg=name,
        )  # fmt: skip


def test_three_ways_to_attend_agree():
    rng = np.random.default_rng(5)
    q, k, v, dout = rng.standard_normal((4, 2, 9, 3, 8))
    exact = train_transformer.MonteCarlo(np, "float64", np.random.default_rng(0))
    ways = train_transformer.defined(CPU), fused(np, np.float64), train_transformer.erring(exact)
    found = []
    for attend in ways:
        out, pullback = attend(q, k, v)
        found.append((out, *pullback(1e-9 * dout)))
    for ours in found[1:]:
        for array, wanted in zip(ours, found[0], strict=True):
            np.testing.assert_allclose(array, wanted, rtol=1e-12, atol=1e-13 * abs(wanted).max())


def test_small_gradients_come_into_range():
    x = np.array([-3e-9, 1e-9])
    assert train_transformer.power_of_two_above(np, x) == 2.0**-28
    assert train_transformer.power_of_two_above(np, np.zeros(3)) == 1


def test_errors_of_the_model_arithmetic_are_of_the_dtype():
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((200, 64)), rng.standard_normal((64, 200))
    for dtype, unit in (("float32", 2.0**-24), ("bfloat16", 2.0**-8)):
        arithmetic = train_transformer.MonteCarlo(np, dtype, np.random.default_rng(0))
        off = abs(arithmetic.rounded(a) / a - 1)
        assert 0.99 * unit < off.max() <= unit
    # Adding one term after another in float32 errs as the model, which may be a little above.
    total = np.zeros((200, 200), np.float32)
    for column, row in zip(a.T, b, strict=True):
        total += np.float32(column[:, None].astype(np.float32) * row.astype(np.float32))
    exact = a.astype(np.float32).astype(np.float64) @ b.astype(np.float32).astype(np.float64)
    real = np.sqrt(np.mean((total - exact) ** 2))
    model = train_transformer.MonteCarlo(np, "float32", np.random.default_rng(0))
    modelled = np.sqrt(np.mean((model.product(a, b) - a @ b) ** 2))
    assert real / 2 < modelled < 3 * real


def test_adam_by_hand():
    """Adam's first step has the length of the learning rate, the second the mean of its decays."""
    parameters = {"x": np.array([1.0, 1.0])}
    adam = transformer.Adam(np, parameters, 0.1)
    adam.step(parameters, {"x": np.array([5.0, -0.2])})
    np.testing.assert_allclose(parameters["x"], [0.9, 1.1], rtol=1e-6)
    adam.step(parameters, {"x": np.array([-5.0, -0.2])})
    mean = (0.9 * 0.1 * 5 - 0.1 * 5) / (1 - 0.9**2)
    np.testing.assert_allclose(parameters["x"], [0.9 - 0.1 * mean / 5, 1.2], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_curves_agree_and_fall(dtype):
    (found,) = train_transformer.compare(CPU, made_up_digits(), SHORT, [dtype], probes=4)
    assert found.agrees
    assert (found.differences > 0).any()
    assert np.mean(found.ours.losses[-5:]) < 0.5 * found.ours.losses[0]


def test_a_wrong_gradient_leaves_the_curve(monkeypatch):
    """A gradient of k that is 0.1 % too large leaves the curve."""
    right = train_transformer.fused

    def wrong(*given):
        def attend(q, k, v):
            out, pullback = right(*given)(q, k, v)
            return out, lambda dout: [
                f * g for f, g in zip((1, 1.001, 1), pullback(dout), strict=True)
            ]

        return attend

    monkeypatch.setattr(train_transformer, "fused", wrong)
    (found,) = train_transformer.compare(CPU, made_up_digits(), SHORT, ["float32"], probes=4)
    assert not found.agrees


@pytest.mark.long
def test_the_program(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    numbers, picture = tmp_path / "curves.json", tmp_path / "curves.png"
    arguments = ["--device", "cpu", "--steps", "4", "--batch", "8", "--json", str(numbers)]
    assert train_transformer.main([*arguments, "--picture", str(picture)]) == 0
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG")
    assert train_transformer.main(["--draw", str(numbers), "--picture", str(picture)]) == 0
    assert picture.read_bytes() == first
    (row,) = train_transformer.read_comparisons(numbers)
    assert len(row.ours.losses) == 4
    assert not replace(row, allowed=[0.0] * 4).agrees
    assert "the curves agree" in capsys.readouterr().out


def test_digits_without_scikit_learn_name_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert train_transformer.main(["--device", "cpu"]) == 2
    assert "pip install '.[examples]'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [6, 80])
def test_curves_agree_on_the_gpu(head_dim):
    """Curves agree with heads of 6, no multiple of 16 bytes, and of 80, by Hopper's own kernels."""
    from cuflash._launch import plan_cache
    from cuflash._select import hardware
    from support.portable import planned_launchers

    device = array_device.gpu()
    dtypes = [d for d in train_transformer.DTYPES if device.serves(np.dtype(d))]
    assert {"float16", "bfloat16"} <= set(dtypes)
    shape = replace(SMALL, head_dim=head_dim)
    digits, training = made_up_digits(device.xp, shape), replace(SHORT, shape=shape)
    plan_cache.forget()
    for found in train_transformer.compare(device, digits, training, dtypes, probes=4):
        assert found.agrees, found.dtype
    gradients = [step for step in planned_launchers() if "dout" in step.names]
    hopper = any(step.maps is not None for step in gradients)
    assert hopper == (head_dim == 80 and hardware.present().hopper)
