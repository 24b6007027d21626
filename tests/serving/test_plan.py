import json
import re
import shutil
import socket
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import faiss
import pytest
import yaml
from ray._common.utils import import_attr
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval.index import Index
from infembed_ray.serving.distributed import run
from infembed_ray.serving.plan import Plan, _fingerprint, model_name
from infembed_ray.serving.release import ReleaseSpec
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.steps import MANIFEST
from tests.serving.indexes import AGAIN, publish_index
from tests.support.ports import free_port

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def news(root: Path, minilm: str) -> str:
    return str(publish_index(root / "news", minilm, AGAIN, shards=1))


@pytest.fixture(scope="module")
def foreign(root: Path, minilm: str) -> tuple[str, str]:
    """Another encoder, and an index that it built."""
    encoder = InstructionEncoder.from_pretrained(minilm)
    next(encoder.backbone.parameters()).data.mul_(1.01)
    encoder.save_pretrained(root / "foreign")
    return str(root / "foreign"), str(publish_index(root / "law", str(root / "foreign"), AGAIN, shards=1))


@pytest.fixture(scope="module")
def config(settings: ServeSettings, root: Path) -> dict[str, Any]:
    file = root / "serve.yaml"
    run(settings.model_copy(update={"config_file": str(file)}))
    written: dict[str, Any] = yaml.safe_load(file.read_text())
    return written


def test_the_config_file_is_valid_for_serve_deploy_and_builds_the_api_over_the_release(
    config: dict[str, Any], settings: ServeSettings, index: str
) -> None:
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert (application.name, application.route_prefix) == ("infembed", "/")
    builder = import_attr(application.import_path)
    built = build_app(call_user_app_builder_with_args_if_necessary(builder, application.args), name="infembed")
    assert {deployment.name for deployment in built.deployments} == {"ingress", "supervisor"}
    (ingress,) = application.deployments
    release = ReleaseSpec.model_validate(ingress.user_config)
    assert release.fingerprint == Plan.resolve(settings).release.fingerprint
    for name, arguments in release.parts.items():
        part = build_app(resolve_name(arguments.builder)(arguments), name=name)
        if "-index-" in name:
            assert {each.name for each in part.deployments} == {facts.name for facts in Index.open(index).facts.shards}


def test_the_settings_of_a_release_name_it_again_on_any_node(
    settings: ServeSettings, index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(index).parent.parent)
    relative = settings.model_copy(update={"index": Path(index).parent.name})
    release = Plan.resolve(relative).release
    monkeypatch.chdir(tmp_path)
    assert release.settings.index == str(Path(index).parent)
    again = Plan.resolve(ReleaseSpec.model_validate(release.model_dump(mode="json")).settings).release
    assert again.collections["index"].index == release.collections["index"].index
    assert again.settings == release.settings


