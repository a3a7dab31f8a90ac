"""vLLM's AsyncLLM on a separate event loop.

Owns:  OwnLoop, which has the engine, the event loop and the thread of this loop.
Runs:  in a process where Inspect creates a new event loop for each evaluation.
To:    inspect.py.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")


class OwnLoop:
    """An engine that runs until `close`, or until the process ends.

    Attributes:
        llm: vLLM's AsyncLLM.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.llm = self._submit(self._start(options)).result()
        # Inspect keeps models for the next evaluation and never closes a model. When the process
        # ends, vLLM stops EngineCore. A task that still waits for EngineCore then logs that
        # EngineCore died. `close` ends these tasks. atexit calls the last registered function
        # first. Therefore `close` runs before the function that vLLM registered.
        atexit.register(self.close)

    async def last(self, stream: AsyncIterator[T]) -> T:
        """The last item of a stream of the engine. Any event loop can await this method."""

        async def read() -> T:
            return [item async for item in stream][-1]

        return await asyncio.wrap_future(self._submit(read()))

    def close(self) -> None:
        atexit.unregister(self.close)
        self._submit(self._stop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self, options: Mapping[str, object]) -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    def _submit(self, work: Coroutine[object, None, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _stop(self) -> None:
        # On the engine's loop, `shutdown` cancels the tasks that wait for the engine. On another
        # thread, `shutdown` would not cancel these tasks, and the tasks would log that the engine
        # died.
        self.llm.shutdown()
        self.llm = None
