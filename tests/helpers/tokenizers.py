"""A byte-level tokenizer small enough for any test checkpoint: one token a byte, then a few special ones."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_TOKENS = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_byte_tokenizer(path: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json into a checkpoint directory; returns it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def join_tokens(path: Path, *pairs: tuple[str, str]) -> None:
    """Have the tokenizer there write each pair of tokens, as its vocabulary spells them, as one more token."""
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    for left, right in pairs:
        tokenizer["model"]["vocab"][left + right] = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
        tokenizer["model"]["merges"].append([left, right])
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
