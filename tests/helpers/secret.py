"""The cluster secret of everything that tests start themselves, and credentials of each role with it.

A server that others are told the incarnation of takes `serving_as`: clients refuse one of another incarnation.
"""

from tandem.rpc.credentials import Credentials, ProcessRole

SECRET = b"shared by all processes of the tests"

AS_GATEWAY = Credentials(SECRET, ProcessRole.GATEWAY)
AS_ROUTER = Credentials(SECRET, ProcessRole.ROUTER)
AS_WORKER = Credentials(SECRET, ProcessRole.BOTH)
AS_PLANNER = Credentials(SECRET, ProcessRole.PLANNER)
AS_OPERATOR = Credentials(SECRET, ProcessRole.OPERATOR)


def serving_as(incarnation: str, role: ProcessRole = ProcessRole.BOTH) -> Credentials:
    """Of a server that is this incarnation, wherever it listens."""
    return Credentials(SECRET, role, incarnation=incarnation)
