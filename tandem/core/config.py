"""Configuration of an engine and its scheduler, as frozen values. It reads no flags and resolves no "auto".

Invariant: an instance that exists is consistent with itself; what depends on a model or a device is checked when "auto"
is resolved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ConfigurationError
from tandem.core.speculate import SETTINGS, drafter_of

AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16")
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_SPECULATIVE_TOKENS = 32  # drafts of one request in a step
FLOAT, INT8 = "float", "int8"
ACTIVATIONS = (FLOAT, INT8)  # formats of activations in matrix products
_MAXIMA = {
    "max_num_batched_tokens": 1 << 20,
    "max_num_running": 1 << 16,
    "max_num_waiting": 1 << 20,
    "num_threads": 1 << 12,
}  # beyond these, memory or the operating system gives out first


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler.

    Args:
        max_num_batched_tokens: token budget of a step, shared by decodes and prefill chunks.
        max_num_running: requests that hold blocks at once.
        max_num_waiting: requests that may queue; one more is refused with `CapacityError`.
        max_model_len: longest prompt plus answer, in tokens.
        aging_steps: a request that has waited this many steps counts as one priority level more urgent.
    """

    max_num_batched_tokens: int = 512
    max_num_running: int = 256
    max_num_waiting: int = 4096
    max_model_len: int = 4096
    aging_steps: int = 1000

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_running", "max_num_waiting", "max_model_len", "aging_steps"):
            _require_within(name, getattr(self, name), 1, _MAXIMA.get(name))
        if self.max_num_batched_tokens < self.max_num_running:
            raise ConfigurationError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_running={self.max_num_running}:"
                " decodes would wait for each other; raise the first or lower the second"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of one engine. None means: resolved from the checkpoint, the device and its memory.

    Args:
        model: a Hugging Face directory, or a hub id where there is a network.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        device: "auto", "cpu" or "cuda[:index]".
        attention_backend: "auto" or the name of one backend.
        block_size: tokens per KV block.
        kv_cache_bytes: memory for KV blocks.
        gpu_memory_utilization: share of a GPU's memory for weights and KV; ignored if `kv_cache_bytes` is given.
        max_model_len: longest prompt plus answer, in tokens.
        max_num_batched_tokens: token budget of a step.
        max_num_running: requests that hold blocks at once.
        max_num_waiting: requests that may queue.
        prefix_caching: whether computed blocks are reused by later requests.
        watermark: share of the blocks that admission leaves for running requests to grow into.
        pin_share: share of the blocks that pins may keep from being reused.
        seed: source of the seeds of requests without one.
        num_threads: CPU threads of the model; None = PyTorch's choice.
        native_kernels: whether to use the compiled CPU kernels; None = when they can be built.
        pack_weights: keep a copy of the weights on disk, in the order of the compiled kernels, where they use one.
        activations: "float", or "int8": rows are rounded to 8 bits where they are multiplied by integer codes.
        allow_pickle: whether weights may be PyTorch files (`.bin`) where there are no safetensors.
        speculate: drafter of the tokens that a step checks together: "off", "auto", "ngram", "suffix", "mtp", or
            "draft=" or "eagle=" and the directory of a smaller model or of a head.
        num_speculative_tokens: the most drafts of one request in a step.
        draft_always: draft as many tokens in every step, also where that does not pay.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 16
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_running: int = 256
    max_num_waiting: int = 4096
    prefix_caching: bool = True
    watermark: float = 0.01
    pin_share: float = 0.5
    seed: int = 0
    num_threads: int | None = None
    native_kernels: bool | None = None
    pack_weights: bool = True
    activations: str = FLOAT
    allow_pickle: bool = False
    speculate: str = "off"
    num_speculative_tokens: int = 7
    draft_always: bool = False

    def __post_init__(self) -> None:
        _require_within("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        for name in ("max_num_running", "max_num_waiting"):
            _require_within(name, getattr(self, name), 1, _MAXIMA[name])
        for name in ("kv_cache_bytes", "max_model_len", "max_num_batched_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None:
                _require_within(name, value, 2 if name == "max_model_len" else 1, _MAXIMA.get(name))
        _require_one_of("dtype", self.dtype, (AUTO, *DTYPES))
        _require_one_of("block_size", self.block_size, BLOCK_SIZES)
        _require_one_of("activations", self.activations, ACTIVATIONS)
        if drafter_of(self.speculate) is None:
            raise ConfigurationError(f"speculate={self.speculate!r} is no drafter; choose {', '.join(SETTINGS)}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigurationError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1"
            )
        if not 0.0 <= self.watermark < 0.5:
            raise ConfigurationError(f"watermark={self.watermark} must be at least 0 and below 0.5")
        if not 0.0 <= self.pin_share <= 1.0:
            raise ConfigurationError(f"pin_share={self.pin_share} must be from 0 to 1")


def _require_one_of(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} is not served; choose one of {', '.join(map(str, choices))}")


def _require_within(name: str, value: int, minimum: int, maximum: int | None) -> None:
    if value < minimum or (maximum is not None and value > maximum):
        limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ConfigurationError(f"{name}={value} must be {limits}")
