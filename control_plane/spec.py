"""A function as its owner describes it: YAML on disk, JSON over the API, one model for both.

Everything is checked before anything is stored; each fault names its field by its path (`scaling.max_replicas`). Units
are in the names. Limits: whether the model exists and can be served shows only when it is imported; what may be
deployed at all is the administrator's (`ModelSettings.allowed`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from control_plane.errors import InvalidRequest
from control_plane.pod_spec import PodFields
from control_plane.scaling_spec import Part, Scaling, Seconds
from function_runtime.protocol import EngineOptions
from model_loader.pickles import conversion, is_pickle

NAME_PATTERN: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
_MODEL_PATTERN: Final = re.compile(r"(pypi|file|hf|s3)://\S+")
_ENV_PATTERN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SECRET_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_RESERVED_ENV: Final = ("STOKER_", "LD_", "PYTHON")
MAX_SPEC_BYTES: Final = 256 * 1024


class Resources(Part):
    devices: int = Field(default=1, ge=1, le=64)
    """Devices a replica holds; it is charged for each."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Memory a replica may use; None: what its checkpoint and KV need."""


class Timeouts(Part):
    """Each its own: none is ever used for something else."""

    cold_start_s: Seconds = 600.0
    """How long a request waits while no replica is ready."""
    queue_s: Seconds = 120.0
    """How long it waits while replicas are ready but full."""
    first_token_s: Seconds = 120.0
    """From a replica's taking the request to its first token."""
    idle_s: Seconds = 60.0
    """Between two tokens."""
    total_s: Seconds = 3600.0
    """From acceptance to the end."""


def _microusd(value: Any) -> Any:
    """`"1.25"`, 1 or 1.25 dollars, without a detour through binary fractions."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError('must be dollars as a decimal string, such as "1.25"')
    try:
        amount = Decimal(str(value).strip())
    except InvalidOperation:
        raise ValueError(f'{value!r} is no amount of dollars; write it as "1.25"') from None
    if not amount.is_finite() or amount < 0 or amount > 100_000:
        raise ValueError("must lie between 0 and 100000 dollars")
    if amount != amount.quantize(Decimal("0.000001")):
        raise ValueError("has more than six decimals; the unit of account is a millionth of a dollar")
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


class Price(Part):
    device_hour_usd: Annotated[str, BeforeValidator(_microusd)] = "0"
    """Dollars per device and hour, as a decimal string with at most six decimals."""

    @property
    def microusd_per_device_hour(self) -> int:
        return int(Decimal(self.device_hour_usd) * 1_000_000)


class EngineSettings(Part):
    max_context_tokens: int = Field(default=0, ge=0, le=10_000_000)
    """Longest prompt and answer together; 0: the checkpoint's own limit."""
    step_tokens: int = Field(default=512, ge=16, le=65_536)
    """Token budget of one engine step. Larger is faster for long prompts and delays streams that run beside them."""
    prefix_cache: bool = True
    """Reuse the KV of common beginnings of prompts, within the tenant."""
    kv_bytes: int = Field(default=0, ge=0)
    """Memory for KV; 0: chosen from max_concurrency and what is free."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads; 0: all cores."""
    kv_chunk_tokens: int = Field(default=32, ge=16, le=4096, multiple_of=16)
    """Tokens of a durable KV chunk: smaller loses less at a death and writes more objects."""


