"""`tandem keys` and `tandem usage` against a file of accounts."""

import asyncio
import json
from pathlib import Path

import pytest

from tandem.accounts.charge import ChargeSettlement, LedgerEntry
from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.key import key_id_of
from tandem.accounts.usage import Usage
from tandem.cli.main import main
from tandem.core.clock import ManualClock


@pytest.fixture
def accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "accounts.db"
    monkeypatch.setenv("TANDEM_ACCOUNTS", str(path))
    return path


def created(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The secret; nothing else is on standard output."""
    assert main(["keys", "create", *flags]) == 0
    return capsys.readouterr().out.strip()


def test_a_key_from_its_making_to_its_end(accounts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--name", "ci", "--tenant", "acme", "--requests-per-minute", "60", "--input-tokens-per-minute", "7000"]
    flags += ["--output-tokens-per-minute", "800", "--concurrency", "9", "--budget", "1.25", "--models", "a, b"]
    secret = created(capsys, *flags, "--share-cache-with", "team", "--admin")
    key_id = key_id_of(secret)
    assert key_id is not None
    assert main(["keys", "show", key_id]) == 0
    shown = json.loads(capsys.readouterr().out)
    limits = {"requests_per_minute": 60, "input_tokens_per_minute": 7000, "output_tokens_per_minute": 800}
    assert shown["limits"] == limits | {"concurrency": 9}
    assert (shown["tenant"], shown["budget"], shown["models"]) == ("acme", "1.25", ["a", "b"])
    assert (shown["cache_group"], shown["is_admin"], shown["revoked_s"]) == ("team", True, None)
    plain = key_id_of(created(capsys, "--name", "plain"))
    assert main(["keys", "revoke", key_id]) == 0
    capsys.readouterr()
    assert main(["keys", "list", "--as-json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["key_id"], row["revoked_s"] is None) for row in rows] == [(key_id, False), (plain, True)]
    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert "revoked" in listed
    assert secret not in listed
    assert secret.encode() not in b"".join(path.read_bytes() for path in accounts.parent.iterdir())


def test_a_secret_names_its_key(accounts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: who had only the secret of a leaked key could not revoke it, and the error repeated the secret."""
    secret = created(capsys, "--name", "leaked")
    assert main(["keys", "revoke", secret]) == 0
    assert main(["keys", "show", secret]) == 0
    assert json.loads(capsys.readouterr().out)["revoked_s"] is not None
    unknown = secret.replace(key_id_of(secret) or "", "0" * 12)
    assert main(["keys", "revoke", unknown]) == 2
    assert "there is no key '000000000000'" in capsys.readouterr().err


def test_what_cannot_be_done_is_said(accounts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["keys"],
        ["keys", "destroy"],
        ["keys", "create"],
        ["keys", "create", "--name", "x", "--budget", "-1"],
        ["keys", "create", "--name", "x", "--concurrency", "0"],
        ["keys", "show", "nobody"],
        ["keys", "revoke", "nobody"],
        ["usage", "--since", "yesterday"],
        ["usage", "--by", "colour"],
    ):
        assert main(arguments) == 2, arguments
        assert capsys.readouterr().err
    assert main(["keys", "--help"]) == 0


@pytest.mark.parametrize("command", [["usage"], ["keys", "list"], ["keys", "show", "k"], ["keys", "revoke", "k"]])
def test_a_file_that_is_not_there_is_not_made(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a mistyped name was an empty ledger, and the exit code 0."""
    typo = tmp_path / "typo.db"
    assert main([*command, "--accounts", str(typo)]) == 2
    assert f"accounts={typo}: there is no such file" in capsys.readouterr().err
    assert not typo.exists()


def test_usage_is_exported(accounts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def use() -> None:
        store = EmbeddedAccounts(accounts, ManualClock())
        store.start()
        for number in range(2):
            entry = LedgerEntry(f"c{number}", f"r{number}", "k", "t", "m", 0, Usage(1, 0, 0, 0, 2), 11_000, "done")
            await store.settle(ChargeSettlement(entry, (None, None, None), (0, 0, 0), True, (1, 1, 2)))
        await store.close()

    asyncio.run(use())
    assert main(["usage"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("time,request_id,key_id,tenant,model,outcome,")
    assert lines[1].startswith("1970-01-01T00:00:00.000+00:00,r0,k,t,m,done,1,")
    assert main(["usage", "--by", "day,model", "--format", "json"]) == 0
    (total,) = json.loads(capsys.readouterr().out)
    assert (total["day"], total["model"], total["num_requests"], total["cost"]) == ("1970-01-01", "m", 2, "0.000022")
    assert main(["usage", "--tenant", "other"]) == 0
    assert capsys.readouterr().out == ""
