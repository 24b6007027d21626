"""Base class of all settings: a YAML file plus `key=value` overrides, validated strictly.

The settings of a stage are one frozen class. Every field has a description with its unit. A `runtime_field` says where or how
fast a step runs; it does not change the result, so it is not part of the step's identity (see `steps.Step`).

No setting may hold credentials in a URL: logs, manifests and run states show settings.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from infembed_ray.errors import Fault, InputError
from infembed_ray.redaction import MASK, holds_credentials, where_they_belong

S = TypeVar("S", bound="Settings")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True)
class Kind:
    """What the text of a setting names; a type such as `InputPath` carries it."""

    is_path: bool
    """A file or directory, which must exist. Else a text names one only if it begins with `/`, `.` or `~`."""
    stages: tuple[str, ...] = ()
    """Stages whose output it may be, the best first: a setting may name an alias of a release in place of it."""

    def names_path(self, value: str) -> bool:
        """Return whether a value names a file or directory of this machine or of a store."""
        return self.is_path or value.startswith(("/", ".", "~"))


InputPath = Annotated[str, Kind(is_path=True)]
"""A file or directory that a stage reads."""
RecordsPath = Annotated[str, Kind(is_path=True, stages=("analyze", "synthesize"))]
"""Records."""
IndexPath = Annotated[str, Kind(is_path=True, stages=("index",))]
"""An index, or an address of Milvus."""
ModelName = Annotated[str, Kind(is_path=False, stages=("train",))]
"""A model: a directory, or any other name."""
_RUNTIME: dict[str, Any] = {"identity": False}


def filled_in(**values: Any) -> BeforeValidator:
    """Return a validator that gives settings, unless they are given, the values that the settings around them fill in."""
    return BeforeValidator(lambda given: {**values, **given} if isinstance(given, dict) else given)


def runtime_field(default: Any = ..., *, description: str, **bounds: Any) -> Any:
    """Declare a field that says where or how fast a step runs, and does not change what it computes."""
    return Field(default, description=description, json_schema_extra=_RUNTIME, **bounds)


class Settings(BaseModel):
    """Frozen, strict settings. Load with `load`, or construct directly from Python."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,  # an input may hold a password
    )

    @model_validator(mode="before")
    @classmethod
    def _keep_nested_defaults(cls, values: Any) -> Any:
        """Complete a mapping by its field's default: `generator.max_tokens=1000` keeps the default model."""
        if not isinstance(values, dict):
            return values
        defaults = {name: f.default for name, f in cls.model_fields.items() if isinstance(f.default, Settings)}
        given = {name: values[name] for name in defaults if isinstance(values.get(name), dict)}
        return values | {name: defaults[name].model_dump(exclude_unset=True) | part for name, part in given.items()}

    @field_validator("*", mode="before")
    @classmethod
    def _reject_converted_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject numbers of another type: pydantic alone reads `true` as 1 and `2.0` as the integer 2."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = set(get_args(annotation)) | {annotation}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("Input should be a number, not true or false")
        if isinstance(value, float) and int in kinds and float not in kinds:
            raise ValueError("Input should be a whole number")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _reject_credentials(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject credentials in a text, also in a tuple or a mapping; nested settings check their own fields.

        A setting `..._env` names the variable with a secret, and is easily given the secret itself.
        """
        if str(info.field_name).endswith("_env") and isinstance(value, str) and not _VARIABLE.fullmatch(value):
            remedy = "give a name in capitals such as OPENAI_API_KEY, not a secret"
            raise ValueError(f"no name of an environment variable; {remedy}")
        if holds_credentials(value):
            variables = [f"the variable that `{name}` names" for name in cls.model_fields if name.endswith("_env")]
            raise ValueError(where_they_belong(value, *variables[:1]))
        return value

    @classmethod
    def load(cls: type[S], path: str | None = None, overrides: Sequence[str] = ()) -> S:
        """Load a YAML file and apply `key=value` overrides.

        Args:
            path: of the YAML file; None starts from the defaults.
            overrides: values are read as YAML; dots separate the parts of a nested key.

        Raises:
            InputError: the file is missing or does not hold a mapping, an override has no `=`, a key is unknown (the
                message suggests the nearest one) or a value has the wrong type.
        """
        values: dict[str, Any] = {}
        if path is not None:
            file = Path(path)
            if not file.is_file():
                raise InputError.of("--config", path, "no such file", "give a YAML file with settings")
            try:
                loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                raise InputError.of("--config", path, f"not valid YAML ({' '.join(str(error).split())})") from error
            if loaded is not None and not isinstance(loaded, dict):
                kind = type(loaded).__name__
                raise InputError.of("--config", path, f"must hold `key: value` lines, but holds a {kind}")
            values = loaded or {}
        for override in overrides:
            key, separator, text = override.partition("=")
            if not separator or not key:
                raise InputError.of(f"override {override}", None, "write it as key=value, for example seed=1")
            _set(values, key.split("."), _parse(text), override)
        return cls.from_mapping(values)

    @classmethod
    def from_mapping(cls: type[S], values: dict[str, Any], where: str = "") -> S:
        """Make settings from a mapping.

        Args:
            values: field -> value.
            where: prefix of the fields' names in errors, for example `train.`.

        Raises:
            InputError: some values are invalid; it has a fault for each of them.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            invalid = InputError(*(fault for one in error.errors(include_url=False) for fault in _faults(cls, one)))
            raise invalid.within(where) from error

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the result (all but runtime fields) as plain JSON values."""
        fields = type(self).model_fields.items()
        return {name: _json(getattr(self, name)) for name, field in fields if field.json_schema_extra != _RUNTIME}


class RowSettings(Settings):
    """Settings of a stage that reads rows. With equal rows, `error` and `reject` publish the same."""

    on_bad_row: Literal["error", "reject"] = runtime_field(
        "error",
        description="rows that cannot be used; error: list them and stop; reject: leave them out, and write them to "
        "bad_rows.jsonl in the output",
    )


def _json(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.identity()
    if isinstance(value, (tuple, list)):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    return value


def _parse(text: str) -> Any:
    """Read an override's value as YAML, so `2`, `true`, `null` and `[a, b]` mean what they mean in a file."""
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def _set(values: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        inner = values.setdefault(key, {})
        if not isinstance(inner, dict):
            raise InputError.of(f"override {override}", None, f"{key} is a single value without fields")
        values = inner
    values[keys[-1]] = value


def settings_classes(annotation: Any) -> list[type[Settings]]:
    """Return the settings classes in a field's annotation, also within a union or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [cls for inner in get_args(annotation) for cls in settings_classes(inner)]


def with_texts(settings: S, change: Callable[[str, Kind, str], str], prefix: str = "") -> S:
    """Return settings in which a function has replaced the texts that have a kind; it gets dotted name, kind and text."""
    changed = {}
    for name, field in type(settings).model_fields.items():
        value, kind = getattr(settings, name), kind_of(field)
        if (new := _with_texts(value, kind, change, f"{prefix}{name}")) != value:
            changed[name] = new
    return settings.model_copy(update=changed) if changed else settings


def _with_texts(value: Any, kind: Kind | None, change: Callable[[str, Kind, str], str], name: str) -> Any:
    if isinstance(value, Settings):
        return with_texts(value, change, f"{name}.")
    if isinstance(value, dict):
        return {label: _with_texts(item, kind, change, f"{name}.{label}") for label, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_with_texts(item, kind, change, name) for item in value)
    return change(name, kind, value) if kind is not None and isinstance(value, str) and value else value


def kind_of(field: FieldInfo) -> Kind | None:
    """Return the kind of the texts of a field, which its type carries, also within a union or a collection."""

    def search(part: Any) -> Iterator[Kind]:
        yield from (data for data in getattr(part, "__metadata__", ()) if isinstance(data, Kind))
        for inner in get_args(part):
            yield from search(inner)

    own = (data for data in field.metadata if isinstance(data, Kind))
    return next(own, None) or next(search(field.annotation), None)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return "did you mean X?", or the list of valid names if none is similar."""
    valid = list(valid)
    close = difflib.get_close_matches(name[:100], valid, n=1, cutoff=0.5)  # it indexes every character
    return f"did you mean {close[0]}?" if close else f"valid: {', '.join(sorted(valid))}"


def _faults(cls: type[Settings], invalid: Any) -> Iterator[Fault]:
    """Convert one pydantic error. Tags of unions, `<class name>`, are not part of the setting's name."""
    location = [str(part) for part in invalid["loc"]]
    name = ".".join(part for part in location if not part.startswith("<"))
    if invalid["type"] == "extra_forbidden":
        owner: type[Settings] = cls
        for part in location[:-1]:
            inner = settings_classes(owner.model_fields[part].annotation) if part in owner.model_fields else []
            owner = _tagged(part) or next(iter(inner), owner)
        yield Fault(name, None, "unknown key", nearest(location[-1], owner.model_fields))
    elif invalid["type"] == "missing":
        yield Fault(name, None, "is missing", f"set {name}=...")
    else:
        value = None if isinstance(invalid["input"], dict) else "null" if invalid["input"] is None else invalid["input"]
        value = MASK if name.endswith("_env") else value
        yield Fault(name, value, invalid["msg"].removeprefix("Value error, "))


def _tagged(tag: str, root: type[Settings] = Settings) -> type[Settings] | None:
    """Return the settings class of a union's tag `<class name>`; None for other parts of a location."""
    matches = (cls if tag == f"<{cls.__name__}>" else _tagged(tag, cls) for cls in root.__subclasses__())
    return next(filter(None, matches), None)
