"""Does a transformer write the same text with a cache of keys and values as without?

A small transformer learns the text of the licence letter by letter, with causal attention and its
gradient by cuflash. Then it continues some beginnings, always with the likeliest letter: once with
`cuflash.KVCache`, where a step asks with the queries of one letter, and once by attention of the
whole text so far. Both have to write the same letters.

    python examples/generate_text.py
    python examples/generate_text.py --batch 64 --letters 200
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformer
from array_device import Device, choose_device
from progress import sign_of_life
from transformer import Array, Parameters, Pullback

import cuflash

TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
SEQUENCE_BEFORE_HEADS = [(-3, -1)] * 4
#: q, k, v of new letters (batch, t, heads, head_dim) in some layer -> out.
Attend = Callable[[int, Array, Array, Array], Array]


def turned(xp: Any, x: Array, first: int, *, inverse: bool = False) -> Array:
    """Rotary embedding of (batch, t, heads, head_dim), whose first letter is at ``first``."""
    return cuflash.rotary(x, first + xp.arange(x.shape[1])[:, None], inverse=inverse)


class Writer:
    """A causal transformer over letters: parameters, and what it makes of a text."""

    def __init__(self, xp: Any, letters: str, shape: transformer.Shape, seed: int) -> None:
        self.xp, self.letters, self.shape = xp, letters, shape
        parameters = transformer.initial_parameters(shape, seed, xp)
        del parameters["pixel"], parameters["position"]
        rng = np.random.default_rng(seed)
        parameters["letter"] = xp.asarray(rng.standard_normal((len(letters), shape.width)))
        self.parameters: Parameters = {n: a.astype(np.float32) for n, a in parameters.items()}

    def numbers(self, text: str) -> Array:
        """The numbers of letters, (t,)."""
        return self.xp.asarray([self.letters.index(letter) for letter in text])

    def text(self, numbers: Array) -> str:
        """The letters of numbers."""
        return "".join(self.letters[int(n)] for n in numbers)

    def loss_and_gradient(self, numbers: Array, following: Array) -> tuple[float, Parameters]:
        """Mean cross-entropy of the letters that follow, (batch, t), and its gradient."""
        xp, parameters = self.xp, self.parameters
        x, gradient, pullbacks = parameters["letter"][numbers], {}, []
        for layer in range(self.shape.num_layers):
            for enter in (transformer.add_attention, transformer.add_hidden):
                added, pullback = enter(xp, self.shape, parameters, f"{layer}.", x, self._learn)
                x = x + added
                pullbacks.append(pullback)
        normal, back_normal = transformer.normalise(xp, x, parameters["gain"], parameters["shift"])
        logits, back_classes = transformer.linear(normal, parameters["classes"])
        flat = logits.reshape(-1, logits.shape[-1])
        loss, back_loss = transformer.cross_entropy(xp, flat, following.ravel())
        dnormal, gradient["classes"] = back_classes(back_loss(1.0).reshape(logits.shape))
        dx, gradient["gain"], gradient["shift"] = back_normal(dnormal)
        for pullback in reversed(pullbacks):
            dadded, of_parameters = pullback(dx)
            dx = dx + dadded
            gradient |= of_parameters
        gradient["letter"] = xp.zeros_like(parameters["letter"])
        xp.add.at(gradient["letter"], numbers, dx)
        return float(loss), gradient

    def _learn(self, q: Array, k: Array, v: Array) -> tuple[Array, Pullback]:
        """Causal attention of whole texts, and its pullback through the embedding."""
        xp = self.xp
        turned_q, turned_k = (turned(xp, x, 0) for x in (q, k))
        axes = SEQUENCE_BEFORE_HEADS
        out, pullback = cuflash.attention_vjp(turned_q, turned_k, v, causal=True, axes=axes)

        def back(dout: Array) -> tuple[Array, Array, Array]:
            dq, dk, dv = pullback(dout.astype(out.dtype))
            return turned(xp, dq, 0, inverse=True), turned(xp, dk, 0, inverse=True), dv

        return out, back

    def likeliest(self, numbers: Array, attend: Attend) -> Array:
        """The likeliest letter behind each text, (batch,), from its newest letters (batch, t)."""
        xp, parameters = self.xp, self.parameters
        x = parameters["letter"][numbers]
        for layer in range(self.shape.num_layers):

            def of_layer(q: Array, k: Array, v: Array, layer: int = layer) -> tuple[Array, Any]:
                return attend(layer, q, k, v), None

            for enter in (transformer.add_attention, transformer.add_hidden):
                x = x + enter(xp, self.shape, parameters, f"{layer}.", x, of_layer)[0]
        normal, _ = transformer.normalise(xp, x[:, -1], parameters["gain"], parameters["shift"])
        return (normal @ parameters["classes"]).argmax(axis=-1)

    def with_cache(self, numbers: Array, letters: int) -> tuple[Array, list[float]]:
        """Continue texts (batch, t) by so many letters, and the seconds of each; keys are kept."""
        batch, start = numbers.shape
        shape, xp = self.shape, self.xp
        caches = [
            cuflash.KVCache(
                batch, shape.num_heads, shape.head_dim, max_length=start + letters,
                dtype=np.float32, like=numbers,
            )
            for _ in range(shape.num_layers)
        ]  # fmt: skip
        known = 0

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            q, k = (turned(xp, x, known).swapaxes(1, 2) for x in (q, k))
            caches[layer].append(k, v.swapaxes(1, 2))
            return cuflash.attention_paged(q, *caches[layer].arrays, causal=True).swapaxes(1, 2)

        written, seconds, new = numbers, [], numbers
        for _ in range(letters):
            began = time.perf_counter()
            following = self.likeliest(new, attend)
            known, new = written.shape[1], following[:, None]
            written = xp.concatenate([written, new], axis=1)
            seconds.append(time.perf_counter() - began)
        return written, seconds

    def without_cache(self, numbers: Array, letters: int) -> tuple[Array, list[float]]:
        """The same, where each letter takes attention of the whole text before it."""
        xp = self.xp

        def attend(_: int, q: Array, k: Array, v: Array) -> Array:
            q, k = (turned(xp, x, 0) for x in (q, k))
            return cuflash.attention(q, k, v, causal=True, axes=SEQUENCE_BEFORE_HEADS)

        written, seconds = numbers, []
        for _ in range(letters):
            began = time.perf_counter()
            following = self.likeliest(written, attend)
            written = xp.concatenate([written, following[:, None]], axis=1)
            seconds.append(time.perf_counter() - began)
        return written, seconds


def trained(device: Device, text: str, steps: int, seqlen: int = 64, batch: int = 16) -> Writer:
    """A writer that has read the text so many times a batch."""
    xp = device.xp
    letters = "".join(sorted(set(text)))
    shape = transformer.Shape(num_layers=2, num_heads=4, head_dim=16, num_classes=len(letters))
    writer = Writer(xp, letters, shape, seed=1)
    adam, rng = transformer.Adam(xp, writer.parameters, 3e-3), np.random.default_rng(1)
    numbers = writer.numbers(text)
    with sign_of_life(f"{steps} steps of training"):
        for step in range(steps):
            first = xp.asarray(rng.integers(0, len(text) - seqlen - 1, batch))
            chosen = numbers[first[:, None] + xp.arange(seqlen + 1)]
            loss, gradient = writer.loss_and_gradient(chosen[:, :-1], chosen[:, 1:])
            adam.step(writer.parameters, gradient)
            if step in (0, steps - 1):
                print(f"step {step + 1}: {loss / np.log(2):.2f} bits a letter")
    return writer


def run(arguments: argparse.Namespace) -> int:
    device = choose_device(arguments.device)
    print(f"on {device.description}")
    text = TEXT.read_text(encoding="utf-8")
    writer = trained(device, text, arguments.steps)
    rng = np.random.default_rng(0)
    places = rng.integers(0, len(text) - arguments.start, arguments.batch)
    beginnings = device.xp.stack(
        [writer.numbers(text[i : i + arguments.start]) for i in places.tolist()]
    )
    found = {}
    for name, write in (("with", writer.with_cache), ("without", writer.without_cache)):
        with sign_of_life(f"writing {name} a cache"):
            written, seconds = write(beginnings, arguments.letters)
            device.synchronize()
        found[name] = device.to_host(written)
        tenth = max(1, len(seconds) // 10)
        first, last = (
            1e3 * float(np.median(s)) for s in (seconds[1 : 1 + tenth], seconds[-tenth:])
        )
        print(
            f"{name} a cache: {first:.2f} ms a letter after {arguments.start} letters, "
            f"{last:.2f} ms after {written.shape[1]}"
        )
    print(f"it writes: {writer.text(found['with'][0])!r}")
    same = (found["with"] == found["without"]).all(axis=1)
    print(f"the same letters in {same.sum()} of {len(same)} texts")
    return int(not same.all())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--batch", type=int, default=1, help="texts written side by side")
    parser.add_argument("--start", type=int, default=32, help="letters that are given")
    parser.add_argument("--letters", type=int, default=200, help="letters to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(main())
