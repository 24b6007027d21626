"""Settings for people: the help of a verb and of a section, a filled-in YAML file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from infembed_ray.config.base import Settings, nearest, settings_classes
from infembed_ray.config.verbs import Verb
from infembed_ray.errors import InputError

_BOUNDS = {"ge": "minimum {:g}", "gt": "above {:g}", "le": "maximum {:g}", "lt": "below {:g}"}
_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def overview(verb: Verb, name: str) -> Iterator[str]:
    """Describe every setting of a verb in a line: required ones, others, then the sections, which hold other settings."""
    fields = verb.settings.model_fields
    sections = [key for key, field in fields.items() if settings_classes(field.annotation)]
    required = [key for key in fields if fields[key].is_required()]
    yield from _group("required settings", required, fields)
    yield from _group("other settings", [key for key in fields if key not in (*sections, *required)], fields)
    for key in sections:
        field = fields[key]
        yield f"\n{key}: {field.description} ({_default(key, field, None)})"
        inner, prefix = settings_classes(field.annotation)[0], f"{key}.{_label(field.annotation)}"
        yield from _lines(inner.model_fields, inner.model_fields, prefix, field.default)
    yield f"\ninfembed {name} --help SECTION describes a setting or a section with types and limits."
    yield from [f"example: infembed {verb.example}"] if verb.example else []


def _group(title: str, names: list[str], fields: dict[str, Any]) -> Iterator[str]:
    if names:
        yield f"\n{title}:"
        yield from _lines(names, fields, "", None)


def _lines(names: Iterable[str], fields: dict[str, Any], prefix: str, holder: Any) -> Iterator[str]:
    """Describe settings in a line each; `holder` is the default of the setting that holds them."""
    for name in names:
        field = fields[name]
        facts = ", ".join(filter(None, [_default(name, field, holder), _limits(field)]))
        yield f"  {prefix + name:<22} {field.description} ({facts})"
        for inner in settings_classes(field.annotation)[:1] if prefix else []:
            own = f"{prefix}{name}.{_label(field.annotation)}"
            yield from _lines(inner.model_fields, inner.model_fields, own, field.default)


def _limits(field: Any) -> str:
    """Return the minimum and maximum of a number."""
    bounds = {name: getattr(limit, name) for limit in field.metadata for name in _BOUNDS if hasattr(limit, name)}
    return ", ".join(text.format(bounds[name]) for name, text in _BOUNDS.items() if name in bounds)


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
        f"{path}: {_facts(walked[-1], field, holder)}",
        f"  {field.description}",
    ]
    prefix = f"{path}.{_label(field.annotation) if len(walked) == 1 else ''}"
    for cls in classes:
        lines += ["", f"{cls.__name__}: {inspect.cleandoc(cls.__doc__ or '')}"]
        for key, inner in cls.model_fields.items():
            lines += [
                f"  {prefix}{key}: {_facts(key, inner, field.default)}",
                f"      {inner.description}",
            ]
    return "\n".join(lines)


def as_yaml(settings: Settings) -> str:
    """Write all settings with their values as a file that `--config` reads."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _facts(name: str, field: Any, holder: Any) -> str:
    """Return type, default and limits of a setting."""
    return ", ".join(filter(None, [describe_type(field.annotation), _default(name, field, holder), _limits(field)]))


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