class FunctionSpec(Part):
    name: str
    """RFC 1123 label, at most 40 characters; the model name clients send."""
    model: str
    """`pypi://PACKAGE[==VERSION][/FILE]`, `file:///PATH` or `hf://ORG/REPO[@REVISION]`."""
    aliases: tuple[str, ...] = Field(default=(), max_length=32)
    """Other model names that clients may send for this function."""
    revision: str | None = Field(default=None, min_length=1, max_length=200)
    """Revision of the model, where its source has any (a branch, tag or commit of a hub repository)."""
    engine: Literal["native", "stub"] = "native"
    """`stub` answers without a model, for tests of everything around it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on CPUs, the checkpoint's own on GPUs."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d{1,3})?)$")
    """cpu | cuda | cuda:N"""
    resources: Resources = Resources()
    scaling: Scaling = Scaling()
    timeouts: Timeouts = Timeouts()
    drain_s: float = Field(default=60.0, ge=0, le=86400, allow_inf_nan=False)
    """How long a replica that goes may finish what it runs; what is left then goes on elsewhere."""
    durability: Literal["off", "process", "host"] = "process"
    """off: no log, a death is an error; process: survives the death of any process; host: survives power loss."""
    kv_store: Literal["best_effort", "required"] = "best_effort"
    """What becomes of new requests while the object store cannot be used. best_effort: they run, and what a replica
    that dies had computed is computed again; required: they get 503, for contexts too long to be computed twice."""
    on_disconnect: Literal["cancel", "detach"] = "cancel"
    """What becomes of the work when its client goes away. `detach` finishes it (within `timeouts.total_s`) and keeps
    the answer for the reader as long as `retention_s` says."""
    resume: Literal["exact", "fast"] = "exact"
    """How a request that lost its replica computes what is not in the store: as the first time, prefill in the same
    chunks and generated tokens one by one, so that it goes on byte for byte; or all at once, sooner and not exactly."""
    share_prefixes: Literal["all", "tenant", "function", "none"] = "tenant"
    """Who may use the stored KV of a prompt that begins alike: functions of the tenant with the same checkpoint, this
    function only, or nobody; or (`all`) functions of any tenant that say so too. Whoever shares with all lets all find
    out, by a prompt's time and `cached_tokens`, whether it was asked before. A tenant with a key shares with itself."""
    shared_prefix_form: Literal["raw", "fp8", "int4"] = "raw"
    """In which form the KV of its prompts is kept for others, and read by them. fp8 and int4 take a half and a quarter
    of the bytes of float16 and lose precision (docs/kv-format.md); what a request itself needs to resume is raw."""
    retention_s: float | None = Field(default=None, ge=0, le=366 * 86400, allow_inf_nan=False)
    """How long the log and the answer of a request are kept after its end, for a reader that comes back; None: the
    service's (`STOKER_LOG_RETENTION_S`)."""
    env: dict[str, str] = Field(default={}, max_length=100)
    """Environment of the replica."""
    secrets: dict[str, str] = Field(default={}, max_length=100)
    """Environment variable -> name of a secret: the file `secrets/NAME` of the data directory, or the variable
    `STOKER_SECRET_NAME` of the control plane. The value is never stored with the spec."""
    price: Price = Price()
    labels: dict[str, str] = Field(default={}, max_length=64)
    """Free for the owner's use; shown, never interpreted."""
    engine_options: EngineSettings = EngineSettings()
    pod: PodFields | None = None
    """On Kubernetes: which slots it needs, its own image or devices for example. None: those of the default pool."""

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(
                f"{name[:60]!r} is no function name: use at most 40 of a-z, 0-9 and '-', beginning and ending with a "
                "letter or digit"
            )
        return name

    @field_validator("model")
    @classmethod
    def _model(cls, model: str) -> str:
        if not _MODEL_PATTERN.fullmatch(model) or len(model) > 2000:
            raise ValueError(
                "is no model URI: use pypi://PACKAGE[==VERSION][/FILE], file:///PATH, hf://ORG/REPO[@REVISION] or "
                "s3://BUCKET/PREFIX"
            )
        if model.startswith("file://") and not model.startswith("file:///"):
            raise ValueError("needs an absolute path: file:///PATH")
        if is_pickle(model):
            raise ValueError(
                "is a pickle, which can run code when it is read: convert it where you trust it: " + conversion(model)
            )
        return model

    @field_validator("aliases")
    @classmethod
    def _aliases(cls, aliases: tuple[str, ...]) -> tuple[str, ...]:
        for alias in aliases:
            if not 1 <= len(alias) <= 200 or not alias.isprintable() or alias != alias.strip():
                raise ValueError(f"{alias[:60]!r} is no model name: use 1 to 200 printable characters")
        if len(set(aliases)) != len(aliases):
            raise ValueError("names a model twice")
        return aliases

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            _check_variable(name)
            if "\0" in value or len(value) > 32_768:
                raise ValueError(f"the value of {name} is too long or holds a NUL")
        return env

    @field_validator("secrets")
    @classmethod
    def _secrets(cls, secrets: dict[str, str]) -> dict[str, str]:
        for name, reference in secrets.items():
            _check_variable(name)
            if not _SECRET_PATTERN.fullmatch(reference):
                raise ValueError(f"{reference[:60]!r} is no name of a secret: use letters, digits, '_', '.' and '-'")
        return secrets

    @model_validator(mode="after")
    def _consistent(self) -> FunctionSpec:
        if self.name in self.aliases:
            raise ValueError(f"{self.name} is its own alias")
        if self.kv_store == "required" and self.durability == "off":
            raise ValueError("kv_store: required asks for stored KV, and durability: off stores none")
        self.scaling.check_against(self.timeouts.first_token_s, self.timeouts.idle_s)
        both = sorted(set(self.env) & set(self.secrets))
        if both:
            raise ValueError(f"{both[0]} is in env and in secrets")
        return self

    @property
    def price_microusd_per_hour(self) -> int:
        """Of one replica: all its devices."""
        return self.price.microusd_per_device_hour * self.resources.devices

    def names(self) -> tuple[str, ...]:
        """Every model name that means this function."""
        return (self.name, *self.aliases)

    def canonical(self) -> str:
        """JSON with sorted keys and all defaults: equal specs have equal text."""
        # NOTE: `pod` is left out where there is none, so that specs from before it have the digest they had.
        without = {"pod"} if self.pod is None else None
        return json.dumps(
            self.model_dump(mode="json", exclude=without), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )

    def digest(self) -> str:
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def computes_as(self, other: FunctionSpec) -> bool:
        """Whether its replicas are as fast as the other's: the same model, in the same form, on the same kind of
        device."""
        mine, theirs = (
            (each.model, each.revision, each.engine, each.dtype, each.device.partition(":")[0], each.resources.devices,
             each.engine_options.threads)
            for each in (self, other)
        )  # fmt: skip
        return mine == theirs

    def to_engine_options(self) -> EngineOptions:
        own = self.engine_options
        return EngineOptions(
            engine=self.engine,
            device=self.device,
            dtype=self.dtype,
            max_requests=self.scaling.max_concurrency,
            max_context_tokens=own.max_context_tokens,
            kv_bytes=own.kv_bytes,
            step_tokens=own.step_tokens,
            threads=own.threads,
            prefix_cache=own.prefix_cache,
            kv_chunk_tokens=own.kv_chunk_tokens,
        )


