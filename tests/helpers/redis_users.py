"""Redis with one user a role, by the rules that the chart gives it, and what each was refused."""

import contextlib
from collections.abc import Iterator
from typing import Any

from redis import Redis

from tests.helpers.redis_server import RedisServer, running_redis

ROLES = ("cluster", "gateway", "accounts")


def role_url(server: RedisServer, role: str, password: str | None = None) -> str:
    return server.url.replace("//", f"//{role}:{password or password_of(role)}@")


def password_of(role: str) -> str:
    return f"{role}0password"


@contextlib.contextmanager
def running_roles(rules: str) -> Iterator[tuple[RedisServer, Redis]]:
    """A server whose users are those of `rules`, and the client of an administrator that they do not have."""
    with running_redis() as server:
        admin = Redis.from_url(server.url.replace("//", "//admin:admin@"))
        administer: Any = admin.execute_command
        with server.client() as anybody:
            anybody.acl_setuser(
                "admin", enabled=True, passwords=["+admin"], keys=["*"], channels=["*"], commands=["+@all"]
            )
        for line in rules.splitlines():
            _, name, *words = line.split()
            administer("ACL", "SETUSER", name, *words, f">{password_of(name)}")
        for each in admin.client_list():
            if each["user"] == "default":
                admin.client_kill(each["addr"])
        try:
            yield server, admin
        finally:
            admin.close()
