"""Settings of all commands and services: one declaration defines a flag and an environment variable.

For example `--max-model-len` and `TANDEM_MAX_MODEL_LEN`. A flag wins over a variable, a variable over the default.
"""

from collections.abc import Mapping
from typing import Annotated, Any, get_origin

from pydantic import AfterValidator, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from tandem.core.addresses import is_loopback
from tandem.core.config import MAX_SPECULATIVE_TOKENS, EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.core.sampling_params import SamplingParams
from tandem.transport.card import MIN_SECRET_BYTES

# Command that users are advised to create a secret with.
MAKE_SECRET = "export TANDEM_CLUSTER_SECRET=$(openssl rand -hex 32)"


# What pydantic shows and reads as None: nothing that a command line can hold, since a name may be `null`.
NO_VALUE = "\0"


class Settings(BaseSettings):
    """Base of everything configured by flags or `TANDEM_*`."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_parse_none_str=NO_VALUE,
        extra="forbid",
        hide_input_in_errors=True,  # NOTE: of a traceback; there may be secrets among them
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Variables(settings_cls)


class _Variables(EnvSettingsSource):
    """Variables, in which a list is written as its flag takes it: numbers with commas, or one text; or as JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if get_origin(field.annotation) is not list or value.lstrip().startswith("["):
            return super().decode_complex_value(field_name, field, value)
        return [value] if field.annotation == list[str] else value.split(",")


def checked_address(value: str) -> str:
    """Returns `value`; raises ValueError unless it is host:port."""
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError("it is not host:port")
    return value


Address = Annotated[str, AfterValidator(checked_address)]  # host:port


def secret_of(cluster_secret: SecretStr | None) -> bytes | None:
    """Returns the configured cluster secret; None if it is not set.

    Raises:
        ConfigurationError: it is too short.
    """
    if cluster_secret is None:
        return None
    value = cluster_secret.get_secret_value().encode()
    if len(value) < MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"cluster_secret has {len(value)} bytes; use at least {MIN_SECRET_BYTES} random ones, the same for every "
            f"process, as by `{MAKE_SECRET}`"
        )
    return value


def required_secret(cluster_secret: SecretStr | None, needed_by: str) -> bytes:
    """Returns the cluster's secret, or raises if there is none.

    Args:
        needed_by: the setting that cannot be honoured without one, as "bind='0.0.0.0:7900'".

    Raises:
        ConfigurationError: it is missing or too short.
    """
    secret = secret_of(cluster_secret)
    if secret is None:
        raise ConfigurationError(
            f"{needed_by} needs a cluster secret: without one, anybody who reaches a port reads the KV cache. "
            f"`{MAKE_SECRET}` makes one; start every process of the cluster with it. "
            "(--cluster-secret takes it too, but all users of the machine may read command lines)"
        )
    return secret


def check_anonymous(host: str, *, has_accounts: bool, is_allowed: bool) -> None:
    """Raises ConfigurationError for a gateway that strangers could use without an explicit permission."""
    if not (has_accounts or is_allowed or is_loopback(host)):
        raise ConfigurationError(
            f"host={host!r} is reached by others, and no keys are asked for: set --accounts (TANDEM_ACCOUNTS, a file "
            "or a redis:// URL; `tandem keys create` makes keys), or --allow-anonymous (TANDEM_ALLOW_ANONYMOUS=true) "
            "where everybody may use it"
        )


