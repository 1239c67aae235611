"""The subjects: four models that every engine is measured with, each in all the formats that the engines read.

| subject | what it is | work |
|---|---|---|
| base | Transformer 6+6, d 512, feed-forward 2048, 32,000 words, random weights | 24 ids in, exactly 24 out |
| small | Transformer 4+4, d 256, feed-forward 1024, 8,000 words, random weights | the same |
| bundled | the model that comes with fuseq | real sentences, as long as it translates them |
| bahdanau | LSTM with additive attention, 256 wide, 8,000 words, random weights | 24 ids in, exactly 24 out |

A subject is made once in a working folder and found there again.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.formats import ctranslate2, huggingface, marian
from benchmarks.peers.base import Ids, Search, Weights
from benchmarks.peers.ours import BUNDLE, EXACT_BUNDLE
from benchmarks.records import ROOT
from serving.core.codecs import SentencePieceCodec
from serving.core.errors import ConfigError, FuseqError

SENTENCES = Path(__file__).parent / "data" / "sentences.en.txt"
READY = "subject.json"  # written last: a folder without it is made anew
RECURRENT = "bahdanau.pt"
CODEC = "codec.model"
SEED = 2026
MARK = "\u2581"  # begins a piece that begins a word
LENGTH = 24  # ids in and out of subjects with random weights


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Transformer with random weights."""

    encoder_layers: int
    decoder_layers: int
    size: int
    feed_forward: int
    heads: int
    vocabulary: int


