"""Does the example write the same letters with a cache as without?"""

from __future__ import annotations

import json
from pathlib import Path

import array_device
import generate_text
import numpy as np
import pytest
import transformer

TEXT = "the cat sat on the mat. the dog lay on the log. the owl sat in the tree. " * 4


@pytest.fixture(scope="module")
def writer() -> generate_text.Writer:
    return generate_text.trained(array_device.cpu(), TEXT, steps=40, seqlen=24, batch=8)


def test_the_gradient_is_that_of_the_loss() -> None:
    """The gradient is right: along it the loss changes by its squared length."""
    shape = transformer.Shape(num_layers=1, num_heads=2, head_dim=4, num_classes=5)
    writer = generate_text.Writer(np, "abcde", shape, seed=3)
    writer.parameters = {n: a.astype(np.float64) for n, a in writer.parameters.items()}
    numbers = np.random.default_rng(0).integers(0, 5, (3, 9))
    loss, gradient = writer.loss_and_gradient(numbers[:, :-1], numbers[:, 1:])
    assert set(gradient) == set(writer.parameters)
    squared = sum(float((g * g).sum()) for g in gradient.values())
    losses = []
    for step in (-1e-5, 1e-5):
        moved = {n: a + step * gradient[n] for n, a in writer.parameters.items()}
        other = generate_text.Writer(np, "abcde", shape, seed=3)
        other.parameters = moved
        losses.append(other.loss_and_gradient(numbers[:, :-1], numbers[:, 1:])[0])
    assert (losses[1] - losses[0]) / 2e-5 == pytest.approx(squared, rel=1e-4)
    assert loss == pytest.approx(sum(losses) / 2, rel=1e-6)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_cache_changes_no_letter(writer: generate_text.Writer, batch: int) -> None:
    starts = np.stack([writer.numbers(TEXT[i : i + 10]) for i in range(batch)])
    kept, seconds = writer.with_cache(starts, 30)
    plain, _ = writer.without_cache(starts, 30)
    np.testing.assert_array_equal(kept, plain)
    np.testing.assert_array_equal(kept[:, :10], starts)
    assert (kept.shape, len(seconds)) == ((batch, 40), 30)


def test_it_says_what_it_found_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    kept, picture = tmp_path / "2.json", tmp_path / "generation.png"
    arguments = ["--device", "cpu", "--steps", "3", "--letters", "5"]
    assert generate_text.main([*arguments, "--batch", "1", "2", "--json", str(kept)]) == 0
    printed = capsys.readouterr().out
    assert "the same letters in 1 of 1 texts" in printed
    assert "the same letters in 2 of 2 texts" in printed
    runs = json.loads(kept.read_text())
    assert [run["batch"] for run in runs] == [1, 2]
    assert [len(run["seconds"][name]) for run in runs for name in ("with", "without")] == [5] * 4
    assert generate_text.main(["--draw", str(kept), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
