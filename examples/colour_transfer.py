"""How would one photograph look in the colours of another? By optimal transport of all pixels.

The pixels of scikit-learn's two photographs are two clouds of 273,280 colours. The optimal plan
between them would be a matrix of 299 GB in float32. `optimal_transport` needs only O(pixels)
memory: it finds the potentials of the plan with `cuflash.logsumexp`, and applies the plan to the
colours with `cuflash.attention`. On a CPU the potentials are found from a sample of the pixels, and
then applied to all pixels.

    python examples/colour_transfer.py
    python examples/colour_transfer.py --pixels 10000 --epsilon 0.002
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_device import Device, choose_device, cpu
from optimal_transport import DensePlan, Plan, first_plan, solve
from progress import sign_of_life

Array = Any

PHOTOGRAPHS = ("china", "flower")
RELAXATION = 1.8
CHECKED_PIXELS = 400
MEMORY_LIMIT = 10**9


@dataclass(frozen=True)
class Photographs:
    """Two images (height, width, 3) of colours from 0 to 1, and the colour between their means.

    Transport depends on differences of colours only. Relative to this middle colour, products and
    their rounding errors are small.
    """

    images: tuple[np.ndarray, np.ndarray]
    middle: np.ndarray

    def clouds(self, xp: Any, pixels: int | None, seed: int) -> list[Array]:
        """Colours (pixels, 3) of both images in float32: all pixels, or a sample."""
        rng = np.random.default_rng(seed)
        clouds = []
        for image in self.images:
            colours = (image.reshape(-1, 3) - self.middle).astype(np.float32)
            if pixels is not None:
                colours = colours[rng.choice(len(colours), pixels, replace=False)]
            clouds.append(xp.asarray(colours))
        return clouds

    def painted(self, device: Device, plan: Plan) -> list[np.ndarray]:
        """Both images, with the colours to which the plan transports theirs."""
        xp = device.xp
        found = []
        for image, towards in zip(self.images, (plan, plan.transposed()), strict=True):
            points = xp.asarray((image.reshape(-1, 3) - self.middle).astype(np.float32))
            colours = device.to_host(towards.mean_for(points, towards.y))
            found.append(np.clip(colours + self.middle, 0, 1).reshape(image.shape))
        return found


def load_photographs() -> Photographs:
    """Read the two photographs that are part of scikit-learn."""
    try:
        from sklearn.datasets import load_sample_image
    except ImportError as error:
        text = "the photographs are scikit-learn's: pip install '.[examples]'"
        raise ImportError(text) from error
    first, second = (load_sample_image(f"{name}.jpg") / 255 for name in PHOTOGRAPHS)
    middle = (first.mean(axis=(0, 1)) + second.mean(axis=(0, 1))) / 2
    return Photographs((first, second), middle)


def check(device: Device, photographs: Photographs, epsilon: float, tolerance: float) -> bool:
    """Compare transported colours of a small sample with those of a dense solver in float64."""
    x, y = photographs.clouds(device.xp, CHECKED_PIXELS, seed=1)
    options = {"relaxation": RELAXATION, "tolerance": tolerance}
    plans = list(solve(first_plan(x, y), epsilon, **options))
    plan, _ = plans[-1]
    x64, y64 = (device.to_host(z).astype(np.float64) for z in (x, y))
    steps_at_last = sum(one.epsilon == epsilon for one, _ in plans) - 1
    options |= {"tolerance": 0.0, "max_steps": steps_at_last}
    *_, (dense, _) = solve(first_plan(x64, y64, kind=DensePlan), epsilon, **options)
    off = np.abs(device.to_host(plan.mean_for(x, y)) - dense.mean_for(x64, y64)).max()
    allowed = rounding(dense, len(plans))
    verdict = "ok" if off <= allowed else "NOT THE SAME"
    print(
        f"  check     {CHECKED_PIXELS} pixels of each against a dense solver in float64:"
        f"\n            colours differ by {off:.0e}, {allowed:.0e} are allowed: {verdict}"
    )
    return bool(off <= allowed)


def rounding(plan: Plan, steps: int) -> float:
    """The error of a colour that float32 may cause after a number of steps.

    A step rounds exponents, whose error depends on the size of their two terms. These errors add up
    in the potentials as a random walk. A mean colour then changes by the error of the exponents
    times the diameter of the cloud of colours.
    """
    radius = max(float(np.linalg.norm(z, axis=-1).max()) for z in (plan.x, plan.y))
    largest = plan.scale * radius**2 + max(abs(plan.phi).max(), abs(plan.psi).max())
    return float(2.0**-24 * largest * math.sqrt(steps) * 2 * radius)


def find_plan(device: Device, x: Array, y: Array, epsilon: float, tolerance: float) -> Plan:
    """Find the plan; print its error and the speed."""
    start = time.perf_counter()
    options = {"tolerance": tolerance, "relaxation": RELAXATION}
    with sign_of_life(f"Sinkhorn's steps, {len(x):,} x {len(y):,} pixels"):
        last = deque(enumerate(solve(first_plan(x, y), epsilon, **options), start=1), maxlen=1)
    ((steps, (plan, error)),) = last
    device.synchronize()
    seconds = time.perf_counter() - start
    pairs = 2 * steps * len(x) * len(y)
    print(
        f"  plan      {len(x):,} x {len(y):,} pixels, epsilon {epsilon}: {steps} steps in"
        f" {seconds:.1f} s\n            ({pairs / seconds / 1e9:.2f} billion pairs a second);"
        f" {100 * error:.3f} % of the mass lies in the wrong columns"
    )
    return plan


def show_memory(device: Device, pixels: int) -> bool:
    """Print the memory that the GPU's pool took in all. NumPy keeps no such record."""
    if not device.is_gpu:
        return True
    taken = device.xp.get_default_memory_pool().total_bytes()
    print(
        f"  memory    {taken / 1e9:.2f} GB of the GPU in all;"
        f" the plan as a matrix would take {4 * pixels**2 / 1e9:.0f} GB"
    )
    return bool(taken < MEMORY_LIMIT)


