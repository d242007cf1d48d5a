"""Which server gets the next request."""

from __future__ import annotations

import asyncio

import pytest

from retrain.engines.pool import FIRST_PAUSE_S, LONGEST_PAUSE_S, Pool, Server, jittered


def test_the_least_loaded_server_is_next() -> None:
    async def check() -> list[str]:
        pool = Pool(["http://a", "http://b", "http://c"], max_concurrent=10)
        seen = []
        async with pool.slot() as one, pool.slot() as two, pool.slot() as three:
            seen += [one.url, two.url, three.url]
            async with pool.slot() as four:
                assert four.load == 2
        async with pool.slot(pool.servers[2]) as pinned:
            assert pinned is pool.servers[2]
            async with pool.slot() as other:
                assert other is not pinned
        assert all(server.load == 0 for server in pool.servers)
        return seen

    assert sorted(asyncio.run(check())) == ["http://a", "http://b", "http://c"]


def test_a_server_put_aside_is_left_alone_and_comes_back() -> None:
    async def check() -> None:
        pool = Pool(["http://a", "http://b"], max_concurrent=10)
        first, second = pool.servers
        pool.back_off(first)
        for _ in range(5):
            async with pool.slot() as server:
                assert server is second
        pool.answered(first)
        first_again = second_again = 0
        for _ in range(4):
            async with pool.slot() as one, pool.slot() as two:
                first_again += first in (one, two)
                second_again += second in (one, two)
        assert first_again == second_again == 4

    asyncio.run(check())


def test_when_all_are_aside_the_first_that_is_back_is_waited_for() -> None:
    async def check() -> float:
        pool = Pool(["http://a", "http://b"], max_concurrent=10)
        pool.back_off(pool.servers[0], at_least_s=0.2)
        pool.back_off(pool.servers[1], at_least_s=30.0)
        started = asyncio.get_running_loop().time()
        async with pool.slot() as server:
            assert server is pool.servers[0]
        return asyncio.get_running_loop().time() - started

    assert asyncio.run(check()) >= 0.2


def test_pauses_double_up_to_a_limit_and_many_failures_at_once_are_one() -> None:
    async def check() -> list[float]:
        pool = Pool(["http://a"], max_concurrent=10)
        (server,) = pool.servers
        pauses = []
        for _ in range(10):
            for _ in range(50):
                pool.back_off(server)
            pauses.append(server.backoff_until - asyncio.get_running_loop().time())
            server.backoff_until = 0.0
        pool.answered(server)
        assert server.failures == 0
        return pauses

    pauses = asyncio.run(check())
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, abs=0.1)
    assert pauses[1] == pytest.approx(2 * FIRST_PAUSE_S, abs=0.1)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.1)


def test_a_server_that_says_too_many_gets_fewer_and_then_more_again() -> None:
    async def check() -> None:
        pool = Pool(["http://a"], max_concurrent=100)
        (server,) = pool.servers
        server.load = 40
        for _ in range(20):
            pool.reduce_room(server)
            pool.back_off(server)
        assert server.room == 20
        server.backoff_until = 0.0
        pool.reduce_room(server)
        assert server.room == 10
        for _ in range(10):
            pool.answered(server)
        assert 10.9 < server.room < 11.1

    asyncio.run(check())


def test_a_full_server_is_waited_for() -> None:
    async def check() -> list[str]:
        pool = Pool(["http://a"], max_concurrent=100)
        pool.servers[0].room = 1.0
        order: list[str] = []

        async def one(name: str) -> None:
            async with pool.slot():
                order.append(f"{name} in")
                await asyncio.sleep(0)
                order.append(f"{name} out")

        await asyncio.gather(*(one(str(n)) for n in range(5)))
        return order

    order = asyncio.run(check())
    assert len(order) == 10
    assert [word.split()[1] for word in order] == ["in", "out"] * 5


def test_a_login_is_not_part_of_a_name_and_jitter_only_adds() -> None:
    assert Server.at("http://user:pass@host:8000/base").name == "http://host:8000/base"
    values = [jittered(1.0) for _ in range(200)]
    assert 1.0 <= min(values) < max(values) <= 1.25
