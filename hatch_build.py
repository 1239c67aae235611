"""Build hook: generates the stubs in fuseq/v1 from protos/ for wheels, source distributions and editable installs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = '"""Messages and stubs, generated from protos/fuseq/v1 by the build."""\n'


def generate(root: Path) -> None:
    """Write the stubs of every proto under `root`/protos beside the package that bears its name."""
    from grpc_tools import protoc  # a build requirement

    protos = root / "protos"
    sources = sorted(protos.rglob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{protos}", f"-I{well_known}"]
    arguments += [f"--{kind}_out={root}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main([*arguments, *map(str, sources)]) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(str(source.relative_to(root)) for source in sources)}")
    for folder in {root / source.relative_to(protos).parent for source in sources}:
        (folder / "__init__.py").write_text(PACKAGE, encoding="utf-8")


class StubsHook(BuildHookInterface):
    """Runs before anything is packed."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root))


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent)
