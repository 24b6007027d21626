"""The least a client can do: POST, read, parse. The yardstick of synthesis_fanout.py."""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp


async def main(url: str, requests: int, in_flight: int) -> None:
    left = iter(range(requests))
    filler = "Someone wrote about it at length, and what they wrote is given here as it was found. " * 20

    async def work(session: aiohttp.ClientSession) -> None:
        for number in left:
            message = {"role": "user", "content": f"Document {number}: {filler}"}
            body = {"model": "gpt-4o-mini", "messages": [message], "temperature": 1.0}
            while True:
                async with session.post(f"{url}/chat/completions", json=body) as response:
                    answer = json.loads(await response.read())
                    if response.status == 200:
                        break
                    await asyncio.sleep(float(response.headers["Retry-After"]))
            assert answer["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(work(session) for _ in range(in_flight)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
