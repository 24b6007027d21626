"""MkDocs hooks: generate the reference pages from the code, and inline the diagrams. Needs no network."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "infembed_ray"
sys.path.insert(0, str(ROOT))

from infembed_ray.cli import main as cli  # noqa: E402
from infembed_ray.cli.help import describe_type  # noqa: E402
from infembed_ray.config.base import Settings, settings_classes  # noqa: E402
from infembed_ray.telemetry import METRICS  # noqa: E402

SETTINGS = {
    **{name: [verb.settings] for name, verb in cli.VERBS.items()},
    "plan": [verb.settings for verb in cli.PLANS.values()],
}
SETTINGS["index"].append(cli.MAINTENANCE["index compact"].settings)
SETTINGS["manifests"] = [cli.MAINTENANCE["manifests"].settings]


def on_config(config: Any) -> Any:
    """Add the generated pages that have no fixed list to the navigation."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    reference.append({"Settings": [{verb: f"reference/settings/{verb}.md"} for verb in SETTINGS]})
    reference.append({"Modules": [{name: f"reference/modules/{name}.md"} for name in packages()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File

    for uri, content in generated().items():
        files.append(File.generated(config, uri, content=content))
    return files


def generated() -> dict[str, str]:
    """The generated pages: path below docs/ -> Markdown."""
    pages = {f"reference/settings/{verb}.md": settings_page(verb, classes) for verb, classes in SETTINGS.items()}
    pages |= {f"reference/modules/{name}.md": modules_page(name, files) for name, files in packages().items()}
    pages["reference/commands.md"] = commands_page()
    pages["reference/http.md"] = http_page()
    pages["reference/metrics.md"] = metrics_page()
    return pages


# Settings


def settings_page(verb: str, classes: list[type[Settings]]) -> str:
    """All settings of a verb, nested ones in a section each."""
    lines = [
        f"# Settings of `{verb}`\n",
        f"`infembed {verb} --config FILE key=value ...` takes these settings, from the YAML file and from the command line. "
        "The command line wins; a dot reaches into a nested setting (`lora.rank=8`). "
        "Settings marked *yes* are part of the output's identity: another value gives another output directory.\n",
    ]
    for cls in with_nested(classes):
        text = inspect.cleandoc(cls.__doc__ or "")
        lines += [f"## {cls.__name__}\n", text + "\n", settings_table(cls)]
    return "\n".join(lines)


def with_nested(classes: list[type[Settings]]) -> list[type[Settings]]:
    """The classes and all settings classes that their fields hold, each once."""
    found: dict[type[Settings], None] = {}
    queue = list(classes)
    while queue:
        cls = queue.pop(0)
        if cls not in found:
            found[cls] = None
            queue += [inner for field in cls.model_fields.values() for inner in settings_classes(field.annotation)]
    return list(found)


def settings_table(cls: type[Settings]) -> str:
    """A Markdown table with a row for each field."""
    rows = ["| setting | type | default | identity | description |", "|---|---|---|---|---|"]
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        identity = "no" if extra.get("identity") is False else "yes"
        default = "required" if field.is_required() else default_text(field.get_default(call_default_factory=True))
        description = (field.description or "").replace("|", "\\|").replace("<", "&lt;")
        rows.append(
            f"| `{name}`{{ #{cls.__name__.lower()}-{name} }} | {type_text(field.annotation)} | {default} | {identity} | {description} |"
        )
    return "\n".join(rows) + "\n"


def default_text(value: Any) -> str:
    """A default as one writes it in YAML."""
    if isinstance(value, Settings):
        value = value.model_dump(exclude_defaults=True)
    elif value is PydanticUndefined:
        return "required"
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
    return f"`{text}`".replace("|", "\\|")


def type_text(annotation: Any) -> str:
    """A type annotation in words; settings classes link to their section."""
    text = describe_type(annotation).replace("|", "\\|")
    for name in {cls.__name__ for cls in settings_classes(annotation)}:
        text = re.sub(rf"\b{name}\b", f"[{name}](#{name.lower()})", text)
    return text


# Commands


def commands_page() -> str:
    """Every verb: what it does, its settings or its arguments."""
    with mock.patch.dict(os.environ, COLUMNS="100"):  # the width of argparse's help texts
        return _commands_page()


def _commands_page() -> str:
    lines = [
        "# Commands\n",
        "`infembed VERB --help` prints this for one verb. Verbs with settings take `--config FILE` and `key=value`; "
        "`--print-config` prints all their settings instead.\n",
        "| verb | what it does | settings |",
        "|---|---|---|",
    ]
    plain = []
    for name, command in sorted(cli.COMMANDS.items()):
        page, has_settings = name.split()[0], isinstance(command, cli.Verb)
        link = f"[{page}](settings/{page}.md)" if has_settings else f"[arguments](#{name.replace(' ', '-')})"
        lines.append(f"| `infembed {name}` | {command.help} | {link} |")
        if not has_settings:
            plain.append(f"\n## {name}\n\n```text\n{cli.parser_of(name).format_help().strip()}\n```\n")
    return "\n".join(lines + plain) + "\n"


# HTTP API


def http_page() -> str:
    """The HTTP API, from the application's OpenAPI document."""
    from infembed_ray.serving.http.app import create_app
    from infembed_ray.serving.http.auth import ApiKeys
    from infembed_ray.serving.http.errors import CODES, STATUSES

    api = create_app(dict, lambda: "docs", ApiKeys(["key"])).openapi()
    lines = ["# HTTP API\n", api["info"]["description"].strip() + "\n", "| request | what it does |", "|---|---|"]
    sections = []
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            title = f"{method.upper()} {path}"
            anchor = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
            text = operation.get("description") or operation.get("summary", "")
            lines.append(f"| [`{title}`](#{anchor}) | {text} |")
            sections += [f"\n## `{title}` {{ #{anchor} }}\n", text + "\n", *body_links(operation), statuses(operation)]
    sections += ["\n## Errors\n", "| status | `code` | meaning |", "|---|---|---|"]
    for status, text in STATUSES.items():
        codes = ", ".join(f"`{code}`" for code, of in CODES.items() if of == status)
        sections.append(f"| {status} | {codes} | {text} |")
    sections.append("\n## Schemas\n")
    for name, schema in api["components"]["schemas"].items():
        sections += [f"\n### {name}\n", schema.get("description", "") + "\n", schema_table(schema)]
    return "\n".join(lines + sections) + "\n"


def body_links(operation: dict[str, Any]) -> Iterator[str]:
    """The schemas of the request and of the answer."""
    for label, holder in (("Body", operation.get("requestBody")), ("Answer", operation["responses"].get("200"))):
        for content in (holder or {}).get("content", {}).values():
            if content.get("schema"):
                yield f"{label}: {schema_text(content['schema'])}\n"


def statuses(operation: dict[str, Any]) -> str:
    """A table of the status codes."""
    rows = [f"| {code} | {answer['description']} |" for code, answer in operation["responses"].items()]
    return "\n".join(["| status | meaning |", "|---|---|", *rows]) + "\n"


def schema_table(schema: dict[str, Any]) -> str:
    """The fields of a schema."""
    rows = ["| field | type | required | description |", "|---|---|---|---|"]
    for name, field in schema.get("properties", {}).items():
        required = "yes" if name in schema.get("required", []) else "no"
        description = field.get("description", "").replace("|", "\\|")
        rows.append(f"| `{name}` | {schema_text(field)} | {required} | {description} |")
    return "\n".join(rows) + "\n"


def schema_text(schema: dict[str, Any]) -> str:
    """The type of a JSON schema, with links to named ones."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(schema_text(one) for one in schema[key]))
    if "const" in schema:
        return f'`"{schema["const"]}"`'
    if "enum" in schema:
        return " ".join(f'`"{value}"`' for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {schema_text(schema.get('items', {}))}"
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


# Metrics


@cache
def metrics() -> dict[str, str]:
    """Name -> help text of every Prometheus metric that the API's source names, without `_total`."""
    from infembed_ray.serving.encoder.batching import Counters

    counters = [field.name for field in dataclasses.fields(Counters)]
    found = {
        f"infembed_{part}_{name}": f"{name.replace('_', ' ').capitalize()} so far."
        for part, names in {"encoder": [*counters, "prefix_hits", "prefix_misses"], "reranker": counters}.items()
        for name in names
    }
    for file in sorted((PACKAGE / "serving").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) > 1:
                name, text = (string(argument) for argument in node.args[:2])
                if name and re.fullmatch(r"infembed_\w+", name):
                    found[name.removesuffix("_total")] = text or ""
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    name = string(key) if key else None
                    if name and re.fullmatch(r"infembed_\w+", name) and isinstance(value, ast.Tuple):
                        found[name.removesuffix("_total")] = string(value.elts[0]) or ""
    return found


def string(node: ast.expr) -> str | None:
    """A constant string."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def metrics_page() -> str:
    """The Prometheus metrics of the API and of the stages."""
    rows = [f"| `{name}` | {text} |" for name, text in metrics().items()]
    of_stages = [f"| `infembed_{name}` | {label or ''} | {text} |" for name, (text, label) in METRICS.items()]
    return "\n".join(
        [
            "# Metrics\n",
            "`GET /metrics` of a running API returns these metrics in Prometheus' text format, for every replica. "
            "Counters end in `_total` there, histograms in `_bucket`, `_sum` and `_count`. "
            "[Monitoring](../operations/monitoring.md) names the ones to watch.\n",
            "| metric | meaning |",
            "|---|---|",
            *rows,
            "\n## The stages\n",
            "Ray exports these metrics of the other verbs with the prefix `ray_`, and with the labels `stage` and `run`.\n",
            "| metric | label | meaning |",
            "|---|---|---|",
            *of_stages,
        ]
    )


# Python modules


def packages() -> dict[str, list[Path]]:
    """Page name -> the modules it describes: one page for each subpackage, and `infembed_ray` for the top level."""
    pages: dict[str, list[Path]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts
        if file.name != "__init__.py" and not {"files", "prompts"} & set(parts):
            pages.setdefault(parts[0] if len(parts) > 1 else "infembed_ray", []).append(file)
    return dict(sorted(pages.items()))


def modules_page(name: str, files: list[Path]) -> str:
    """The docstrings of the modules of a package, by mkdocstrings."""
    lines = [f"# {name}\n"]
    for file in files:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        lines.append(f"::: {module}\n    options:\n      show_root_full_path: true\n")
    return "\n".join(lines)


# Links and diagrams


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to results of benchmarks and to CONTRIBUTING.md, which are no part of the site, by the path of the file."""
    return re.sub(r"\[[^\]]+\]\((?:\.\./)+(benchmarks/[^)]+|CONTRIBUTING\.md)\)", r"`\1`", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Inline the SVG diagrams, so that they follow the light and dark mode of the site."""

    def inline(match: re.Match[str]) -> str:
        svg = (ROOT / "docs" / "assets" / match["name"]).read_text(encoding="utf-8")
        return re.sub(r"<style>.*?</style>", "", svg, count=1, flags=re.DOTALL)

    return re.sub(r'<img [^>]*src="[^"]*assets/(?P<name>[\w-]+\.svg)"[^>]*>', inline, html)
