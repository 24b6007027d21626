import json
import os
import subprocess
import sys

import pytest

from infembed_ray import __version__
from infembed_ray.config.training import TrainSettings
from infembed_ray.storage import provenance
from infembed_ray.storage.steps import Step


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout with a package of one module, in place of this one."""
    package = tmp_path / "infembed_ray"
    package.mkdir()
    (package / "module.py").write_text("one = 1\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "_PACKAGE", package)
    provenance.code.cache_clear()
    yield package
    provenance.code.cache_clear()


def code():
    provenance.code.cache_clear()
    return provenance.code()


def test_code_is_a_commit_with_a_mark_of_uncommitted_changes(checkout):
    clean = code()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    assert (clean["version"], clean["commit"]) == (__version__, head)
    (checkout.parent / "README").write_text("not code")
    assert code() == clean
    (checkout / "module.py").write_text("one = 2\n")
    changed = code()
    assert changed["commit"] == f"{head}+"
    assert changed["hash"] != clean["hash"]
    (checkout / "module.py").write_text("one = 1\n")
    assert code() == clean


def test_code_without_a_checkout_has_the_hash_of_its_files_alone(checkout):
    with_git = code()
    (checkout.parent / ".git").rename(checkout.parent / "elsewhere")
    assert code() == with_git | {"commit": None}
    (checkout / "new.py").write_text("")
    assert code()["hash"] != with_git["hash"]


def test_a_checkout_that_git_cannot_read_has_no_commit(checkout):
    (checkout.parent / ".git" / "HEAD").unlink()
    assert code()["commit"] is None


def test_a_run_with_nothing_to_do_says_that_other_code_made_the_output(checkout, tmp_path):
    def step():
        return Step("train", TrainSettings(records="r", model="m", output="o"), str(tmp_path / "out"), {})

    with step().publish():
        pass
    assert "other code" not in step().finished().summary
    head = code()["commit"]
    (checkout / "module.py").write_text("one = 2\n")
    code()
    summary = step().finished().summary.splitlines()
    version = f"version {__version__} {head}"
    assert f"warning: other code made it: {version}; this is {version}+" in summary


def test_submitter_and_image_come_from_the_environment_and_nothing_else_does(monkeypatch):
    monkeypatch.setenv("INFEMBED_SUBMITTER", "ada")
    monkeypatch.setenv("INFEMBED_IMAGE", "registry/infembed@sha256:0f")
    monkeypatch.setenv("OPENAI_API_KEY", "a secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    recorded = provenance.collect()
    assert (recorded["submitter"], recorded["image"]) == ("ada", "registry/infembed@sha256:0f")
    assert "a secret" not in json.dumps(recorded)
    monkeypatch.delenv("INFEMBED_SUBMITTER")
    assert provenance.collect()["submitter"]


def test_a_stage_without_ray_does_not_load_it():
    script = "import sys; from infembed_ray.storage import provenance; recorded = provenance.collect(); assert 'ray' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", f"{script}; assert recorded['job'] is None and not recorded['cluster']"], check=True
    )


def test_a_cluster_gives_job_and_resources(ray_cluster, monkeypatch):
    config = {"runtime_env": {"env_vars": {"KEY": "a secret"}}, "metadata": {"job_submission_id": "raysubmit_1"}}
    monkeypatch.setitem(os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(config))
    recorded = provenance.collect()
    assert recorded["job"]["submission_id"] == "raysubmit_1"
    assert recorded["cluster"]["CPU"] == 4.0
    assert not any("node:" in name for name in recorded["cluster"])
    assert "a secret" not in json.dumps(recorded)
