import pytest

from tandem.accounts.open import open_store
from tandem.accounts.redis_store import RedisAccounts
from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigurationError
from tandem.locality.redis import RedisIndex
from tandem.redis_client import connect
from tandem.sentinel_url import SentinelUrl

WRONG = (
    "redis+sentinel://host:1",
    "redis+sentinel://host:1/",
    "redis+sentinel://:secret@host:port/service",
    "redis+sentinel://host:1,/service",
    "redis+sentinel:///service",
    "redis+sentinel://host:1/service/db",
    "redis+sentinel://host:1/service?client_name=x",
    "redis+sentinel://host:1/service?sentinel_password",
    "redis+sentinel://host:1/?sentinel_password=secret",
    "redis+sentinel://host:1/service?sentinel_pasword=secret",
    "redis+sentinel://host:1,redis..svc:2/service",
    "redis://me:secret@redis..svc:6379",
    "rediss://a." + 64 * "b",
)


def test_what_a_url_says() -> None:
    assert SentinelUrl.parse("redis+sentinel://a,b:5,[::1]:6/main") == SentinelUrl(
        (("a", 26379), ("b", 5), ("::1", 6)), "main"
    )
    whole = (
        "rediss+sentinel://me:se%40cret@a:1/main/3?sentinel_username=you&sentinel_password=wo%2Frd&ssl_ca_certs=/ca.crt"
    )
    assert SentinelUrl.parse(whole) == SentinelUrl(
        (("a", 1),), "main", 3, True, "me", "se@cret", "you", "wo/rd", "/ca.crt"
    )
    assert "cret" not in repr(SentinelUrl.parse(whole))
    assert SentinelUrl.is_one(whole)
    assert not SentinelUrl.is_one("redis://a:1/main")


@pytest.mark.parametrize("url", WRONG)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    for take in (connect, RedisIndex):
        with pytest.raises(ConfigurationError, match="is not understood; write redis://") as caught:
            take(url)
        assert "secret" not in str(caught.value)


def test_tls_goes_to_the_master_and_the_sentinels() -> None:
    url = SentinelUrl.parse("rediss+sentinel://a:1/main?ssl_ca_certs=/ca.crt")
    for options in (url.master_options(), url.sentinel_options()):
        assert (options["ssl"], options["ssl_ca_certs"]) == (True, "/ca.crt")
    assert connect("rediss+sentinel://a:1/main?ssl_ca_certs=/ca.crt").connection_pool.connection_kwargs["ssl_ca_certs"]
    RedisIndex("rediss+sentinel://a:1/main?ssl_ca_certs=/ca.crt").close()


def test_accounts_may_be_where_sentinels_say() -> None:
    assert isinstance(open_store("redis+sentinel://a:1/main", ManualClock()), RedisAccounts)
