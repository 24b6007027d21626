"""Settings for people: the help of a verb and of a section, and a filled-in YAML file."""

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from infembed_ray.config.base import Settings, nearest, settings_classes
from infembed_ray.config.verbs import Verb
from infembed_ray.errors import InputError

_BOUNDS = {"ge": "minimum {:g}", "gt": "above {:g}", "le": "maximum {:g}", "lt": "below {:g}"}
_LABEL = "LABEL"
"""Stands for a label that the user chooses, in the names of settings in a mapping."""
_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", NoneType: "null"}


def overview(verb: Verb, name: str) -> Iterator[str]:
    """Describe every setting of a verb in a line: required ones, others, then the sections, which hold other settings."""
    fields, lines = verb.settings.model_fields, dict(_walk(verb.settings.model_fields))
    sections = [key for key, field in fields.items() if settings_classes(field.annotation)]
    required = [key for key, field in fields.items() if field.is_required()]
    others = [key for key in fields if key not in (*sections, *required)]
    for title, keys in {"required settings": required, "other settings": others}.items():
        yield from [f"\n{title}:", *(lines[key] for key in keys)] if keys else []
    for key in sections:
        yield f"\n{lines[key].strip()}"
        yield from (line for path, line in lines.items() if path.startswith(f"{key}."))
    yield f"\ninfembed {name} --help SECTION describes one setting or section."
    yield from [f"example: infembed {verb.example}"] if verb.example else []


def section(settings: type[Settings], verb: str, name: str) -> str:
    """Describe one setting and every setting that it holds.

    Args:
        name: of a setting, for example `lora` or `validation.every`.

    Raises:
        InputError: the verb has no such setting; the message suggests the nearest one.
    """
    lines, asked = dict(_walk(settings.model_fields)), name.split(".")

    def held(path: str) -> bool:
        parts = path.split(".")
        return len(parts) >= len(asked) and all(part in (a, _LABEL) for part, a in zip(parts, asked, strict=False))

    chosen = [line for path, line in lines.items() if held(path)]
    if not chosen:
        raise InputError.of(name, None, f"`infembed {verb}` has no such setting: {nearest(name, lines)}")
    return "\n".join(chosen)


def _walk(fields: Mapping[str, Any], prefix: str = "", holder: Any = None) -> Iterator[tuple[str, str]]:
    """Yield dotted name and description of settings and of all that they hold.

    Args:
        holder: default of the setting that holds them, which may give them other defaults.
    """
    for name, field in fields.items():
        path = prefix + name
        facts = [describe_type(field.annotation), _default(name, field, holder), limits(field)]
        yield path, f"  {path:<22} {field.description} ({', '.join(filter(None, facts))})"
        in_mapping = any(get_origin(part) is dict for part in (field.annotation, *get_args(field.annotation)))
        for cls in settings_classes(field.annotation):
            yield from _walk(cls.model_fields, f"{path}.{f'{_LABEL}.' if in_mapping else ''}", field.default)


def limits(field: Any) -> str:
    """Return the minimum and maximum of a number."""
    bounds = {name: getattr(limit, name) for limit in field.metadata for name in _BOUNDS if hasattr(limit, name)}
    return ", ".join(text.format(bounds[name]) for name, text in _BOUNDS.items() if name in bounds)


def as_yaml(settings: Settings) -> str:
    """Write all settings with their values as a file that `--config` reads."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def describe_type(annotation: Any) -> str:
    """Describe a type annotation in words; settings classes by their names."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(inner[0])
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(map(describe_type, inner))
    if origin is tuple:
        return f"list of {describe_type(inner[0])}"
    if origin is dict:
        return f"mapping to {describe_type(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation.__name__
    return _NAMES.get(annotation, "any")


def _default(name: str, field: Any, holder: Any) -> str:
    """Describe the default of a field; `holder`, the default of the setting that holds it, may give another value."""
    value = field.default
    if isinstance(holder, Settings) and name in holder.model_fields_set:
        value = getattr(holder, name)
    elif field.is_required():
        return "required"
    elif isinstance(value, Settings):
        return "its settings follow"
    return "default " + yaml.safe_dump([value], default_flow_style=True, width=10**6).strip()[1:-1]
