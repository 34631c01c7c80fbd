"""llama.cpp's own quantiser; run by its environment's interpreter: SOURCE TARGET TYPE."""

import ctypes
import importlib
import sys
from typing import Any

# NOTE: of another environment; what checks types here does not know it.
llama: Any = importlib.import_module("llama_cpp")


def main() -> None:
    source, target, type_name = sys.argv[1:]
    options = llama.llama_model_quantize_default_params()
    options.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{type_name}")
    if status := llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)):
        sys.exit(f"llama_model_quantize: {status}")


if __name__ == "__main__":
    main()
