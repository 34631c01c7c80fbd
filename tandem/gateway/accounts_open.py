"""A gateway's accounts as its settings ask for them. Says once when there are none; nothing is asked of a Redis yet."""

import logging

from tandem.accounts.accounts import Accounts
from tandem.accounts.journal import Journal
from tandem.accounts.open import open_store
from tandem.accounts.prices import Prices
from tandem.core.addresses import is_loopback
from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError
from tandem.gateway.settings import GatewaySettings

_logger = logging.getLogger(__name__)


def check_anonymous(settings: GatewaySettings) -> None:
    """Raises ConfigurationError for a gateway that strangers could use without anybody having said so."""
    if settings.accounts is None and not settings.allow_anonymous and not is_loopback(settings.host):
        raise ConfigurationError(
            f"host={settings.host!r} is reached by others, and no keys are asked for: set --accounts (TANDEM_ACCOUNTS, "
            "a redis:// URL or a file), or --allow-anonymous (TANDEM_ALLOW_ANONYMOUS=true) where everybody may use it"
        )


def open_accounts(settings: GatewaySettings, clock: Clock) -> Accounts | None:
    """None: everybody may use it.

    Raises:
        ConfigurationError: a setting cannot be honoured.
    """
    prices = Prices.parse(settings.prices)
    if settings.accounts is None:
        level = logging.INFO if is_loopback(settings.host) else logging.WARNING
        _logger.log(level, "no API keys are asked for: everybody who reaches %s may use it", settings.host)
        return None
    journal = None if settings.accounts_journal is None else Journal(settings.accounts_journal)
    store = open_store(settings.accounts.get_secret_value(), clock)
    return Accounts(store, prices, clock, may_be_lost=settings.accounts_when_lost == "allow", journal=journal)
