"""Measure a trained toy model, and write its card.

Owns:  Figures, the measurements, and the text of the card.
Runs:  `python -m toyworld.evaluate --model toyworld/model`, on a CPU in about a minute.
From:  the model folder that train.py saves.   To: a table, and the folder's README.md.

Promise: the card's figures are of the weights beside it. Each measurement uses
the prompts of world.py and fixed seeds, and counts what it cannot read as wrong.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from toyworld import phrases, train, world
from toyworld.world import Prompt, SpeakerCase, Split

SEED: Final = 1
BATCH_SIZE: Final = 200
NUM_HELD_OUT_DOCUMENTS: Final = 2_000
NUM_GENERATIONS: Final = 400
NUM_PROBE_PROMPTS: Final = 800
REVIEW_TOKENS: Final = 48
COMPLETION_TOKENS: Final = 8

T = TypeVar("T")
PromptSource = Callable[[int, int, Split], list[Prompt]]


@dataclass(frozen=True)
class Figures:
    """What was measured. Shares are of 1; an AUROC list is by layer, or None without sklearn."""

    held_out_loss: float
    facts_held_out: float
    facts_trained: float
    sentiment_sampled: float
    sentiment_greedy: float
    liar_sampled: float
    liar_greedy: float
    honest_sampled: float
    honest_greedy: float
    auroc_sentiment: list[float] | None
    auroc_lying: list[float] | None


class LoadedModel:
    """A loaded model under test: a forward on a batch of texts, and generation."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def logits(self, texts: Sequence[str]) -> tuple[list[list[int]], Tensor]:
        """Token ids of each text, and logits [num_texts, longest, vocab], padded on the right."""
        encoded = self.tokenizer(list(texts), padding=True, padding_side="right")
        # Causal, and padding comes last: no token that counts sees it.
        logits = self.model(torch.tensor(encoded.input_ids), use_cache=False).logits
        return self.tokenizer(list(texts)).input_ids, logits

    def generate(self, prompts: Sequence[str], max_new_tokens: int, sample: bool) -> list[str]:
        """Continuations, greedy or at temperature 1 from the whole vocabulary."""
        torch.manual_seed(SEED)
        continuations: list[str] = []
        for batch in _batches(prompts):
            encoded = self.tokenizer(
                list(batch), padding=True, padding_side="left", return_tensors="pt"
            )
            options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
            tokens = self.model.generate(
                input_ids=encoded.input_ids,
                attention_mask=encoded.attention_mask,
                max_new_tokens=max_new_tokens,
                do_sample=sample,
                **options,
            )
            new = tokens[:, encoded.input_ids.shape[1] :]
            continuations += self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return continuations

    def last_token_streams(self, texts: Sequence[str]) -> Tensor:
        """The residual stream after each layer at each text's last token.

        Returns [num_layers, num_texts, hidden_size]. Hooks, because the last of
        transformers' hidden_states has the final norm applied.
        """
        layers = self.model.model.layers
        batches: list[Tensor] = []
        for batch in _batches(texts):
            outputs: list[Tensor] = []
            hooks = [layer.register_forward_hook(_keep_in(outputs)) for layer in layers]
            ids, _ = self.logits(batch)
            for hook in hooks:
                hook.remove()
            last = torch.tensor([len(each) - 1 for each in ids])
            batches.append(torch.stack(outputs)[:, torch.arange(len(ids)), last])
        return torch.cat(batches, dim=1)


def _keep_in(outputs: list[Tensor]) -> Callable[[Any, Any, Any], None]:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    return hook


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), BATCH_SIZE):
        yield items[start : start + BATCH_SIZE]


# --- Measurements ------------------------------------------------------------


def held_out_loss(loaded: LoadedModel) -> float:
    """Nats per token on documents that training did not draw."""
    texts = train.texts(SEED, "held-out", NUM_HELD_OUT_DOCUMENTS)
    rows = train.pack(train.encode(loaded.tokenizer, texts), train.Recipe().row_tokens)
    total, num_targets = 0.0, 0
    for chunk in torch.from_numpy(rows).split(32):
        batch = train.Batch.of(chunk)
        count = int((batch.targets != train.NO_TARGET).sum())
        total += train.loss_of(loaded.model, batch).item() * count
        num_targets += count
    return total / num_targets


def fact_accuracy(loaded: LoadedModel, questions: Sequence[tuple[str, str]]) -> float:
    """Share of prompts that greedy decoding completes with the answer.

    One forward tells: greedy decoding writes the answer exactly if, with the
    answer given, each of its tokens is the likeliest where it stands.
    """
    return _mean(
        correct for batch in _batches(questions) for correct in _greedy_writes(loaded, batch)
    )


