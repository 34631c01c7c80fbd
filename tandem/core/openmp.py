"""The waiting of PyTorch's OpenMP threads, told to PyTorch alone.

OpenMP reads `OMP_WAIT_POLICY` once, when PyTorch loads it. By default its threads spin for milliseconds after every
operation, on cores that the kernels' own threads and the gateway want; every decode step began with one. The variable
is there while PyTorch is imported and no longer: other programs that this process starts would wait so too.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_VARIABLE, _POLICY = "OMP_WAIT_POLICY", "passive"
_LOADING = "torch"


class _QuietLoading(MetaPathFinder):
    """Finds what the others find, and lets PyTorch be imported with the variable set."""

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LOADING or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            self._change(spec)
        return spec

    def _change(self, spec: ModuleSpec) -> None:
        """NOTE: the loader stays what it is, with one method replaced: others look at its type."""
        loader = spec.loader
        assert loader is not None
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            os.environ[_VARIABLE] = _POLICY
            try:
                load(module)
            finally:
                os.environ.pop(_VARIABLE, None)

        vars(loader)["exec_module"] = exec_module


def quieten() -> None:
    """Unless PyTorch is loaded already, or whoever started this process has set the variable."""
    if _VARIABLE in os.environ or _LOADING in sys.modules:
        return
    if not any(isinstance(finder, _QuietLoading) for finder in sys.meta_path):
        sys.meta_path.insert(0, _QuietLoading())
