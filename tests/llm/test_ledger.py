"""Leases and ledger in simulated time, checked against a server that counts for itself. Messages take time; processes die."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.config.llm import Limits
from infembed_ray.llm import ledger as limits
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.ledger import REQUESTS, TOKENS, USD, Grant, LeaseReport, Ledger, RateLimiter
from infembed_ray.llm.prices import PriceTable
from tests.support.chat import request


class World:
    """Simulated time: a queue of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = count()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._ties), happen))

    def run(self, until: float = math.inf) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()


class Server:
    """What arrives at the server."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.arrivals: list[tuple[float, float]] = []  # (time, tokens)
        self.spent = 0.0
        self.in_flight = 0
        self.most_in_flight = 0

    def most_within(self, window_s: float, of: Callable[[tuple[float, float]], float]) -> float:
        """Return the largest amount in any window."""
        most = within = 0.0
        first = 0
        arrivals = sorted(self.arrivals)
        for arrival in arrivals:
            within += of(arrival)
            while arrivals[first][0] <= arrival[0] - window_s:
                within -= of(arrivals[first])
                first += 1
            most = max(most, within)
        return most


async def exchange(_: LeaseReport) -> Grant:
    raise AssertionError("simulated processes exchange their reports themselves")


class Process:
    """One actor: sends what its lease permits, to a server that answers or fails."""

    def __init__(
        self, world: World, ledger: Ledger, server: Server, bounds: Limits, rng: random.Random, calls: int, slots: int, latency_s: float, faults: float,
    ) -> None:  # fmt: skip
        self.world, self.ledger, self.server, self.rng = world, ledger, server, rng
        self.lease = RateLimiter(bounds, slots, exchange, clock=lambda: world.now)
        self.window_s, self.latency_s, self.faults = bounds.window_s, latency_s, faults
        self.dead = False
        self.done = self.refused = 0
        self.calls = calls
        for _ in range(calls):
            cost = {REQUESTS: 1.0, TOKENS: rng.randint(10, 60), USD: rng.uniform(0.1, 1.0)}
            self.lease.start(cost, lambda ok, cost=cost: self.send(cost) if ok else self.refuse())
        world.after(0, self.renew)

    def refuse(self) -> None:
        self.refused += 1

    def send(self, cost: dict[str, float]) -> None:
        if self.dead:
            return
        used = {**cost, TOKENS: self.rng.randint(1, int(cost[TOKENS])), USD: cost[USD] * self.rng.random()}
        started = self.world.now
        reaches = self.rng.uniform(0, limits.ARRIVAL * self.window_s)
        fault = self.rng.random() < self.faults

        def arrive() -> None:
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.in_flight, self.server.most_in_flight)
            self.server.arrivals.append((self.world.now, used[TOKENS]))
            self.server.spent += used[USD]
            self.world.after(self.rng.expovariate(1 / self.latency_s), answer)

        def answer() -> None:
            self.server.in_flight -= 1
            if self.dead:
                return
            self.lease.settle(cost, cost if fault else used, started)  # without an answer it counts at its worst case
            self.done += 1

        self.world.after(reaches, arrive)

    def renew(self) -> None:
        if self.dead:
            return
        report = self.lease.end_period()
        there, back = self.rng.uniform(0, 0.01), self.rng.uniform(0, 0.01)
        self.world.after(there, lambda: self.world.after(back, self.accept(self.ledger.exchange(report))))

    def accept(self, grant: Grant) -> Callable[[], None]:
        def accept() -> None:
            if self.dead:
                return
            self.lease.accept(grant)
            if self.done + self.refused < self.calls:
                self.world.after(0.0 if not self.lease.short else self.window_s / 200, self.renew_soon)
            else:
                self.ledger.exchange(self.lease.end_period())

        return accept

    def renew_soon(self) -> None:
        self.world.after(self.window_s / 200, self.renew)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    actors=st.integers(1, 6),
    rpm=st.none() | st.integers(20, 400),
    tpm=st.none() | st.integers(800, 20_000),
    budget=st.none() | st.floats(1, 60),
    in_flight=st.none() | st.integers(1, 40),
    deaths=st.integers(0, 2),
    faults=st.sampled_from([0.0, 0.2]),
)
def test_the_server_never_counts_more_than_the_limits(
    seed: int, actors: int, rpm: int | None, tpm: int | None, budget: float | None, in_flight: int | None, deaths: int,
    faults: float,
) -> None:  # fmt: skip
    bounds = Limits(requests_per_minute=rpm, tokens_per_minute=tpm, budget_usd=budget, window_s=12)
    rng = random.Random(seed)
    world = World()
    slots = in_flight or 16
    ledger, server = Ledger(bounds, 0.0, lambda: world.now), Server(world)
    processes = [
        Process(world, ledger, server, bounds, rng, 40, slots, rng.choice([0.02, 0.5, 3]), faults)
        for _ in range(actors)
    ]
    for victim in rng.sample(processes, min(deaths, actors - 1)):
        world.after(rng.uniform(0, 20), lambda victim=victim: setattr(victim, "dead", True))
    world.run(until=4000)

    windows = bounds.window_s / 60
    if rpm is not None:
        assert server.most_within(bounds.window_s, lambda arrival: 1) <= rpm * windows
    if tpm is not None:
        assert server.most_within(bounds.window_s, lambda arrival: arrival[1]) <= tpm * windows + 1e-6
    if budget is not None:
        assert server.spent <= budget
    if not deaths:
        assert server.most_in_flight <= actors * slots
    for process in processes:
        assert process.dead or process.done + process.refused == process.calls
        assert budget is not None or process.refused == 0
    if not deaths:
        assert ledger.stats().in_flight == 0


@pytest.mark.integration
@pytest.mark.parametrize(("rpm", "tpm"), [(6000, None), (None, 100_000)])
@pytest.mark.parametrize("actors", [1, 8])
def test_under_demand_nearly_all_of_a_window_is_used(rpm: int | None, tpm: int | None, actors: int) -> None:
    bounds = Limits(requests_per_minute=rpm, tokens_per_minute=tpm)
    world = World()
    ledger, server = Ledger(bounds, 0.0, lambda: world.now), Server(world)
    for number in range(actors):
        Process(
            world, ledger, server, bounds, random.Random(number), 25_000 // actors, 512 // actors, 1.0, 0.0,
        )  # fmt: skip
    world.run(until=180)
    steady = [arrival for arrival in server.arrivals if 60 <= arrival[0] < 180]
    used = sum(1 if rpm else tokens for _, tokens in steady) / 2
    assert used >= 0.95 * (rpm or tpm or 0)


def report(holder: str = "a", **values: object) -> LeaseReport:
    nothing: dict[str, float] = {USD: 0.0}
    return LeaseReport(
        **{"holder": holder, "held": nothing, "wanted": nothing, "first": nothing, "ahead": nothing} | values
    )  # type: ignore[arg-type]


def test_the_budget_of_an_expired_lease_counts_as_spent() -> None:
    now = 0.0
    ledger = Ledger(Limits(budget_usd=10), 0.0, lambda: now)
    values = {"wanted": {USD: 4.0}, "first": {USD: 1.0}, "in_flight": 1}
    assert ledger.exchange(report("dies", **values)).amounts == {USD: 4.0}
    assert ledger.exchange(report("lives", **values)).amounts == {USD: 4.0}
    assert ledger.stats().in_flight == 2
    now = limits.LEASE_S / 2
    ledger.exchange(report("lives", held={USD: 4.0}, in_flight=1))
    now = limits.LEASE_S + 1
    assert ledger.exchange(report("lives", held={USD: 4.0}, in_flight=1)).amounts == {USD: 0.0}
    assert ledger.stats().in_flight == 1
    assert ledger.stats().spent_usd == 4


def test_committed_usd_is_spent_usd_plus_what_leases_hold() -> None:
    ledger = Ledger(Limits(budget_usd=10), 1.0)
    ledger.exchange(report(held={USD: 3.0}, used=((0.0, {USD: 0.5}),)))
    assert ledger.committed_usd == 4.5
    assert ledger.stats().spent_usd == 1.5


def test_a_used_up_budget_stops_all_leases_with_a_reason() -> None:
    ledger = Ledger(Limits(budget_usd=1), 0.9)
    grant = ledger.exchange(report(wanted={USD: 0.2}, first={USD: 0.2}))
    assert grant.failure == "limits.budget_usd=1: used up (0.9000 USD spent); raise it"
    assert ledger.exchange(report("b")).failure == grant.failure


@given(st.text(max_size=200), st.integers(1, 5000))
def test_the_worst_case_is_at_least_the_prompts_bytes(text: str, most: int) -> None:
    table = PriceTable("2026-01-01", {"small": (2.0, 8.0)})
    asked = request(text)
    object.__setattr__(asked, "parameters", {"max_completion_tokens": most})
    worst = limits.worst_case(asked, table)
    assert worst[TOKENS] >= len(text.encode()) + most
    assert worst[USD] >= (2 * len(text.encode()) + 8 * most) / 1e6
    assert worst[REQUESTS] == 1


def test_a_process_that_reports_twice_in_a_row_keeps_its_advance() -> None:
    now, bounds = 0.0, Limits(requests_per_minute=10**6)
    ledger = Ledger(bounds, 0.0, lambda: now)
    lease = RateLimiter(bounds, 8, exchange, clock=lambda: now)
    cost = {REQUESTS: 1.0}
    for _ in range(2):  # one stays in flight, so the process is never idle
        lease.start(cost, lambda begun: None)
    lease.accept(ledger.exchange(lease.end_period()))
    lease.settle(cost, cost, now)
    sent: list[bool] = []
    for _ in range(12):
        lease.accept(ledger.exchange(lease.end_period()))
        now += 0.3
        sent = []
        for _ in range(100):
            lease.start(cost, sent.append)
            lease.settle(cost, cost, now)
    assert sent == [True] * 100
    lease.accept(ledger.exchange(lease.end_period()))
    assert lease.end_period().held[REQUESTS] >= 100


def test_a_failure_in_one_process_stops_all() -> None:
    async def run() -> None:
        ledger = Ledger(Limits())

        async def exchange(report: LeaseReport) -> Grant:
            await asyncio.sleep(0)
            return ledger.exchange(report)

        limiters = [RateLimiter(Limits(), 4, exchange, 0.01) for _ in range(2)]
        for limiter in limiters:
            await limiter.enter({})
        limiters[0].fail("the key is refused")
        with pytest.raises(RunFailure, match="the key is refused"):
            for _ in range(4):
                await asyncio.wait_for(limiters[1].enter({}), 5)
        for limiter in limiters:
            limiter.settle({}, {}, 0.0)
        await limiters[0].flush()

    asyncio.run(run())


# ------------------------------------------------------------------------------------------- the note of a budget


def wants(usd: float) -> LeaseReport:
    return report(wanted={USD: usd}, first={USD: usd})


def test_a_grant_of_a_budget_is_noted_before_it_can_be_spent() -> None:
    noted: list[float] = []
    assert Ledger(Limits(budget_usd=10), 1.0, note=noted.append).exchange(wants(3.0)).amounts == {USD: 3.0}
    assert len(noted) == 1
    assert 4.0 <= noted[0] <= 4.1


def test_the_time_that_a_note_takes_expires_no_holder() -> None:
    now = 0.0

    def slowly(_: float) -> None:
        nonlocal now
        now += 2 * limits.LEASE_S

    ledger, held = Ledger(Limits(budget_usd=10), 1.0, lambda: now, slowly), {USD: 3.0}
    for holder in "ab":
        ledger.exchange(report(holder, held=held))
    now += limits.LEASE_S / 2
    for holder in "ab":
        ledger.exchange(report(holder, used=((0.0, {USD: 1.0}),)))
    assert ledger.committed_usd == 1.0 + 2 * 1.0


def test_a_failed_note_is_written_by_the_next_exchange() -> None:
    noted: list[float] = []

    def note(usd: float) -> None:
        noted.append(usd)
        if len(noted) == 1:
            raise OSError("the disk is full")

    ledger = Ledger(Limits(budget_usd=10), 1.0, note=note)
    with pytest.raises(OSError, match="full"):
        ledger.exchange(wants(3.0))
    ledger.exchange(report(held={USD: 3.0}))
    assert noted[1] >= 4.0


def test_an_answer_above_its_worst_case_leaves_less_for_every_process() -> None:
    limits = Limits(budget_usd=1.0)
    ledger, sent = Ledger(limits), []
    first, second = (RateLimiter(limits, 8, lambda report: None) for _ in range(2))

    def report(*limiters: RateLimiter) -> None:
        for limiter in limiters:
            limiter.accept(ledger.exchange(limiter.end_period()))

    first.start({USD: 0.4}, sent.append)
    report(first)
    first.settle({USD: 0.4}, {USD: 0.9}, 0.0)
    second.start({USD: 0.2}, sent.append)
    report(first, second, first, second)
    assert sent == [True, False]
    assert ledger.committed_usd == pytest.approx(0.9)
