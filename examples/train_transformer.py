"""Does a transformer with attention by cuflash train as it would with exact gradients?

A small transformer learns the digits of scikit-learn. All gradients are written out on arrays, and
cuflash computes attention and its gradient. The same model is trained on the same batches with
exact attention (`cuflash.reference` in float64), and the two loss curves are compared step by step.

    python examples/train_transformer.py
    python examples/train_transformer.py --dtype bfloat16 --picture curve.png

How much may the curves differ? Later steps amplify the rounding errors of attention, and only
training can tell by how much. So the model is trained a few more times in Monte Carlo arithmetic
(Parker 1997): in float64, with a random error wherever attention in the given dtype rounds. One
deviation is the root mean square of the resulting change of the loss, or its largest value so far.
Eight deviations are allowed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import transformer
from array_device import Device, choose_device
from progress import sign_of_life
from transformer import Array, Attend, Parameters, Pullback

import cuflash

SEQUENCE_BEFORE_HEADS = [(-3, -1)] * 4
DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Another run exceeds eight deviations of four runs once in 750 (Student's t distribution).
PROBES = 4
ALLOWED_DEVIATIONS = 8.0


@dataclass(frozen=True)
class Digits:
    """Images (number, 64) with pixels from 0 to 1, and labels, for training and for the test."""

    images: Array
    labels: Array
    test_images: Array
    test_labels: Array


@dataclass(frozen=True)
class Training:
    """The settings of a training; the seed decides parameters and batches."""

    shape: transformer.Shape = field(default_factory=transformer.Shape)
    steps: int = 120
    batch: int = 32
    learning_rate: float = 2e-3
    seed: int = 1


@dataclass(frozen=True)
class Curve:
    """The loss of each step, and the share of test images with the right answer."""

    losses: list[float]
    accuracy: float


@dataclass(frozen=True)
class Comparison:
    """A training with attention in one dtype, and the same training by the definition."""

    dtype: str
    device: str
    ours: Curve
    definition: Curve
    seconds: float  # of the training by cuflash
    allowed: list[float]  # largest difference of the losses, for each step

    @property
    def differences(self) -> np.ndarray:
        """Differences of the losses, for each step."""
        return np.abs(np.subtract(self.ours.losses, self.definition.losses))

    @property
    def agrees(self) -> bool:
        """Whether the difference is allowed in every step."""
        return bool((self.differences <= self.allowed).all())


def load_digits(xp: Any, num_tests: int = 360) -> Digits:
    """Read the 1,797 digits of scikit-learn, in a random order."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ImportError("the digits are scikit-learn's: pip install '.[examples]'") from error
    found = load()
    order = np.random.default_rng(0).permutation(len(found.target))
    images, labels = xp.asarray(found.data[order] / 16), xp.asarray(found.target[order])
    training, tests = slice(num_tests, None), slice(num_tests)
    return Digits(images[training], labels[training], images[tests], labels[tests])


# --- three ways to attend ------------------------------------------------------------------------


def fused(xp: Any, dtype: Any) -> Attend:
    """Attention by cuflash on operands rounded to ``dtype``."""

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Pullback]:
        rounded = [x.astype(dtype) for x in (q, k, v)]
        out, pullback = cuflash.attention_vjp(*rounded, axes=SEQUENCE_BEFORE_HEADS)

        def back(dout: Array) -> tuple[Array, ...]:
            # The gradient of a mean over a batch is small: a power of two scales it for float16.
            unit = power_of_two_above(xp, dout)
            gradients = pullback((dout / unit).astype(dtype))
            return tuple(
                g.astype(dout.dtype) * unit for g in (gradients.dq, gradients.dk, gradients.dv)
            )

        return out.astype(q.dtype), back

    return attend


def power_of_two_above(xp: Any, x: Array) -> Array:
    """The least power of two above every entry; 1 if all entries are 0."""
    _, exponent = xp.frexp(abs(x).max())
    return xp.ldexp(xp.ones((), x.dtype), exponent)


def defined(device: Device) -> Attend:
    """Attention by its definition, dense and in float64, on the CPU."""

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Pullback]:
        operands = [device.to_host(x) for x in (q, k, v)]
        out, pullback = cuflash.reference.attention_vjp(*operands, axes=SEQUENCE_BEFORE_HEADS)

        def back(dout: Array) -> tuple[Array, ...]:
            gradients = pullback(device.to_host(dout))
            return tuple(map(device.xp.asarray, (gradients.dq, gradients.dk, gradients.dv)))

        return device.xp.asarray(out), back

    return attend


