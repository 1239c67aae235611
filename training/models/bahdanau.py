"""Bidirectional LSTM encoder, additive attention, LSTM decoder (Bahdanau, Cho & Bengio 2015)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from serving.core.errors import ConfigError
from serving.core.state_spec import ROW, SOURCE, Role, StateSpec, StateTensor
from training import ops
from training.layers import Dropout, real_positions
from training.models.base import Model, Sizes, State


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model."""

    embedding: int = 256
    hidden: int = 256  # of each encoder direction and of the decoder
    attention: int = 256  # width of the scoring network
    dropout: float = 0.2
    tied: bool = True  # source and target embeddings are one where the codec is shared, and the output's too

    def __post_init__(self) -> None:
        if min(self.embedding, self.hidden, self.attention) < 1 or not 0 <= self.dropout < 1:
            raise ConfigError("model: embedding, hidden and attention must be at least 1, dropout from 0 to under 1")


class Encoder(nn.Module):
    """One bidirectional LSTM layer over right-padded sources."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """x (batch, source, inputs) -> states (batch, source, 2 * hidden), last backward state (batch, hidden)."""
        if torch.compiler.is_exporting():
            return self._exported(x, lengths)
        packed = pack_padded_sequence(x, lengths.cpu().long(), batch_first=True, enforce_sorted=False)
        states, (last, _) = self.lstm(packed)
        return pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0], last[1]

    def _exported(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The same as one runtime operator: packed sequences cannot be exported."""
        lstm = self.lstm
        input_weight = torch.stack([lstm.weight_ih_l0, lstm.weight_ih_l0_reverse])
        hidden_weight = torch.stack([lstm.weight_hh_l0, lstm.weight_hh_l0_reverse])
        bias = torch.stack([lstm.bias_ih_l0 + lstm.bias_hh_l0, lstm.bias_ih_l0_reverse + lstm.bias_hh_l0_reverse])
        states, last, _ = ops.lstm(x, lengths, input_weight, hidden_weight, bias)
        return states, last[:, lstm.hidden_size :]


