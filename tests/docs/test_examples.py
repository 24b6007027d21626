"""The examples of the documentation run, on the bundled sample, in one directory and on one cluster."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray.quickstart import chain
from tests.docs.pages import Block, blocks, install_commands

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RUN = [b for b in blocks() if b.language in ("bash", "python", "text") and not (b.needs or b.tested)]
PAGES = list(dict.fromkeys(block.page for block in RUN if block.language != "text"))
FIRST = {"docs/guides/report.md": ["docs/guides/evaluate.md"]}
RECORDS = "docs/guides/synthesize.md"
"""The page whose commands make what stands for the quickstart's records."""


class Session:
    """A directory as `make quickstart` leaves it, in which the blocks of each page run once.

    The checkpoint is MiniLM without training; records and results are those that the guides make.
    """

    def __init__(self, root: Path, minilm: str, ray_address: str) -> None:
        self.root = root
        self.failures: dict[str, str] = {}
        tools = root / "bin"
        install_commands(tools)
        paths = f"{tools}:{os.environ['PATH']}"
        source = str(Path(__file__).parents[2])
        self.environment = {**os.environ, "PATH": paths, "PYTHONPATH": source, "RAY_ADDRESS": ray_address}
        self.environment["HF_HUB_OFFLINE"] = "1"
        quickstart = root / "runs" / "quickstart"
        quickstart.mkdir(parents=True)
        shutil.copytree(minilm, quickstart / "checkpoint")
        (quickstart / "records").symlink_to(root / "runs" / "sample-records")
        (quickstart / "results").symlink_to(root / "runs" / "evaluation")

    def run(self, page: str) -> None:
        """Run the blocks of a page in their order, once; pages that it builds on run before."""
        if page in self.failures:
            pytest.fail(self.failures[page]) if self.failures[page] else None
            return
        for before in [] if page == RECORDS else [RECORDS, *FIRST.get(page, [])]:
            self.run(before)
        self.failures[page] = "was interrupted"
        output = ""
        for block in RUN:
            if block.page != page:
                continue
            if block.language == "text":
                if block.follows and block.code.strip() != output.strip():
                    self.failures[page] = f"{block} shows\n{block.code}\nand the block before it prints\n{output}"
                    pytest.fail(self.failures[page])
                continue
            output = self._run(block)
        self.failures[page] = ""
        if page == RECORDS:
            published = next((self.root / "runs" / "sample-records").glob("*/manifest.json")).parent
            made = type("Made", (), {"path": published})
            chain._write_corpus(self.root / "runs" / "quickstart" / chain.CORPUS, made)  # type: ignore[arg-type]

    def _run(self, block: Block) -> str:
        command = ["bash", "-euo", "pipefail"] if block.language == "bash" else [sys.executable, "-"]
        done = subprocess.run(
            command,
            input=block.code,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            self.failures[block.page] = f"{block} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            pytest.fail(self.failures[block.page])
        return done.stdout


@pytest.fixture(scope="module")
def session(ray_cluster: None, minilm: str, tmp_path_factory: pytest.TempPathFactory) -> Session:
    import ray

    return Session(tmp_path_factory.mktemp("docs"), minilm, ray.get_runtime_context().gcs_address)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page: str, session: Session) -> None:
    session.run(page)
