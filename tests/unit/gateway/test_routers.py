"""A gateway's routers: one that is away is passed over."""

import signal
from dataclasses import replace
from functools import partial
from typing import NoReturn

import pytest

from tandem.core.errors import UnavailableError
from tandem.core.scope import UNSCOPED
from tandem.gateway.routers import Routers
from tandem.rpc.client import ClientPool, RouterClient
from tandem.rpc.messages import PairCall
from tandem.rpc.server import serve_router
from tests.helpers.secret import AS_GATEWAY, AS_ROUTER
from tests.unit.rpc.handlers import HERE, Router, run
from tests.unit.rpc.processes import MORTAL_ROUTER, running


def test_a_router_that_hangs_is_passed_over_also_where_every_address_had_led_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As with a balanced address and that of all routers: each connection had been made to one that hangs now, and was
    asked again and again, so that nothing was served while another router was there.
    """

    async def check() -> None:
        server = await serve_router(Router(), "127.0.0.1:0", AS_ROUTER)
        async with running(MORTAL_ROUTER) as (process, address):
            # NOTE: a name that gRPC resolves to several addresses is taken for one beyond this machine
            pool = ClientPool(partial(RouterClient, credentials=replace(AS_GATEWAY, is_insecure=True)))
            both = f"ipv4:{address},{server.address}"
            for one in (address, both):
                await pool.get(one).models()
            process.send_signal(signal.SIGSTOP)
            routers = Routers((address, both), pool, timeout_s=0.5)
            call = PairCall(request_id="r", model="m", token_ids=(1,), num_expected_output=1, scope=UNSCOPED)
            with pytest.raises(UnavailableError, match="no router of this cluster answers") as caught:
                await routers.pair(call)
            assert "127.0.0.1" not in str(caught.value)
            assert f"no router answers: Pair at {address}" in caplog.text
            answered, pairing = await routers.pair(call)
            assert (answered, pairing.decode) == (both, HERE)
            await pool.close()
        await server.stop()

    run(check)


def test_a_router_whose_decisions_cannot_be_had_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """It once failed to send any, and the page that shows them was empty without a reason."""

    class Failing(Router):
        async def decisions(self, num_latest: int) -> NoReturn:
            raise ValueError("a field that cannot be sent")

    async def check() -> None:
        server = await serve_router(Failing(), "127.0.0.1:0", AS_ROUTER)
        pool = ClientPool(partial(RouterClient, credentials=AS_GATEWAY))
        assert await Routers((server.address,), pool, timeout_s=5.0).decisions(10) == []
        await pool.close()
        await server.stop()

        assert f"router {server.address} did not say what it decided: " in caplog.text

    run(check)
