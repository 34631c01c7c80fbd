"""Creates a gateway's accounts from its settings and logs when there are none. Does not contact Redis yet."""

import logging

from tandem.accounts.accounts import Accounts
from tandem.accounts.journal import Journal
from tandem.accounts.open import open_store
from tandem.accounts.prices import Prices
from tandem.core.addresses import is_loopback
from tandem.core.clock import Clock
from tandem.gateway.settings import GatewaySettings

_logger = logging.getLogger(__name__)


def open_accounts(settings: GatewaySettings, clock: Clock) -> Accounts | None:
    """The accounts that the settings name; None: the gateway is open and asks for no keys.

    Raises:
        ConfigurationError: a setting cannot be honoured.
    """
    prices = Prices.parse(settings.prices)
    if settings.accounts is None:
        level = logging.INFO if is_loopback(settings.host) else logging.WARNING
        _logger.log(level, "no API keys are asked for: everybody who reaches %s may use it", settings.host)
        return None
    journal = None if settings.accounts_journal is None else Journal(settings.accounts_journal)
    lease_s = settings.accounts_lease_s
    store = open_store(settings.accounts.get_secret_value(), clock, lease_s)
    may_be_lost = settings.accounts_when_lost == "allow"
    return Accounts(store, prices, clock, may_be_lost=may_be_lost, journal=journal, lease_s=lease_s)
