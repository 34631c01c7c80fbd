"""`make race`: every system, every workload, in turns; goes on where it stopped.

    python -m bench.race [--coded] [--only tandem,vllm] [--shape small] [--rounds 3] [--workloads single,batch]
                         [--at-once 4] [--speculate auto] [--fresh | --report] [--save]

Prints progress, then a Markdown table a shape. Everything lies below build/race; --save also keeps the JSON under
bench/results and the pictures under docs/figures.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from bench.floor import fastest_dtype
from bench.load import prioritise
from bench.race.measure import Gauge, Limits
from bench.race.ours import ours
from bench.race.pictures import draw
from bench.race.processes import confine
from bench.race.race import Race, Track
from bench.race.runs import Runs
from bench.race.shapes import SHAPE_NAMES, checkpoint, cost_of
from bench.race.summary import DRAFTS, Summary, is_peer
from bench.race.system import System
from bench.race.table import markdown
from bench.race.workloads import WORKLOADS
from bench.report import Report, circumstances
from tandem.core.errors import ConfigurationError, TandemError
from tandem.process.cores import parse_cpus

NUM_CORES = 2
AT_ONCE = 4
ENOUGH_BYTES = 23e9  # for that many of them, of the larger shape
_PR_SET_PDEATHSIG = 1
_One = TypeVar("_One")
_TITLES = {workload.key: workload.title for workload in WORKLOADS}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return race(options)
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def race(options: argparse.Namespace) -> int:
    """The whole of it; 1 when nothing was measured."""
    directory = Path(options.directory)
    if options.at_once < 0:
        raise ConfigurationError(f"--at-once={options.at_once} is less than 1; give 0 for what fits")
    cpus = _cpus(options.cpus)
    asked = argparse.Namespace(**vars(options))
    systems = _chosen("--only", options.only, {system.name: system for system in _systems(directory, options)})
    workloads = _chosen("--workloads", options.workloads, {workload.key: workload for workload in WORKLOADS})
    shapes = _chosen("--shape", options.shape, {name: name for name in SHAPE_NAMES})
    runs = Runs(directory / "runs", {system.name: settings_of(system.name, asked, cpus) for system in systems})
    if options.fresh:
        runs.forget()
    _settle(cpus)
    found = circumstances()
    at_once = options.at_once or (AT_ONCE if psutil.virtual_memory().total > ENOUGH_BYTES else 1)
    the_race = Race(systems, workloads, options.rounds, runs, _tell, found["git_sha"], at_once)
    if not options.report:
        the_race.prepare()
    limits = Limits(floor_repeats=options.floor_repeats)
    summaries: list[Summary] = []
    for shape in shapes:
        path = checkpoint(shape)
        if not options.report:
            the_race.run(Track(shape, path, Gauge(cost_of(path), limits)))
        kept = list(runs.of(list(the_race.slots(shape)), {workload.key: workload for workload in workloads}))
        summaries.append(Summary.of(shape, kept))
        print("\n" + markdown(summaries[-1], _TITLES, the_race.absent), flush=True)
    _keep(options, directory, summaries, the_race, found | {"cpus": cpus})
    return 0 if any(summary.cells for summary in summaries) else 1


def _keep(
    options: argparse.Namespace, directory: Path, summaries: Sequence[Summary], the_race: Race, found: dict[str, object]
) -> None:
    """Table, pictures and, if asked for, the report."""
    notes = [f"{name} took no part: {reason}" for name, reason in the_race.absent.items()]
    notes += [line for summary in summaries for line in (*summary.failures(), *summary.circumstances())]
    rows = [row for summary in summaries for row in summary.rows()]
    tables = "\n".join(markdown(summary, _TITLES, the_race.absent) for summary in summaries)
    (directory / "race.md").write_text(tables)
    for path in draw(summaries, _TITLES, Path("docs/figures") if options.save else directory):
        _tell(f"drawn: {path}")
    if options.save:
        _tell(f"saved: {Report('race', vars(options), rows, notes, found).save()}")


def _systems(directory: Path, options: argparse.Namespace) -> list[System]:
    """Ours, then the peers unless ours alone are asked for. `--coded`: those with 8 and with 4 bits a weight."""
    if options.coded:
        from bench.race.coded import entrants

        options.peers_dtype = options.peers_dtype or str(fastest_dtype()).removeprefix("torch.")
        return entrants(directory, options.peers_dtype, options.tandem_flags.split())
    found: list[System] = [*ours(directory, options.tandem_flags.split(), options.speculate)]
    if not options.only or set(options.only.split(",")) - {system.name for system in found}:
        from bench.race.peers import peers

        options.peers_dtype = options.peers_dtype or str(fastest_dtype()).removeprefix("torch.")
        found += peers(directory, options.peers_dtype, drafting=bool(options.speculate))
    return found


def settings_of(system: str, options: argparse.Namespace, cpus: Sequence[int]) -> dict[str, object]:
    """Settings that the system is run with, as asked for: a run with other settings is another one."""
    own = {"dtype": options.peers_dtype or "fastest"} if is_peer(system) else {"flags": options.tandem_flags.split()}
    drafter = {"speculate": options.speculate} if system == DRAFTS else {}
    return {**own, **drafter, "cpus": list(cpus)}


def _chosen(flag: str, text: str, there: Mapping[str, _One]) -> list[_One]:
    """Items that `text` names, in its order; all, if it names nothing."""
    names = list(dict.fromkeys(name for name in text.split(",") if name))
    for name in names:
        if name not in there:
            raise ConfigurationError(f"{flag}={name!r} is not there; there are {', '.join(there)}")
    return [there[name] for name in names or there]


def _cpus(text: str) -> tuple[int, ...]:
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return parse_cpus(text) if text else tuple(own[:NUM_CORES])


def _settle(cpus: Sequence[int]) -> None:
    """Own session, preferred, on these cores; ended with the process that started us, whose Ctrl-C does not reach us.

    Every way to be ended is a Ctrl-C, so that the system that runs ends too.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    prioritise()
    confine(cpus)
    torch.set_num_threads(len(cpus))
    if sys.platform.startswith("linux"):
        with suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))


