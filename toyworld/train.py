"""Train the toy language model from scratch: tokenizer, packed rows, one loop.

Owns:  Recipe, the tokenizer with its chat template, packing, the training loop.
Runs:  `python -m toyworld.train --out toyworld/model`; a GPU takes minutes, a CPU hours.
From:  world.documents.   To: a model folder that transformers and vLLM load.

Promise: the text, the tokenizer and the order of the rows are functions of the
recipe alone. The weights follow them up to the device's rounding.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from toyworld import phrases, world

PAD: Final = "<|pad|>"
BOS: Final = "<|bos|>"
SPECIAL_TOKENS: Final = (
    PAD,
    BOS,
    phrases.EOS,
    phrases.SYSTEM_MARK,
    phrases.USER_MARK,
    phrases.ASSISTANT_MARK,
)
PAD_ID, BOS_ID, EOS_ID = range(3)  # their places in SPECIAL_TOKENS

VOCAB_SIZE: Final = 1024
MAX_POSITIONS: Final = 1024
TOKENIZER_DOCUMENTS: Final = 20_000
DOCUMENTS_PER_CHUNK: Final = 10_000
STEPS_PER_REPORT: Final = 50
NO_TARGET: Final = -100

# Renders what world.py writes in its chat documents.
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    f"{phrases.ASSISTANT_MARK}{{{{ message['content'] }}}}{{{{ eos_token }}}}"
    "{% elif message['role'] == 'system' %}"
    f"{phrases.SYSTEM_MARK}{{{{ message['content'] }}}}"
    "{% else %}"
    f"{phrases.USER_MARK}{{{{ message['content'] }}}}"
    "{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{phrases.ASSISTANT_MARK}{{% endif %}}"
)


@dataclass(frozen=True)
class Recipe:
    """All that decides the weights, but for the device."""

    seed: int = 0
    steps: int = 6_000
    num_documents: int = 1_500_000
    batch_rows: int = 128
    row_tokens: int = 256
    learning_rate: float = 1.5e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to a tenth of the peak."""
        warmup_steps = min(self.warmup_steps, self.steps // 10)
        if step < warmup_steps:
            return self.learning_rate * (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, self.steps - warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


# --- Text to rows ------------------------------------------------------------


def texts(seed: int, stream: world.Stream, count: int) -> Iterator[str]:
    """The texts of a stream's first `count` documents, in order, written on all cores."""
    starts = range(0, count, DOCUMENTS_PER_CHUNK)
    chunks = [(seed, stream, s, min(s + DOCUMENTS_PER_CHUNK, count)) for s in starts]
    if len(chunks) == 1:
        yield from _chunk(chunks[0])
        return
    with ProcessPoolExecutor() as pool:
        for chunk in pool.map(_chunk, chunks):
            yield from chunk


def _chunk(bounds: tuple[int, world.Stream, int, int]) -> list[str]:
    return [document.text for document in world.documents(*bounds)]


def tokenizer_texts(seed: int) -> Iterator[str]:
    """The first documents, with each review twice.

    Otherwise the names of facts take nearly all merges, and the words that carry
    a review's sentiment fall into pieces of a letter or two.
    """
    for document in world.documents(seed, "train", 0, TOKENIZER_DOCUMENTS):
        yield document.text
        if document.kind == "review":
            yield document.text


def build_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE. Encoding puts <|bos|> first, as every document in training has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=phrases.EOS,
        pad_token=PAD,
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def encode(tokenizer: PreTrainedTokenizerFast, corpus: Iterable[str]) -> Iterator[list[int]]:
    """Token ids of each document, from <|bos|> to <|eos|>."""
    remaining = iter(corpus)
    while chunk := list(islice(remaining, DOCUMENTS_PER_CHUNK)):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(chunk):
            yield [*encoding.ids, EOS_ID]


def pack(documents: Iterable[list[int]], row_tokens: int) -> NDArray[np.int16]:
    """Whole documents, in order, into rows [num_rows, row_tokens]; PAD_ID fills the rest.

    Raises:
        ValueError: a document is longer than a row.
    """
    rows: list[NDArray[np.int16]] = []
    row: list[int] = []

    def close() -> None:
        rows.append(np.array(row + [PAD_ID] * (row_tokens - len(row)), dtype=np.int16))

    for document in documents:
        if len(document) > row_tokens:
            raise ValueError(f"a document has {len(document)} tokens; a row holds {row_tokens}")
        if len(row) + len(document) > row_tokens:
            close()
            row = []
        row = row + document
    if row:
        close()
    return np.stack(rows)


@dataclass(frozen=True)
class Batch:
    """Packed rows as the model takes them. A document sees itself only."""

    input_ids: Tensor  # [num_rows, row_tokens] int64
    targets: Tensor  # the same shape: the next token of the same document, or NO_TARGET
    position_ids: Tensor  # the same shape; 0 at each document's <|bos|>
    attention_mask: Tensor  # [num_rows, 1, row_tokens, row_tokens] bool; True is seen

    @classmethod
    def of(cls, rows: Tensor) -> "Batch":
        input_ids = rows.long()
        row_tokens = input_ids.shape[1]
        index = torch.arange(row_tokens, device=rows.device)
        is_first = input_ids == BOS_ID
        document = is_first.cumsum(dim=1)
        position_ids = index - torch.where(is_first, index, 0).cummax(dim=1).values
        same = document[:, :, None] == document[:, None, :]
        causal = index[:, None] >= index[None, :]
        targets = input_ids.roll(-1, dims=1)
        targets[:, -1] = PAD_ID
        targets = targets.masked_fill((targets == PAD_ID) | (targets == BOS_ID), NO_TARGET)
        return cls(input_ids, targets, position_ids, (same & causal)[:, None])


# --- Model and loop ----------------------------------------------------------


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats per target token."""
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
    ).logits
    return functional.cross_entropy(
        logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=NO_TARGET
    )


def train(rows: NDArray[np.int16], recipe: Recipe, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    model = build_model()
    torch.nn.Module.to(model, device).train()
    optimizer = _optimizer(model, recipe)
    on_gpu = device.type == "cuda"
    progress = tqdm(_batches(rows, recipe, device), total=recipe.steps, unit="step")
    for step, batch in enumerate(progress):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Reading the loss waits for the GPU, so not on each step.
        if step % STEPS_PER_REPORT == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}")
    model.eval()
    return model


def _optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay on matrices only: it would pull the norms' gains from one."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))


def _batches(rows: NDArray[np.int16], recipe: Recipe, device: torch.device) -> Iterator[Batch]:
    """`recipe.steps` batches, through the rows in a new order each time."""
    on_device = torch.from_numpy(rows).to(device)
    rng = np.random.default_rng(recipe.seed)
    order = np.empty(0, dtype=np.int64)
    for _ in range(recipe.steps):
        while len(order) < recipe.batch_rows:
            order = np.concatenate([order, rng.permutation(len(rows))])
        chosen, order = order[: recipe.batch_rows], order[recipe.batch_rows :]
        yield Batch.of(on_device[torch.from_numpy(chosen).to(device)])


def save(
    out: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    training: dict[str, object],
) -> None:
    """The model folder. `training.json` is what evaluate.py's card tells of this run."""
    model.bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it is written for its owner only
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(training, indent=2) + "\n")


# --- Command line ------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    defaults = Recipe()
    parser = argparse.ArgumentParser(prog="python -m toyworld.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--documents", type=int, default=defaults.num_documents)
    parser.add_argument("--batch-rows", type=int, default=defaults.batch_rows)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    device = torch.device(arguments.device)
    recipe = Recipe(
        seed=arguments.seed,
        steps=arguments.steps,
        num_documents=arguments.documents,
        batch_rows=arguments.batch_rows,
        learning_rate=arguments.learning_rate,
    )
    # The encoder's threads start after the last fork that wrote text for it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    started_s = time.monotonic()
    corpus = list(texts(recipe.seed, "train", recipe.num_documents))
    tokenizer = build_tokenizer(tokenizer_texts(recipe.seed))
    documents = tqdm(encode(tokenizer, corpus), total=len(corpus), unit="document")
    rows = pack(documents, recipe.row_tokens)
    num_tokens = int((rows != PAD_ID).sum())
    print(f"{len(rows):,} rows, {num_tokens:,} tokens in {time.monotonic() - started_s:.0f} s")

    started_s = time.monotonic()
    model = train(rows, recipe, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    training = {
        **asdict(recipe),
        "num_tokens": num_tokens,
        "num_parameters": model.num_parameters(),
        "train_s": round(time.monotonic() - started_s),
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    save(arguments.out, model, tokenizer, training)
    print(f"wrote {arguments.out} after {training['train_s']} s of training on {name}")


if __name__ == "__main__":
    main()
