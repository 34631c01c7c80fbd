"""EAGLE-3 head in PyTorch, as it is trained: every row guesses several tokens deep (Li et al. 2025, arXiv:2503.01840).

Parameters have the published names, so what is saved is what `tandem.models.heads` reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of a head. `hidden`: as the model's. `num_tokens`: tokens that it may guess."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    rope_theta: float
    eps: float


class _Attention(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(2 * sizes.hidden, query, bias=False)
        self.k_proj = nn.Linear(2 * sizes.hidden, key, bias=False)
        self.v_proj = nn.Linear(2 * sizes.hidden, key, bias=False)
        self.o_proj = nn.Linear(query, sizes.hidden, bias=False)


class _FeedForward(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.hidden_norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.self_attn = _Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.mlp = _FeedForward(sizes)


class EagleNetwork(nn.Module):
    """A head before training: it passes the last of the three states on, which is a fair guess at the next token.

    Args:
        embedding: [vocab, hidden], the model's; not trained, not saved.
        token_ids: [num_tokens], the model's tokens that the head may guess, ascending.
        output: [num_tokens, hidden], the model's output head at those.
        final_norm: [hidden], the model's.
    """

    def __init__(
        self, sizes: HeadSizes, embedding: Tensor, token_ids: Tensor, output: Tensor, final_norm: Tensor
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = embedding
        self.token_ids = token_ids
        self.output = output
        self.fc = nn.Linear(3 * sizes.hidden, sizes.hidden, bias=False)
        self.midlayer = _Layer(sizes)
        self.norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.lm_head = nn.Linear(sizes.hidden, sizes.num_tokens, bias=False)
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, 2 * sizes.hidden :] = torch.eye(sizes.hidden)
            self.midlayer.self_attn.o_proj.weight.zero_()
            self.midlayer.mlp.down_proj.weight.zero_()
            self.norm.weight.copy_(final_norm)
            self.lm_head.weight.copy_(output)

    def guesses(self, states: Tensor, token_ids: Tensor, num_depths: int) -> list[Tensor]:
        """Hidden states from which each row's tokens are guessed, after the last norm: one [batch, length, hidden] for
        each depth.

        At depth d row i has seen the text up to token i + 1 + d, of which its own guesses are taken to be the last d.

        Args:
            states: [batch, length, 3 * hidden].
            token_ids: [batch, length + num_depths], token 0 being that behind row 0.
        """
        length = states.shape[1]
        hidden = self.fc(states)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for depth in range(num_depths):
            embedded = F.embedding(token_ids[:, depth : depth + length], self.embedding)
            hidden = self._layer(embedded, hidden, depth, keys, values)
            found.append(self.norm(hidden.float()))
        return found

    def offsets(self) -> Tensor:
        """`d2t`: what each of its tokens' numbers is less than the model's; int64 [num_tokens]."""
        return self.token_ids - torch.arange(len(self.token_ids))

    def _layer(self, embedded: Tensor, hidden: Tensor, depth: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(embedded.float()), layer.hidden_norm(hidden.float())), dim=-1)
        hidden = hidden + self._attend(x, depth, keys, values)
        fed: Tensor = layer.mlp(layer.post_attention_layernorm(hidden.float()))
        return hidden + fed

    def _attend(self, x: Tensor, depth: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Row i attends to the rows of depth 0 up to its own, and to its own of each further depth up to this."""
        batch, length, _ = x.shape
        attention, sizes = self.midlayer.self_attn, self.sizes
        q = self._rotated(self._split(attention.q_proj(x), sizes.num_heads), depth)
        k = self._rotated(self._split(attention.k_proj(x), sizes.num_kv_heads), depth)
        v = self._split(attention.v_proj(x), sizes.num_kv_heads)
        repeats = sizes.num_heads // sizes.num_kv_heads
        keys.append(k.repeat_interleave(repeats, 1))
        values.append(v.repeat_interleave(repeats, 1))
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        scores = [(q @ keys[0].transpose(2, 3)).float().masked_fill(~seen, float("-inf"))]
        scores += [(q * own).float().sum(-1, keepdim=True) for own in keys[1:]]
        shares = torch.softmax(torch.cat(scores, dim=-1) * sizes.head_dim**-0.5, dim=-1).to(v.dtype)
        mixed = shares[..., :length] @ values[0]
        for number, own in enumerate(values[1:]):
            mixed = mixed + shares[..., length + number, None] * own
        out: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _split(self, x: Tensor, num_heads: int) -> Tensor:
        """[batch, length, num_heads * head_dim] -> [batch, num_heads, length, head_dim]"""
        return x.view(*x.shape[:-1], num_heads, self.sizes.head_dim).transpose(1, 2)

    def _rotated(self, x: Tensor, depth: int) -> Tensor:
        """Rotary embedding of halves; row i at `depth` has position i + depth."""
        half = self.sizes.head_dim // 2
        inverse = self.sizes.rope_theta ** (-torch.arange(half) / half)
        angles = (torch.arange(x.shape[2]) + depth)[:, None] * inverse
        cos, sin = angles.cos(), angles.sin()
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def saved_tensors(network: EagleNetwork) -> dict[str, Tensor]:
    """Tensors of a checkpoint, in bfloat16 but for `d2t`."""
    tensors = {name: value.detach().bfloat16().contiguous() for name, value in network.named_parameters()}
    return tensors | {"d2t": network.offsets()}


def head_config(sizes: HeadSizes, layers: Sequence[int], vocab_size: int, max_positions: int) -> dict[str, object]:
    """`config.json` of a checkpoint. `layers`: of the model, whose inputs are read."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.rope_theta,
        "max_position_embeddings": max_positions,
        "vocab_size": vocab_size,
        "draft_vocab_size": sizes.num_tokens,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
