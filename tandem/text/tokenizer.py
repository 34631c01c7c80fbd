"""A checkpoint's tokenizer: text to token ids and back, equal to transformers' fast tokenizers.

Owns the loaded `tokenizers` object. Immutable after loading, except for a cache of tokens' bytes, and safe to share
between threads. Never truncates, pads or "cleans up" text in either direction.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tandem.core.errors import CorruptCheckpointError, InvalidRequestError, UnsupportedCheckpointError
from tandem.text.decoder_rules import DecoderRules
from tandem.text.files import (
    MAX_TOKENIZER_BYTES,
    NAMED_TOKENS,
    JsonObject,
    extra_tokens,
    named_tokens,
    parse_object,
    read_optional_object,
    read_text,
    read_tokenizer_config,
    template_tokens,
    token_content,
)

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # of added tokens


class Tokenizer:
    """Encodes and decodes. `vocab_size` is the largest known id + 1; a model may have more logits (padding)."""

    def __init__(self, backend: tokenizers.Tokenizer, rules: DecoderRules, names: Mapping[str, str]) -> None:
        self.backend = backend
        self.rules = rules
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id: int | None = self._named_id(names, "bos_token")
        self.eos_token_id: int | None = self._named_id(names, "eos_token")

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Loads the tokenizer of the checkpoint directory `path`.

        Raises:
            UnsupportedCheckpointError: there is no tokenizer.json, or its decoder cannot be streamed exactly.
            CorruptCheckpointError: a file is damaged, too large or of the wrong shape.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise UnsupportedCheckpointError(_missing_message(path))
        text = read_text(file, MAX_TOKENIZER_BYTES)
        decoder = parse_object(text, file).get("decoder")
        backend = _parse_backend(text, file)
        config = read_tokenizer_config(path)
        _add_tokens(backend, config, path)
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        return cls(backend, DecoderRules.from_json(decoder), named_tokens(config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the checkpoint puts around a text (often a bos).

        Other Python threads run meanwhile.

        Raises:
            InvalidRequestError: `text` holds a lone surrogate, so it is not Unicode text; or this tokenizer has no
                tokens for it.
        """
        return list(self._encodings(self.backend.encode_batch_fast, [text], add_special_tokens)[0].ids)

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text by itself, without special tokens around it; otherwise as `encode`."""
        return [found.ids for found in self._encodings(self.backend.encode_batch_fast, list(texts), False)]

    def token_ends(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """For each token that `encode` returns, the number of characters of `text` up to its end."""
        return [end for _, end in self._encodings(self.backend.encode_batch, [text], add_special_tokens)[0].offsets]

    def _encodings(self, encode: Callable[..., Any], texts: list[str], add_special_tokens: bool) -> Sequence[Any]:
        """NOTE: a batch even of one, because the library's `encode` would hold the interpreter's lock."""
        try:
            found: Sequence[Any] = encode(texts, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(f"the text cannot be encoded, it is not valid Unicode: {error}") from error
        except BaseException as error:  # NOTE: the library raises bare Exception, and its panics not even that
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise InvalidRequestError(f"the model's tokenizer cannot encode the text: {error}") from error
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids that name no token add nothing, broken UTF-8 becomes U+FFFD."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The token string as the vocabulary spells it, or None where `token_id` names no token."""
        name = self.backend.id_to_token(token_id)
        return None if name is None else str(name)

    def token_id(self, token: str) -> int | None:
        """The id of a token string as the vocabulary spells it, or None."""
        return _id_of(self.backend, token)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Ids by token string, added tokens included."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to a text that has begun before it; empty for an id that names no token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.token(token_id)
            known = b"" if token is None else self.rules.piece(token)
            if token is not None:
                self._bytes[token_id] = known
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token rather than text."""
        return token_id in self._special_ids

    def _named_id(self, names: Mapping[str, str], name: str) -> int | None:
        return _id_of(self.backend, names[name]) if name in names else None


def _id_of(backend: tokenizers.Tokenizer, token: str) -> int | None:
    found = backend.token_to_id(token)
    return None if found is None else int(found)


def _missing_message(path: Path) -> str:
    remedy = "convert it with transformers: AutoTokenizer.from_pretrained(path).save_pretrained(path)"
    other = next((name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (path / name).exists()), None)
    if other is not None:
        return f"{path} has {other} but no tokenizer.json; {remedy}"
    return f"{path} has no tokenizer.json; add the checkpoint's, or if it has another tokenizer, {remedy}"


def _parse_backend(text: str, file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # NOTE: the library raises bare Exception for every fault of the file
        raise CorruptCheckpointError(f"{file} is not a tokenizer ({error}); download it again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, config: JsonObject, path: Path) -> None:
    """Add the tokens that only the configuration knows, in the order transformers does."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens = [token for token in _configured_tokens(backend, config, path) if repr(token) not in known]
    contents.update(token.content for token in tokens)
    for value in _special_values(config):
        content = token_content(value)
        if content is not None and content not in contents:
            contents.add(content)
            tokens.append(_added_token(value, path, special=True))
    if tokens:
        backend.add_tokens(tokens)