SHAPES = {"base": Shape(6, 6, 512, 2048, 8, 32_000), "small": Shape(4, 4, 256, 1024, 8, 8_000)}
TINY = {
    "base": Shape(2, 2, 64, 128, 4, 500),
    "small": Shape(1, 1, 64, 128, 2, 400),
}  # int8 kernels want multiples of 64
NAMES = ("base", "small", "bundled", "bahdanau")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the work that it is given."""

    name: str
    weights: Weights
    sources: Ids  # end symbol included
    forced: int = 0  # tokens that every output has; 0 lets the model end
    limit: int = 128
    texts: tuple[str, ...] = ()  # what `sources` are the ids of
    real: bool = False  # whether they are sentences
    references: tuple[str, ...] = ()
    peers: tuple[str, ...] = ("ctranslate2", "huggingface", "bergamot", "plain-onnx")

    def batch(self, size: int) -> Ids:
        """The first `size` sources, from the beginning again where there are not so many."""
        return [self.sources[index % len(self.sources)] for index in range(size)]

    def search(self, beam: int) -> Search:
        """How the work is done."""
        return Search(beam, self.limit, self.forced)


@dataclass(frozen=True, slots=True)
class Options:
    """Where subjects come from."""

    work: Path  # folder that keeps them
    data: Path | None = None  # folder with test.en and test.de
    run: Path | None = None  # training of the bundled model; None reads its weights from the bundle
    bundle: Path | None = None  # None for the one installed with fuseq
    tiny: bool = False  # small enough to see in seconds that everything works
    shapes: dict[str, Shape] = field(default_factory=lambda: SHAPES)
    say: Callable[[str], None] = lambda text: None


def make(name: str, options: Options) -> Subject:
    """Make a subject, or find the one made before.

    Raises:
        ConfigError: there is none of that name.
        FuseqError: it cannot be made.
    """
    if options.tiny:
        options = replace(options, shapes=TINY, work=options.work / "tiny")
    if name in options.shapes:
        return _random_transformer(name, options.shapes[name], options)
    if name == "bundled":
        return _bundled(options)
    if name == "bahdanau":
        return _bahdanau(options)
    raise ConfigError(f"no subject {name!r}; there are {', '.join(NAMES)}")


def _folder(name: str, options: Options, describe: dict[str, Any], build: Callable[[Path], Weights]) -> Weights:
    """The subject's folder, made by `build` unless it was made for the same description before."""
    folder = options.work / name
    mark = folder / READY
    if mark.is_file():
        kept = json.loads(mark.read_text(encoding="utf-8"))
        if kept["of"] == describe:
            return Weights(**kept["weights"])
    options.say(f"making {name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights = build(folder)
    mark.write_text(json.dumps({"of": describe, "weights": weights.to_json()}), encoding="utf-8")
    return weights


def random_sources(pool: Sequence[int], eos: int, count: int, length: int = LENGTH) -> Ids:
    """Sources of one length: ids drawn from `pool`, and the end symbol."""
    draw = random.Random(SEED)
    return [[*draw.choices(pool, k=length - 1), eos] for _ in range(count)]


def whole_words(codec: SentencePieceCodec) -> list[str]:
    """Pieces that are a word and come back as the same piece: text made of them is as many ids as words."""
    pieces = [piece for piece in codec.pieces(range(codec.size)) if piece.startswith(MARK) and piece[1:].isalpha()]
    return [piece for piece in pieces if codec.pieces(codec.encode(piece[1:])) == [piece]]


def as_text(pieces: Sequence[str]) -> str:
    """The text of pieces."""
    return "".join(pieces).replace(MARK, " ").strip()


def _run_fuseq(*arguments: str) -> None:
    """A command of fuseq in a process of its own.

    Raises:
        FuseqError: it failed; says what it said.
    """
    done = subprocess.run([sys.executable, "-m", "fuseq", *arguments], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise FuseqError(f"fuseq {' '.join(arguments[:2])}: {said[-1]}")


def _random_transformer(name: str, shape: Shape, options: Options) -> Subject:
    def build(folder: Path) -> Weights:
        weights = Weights(str(folder), "marian", shape.vocabulary, shape.vocabulary - 1, 0, shape.vocabulary - 1)
        write_marian(shape, huggingface.folder_of(weights))
        _run_fuseq("import", "hf", str(huggingface.folder_of(weights)), "-o", str(folder / BUNDLE), "--no-gate")
        (folder / EXACT_BUNDLE).symlink_to(BUNDLE)
        return weights

    weights = _folder(name, options, {"shape": str(shape)}, build)
    _convert(weights)
    marian.convert(weights)
    known = json.loads((huggingface.folder_of(weights) / "vocab.json").read_text(encoding="utf-8"))
    length = 6 if options.tiny else LENGTH
    pool = [known[piece] for piece in whole_words(_codec()) if piece in known]
    sources = random_sources(pool, weights.eos, 128, length)
    pieces = {index: piece for piece, index in known.items()}
    texts = tuple(as_text([pieces[index] for index in source[:-1]]) for source in sources)
    return Subject(name, weights, sources, length, 128, texts)


def _codec() -> SentencePieceCodec:
    """That of the bundled model, which lends its words to the models with random weights."""
    from fuseq import bundled_model

    return SentencePieceCodec.load(bundled_model() / CODEC)


def _convert(weights: Weights) -> None:
    """Give the subject to CTranslate2, if it is here and was not given it before."""
    if importlib.util.find_spec("ctranslate2") is not None:
        ctranslate2.convert(weights)


def write_marian(shape: Shape, folder: Path) -> None:
    """A MarianMT checkpoint as OPUS-MT publishes them, with random weights: config, safetensors, SentencePiece."""
    import torch

    from fuseq import bundled_model

    transformers = huggingface.quiet()
    folder.mkdir(parents=True)
    codec, pieces = bundled_model() / CODEC, _codec()
    own = [piece for piece in pieces.pieces(range(pieces.size)) if piece not in ("<pad>", "<s>", "</s>", "<unk>")]
    own = own[: shape.vocabulary - 3]
    own += [f"{MARK}word{index}" for index in range(shape.vocabulary - 3 - len(own))]
    vocabulary = {piece: index for index, piece in enumerate(["</s>", "<unk>", *own, "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    for side in ("source", "target"):
        shutil.copy(codec, folder / f"{side}.spm")
    pad = shape.vocabulary - 1
    config = transformers.MarianConfig(
        vocab_size=shape.vocabulary,
        d_model=shape.size,
        encoder_layers=shape.encoder_layers,
        decoder_layers=shape.decoder_layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=shape.feed_forward,
        decoder_ffn_dim=shape.feed_forward,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        init_std=shape.size**-0.5,  # logits of unit variance, so that words differ by more than rounding
        pad_token_id=pad,
        eos_token_id=0,
        bos_token_id=0,
        decoder_start_token_id=pad,
        forced_eos_token_id=None,  # would put an end symbol where the length is forced
        dropout=0.1,
    )
    torch.manual_seed(SEED)
    model = transformers.MarianMTModel(config)
    with torch.no_grad():
        model.model.shared.weight[pad] = 0  # the decoder starts from a zero embedding
    model.generation_config.bad_words_ids = [[pad]]
    model.generation_config.forced_eos_token_id = None
    model.generation_config.max_length = 512
    model.save_pretrained(folder)
    tokenizer = transformers.MarianTokenizer(
        str(folder / "source.spm"), str(folder / "target.spm"), str(folder / "vocab.json"), model_max_length=512
    )
    tokenizer.save_pretrained(folder)


def _bundled(options: Options) -> Subject:
    from fuseq import bundled_model
    from serving.core.codecs import open_codec
    from serving.core.manifest import open_bundle

    bundle = open_bundle(options.bundle or bundled_model())
    special = bundle.manifest.special

    def build(folder: Path) -> Weights:
        from export.pipeline import Options as ExportOptions
        from export.pipeline import export_bundle
        from export.subject import Codecs
        from export.subject import Subject as ExportSubject

        size = bundle.manifest.target_codec.size
        weights = Weights(str(folder), "fuseq", size, special.pad, special.eos, special.bos)
        model = _trained(options, bundle)
        huggingface.save_m2m100(model, huggingface.folder_of(weights))
        shutil.copytree(bundle.path, folder / BUNDLE)
        codecs = Codecs.joint(bundle.file(bundle.manifest.source_codec.file).read_bytes())
        config = dict(bundle.manifest.architecture_config)
        subject = ExportSubject(model, codecs, bundle.manifest.architecture, config, bundle.manifest.name)
        export_bundle(subject, folder / EXACT_BUNDLE, ExportOptions(precisions=("fp32",), gate=False))
        return weights

    files = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
    weights = _folder("bundled", options, {"files": files, "run": str(options.run or "")}, build)
    _convert(weights)
    texts, references = sentences(options)
    codec = open_codec(bundle, bundle.manifest.source_codec)
    longest = bundle.manifest.limits.source - 1
    sources = [[*codec.encode(text)[:longest], special.eos] for text in texts]
    limit = bundle.manifest.limits.target
    peers = ("ctranslate2", "huggingface", "plain-onnx")  # Marian has no start symbol, this model has
    return Subject("bundled", weights, sources, 0, limit, tuple(texts), True, tuple(references), peers)


def _trained(options: Options, bundle: Any) -> Any:
    """The bundled model in PyTorch: from its training, or out of the bundle."""
    from benchmarks.weights import model_of

    if options.run is None:
        return model_of(bundle)
    from training.checkpoint import load_trained

    return load_trained(options.run).model.eval()


def sentences(options: Options) -> tuple[Sequence[str], Sequence[str]]:
    """English sentences, and their German references where a test set is at hand.

    Raises:
        ConfigError: the test set's files are not parallel.
    """
    own = SENTENCES.read_text(encoding="utf-8").splitlines()
    if options.data is None:
        return own[:: 40 if options.tiny else 1], ()
    files = [options.data / f"test.{language}" for language in ("en", "de")]
    try:
        texts, references = (file.read_text(encoding="utf-8").splitlines() for file in files)
    except OSError as error:
        raise ConfigError(f"--data {options.data}: {error.filename}: {error.strerror}") from None
    if len(texts) != len(references) or not texts:
        raise ConfigError(f"--data {options.data}: {len(texts)} sources and {len(references)} references")
    return (texts[:8], references[:8]) if options.tiny else (texts, references)


def _bahdanau(options: Options) -> Subject:
    from serving.core.types import SpecialIds

    width, vocabulary = 16 if options.tiny else 256, 8_000
    special = SpecialIds()

    def build(folder: Path) -> Weights:
        import torch

        from export.pipeline import Options as ExportOptions
        from export.pipeline import export_bundle
        from export.subject import Codecs
        from export.subject import Subject as ExportSubject
        from fuseq import bundled_model
        from training.models.bahdanau import Bahdanau, Config
        from training.models.base import Sizes

        torch.manual_seed(SEED)
        config: dict[str, Any] = {"embedding": width, "hidden": width, "attention": width}
        model = Bahdanau(Config(**config), Sizes(vocabulary, vocabulary, 128, 160, special)).eval()
        torch.save({"config": config, "vocabulary": vocabulary, "state": model.state_dict()}, folder / RECURRENT)
        codecs = Codecs.joint((bundled_model() / CODEC).read_bytes())
        subject = ExportSubject(model, codecs, "bahdanau", config, "bahdanau")
        export_bundle(subject, folder / BUNDLE, ExportOptions(gate=False))
        (folder / EXACT_BUNDLE).symlink_to(BUNDLE)
        return Weights(str(folder), "bahdanau", vocabulary, special.pad, special.eos, special.bos)

    weights = _folder("bahdanau", options, {"width": width, "vocabulary": vocabulary}, build)
    length = 6 if options.tiny else LENGTH
    sources = random_sources(range(300, vocabulary), weights.eos, 128, length)
    peers = ("pytorch-eager", "pytorch-compiled", "plain-onnx")
    return Subject("bahdanau", weights, sources, length, 128, peers=peers)
