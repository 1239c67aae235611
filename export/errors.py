"""What stops an export. Every message is one line that says what is wrong and what to do."""

from serving.core.errors import FuseqError


class ExportError(FuseqError):
    """The model could not be turned into a graph that is right and fast."""


class ParityError(ExportError):
    """A graph does not compute what the PyTorch model computes."""


class GateError(ExportError):
    """A precision loses more quality than is allowed."""