class AdditiveAttention(nn.Module):
    """e_ij = v^T tanh(W s_{i-1} + U h_j) (Bahdanau et al. 2015, appendix A.1.2); U h_j is computed once a source."""

    def __init__(self, query: int, memory: int, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(query, size, bias=False)  # W
        self.key = nn.Linear(memory, size)  # U, with the one bias of the sum
        self.score = nn.Linear(size, 1, bias=False)  # v

    def forward(self, query: Tensor, keys: Tensor, memory: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """Context (row, memory) and weights (row, source) for query (row, query), keys (row, source, size).

        The sum of the exponentials runs over positions in order and padding adds exact zeros, so neither the
        context nor the weights depend on how far a neighbour made the source axis reach.
        """
        scores = self.score(torch.tanh(self.query(query)[:, None] + keys)).squeeze(-1)  # (row, source)
        scores = scores.masked_fill(~live, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        return (weights[:, None] @ memory).squeeze(1), weights


class Bahdanau(Model):
    """The decoder's state is (hidden, cell); encoder states and attention keys are memory."""

    Config = Config

    def __init__(self, config: Config, sizes: Sizes) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes
        pad = sizes.special.pad
        self.target_embedding = nn.Embedding(sizes.target_vocabulary, config.embedding, padding_idx=pad)
        shared = config.tied and sizes.shared_vocabulary
        self.source_embedding = self.target_embedding
        if not shared:
            self.source_embedding = nn.Embedding(sizes.source_vocabulary, config.embedding, padding_idx=pad)
        self.encoder = Encoder(config.embedding, config.hidden)
        self.attention = AdditiveAttention(config.hidden, 2 * config.hidden, config.attention)
        self.bridge = nn.Linear(config.hidden, config.hidden)  # s_0 = tanh(W_s h_1 backward), appendix A.2.2
        self.gates = nn.Linear(config.embedding + 3 * config.hidden, 4 * config.hidden)  # on [y; c; s]
        self.readout = nn.Linear(config.embedding + 3 * config.hidden, config.embedding)  # on [s; c; y]
        self.projection = nn.Linear(config.embedding, sizes.target_vocabulary)
        self.dropout = Dropout(config.dropout)
        nn.init.normal_(self.target_embedding.weight, std=config.embedding**-0.5)
        if config.tied:
            self.projection.weight = self.target_embedding.weight

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        x = self.dropout(self.source_embedding(source))  # (batch, source, embedding)
        memory, last = self.encoder(x, lengths)
        keys = self.attention.key(memory)  # (batch, source, attention)
        return {"memory": memory, "keys": keys, "source_length": lengths, "backward": last}

    def initial(self, memory: State) -> State:
        state = dict(memory)
        hidden = torch.tanh(self.bridge(state.pop("backward")))  # (batch, hidden)
        return {**state, "hidden": hidden, "cell": torch.zeros_like(hidden)}

    def _cell(self, embedded: Tensor, live: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One LSTM step on [y; c; s]: what the readout reads (row, ...), the new hidden, cell and the weights."""
        hidden, cell = state["hidden"], state["cell"]  # (row, hidden)
        context, weights = self.attention(hidden, state["keys"], state["memory"], live)
        i, f, g, o = self.gates(torch.cat([embedded, context, hidden], -1)).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        return torch.cat([hidden, context, embedded], -1), hidden, cell, weights

    def _logits(self, read: Tensor) -> Tensor:
        return self.projection(self.dropout(torch.tanh(self.readout(read))))

    def step(self, tokens: Tensor, positions: Tensor, state: State) -> tuple[Tensor, State]:
        live = real_positions(state["source_length"], state["memory"].shape[1])
        read, hidden, cell, _ = self._cell(self.target_embedding(tokens), live, state)
        return self._logits(read), {"hidden": hidden, "cell": cell}

    def _unroll(self, source: Tensor, lengths: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Readout inputs (batch, target, ...) and attention weights (batch, target, source), teacher-forced."""
        state = self.initial(self.encode(source, lengths))
        live = real_positions(lengths, source.shape[1])
        embedded = self.dropout(self.target_embedding(target))  # (batch, target, embedding)
        reads, alignment = [], []
        for t in range(target.shape[1]):
            read, hidden, cell, weights = self._cell(embedded[:, t], live, state)
            state = {**state, "hidden": hidden, "cell": cell}
            reads.append(read)
            alignment.append(weights)
        return torch.stack(reads, 1), torch.stack(alignment, 1)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        return self._logits(self._unroll(source, lengths, target)[0])

    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return self._scan_alignment(source, lengths, target)
        return self._unroll(source, lengths, target)[1]

    def _scan_alignment(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """The weights of `_unroll` as one scan: a Python loop would freeze the target axis when it is exported."""
        state = self.initial(self.encode(source, lengths))
        live = real_positions(lengths, source.shape[1])

        def step(carried: tuple[Tensor, Tensor], embedded: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            hidden, cell = carried
            _, hidden, cell, weights = self._cell(embedded, live, {**state, "hidden": hidden, "cell": cell})
            return (hidden, cell), weights.clone()

        embedded = self.target_embedding(target).transpose(0, 1)  # (target, batch, embedding)
        _, alignment = scan(step, (state["hidden"], state["cell"]), embedded)  # (target, batch, source)
        return alignment.transpose(0, 1)

    def state_spec(self) -> StateSpec:
        c = self.config
        return StateSpec(
            (
                StateTensor("memory", "float32", (ROW, SOURCE, 2 * c.hidden), Role.MEMORY),
                StateTensor("keys", "float32", (ROW, SOURCE, c.attention), Role.MEMORY),
                StateTensor("source_length", "int32", (ROW,), Role.MEMORY),
                StateTensor("hidden", "float32", (ROW, c.hidden), Role.RECURRENT),
                StateTensor("cell", "float32", (ROW, c.hidden), Role.RECURRENT),
            )
        )
