"""A toy language pair: numbers in words to another spelling, small enough to train on in seconds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

WORDS = {
    "one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fuenf", "six": "sechs",
    "red": "rot", "green": "gruen", "dog": "hund", "cat": "katze", "house": "haus", "tree": "baum",
}  # fmt: skip


def toy_pairs(count: int, seed: int = 0, longest: int = 8) -> list[tuple[str, str]]:
    """Random word sequences and their word-by-word translation."""
    generator = random.Random(seed)
    words = list(WORDS)
    sentences = [[generator.choice(words) for _ in range(generator.randint(1, longest))] for _ in range(count)]
    return [(" ".join(s), " ".join(WORDS[word] for word in s)) for s in sentences]


def write_corpus(folder: Path, train: int = 400, dev: int = 20) -> dict[str, Any]:
    """Write train and dev files; the `data` section of a configuration that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    section: dict[str, Any] = {"source_language": "xx", "target_language": "yy", "licence": "CC0"}
    for part, count, seed in (("train", train, 1), ("dev", dev, 2)):
        pairs = toy_pairs(count, seed)
        section[part] = {}
        for side, index in (("source", 0), ("target", 1)):
            path = folder / f"{part}.{side}"
            path.write_text("".join(pair[index] + "\n" for pair in pairs), encoding="utf-8")
            section[part][side] = str(path)
    return section


TRANSFORMER = {
    "architecture": "transformer", "size": 32, "feed_forward": 64, "heads": 4, "encoder_layers": 1,
    "decoder_layers": 2, "dropout": 0.1,
}  # fmt: skip
BAHDANAU = {"architecture": "bahdanau", "embedding": 32, "hidden": 32, "attention": 32, "dropout": 0.1}


def toy_config(folder: Path, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A configuration tree for the toy corpus in `folder`."""
    tree: dict[str, Any] = {
        "name": "toy",
        "data": write_corpus(folder),
        "model": dict(model),
        "vocabulary": {"size": 300},
        "limits": {"source": 64, "target": 64},
        "optimiser": {"rate": 0.01},
        "schedule": {"steps": 12, "warmup": 2},
        "batches": {"tokens": 256},
        "evaluation": {"every": 4, "average": 2, "degenerate_from": 2.0},
        "run": {"save_every": 3, "threads": 1},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return tree
