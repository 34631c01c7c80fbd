"""Tokenizer of a GGUF file, translated into `tokenizer.json` and `tokenizer_config.json`."""

from collections.abc import Callable, Mapping

import tokenizers

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.architectures import find_architecture
from tandem.models.gguf.byte_level import byte_level
from tandem.models.gguf.file import GgufFile
from tandem.models.gguf.sentencepiece import sentencepiece
from tandem.models.gguf.vocabulary import read_id, read_tokens

_TEMPLATE = "tokenizer.chat_template"
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_KINDS: Mapping[str, Callable[[GgufFile], tokenizers.Tokenizer]] = {
    "gpt2": byte_level,
    "llama": lambda file: sentencepiece(file, find_architecture(file)[1].sentencepiece),
}


def tokenizer_json(file: GgufFile) -> str:
    """The content of `tokenizer.json`.

    Raises:
        CorruptCheckpointError: metadata is missing, of the wrong kind, or contradicts itself.
        UnsupportedCheckpointError: a kind of tokenizer, or a pre-tokenisation, that is not supported.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedCheckpointError(
            f"{file.path}: tokenizer.ggml.model={kind!r} is not served from GGUF; supported: 'gpt2', byte-level BPE, "
            "and 'llama', SentencePiece. Take the model's Hugging Face directory instead"
        )
    return str(_KINDS[kind](file).to_str())


def tokenizer_config(file: GgufFile) -> dict[str, object]:
    """The content of `tokenizer_config.json`: named tokens and the chat templates.

    Raises:
        CorruptCheckpointError: metadata are of the wrong kind, or lack a chat template that they name.
    """
    tokens = read_tokens(file)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _NAMED.items():
        token_id = read_id(file, f"{key}_token_id", len(tokens))
        if token_id is not None:
            config[name] = tokens[token_id]
    templates = _read_templates(file)
    if templates:
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    return config


def _read_templates(file: GgufFile) -> dict[str, str]:
    """The chat templates by name; a file has the default one under a key without a name, and a list of the others."""
    names = file.metadata.get(f"{_TEMPLATE}s", [])
    keys = {"default": _TEMPLATE} if _TEMPLATE in file.metadata else {}
    for name in names if isinstance(names, list) else [names]:
        keys[str(name)] = f"{_TEMPLATE}.{name}"
    found = {name: file.metadata.get(key) for name, key in keys.items()}
    templates = {name: template for name, template in found.items() if isinstance(template, str)}
    for name in found.keys() - templates.keys():
        raise CorruptCheckpointError(f"{file.path}: {keys[name]} is no text; convert or download it again")
    return templates
