"""A tiny bundle and a server on it."""

from tests.serving.rpc.conftest import attending, shared, summing

__all__ = ["attending", "shared", "summing"]
