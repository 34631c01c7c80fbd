"""vLLM's own n-gram drafts, as its configuration says them."""


def ngram_drafts(num_drafts: int) -> dict[str, str | int]:
    """NOTE: as many tokens must agree as for our own n-gram drafts."""
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 8}
    return {"method": "ngram", "num_speculative_tokens": num_drafts, **lookup}