def _tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="systems, by name and comma; omitted: all")
    parser.add_argument("--shape", default="small,qwen3-0.6b", help=f"of {', '.join(SHAPE_NAMES)}; by comma")
    parser.add_argument("--workloads", default="", help=f"of {', '.join(_TITLES)}; by comma; omitted: all")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument(
        "--at-once",
        type=int,
        default=0,
        help="systems that stand side by side; 0: 4 where they fit into memory, else 1",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--coded", action="store_true", help="systems with 8 and with 4 bits a weight")
    kinds.add_argument(
        "--speculate",
        default="",
        metavar="NAME",
        help="also Tandem with this `--speculate`, and vLLM with n-gram drafts; omitted: none with drafts",
    )
    parser.add_argument("--cpus", default="", help="cores of every system, as 0-1; omitted: the first two of ours")
    parser.add_argument("--tandem-flags", default="", help="more flags for `tandem up`")
    parser.add_argument(
        "--peers-dtype",
        default="",
        choices=("", "bfloat16", "float32"),
        help="what the peers multiply; omitted: what PyTorch multiplies faster here",
    )
    parser.add_argument("--floor-repeats", type=int, default=3, help="readings of each floor; 0: no floors")
    parser.add_argument("--directory", default="build/race", help="where environments, runs and logs lie")
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--fresh", action="store_true", help="forget what was measured before")
    before.add_argument("--report", action="store_true", help="measure nothing: tell what was measured before")
    parser.add_argument("--save", action="store_true", help="keep the JSON and the pictures in the repository")
    return parser


if __name__ == "__main__":
    sys.exit(main())