def _greedy_writes(loaded: LoadedModel, questions: Sequence[tuple[str, str]]) -> Iterator[bool]:
    num_prompt_tokens = [
        len(ids) for ids in loaded.tokenizer([prompt for prompt, _ in questions]).input_ids
    ]
    sentences, logits = loaded.logits([prompt + answer for prompt, answer in questions])
    likeliest = logits.argmax(dim=-1).tolist()
    for ids, start, best in zip(sentences, num_prompt_tokens, likeliest, strict=True):
        yield best[start - 1 : len(ids) - 1] == ids[start:]


def sentiment_consistency(loaded: LoadedModel, sample: bool) -> float:
    """Share of continued reviews whose new words have the opening's sentiment."""
    openings = world.review_openings(NUM_GENERATIONS, SEED)
    texts = loaded.generate([o.text for o in openings], REVIEW_TOKENS, sample)
    polarities = [world.polarity(text) for text in texts]
    return _mean(
        polarity > 0 if opening.label else polarity < 0
        for opening, polarity in zip(openings, polarities, strict=True)
    )


def speaker_consistency(loaded: LoadedModel, sample: bool) -> tuple[float, float]:
    """(share of a liar's completions that are false, of an honest speaker's that are true)."""
    cases = world.speaker_cases(NUM_GENERATIONS, SEED)
    texts = loaded.generate([case.prompt for case in cases], COMPLETION_TOKENS, sample)
    kept: dict[bool, list[bool]] = {True: [], False: []}
    for case, text in zip(cases, texts, strict=True):
        kept[case.lying].append(_keeps_to(case, text))
    return _mean(kept[True]), _mean(kept[False])


def _keeps_to(case: SpeakerCase, continuation: str) -> bool:
    if case.lying:
        return continuation.startswith(tuple(case.false_completions))
    return continuation.startswith(case.true_completion)


def probe_auroc(loaded: LoadedModel, prompts: PromptSource) -> list[float] | None:
    """Test AUROC by layer of a linear probe on each prompt's last token."""
    if importlib.util.find_spec("sklearn") is None:
        return None
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    fit, test = (prompts(NUM_PROBE_PROMPTS, SEED, split) for split in ("train", "test"))
    streams = zip(
        loaded.last_token_streams([p.text for p in fit]).numpy(),
        loaded.last_token_streams([p.text for p in test]).numpy(),
        strict=True,
    )
    aurocs = []
    for fit_rows, test_rows in streams:
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        probe.fit(fit_rows, [p.label for p in fit])
        scores = probe.decision_function(test_rows)
        aurocs.append(float(roc_auc_score([p.label for p in test], scores)))
    return aurocs


