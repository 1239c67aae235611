"""CTranslate2 in LitServe with its dynamic batching: HTTP, one process for the model, batches of whatever came."""

from __future__ import annotations

import json
import sys
from typing import Any

import litserve

from benchmarks.servers.text import open_translator, translate


class Api(litserve.LitAPI):  # type: ignore[misc]
    """A call holds texts; a batch holds calls."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(max_batch_size=spec["max_batch"], batch_timeout=spec["batch_timeout"])
        self._settings = spec

    def setup(self, device: str) -> None:
        """In the worker's process."""
        self._translator, self._tokenizer = open_translator(self._settings)

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """Tokens of every text, and the beam. Without annotations: LitServe takes them for parameters of the URL."""
        return [self._tokenizer.encode(text) for text in request["texts"]], request["beam"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        """As they are."""
        return list(inputs)

    def predict(self, calls: Any) -> list[list[list[str]]]:
        """All sources of all calls in one batch; LitServe hands over a bare call where batching is off."""
        if isinstance(calls, tuple):
            return translate(self._translator, calls[0], calls[1], self._settings)  # type: ignore[return-value]
        found: list[list[list[str]]] = [[] for _ in calls]
        for beam in {call[1] for call in calls}:
            chosen = [index for index, call in enumerate(calls) if call[1] == beam]
            outputs = iter(translate(self._translator, [s for i in chosen for s in calls[i][0]], beam, self._settings))
            for index in chosen:
                found[index] = [next(outputs) for _ in calls[index][0]]
        return found

    def unbatch(self, output: list[Any]) -> list[Any]:
        """As they are."""
        return list(output)

    def encode_response(self, output: list[list[str]]) -> dict[str, Any]:
        """Texts."""
        return {"texts": [self._tokenizer.decode(tokens) for tokens in output]}


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    server = litserve.LitServer(Api(spec), accelerator="cpu", workers_per_device=spec["processes"], timeout=60)
    server.run(host="127.0.0.1", port=spec["port"], generate_client_file=False, log_level="error",
               num_api_servers=spec["api_servers"])  # fmt: skip