class EngineSettings(Settings):
    """Model to load and resources it may use. Omitted values are resolved from the checkpoint and the machine."""

    model: str = Field(description="Hugging Face directory, or a hub id where there is a network")
    dtype: str = Field("auto", description="auto (the checkpoint's), float32, bfloat16 or float16")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    attention_backend: str = Field("auto", description="auto, or the name of one backend")
    block_size: int = Field(16, description="tokens per KV block: 8, 16, 32, 64 or 128")
    kv_cache_gib: float | None = Field(
        None, gt=0, le=1e6, description="memory for KV blocks, GiB; omitted: automatic, a part of what is free"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory for weights and KV, if --kv-cache-gib is omitted"
    )
    max_model_len: int | None = Field(
        None,
        description="maximum prompt plus answer, tokens; omitted: automatic, the model's or what the KV blocks hold",
    )
    max_num_batched_tokens: int | None = Field(
        None, description="token budget of one step; omitted: automatic, by the device"
    )
    max_num_running: int = Field(256, description="maximum requests that run at once")
    max_num_waiting: int = Field(4096, description="maximum requests in the queue")
    prefix_caching: bool = Field(True, description="reuse the KV of common prefixes of prompts")
    engine_seed: int = Field(0, description="seed for requests without a seed")
    num_threads: int | None = Field(
        None, description="CPU threads of the model; omitted: automatic, the cores it may use"
    )
    native_kernels: bool | None = Field(None, description="compiled CPU kernels; omitted: when they can be built")
    pack_weights: bool = Field(
        True, description="keep a second copy of the weights on disk, in TANDEM_CACHE_DIR, as the CPU's kernels want it"
    )
    activations: str = Field(
        "float",
        description="float, or int8 on a CPU: round what integer codes of weights are multiplied with, for speed; "
        "answers change a little",
    )
    allow_pickle: bool = Field(
        False, description="read weights from PyTorch files (.bin), which are pickles, where there are no safetensors"
    )
    speculate: str = Field(
        "off",
        description="drafter of the tokens that a step checks: off, auto, ngram, suffix, draft=DIR for a smaller model "
        "with the same tokenizer, mtp for the checkpoint's own module, or eagle=DIR for an EAGLE-3 head",
    )
    num_speculative_tokens: int = Field(
        7, ge=1, le=MAX_SPECULATIVE_TOKENS, description="the most drafts of one request in a step"
    )
    draft_always: bool = Field(
        False, description="draft as many tokens in every step, also where that does not pay: for tests of drafts"
    )

    def engine_config(self) -> EngineConfig:
        """Returns the configuration of the engine."""
        return EngineConfig(
            model=self.model,
            dtype=self.dtype,
            device=self.device,
            attention_backend=self.attention_backend,
            block_size=self.block_size,
            kv_cache_bytes=None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30),
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_running=self.max_num_running,
            max_num_waiting=self.max_num_waiting,
            prefix_caching=self.prefix_caching,
            seed=self.engine_seed,
            num_threads=self.num_threads,
            native_kernels=self.native_kernels,
            pack_weights=self.pack_weights,
            activations=self.activations,
            allow_pickle=self.allow_pickle,
            speculate=self.speculate,
            num_speculative_tokens=self.num_speculative_tokens,
            draft_always=self.draft_always,
        )


class SamplingSettings(Settings):
    """Sampling of tokens. Omitted values come from the checkpoint's generation_config.json, then from ours."""

    max_tokens: int | None = Field(None, description="most tokens to generate; omitted: up to the context")
    min_tokens: int = Field(0, description="tokens before which nothing ends the answer")
    temperature: float | None = Field(None, description="0 is greedy; omitted: the checkpoint's, or 1")
    top_p: float | None = Field(
        None, description="keep the likeliest tokens that make up this mass; omitted: the model's"
    )
    top_k: int | None = Field(None, description="keep this many of the likeliest tokens; 0 = all; omitted: the model's")
    min_p: float | None = Field(
        None, description="drop tokens below this share of the likeliest's; omitted: the model's"
    )
    repetition_penalty: float | None = Field(
        None, description="above 1 makes seen tokens less likely; omitted: the model's"
    )
    presence_penalty: float = Field(0.0, description="subtracted once from tokens already generated")
    frequency_penalty: float = Field(0.0, description="subtracted for each time a token was generated")
    seed: int | None = Field(None, description="same seed, same tokens; omitted: drawn from --engine-seed")
    stop: list[str] = Field([], description="end at this text; repeatable")
    stop_token_ids: list[int] = Field([], description="end at this token; repeatable")
    ignore_eos: bool = Field(False, description="go on past the end-of-sequence token")
    n: int = Field(1, description="answers per prompt")

    def sampling_params(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
        """Returns a request's parameters. Precedence: `own`, these settings, `defaults` (the checkpoint's), ours."""
        return SamplingParams(**{**defaults, **self.overrides(), **own})

    def overrides(self) -> dict[str, Any]:
        """Returns the values set here, as arguments of `SamplingParams`."""
        fields = {name: getattr(self, name) for name in SamplingSettings.model_fields}
        given = {name: value for name, value in fields.items() if value is not None}
        return {**given, "stop": tuple(self.stop), "stop_token_ids": tuple(self.stop_token_ids)}
