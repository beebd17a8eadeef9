"""Does a transformer write the same text with a cache of keys and values as without?

A small transformer learns the text of the licence letter by letter, with causal attention and its
gradient by cuflash. Then it continues some beginnings, always with the likeliest letter. It does so
twice: with `cuflash.KVCache`, where each step computes attention for one new letter only, and with
attention over the whole text so far. Both must write the same letters. On a GPU, a step with the
cache is captured in a CUDA graph once, and each letter replays that graph.

    python examples/generate_text.py
    python examples/generate_text.py --batch 1 64 --letters 2000 --json times.json
    python examples/generate_text.py --draw times.json --picture generation.png
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
#: (layer, and q, k, v of new letters as (batch, t, heads, head_dim)) -> out.
Attend = Callable[[int, Array, Array, Array], Array]


def turned(xp: Any, x: Array, first: int, *, inverse: bool = False) -> Array:
    """Rotary embedding of (batch, t, heads, head_dim); the first letter has position ``first``."""
    return cuflash.rotary(x, first + xp.arange(x.shape[1])[:, None], inverse=inverse)


class Writer:
    """A causal transformer over letters: its parameters, training and writing."""

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
        """The text of numbers."""
        return "".join(self.letters[int(n)] for n in numbers)

    def loss_and_gradient(self, numbers: Array, following: Array) -> tuple[float, Parameters]:
        """Mean cross-entropy of the ``following`` letters (batch, t), and its gradient."""
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
        """Causal attention of whole texts, and its pullback through the rotary embedding."""
        xp = self.xp
        turned_q, turned_k = (turned(xp, x, 0) for x in (q, k))
        axes = SEQUENCE_BEFORE_HEADS
        out, pullback = cuflash.attention_vjp(turned_q, turned_k, v, causal=True, axes=axes)

        def back(dout: Array) -> tuple[Array, Array, Array]:
            dq, dk, dv = pullback(dout.astype(out.dtype))
            return turned(xp, dq, 0, inverse=True), turned(xp, dk, 0, inverse=True), dv

        return out, back

    def likeliest(self, numbers: Array, attend: Attend) -> Array:
        """The likeliest next letter of each text, (batch,), from its newest letters (batch, t)."""
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
        """Continue texts (batch, t) with a cache of keys; return them and seconds per letter."""
        xp, shape, (batch, start) = self.xp, self.shape, numbers.shape
        caches = [
            cuflash.KVCache(
                batch, shape.num_heads, shape.head_dim, max_length=start + letters,
                dtype=np.float32, like=numbers,
            )
            for _ in range(shape.num_layers)
        ]  # fmt: skip
        # A captured step writes to these arrays, which all layers share.
        turned_q, out = xp.empty((2, batch, shape.num_heads, 1, shape.head_dim), np.float32)
        k_pages, v_pages, table, _ = caches[0].arrays
        size = cuflash.workspace_size(out, k_pages, v_pages, page_table=table, causal=True)
        room = {"out": out, "workspace": xp.empty(size, np.uint8)}

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            cache, given = caches[layer], {}
            position, place = cache.lengths[:, None, None], turned_q
            if q.shape[2] == 1:
                given = room
            else:  # the given beginnings, in one call
                position, place = position + xp.arange(q.shape[2]), None
            q = cuflash.rotary(q, position, out=place)
            cache.append(k, v, rotary=True)
            return cuflash.attention_paged(q, *cache.arrays, causal=True, **given).swapaxes(1, 2)

        written = xp.empty((batch, start + letters), numbers.dtype)
        written[:, :start] = numbers
        new = self.likeliest(numbers, attend)[:, None]
        writer = copy.copy(self)
        if xp is not np:
            writer.parameters = summed(self.parameters)

        def step() -> None:
            new[...] = writer.likeliest(new, attend)[:, None]

        seconds: list[float] = []
        with repeated(xp, step) as advance:
            for place in range(start, start + letters):
                began = time.perf_counter()
                written[:, place] = new[:, 0]
                if place + 1 < start + letters:
                    advance()
                synchronize(xp)
                seconds.append(time.perf_counter() - began)
        return written, seconds

    def without_cache(self, numbers: Array, letters: int) -> tuple[Array, list[float]]:
        """Continue texts without a cache: each letter needs attention over the whole text."""
        xp = self.xp

        def attend(_: int, q: Array, k: Array, v: Array) -> Array:
            q, k = (turned(xp, x, 0) for x in (q, k))
            return cuflash.attention(q, k, v, causal=True, axes=SEQUENCE_BEFORE_HEADS)

        written, seconds = numbers, []
        for _ in range(letters):
            began = time.perf_counter()
            following = self.likeliest(written, attend)
            written = xp.concatenate([written, following[:, None]], axis=1)
            synchronize(xp)
            seconds.append(time.perf_counter() - began)
        return written, seconds


def synchronize(xp: Any) -> None:
    """Wait until the GPU has computed everything."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


