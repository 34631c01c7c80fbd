"""Runs a command with an API key of its own: draws it where TANDEM_ACCOUNTS says, and revokes it when the command ends.

Usage: VARIABLE OPTIONS -- COMMAND: the command finds the secret in VARIABLE; options are of `tandem keys create`.
"""

import os
import signal
import subprocess
import sys
import time

from tandem.accounts.key import key_id_of

DEADLINE_S = time.monotonic() + float(os.environ.get("TIMEOUT_S", "300"))
HIDDEN = ("TANDEM_ACCOUNTS", "REDIS_ACCOUNTS_PASSWORD")


def keys(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["tandem", "keys", *arguments], capture_output=True, text=True)


def drawn(options: list[str]) -> str:
    """The secret, asking again while the store is away."""
    while True:
        done = keys("create", *options)
        if done.returncode == 0:
            return done.stdout.strip()
        if time.monotonic() > DEADLINE_S:
            raise SystemExit(f"no API key could be drawn: {done.stderr.strip()}")
        time.sleep(1)


def run(command: list[str], variable: str, secret: str) -> int:
    """Its exit status; it gets the SIGTERM that this process gets."""
    env = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    with subprocess.Popen(command, env={**env, variable: secret}) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        return process.wait()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    variable, *rest = sys.argv[1:]
    end = rest.index("--")
    secret = drawn(rest[:end])
    try:
        status = run(rest[end + 1 :], variable, secret)
    finally:
        revoked = keys("revoke", key_id_of(secret) or "")
        if revoked.returncode:
            sys.stderr.write(f"the key {key_id_of(secret)} is not revoked: {revoked.stderr.strip()}\n")
    raise SystemExit(status)


main()
