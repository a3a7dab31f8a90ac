"""A harvest's rows are what reads give to memory, whatever becomes of its process."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import vllm_scope
from tests import asking
from tests.asking import run
from tests.conftest import TOYWORLD, local_engine, long_except
from vllm_scope import ConfigError, FileError, Read, SpecError, scope
from vllm_scope.engine.frontend import outputs
from vllm_scope.engine.offline import OfflineEngine

READS = (
    Read("resid_post", layers=[1, 4]),
    Read("embed", tokens="last"),
    Read("resid_mid", layer=2, codec="int8"),
)


def documents(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    chosen = random.Random(seed)
    return [
        [chosen.randrange(5, 500) for _ in range(chosen.randint(1, longest))] for _ in range(count)
    ]


@pytest.fixture(scope="module")
def llm():
    with local_engine(
        TOYWORLD, dtype="float32", max_model_len=128, max_num_seqs=64, skip_tokenizer_init=None,
        additional_config={"scope": {"sites": ["embed", "resid_mid", "resid_post"]}},
    ) as llm:  # fmt: skip
        yield llm


def check_equals_memory(llm, out, *reads):
    """Every byte on disk is what the same reads give to memory for the same tokens."""
    capture = vllm_scope.open(out)
    params = asking.params(scope(*reads), max_tokens=1)
    outputs = run(llm, [request.token_ids.tolist() for request in capture], params)
    for request, output in zip(capture, outputs, strict=True):
        result = output.scope
        assert request.status == "ok"
        assert request.keys() == sorted(result.keys())
        for stream in result.keys():
            assert request.positions(*stream).tolist() == result.positions(*stream).tolist()
            assert request[stream].dtype == result[stream].dtype
            assert torch.equal(request[stream].view(torch.uint8), result[stream].view(torch.uint8))
            encoded = result.encoded(*stream)
            stored = request.stored(stream)
            assert stored.codec.codec == ("none" if encoded is None else "int8")
            parts = {} if encoded is None else encoded.parts
            for name, part in parts.items():
                assert torch.equal(stored._parts()[name], part)
    return capture


@pytest.mark.parametrize("long", long_except(["truncate", "split", "pack"], "pack"))
def test_every_byte_equals_what_a_read_gives_to_memory(llm, long, tmp_path):
    ids = [*documents(60, 300), []]
    found = vllm_scope.harvest(
        ids, *READS, model=llm, out=tmp_path, long=long, context=100, progress=False
    )
    assert found.manifest.complete
    capture = check_equals_memory(llm, tmp_path, *READS)
    parts: list[tuple[str, int, list[int]]] = []
    for request in capture:
        at = 0
        for span in request.manifest.documents:
            tokens = request.token_ids.tolist()[at : at + span.num_tokens]
            parts.append((span.document, span.first, tokens))
            at += span.num_tokens
        assert at == len(request.token_ids) <= 100
        assert request.manifest.num_layers == 6
    whole: dict[str, list[int]] = {}
    for document, first, tokens in sorted(parts):
        assert first == len(whole.setdefault(document, []))
        whole[document] += tokens
    most = 100 if long == "truncate" else None
    begin = found.manifest.settings["dataset"][:12]
    assert whole == {f"{begin}-{i}": some[:most] for i, some in enumerate(ids) if some}
    totals = found.manifest.totals
    assert (totals["documents"], totals["empty"]) == (60, 1)
    assert totals["tokens"] == sum(len(some[:most]) for some in ids)
    assert totals["truncated"] == (sum(len(i) > 100 for i in ids) if long == "truncate" else 0)


def test_texts_are_tokenized_as_vllm_does(llm, tmp_path):
    texts = ["The capital of Kimar", "A lovely place, the town of Ritova.", "The"]
    rows = "".join(json.dumps({"name": f"n{i}", "text": t}) + "\n" for i, t in enumerate(texts))
    (tmp_path / "texts.jsonl").write_text(rows)
    vllm_scope.harvest(
        tmp_path / "texts.jsonl", Read("resid_post", layer=5), model=llm, out=tmp_path / "out",
        id_column="name", progress=False,
    )  # fmt: skip
    outputs = llm.generate(texts, asking.params(None, max_tokens=1), use_tqdm=False)
    capture = vllm_scope.open(tmp_path / "out")
    for i, output in enumerate(outputs):
        assert capture[f"n{i}"].token_ids.tolist() == output.prompt_token_ids


def test_what_cannot_be_harvested_is_refused_with_a_sentence(llm, tmp_path):
    def harvest(*reads, ids=((5, 6),), **options):
        return vllm_scope.harvest(
            list(map(list, ids)), *reads, model=llm, out=tmp_path / "out", progress=False, **options
        )

    read = Read("resid_post", layer=1)
    with pytest.raises(SpecError, match="layer"):
        harvest(Read("resid_post", layer=99))
    with pytest.raises(ConfigError, match="context is 128; it must be 1 to 127"):
        harvest(read, context=128)
    with pytest.raises(SpecError, match="the model is an LLM, and there are options dtype"):
        harvest(read, engine={"dtype": "float32"})
    with pytest.raises(SpecError, match="a Read goes to 'filesystem'"):
        harvest(Read("embed", to="filesystem"))
    with pytest.raises(SpecError, match="tokens is 'generated'"):
        harvest(Read("embed", tokens="generated"))
    with pytest.raises(SpecError, match="give one Read or more"):
        harvest()
    with pytest.raises(
        SpecError, match=r"document '.*-1' has the token id 1000000; the ids of .* 0 to"
    ):
        harvest(read, ids=([5, 6], [7, 10**6]))
    # The engine goes on, and so does the folder.
    assert harvest(read).computed == 1
    with pytest.raises(ConfigError, match="was harvested with reads"):
        harvest(Read("embed"))


def test_prompts_are_taken_as_the_engine_has_room(llm):
    """So memory is bounded, whatever the size of the data set."""
    ahead = most = 0

    def prompts():
        nonlocal ahead, most
        for number, ids in enumerate(documents(1500, 6)):
            ahead += 1
            most = max(most, ahead)
            yield number, ids

    seen = set()
    for number, result in OfflineEngine(llm, {}).compute(prompts(), [Read("embed")]):
        assert result.status == "complete"
        seen.add(number)
        ahead -= 1
    assert seen == set(range(1500))
    assert 64 <= most <= 4 * 64 + 1


def test_a_harvest_that_is_killed_by_its_documents_leaves_the_llm_as_it_was(llm, monkeypatch):
    """Requests run, and outputs wait for rows, when it ends early."""
    engine, waiting_for = llm.llm_engine, outputs._waiting_for

    def late(output):
        return [output] if int(output.request_id.split("-")[1]) % 2 else waiting_for(output)

    def prompts():
        for number in range(3000):
            if outputs._waiting.of(engine):
                raise KeyError("the data set is broken")
            yield number, [5, 6, 7]

    with monkeypatch.context() as patched:
        patched.setattr(outputs, "_waiting_for", late)
        with pytest.raises(KeyError, match="is broken"):
            list(OfflineEngine(llm, {}).compute(prompts(), [Read("embed")]))
    assert not outputs._waiting.of(engine)
    assert not engine.has_unfinished_requests()
    (output,) = run(llm, [[5, 6]], asking.params(scope(Read("embed")), max_tokens=1))
    assert output.scope.status == "complete"
    found = list(OfflineEngine(llm, {}).compute([(0, [5, 6])], [Read("embed")]))
    assert [(number, rows.status) for number, rows in found] == [(0, "complete")]


# The command, killed

COMMAND = [sys.executable, "-c", "from vllm_scope.cli import app; app()", "harvest"]
ENGINE = {
    "enforce_eager": True, "max_num_batched_tokens": 256, "distributed_executor_backend": "uni",
    "max_num_seqs": 8, "skip_tokenizer_init": True,
}  # fmt: skip


def command(dataset: Path, out: Path, *more: str) -> list[str]:
    return [
        *COMMAND, str(dataset), "--model", str(TOYWORLD), "--out", str(out), "--layers", "1-3",
        "--site", "resid_post", "--site", "embed", "--long", "pack", "--context", "120",
        "--file-mib", "1", "--dtype", "float32", "--max-model-len", "128",
        "--gpu-memory-utilization", "0.3", "--engine", json.dumps(ENGINE), *more,
    ]  # fmt: skip


def start(*arguments, apart: bool = False) -> subprocess.Popen[str]:
    """
    Args:
        apart: vLLM's engine has processes of its own.
    """
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if apart else "0"}
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | more,
    )  # fmt: skip


def shards_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def killed(dataset: Path, out: Path, wait_s: float, apart: bool) -> None:
    """Kill the command some time after it has made a further shard."""
    before = len(shards_in(out))
    process = start(dataset, out, apart=apart)
    deadline = time.monotonic() + 200
    while len(shards_in(out)) <= before:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(wait_s)
    engine = psutil.Process(process.pid).children(recursive=True)
    assert any("EngineCore" in one.name() + str(one.cmdline()) for one in engine) == apart
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    # Nobody has to end vLLM's processes, which would hold a device's memory.
    assert psutil.wait_procs(engine, timeout=30)[1] == []


def contents(out: Path) -> dict[tuple[str, int], list[bytes]]:
    """(document, first token) of each context -> the bytes of its tokens and rows."""
    found: dict[tuple[str, int], list[bytes]] = {}
    for request in vllm_scope.open(out):
        span = request.manifest.documents[0]
        assert request.status == "ok"
        assert (span.document, span.first) not in found
        found[span.document, span.first] = [
            request.token_ids.numpy().tobytes(),
            *(request.positions(*stream).numpy().tobytes() for stream in request.keys()),
            *(request[stream].numpy().tobytes() for stream in request.keys()),
        ]
    return found


@pytest.mark.long
def test_a_killed_command_goes_on_where_it_was(llm, tmp_path):
    dataset, out = tmp_path / "ids.jsonl", tmp_path / "out"
    rows = [{"id": f"d{i}", "input_ids": ids} for i, ids in enumerate(documents(900, 60, seed=3))]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for wait_s, apart in ((0.0, False), (0.1, True)):
        killed(dataset, out, wait_s, apart)
    before = {shard: shard.read_bytes() for shard in shards_in(out)}
    assert before
    last = start(dataset, out)
    printed, errors = last.communicate(timeout=200)
    assert last.returncode == 0, errors
    manifest = json.loads((out / "harvest.json").read_text())
    assert manifest["complete"]
    assert len(manifest["runs"]) == 3
    assert all(shard.read_bytes() == body for shard, body in before.items())
    # What the killed runs had finished was not computed again.
    now, total = (
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) of ([\d,]+) cont", printed)[0]
    )
    kept = sum(manifest["shards"][shard.name]["contexts"] for shard in before)
    assert (now, total) == (manifest["totals"]["contexts"] - kept, manifest["totals"]["contexts"])
    assert "tokens/s" in errors
    undisturbed = tmp_path / "undisturbed"
    reads = (Read("resid_post", layers=[1, 2, 3]), Read("embed"))
    vllm_scope.harvest(
        dataset, *reads, model=llm, out=undisturbed, long="pack", context=120, progress=False
    )
    assert contents(out) == contents(undisturbed)
    again = subprocess.run(command(dataset, out, "--quiet"), capture_output=True, text=True)
    assert "0 of" in again.stdout
    other = subprocess.run(command(dataset, out, "--context", "60"), capture_output=True, text=True)
    assert other.returncode == 1
    assert other.stderr.strip() == (
        f"{out} was harvested with context 120, and now context is 60; give the same value, or "
        "another folder."
    )


def test_two_commands_cannot_harvest_into_one_folder(llm, tmp_path):
    held = subprocess.Popen(
        [sys.executable, "-c", f"""
import sys
from vllm_scope.harvests.manifest import locked
with locked({str(tmp_path)!r}):
    print("held", flush=True)
    sys.stdin.read()
"""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert held.stdout.readline() == "held\n"
    with pytest.raises(FileError, match="another process harvests into"):
        vllm_scope.harvest([[5]], Read("embed"), model=llm, out=tmp_path, progress=False)
    held.communicate("")
    assert vllm_scope.harvest(
        [[5]], Read("embed"), model=llm, out=tmp_path, progress=False
    ).computed