def draw(photographs: Photographs, painted: Sequence[np.ndarray], path: Path) -> None:
    """Draw both photographs, each beside its version in the colours of the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8.6), layout="constrained")
    rows = zip(axes, PHOTOGRAPHS, reversed(PHOTOGRAPHS), photographs.images, painted, strict=True)
    for line, name, other, before, after in rows:
        titles = (name, f"{name} in the colours of {other}")
        for axis, image, title in zip(line, (before, after), titles, strict=True):
            axis.imshow(image)
            axis.set_title(title, fontsize=18)
            axis.set_axis_off()
    figure.savefig(path, dpi=90, pil_kwargs={"quality": 85})
    plt.close(figure)


def positive(number: Callable[[str], float]) -> Callable[[str], float]:
    """An argparse type: an int or a float above 0."""

    def parse_one(text: str) -> float:
        value = number(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"got {text}, expected a positive number")
        return value

    parse_one.__name__ = number.__name__  # argparse shows this name if the text is not a number
    return parse_one


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Transports the colours of two photographs into each other, by attention."
    )
    parser.add_argument(
        "--pixels",
        type=positive(int),
        help="pixels of each that the plan is between (default: 4,000 on a CPU, all on a GPU)",
    )
    parser.add_argument(
        "--epsilon", type=positive(float), default=0.004, help="in squared colours from 0 to 1"
    )
    parser.add_argument(
        "--tolerance",
        type=positive(float),
        default=1e-3,
        help="mass that may lie in the wrong place",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--folder", type=Path, default=Path(), help="where pictures are written")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0: it agrees with the dense solver, 1: it does not, 2: it cannot run."""
    arguments = parse(argv)
    try:
        return run(arguments)
    except (ValueError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    device = choose_device(arguments.device)
    if device.is_gpu and not device.serves(np.float32):
        if arguments.device == "gpu":
            raise RuntimeError("cuflash has no float32 kernels for this GPU")
        device = cpu(" (no float32 kernels for this GPU)")
    print(f"  device    {device.description}")
    photographs = load_photographs()
    pixels = arguments.pixels
    if pixels is None and not device.is_gpu:
        pixels = 4000
    most = min(image.size // 3 for image in photographs.images)
    if pixels is not None and pixels > most:
        raise ValueError(f"--pixels: got {pixels:,}, expected at most {most:,}, which there are")
    agreed = check(device, photographs, arguments.epsilon, arguments.tolerance)
    x, y = photographs.clouds(device.xp, pixels, seed=0)
    plan = find_plan(device, x, y, arguments.epsilon, arguments.tolerance)
    start = time.perf_counter()
    with sign_of_life("painting every pixel"):
        painted = photographs.painted(device, plan)
    seconds = time.perf_counter() - start
    print(f"  painted   2 x {painted[0].size // 3:,} pixels in {seconds:.1f} s")
    agreed &= show_memory(device, len(x))
    try:
        write_pictures(photographs, painted, arguments.folder)
    except ImportError:
        print("  skipped   pictures, which are Matplotlib's: pip install '.[examples]'")
    return 0 if agreed else 1


def write_pictures(photographs: Photographs, painted: Sequence[np.ndarray], folder: Path) -> None:
    """Write both photographs in the colours of the other, and the figure."""
    from matplotlib import image as files

    folder.mkdir(parents=True, exist_ok=True)
    draw(photographs, painted, folder / "colour-transfer.jpg")
    for name, image in zip(PHOTOGRAPHS, painted, strict=True):
        files.imsave(folder / f"{name}-transported.png", image)
    print(f"  pictures  in {folder.resolve()}")


if __name__ == "__main__":
    sys.exit(main())