class Summed:
    """A matrix whose products are computed as sums, since CuPy cannot capture cuBLAS in graphs."""

    __array_ufunc__ = None

    def __init__(self, matrix: Array) -> None:
        self.matrix = matrix

    def __rmatmul__(self, x: Array) -> Array:
        return (x[..., None] * self.matrix).sum(axis=-2)


def summed(parameters: Parameters) -> Parameters:
    """Parameters with matrices whose products a graph can capture."""
    return {
        name: Summed(a) if a.ndim == 2 and name != "letter" else a for name, a in parameters.items()
    }


@contextmanager
def repeated(xp: Any, step: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """A function that repeats a step, which must write to the same arrays each time.

    On a GPU the first call runs the step, which compiles kernels and takes memory from a pool of
    its own. The second call captures the step in a CUDA graph. This and all later calls replay it.
    """
    if xp is np:
        yield step
        return
    stream, pool = xp.cuda.Stream(non_blocking=True), xp.cuda.MemoryPool()

    def runs() -> Iterator[None]:
        yield step()
        stream.begin_capture()
        try:
            step()
        finally:
            graph = stream.end_capture()
        while True:
            yield graph.launch(stream)

    xp.cuda.get_current_stream().synchronize()
    with xp.cuda.using_allocator(pool.malloc), stream:
        yield functools.partial(next, runs())


def trained(device: Device, text: str, steps: int, seqlen: int = 64, batch: int = 16) -> Writer:
    """Train a writer on the text for a number of steps."""
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
    """Train once, then write with each batch size; 0: all letters are the same."""
    device = choose_device(arguments.device)
    print(f"on {device.description}")
    text = TEXT.read_text(encoding="utf-8")
    writer = trained(device, text, arguments.steps)
    runs, same = [], True
    for batch in arguments.batch:
        places = np.random.default_rng(0).integers(0, len(text) - arguments.start, batch)
        beginnings = device.xp.stack(
            [writer.numbers(text[i : i + arguments.start]) for i in places.tolist()]
        )
        seconds, agree = written_twice(device, writer, beginnings, arguments.letters)
        same = same and agree
        of_run = {"device": device.description, "date": dt.date.today().isoformat()}
        runs.append(of_run | {"batch": batch, "start": arguments.start, "seconds": seconds})
    if arguments.json:
        arguments.json.write_text(json.dumps(runs) + "\n")
    return int(not same)


def written_twice(
    device: Device, writer: Writer, beginnings: Array, letters: int
) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each letter with a cache and without, and whether all texts are the same."""
    found, times = {}, {}
    batch, start = beginnings.shape
    for name, write in (("with", writer.with_cache), ("without", writer.without_cache)):
        with sign_of_life(f"writing {name} a cache"):
            written, seconds = write(beginnings, letters)
            device.synchronize()
        found[name], times[name] = device.to_host(written), [round(s, 6) for s in seconds]
        tenth = max(1, len(seconds) // 10)
        first, last = (
            1e3 * float(np.median(s)) for s in (seconds[1 : 1 + tenth], seconds[-tenth:])
        )
        print(
            f"{name} a cache, {batch} at once: {first:.2f} ms a letter after {start} letters, "
            f"{last:.2f} ms after {written.shape[1]}"
        )
    print(f"it writes: {writer.text(found['with'][0])!r}")
    same = (found["with"] == found["without"]).all(axis=1)
    print(f"the same letters in {same.sum()} of {batch} texts")
    return times, bool(same.all())


def draw(files: Sequence[Path], picture: Path) -> None:
    """Draw the time of a letter against the number of letters before it, from JSON files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = [run for file in files for run in json.loads(file.read_text())]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, kept in enumerate(runs):
        for name, style in (("without", "--"), ("with", "-")):
            ms = 1e3 * np.array(kept["seconds"][name])[2:-1]  # the first two compile and capture
            window = max(1, len(ms) // 50)
            # The fastest of neighbouring letters: other programs can only add time.
            quiet = [min(ms[i : i + window]) for i in range(0, len(ms), window)]
            before = kept["start"] + 2 + window * np.arange(len(quiet))
            device, batch = kept["device"].partition(",")[0], kept["batch"]
            axes.plot(before, quiet, style, color=f"C{number}",
                      label=f"{device}, batch {batch}, {name} a cache")  # fmt: skip
    days = ", ".join(sorted({kept["date"] for kept in runs}))
    axes.set(xlabel="letters before", ylabel="ms a letter", yscale="log", title=days)
    axes.legend(fontsize="small")
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1], help="texts written side by side"
    )
    parser.add_argument("--start", type=int, default=32, help="letters that are given")
    parser.add_argument("--letters", type=int, default=200, help="letters to write")
    parser.add_argument("--json", type=Path, help="write the time of each letter")
    parser.add_argument("--draw", type=Path, nargs="+", help="draw such files; writes nothing")
    parser.add_argument("--picture", type=Path, default=Path("generation.png"), help="where to")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.draw:
        draw(arguments.draw, arguments.picture)
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