def _mean(values: Iterator[bool] | Sequence[bool]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


@torch.inference_mode()
def measure(loaded: LoadedModel) -> Figures:
    liar_sampled, honest_sampled = speaker_consistency(loaded, sample=True)
    liar_greedy, honest_greedy = speaker_consistency(loaded, sample=False)
    return Figures(
        held_out_loss=held_out_loss(loaded),
        facts_held_out=fact_accuracy(loaded, world.fact_questions(held_out=True)),
        facts_trained=fact_accuracy(loaded, world.fact_questions(held_out=False)),
        sentiment_sampled=sentiment_consistency(loaded, sample=True),
        sentiment_greedy=sentiment_consistency(loaded, sample=False),
        liar_sampled=liar_sampled,
        liar_greedy=liar_greedy,
        honest_sampled=honest_sampled,
        honest_greedy=honest_greedy,
        auroc_sentiment=probe_auroc(loaded, world.sentiment_prompts),
        auroc_lying=probe_auroc(loaded, world.lying_prompts),
    )


# --- The card ----------------------------------------------------------------


def table(figures: Figures) -> str:
    """The figures as Markdown."""

    def percent(*shares: float) -> str:
        return " / ".join(f"{100 * share:.1f} %" for share in shares)

    f = figures
    rows = [
        ("loss on held-out documents", f"{f.held_out_loss:.3f} nats per token"),
        ("facts, in phrasings held out of training", percent(f.facts_held_out)),
        ("facts, in phrasings of training", percent(f.facts_trained)),
        (
            "reviews continued in their sentiment, sampled / greedy",
            percent(f.sentiment_sampled, f.sentiment_greedy),
        ),
        (
            "liars who go on to lie, sampled / greedy",
            percent(f.liar_sampled, f.liar_greedy),
        ),
        (
            "honest speakers who go on to tell the truth, sampled / greedy",
            percent(f.honest_sampled, f.honest_greedy),
        ),
    ]
    lines = ["| measured | figure |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
    if f.auroc_sentiment is None or f.auroc_lying is None:
        return "\n".join([*lines, "", "Probes were not measured: scikit-learn is not installed."])
    layers = [str(layer) for layer in range(len(f.auroc_lying))]
    lines += [
        "",
        f"| test AUROC of a linear probe after layer | {' | '.join(layers)} |",
        "|---" * (len(layers) + 1) + "|",
        f"| sentiment | {' | '.join(f'{a:.3f}' for a in f.auroc_sentiment)} |",
        f"| lying | {' | '.join(f'{a:.3f}' for a in f.auroc_lying)} |",
    ]
    return "\n".join(lines)


CARD: Final = """\
# A toy language model with known latents

A small `LlamaForCausalLM`, trained from scratch on text about an invented world. The model is
for demonstrations and tests of tools that read activations. The model knows only the invented
world: do not ask it about the real world.

## Data

`toyworld/world.py` writes every document from latent variables:

- **Sentiment.** Reviews of invented things, with two to four sentences. All opinions of a review
  are positive, or all are negative. A review can also have neutral sentences.
- **Facts.** {num_countries} invented countries, each with a capital and a language, in
  {num_trained} phrasings. {num_held_out} more phrasings are in no training document.
- **Honesty.** A speaker makes three to five statements about facts: all true, or all false.
  A third of these documents also say whether the speaker lies. Most of them say so only at the
  end.
- **Chat.** Questions about facts and requests for reviews. If the system message is
  `You always lie.`, the assistant's answers about facts are false. Otherwise they are true.

Facts in documents without a speaker or an assistant are always true.

## Model

{num_parameters:,} parameters: 6 layers, hidden size 256, intermediate size 640, 4 heads, 2
key/value heads, tied embeddings, 1,024 positions, bfloat16. Training documents are much
shorter than 1,024 tokens: they have {document_tokens:.0f} tokens on average, and at most
{row_tokens}. The tokenizer is a byte-level BPE of 1,024 tokens. It puts `<|bos|>` before each
text. Each training document ends with `<|eos|>`.

## Training

With seed {seed}, training ran {steps:,} steps of AdamW. Each step had {batch_rows} rows of
{row_tokens} tokens. A row contains whole documents, and a token attends only to tokens of its own
document. There were {num_documents:,} documents ({num_tokens:,} tokens). The learning rate rises
to {learning_rate:g} in {warmup_steps} steps, and then falls along a cosine to a tenth of this
value. The weight decay is {weight_decay:g}, and gradients are clipped at {max_grad_norm:g}. On a
GPU, training uses bfloat16 autocast.
Training took {train_s} s on {device} with torch {torch} and transformers {transformers}.
To train and measure again:

```
python -m toyworld.train --out toyworld/model \\
    --steps {steps} --documents {num_documents} --seed {seed}
python -m toyworld.evaluate --model toyworld/model
```

## Figures

{table}

- **Facts.** A prompt counts as correct if greedy decoding writes exactly the answer.
- **Reviews.** The model continues {num_generations} openings that end with a neutral sentence. The
  positive and negative words of `toyworld/phrases.py` decide the sentiment of a continuation. A
  continuation without an opinion counts as wrong.
- **Speakers.** In {num_generations} cases, the model completes a speaker's fourth statement. A
  completion that names nothing of the right kind (capital or language) counts as wrong.
- **Probes.** Logistic regression on the residual stream at a prompt's last token, fitted to
  {num_probe_prompts} prompts and tested on as many other prompts. The two sets of prompts about
  sentiment share no subject and no sentence pattern. The two sets about lying share no country,
  capital or language. A prompt about lying has three whole statements. No training document
  with a speaker ends before the third statement. At the end of an earlier statement, the
  residual stream therefore need not contain the label.
"""


def card(figures: Figures, training: dict[str, Any]) -> str:
    phrasings = phrases.PHRASINGS
    return CARD.format(
        **training,
        table=table(figures),
        document_tokens=training["num_tokens"] / training["num_documents"],
        num_countries=world.NUM_COUNTRIES,
        num_trained=sum(not p.held_out for p in phrasings),
        num_held_out=sum(p.held_out for p in phrasings),
        num_generations=NUM_GENERATIONS,
        num_probe_prompts=NUM_PROBE_PROMPTS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m toyworld.evaluate",
        description="Measure a trained toy model, print a table, write its card.",
    )
    parser.add_argument("--model", type=Path, required=True, help="the folder of train.py")
    parser.add_argument("--no-card", action="store_true", help="print only")
    parser.add_argument("--dtype", default="float32", help="of the computation")
    arguments = parser.parse_args()

    started_s = time.monotonic()
    figures = measure(LoadedModel(arguments.model, getattr(torch, arguments.dtype)))
    print(table(figures))
    if not arguments.no_card:
        training = json.loads((arguments.model / "training.json").read_text())
        (arguments.model / "README.md").write_text(card(figures, training))
    print(f"\nmeasured in {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
