"""A whole run from a configuration: corpora, vocabulary, model, loop, pictures."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serving.core.codecs import SentencePieceCodec
from serving.core.errors import ConfigError
from serving.core.types import SearchOptions
from training import loss as losses
from training.batching import Batches, IdPair, make_batch
from training.checkpoint import build_model, write_atomically, write_json
from training.config import Config
from training.config import Pair as PairFiles
from training.corpus import Pair, read_manythings, read_parallel, read_tsv
from training.decode import decode
from training.loop import Loop, Progress, Tick, read_log
from training.memory import keep_freed_memory
from training.metrics import Faults, find_faults, score
from training.models.base import Model
from training.plots import plot_run
from training.vocabulary import fit_sentencepiece

CHANGEABLE = {"schedule", "evaluation", "run"}  # sections that may differ when a run is resumed


def read_pairs(files: PairFiles) -> list[Pair]:
    """The sentence pairs that a configuration names.

    Raises:
        ConfigError: neither `file` nor both of `source` and `target` are given.
    """
    if files.file is not None:
        reader = read_manythings if files.file.suffix == ".zip" else read_tsv
        return list(reader(files.file))
    if files.source is None or files.target is None:
        raise ConfigError("a corpus needs `source` and `target`, or one `file`")
    return list(read_parallel(files.source, files.target))


def encode_pairs(pairs: Iterable[Pair], codec: SentencePieceCodec, config: Config) -> tuple[list[IdPair], int]:
    """Ids of the pairs that fit the limits, and how many did not."""
    kept: list[IdPair] = []
    dropped = 0
    for source, target in pairs:
        ids = codec.encode(source), codec.encode(target)
        fits = 0 < len(ids[0]) < config.limits.source and 0 < len(ids[1]) < config.limits.target
        if fits:
            kept.append(ids)
        else:
            dropped += 1
    return kept, dropped


def _split_record(files: PairFiles) -> dict[str, Any]:
    """What `fuseq data` recorded beside the corpus, if it made it."""
    folder = (files.source or files.file or Path()).parent
    record = folder / "split.json"
    return dict(json.loads(record.read_text(encoding="utf-8"))) if record.is_file() else {}


def _check_same(run: Path, config: Config) -> None:
    """A resumed run must be the same run in all that its past depends on."""
    before = json.loads((run / "config.json").read_text(encoding="utf-8"))
    after = config.model_dump(mode="json")
    changed = [key for key in after if key not in CHANGEABLE and after[key] != before.get(key)]
    if changed:
        raise ConfigError(f"{run} was started with another {', '.join(changed)}; resume it as it was or use a new folder")


@dataclass(frozen=True, slots=True)
class DevelopmentSet:
    """Sentences that judge a model during training."""

    pairs: list[Pair]
    ids: list[IdPair]
    codec: SentencePieceCodec
    config: Config

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss, BLEU, chrF and the shares of degenerate outputs. Draws no random numbers."""
        options = SearchOptions(beam=self.config.evaluation.beam)
        found = decode(model, [source for source, _ in self.ids], options)
        texts = [self.codec.decode(hypotheses[0].tokens) if hypotheses else "" for hypotheses in found]
        scores = score(texts, [[pair.target] for pair in self.pairs])
        faults = find_faults([pair.source for pair in self.pairs], texts)
        return {
            "dev_loss": self._loss(model),
            "bleu": scores.bleu,
            "chrf": scores.chrf,
            "empty": faults.empty,
            "copied": faults.copied,
            "most_common": faults.most_common,
        }

    @torch.inference_mode()
    def _loss(self, model: Model) -> float:
        total, count = 0.0, 0
        special = model.sizes.special
        for chosen in Batches(self.ids, 4096, len(self.ids), 0).epoch(0):
            batch = make_batch([self.ids[i] for i in chosen], special)
            value, positions = losses.cross_entropy(
                model(batch.source, batch.lengths, batch.target), batch.labels, special.pad, 0.0
            )
            total, count = total + float(value) * positions, count + positions
        return total / count


def _prepare(run: Path, config: Config, train: list[Pair], resume: bool) -> SentencePieceCodec:
    """The run's folder and codec, made once."""
    vocabulary = run / "vocabulary.model"
    if resume and (run / "config.json").is_file():
        _check_same(run, config)
    elif (run / "state.pt").exists():
        raise ConfigError(f"{run} holds a run already; add --resume, or use a new folder")
    if not vocabulary.is_file():
        model = fit_sentencepiece((text for pair in train for text in pair), config.vocabulary)
        write_atomically(vocabulary, lambda file: file.write(model))
    write_json(run / "config.json", config.model_dump(mode="json"))
    return SentencePieceCodec.load(vocabulary)


def _corpus_hash(pairs: list[Pair]) -> str:
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(f"{pair.source}\t{pair.target}\n".encode())
    return digest.hexdigest()


def train(
    config: Config,
    run: Path,
    *,
    resume: bool = False,
    on_step: Callable[[Tick], object] = lambda tick: None,
    on_note: Callable[[str], object] = lambda text: None,
) -> Progress:
    """Train a model in the folder `run`.

    Raises:
        ConfigError: the folder holds a run and `resume` is false, or the run was another one.
        DegenerateOutputs: the development outputs are empty, copied or all the same.
    """
    keep_freed_memory()
    torch.set_num_threads(config.run.threads or len(os.sched_getaffinity(0)))
    torch.manual_seed(config.run.seed)
    pairs, dev_pairs = read_pairs(config.data.train), read_pairs(config.data.dev)[: config.evaluation.sentences]
    codec = _prepare(run, config, pairs, resume)
    ids, dropped = encode_pairs(pairs, codec, config)
    kept_dev = [pair for pair in dev_pairs if len(codec.encode(pair.source)) < config.limits.source]
    dev = DevelopmentSet(kept_dev, [(codec.encode(p.source), codec.encode(p.target)) for p in kept_dev], codec, config)
    record = _split_record(config.data.train)
    details = {"pairs": len(ids), "dropped": dropped, "corpus_sha256": _corpus_hash(pairs), "split": record}
    model = build_model(config, codec)
    details["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    write_json(run / "details.json", details)
    on_note(f"{len(ids):,} pairs ({dropped:,} too long or empty), {codec.size:,} pieces, {details['parameters']:,} weights")

    def evaluate(candidate: Model) -> dict[str, float]:
        scores = dev.evaluate(candidate)
        step = loop.progress.step
        on_note(f"step {step:,}: BLEU {scores['bleu']:.2f}, chrF {scores['chrf']:.2f}, loss {scores['dev_loss']:.3f}")
        if step >= config.evaluation.degenerate_from * config.schedule.steps:
            Faults(scores["empty"], scores["copied"], scores["most_common"]).check()
        return scores

    loop = Loop(run, config, model, ids, evaluate)
    if resume:
        loop.resume()
    progress = loop.fit(on_step)
    plot_run(read_log(run), run / "curves.png", config.name)
    return progress

