"""A whole run from a configuration: corpora, vocabulary, model, loop, pictures."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serving.core.codecs import SentencePieceCodec
from serving.core.errors import ConfigError
from serving.core.types import SearchOptions
from training import loss as losses
from training.batching import Batches, IdPair, make_batch
from training.checkpoint import build_model, read_json, write_atomically, write_json
from training.config import Config, parse_config
from training.config import Pair as PairFiles
from training.corpus import Pair, read_manythings, read_parallel, read_tsv
from training.decode import decode
from training.loop import Entry, Loop, Progress, Tick, read_log
from training.memory import keep_freed_memory
from training.metrics import Faults, find_faults, score
from training.models.base import Model, device_of
from training.plots import plot_run
from training.vocabulary import fit_sentencepiece

CHANGEABLE = {"schedule", "evaluation", "run"}  # sections that may differ when a run is resumed
LOSS_TOKENS = 4096  # padded positions of a batch of the development set


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
    """Ids of the pairs that fit the limits, and how many did not or had an empty side."""
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


@dataclass(frozen=True, slots=True)
class DevelopmentSet:
    """Sentences that judge a model during training."""

    pairs: list[Pair]
    sources: list[list[int]]  # ids, without the end symbol
    ids: list[IdPair]  # of the pairs that fit the limits on both sides, for the loss
    codec: SentencePieceCodec
    options: SearchOptions

    @classmethod
    def make(cls, pairs: list[Pair], codec: SentencePieceCodec, config: Config) -> DevelopmentSet:
        """The pairs whose source fits the limit.

        Raises:
            ConfigError: there is none.
        """
        kept = [(p, ids) for p in pairs if len(ids := codec.encode(p.source)) < config.limits.source]
        fitting, _ = encode_pairs((pair for pair, _ in kept), codec, config)
        if not fitting:
            raise ConfigError("data.dev has no pair within the limits; check the files, or raise limits")
        options = SearchOptions(beam=config.evaluation.beam)
        return cls([pair for pair, _ in kept], [ids for _, ids in kept], fitting, codec, options)

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss, BLEU, chrF and the shares of degenerate outputs. Draws no random numbers."""
        found = decode(model, self.sources, self.options)
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
        """Mean cross-entropy in nats per token, without smoothing."""
        total, count = 0.0, 0
        special, device = model.sizes.special, device_of(model)
        for chosen in Batches(self.ids, LOSS_TOKENS, len(self.ids), 0).epoch(0):
            batch = make_batch([self.ids[i] for i in chosen], special).to(device)
            logits = model(batch.source, batch.lengths, batch.target)  # (batch, target, vocabulary)
            value, positions = losses.cross_entropy(logits, batch.labels, special.pad, 0.0)
            total, count = total + float(value) * positions, count + positions
        return total / count


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Keep a second training out of the folder.

    Raises:
        ConfigError: another training is writing to it.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another training is writing to {run}; wait for it, or use a new folder") from error
        except OSError:  # a file system without locks
            pass
        yield


def _check_same(run: Path, config: Config, corpus_hash: str) -> None:
    """A resumed run must be the same run in all that its past depends on."""
    before = parse_config(read_json(run / "config.json"))
    changed = [key for key in Config.model_fields if getattr(config, key) != getattr(before, key)]
    changed = [key for key in changed if key not in CHANGEABLE]
    if config.run.seed != before.run.seed:
        changed.append("run.seed")
    if changed:
        raise ConfigError(f"{run} was started with another {', '.join(changed)}; resume it as it was, or begin anew")
    details = run / "details.json"
    if details.is_file() and read_json(details).get("corpus_sha256") != corpus_hash:
        raise ConfigError(f"the corpus of {run} has changed since it was started; use a new folder")


