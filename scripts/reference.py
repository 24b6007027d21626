"""Write the pages of docs/reference/ from the code: python -m scripts.reference

The pages are committed, so that links to them work in every viewer of the repository. A test compares them with the code. They
depend on the code alone: not on the machine, the time, or the order of imports.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import PydanticUndefined

from infembed_ray.cli import main as cli
from infembed_ray.cli.help import describe_type, limits
from infembed_ray.config.base import Settings, settings_classes
from infembed_ray.telemetry import METRICS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "infembed_ray"
REFERENCE = ROOT / "docs" / "reference"
NOTE = "<!-- Written by `python -m scripts.reference`. Edit the code instead. -->\n\n"

SETTINGS = {
    **{name: [verb.settings] for name, verb in cli.VERBS.items()},
    "plan": [verb.settings for verb in cli.PLANS.values()],
}
SETTINGS["index"].append(cli.MAINTENANCE["index compact"].settings)
SETTINGS["manifests"] = [cli.MAINTENANCE["manifests"].settings]
"""Page below docs/reference/settings/ -> settings classes of its verbs."""
USERS = ("mine", "sweep", "pipeline")
"""Verbs that mostly hold settings of others: what they share is described on the page of the other verb."""


def main() -> None:
    """Write all pages, and delete pages that the code no longer has."""
    pages = generated()
    for file in REFERENCE.rglob("*.md"):
        if str(file.relative_to(REFERENCE)) not in pages:
            file.unlink()
    for name, text in pages.items():
        (REFERENCE / name).parent.mkdir(parents=True, exist_ok=True)
        (REFERENCE / name).write_text(text, encoding="utf-8")


@cache
def generated() -> dict[str, str]:
    """The pages: path below docs/reference/ -> Markdown."""
    pages = {f"settings/{verb}.md": settings_page(verb) for verb in SETTINGS}
    pages["commands.md"] = commands_page()
    pages["http.md"] = http_page()
    pages["metrics.md"] = metrics_page()
    pages["python.md"] = python_page()
    return {name: NOTE + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for name, text in pages.items()}


def table(*columns: str, rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    cells = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"|{'|'.join(cell.replace(chr(10), ' ') for cell in row)}|" for row in cells) + "\n"


def escaped(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


# Settings


def settings_page(verb: str) -> str:
    """The settings of a verb: a section for each class that no earlier page has."""
    classes = [cls for cls, page in places().items() if page == verb]
    shared = [cls for cls in with_nested(SETTINGS[verb]) if cls not in classes]
    lines = [
        f"# Settings of `{verb}`\n",
        f"`infembed {verb} --config FILE key=value ...` takes these settings; the command line wins over the file. A dot reaches into a "
        "nested setting, such as `lora.rank=8`. A setting with *no* under identity does not change the output's path.\n",
    ]
    if shared:
        lines.append(f"Described on other pages: {', '.join(linked(cls, verb) for cls in shared)}.\n")
    for cls in classes:
        lines += [f"## {cls.__name__}\n", inspect.cleandoc(cls.__doc__ or "") + "\n"]
        lines += [f"All settings of {linked(base, verb)}, and these:\n"] if (base := base_of(cls)) else []
        lines.append(table("setting", "type", "default", "identity", "description", rows=settings_rows(cls, verb)))
    return "\n".join(lines)


@cache
def places() -> dict[type[Settings], str]:
    """Settings class -> the page that describes it: of its own verb, or of the first verb that holds it."""
    found = {cls: verb for verb, classes in SETTINGS.items() for cls in classes}
    for verb in sorted(SETTINGS, key=USERS.__contains__):
        for cls in with_nested(SETTINGS[verb]):
            found.setdefault(cls, verb)
    return found


def base_of(cls: type[Settings]) -> type[Settings] | None:
    """The described class whose settings a class takes over, as those of plans do."""
    return next((base for base in cls.__mro__[1:] if base in places()), None)


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


def linked(cls: type[Settings], page: str) -> str:
    """A link from a page to the section of a settings class."""
    place = places()[cls]
    return f"[{cls.__name__}]({'' if place == page else f'{place}.md'}#{cls.__name__.lower()})"


def settings_rows(cls: type[Settings], page: str) -> Iterator[tuple[str, ...]]:
    """A row for each field that the class has in another form than the class it takes over."""
    base = base_of(cls)
    for name, field in cls.model_fields.items():
        if base is not None and repr(field) == repr(base.model_fields.get(name)):
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        identity = "no" if extra.get("identity") is False else ""
        default = "required" if field.is_required() else default_text(field.get_default(call_default_factory=True))
        kind = ", ".join(filter(None, [type_text(field.annotation, page), limits(field)]))
        yield f"`{name}`", kind, default, identity, escaped(field.description or "")


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


def type_text(annotation: Any, page: str) -> str:
    """A type annotation in words; settings classes link to their section."""
    text = escaped(describe_type(annotation))
    for cls in dict.fromkeys(settings_classes(annotation)):
        text = re.sub(rf"\b{cls.__name__}\b", linked(cls, page), text)
    return text


# Commands


def commands_page() -> str:
    """Every verb: what it does, its settings or its arguments."""
    rows, sections = [], []
    for name, command in sorted(cli.COMMANDS.items()):
        page, has_settings = name.split()[0], isinstance(command, cli.Verb)
        link = f"[{page}](settings/{page}.md)" if has_settings else f"[arguments](#{name.replace(' ', '-')})"
        rows.append((f"`infembed {name}`", escaped(command.help), link))
        if not has_settings:
            sections += [f"## {name}\n", *arguments(name)]
    return "\n".join(
        [
            "# Commands\n",
            "`infembed VERB --help` prints this for one verb. Verbs with settings take `--config FILE` and `key=value`; "
            "`--print-config` prints all their settings instead, and `--dry-run` checks a run without starting it.\n",
            table("command", "what it does", "settings", rows=iter(rows)),
            *sections,
        ]
    )


def arguments(name: str) -> Iterator[str]:
    """The arguments of a command: its usage and a table."""
    usage, rows = [f"infembed {name}"], []
    for action in cli.parser_of(name)._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper())
        flag = action.option_strings[0] if action.option_strings else ""
        shown = flag if action.nargs == 0 else f"{flag} {value}".strip()
        needed = not flag and action.nargs not in ("?", "*")
        usage.append(shown if needed else f"[{shown}{' ...' if action.nargs == '*' else ''}]")
        rows.append((f"`{shown}`", escaped((action.help or "") % vars(action))))
    yield f"`{' '.join(usage)}`\n"
    yield table("argument", "meaning", rows=iter(rows))


# HTTP API


def http_page() -> str:
    """The HTTP API, from the application's OpenAPI document."""
    from infembed_ray.serving.http.app import create_app
    from infembed_ray.serving.http.auth import ApiKeys
    from infembed_ray.serving.http.errors import CODES, STATUSES

    async def metrics() -> bytes:
        raise NotImplementedError  # nothing is asked

    api = create_app(dict, lambda: "docs", ApiKeys(["key"]), metrics=metrics).openapi()
    lines = ["# HTTP API\n", api["info"]["description"].strip() + "\n", "## Requests\n"]
    requests = [(f"`{m.upper()} {path}`", one) for path, methods in api["paths"].items() for m, one in methods.items()]
    every = set.intersection(*(set(errors(operation)) for _, operation in requests))
    titles = {title for title, _ in requests}
    rows = (
        (
            title,
            f"as {default}" if of_collection and default in titles else escaped(operation.get("description", "")),
            " -> ".join(filter(None, bodies(operation))),
            ", ".join(code for code in errors(operation) if code not in every),
        )
        for title, operation in requests
        for of_collection, default in [("{collection}" in title, title.replace("/collections/{collection}", ""))]
    )
    lines.append(table("request", "what it does", "body -> answer", "errors", rows=rows))
    lines.append(f"Every request can also fail with {', '.join(sorted(every))}.\n")
    statuses = [
        (str(status), ", ".join(f"`{code}`" for code, of in CODES.items() if of == status), text)
        for status, text in STATUSES.items()
    ]
    lines += ["## Errors\n", table("status", "`code`", "meaning", rows=iter(statuses)), "## Schemas\n"]
    for name, schema in api["components"]["schemas"].items():
        lines += [f"### {name}\n", schema.get("description", "") + "\n", schema_table(schema)]
    return "\n".join(lines)


