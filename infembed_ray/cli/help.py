"""Settings for people and editors: the help of a verb and of a section, a filled-in YAML file, a JSON Schema."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from infembed_ray.config.base import Settings, nearest, settings_classes
from infembed_ray.errors import InputError

_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def overview(settings: type[Settings], prefix: str = "", holder: Any = None) -> Iterator[str]:
    """Describe every setting in a line, nested ones after the setting that holds them; defaults are written as YAML.

    Args:
        prefix: of their names.
        holder: default of the setting that holds them.
    """
    for name, field in settings.model_fields.items():
        yield f"  {prefix + name:<22} {field.description} ({_default(name, field, holder)})"
        if inner := settings_classes(field.annotation):
            yield from overview(inner[0], f"{prefix}{name}.{_label(field.annotation)}", field.default)


def section(settings: type[Settings], verb: str, name: str) -> str:
    """Describe one setting, and with type, default and meaning every setting that it holds.

    Args:
        name: of a setting, for example `lora` or `validation.every`.

    Raises:
        InputError: the verb has no such setting; the message suggests the nearest one.
    """
    classes, field, holder = [settings], None, None
    walked: list[str] = []
    for part in name.split("."):
        fields = {key: value for cls in classes for key, value in cls.model_fields.items()}
        if field is not None and fields and part not in fields and _label(field.annotation):
            walked.append(part)  # a label that the user chooses
            continue
        if not fields:
            raise InputError.of(name, None, f"`infembed {verb}` has no such setting: {'.'.join(walked)} is one value")
        if part not in fields:
            raise InputError.of(name, None, f"`infembed {verb}` has no such setting: {nearest(part, fields)}")
        holder, field = (field.default if field else None), fields[part]
        classes = settings_classes(field.annotation)
        walked.append(part)
    assert field is not None
    path = ".".join(walked)
    lines = [
        f"{path}: {describe_type(field.annotation)}, {_default(walked[-1], field, holder)}",
        f"  {field.description}",
    ]
    prefix = f"{path}.{_label(field.annotation) if len(walked) == 1 else ''}"
    for cls in classes:
        lines += ["", f"{cls.__name__}: {inspect.cleandoc(cls.__doc__ or '')}"]
        for key, inner in cls.model_fields.items():
            lines += [
                f"  {prefix}{key}: {describe_type(inner.annotation)}, {_default(key, inner, field.default)}",
                f"      {inner.description}",
            ]
    return "\n".join(lines)


def as_yaml(settings: Settings) -> str:
    """Write all settings with their values as a file that `--config` reads."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def as_schema(settings: type[Settings], verb: str) -> str:
    """Write the JSON Schema of a verb's YAML file; required settings may also be given on the command line."""
    schema = _without_required(settings.model_json_schema())
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": verb}, indent=2)


def _without_required(schema: Any) -> Any:
    """Drop `required` at all levels, and allow a value to fit several forms: a retriever's mapping also fits a baseline's."""
    if isinstance(schema, list):
        return [_without_required(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        "anyOf" if key == "oneOf" else key: _without_required(value)
        for key, value in schema.items()
        if not (key == "required" and isinstance(value, list))
    }


def names(settings: type[Settings], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings that have a fixed name."""
    for name, field in settings.model_fields.items():
        yield f"{prefix}{name}"
        if (inner := settings_classes(field.annotation)) and not _label(field.annotation):
            yield from names(inner[0], f"{prefix}{name}.")


def describe_type(
    annotation: Any,
    value: Callable[[Any], str] = str,
    nested: Callable[[type[Settings]], str] = lambda cls: cls.__name__,
) -> str:
    """Describe a type annotation in words.

    Args:
        value: writes one of a fixed set of values.
        nested: writes the name of a settings class.
    """
    origin, inner = get_origin(annotation), get_args(annotation)

    def describe(part: Any) -> str:
        return value("null") if part is NoneType else describe_type(part, value, nested)

    if origin is Annotated:
        return describe(inner[0])
    if origin is Literal:
        return " ".join(map(value, inner)) if value is not str else " | ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(map(describe, inner))
    if origin is tuple:
        return f"list of {describe(inner[0])}"
    if origin is dict:
        return f"mapping to {describe(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return nested(annotation)
    return _NAMES.get(annotation, "any")


def _label(annotation: Any) -> str:
    """Return `LABEL.` if the settings are in a mapping whose labels the user chooses."""
    in_mapping = any(get_origin(part) is dict for part in (annotation, *get_args(annotation)))
    return "LABEL." if in_mapping else ""


def _default(name: str, field: Any, holder: Any) -> str:
    """Describe the default of a field; `holder`, the default of the setting that holds it, may give another value."""
    if isinstance(holder, Settings) and name in holder.model_fields_set:
        return _as_default(getattr(holder, name))
    if field.is_required():
        return "required"
    if isinstance(field.default, Settings):
        return "its settings follow"
    return _as_default(field.default)


def _as_default(value: Any) -> str:
    return "default " + yaml.safe_dump([value], default_flow_style=True, width=10**6).strip()[1:-1]
