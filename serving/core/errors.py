"""The one tree of errors. Every message is one line that names the remedy where there is one.

`serving.rpc.interceptors` maps the tree to gRPC status codes, the command line to exit codes.
"""

from __future__ import annotations


class FuseqError(Exception):
    """Root of everything fuseq raises on purpose."""


class InvalidInput(FuseqError):
    """The caller's input or options cannot be served as given; nobody else is hurt."""


class NotFound(FuseqError):
    """No such model, data set, file or device."""


class Overloaded(FuseqError):
    """The queue is full. Retrying later may succeed."""


class DeadlineExceeded(FuseqError):
    """The deadline passed before the work was done."""


class Cancelled(FuseqError):
    """The caller gave the work up."""


class Unavailable(FuseqError):
    """The service is starting, draining or stopped."""


class Unsupported(FuseqError):
    """The model has no such ability (for instance alignments of a model without attention)."""


class ModelFailure(FuseqError):
    """A graph failed on an input, or gave numbers that are none; the fault is the model's, not the caller's."""


class ConfigError(FuseqError):
    """A setting, configuration key or command-line value is wrong."""


class MissingDependency(FuseqError):
    """An optional package is not installed; the message says how to install it."""


class BundleError(FuseqError):
    """A bundle cannot be used."""


class BundleTooNew(BundleError):
    """The bundle was written under a schema, opset or IR version that this fuseq cannot read."""


class BundleDamaged(BundleError):
    """A file of the bundle is missing, truncated or altered."""
