"""An endpoint whose models answer the items of a sheet with known error rates."""

import asyncio
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Row = Mapping[str, Any]


def expected_kappa(answers: Sequence[str], error: float, choices: Sequence[str]) -> float:
    """Cohen's kappa, in expectation, of a rater who gives each answer but errs at a rate, evenly to all other choices."""
    share = {choice: answers.count(choice) / len(answers) for choice in choices}
    theirs = {c: (1 - error) * s + error * (1 - s) / (len(choices) - 1) for c, s in share.items()}
    by_chance = sum(share[choice] * theirs[choice] for choice in choices)
    return (1 - error - by_chance) / (1 - by_chance)


@contextmanager
def stub(
    rows: Sequence[Row], truth: Mapping[str, str], errors: Mapping[str, float], pause_s: float = 0.0
) -> Iterator[tuple[str, list[str]]]:
    """Serve models named in `errors`; yield the URL and the list of the models of answered requests, without probes.

    Args:
        rows: of the sheet.
        truth: item_id -> right answer, "0" for none.
        errors: model -> share of its answers that are wrong. `broken` answers nothing usable, whatever its rate.
        pause_s: time that an answer takes.
    """
    asked: list[str] = []

    def answer(model: str, prompt: str) -> str:
        (row,) = (r for r in rows if f"Query: {r['query']}\n\nInstruction: {r['instruction']}\n" in prompt)
        right, choices = truth[row["item_id"]], ["0", *row["passages"]]
        rng = random.Random(f"{model}/{row['item_id']}")
        picked = rng.choice([c for c in choices if c != right]) if rng.random() < errors[model] else right
        return "I cannot say." if model == "broken" else f"Answer: {'none' if picked == '0' else picked}"

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["messages"][0]["content"]
        if prompt.startswith("This is a test."):
            text = "Answer: none"
        else:
            await asyncio.sleep(pause_s)
            asked.append(body["model"])
            text = answer(body["model"], prompt)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return web.json_response({"model": body["model"], "choices": [choice], "usage": usage})

    loop = asyncio.new_event_loop()

    async def start() -> tuple[web.AppRunner, int]:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    runner, port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/v1", asked
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
