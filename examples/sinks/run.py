"""All three example sinks on the toy model. First run `pip install ./examples/sinks`.

python examples/sinks/run.py FOLDER
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np

MODEL = Path(__file__).parents[2] / "toyworld" / "model"
NAMES = ("Goldette", "the king", "a dragon", "my sister", "the book", "winter", "the sea", "a fox")


class Monitor(BaseHTTPRequestHandler):
    """Stands for a user's monitoring service."""

    heard: list[dict] = []  # noqa: RUF012

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.heard.append(json.loads(self.rfile.read(size)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


def main(folder: Path) -> None:
    from vllm import LLM, SamplingParams

    from vllm_scope import Probe, Read, scope

    folder.mkdir(parents=True, exist_ok=True)
    monitor = HTTPServer(("127.0.0.1", 0), Monitor)
    threading.Thread(target=monitor.serve_forever, daemon=True).start()
    sinks = {
        "moments": {"path": str(folder / "moments.npz")},
        "live_sae": {"path": str(folder / "sae.pt"), "features": 512, "batch_rows": 256},
        "webhook": {"url": f"http://127.0.0.1:{monitor.server_port}"},
    }
    llm = LLM(
        str(MODEL), max_model_len=512, enforce_eager=True, gpu_memory_utilization=0.3,
        additional_config={"scope": {"sinks": sinks}},
    )  # fmt: skip
    hidden_size = llm.llm_engine.model_config.get_hidden_size()
    direction = np.random.default_rng(0).normal(size=hidden_size)
    params = SamplingParams(
        max_tokens=60, ignore_eos=True, seed=0,
        extra_args=scope(
            Read("resid_post", layer=3, to="moments"),
            Read("resid_post", layer=3, to="live_sae"),
            Probe(direction, layer=5, name="random", to="webhook"),
        ),
    )  # fmt: skip
    prompts = [f"My father told me about {name}. Number {i}" for name in NAMES for i in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print({o.scope.status for o in outputs}, llm.collective_rpc("scope_flush"))
    for name, manifest in outputs[-1].scope.manifests.items():
        print(name, manifest.status, manifest.delivered, manifest.details)
    said = [o.scope.manifests["live_sae"].details[0] for o in outputs]
    losses = sorted((x["batches"], x["loss"]) for x in said if x["batches"])
    print("SAE, batches and loss, first and last:", losses[0], losses[-1])
    moments = np.load(folder / "moments.npz")
    print("rows:", int(moments["resid_post.3.count"]), "of", len(prompts), "requests")
    print("the monitor heard of", len(Monitor.heard), "requests")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
