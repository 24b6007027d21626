"""Which texts hold credentials, and that no output of the package shows them."""

import asyncio
import json
import os
import sys

import pytest
from pydantic import ValidationError

from infembed_ray import telemetry
from infembed_ray.cli import doctor
from infembed_ray.cli.main import main
from infembed_ray.config.base import Settings
from infembed_ray.config.llm import Endpoint
from infembed_ray.config.verbs import MAINTENANCE, PLANS, VERBS
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.llm.endpoint import Route, Transport, one_line
from infembed_ray.progress import say
from infembed_ray.redaction import holds_credentials, masked
from infembed_ray.storage import provenance
from infembed_ray.storage.steps import recorded

PASSWORD = "hunter2pw"
WITH_CREDENTIALS = [
    f"http://user:{PASSWORD}@host/v1",
    f"HTTPS://user:{PASSWORD}@HOST",
    f"https://{PASSWORD}@github.com/org/repo",
    f"http://:{PASSWORD}@host",
    f"http://user:a@{PASSWORD}@host",
    f"http://user:a/{PASSWORD}@host/v1",
    f"http://user:8080{PASSWORD}@host",
    f"http://user:{PASSWORD}@[::1]:80/",
    f"http:/user:{PASSWORD}@host",
    f"//user:{PASSWORD}@host/path",
    f"milvus+http://user:{PASSWORD}@host:19530/docs",
    f"rediss://user:{PASSWORD}@cache:6379",
    f"redis://:{PASSWORD}@cache:6379/0",
    f"postgresql+psycopg2://mlflow:{PASSWORD}@db/mlflow",
    f"s3://AKIA:{PASSWORD}@bucket/path",
    f"abfss://container:{PASSWORD}@account.dfs.core.windows.net/x",
    f"user:{PASSWORD}@proxy:3128",
    f":{PASSWORD}@infembed-redis:6379",
    f"user:{PASSWORD}@proxy.example.com",
    f"https://host/v1?api_key={PASSWORD}",
    f"https://host/v1?x=1&api-key={PASSWORD}&y=2",
    f"https://account.blob.core.windows.net/c?sv=2024&sp=r&sig={PASSWORD}",
    f"https://bucket.s3.amazonaws.com/x?X-Amz-Credential=a&X-Amz-Signature={PASSWORD}",
    f"https://host/cb#access_token={PASSWORD}",
    f"https://f.azurewebsites.net/api?code={PASSWORD}",
]
PLAIN = [
    "https://api.openai.com/v1",
    "http://127.0.0.1:8000/v1/models?limit=3&after=x",
    "http://host:8000/users/a@b.c",
    "http://[::1]:8000/x@y",
    "abfss://container@account.dfs.core.windows.net/data",
    "gs://anonymous@bucket/x",
    "ssh://git@github.com/org/repo",
    "git@github.com:org/repo",
    "s3://bucket/path?endpoint_override=http%3A%2F%2Flocalhost%3A9000&scheme=http&credential_kind=environment",
    "models:/encoder@production",
    "infembed-redis:6379",
    "ghcr.io/org/image:2.60@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "image:2.60@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "module.name:function",
    "gate=trained: nDCG@10 fell",
    "trained:nDCG@10",
    "Write to me: a@b.org, or see http://host: it has MRR@10.",
    "org/model@main",
    "max_tokens=5&monkeys=2",
]
VERBS_WITH_SETTINGS = VERBS | MAINTENANCE | PLANS


@pytest.mark.parametrize("value", WITH_CREDENTIALS)
def test_credentials_are_found_and_masked(value):
    assert holds_credentials(value)
    for text in (value, f"cannot connect to '{value}': refused", f'{{"url": "{value}"}}'):
        assert PASSWORD not in masked(text)
        assert masked(masked(text)) == masked(text)
    assert "host" in masked(f"http://user:{PASSWORD}@host/v1")


@pytest.mark.parametrize("value", PLAIN)
def test_other_texts_stay_as_they_are(value):
    assert not holds_credentials(value)
    assert masked(value) == value


def test_a_table_of_processes_is_left_out():
    table = "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n5794\t0.29\tpython secret-of-another-user.py\n"
    for text in (table, " ".join(table.split()), f"killed\n{table}Refer to the documentation"):
        assert "another-user" not in masked(text)


@pytest.mark.integration
@pytest.mark.timeout(300)  # an expression that backtracks would take hours
def test_long_texts_are_masked_in_seconds():
    for text in ("a" * 200_000, ":" * 20_000, "http://" * 20_000, "x:y" * 50_000, "http://a:b" * 5_000, "%" * 100_000):
        masked(text)


# ------------------------------------------------------------------------------------------------------------ settings


def sections(cls):
    """Yield every settings class."""
    for sub in cls.__subclasses__():
        yield sub
        yield from sections(sub)


SHAPES = {
    "str |": lambda value: value,
    "tuple[str": lambda value: [value],
    "dict[str, str": lambda value: {"a": value},
    "dict[str, typing.Any": lambda value: {"a": [{"b": value}]},
}


