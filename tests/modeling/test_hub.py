"""Uploads to the hub: a finished training is uploaded by the same command, to a stand-in of the hub, by the real client."""

import os
import subprocess
import sys

import pytest
from huggingface_hub.utils import filter_repo_objects

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.hub import _MODEL
from tests.support import hub
from tests.training.test_launch import in_one_process, settings  # noqa: F401  (fixtures)

TOKEN = "hf_of_the_test"
AGAIN = "import sys; from infembed_ray.cli.main import main; sys.exit(main(sys.argv[1:]))"


def train_again(finished, server, token=TOKEN, pipeline=None):
    """Run a finished training with `push_to_hub` in a process whose hub is the stand-in; alone, or in a pipeline's output."""
    given = finished.model_dump(mode="json", exclude_unset=True) | {"push_to_hub": "org/made"}
    given["deepspeed"] = "{zero_optimization: {reduce_bucket_size: 100000}}"
    words = ["train"] if pipeline is None else ["pipeline", f"output={pipeline}"]
    words += [f"{'train.' if pipeline else ''}{name}={value}" for name, value in given.items()]
    environment = os.environ | {"HF_ENDPOINT": server.url, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", AGAIN, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_files_of_separate_encoders_are_uploaded(backbone_path, tmp_path):
    InstructionEncoder.from_pretrained(backbone_path("qwen2"), share_encoder=False).save_pretrained(tmp_path)
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert "query_0_Transformer/tokenizer.json" in files
    assert set(filter_repo_objects(files, allow_patterns=list(_MODEL))) == files


@pytest.mark.integration
def test_a_finished_training_is_uploaded_and_loads_as_the_model(settings, in_one_process, tmp_path):  # noqa: F811
    earlier = [tmp_path / "org" / "made" / name for name in ("model-00001-of-00002.safetensors", "notes.md")]
    earlier[0].parent.mkdir(parents=True)
    for file in earlier:
        file.write_text("of an earlier model")
    with hub.serving(tmp_path) as server:
        server.token = TOKEN
        refused = train_again(settings, server, token="hf_other")
        assert refused.returncode == 2
        assert "push_to_hub=org/made: " in refused.stderr
        assert "HF_TOKEN" in refused.stderr
        done = train_again(settings, server)
    assert done.returncode == 0, done.stderr
    assert f"uploaded the model to org/made ({hub.COMMIT})" in done.stdout
    (created,) = server.created
    assert (created["organization"], created["name"], created["visibility"]) == ("org", "made", "private")
    (files,) = server.commits
    assert {"README.md", "model.safetensors", "modules.json", "infembed.json", "1_Pooling/config.json"} <= set(files)
    for kept in ("manifest.json", "metrics.jsonl", "report.html", "deepspeed.json", "events.jsonl"):
        assert kept not in files
    assert [file.exists() for file in earlier] == [False, True]
    texts = ["how is aspirin dosed", "bread"]
    ours = InstructionEncoder.from_pretrained(in_one_process.path).encode_queries(texts, "For nurses .")
    uploaded = InstructionEncoder.from_pretrained(tmp_path / "org" / "made").encode_queries(texts, "For nurses .")
    assert (ours == uploaded).all()


@pytest.mark.integration
def test_a_pipeline_uploads_its_model_when_every_gate_is_passed(settings, in_one_process, tmp_path):  # noqa: F811
    with hub.serving(tmp_path) as server:
        server.token = TOKEN
        done = train_again(settings, server, pipeline=tmp_path / "pipeline")
    assert done.returncode == 0, done.stderr
    assert len(server.commits) == 1
    assert done.stdout.index("train: nothing to do") < done.stdout.index("every gate is passed; release")
    assert done.stdout.index("every gate is passed; release") < done.stdout.index("uploaded the model to org/made")
