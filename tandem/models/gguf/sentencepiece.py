"""SentencePiece BPE tokenizers (`llama`) of GGUF files: pieces with scores, bytes for text without a piece, and often a
space before a text.

Built like the published `tokenizer.json` of Llama 2, Mistral, Phi 3 and Gemma.
"""

import tokenizers
from tokenizers import decoders, models, normalizers

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.families.base import SentencePiece
from tandem.models.gguf.file import GgufFile
from tandem.models.gguf.vocabulary import (
    Kind,
    added,
    as_merge,
    read_flag,
    read_id,
    read_kinds,
    read_strings,
    read_template,
    read_tokens,
)

_MARK = "\u2581"  # of a space
_LITERAL = (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)


def sentencepiece(file: GgufFile, rules: SentencePiece) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        CorruptCheckpointError: metadata is missing, of the wrong kind, or contradicts itself.
        UnsupportedCheckpointError: texts are normalised in further ways.
    """
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if file.metadata.get(f"tokenizer.ggml.{name}"):
            raise UnsupportedCheckpointError(f"{file.path}: tokenizer.ggml.{name} is not served; supported: without it")
    stored = read_tokens(file)
    tokens = _spelled(file, stored) if rules.by_position else stored
    kinds = read_kinds(file, stored)
    unknown = read_id(file, "unknown_token_id", len(tokens))
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            _read_merges(file, tokens, kinds, rules),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replaced = normalizers.Replace(" ", _MARK)
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if read_flag(file, "add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), replaced])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replaced
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens(
        [
            added(token, kind, rstrip=rules.strips_after(token, kind == Kind.CONTROL))
            for token, spelled, kind in zip(stored, tokens, kinds, strict=True)
            if kind in _LITERAL and token == spelled
        ]
    )
    template = read_template(file, tokens, adds_bos=True)
    if template is not None:
        backend.post_processor = template
    return backend


def _spelled(file: GgufFile, tokens: list[str]) -> list[str]:
    """Tokens, with those of only spaces spelled as pieces that merges can make."""
    spelled = [token.replace(" ", _MARK) if token and not token.strip(" ") else token for token in tokens]
    if len(set(spelled)) != len(tokens):
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.tokens has spaces twice, as they are and as {_MARK}")
    return spelled


def _read_merges(file: GgufFile, tokens: list[str], kinds: list[int], rules: SentencePiece) -> list[tuple[str, str]]:
    """Pairs of pieces in the order in which they merge: the file's, or all pairs that make a piece, the best piece
    first.

    NOTE: of equally good pairs the one with the longer first part comes first, as in transformers.
    """
    if "tokenizer.ggml.merges" in file.metadata:
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        return [as_merge(file, text, vocabulary) for text in read_strings(file, "merges")]
    scores = [-float(index) for index in range(len(tokens))] if rules.by_position else _read_scores(file, len(tokens))
    spaces = [token.startswith(_MARK) and not token.strip(_MARK) for token in tokens]
    pieces = {
        token: score
        for token, score, kind, is_spaces in zip(tokens, scores, kinds, spaces, strict=True)
        if kind == Kind.NORMAL or (kind == Kind.USER_DEFINED and is_spaces)
    }
    merges = [
        (score, cut, piece)
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort(key=lambda merge: (merge[0], merge[1], len(merge[2]) - merge[1]), reverse=True)
    return [(piece[:cut], piece[cut:]) for _, cut, piece in merges]


def _read_scores(file: GgufFile, num_tokens: int) -> list[float]:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != num_tokens or not all(isinstance(x, float) for x in scores):
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.scores must have one number a token")
    return [float(score) for score in scores]