def _prepare(run: Path, config: Config, pairs: list[Pair], corpus_hash: str, resume: bool) -> SentencePieceCodec:
    """The run's folder and codec, made once."""
    vocabulary = run / "vocabulary.model"
    if resume and (run / "config.json").is_file():
        _check_same(run, config, corpus_hash)
    elif (run / "state.pt").exists() or (run / "best.pt").exists():
        raise ConfigError(f"{run} holds a run already; add --resume, or use a new folder")
    else:
        vocabulary.unlink(missing_ok=True)  # of a start that came to nothing
    if not vocabulary.is_file():
        model = fit_sentencepiece((text for pair in pairs for text in pair), config.vocabulary)
        write_atomically(vocabulary, lambda file: file.write(model))
    write_json(run / "config.json", config.model_dump(mode="json"))
    return SentencePieceCodec.load(vocabulary)


def _corpus_hash(pairs: list[Pair]) -> str:
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(f"{pair.source}\t{pair.target}\n".encode())
    return digest.hexdigest()


def _provenance(config: Config) -> dict[str, Any]:
    """Name, licence and attribution of the corpus: the configuration's, else what `fuseq data` recorded beside it."""
    files, data = config.data.train, config.data
    record = (files.source or files.file or Path()).parent / "split.json"
    split = read_json(record) if record.is_file() else {}
    published = split.get("provenance", {})
    named = {key: getattr(data, key) or published.get(key, "") for key in ("name", "licence", "attribution")}
    return {"data": named["name"], "licence": named["licence"], "attribution": named["attribution"], "split": split}


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
    with _alone(run):
        return _train(config, run, resume, on_step, on_note)


def _train(
    config: Config, run: Path, resume: bool, on_step: Callable[[Tick], object], on_note: Callable[[str], object]
) -> Progress:
    keep_freed_memory()
    torch.set_num_threads(config.run.threads or len(os.sched_getaffinity(0)))
    torch.manual_seed(config.run.seed)
    pairs, dev_pairs = read_pairs(config.data.train), read_pairs(config.data.dev)[: config.evaluation.sentences]
    corpus_hash = _corpus_hash(pairs)
    if not (run / "vocabulary.model").is_file():
        on_note(f"fitting {config.vocabulary.size:,} pieces to {len(pairs):,} pairs, which cannot be interrupted")
    codec = _prepare(run, config, pairs, corpus_hash, resume)
    ids, dropped = encode_pairs(pairs, codec, config)
    if not ids:
        raise ConfigError(f"none of the {len(pairs)} pairs of data.train is within the limits; check files and limits")
    dev = DevelopmentSet.make(dev_pairs, codec, config)
    model = build_model(config, codec)
    weights = sum(parameter.numel() for parameter in model.parameters())
    details = {"pairs": len(ids), "dropped": dropped, "corpus_sha256": corpus_hash, **_provenance(config)}
    details |= {"dev_sentences": len(dev.pairs), "parameters": weights, "torch": torch.__version__}
    write_json(run / "details.json", details)
    on_note(f"{len(ids):,} pairs ({dropped:,} too long or empty), {codec.size:,} pieces, {weights:,} weights")
    if left_out := len(dev_pairs) - len(dev.pairs):
        on_note(f"{left_out:,} development sentences are over limits.source and left out")

    def on_entry(entry: Entry) -> None:
        scores = f"BLEU {entry['bleu']:.2f}, chrF {entry['chrf']:.2f}, loss {entry['dev_loss']:.3f}"
        on_note(f"step {entry['step']:,}: {scores}")
        plot_run(read_log(run), run / "curves.png", config.name)
        if entry["step"] >= config.evaluation.degenerate_from * config.schedule.steps:
            _faults(entry).check()

    loop = Loop(run, config, model, ids, dev.evaluate, on_entry)
    loop.resume()
    progress = loop.fit(on_step)
    if config.evaluation.degenerate_from <= 1:  # a run that stopped early has an end, too
        _faults(progress.best).check()
    return progress


def _faults(scores: dict[str, Any]) -> Faults:
    return Faults(scores["empty"], scores["copied"], scores["most_common"])
