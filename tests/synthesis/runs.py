"""Seeds, settings and results of whole runs."""

from pathlib import Path
from typing import Any

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.records import tables
from infembed_ray.storage.steps import Published
from tests.support.stand_in_llm import StandIn
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
FILES = (tables.KEPT_FILE, tables.REJECTED_FILE, tables.DEAD_LETTER_FILE)
PLANTS = ("maple", "willow", "juniper", "bramble", "thistle", "clover", "heather", "mistletoe")
USES = ("honey", "timber", "baskets", "medicine", "fodder", "hedges", "charcoal", "shelter")
ROWS = [
    {
        "id": f"{plant}-{use}",
        "query": f"{plant} used for {use}",
        "passage": f"People have turned to {plant} for {use} since villages were founded near rivers, although those "
        f"who gather it nowadays mostly sell {use} from {plant} to neighbours.",
    }
    for plant in PLANTS
    for use in USES
]


def settings(seeds: Path, output: Path | str, server: StandIn | None = None, **values: Any) -> SynthesizeSettings:
    endpoint = {"base_url": server.url, "api_key_env": None, "timeout_s": 5} if server else {}
    given = {"seeds": str(seeds), "output": str(output), "in_flight": 16, "actors": 2, **values}
    return SynthesizeSettings.from_mapping({**given, "endpoint": {**endpoint, **values.get("endpoint", {})}})


def rows_of(published: Published) -> list[list[dict[str, Any]]]:
    return [tables.read_raw(published.path / file) for file in FILES]


def answered_most(server: StandIn) -> int:
    """Return the largest number of usable answers to one request."""
    return max(server.usable_answers().values())


class Held:
    """Holds the endpoint after some answers, so that a kill finds all other requests unanswered."""

    def __init__(self, server: StandIn, journal: Path, answers: int) -> None:
        self._server, self._journal, self._answers = server, journal, answers

    def __enter__(self) -> list[int]:
        wait_until(lambda: len(self._server.log("answered")) >= self._answers)
        self._server.hold()
        wait_until(lambda: self._journaled() == len(self._server.log("answered")))
        return [int(segment.stem.split("-")[-3]) for segment in self._journal.glob("*.jsonl")]

    def __exit__(self, *_: object) -> None:
        self._server.release()

    def _journaled(self) -> int:
        return sum(segment.read_bytes().count(b"\n") for segment in self._journal.glob("*.jsonl"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
