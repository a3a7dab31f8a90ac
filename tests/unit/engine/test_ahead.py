"""The weights of monitors travel to every EngineCore once; tickets then name them by digest."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.unit.engine.test_connection import SITES
from vllm_scope import CapacityError, Spec, SpecError
from vllm_scope.core.registry import Registry
from vllm_scope.engine.frontend import ahead, outputs
from vllm_scope.engine.frontend.connection import connections
from vllm_scope.engine.monitors import parse_all
from vllm_scope.errors import UnheldError
from vllm_scope.request.ticket import Recipient, Ticket, travelling


def monitors(*values: float):
    body = {"layers": [1], "threshold": 0.0}
    return parse_all({f"m{value}": body | {"weight": [value] * 4} for value in values})


def spec_of(some) -> Spec:
    return Spec(probes=tuple(monitor.probe for monitor in some))


class Thing(SimpleNamespace):
    """Has a weak reference, as vLLM's objects."""

    __hash__ = object.__hash__


@dataclass(eq=False)
class Cores:
    """vLLM's client of some EngineCores. Its messages arrive in order, `arrive` by `arrive`.

    Attributes:
        core_engines: as vLLM's.
        registries: of each EngineCore.
        sent: the messages under way, each with its EngineCore.
        sizes: of the tickets that have arrived, in bytes.
    """

    core_engines: list[bytes]
    registries: dict[bytes, Registry] = field(default_factory=dict)
    sent: list = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    async def call_utility_all_async(self, name, method, timeout, args, kwargs):
        assert (name, method) == ("collective_rpc", "scope_hold")
        answers = [asyncio.get_running_loop().create_future() for _ in self.core_engines]
        self.sent += zip(self.core_engines, answers, [args] * len(answers), strict=True)
        return await asyncio.gather(*answers)

    def add(self, ticket: bytes) -> None:
        """A request, to the EngineCore that vLLM chooses."""
        self.sent.append((random.choice(self.core_engines), None, ticket))

    def arrive(self, count: int | None = None) -> None:
        some, self.sent = self.sent[:count], self.sent[count or len(self.sent) :]
        for core, answer, content in some:
            registry = self.registries.setdefault(core, Registry(SITES))
            if answer is not None:
                answer.set_result([registry.hold(*content)])
                continue
            ticket = Ticket.decode(content)
            self.sizes.append(len(content))
            asked = registry.resolve(ticket)[1]
            known = {p.name: p.cells[0].net.layers[0][0].numpy[0, 0] for p in asked.probes}
            assert known == {name: float(name.removeprefix("monitor/m")) for name in known}


def engine_of(num_cores: int):
    cores = Cores([bytes([i]) for i in range(num_cores)])
    engine = Thing(output_processor=Thing(), engine_core=cores)
    connections.put(engine.output_processor, SimpleNamespace(sites=SITES))
    return engine, cores


def request(engine, some) -> None:
    """A request of now: its ticket is made, and goes to some EngineCore."""
    spec, held = spec_of(some), ahead.held_by(engine.output_processor)
    arrays = travelling(a for digest, a in spec.arrays.items() if digest not in held)
    ticket = Ticket(Recipient(1, "f"), None, (), spec.packed, arrays)
    engine.engine_core.add(ticket.encode())


def digests(some) -> frozenset[bytes]:
    return frozenset(spec_of(some).arrays)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def sent(engine, cores, some):
    """Send the monitors' weights, and have EngineCore answer."""
    ahead.send_soon(engine, some)
    await settle()
    cores.arrive()
    await settle()


@pytest.mark.parametrize("num_cores", [1, 3])
def test_weights_are_left_out_once_every_engine_core_has_answered(num_cores):
    async def run():
        (engine, cores), some = engine_of(num_cores), monitors(1.0)
        ahead.send_soon(engine, some)
        await settle()
        assert ahead.held_by(engine.output_processor) == frozenset()
        for i in range(num_cores):
            assert ahead.held_by(engine.output_processor) == frozenset(), f"{i} have answered"
            cores.arrive(1)
            await settle()
        assert ahead.held_by(engine.output_processor) == digests(some)
        ahead.send_soon(engine, some)
        await settle()
        assert not cores.sent, "it is sent once"
        ahead.send_soon(engine, ())
        await settle()
        assert ahead.held_by(engine.output_processor) == frozenset()
        cores.arrive()
        assert [r.ahead.num_bytes for r in cores.registries.values()] == [0] * num_cores

    asyncio.run(run())


def test_an_engine_core_that_is_new_has_not_been_told():
    async def run():
        (engine, cores), some = engine_of(1), monitors(1.0)
        await sent(engine, cores, some)
        assert ahead.held_by(engine.output_processor) == digests(some)
        cores.core_engines.append(b"new")
        assert ahead.held_by(engine.output_processor) == frozenset()
        await sent(engine, cores, some)
        assert ahead.held_by(engine.output_processor) == digests(some)

    asyncio.run(run())