def bodies(operation: dict[str, Any]) -> Iterator[str]:
    """The schemas of the request and of the answer."""
    for holder in (operation.get("requestBody"), operation["responses"].get("200")):
        contents = (holder or {}).get("content", {}).values()
        yield " ".join(schema_text(content["schema"]) for content in contents if content.get("schema"))


def errors(operation: dict[str, Any]) -> list[str]:
    """The status codes that are errors."""
    return [code for code in operation["responses"] if code >= "400"]


def schema_table(schema: dict[str, Any]) -> str:
    """The fields of a schema."""
    required = schema.get("required", [])
    rows = (
        (f"`{name}`", schema_text(field), "yes" if name in required else "", escaped(field.get("description", "")))
        for name, field in schema.get("properties", {}).items()
    )
    return table("field", "type", "required", "description", rows=rows)


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
    of_stages = [(f"`infembed_{name}`", label or "", escaped(text)) for name, (text, label) in METRICS.items()]
    return "\n".join(
        [
            "# Metrics\n",
            "`GET /metrics` of a running API returns these metrics in Prometheus' text format, for every replica. "
            "Counters end in `_total` there, histograms in `_bucket`, `_sum` and `_count`. "
            "[Monitoring](../operations/monitoring.md) names the ones to watch.\n",
            table("metric", "meaning", rows=((f"`{name}`", escaped(text)) for name, text in metrics().items())),
            "## The stages\n",
            "Ray exports these metrics of the other verbs with the prefix `ray_`, and with the labels `stage` and `run`.\n",
            table("metric", "label", "meaning", rows=iter(of_stages)),
        ]
    )


