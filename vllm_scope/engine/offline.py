"""An engine that computes the prompts of a harvest, in continuous batches and in bounded memory.

Owns:  OfflineEngine.
Runs:  in the harvesting process, on one thread at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vllm_scope.config import KEY
from vllm_scope.engine.frontend.alike import Alike, asking
from vllm_scope.engine.frontend.connection import connect_sync, connections, needs_connection
from vllm_scope.engine.frontend.outputs import drop
from vllm_scope.engine.frontend.requests import prepared_as
from vllm_scope.engine.heap import frozen_heap
from vllm_scope.engine.plugin import checking_sites
from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.errors import CompatError, ScopeError, SpecError, reason_of, shown
from vllm_scope.request.actions import Read
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import scope

if TYPE_CHECKING:
    from vllm_scope.results.result import ScopeResult

T = TypeVar("T")

#: A step has at most max_num_seqs requests and max_num_batched_tokens tokens. The engine takes
#: prompts until it has _AHEAD times this number of requests or of tokens. The scheduler then never
#: waits for the next prompt.
_AHEAD = 4
#: The time in seconds between two checks whether EngineCore is alive.
_LOOK_S = 0.5


class OfflineEngine:
    """Computes the rows of prompts with a `vllm.LLM`. The LLM samples one token after each prompt,
    and the sampled token is not used.

    Args:
        model: the model's name or folder, as vLLM takes it, or a vllm.LLM of the caller. `close`
            does not end an LLM of the caller.
        options: arguments of vllm.LLM.
        reads: the reads that the caller will request. If the options name no sites, the sites of
            these reads are tapped.

    Attributes:
        model: the model's name or folder.

    Raises:
        SpecError: there are three cases, and in each case no engine is started. `model` is neither
            a name nor an LLM; or `model` is an LLM, and there are options; or an engine for the
            named model would have no tap for one of the reads.
        ScopeError: vLLM cannot start.
    """

    def __init__(
        self, model: object, options: Mapping[str, Any], reads: Sequence[Read] = ()
    ) -> None:
        self._own = isinstance(model, str)
        self._llm: Any = model
        if isinstance(model, str):
            from vllm import LLM

            additional = dict(options.get("additional_config") or {})
            body = dict(additional.get(KEY) or {})
            sites = sorted({read.site for read in reads})
            additional[KEY] = ({"sites": sites} if sites else {}) | body
            # The prefix cache is off, because reads of whole prompts never use it, and block hashes
            # take time.
            defaults = {"enable_prefix_caching": False}
            arguments = defaults | dict(options) | {"additional_config": additional}
            with _in_words(f"vLLM cannot start {model}"), checking_sites(partial(_find, reads)):
                self._llm = LLM(model, **arguments)
        elif options:
            raise SpecError(
                f"the model is an LLM, and there are options {', '.join(options)}; options are "
                "allowed only with the name of a model."
            )
        elif not hasattr(model, "llm_engine"):
            raise SpecError(
                f"the model is {shown(model)}; it must be a name, a folder or a vllm.LLM."
            )
        self._config: VllmConfig = self._llm.llm_engine.vllm_config
        # vLLM can replace the name of a model by the path of a copy. The attribute `model` has the
        # name that the caller gave.
        self.model = model if isinstance(model, str) else self._config.model_config.model

    def settings(self, reads: Sequence[Read]) -> dict[str, Any]:
        """The settings on which the rows depend, other than the prompts. All values can be stored
        as JSON.

        Raises:
            SpecError: a read names a layer or a site that has no tap.
        """
        config = self._config.model_config
        found: dict[str, Any] = {
            "model": self.model,
            "dtype": str(config.dtype).removeprefix("torch."),
            "revision": config.revision,
            "quantization": config.quantization,
            "hf_overrides": json.loads(json.dumps(config.hf_overrides, default=_name_of)),
            "kv_cache": self._config.cache_config.cache_dtype,
            # vLLM can replace the names of the model and of the tokenizer by the path of a copy of
            # the model.
            "tokenizer": self.model if config.tokenizer == config.model else config.tokenizer,
            "tokenizer_revision": config.tokenizer_revision,
        }
        if (sites := self._sites()) is not None:
            found["layers"] = _find(reads, sites)
        return found

    def _sites(self) -> Sites | None:
        """The engine's sites that have taps. If the model has no taps, the result is None, and
        `compute` raises an error."""
        engine = self._llm.llm_engine
        if needs_connection(engine):
            connect_sync(engine)
        connection = connections.of(engine.output_processor)
        return None if connection is None or connection.reason is not None else connection.sites

    @property
    def num_layers(self) -> int | None:
        """The model's number of layers; None if the engine taps nothing."""
        return None if (sites := self._sites()) is None else sites.num_layers

    @property
    def most_tokens(self) -> int:
        """The number of tokens of the longest possible prompt. vLLM always samples one token after
        a prompt."""
        return self._config.model_config.max_model_len - 1

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary. Every token id is below this number."""
        return self._config.model_config.get_vocab_size()

    @property
    def end(self) -> int | None:
        """The id of the tokenizer's end-of-text token, or None if there is no such token."""
        if self._config.model_config.skip_tokenizer_init:
            return None
        found: int | None = self._llm.get_tokenizer().eos_token_id
        return found

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts, from the tokenizer that vLLM uses for prompts.

        Raises:
            SpecError: the engine has no tokenizer.
        """
        if self._config.model_config.skip_tokenizer_init:
            raise SpecError(
                "the documents are texts, and the engine has no tokenizer (skip_tokenizer_init); "
                "give token ids, or start it with its tokenizer."
            )
        found: list[list[int]] = self._llm.get_tokenizer()(list(texts))["input_ids"]
        return found

    def compute(
        self, prompts: Iterable[tuple[T, Sequence[int]]], reads: Sequence[Read]
    ) -> Generator[tuple[T, ScopeResult]]:
        """Yields the rows of each prompt, in the order in which the prompts end.

        Args:
            prompts: for each prompt, an object that names the prompt, and the prompt's token ids.
                The object is returned together with the prompt's rows. The engine takes the next
                prompt as soon as the engine has room.

        Raises:
            SpecError: the engine cannot deliver these reads.
            CompatError: vllm-scope is switched off, or is not installed where the engine runs.
            ScopeError: the LLM has running requests, or vLLM refuses a prompt, or the engine dies.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0, max_tokens=1, detokenize=False, ignore_eos=True, skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY, extra_args=scope(*reads),
        )  # fmt: skip
        engine = self._llm.llm_engine
        if engine.has_unfinished_requests():
            raise ScopeError("this LLM has requests that run; let them end before the harvest.")
        self._sites()  # connects the engine
        with _woken(engine), frozen_heap():
            yield from self._computed(prompts, _Sending(engine, reads, params))

    def _computed(
        self, prompts: Iterable[tuple[T, Sequence[int]]], sending: _Sending
    ) -> Generator[tuple[T, ScopeResult]]:
        engine, scheduler = self._llm.llm_engine, self._config.scheduler_config
        waiting, running = iter(prompts), _Running[T]()
        more = True
        try:
            while more or running.items:
                while (
                    more
                    and running.num_tokens < _AHEAD * scheduler.max_num_batched_tokens
                    and len(running.items) < _AHEAD * scheduler.max_num_seqs
                ):
                    if (found := next(waiting, None)) is None:
                        more = False
                        break
                    name = running.add(*found)
                    with _in_words("vLLM refuses a prompt"):
                        sending.send(name, list(found[1]))
                with _in_words("vLLM failed while it computed"):
                    outputs = engine.step() if running.items else []
                for output in outputs:
                    if output.finished:
                        result = getattr(output.outputs[0], "scope", None)
                        if result is None:
                            raise CompatError(
                                "the engine read no rows: vllm-scope is switched off "
                                "(VLLM_SCOPE=0), or not installed where the engine runs."
                            )
                        yield running.end(output.request_id), result
        finally:
            if running.items:
                with suppress(Exception):  # the engine can be dead
                    drop(engine, running.items)

    def close(self) -> None:
        """End the engine. If the LLM belongs to the caller, do nothing."""
        if self._own:
            self._llm.llm_engine.engine_core.shutdown()


