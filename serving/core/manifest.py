"""The manifest of a bundle: everything a server must know of it, and the proof of what it is.

A bundle is one folder. `manifest.json` names every other file in it with size and SHA-256; `open_bundle` checks
all of them before anything is parsed and refuses by name what is too new, missing, truncated or altered.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from serving.core.errors import BundleDamaged, BundleError, BundleTooNew, NotFound
from serving.core.state_spec import Role, StateSpec, StateTensor
from serving.core.types import LengthNormalisation, SearchOptions, SearchRules, SpecialIds

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
NEWEST_OPSET = 26
NEWEST_IR = 13

Precision = Literal["fp32", "int8"]


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be one line of printable characters")
    return value


Label = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]  # goes into metrics, logs and messages
Id = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    """Fields a newer writer added are ignored; a change that old readers must not survive raises the schema."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class FileEntry(_Part):
    """One file of the bundle."""

    sha256: str
    bytes: int = Field(ge=0)


class StateEntry(_Part):
    """One tensor of the decoder's state."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]
    role: Role


class CodecEntry(_Part):
    """How text becomes ids and back. `kind` names the codec class, the files are its own inside the bundle."""

    kind: str
    file: str  # its SentencePiece model
    vocabulary: str = ""  # ids of the pieces, where they are not those of the SentencePiece model
    size: int = Field(ge=1)  # ids are 0 .. size - 1
    normalisation: str = ""

    def files(self) -> tuple[str, ...]:
        """Names of its files."""
        return (self.file, self.vocabulary) if self.vocabulary else (self.file,)


class Special(_Part):
    """Ids of the control symbols."""

    pad: Id
    bos: Id
    eos: Id
    unk: Id


class Limits(_Part):
    """Longest source in tokens (end symbol included) and number of decoder positions."""

    source: int = Field(ge=1)
    target: int = Field(ge=1)


class SearchDefaults(_Part):
    """What a request that says nothing gets, and what holds for every request (the last three, see `SearchRules`)."""

    beam: int = Field(default=1, ge=1)
    length_penalty: float = Field(default=0.6, ge=0, le=10)
    max_length_ratio: float = Field(default=2.0, ge=0, le=100)
    max_length_margin: int = Field(default=12, ge=0)
    length_normalisation: LengthNormalisation = LengthNormalisation.GNMT
    end_at_limit: bool = False
    banned: tuple[Id, ...] = ()

    def options(self) -> SearchOptions:
        """Of a request that says nothing."""
        return SearchOptions(
            beam=self.beam,
            length_penalty=self.length_penalty,
            max_length_ratio=self.max_length_ratio,
            max_length_margin=self.max_length_margin,
        )

    def rules(self) -> SearchRules:
        """Of every request."""
        return SearchRules(self.length_normalisation, self.end_at_limit, frozenset(self.banned))


class Tools(_Part):
    """Versions that made the graphs."""

    opset: int
    ir: int
    versions: dict[str, str] = Field(default_factory=dict)  # package -> version


class GraphSet(_Part):
    """The graphs of one precision and what is known of them. Stages: encode, step, align (optional)."""

    graphs: dict[str, str]  # stage -> file
    parity: dict[str, float] = Field(default_factory=dict)  # stage -> largest difference from PyTorch fp32
    quality: dict[str, float | str] = Field(default_factory=dict)  # metric -> value; what on, how
    fusions: dict[str, dict[str, int]] = Field(default_factory=dict)  # stage -> kind -> count
    operators: dict[str, dict[str, int]] = Field(default_factory=dict)  # stage -> operator -> count
    quantized: dict[str, Any] = Field(default_factory=dict)  # what was quantized, what was left and why


class Provenance(_Part):
    """Where the weights come from."""

    data: str = ""
    licence: str = ""
    attribution: str = ""
    details: dict[str, Any] = Field(default_factory=dict)  # split hash, training configuration, steps, date


class Manifest(_Part):
    """The whole manifest."""

    schema_version: int = SCHEMA_VERSION
    name: Label
    version: Label
    task: Literal["translate"] = "translate"
    source_language: str = ""
    target_language: str = ""
    architecture: str
    architecture_config: dict[str, Any] = Field(default_factory=dict)
    state: tuple[StateEntry, ...]
    source_codec: CodecEntry
    target_codec: CodecEntry
    special: Special
    limits: Limits
    search: SearchDefaults = SearchDefaults()
    precisions: dict[str, GraphSet]
    default_precision: str
    tools: Tools
    provenance: Provenance = Provenance()
    files: dict[str, FileEntry]

    def state_spec(self) -> StateSpec:
        """The decoder's state as the engine uses it."""
        return StateSpec(tuple(StateTensor(s.name, s.dtype, s.axes, s.role) for s in self.state))

    def special_ids(self) -> SpecialIds:
        """The control symbols as the search uses them."""
        return SpecialIds(self.special.pad, self.special.bos, self.special.eos, self.special.unk)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A checked bundle on disk."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Path of a file that the manifest names."""
        return self.path / name

    def graphs(self, precision: str | None = None) -> GraphSet:
        """The graphs of a precision, the bundle's default for None.

        Raises:
            NotFound: the bundle does not hold that precision.
        """
        wanted = precision or self.manifest.default_precision
        if wanted not in self.manifest.precisions:
            held = ", ".join(sorted(self.manifest.precisions))
            raise NotFound(f"bundle {self.manifest.name!r} has no precision {wanted!r}; it holds {held}")
        return self.manifest.precisions[wanted]


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_file(root: Path, name: str, entry: FileEntry) -> None:
    path = root / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise BundleDamaged(f"bundle {root}: file name {name!r} leaves the folder")
    if not path.is_file():
        raise BundleDamaged(f"bundle {root}: {name} is missing; copy the whole folder again")
    size = path.stat().st_size
    if size != entry.bytes:
        raise BundleDamaged(f"bundle {root}: {name} is truncated or altered ({size} bytes, not {entry.bytes})")
    if sha256_of(path) != entry.sha256:
        raise BundleDamaged(f"bundle {root}: {name} was altered (its SHA-256 differs from the manifest's)")