# Python API

PYTHON: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Stages": {"api": ("load_records", "synthesize", "train", "evaluate", "build_index")},
    "Encode": {"modeling.encoder": ("InstructionEncoder",)},
    "Build and search an index": {"retrieval.index": ("Index",), "retrieval.shards": ("Hit",)},
    "Loss": {"training.marginal_loss": ("MarginalLoss",)},
    "Read records": {"records.tables": ("Seed", "Record", "Passage", "read", "stream")},
    "Call a running API": {
        "client": ("Client", "AsyncClient", "Embeddings", "ApiError", "Unreachable"),
        "serving.service": ("Document",),
    },
    "Outputs": {"storage.steps": ("Published",)},
    "Errors": {"errors": ("InputError", "Fault", "GateError", "ClusterError", "StartError")},
}
"""Section -> module below infembed_ray -> names of its public API."""
MEMBERS = {
    "InstructionEncoder": (
        "from_pretrained",
        "encode_queries",
        "encode_passages",
        "encode",
        "similarity",
        "save_pretrained",
        "fingerprint",
        "dimension",
    ),
    "Index": ("build", "open", "describe", "search"),
    "AsyncClient": (),
    "InputError": ("of", "faults"),
}
"""Public members of a class, where they are not all that have a docstring."""
ANSWERS = ("SearchResponse", "SearchHit", "Model", "Collection")
"""Answers of the HTTP API that `Client` returns."""
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):\n((?:    .*\n|\n)+)", re.MULTILINE)


def python_page() -> str:
    """The public API: signatures and docstrings."""
    lines = [
        "# Python API\n",
        "Import names of `__all__` from `infembed_ray`, and the others from the module that is named. A name is loaded when it is first "
        "used. [In a notebook](../guides/notebook.md) shows them together.\n",
    ]
    for title, modules in PYTHON.items():
        lines.append(f"## {title}\n")
        for module, names in modules.items():
            for name in names:
                lines += described(module, name)
        if title == "Stages":
            lines += stages()
        if title == "Call a running API":
            answers = ", ".join(f"[{name}](http.md#{name.lower()})" for name in ANSWERS)
            lines.append(f"`infembed_ray.serving.schema` has the answers: {answers}.\n")
    return "\n".join(lines)


def stages() -> Iterator[str]:
    """The function and the settings of every verb."""
    rows = (
        (f"`{name}`", f"`{verb.function.replace(':', '.')}`", f"`config.{verb.settings_class.replace(':', '.')}`")
        for name, verb in (cli.VERBS | cli.MAINTENANCE).items()
    )
    yield "### Functions of all verbs\n"
    yield "They take one settings object. Modules are below `infembed_ray`:\n"
    yield table("verb", "function", "settings", rows=rows)
    yield (
        "The command line and the four stages of the package replace an alias of `infembed runs promote` by the release's output. For other "
        "stages, call `infembed_ray.storage.releases.resolved(settings)`.\n"
    )


