"""`make clients`: installs other people's clients, serves the demo checkpoint, lets each talk to it, and reports."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from pydantic import Field
from rich.console import Console

from tandem.process.command import run_command
from tandem.process.settings import Settings
from tools.clients.catalogue import CLIENTS, Client
from tools.clients.environment import InstallError, prepare
from tools.clients.report import ClientReport, save, show
from tools.clients.system import StartError, served

_HERE = Path(__file__).parent
_SHOWN_LINES = 20
_PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


class Clients(Settings, cli_prog_name="python -m tools.clients", env_prefix="TANDEM_CLIENTS_"):
    """Run other people's clients against the system and say which of them work."""

    model: Path = Field(Path("demo/tandem-demo"), description="checkpoint that is served")
    url: str = Field("", description="address of a gateway that serves it; omitted: one that is started")
    only: list[str] = Field([], description="names of clients to run, repeatable; omitted: all")
    directory: Path = Field(Path("build/clients"), description="where environments, reports and logs go")
    timeout_s: float = Field(600.0, gt=0, description="of one client, seconds")

    def run(self) -> int:
        """0 when every client ran and everything held."""
        chosen = [client for client in CLIENTS if not self.only or client.name in self.only]
        console = Console(soft_wrap=True)
        if not chosen:
            console.print(f"no client has that name; there are {', '.join(client.name for client in CLIENTS)}")
            return 2
        self.directory.mkdir(parents=True, exist_ok=True)
        interpreters = {group: self._prepare(group, console) for group in dict.fromkeys(c.group for c in chosen)}
        try:
            reports = self._run_all(chosen, interpreters, console)
        except StartError as error:
            console.print(f"error: {error}", markup=False)
            return 2
        show(reports, console)
        save(reports, self.directory / "report.json")
        return 0 if all(report.is_well for report in reports) else 1

    def _prepare(self, group: str, console: Console) -> Path | InstallError:
        console.print(f"environment {group}")
        try:
            return prepare(group, _HERE / f"{group}.txt", self.directory / group)
        except InstallError as error:
            return error

    def _run_all(
        self, chosen: list[Client], interpreters: dict[str, Path | InstallError], console: Console
    ) -> list[ClientReport]:
        if self.url:
            return [self._report(client, interpreters[client.group], self.url, console) for client in chosen]
        with served(self.model, self.directory / "logs") as url:
            return [self._report(client, interpreters[client.group], url, console) for client in chosen]

    def _report(self, client: Client, python: Path | InstallError, url: str, console: Console) -> ClientReport:
        if isinstance(python, InstallError):
            return ClientReport(client=client.name, shows=client.shows, problem=str(python))
        console.rule(client.name)
        start_s = time.monotonic()
        work = self.directory / "work" / client.script
        (work / "report.json").unlink(missing_ok=True)
        problem = self._run_script(client, python, url, work)
        duration_s = time.monotonic() - start_s
        if not (work / "report.json").exists():
            return ClientReport(client=client.name, shows=client.shows, problem=problem, duration_s=duration_s)
        told = json.loads((work / "report.json").read_text())
        return ClientReport(client=client.name, shows=client.shows, duration_s=duration_s, **told)

    def _run_script(self, client: Client, python: Path, url: str, work: Path) -> str:
        """Run it to its end; what is said if it left no report."""
        command = [str(python.absolute()), "-W", "ignore", "-m", f"tools.clients.scripts.{client.script}"]
        command += ["--url", url, "--model", self.model.name, "--checkpoint", str(self.model.absolute())]
        command += ["--work", str(work), "--engine-python", sys.executable]
        work.mkdir(parents=True, exist_ok=True)
        log = work / "stderr.log"
        try:
            with log.open("w") as errors:
                code = subprocess.run(
                    command, env=self._environment(client), stderr=errors, timeout=self.timeout_s
                ).returncode
        except subprocess.TimeoutExpired:
            return f"it did not end in {self.timeout_s:g} s; see {log}"
        last = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        return f"it ended with {code} and no report:\n" + "\n".join(last)

    def _environment(self, client: Client) -> dict[str, str]:
        """Little of ours, so that no key or proxy of the user's reaches a client."""
        kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        own = {
            "NO_PROXY": "*",
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_API_KEY": "none",
            "HF_HOME": str((self.directory / "huggingface").absolute()),
            "LANGSMITH_TRACING": "false",
            "DO_NOT_TRACK": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        return kept | own | dict(client.variables)


if __name__ == "__main__":
    sys.exit(run_command(Clients, sys.argv[1:]))
