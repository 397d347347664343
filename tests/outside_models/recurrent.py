"""Layer-norm LSTM language model with a hand-written cell.

A stack of LN-LSTM layers is unrolled over time in Python, with residual connections between layers,
tied softmax weights and a carried state that can be passed back in for truncated BPTT.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

State = list[tuple[Tensor, Tensor]]


class LayerNormLSTMCell(nn.Module):
    def __init__(self, input_size: int, hidden_size: int, forget_bias: float = 1.0) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.forget_bias = forget_bias
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size))
        self.ln_ih = nn.LayerNorm(4 * hidden_size, elementwise_affine=False)
        self.ln_hh = nn.LayerNorm(4 * hidden_size)
        self.ln_c = nn.LayerNorm(hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1.0 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight_ih, -bound, bound)
        for w in self.weight_hh.data.chunk(4, dim=0):
            nn.init.orthogonal_(w)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        gates = self.ln_ih(x @ self.weight_ih.t()) + self.ln_hh(h @ self.weight_hh.t()) + self.bias
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f + self.forget_bias) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.ln_c(c))
        return h, c


class LSTMLanguageModel(nn.Module):
    def __init__(
        self, vocab_size: int = 1000, hidden: int = 192, num_layers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.num_layers = num_layers
        self.embed = nn.Embedding(vocab_size, hidden)
        self.cells = nn.ModuleList([LayerNormLSTMCell(hidden, hidden) for _ in range(num_layers)])
        # learned initial state, one (h, c) per layer
        self.h0 = nn.Parameter(torch.zeros(num_layers, hidden))
        self.c0 = nn.Parameter(torch.zeros(num_layers, hidden))
        self.drop = nn.Dropout(dropout)
        self.out_norm = nn.LayerNorm(hidden)
        self.decoder = nn.Linear(hidden, vocab_size)
        self.decoder.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=hidden**-0.5)

    def init_state(self, batch_size: int) -> State:
        return [
            (h.unsqueeze(0).expand(batch_size, -1), c.unsqueeze(0).expand(batch_size, -1))
            for h, c in zip(self.h0, self.c0, strict=True)
        ]

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """tokens: (batch, time) int64. Returns logits (batch, time, vocab) and the final state."""
        if tokens.dim() != 2:
            raise ValueError(f"expected (batch, time) tokens, got shape {tuple(tokens.shape)}")
        batch, steps = tokens.shape
        if state is None:
            state = self.init_state(batch)
        assert len(state) == self.num_layers, "state must have one (h, c) pair per layer"
        state = list(state)  # don't modify the caller's list

        x = self.drop(self.embed(tokens) * math.sqrt(self.hidden))
        outputs = []
        for t in range(steps):
            inp = x[:, t]
            for layer, cell in enumerate(self.cells):
                h, c = cell(inp, state[layer])
                state[layer] = (h, c)
                inp = self.drop(h) + inp if layer > 0 else self.drop(h)
            outputs.append(inp)
        y = self.out_norm(torch.stack(outputs, dim=1))
        return self.decoder(y), state


def detach_state(state: State) -> State:
    """Cut the graph between BPTT segments."""
    return [(h.detach(), c.detach()) for h, c in state]


def build() -> nn.Module:
    torch.manual_seed(0)
    return LSTMLanguageModel()


def example_inputs(model: nn.Module) -> tuple:
    gen = torch.Generator().manual_seed(1)
    batch, steps = 8, 24
    tokens = torch.randint(0, model.embed.num_embeddings, (batch, steps), generator=gen)
    state = [
        (
            torch.randn(batch, model.hidden, generator=gen).tanh(),
            torch.randn(batch, model.hidden, generator=gen),
        )
        for _ in range(model.num_layers)
    ]
    return tokens, state