@dataclass(frozen=True)
class MonteCarlo:
    """Float64 arithmetic with random errors as large as those that ``dtype`` may have."""

    xp: Any
    dtype: str
    rng: Any

    def rounded(self, x: Array) -> Array:
        """Add a random error of up to half a unit in the last place of ``dtype`` to each number."""
        return x * (1 + float(ml_dtypes.finfo(self.dtype).eps) / 2 * self._noise(x.shape))

    def product(self, a: Array, b: Array) -> Array:
        """A matrix product with the errors of sums in float32 (in float64 for float64).

        Partial sums of K terms grow as a random walk, and each of them is rounded. For terms with
        root mean square t, the errors add up to u t K / sqrt(2).
        """
        accumulator = ml_dtypes.finfo(np.promote_types(self.dtype, np.float32))
        walk = self.xp.sqrt(a.shape[-1] / 2 * (a**2 @ b**2))
        return a @ b + float(accumulator.eps) / 2 * walk * self._noise(walk.shape)

    def _noise(self, shape: tuple[int, ...]) -> Array:
        return 2 * self.rng.random(shape) - 1


def erring(arithmetic: MonteCarlo) -> Attend:
    """Dense attention in an arithmetic with random errors."""
    xp, rounded, product = arithmetic.xp, arithmetic.rounded, arithmetic.product

    def heads_first(x: Array) -> Array:
        return x.swapaxes(1, 2)

    def transposed(x: Array) -> Array:
        return x.swapaxes(-1, -2)

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Pullback]:
        q, k, v = (rounded(heads_first(x)) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5
        scores = scale * product(q, transposed(k))
        weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        p = rounded(weights)
        out = rounded(product(p, v))

        def back(dout: Array) -> tuple[Array, ...]:
            dout = rounded(heads_first(dout))
            delta = (dout * out).sum(axis=-1, keepdims=True)
            dscores = rounded(weights * (product(dout, transposed(v)) - delta))
            dq = scale * product(dscores, k)
            dk = scale * product(transposed(dscores), q)
            dv = product(transposed(p), dout)
            return tuple(heads_first(rounded(x)) for x in (dq, dk, dv))

        return heads_first(out), back

    return attend


# --- training ------------------------------------------------------------------------------------


def train(
    xp: Any, digits: Digits, training: Training, attend: Attend
) -> tuple[list[float], Parameters]:
    """Train from the seed's parameters on its batches; return losses and parameters (float64)."""
    shape = training.shape
    parameters = transformer.initial_parameters(shape, training.seed, xp)
    adam = transformer.Adam(xp, parameters, training.learning_rate)
    rng = np.random.default_rng(training.seed)
    losses = []
    for _ in range(training.steps):
        chosen = xp.asarray(rng.integers(0, len(digits.labels), training.batch))
        images, labels = digits.images[chosen], digits.labels[chosen]
        step = transformer.evaluate(xp, shape, parameters, images, labels, attend)
        adam.step(parameters, step.gradient)
        losses.append(step.loss)
    return losses, parameters


def train_and_test(
    xp: Any, digits: Digits, training: Training, attend: Attend, label: str
) -> Curve:
    """Train, then classify the test images."""
    with sign_of_life(f"{training.steps} steps, {label}"):
        losses, parameters = train(xp, digits, training, attend)
    right = 0.0
    for first in range(0, len(digits.test_labels), training.batch):
        part = slice(first, first + training.batch)
        images, labels = digits.test_images[part], digits.test_labels[part]
        read = transformer.evaluate(xp, training.shape, parameters, images, labels, attend)
        right += read.accuracy * len(labels)
    return Curve(losses, right / len(digits.test_labels))


def compare(
    device: Device, digits: Digits, training: Training, dtypes: Sequence[str], probes: int
) -> list[Comparison]:
    """Train by the definition, by cuflash in each dtype, and in Monte Carlo arithmetic."""
    xp = device.xp
    definition = train_and_test(
        xp, digits, training, defined(device), "attention as float64 defines it"
    )
    comparisons = []
    for dtype in dtypes:
        label = f"attention by cuflash in {dtype}"
        start = time.perf_counter()
        ours = train_and_test(xp, digits, training, fused(xp, np.dtype(dtype)), label)
        seconds = time.perf_counter() - start
        deviations = []
        for seed in range(probes):
            arithmetic = MonteCarlo(xp, dtype, xp.random.default_rng(seed))
            with sign_of_life(f"what {dtype} may round, {seed + 1} of {probes}"):
                losses, _ = train(xp, digits, training, erring(arithmetic))
            deviations.append(np.subtract(losses, definition.losses))
        deviation = np.maximum.accumulate(np.sqrt(np.mean(np.square(deviations), axis=0)))
        allowed = (ALLOWED_DEVIATIONS * deviation).tolist()
        comparisons.append(
            Comparison(dtype, device.description, ours, definition, seconds, allowed)
        )
    return comparisons


# --- output --------------------------------------------------------------------------------------


def show(comparison: Comparison) -> None:
    """Print a table of some steps."""
    ours, definition = comparison.ours, comparison.definition
    print(f"\n  attention in {comparison.dtype}")
    print(f"    {'step':>6}{'loss':>12}{'float64':>12}{'difference':>14}{'allowed':>10}")
    steps = len(ours.losses)
    for step in sorted({*range(0, steps, max(steps // 6, 1)), steps - 1}):
        print(
            f"    {step + 1:6}{ours.losses[step]:12.6f}{definition.losses[step]:12.6f}"
            f"{comparison.differences[step]:14.1e}{comparison.allowed[step]:10.0e}"
        )
    closest = float(np.max(comparison.differences / comparison.allowed))
    print(
        f"    {100 * ours.accuracy:.1f} % of the test images are read right"
        f" ({100 * definition.accuracy:.1f} % by float64); {comparison.seconds:.1f} s\n"
        f"    {'within' if comparison.agrees else 'NOT WITHIN'} what rounding explains:"
        f" at most {closest:.2f} of it"
    )


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw the loss curves, with their differences below."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2, len(comparisons), figsize=(4.6 * len(comparisons), 5.6), sharex="col", sharey="row",
        squeeze=False, height_ratios=(3, 2), layout="constrained",
    )  # fmt: skip
    for comparison, (above, below) in zip(comparisons, axes.T, strict=True):
        steps = np.arange(1, len(comparison.allowed) + 1)
        above.plot(steps, comparison.definition.losses, color="0.7", linewidth=3.5,
                   label="attention by its definition, float64")  # fmt: skip
        above.plot(steps, comparison.ours.losses, color="C0", linewidth=1,
                   label=f"attention by cuflash, {comparison.dtype}")  # fmt: skip
        above.set_title(f"{comparison.dtype}\n{comparison.device.partition(' (')[0]}", fontsize=9)
        above.legend(frameon=False, fontsize=8)
        below.semilogy(steps, comparison.differences, ".", color="C0", markersize=3,
                       label="difference of the losses")  # fmt: skip
        below.semilogy(steps, comparison.allowed, color="C3", linewidth=1,
                       label="what rounding explains")  # fmt: skip
        below.set_xlabel("step")
    axes[1, 0].legend(framealpha=0.8, edgecolor="none", fontsize=8, loc="lower right")
    axes[0, 0].set_ylabel("loss in nats")
    axes[1, 0].set_ylabel("difference in nats")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A small transformer learns digits with attention by cuflash; its loss curve "
        "is compared with that of exact gradients."
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        nargs="+",
        help="dtypes of attention (default: float32 on a CPU, what is served on a GPU)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--steps", type=int, default=Training.steps)
    parser.add_argument("--batch", type=int, default=Training.batch)
    parser.add_argument(
        "--probes", type=int, default=PROBES, help="trainings in Monte Carlo arithmetic"
    )
    parser.add_argument("--picture", type=Path, help="write the curves as a picture")
    parser.add_argument("--json", type=Path, help="write the curves as numbers")
    parser.add_argument(
        "--draw", type=Path, nargs="+", help="draw the curves of such files; trains nothing"
    )
    return parser.parse_args(argv)


def read_comparisons(path: Path) -> list[Comparison]:
    """Read a file that --json wrote."""
    return [
        Comparison(**row | {name: Curve(**row[name]) for name in ("ours", "definition")})
        for row in json.loads(path.read_text())
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0: the curves agree, 1: they do not, 2: it cannot run."""
    arguments = parse(argv)
    try:
        if arguments.draw:
            if arguments.picture is None:
                raise ValueError("--draw: got no --picture, expected the file to draw into")
            found = [comparison for path in arguments.draw for comparison in read_comparisons(path)]
            draw(found, arguments.picture)
            return 0
        return run(arguments)
    except (ValueError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    device = choose_device(arguments.device)
    print(f"  device    {device.description}")
    digits = load_digits(device.xp)
    training = Training(steps=arguments.steps, batch=arguments.batch)
    dtypes = arguments.dtype or [d for d in DTYPES if device.is_gpu and device.serves(np.dtype(d))]
    shape = training.shape
    print(
        f"  model     {shape.num_layers} layers, {shape.num_heads} heads of {shape.head_dim},"
        f" {shape.seqlen} pixels; {training.steps} steps of {training.batch} images"
    )
    comparisons = compare(device, digits, training, dtypes or ["float32"], arguments.probes)
    for comparison in comparisons:
        show(comparison)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(c) for c in comparisons]) + "\n")
    if arguments.picture:
        draw(comparisons, arguments.picture)
        print(f"\n  picture   {arguments.picture}")
    agreed = all(comparison.agrees for comparison in comparisons)
    print(f"\n  {'the curves agree' if agreed else 'THE CURVES DO NOT AGREE'};"
          f" {time.perf_counter() - start:.0f} s in total")  # fmt: skip
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