def test_after_a_refusal_weights_travel_until_they_are_sent_again():
    async def run():
        (engine, cores), some = engine_of(1), monitors(1.0)
        await sent(engine, cores, some)
        ahead.doubt(engine.output_processor)
        assert ahead.held_by(engine.output_processor) == frozenset()
        await sent(engine, cores, some)
        assert ahead.held_by(engine.output_processor) == digests(some)

    asyncio.run(run())


def test_refusals_that_come_meanwhile_do_not_send_the_weights_again():
    async def run():
        (engine, cores), some = engine_of(1), monitors(1.0)
        await sent(engine, cores, some)
        for _ in range(5):
            ahead.doubt(engine.output_processor)
            ahead.send_soon(engine, some)
            await settle()
            assert ahead.held_by(engine.output_processor) == frozenset()
        assert len(cores.sent) == 1
        cores.arrive()
        await settle()
        assert ahead.held_by(engine.output_processor) == digests(some)
        ahead.doubt(engine.output_processor)
        ahead.send_soon(engine, some)
        await settle()
        assert len(cores.sent) == 1, "the call has ended; a later refusal is doubted again"

    asyncio.run(run())


def test_after_a_failed_call_a_refusal_sends_the_weights_again():
    engine, some = Thing(output_processor=Thing(), engine_core=Thing()), monitors(1.0)
    connections.put(engine.output_processor, SimpleNamespace(sites=SITES))
    calls = []

    def fails_once(method, args):
        calls.append(method)
        if len(calls) == 1:
            raise RuntimeError("the engine is gone")
        return [list(digests(some))]

    engine.collective_rpc = fails_once
    ahead.send(engine, some)
    ahead.doubt(engine.output_processor)
    ahead.send(engine, some)
    assert ahead.held_by(engine.output_processor) == digests(some)


@pytest.mark.parametrize(
    ("error", "doubted"),
    [(SpecError("no"), 0), (CapacityError("full"), 0), (UnheldError("send it again"), 1)],
)
def test_only_a_refusal_for_want_of_vectors_makes_the_front_end_doubt(error, doubted, monkeypatch):
    seen = []
    monkeypatch.setattr(outputs.ahead, "doubt", seen.append)
    completion = Thing()
    outputs.lives.put(completion, outputs.Live(None, refusal=error))
    engine = Thing(output_processor=Thing())

    async def stream():
        yield SimpleNamespace(outputs=[completion])

    async def run():
        async for _ in outputs._settled(engine, stream()):
            raise AssertionError

    with pytest.raises(type(error)):
        asyncio.run(run())
    assert seen == [engine.output_processor] * doubted


def test_a_call_that_fails_harms_no_request(caplog):
    engine, some = Thing(output_processor=Thing(), engine_core=Thing()), monitors(1.0)
    connections.put(engine.output_processor, SimpleNamespace(sites=SITES))

    def fails(method, args):
        raise RuntimeError("the engine is gone")

    engine.collective_rpc = fails
    ahead.send(engine, some)
    assert ahead.held_by(engine.output_processor) == frozenset()
    assert "the weights of monitors travel with each request" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_set_and_when_no_ticket_lacks_a_weight_or_has_another_ones(seed):
    """Requests, changes of monitors and the arrival of messages, in any order."""
    random.seed(seed)

    async def run():
        engine, cores = engine_of(random.choice([1, 2, 3]))
        now, before = (), ()
        for _ in range(300):
            chance = random.random()
            if chance < 0.1:
                before, now = (
                    now,
                    monitors(*random.sample([1.0, 2.0, 3.0, 4.0], random.randrange(4))),
                )
            elif chance < 0.55:
                ahead.send_soon(engine, now)
                # A request that began before the change is still on its way.
                some = random.choice([now, before])
                if some:
                    request(engine, some)
            elif chance < 0.75:
                cores.arrive(random.randrange(1, 4))
            else:
                await settle()
        ahead.send_soon(engine, now)
        await settle()
        cores.arrive()
        await settle()
        assert ahead.held_by(engine.output_processor) == (digests(now) if now else frozenset())
        for registry in cores.registries.values():
            assert registry.ahead.arrays.keys() == ahead.held_by(engine.output_processor)
        whole = (
            len(Ticket(Recipient(1, "f"), None, (), spec_of(now).packed, []).encode()) if now else 0
        )
        cores.sizes.clear()
        for _ in range(9 * bool(now)):
            request(engine, now)
        cores.arrive()
        assert all(size == whole for size in cores.sizes), "no vector travels any more"

    asyncio.run(run())
