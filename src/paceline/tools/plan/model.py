"""A model as a plan needs it: how many numbers, and its largest parameters. And sizes as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import UsageError

_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SIZES = (
    {"B": 1}
    | {p + "B": 1000**i for i, p in enumerate("KMGT", 1)}
    | {p + "iB": 1024**i for i, p in enumerate("KMGT", 1)}
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a plan needs to know of a model."""

    parameters: int
    largest: int = 0  # elements of its largest parameter, which no bucket cuts
    inner: int = 0  # elements of the largest between embedding and head
    gpt: GPTShape | None = None


@dataclass(frozen=True)
class GPTShape:
    """GPT-2's architecture: learned positions, the head tied to the embedding, biases everywhere."""

    layers: int
    width: int
    vocab: int
    sequence: int

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        block = 12 * self.width**2 + 13 * self.width
        return (self.vocab + self.sequence) * self.width + self.layers * block + 2 * self.width

    def activations(self, batch: int, *, checkpointing: bool) -> int:
        """Estimate the bytes that forward leaves for backward, in 16 bits and without attention matrices.

        A block leaves about 34 bytes for each number that enters it (Korthikanti et al., Reducing Activation
        Recomputation, 2022); with checkpointing its input only, and one block at a time is computed again, when the
        head is done. The head holds the logits, their log-softmax and in backward a gradient.
        """
        tokens = batch * self.sequence
        block, head = 34 * tokens * self.width, 6 * tokens * self.vocab
        return self.layers * 2 * tokens * self.width + max(block, head) if checkpointing else self.layers * block + head


def model(text: str) -> Model:
    """Read a model as people write it: `7B`, `124M`, `124439808`, or `gpt:layers,width,vocab,sequence`."""
    if text.startswith("gpt:"):
        numbers = text[4:].split(",")
        if len(numbers) != 4 or not all(n.isascii() and n.isdigit() and int(n) for n in numbers):
            raise UsageError(
                f"--model {text} is no GPT",
                why="it takes four positive numbers: layers, width, vocabulary, sequence length",
                do="for example --model gpt:12,768,50257,1024, which is GPT-2",
            )
        gpt = GPTShape(*map(int, numbers))
        inner = 4 * gpt.width**2
        return Model(
            parameters=gpt.parameters,
            largest=max(gpt.vocab * gpt.width, gpt.sequence * gpt.width, inner),
            inner=inner,
            gpt=gpt,
        )
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text, re.ASCII | re.IGNORECASE)
    parameters = round(float(found[1]) * _COUNTS[found[2].upper()]) if found else 0
    if not 1 <= parameters <= 10**15:
        raise UsageError(
            f"--model {text} is no number of parameters",
            why="a positive number with K, M, B or T, or gpt:layers,width,vocabulary,sequence",
            do="for example --model 7B, or --model gpt:12,768,50257,1024",
        )
    return Model(parameters=parameters)


def size(option: str, text: str) -> int:
    """Read a size as people write it, `80GiB`, `500GB`, `2TB`, in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?i?B)", text.strip(), re.ASCII)
    if not found or found[2] not in _SIZES:
        raise UsageError(
            f"{option} {text} is no size",
            why="a number and its unit: B, KB, MB, GB, TB, or KiB, MiB, GiB, TiB",
            do=f"for example {option} 80GiB",
        )
    return int(float(found[1]) * _SIZES[found[2]])
