"""Opens the locality index that a URL names; none means the one inside this process. Imports only what is chosen."""

from tandem.locality.base import DEFAULT_MAX_BLOCK_REPLICAS, LocalityIndex


def open_index(url: str | None, *, max_block_replicas: int = DEFAULT_MAX_BLOCK_REPLICAS) -> LocalityIndex:
    """`redis://`, `rediss://` or `unix://` URL → `RedisIndex`; None or "" → `EmbeddedIndex`.

    Raises:
        ConfigurationError: for a URL or bound that cannot be honoured. Whether Redis is there is not asked.
    """
    if not url:
        from tandem.locality.embedded import EmbeddedIndex

        return EmbeddedIndex(max_block_replicas)
    from tandem.locality.redis import RedisIndex

    return RedisIndex(url, max_block_replicas=max_block_replicas)