def test_every_text_of_every_settings_class_refuses_credentials():
    assert all(verb.settings for verb in VERBS_WITH_SETTINGS.values())  # imports their modules
    classes = {cls for cls in sections(Settings) if cls.__module__.startswith("infembed_ray")}
    tried = 0
    for owner, (name, field) in ((cls, item) for cls in classes for item in cls.model_fields.items()):
        for kind, wrap in SHAPES.items():
            if kind in f"{field.annotation} |".replace("<class 'str'>", "str"):
                with pytest.raises(InputError) as error:
                    owner.from_mapping({name: wrap(f"rediss://user:{PASSWORD}@host/x")})
                assert name in str(error.value), owner
                assert PASSWORD not in repr(error.value) + str(error.value.__cause__)
                tried += 1
    assert tried > 80


@pytest.mark.parametrize(
    ("value", "belongs"),
    [
        (WITH_CREDENTIALS[0], "the variable that `api_key_env` names"),
        ("s3://AKIA:hunter2pw@bucket", "AWS_SECRET_ACCESS_KEY"),
        ("abfss://c:hunter2pw@a.dfs.core.windows.net", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_an_error_names_where_credentials_belong(value, belongs):
    with pytest.raises(InputError, match=rf"^base_url=.*must not hold credentials.*{belongs}"):
        Endpoint.from_mapping({"base_url": value})
    with pytest.raises(ValidationError) as caught:
        Endpoint(base_url=value)
    assert PASSWORD not in str(caught.value)


FAULTY = {
    "a wrong type": "in_flight={}",
    "an unknown key": "{}=1",
    "no =": "{}",
    "a key below a value": "seeds.{}=1",
    "broken YAML": "seeds=[{}",
    "a nested list": "replay=[{{base_url: '{}'}}]",
    "a key of a mapping": "columns={{'{}': [a]}}",
    "a whole section": "endpoint={}",
}


@pytest.mark.parametrize("override", FAULTY.values(), ids=FAULTY)
@pytest.mark.parametrize("value", [WITH_CREDENTIALS[0], WITH_CREDENTIALS[-1]])
def test_no_error_of_the_settings_shows_a_password(override, value, capsys):
    assert main(["synthesize", "output=o", override.format(value)]) == 2
    said = capsys.readouterr()
    assert PASSWORD not in said.out + said.err
    assert "infembed synthesize: " in said.err


def test_no_error_of_a_settings_file_shows_a_password(tmp_path, capsys):
    for text in (f"endpoint: [http://u:{PASSWORD}@h\n", f"a: 'http://u:{PASSWORD}@h\nb: c: d"):
        (tmp_path / "s.yaml").write_text(text)
        assert main(["synthesize", "--config", str(tmp_path / "s.yaml")]) == 2
    assert PASSWORD not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        [
            "manifests",
            "output={}",
            f"claim=rediss://user:{PASSWORD}@cache:6379",
            "images={{}}",
            "stages={{}}",
            "groups={{}}",
        ],
        ["runs", f"s3://key:{PASSWORD}@bucket"],
        ["doctor", f"s3://key:{PASSWORD}@bucket"],
        ["index", "versions", f"milvus+http://user:{PASSWORD}@host:1/a"],
        ["train", f"--frobnicate=http://user:{PASSWORD}@host"],
        [f"user:{PASSWORD}@host:21"],
    ],
    ids=lambda command: command[0],
)
def test_no_command_prints_or_writes_a_password(command, tmp_path, capfd):
    try:
        status = main([word.format(tmp_path / "out") for word in command])
    except SystemExit as end:  # argparse
        status = end.code
    said = "".join(capfd.readouterr())
    assert status == 2
    assert PASSWORD not in said
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------- logs, states and manifests


def test_lines_errors_states_and_provenance_are_masked(tmp_path, capsys, monkeypatch):
    url = f"http://user:{PASSWORD}@host"
    monkeypatch.setenv(provenance.IMAGE, f"https://user:{PASSWORD}@registry/image")
    monkeypatch.setattr(sys, "argv", ["infembed", "train", f"model={url}"])
    say(f"asking {url}")
    monkeypatch.setenv(telemetry.LOG_FORMAT, "json")
    say(f"asking {url}")
    assert PASSWORD not in in_one_line(OSError(f"no route to {url}"))
    assert PASSWORD not in str(InputError(f"proxy={url}: refused"))
    with pytest.raises(OSError, match="host"), recorded(tmp_path, "train", "0123"):
        raise OSError(f"no route to {url}")
    state = (tmp_path / ".0123.state.json").read_text()
    assert json.loads(state)["error"] == "OSError: no route to http://***@host"
    said = capsys.readouterr().out + state + json.dumps(provenance.collect())
    assert PASSWORD not in said
    assert "registry/image" in said


@pytest.mark.parametrize(
    ("variable", "proxy"),
    [("http_proxy", "{}@127.0.0.1:9"), ("HTTP_PROXY", "http://{}@nowhere.invalid:9"), ("https_proxy", "{}@no where")],
)
def test_no_transport_error_shows_the_password_of_a_proxy(variable, proxy, monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, proxy.format(f"user:{PASSWORD}"))
    endpoint = Endpoint(api_key_env=None, base_url=f"{variable.lower().partition('_')[0]}://endpoint.invalid/v1")

    async def post():
        transport = Transport()
        try:
            await transport.post(Route(endpoint).target, b"{}")
        finally:
            await transport.close()

    with pytest.raises(Exception) as posted:  # noqa: PT011
        asyncio.run(post())
    with pytest.raises(InputError) as asked:
        list(doctor._endpoint(endpoint.base_url))
    assert PASSWORD not in one_line(posted.value) + str(asked.value)