def _configured_tokens(backend: tokenizers.Tokenizer, config: JsonObject, path: Path) -> list[AddedToken]:
    """Added tokens that the configuration lists, in the order of their ids; named ones are special."""
    decoder, names = config.get("added_tokens_decoder"), set(template_tokens(config).values())
    if decoder is None:
        return [_special_if(token, token.content in names) for token in _legacy_tokens(backend, config, path)]
    if not isinstance(decoder, Mapping) or not all(map(_is_id, decoder)):
        raise CorruptCheckpointError(f"{path}: added_tokens_decoder in tokenizer_config.json must map ids to tokens")
    ordered = [decoder[key] for key in sorted(decoder, key=int)]
    return [_added_token(value, path, special=token_content(value) in names) for value in ordered]


def _is_id(key: str) -> bool:
    return key.isdecimal() and len(key) < 10


def _legacy_tokens(backend: tokenizers.Tokenizer, config: JsonObject, path: Path) -> list[AddedToken]:
    """Tokens of `added_tokens.json` and of tokenizer.json, whose flags count for a token that is in both."""
    ids = read_optional_object(path / "added_tokens.json")
    if not all(isinstance(token_id, int) for token_id in ids.values()):
        raise CorruptCheckpointError(f"{path / 'added_tokens.json'} must map token strings to integer ids")
    special = {content for value in _special_values(config) if (content := token_content(value))}
    tokens = {
        int(token_id): AddedToken(content, normalized=content not in special, special=content in special)
        for content, token_id in ids.items()
    } | backend.get_added_tokens_decoder()
    return [tokens[token_id] for token_id in sorted(tokens)]


def _special_if(token: AddedToken, is_special: bool) -> AddedToken:
    if token.special or not is_special:
        return token
    flags = {name: getattr(token, name) for name in _FLAGS}
    return AddedToken(token.content, special=True, **flags)


def _special_values(config: JsonObject) -> list[Any]:
    """Named special tokens, then the additional ones."""
    extra = extra_tokens(config)
    values = list(extra.values()) if isinstance(extra, Mapping) else extra
    others = [name for name in config if name.endswith("_token") and name not in NAMED_TOKENS]
    named = [config[name] for name in (*NAMED_TOKENS, *others) if name in config]
    return named + (values if isinstance(values, list) else [])


def _added_token(value: Any, path: Path, *, special: bool) -> AddedToken:
    content = token_content(value)
    if not content:
        raise CorruptCheckpointError(f"{path}: {value!r} in tokenizer_config.json is not a token")
    options = value if isinstance(value, Mapping) else {}
    flags = {name: options[name] for name in _FLAGS if name in options}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise CorruptCheckpointError(
            f"{path}: token {content!r} in tokenizer_config.json has a flag that is not boolean"
        )
    return AddedToken(content, special=special or options.get("special") is True, **flags)
