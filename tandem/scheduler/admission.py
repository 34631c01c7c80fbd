"""Admission of requests: refuses those that could never run, and finds cached prefixes from which others can start."""

from tandem.core.errors import InvalidRequestError, shown
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import PrefixMatch
from tandem.scheduler.request import Request

MAX_PRIORITY = 100  # levels; each equals `aging_steps` steps of waiting, so a larger range would allow starvation


def refuse_impossible(request: Request, max_model_len: int, kv: KVCacheManager) -> None:
    """Raises `InvalidRequestError` for a request that could never run to its end; the message gives the reason."""
    if type(request.priority) is not int or abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority={shown(request.priority)} must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    if not request.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty: it needs at least one token")
    if request.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens={request.max_tokens} leaves no room for an answer; at least 1 is needed")
    if request.num_resumed_tokens >= request.max_tokens:
        raise InvalidRequestError(
            f"{request.num_resumed_tokens} output tokens exist already; max_tokens={request.max_tokens} is reached"
        )
    longest = request.num_prompt_tokens + request.max_tokens
    if longest > max_model_len:
        raise InvalidRequestError(
            f"{request.num_prompt_tokens} prompt tokens and max_tokens={request.max_tokens} exceed the context of "
            f"{max_model_len} tokens; shorten the prompt or lower max_tokens"
        )
    if not kv.fits(longest):
        raise InvalidRequestError(
            f"{longest} tokens do not fit into {kv.usage.total} KV blocks of {kv.layout.block_size} tokens; shorten "
            "the request or enlarge the KV cache"
        )
    if not 0 <= request.num_expected_tokens <= request.num_tokens:
        raise InvalidRequestError(
            f"num_expected_tokens={request.num_expected_tokens} exceeds the request's {request.num_tokens} tokens"
        )


def find_prefix(request: Request, kv: KVCacheManager) -> PrefixMatch:
    """Longest cached prefix from which the request could start."""
    hashes = () if request.needs_whole_prompt else request.block_hashes
    return kv.match(hashes, request.num_tokens, request.num_expected_tokens)


def has_room_for(request: Request, kv: KVCacheManager) -> bool:
    """Whether blocks can be allocated for the request. NOTE: its prefix, which needs no free blocks, is looked up only
    if that decides, since the lookup of a long prompt is slow.
    """
    if kv.can_admit(kv.match([], request.num_tokens), request.num_tokens):
        return True
    return kv.can_admit(find_prefix(request, kv), request.num_tokens)