def _name_of(value: object) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


def _find(reads: Sequence[Read], sites: Sites) -> list[list[int]]:
    """The layers of each read. Raises SpecError if a read's site or layer has no tap."""
    return [
        [place.layer for place in sites.find(read.site, read.layer_numbers, f"reads[{i}]")]
        for i, read in enumerate(reads)
    ]


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """In the `with` block, each error of vLLM becomes a ScopeError with a short text."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except ScopeError:
        raise
    except EngineDeadError as error:
        raise ScopeError(f"the engine has died: {reason_of(error)}") from error
    except Exception as error:
        raise ScopeError(f"{what}: {reason_of(error)}") from error


@contextmanager
def _woken(engine: Any) -> Iterator[None]:
    """If EngineCore is killed in the `with` block, a step that waits for EngineCore ends with
    EngineDeadError. Without this function, vLLM would close the socket, and the step would wait
    forever.
    vllm 0.30 to 0.33, v1/engine/core_client.py, SyncMPClient.get_output
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    client = engine.engine_core
    if not hasattr(client, "outputs_queue"):  # EngineCore is in this process
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if client.resources.engine_dead:
                client.outputs_queue.put_nowait(EngineDeadError())
                return

    threading.Thread(target=watch, name="vllm-scope-alive", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class _Sending:
    """Sends prompts to the engine, as requests that differ only in their tokens.

    Args:
        params: SamplingParams that contain the spec of the reads.
    """

    def __init__(self, engine: Any, reads: Sequence[Read], params: Any) -> None:
        self._engine, self._reads, self._params = engine, reads, params
        self._alike, self._prepared_params = Alike.of_engine(engine), asking(params)

    def send(self, name: str, ids: list[int]) -> None:
        """Add a prompt to the engine. Raises a SpecError, or an error of vLLM."""
        prompt, found = {"type": "token", "prompt_token_ids": ids}, None
        if self._alike is not None:
            first = self._alike.checked("harvest", self._reads, self._params, ids)
            found = self._alike.with_prompt(first, ids)
        params = self._params if found is None else self._prepared_params
        with prepared_as(found):
            self._engine.add_request(name, prompt, params)


class _Running(Generic[T]):
    """The prompts that the engine computes, by the names of their requests."""

    def __init__(self) -> None:
        self.items: dict[str, tuple[T, int]] = {}
        self.num_tokens = 0
        self._number = 0

    def add(self, item: T, token_ids: Sequence[int]) -> str:
        name = f"harvest-{self._number}"
        self._number += 1
        self.items[name] = item, len(token_ids)
        self.num_tokens += len(token_ids)
        return name

    def end(self, name: str) -> T:
        item, num_tokens = self.items.pop(name)
        self.num_tokens -= num_tokens
        return item
