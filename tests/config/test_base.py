import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.base import with_texts
from infembed_ray.config.evaluation import EvaluateSettings
from infembed_ray.config.llm import ChatModel
from infembed_ray.config.serving import ServeSettings
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.redaction import MASK

TRAIN = ["records=r.jsonl", "model=m", "output=o"]


def test_overrides_win_over_the_file_and_nested_keys_merge(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("seeds: a\noutput: b\ngenerator: {model: x, temperature: 0.5}\n")
    settings = SynthesizeSettings.load(str(file), ["generator.model=y", "limit=3"])
    assert (settings.generator.model, settings.generator.temperature, settings.limit) == ("y", 0.5, 3)


def test_a_nested_key_keeps_the_other_defaults():
    settings = SynthesizeSettings.load(None, ["seeds=a", "output=b", "generator.max_tokens=9", "judge={max_tokens: 8}"])
    assert (settings.generator.model, settings.judge.model) == ("gpt-4o-mini", "o4-mini")
    assert (settings.generator.max_tokens, settings.judge.max_tokens) == (9, 8)
    another = SynthesizeSettings.load(None, ["seeds=a", "output=b", "generator.model=x"])
    assert another.generator == ChatModel(model="x")


def test_dictionaries_are_set_key_by_key():
    settings = EvaluateSettings.load(None, ["records=r", "output=o", "models.base=a", "models.trained=b"])
    assert settings.models == {"base": "a", "trained": "b"}


@pytest.mark.parametrize(
    ("settings", "override", "message"),
    [
        (TrainSettings, "epoch=3", "epoch: unknown key; did you mean epochs?"),
        (TrainSettings, "epochs=two", "epochs=two: Input should be a valid integer"),
        (TrainSettings, "seed=true", "seed=True: Input should be a number"),
        (TrainSettings, "epochs=2.0", "epochs=2.0: Input should be a whole number"),
        (TrainSettings, "zero_stage=7", "zero_stage=7: Input should be"),
        (TrainSettings, "temperature=0", "temperature=0: Input should be greater than 0"),
        (TrainSettings, "mixture.a=.inf", "mixture.a=inf: Input should be a finite number"),
        (TrainSettings, "epochs", "override epochs: write it as key=value"),
        (TrainSettings, "model.path=x", "override model.path=x: model is a single value"),
        (SynthesizeSettings, "generator.temprature=1", "generator.temprature: unknown key; did you mean temperature?"),
        (ServeSettings, "port=99999", "port=99999: Input should be less than or equal to 65535"),
    ],
)
def test_an_invalid_setting_is_rejected_with_field_value_and_remedy(settings, override, message):
    with pytest.raises(InputError) as caught:
        settings.load(None, [*TRAIN, override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("secret", ["sk-proj-1", "gsk_9aZ", "0f3c", "", "a b"])
@pytest.mark.parametrize(
    ("settings", "name"), [(SynthesizeSettings, "endpoint.api_key_env"), (ServeSettings, "api_keys_env")]
)
def test_a_secret_in_place_of_the_name_of_its_variable_is_refused_and_masked(settings, name, secret):
    with pytest.raises(InputError) as caught:
        settings.load(None, ["seeds=s", "output=o", "index=i", f"{name}={secret}"])
    fault = next(fault for fault in caught.value.faults if fault.setting == name)
    assert fault.value == MASK
    assert not secret or secret not in str(caught.value)


def test_a_missing_setting_is_named():
    with pytest.raises(InputError, match=r"model: is missing; set model=\.\.\."):
        TrainSettings.load(None, ["records=r", "output=o"])


def test_a_missing_or_invalid_config_file_is_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        TrainSettings.load(str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(InputError, match="holds a list"):
        TrainSettings.load(str(tmp_path / "list.yaml"))
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(InputError, match="not valid YAML"):
        TrainSettings.load(str(tmp_path / "broken.yaml"))


def test_settings_are_frozen():
    settings = TrainSettings.load(None, TRAIN)
    with pytest.raises(ValueError, match="frozen"):
        settings.epochs = 3


@given(st.sampled_from(["output", "gpus_per_worker", "checkpoint_every", "records", "model"]))
def test_runtime_fields_are_not_part_of_the_identity(name):
    assert name not in TrainSettings.load(None, TRAIN).identity()


def test_fields_that_decide_the_result_are_part_of_the_identity():
    one, other = (TrainSettings.load(None, [*TRAIN, f"seed={s}"]).identity() for s in (1, 2))
    assert one != other
    assert "base_url" not in str(SynthesizeSettings.load(None, ["seeds=s", "output=o"]).identity())


def test_settings_in_a_mapping_are_part_of_the_identity() -> None:
    steps = {"judge_positive": {"model": "m"}}
    made = SynthesizeSettings.from_mapping({"seeds": "", "output": "", "steps": steps})
    assert made.identity()["steps"] == {"judge_positive": ChatModel(model="m").identity()}


BM25 = {"kind": "bm25", "instructed_query": "{query}", "plain_query": "{query}"}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"model": "m", "kindd": "bm25"}, r"models\.x\.kindd: unknown key; did you mean kind\?"),
        ({**BM25, "bm25": {"k": 1}}, r"models\.x\.bm25\.k: unknown key; did you mean k1\?"),
        ({"kind": "bm"}, r"models\.x\.kind=bm: Input should be 'encoder'"),
        (3, r"models\.x=3: Input should be a valid string"),
    ],
)
def test_errors_of_a_union_follow_the_form_of_the_value(model, said):
    with pytest.raises(InputError, match=f"^{said}"):
        EvaluateSettings.from_mapping({"records": "r", "output": "o", "models": {"x": model}})


