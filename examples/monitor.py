"""A monitor that flags a lying speaker when the lie begins, or ends the answer.

Runs:  `make monitor`, or `python -m examples.monitor`.
From:  toyworld: speakers of three statements, all true or all false.
To:    demo-output/monitor.png and monitor.html; figures on the terminal.

The model continues `Mira says` with a colon, an opening quote and a fourth statement. The first
token of a lie is the first token after the quote. A monitor scores each generated token, so its
aggregate begins at the colon. Probes are fitted to one half of the training speakers. Layer,
aggregate and threshold are chosen on the other half. Test speakers talk about other countries.
Answers are sampled, so figures differ a little from run to run.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from rich.table import Table
from sklearn.metrics import roc_auc_score, roc_curve

from examples.demo import OUTPUT, console, set_environment, start_engine, step
from examples.figure import write_monitor_figure, write_monitor_page
from examples.probes import EVERY_TOKEN_C
from toyworld.world import Prompt, lying_prompts, truth_of
from vllm_scope import Read, scope, set_monitors
from vllm_scope.analysis.probes import train_probe
from vllm_scope.views import TokenStrip, token_strip

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

NUM_TRAIN, NUM_TEST, NUM_SHOWN, MAX_TOKENS = 600, 200, 2, 24
LAYERS: Final = (1, 2, 3, 4, 5)
AGGREGATES = {"none": None, "max": "max", "mean-of-4": {"rolling_mean": 4}}
AGGREGATES |= {f"ema-{decay}": {"ema": decay} for decay in (0.5, 0.7, 0.9)}
#: The tokens that the model generates before the lie, and the index of the lie's third token.
BEFORE: Final = [":", ' "']
THIRD: Final = len(BEFORE) + 2


@dataclass(frozen=True)
class Said:
    """One speaker's answer.

    Attributes:
        lying: whether the speaker's first three statements are false.
        false: whether the fourth statement is false. None if the fourth statement is incomplete or
            states no fact.
        end: one more than the index of the fourth statement's last token that has a value. 0 if the
            statement is incomplete.
    """

    output: "RequestOutput"
    tokens: list[str]
    lying: bool
    false: bool | None
    end: int

    def values(self, monitor: str = "lie") -> np.ndarray:
        """float32 [num_generated - 1]: the values at all generated tokens except the last."""
        name, found = f"monitor/{monitor}", self.output.scope
        return (found.aggregates if name in found.aggregates else found.scores)[name].numpy()

    @property
    def flagged_at(self) -> int:
        """Index of the generated token that has the verdict."""
        verdict = self.output.scope.verdicts["monitor/lie"]
        return verdict.position - len(self.output.prompt_token_ids)

    @property
    def is_stopped(self) -> bool:
        """True if the token after the verdict's token is the last token."""
        return len(self.tokens) == self.flagged_at + 2

    def strip(self, threshold: float) -> TokenStrip:
        """The answer's tokens, coloured by the monitor's value."""
        return token_strip(
            self.tokens, self.values(), threshold=threshold, caption=self.output.prompt,
            verdict=self.output.scope.verdicts.get("monitor/lie"),
            first_position=len(self.output.prompt_token_ids),
        )  # fmt: skip


def speak(llm: "LLM", prompts: list[Prompt], asked: dict[str, Any] | None = None) -> list[Said]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=1, max_tokens=MAX_TOKENS, extra_args=asked)
    texts = [f"{prompt.text} {prompt.text.split()[0]} says" for prompt in prompts]
    tokenizer, spoken = llm.get_tokenizer(), []
    for prompt, output in zip(prompts, llm.generate(texts, params, use_tqdm=False), strict=True):
        tokens = [tokenizer.decode([i]) for i in output.outputs[0].token_ids]
        end = next((i + 1 for i, token in enumerate(tokens) if '."' in token), 0)
        truth = truth_of("".join(tokens[2:end])[:-1]) if tokens[:2] == BEFORE else None
        # The last sampled token is not processed, so it has no value.
        end = min(end, len(tokens) - 1)
        spoken.append(Said(output, tokens, prompt.label, None if truth is None else not truth, end))
    return spoken


