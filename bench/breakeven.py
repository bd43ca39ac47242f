"""From how many tokens on loading KV beats prefilling them, by model, device and link.

`python bench/breakeven.py`. Nothing runs: measured rates and published shapes of models are put into one
table. A prefill of n tokens takes what a causal transformer multiplies (Kaplan et al., "Scaling Laws for
Neural Language Models", 2020, section 2.1, without the embeddings' table; attention's scores and their sums
halved, as no token sees a later one):

    2 * weights * n  +  4 * layers * query heads * head size * n^2 / 2    floating-point operations,

over the rate that the device was measured at. A load takes a fixed time, and n tokens' bytes over the link's
rate. `--tflops`, `--gib` and `--fixed-ms` take the rates of a machine of one's own.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

GIB = 1024**3
LONGEST = 131_072
"""Tokens of the longest context that the table looks at."""


@dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
        weights: parameters that a token is multiplied with; of a mixture those of the experts it goes to.
        layers, heads, size: layers of full attention, query heads in one, and numbers in a head (of keys).
        kv: numbers that a layer keeps for a token, keys and values together.
        windows: layers whose attention sees a window of some tokens only; they keep that much KV at most.
        window: tokens of it.
    """

    name: str
    weights: float
    layers: int
    heads: int
    size: int
    kv: int
    windows: int = 0
    window: int = 0

    def operations(self, tokens: float) -> float:
        """Floating-point operations of a prefill."""
        seen = self.layers * tokens**2 / 2 + self.windows * min(tokens, self.window) * tokens
        return 2 * self.weights * tokens + 4 * self.heads * self.size * seen

    def bytes(self, tokens: float) -> float:
        """Bytes of KV in 16 bits."""
        return 2 * self.kv * (self.layers * tokens + self.windows * min(tokens, self.window))


MODELS = (
    Model("SmolLM2-135M", 0.106e9, 30, 9, 64, 2 * 3 * 64),
    Model("Llama 3.2 1B", 0.97e9, 16, 32, 64, 2 * 8 * 64),
    Model("Qwen3 8B", 6.95e9, 36, 32, 128, 2 * 8 * 128),
    Model("Llama 3.1 8B", 6.98e9, 32, 32, 128, 2 * 8 * 128),
    Model("Mistral Small 24B", 22.2e9, 40, 32, 128, 2 * 8 * 128),
    Model("Qwen3 32B", 31.2e9, 64, 64, 128, 2 * 8 * 128),
    Model("Llama 3.1 70B", 68.5e9, 80, 64, 128, 2 * 8 * 128),
    Model("Qwen3 30B-A3B", 2.9e9, 48, 32, 128, 2 * 4 * 128),
    Model("gpt-oss 20B", 3.0e9, 12, 64, 64, 2 * 8 * 64, windows=12, window=128),
    Model("DeepSeek V3 (MLA)", 36.0e9, 61, 128, 192, 576),
)


@dataclass(frozen=True)
class Device:
    """What computes, and what of it was measured.

    Attributes:
        tflops: operations that a prefill was measured to do in a second, in 10^12.
        links: name of each way to the KV, and its GiB/s.
        fixed_ms: milliseconds of a load that do not depend on its length, beyond those of a prefill.
        largest: weights of the largest model that somebody would run on it.
    """

    name: str
    tflops: float
    links: tuple[tuple[str, float], ...]
    fixed_ms: float
    largest: float = math.inf


DEVICES = (
    Device(
        "one H200",
        600,
        (
            ("Baton's load as measured, 2.2 GiB/s", 2.2),
            ("a network of 100 Gbit/s, 11.6 GiB/s", 11.6),
            ("a pinned copy as measured, 51 GiB/s", 51.0),
        ),
        15,
    ),
    Device(
        "2 cores of a Xeon with AMX",
        0.5,
        (
            ("a network of 1 Gbit/s, 0.116 GiB/s", 0.116),
            ("a network of 10 Gbit/s, 1.16 GiB/s", 1.16),
            ("Baton's first load as measured, 3.1 GiB/s", 3.1),
        ),
        10,
        largest=10e9,
    ),
)


def break_even(model: Model, tflops: float, gib: float, fixed_ms: float) -> int | None:
    """Return from how many tokens on a load takes no longer than a prefill.

    Args:
        tflops: the device's rate, 10^12 operations a second.
        gib: the link's rate, GiB a second.
        fixed_ms: of a load, beyond those of a prefill.

    Returns:
        Tokens, at least 1; None: no context of `LONGEST` tokens or fewer.
    """

    def gains(tokens: int) -> bool:
        load_s = fixed_ms / 1000 + model.bytes(tokens) / gib / GIB
        return load_s <= model.operations(tokens) / tflops / 1e12

    if not gains(LONGEST):
        return None
    low, high = 0, LONGEST  # a prefill grows faster than a load, so that once it is slower it stays so
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def table(device: Device) -> str:
    """Write one device's table in Markdown."""
    lines = [
        f"## {device.name}: {device.tflops:g} TFLOP/s of prefill, {device.fixed_ms:g} ms of every load\n",
        "| model | KiB of KV a token | "
        + " | ".join(name for name, _ in device.links)
        + " | GiB/s to be even at 4,096 tokens |",
        "|---" * (len(device.links) + 3) + "|",
    ]
    for model in (model for model in MODELS if model.weights <= device.largest):
        found = [break_even(model, device.tflops, gib, device.fixed_ms) for _, gib in device.links]
        cells = [f"{tokens:,}" if tokens is not None else "never" for tokens in found]
        left_s = model.operations(4096) / device.tflops / 1e12 - device.fixed_ms / 1000
        gib = model.bytes(4096) / left_s / GIB
        needed = "none is enough" if left_s <= 0 else f"{gib:,.0f}" if gib >= 10 else f"{gib:.2g}"
        kept = math.ceil(model.bytes(LONGEST) / LONGEST / 1024)
        lines.append(f"| {model.name} | {kept} | " + " | ".join([*cells, needed]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print a table for each device, or one for the rates that are given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tflops", type=float, help="10^12 operations a second of a prefill")
    parser.add_argument("--gib", type=float, help="GiB/s of a load")
    parser.add_argument("--fixed-ms", type=float, default=10, help="of every load")
    given = parser.parse_args()
    devices = DEVICES
    if given.tflops and given.gib:
        devices = (Device("as given", given.tflops, ((f"{given.gib:g} GiB/s", given.gib),), given.fixed_ms),)
    print("\n\n".join(table(device) for device in devices))


if __name__ == "__main__":
    main()