def test_bad_input_is_rejected_before_anything_starts(
    index: str, foreign: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejects(message: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=message) as refusal:
            run(ServeSettings.from_mapping({"index": index, "port": free_port(), **changes}))
        assert "\n" not in str(refusal.value)

    rejects("index=nowhere: no such file or directory", index="nowhere")
    rejects(r"model=./nowhere: no such model directory", model="./nowhere")
    rejects(r"ranking.hybrid=0.2: index=.*no lexical index; build it again .*lexical=true", ranking={"hybrid": 0.2})
    rejects(rf"built by another encoder \({Index.open(index).facts.encoder}", model=foreign[0])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        rejects(f"port={port}: cannot be bound .* set another port", port=port)
    rejects("wait=false: there is no cluster to leave it on", wait=False)
    monkeypatch.delenv("INFEMBED_API_KEYS", raising=False)
    rejects(r"host=0\.0\.0\.0: open to other machines without API keys", host="0.0.0.0")
    monkeypatch.setenv("INFEMBED_API_KEYS", "key1,,key2")
    rejects("holds an empty key")


def test_a_copy_of_the_encoder_is_the_same_release(settings: ServeSettings, tmp_path: Path, minilm: str) -> None:
    shutil.copytree(minilm, tmp_path / Path(minilm).name)
    here = Plan.resolve(settings).release
    for model in (minilm, str(tmp_path / Path(minilm).name)):
        there = Plan.resolve(settings.model_copy(update={"model": model})).release
        assert there.encoders.keys() == here.encoders.keys()
        assert there.fingerprint == here.fingerprint


@pytest.mark.parametrize(
    ("given", "digest", "name"),
    [
        ("s3://bucket/runs/cardiology", "0f3c", "cardiology"),
        ("s3://bucket/runs/cardiology/0f3c", "0f3c", "cardiology"),
        ("models/copy", "0f3c", "copy"),
    ],
)
def test_a_model_keeps_its_name_where_it_is_copied_or_downloaded(
    tmp_path: Path, given: str, digest: str, name: str
) -> None:
    here = tmp_path / Path(given).name
    here.mkdir()
    (here / MANIFEST).write_text(json.dumps({"identity": digest}))
    assert model_name(given, str(here)) == name


def test_an_index_in_an_object_store_is_described_by_its_manifest_alone(
    index: str, minilm: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    store = Folder.open(f"{bucket}/planned", "index")
    store.upload(Path(index) / MANIFEST, f"{Path(index).name}/{MANIFEST}")
    store.write("latest", Path(index).name)
    plan = Plan.resolve(ServeSettings(index=store.uri, model=minilm))
    version = store / Path(index).name
    assert plan.release.default.index.index == version.uri
    assert plan.release.default.changes == (store / "changes" / Path(index).name).uri
    assert [path.name for path in tmp_path.iterdir()] == ["fingerprints"]


# ------------------------------------------------------------------------------------------------------ collections


def with_collections(settings: ServeSettings, **places: str) -> ServeSettings:
    return ServeSettings.model_validate({**settings.model_dump(), "collections": places})


def test_every_encoder_is_started_once_and_reserves_resources(
    settings: ServeSettings, news: str, foreign: tuple[str, str], minilm: str
) -> None:
    model, law = foreign
    plan = Plan.resolve(with_collections(settings, news=news, law=law))
    assert [arguments.model for arguments in plan.release.encoders.values()] == [minilm, model]
    cards = {name: spec.card for name, spec in plan.release.by_name.items()}
    name = Path(minilm).name
    assert {name: card.id for name, card in cards.items()} == {"index": name, "news": name, "law": "foreign"}
    assert cards["law"].encoder != cards["news"].encoder == cards["index"].encoder
    reserved: Counter[str] = Counter()
    for each in plan.release.reservations:
        reserved[each.setting] += each.replicas
    assert (reserved["cpus_per_encoder"], reserved["cpus_per_shard"]) == (2, 4)
    assert "collection law: " in plan.startup_message()


def test_a_collection_of_another_encoder_is_refused_where_one_model_is_asked_for(
    settings: ServeSettings, foreign: tuple[str, str], minilm: str, tmp_path: Path
) -> None:
    law = foreign[1]
    facts = Index.describe(law).facts
    known = Index.describe(settings.index).facts.encoder
    with pytest.raises(InputError, match=f"^collections.law={law}: built by another encoder ") as refusal:
        Plan.resolve(with_collections(settings.model_copy(update={"model": minilm}), law=law))
    assert {facts.encoder, known} <= set(re.findall(r"[0-9a-f]{16}", str(refusal.value)))
    assert "build it again with this encoder" in str(refusal.value)
    copy = shutil.copytree(foreign[0], tmp_path / Path(minilm).name)
    same_name = publish_index(tmp_path / "law", str(copy), AGAIN, shards=1)
    with pytest.raises(InputError, match=r"^collections.law=.* has the same name in the API"):
        Plan.resolve(with_collections(settings, law=str(same_name)))
    shutil.rmtree(copy)
    (Path(copy) / ".0.partial" / "states").mkdir(parents=True)
    with pytest.raises(InputError, match=r"^collections.law: model=.*: an unfinished training"):
        Plan.resolve(with_collections(settings, law=str(same_name)))


def test_two_collections_of_one_index_and_missing_indexes_are_refused(
    settings: ServeSettings, news: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"^collections.copy={news}: is the index of the collection 'news' too"):
        Plan.resolve(with_collections(settings, news=news, copy=str(Path(news).parent)))
    (tmp_path / "link").symlink_to(Path(settings.index).parent)
    with pytest.raises(InputError, match=r"^collections.again=.*: is the index of the collection 'index' too"):
        Plan.resolve(with_collections(settings, again=str(tmp_path / "link")))
    with pytest.raises(InputError, match=r"^collections.law=nowhere: no such file or directory"):
        Plan.resolve(with_collections(settings, law="nowhere"))


def test_a_fingerprint_is_kept_under_the_bytes_of_the_models_files(
    minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    model = shutil.copytree(minilm, tmp_path / "model")
    first = _fingerprint(str(model), None)
    assert first == InstructionEncoder.from_pretrained(minilm).fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(InstructionEncoder, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded"))
        assert _fingerprint(str(model), None) == first
    assert _fingerprint(str(model), 8) != first
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 33}')
    assert _fingerprint(str(model), None) != first


def test_shards_on_gpus_need_faiss_gpu(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with pytest.raises(InputError, match="gpus_per_shard: this FAISS runs on CPUs only; pip uninstall -y faiss-cpu"):
        Plan.resolve(ServeSettings.from_mapping({"index": index, "gpus_per_shard": 1}))
