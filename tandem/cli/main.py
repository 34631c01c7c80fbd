"""Entry point of the `tandem` command: finds the subcommand and runs it. `process.command` handles errors."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from tandem import __version__

# Settings class of each verb of `tandem keys`.
KEY_VERBS: Mapping[str, str] = {"create": "CreateKey", "list": "ListKeys", "show": "ShowKey", "revoke": "RevokeKey"}
# By verb: module, settings class (or verbs below it), and summary.
VERBS: Mapping[str, tuple[str, str | Mapping[str, str], str]] = {
    "up": ("tandem.cli.up", "UpCommand", "serve a model on this machine: gateway, router, prefill and decode workers"),
    "load": ("tandem.cli.load", "LoadCommand", "load-test a gateway: closed loop, open loop or a trace, with goodput"),
    "trace": ("tandem.cli.trace", "TraceCommand", "show where one request's time went"),
    "plan": (
        "tandem.cli.plan",
        "PlanCommand",
        "say how many workers a workload needs, what users would get and the cost",
    ),
    "keys": ("tandem.cli.keys", KEY_VERBS, "create, list, show and revoke API keys"),
    "usage": ("tandem.cli.usage", "UsageCommand", "export what API keys used and what it cost"),
    "quantize": (
        "tandem.cli.quantize",
        "QuantizeCommand",
        "write a checkpoint whose weights have fewer bits",
    ),
    "convert": (
        "tandem.cli.convert",
        "ConvertCommand",
        "write a checkpoint's weights in another file format with the same bits, lossless in two thirds of the bytes",
    ),
    "generate": ("tandem.cli.generate", "GenerateCommand", "answer prompts from the command line or a JSONL file"),
    "chat": ("tandem.cli.chat", "ChatCommand", "talk with a model in the terminal"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # NOTE: importing takes seconds
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stderr.write(f"{_usage()}\n")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version", "version"):
        sys.stdout.write(f"tandem {__version__}\n")
        return 0
    if arguments[0] not in VERBS:
        sys.stderr.write(f"error: {arguments[0]!r} is not a verb of tandem\n\n{_usage()}\n")
        return 2
    module, attribute, _ = VERBS[arguments[0]]
    if not isinstance(attribute, str):
        word = arguments[1] if len(arguments) > 1 else ""
        if word not in attribute:
            is_help = word in ("-h", "--help", "help")
            problem = "" if is_help else f"error: {word!r} is not a verb of tandem {arguments[0]}\n\n"
            sys.stderr.write(f"{problem}tandem {arguments[0]} {'|'.join(attribute)} [--help]\n")
            return 0 if is_help else 2
        attribute, arguments = attribute[word], arguments[1:]
    from tandem.process.command import run_command

    return run_command(getattr(import_module(module), attribute), arguments[1:])


def _usage() -> str:
    verbs = "\n".join(f"  tandem {name:<10} {summary}" for name, (_, _, summary) in VERBS.items())
    return f"Tandem {__version__}: disaggregated LLM serving.\n\n{verbs}\n\n`tandem VERB --help` explains its settings."


if __name__ == "__main__":
    sys.exit(main())
