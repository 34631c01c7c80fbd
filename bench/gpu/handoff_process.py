"""Entry point of the source's process: supplies missing packages before anything of the engine is imported."""

from importlib import import_module
from multiprocessing.connection import Connection

from bench.gpu.machine import stand_in_for_missing
from bench.gpu.setting import Setting


def begin(connection: Connection, setting: Setting, name: str, length: int, chunk: int) -> None:
    """Be a source until the pipe ends."""
    stand_in_for_missing()
    import_module("bench.gpu.handoff_source").serve(connection, setting, name, length, chunk)
