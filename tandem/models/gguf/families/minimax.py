"""Row of the table `architectures` for GGUF's MiniMax-M2: norms over all heads of q and k, part of each head rotated,
experts by sigmoid in every layer.
"""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import ATTENTION, HEAD_NORMS, PRE_NORMS, Architecture, Config, TargetTensor
from tandem.models.gguf.families.experts import SIGMOID
from tandem.models.gguf.file import GgufFile

_EXPERTS = {
    "ffn_gate_inp": TargetTensor("block_sparse_moe.gate"),
    "ffn_gate_exps": TargetTensor("block_sparse_moe.experts.{}.w1"),
    "ffn_up_exps": TargetTensor("block_sparse_moe.experts.{}.w3"),
    "ffn_down_exps": TargetTensor("block_sparse_moe.experts.{}.w2"),
    "exp_probs_b.bias": TargetTensor("block_sparse_moe.e_score_correction_bias"),
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    fields.only("expert_gating_func", (SIGMOID,), f"{SIGMOID} (sigmoid)")
    head_dim, share = config["head_dim"], config.get("partial_rotary_factor", 1.0)
    assert isinstance(head_dim, int)
    assert isinstance(share, float)
    return {
        "intermediate_size": fields.count("expert_feed_forward_length", high=1 << 20),
        "num_local_experts": fields.count("expert_count", high=1 << 12),
        "num_experts_per_tok": fields.count("expert_used_count", high=1 << 12),
        "rotary_dim": round(share * head_dim),
    }


MINIMAX_M2 = Architecture(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    PRE_NORMS | ATTENTION | HEAD_NORMS | _EXPERTS,
    _read,
    has_partial_rope=True,
)