def _check_versions(root: Path, raw: dict[str, Any]) -> None:
    schema = raw.get("schema_version")
    if not isinstance(schema, int):
        raise BundleDamaged(f"bundle {root}: {MANIFEST_NAME} has no schema version")
    if schema > SCHEMA_VERSION:
        raise BundleTooNew(f"bundle {root}: schema {schema} is newer than this fuseq's {SCHEMA_VERSION}; upgrade fuseq")
    tools = raw.get("tools")
    if not isinstance(tools, dict):
        return  # not valid, which is said later, with its place
    for label, newest in (("opset", NEWEST_OPSET), ("ir", NEWEST_IR)):
        have = tools.get(label, 0)
        if isinstance(have, int) and have > newest:
            raise BundleTooNew(
                f"bundle {root}: ONNX {label} {have} is newer than the {newest} supported; upgrade fuseq"
            )


def open_bundle(path: Path | str) -> Bundle:
    """Read and check a bundle.

    Raises:
        NotFound: there is no bundle at `path`.
        BundleTooNew: it was written by a newer schema, opset or IR version.
        BundleDamaged: the manifest or a file is missing, truncated or altered.
        BundleError: the manifest contradicts itself.
    """
    root = Path(path)
    manifest_file = root / MANIFEST_NAME
    if not manifest_file.is_file():
        raise NotFound(f"{root} is not a bundle: it has no {MANIFEST_NAME}")
    try:
        raw = json.loads(manifest_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleDamaged(f"bundle {root}: {MANIFEST_NAME} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise BundleDamaged(f"bundle {root}: {MANIFEST_NAME} is nested too deeply to be a manifest") from None
    except ValueError as error:
        raise BundleDamaged(f"bundle {root}: {MANIFEST_NAME} is truncated or altered ({error})") from error
    if not isinstance(raw, dict):
        raise BundleDamaged(f"bundle {root}: {MANIFEST_NAME} is not an object")
    _check_versions(root, raw)
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BundleDamaged(f"bundle {root}: {MANIFEST_NAME}: {where}: {first['msg']}") from error
    manifest.state_spec()
    size = min(manifest.source_codec.size, manifest.target_codec.size)
    if outside := {name: one for name, one in manifest.special.model_dump().items() if one >= size}:
        raise BundleDamaged(f"bundle {root}: control symbols {outside} are outside the vocabulary of {size}")
    for name, entry in manifest.files.items():
        try:
            _check_file(root, name, entry)
        except OSError as error:
            raise BundleDamaged(f"bundle {root}: {name[:100]!r} cannot be read: {error.strerror}") from error
    named = {*manifest.source_codec.files(), *manifest.target_codec.files()}
    for graphs in manifest.precisions.values():
        named.update(graphs.graphs.values())
    if unlisted := named - set(manifest.files):
        raise BundleDamaged(f"bundle {root}: {sorted(unlisted)} are named but have no hash")
    if manifest.default_precision not in manifest.precisions:
        raise BundleError(f"bundle {root}: the default precision {manifest.default_precision!r} is not in it")
    return Bundle(root, manifest)