def test_overrides_give_a_model_as_a_name_or_a_mapping():
    by_name = EvaluateSettings.load(None, ["records=r", "output=o", "models.x=bm25"])
    by_mapping = EvaluateSettings.load(None, ["records=r", "output=o", "models.x.baseline=bm25", "models.x.bm25.b=0.4"])
    assert by_name.models == {"x": "bm25"}
    assert by_mapping.models["x"].model_dump(exclude_unset=True) == {"baseline": "bm25", "bm25": {"b": 0.4}}
    assert by_mapping.model_dump(mode="json")["models"]["x"]["bm25"]["b"] == 0.4


def test_collections_are_named_and_the_default_one_comes_first():
    served = ServeSettings.load(None, ["index=runs/a", "collections.news=runs/news", "collections.law_2-x=runs/law"])
    assert list(served.indexes.items()) == [("index", "runs/a"), ("news", "runs/news"), ("law_2-x", "runs/law")]
    assert served.identity() == ServeSettings(index="").identity()
    assert ServeSettings(index="runs/a").indexes == {"index": "runs/a"}


@pytest.mark.parametrize("name", ["", "News", "a b", "a/b", "..", "ü", "a" * 65, "index", "a\n"])
def test_other_names_of_collections_are_refused(name):
    with pytest.raises(InputError, match=r"^collections: .* (give 1 to 64 lower-case|choose another name)"):
        ServeSettings.from_mapping({"index": "a", "collections": {name: "runs/b"}})


def test_texts_with_a_kind_are_found_at_every_depth():
    seen = {}
    settings = EvaluateSettings.from_mapping(
        {"records": "r", "output": "o", "models": {"a": "m", "b": {"kind": "encoder", "model": "n"}}}
    )
    changed = with_texts(settings, lambda name, kind, text: seen.setdefault(name, (kind.is_path, kind.stages)) and "x")
    assert seen == {
        "records": (True, ("analyze", "synthesize")),
        "models.a": (False, ("train",)),
        "models.b.model": (False, ("train",)),
    }
    assert (changed.records, changed.models["a"], changed.models["b"].model, changed.output) == ("x", "x", "x", "o")