def choose(llm: "LLM", prompts: list[Prompt]) -> tuple[dict[str, Any], dict[str, float]]:
    """The best monitor, and each candidate's AUROC at the third token of a lie."""
    half = len(prompts) // 2
    read = Read("resid_post", layers=LAYERS, tokens="generated")
    fitted = [e for e in speak(llm, prompts[:half], scope(read)) if e.false is not None]
    labels = [each.false for each in fitted for _ in range(each.end)]
    candidates: dict[str, dict[str, Any]] = {}
    for layer in LAYERS:
        stream = ("resid_post", layer)
        rows = torch.cat([each.output.scope[stream][: each.end] for each in fitted])
        probe = train_probe(rows, labels, stream, c=EVERY_TOKEN_C)
        for name, aggregate in AGGREGATES.items():
            candidates[f"{layer}-{name}"] = {
                "weight": probe.weight.tolist(), "bias": probe.bias, "layers": [layer],
                "tokens": "generated", "aggregate": aggregate, "threshold": 1e30,
            }  # fmt: skip
    set_monitors(llm, candidates)
    heard = [e for e in speak(llm, prompts[half:]) if e.false is not None]
    truth = [each.false for each in heard]
    third = {name: auroc_at_third(heard, name) for name in candidates}
    highest = {name: [each.values(name).max() for each in heard] for name in candidates}
    # The AUROC of the highest values is added, because a verdict depends on the highest value.
    best = max(third, key=lambda n: third[n] + roc_auc_score(truth, highest[n]))
    wrong, right, values = roc_curve(truth, highest[best], drop_intermediate=False)
    cut = np.argmax(right - wrong)
    return candidates[best] | {"threshold": float(values[cut : cut + 2].mean())}, third


def auroc_at_third(spoken: list[Said], monitor: str = "lie") -> float:
    """How well the monitor's value at a statement's third token separates false statements from
    true statements, as AUROC."""
    heard = [each for each in spoken if each.false is not None]
    return roc_auc_score([e.false for e in heard], [e.values(monitor)[THIRD] for e in heard])


def strips_of(spoken: list[Said], action: str, threshold: float) -> dict[str, list[TokenStrip]]:
    """Heading -> the answers of the first speakers of one kind."""
    kinds = {
        "Lying": [each for each in spoken if each.lying],
        "Honest": [each for each in spoken if not each.lying],
    }
    return {
        f"{name} speakers, {action}": [each.strip(threshold) for each in kind[:NUM_SHOWN]]
        for name, kind in kinds.items()
    }


def main() -> None:
    set_environment()
    with step("Starting vLLM, fitting probes, comparing monitors"):
        llm = start_engine()
        monitor, aurocs = choose(llm, lying_prompts(NUM_TRAIN))
    table = Table("layer", *AGGREGATES, title="Training: AUROC at the third token of a lie")
    for i in LAYERS:
        table.add_row(str(i), *(f"{aurocs[f'{i}-{name}']:.3f}" for name in AGGREGATES))
    console.print(table)
    print(f"Layer {monitor['layers'][0]}, {monitor['aggregate']}, above {monitor['threshold']:.2f}")
    test, strips = lying_prompts(NUM_TEST, split="test"), {}
    OUTPUT.mkdir(exist_ok=True)
    for action in ("flag", "stop"):
        set_monitors(llm, {"lie": monitor | {"action": action}})
        spoken = speak(llm, test)
        strips |= strips_of(spoken, action, monitor["threshold"])
        flagged = [each for each in spoken if each.output.scope.verdicts]
        right = sum(each.lying for each in flagged)
        print(f"{action}: {right} of {NUM_TEST // 2} lying speakers, {len(flagged) - right} honest")
        print(f"  verdicts at the colon: {sum(each.flagged_at == 0 for each in flagged)}")
        print(f"  lies that were said: {sum(each.false is True for each in spoken)}")
        if action == "flag":
            print(f"  AUROC at the third token of a lie: {auroc_at_third(spoken):.3f}")
            honest, lying = (
                [e.values()[: e.end] for e in spoken if e.false is f] for f in (False, True)
            )
            write_monitor_figure(OUTPUT / "monitor.png", honest, lying, monitor["threshold"])
        else:
            print(f"  ended one token after the verdict: {sum(e.is_stopped for e in flagged)}")
    write_monitor_page(OUTPUT / "monitor.html", strips)


if __name__ == "__main__":
    main()