def _check_variable(name: str) -> None:
    if not _ENV_PATTERN.fullmatch(name):
        raise ValueError(f"{name[:60]!r} is no name of an environment variable")
    if name.upper().startswith(_RESERVED_ENV):
        raise ValueError(f"{name} is reserved: a spec may not set {', '.join(f'{each}*' for each in _RESERVED_ENV)}")


def resolve_environment(spec: FunctionSpec, data_dir: Path) -> dict[str, str]:
    """The replica's environment with its secrets looked up, at the moment of its start."""
    environment = dict(spec.env)
    for variable, name in spec.secrets.items():
        value = os.environ.get("STOKER_SECRET_" + re.sub(r"[.-]", "_", name).upper())
        if value is None:
            try:
                value = (data_dir / "secrets" / name).read_text(encoding="utf-8").rstrip("\n")
            except (OSError, UnicodeDecodeError):
                raise InvalidRequest(
                    f"the secret {name} of {spec.name} is not there: put it in the file secrets/{name} of the data "
                    "directory",
                    param=f"secrets.{variable}",
                    code="secret_missing",
                ) from None
        environment[variable] = value
    return environment


# --- parsing -----------------------------------------------------------------------------------------------------


def parse_json(body: bytes | str) -> FunctionSpec:
    """JSON text to spec; raises `InvalidRequest` naming every faulty field."""
    if len(body) > MAX_SPEC_BYTES:
        raise InvalidRequest(f"a spec of {len(body)} bytes exceeds {MAX_SPEC_BYTES}")
    try:
        return FunctionSpec.model_validate_json(body)
    except ValidationError as error:
        raise invalid_spec(error) from None


def parse_mapping(value: Any) -> FunctionSpec:
    """What YAML or a program has read, by the rules of JSON."""
    if not isinstance(value, dict):
        raise InvalidRequest("a function spec is a mapping of fields, such as name and model")
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a function spec holds text, numbers, lists and mappings only: {error}") from None
    return parse_json(text)


def parse_yaml(text: str) -> FunctionSpec:
    """YAML text to spec; syntax errors name their line, and a key given twice is an error."""
    import yaml

    if len(text) > MAX_SPEC_BYTES:
        raise InvalidRequest(f"a spec of {len(text)} characters exceeds {MAX_SPEC_BYTES}")

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # NOTE: aliases let a few lines stand for gigabytes; a spec needs none.
            if self.check_event(yaml.AliasEvent):
                event: Any = self.peek_event()  # type: ignore[no-untyped-call]
                raise InvalidRequest(f"line {event.start_mark.line + 1}: YAML aliases are not allowed in a spec")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key_node, _ in node.value:
                key = key_node.value
                if not isinstance(key, str):
                    raise InvalidRequest(f"line {key_node.start_mark.line + 1}: not YAML of a spec: a key is text")
                if key in seen:
                    raise InvalidRequest(f"line {key_node.start_mark.line + 1}: {key} is given twice", param=key)
                seen.add(key)
            return super().construct_mapping(node, deep=deep)

    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise InvalidRequest(f"{place}not YAML: {problem}") from None
    except InvalidRequest:
        raise
    except Exception as error:
        # Constructors of explicit tags (`!!int ""`) raise whatever they happen to trip over.
        raise InvalidRequest(f"not YAML: {type(error).__name__}: {error}") from None
    return parse_mapping(value)


def invalid_spec(error: ValidationError) -> InvalidRequest:
    """All faults in one message, the first one's field as `param`."""
    faults: list[tuple[str, str]] = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        if fault["type"] == "json_invalid":
            return InvalidRequest(f"not JSON: {fault['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
        place = [part for part in fault["loc"] if part not in ("literal['auto']", "constrained-float", "float")]
        path = ".".join(str(part) for part in place)
        faults.append((path, _plain(fault["type"], fault["msg"])))
    unique = list(dict.fromkeys(faults))
    lines = [f"{path}: {message}" if path else message for path, message in unique]
    return InvalidRequest("; ".join(lines), param=unique[0][0] or None, code="invalid_spec")


def _plain(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "there is no such field"
    if kind == "missing":
        return "is required"
    return message.removeprefix("Value error, ").removeprefix("Input ")