def described(module: str, name: str) -> Iterator[str]:
    """A function, or a class with its members."""
    import infembed_ray

    value = getattr(importlib.import_module(f"infembed_ray.{module}"), name)
    yield f"### {name}\n"
    if name not in infembed_ray.__all__:
        yield f"In `infembed_ray.{module}`.\n"
    if not inspect.isclass(value):
        yield from (code(signature(value, name)), markdown(value))
        return
    node = parsed(value)
    assert isinstance(node, ast.ClassDef)
    yield code(class_signature(node, value))
    yield markdown(value)
    members = MEMBERS.get(name) or (() if name in MEMBERS else tuple(key for key in vars(value) if key[0] != "_"))
    for member in members:
        found = inspect.getattr_static(value, member)
        if isinstance(found, property):
            yield f"#### {name}.{member}\n"
            yield from (code(f"{name}.{member}: {returns(found.fget)}"), markdown(found))
        elif inspect.isroutine(function := getattr(value, member)) and function.__doc__:
            yield f"#### {name}.{member}\n"
            yield from (code(signature(function, f"{name}.{member}")), markdown(function))


def parsed(value: Any) -> ast.stmt:
    """The syntax of a function or a class."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body[0]


def code(text: str) -> str:
    """A block of Python."""
    return f"```python\n{text}\n```\n"


def returns(function: Any) -> str:
    """The type that a function returns; of a method of a client, the type of its answer."""
    node = parsed(function)
    assert isinstance(node, ast.FunctionDef)
    text = ast.unparse(node.returns) if node.returns else "None"
    return text.removeprefix("_Request[")[:-1] if text.startswith("_Request[") else text


def signature(function: Any, name: str) -> str:
    """A function's signature."""
    node = parsed(function)
    assert isinstance(node, ast.FunctionDef)
    return call(name, node.args, inspect.unwrap(function).__globals__, f" -> {returns(function)}")


def call(name: str, given: ast.arguments, known: Mapping[str, Any], end: str = "") -> str:
    """A signature without `self` and `cls`: on one line if it fits, else an argument per line.

    Args:
        known: globals of the function, whose values stand for the names of defaults.
    """
    for defaults in (given.defaults, given.kw_defaults):
        values = [known.get(node.id) if isinstance(node, ast.Name) else None for node in defaults]
        defaults[:] = [old if new is None else ast.Constant(new) for old, new in zip(defaults, values, strict=True)]
    arguments = [argument for argument in split(ast.unparse(given)) if argument not in ("self", "cls")]
    arguments = [re.sub(r"^(\*{0,2}\w+: [^=]+)=", r"\1 = ", argument).replace("'", '"') for argument in arguments]
    line = f"{name}({', '.join(arguments)}){end}"
    return line if len(line) <= 100 else f"{name}(\n    {(',' + chr(10) + '    ').join(arguments)},\n){end}"


def split(text: str) -> list[str]:
    """The parts of a text between the commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def class_signature(node: ast.ClassDef, value: type) -> str:
    """The arguments of a class, or the fields of a class that only holds values."""
    made = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    if made is not None:
        return f"class {call(node.name, made.args, vars(inspect.getmodule(value)))}"
    lines = [f"class {node.name}{f'({base})' if (base := bases(value)) else ''}"]
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            text = after.value if isinstance(after, ast.Expr) else None
            note = f"  # {' '.join((string(text) or '').split())}" if text is not None else ""
            given = ast.unparse(part.value) if part.value else ""
            default = f" = {'...' if re.match('_|field', given) else given}" if given else ""
            lines.append(f"    {ast.unparse(part.target)}: {ast.unparse(part.annotation)}{default}{note}")
    return "\n".join(lines)


def bases(value: type) -> str:
    """The public bases of an exception."""
    return ", ".join(
        base.__name__ for base in value.__bases__ if issubclass(value, Exception) and base.__name__[0] != "_"
    )


def markdown(value: Any) -> str:
    """A docstring in Google's style as Markdown."""
    text = re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", inspect.getdoc(value) or "", flags=re.MULTILINE)
    return _SECTION.sub(lambda found: section(found[1], found[2]), f"{text}\n").replace("\n\n\n", "\n\n")


def section(title: str, body: str) -> str:
    """A section of a docstring: entries as a list, or one paragraph."""
    body = textwrap.dedent(body).strip()
    title = {"Args": "Arguments"}.get(title, title)
    if title in ("Returns", "Yields"):
        return f"{title}: {' '.join(body.split())}\n\n"
    entries = re.split(r"\n(?! )", body)
    return f"{title}:\n\n" + "\n".join(f"- {entry(text)}" for text in entries) + "\n\n"


def entry(text: str) -> str:
    """`name: text`, with the name as code."""
    names, colon, meaning = " ".join(text.split()).partition(": ")
    return f"`{names}`: {meaning}" if colon else text


if __name__ == "__main__":
    main()
