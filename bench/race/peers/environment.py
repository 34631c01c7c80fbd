"""A peer's virtual environment under build/race/venvs: made once, made anew when what it should hold changes.

Every version is pinned, and torch is the one that Tandem runs with. Nothing is installed outside that directory.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.race.peers.process import ROOT, end_of, surroundings
from bench.race.system import NotHere

BUILD = ROOT / "build" / "race"
CONSTRAINTS = ("torch==2.13.0",)
_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Environment:
    """Contents of an environment.

    `packages` are installed with their dependencies under `constraints`, then `bare` without theirs, then `unwanted`
    are removed (they come as dependencies and do not load beside this torch). `aliases`: names under which some code
    looks up a version that is installed under another name.
    """

    name: str
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    constraints: tuple[str, ...] = CONSTRAINTS
    only_binary: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    build: Path = BUILD

    @property
    def directory(self) -> Path:
        return self.build / "venvs" / self.name

    def log(self, name: str) -> Path:
        """File for the output of a process of that name."""
        return self.build / "logs" / f"{name}.log"

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def stamp(self) -> str:
        """Of an environment that was made as this asks."""
        return json.dumps({**asdict(self), "build": None}, indent=1)


def prepare(environment: Environment) -> None:
    """Make it, unless it is there. Raises NotHere with what the installer said."""
    mark = environment.directory / "race.json"
    if mark.exists() and mark.read_text() == environment.stamp and environment.python.exists():
        return
    shutil.rmtree(environment.directory, ignore_errors=True)
    environment.directory.mkdir(parents=True)
    constraints = environment.directory / "constraints.txt"
    constraints.write_text("\n".join(environment.constraints) + "\n")
    for command in commands(environment, constraints):
        run(command, f"{environment.name} cannot be installed", environment.log(f"{environment.name}-install"))
    for name, version in environment.aliases.items():
        _add_alias(environment, name, version)
    mark.write_text(environment.stamp)


def commands(environment: Environment, constraints: Path) -> list[list[str]]:
    """Commands that make it, in order."""
    pip = [str(environment.python), "-m", "pip"]
    binary = ["--only-binary", ":all:"] if environment.only_binary else []
    found = [
        [sys.executable, "-m", "venv", str(environment.directory)],
        [*pip, "install", "-c", str(constraints), *binary, *environment.packages],
    ]
    if environment.bare:
        found.append([*pip, "install", "--no-deps", *environment.bare])
    if environment.unwanted:
        found.append([*pip, "uninstall", "-y", *environment.unwanted])
    return found


def run(command: Sequence[str], failure: str, log: Path) -> None:
    """Run it to its end, at low priority, its output in `log`. Raises NotHere: `failure` and the end of the output."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                ["nice", "-n", "10", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=surroundings({}),
                timeout=_TIMEOUT_S,
                check=False,
            )
        except OSError as error:
            raise NotHere(f"{failure}: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise NotHere(f"{failure}: not done after {_TIMEOUT_S} s; see {log}") from error
    if done.returncode:
        raise NotHere(f"{failure} (status {done.returncode}); its output ends: {end_of(log)}")


def _add_alias(environment: Environment, name: str, version: str) -> None:
    (packages,) = environment.directory.glob("lib/python*/site-packages")
    directory = packages / f"{name}-{version}.dist-info"
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
