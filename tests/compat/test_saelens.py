"""SAELens trains on the rows of a harvest: from its cache of activations, and as a data provider.
What a worker makes of its SAEs is what SAELens makes.

make test-training         # SAELens itself reads the rows; elsewhere this is skipped
"""

from __future__ import annotations

from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch

import vllm_scope
from tests import recorded
from vllm_scope import Read
from vllm_scope.files import RowDataset, export_saelens
from vllm_scope.saes.load import load_sae
from vllm_scope.worker.held_saes import DeviceSae

pytest.importorskip("datasets")
pytest.importorskip("sae_lens")

SITE, LAYER, HOOK = "resid_post", 3, "blocks.3.hook_resid_post"
CONTEXT, WIDTH, BATCH = 8, recorded.WIDTH, 32


@pytest.fixture(scope="module")
def harvested(tmp_path_factory):
    """A packed harvest: contexts of 32 tokens and a shorter one."""
    out = tmp_path_factory.mktemp("rows")
    texts = [f"{i:03} " + "y" * (i % 29) for i in range(50)]
    reads = (Read(SITE, layers=[1, LAYER]),)
    recorded.harvest(texts, out, long="pack", context=32, reads=reads)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_cache_that_saelens_loads_has_the_rows_and_tokens_of_the_shards(
    dtype, harvested, tmp_path
):
    from sae_lens.training.activations_store import ActivationsStore

    capture = vllm_scope.open(harvested)
    count = export_saelens(capture, tmp_path / "cache", SITE, LAYER, HOOK, CONTEXT, dtype)
    store = ActivationsStore(
        model=SimpleNamespace(), dataset=None, streaming=False, hook_name=HOOK,
        hook_head_index=None, context_size=CONTEXT, d_in=WIDTH, n_batches_in_buffer=4,
        total_training_tokens=10**6, store_batch_size_prompts=1, train_batch_size_tokens=BATCH,
        prepend_bos=False, normalize_activations="none", device=torch.device("cpu"), dtype=dtype,
        cached_activations_path=str(tmp_path / "cache"),
    )  # fmt: skip
    batches = [store.get_raw_llm_batch() for _ in range(count)]
    whole = [len(r.token_ids) // CONTEXT * CONTEXT for r in capture]
    rows = [r[SITE, LAYER][:n] for r, n in zip(capture, whole, strict=True)]
    expected = torch.cat(rows).to(getattr(torch, dtype))
    assert torch.equal(torch.cat([found for found, _ in batches]), expected)
    tokens = torch.cat([r.token_ids[:n] for r, n in zip(capture, whole, strict=True)])
    assert torch.cat([ids for _, ids in batches]).tolist() == tokens.tolist()
    known = set(map(tuple, expected.tolist()))
    assert {tuple(row) for row in store.next_batch().tolist()} <= known


def trained(provider, folder):
    """The weights after some steps of SAELens's trainer."""
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(0)
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=WIDTH, d_sae=128, k=8))
    settings = SAETrainerConfig(
        total_training_samples=100 * BATCH, train_batch_size_samples=BATCH, device="cpu",
        n_checkpoints=0, checkpoint_path=str(folder), save_final_checkpoint=False, lr=1e-3,
        lr_end=1e-4, lr_scheduler_name="constant", lr_warm_up_steps=0, lr_decay_steps=0,
        n_restart_cycles=1, adam_beta1=0.9, adam_beta2=0.999, autocast=False,
        dead_feature_window=1000, feature_sampling_window=1000,
        logger=LoggingConfig(log_to_wandb=False),
    )  # fmt: skip
    seen = []

    def watched():
        for rows in provider:
            seen.append(rows.clone())
            yield rows

    found = SAETrainer(settings, sae, watched()).fit()
    return seen, {name: weight.clone() for name, weight in found.state_dict().items()}


def test_a_row_dataset_is_a_data_provider_of_saelens(harvested, tmp_path):
    """Epoch after epoch; the trainer learns what it learns from the same rows in memory."""
    dataset = RowDataset(harvested, SITE, LAYER, BATCH, seed=1)
    provider = (rows.float() for rows in chain.from_iterable(repeat(dataset)))
    seen, weights = trained(provider, tmp_path)
    capture = vllm_scope.open(harvested)
    rows = torch.cat([request[SITE, LAYER] for request in capture]).float()
    num_batches = -(-len(rows) // BATCH)
    assert len(seen) > 2 * num_batches
    for epoch in (seen[:num_batches], seen[num_batches : 2 * num_batches]):
        assert sorted(torch.cat(epoch).tolist()) == sorted(rows.tolist())
    again = trained(iter(list(seen)), tmp_path)[1]
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize(
    ("dtype", "fp8", "of_largest", "of_each", "agreeing"),
    [
        pytest.param(torch.float32, False, 1e-6, 2e-6, 1, id="float32"),
        pytest.param(torch.bfloat16, False, 2e-3, 2e-3, 0.99, id="bfloat16"),
        pytest.param(torch.float32, True, 0.015, 0.01, 0.97, id="fp8-of-float32"),
        pytest.param(torch.bfloat16, True, 0.015, 0.01, 0.97, id="fp8-of-bfloat16"),
    ],
)
def test_held_features_are_saelens_encode_in_float32(
    dtype, fp8, of_largest, of_each, agreeing, tmp_path
):
    """Rows are sums of 32 decoder rows and noise. The error of a value is at most `of_largest` of
    the row's largest feature, and its quadratic mean `of_each` of the value. Of the 32 strongest
    features at least the share `agreeing` are SAELens's."""
    from sae_lens.saes.jumprelu_sae import JumpReLUSAE, JumpReLUSAEConfig

    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    d_in, d_sae, count, num_rows = 1024, 4096, 32, 64
    sae = JumpReLUSAE(JumpReLUSAEConfig(d_in=d_in, d_sae=d_sae, dtype="float32", device="cpu"))
    decoder = random(d_sae, d_in)
    decoder /= decoder.norm(dim=1, keepdim=True)
    sae.load_state_dict({
        "W_dec": decoder, "W_enc": (decoder.T + random(d_in, d_sae) / 64).contiguous(),
        "b_dec": random(d_in) / 2, "b_enc": random(d_sae) / 8,
        "threshold": torch.full((d_sae,), 1.5),
    })  # fmt: skip
    sae.cfg.metadata.hook_name = HOOK
    sae.save_model(tmp_path)
    planted = torch.zeros(num_rows, d_sae)
    for row in planted:
        at = torch.randperm(d_sae, generator=generator)[:count]
        row[at] = 1 + 9 * torch.rand(count, generator=generator)
    rows = planted @ decoder + sae.b_dec.data + random(num_rows, d_in) / 10
    with torch.no_grad():
        exact = sae.encode(rows)
    packed = DeviceSae(load_sae(tmp_path), dtype, torch.device("cpu"), fp8).pack(
        rows.to(dtype), count
    )
    words = packed.view(torch.int32)[:, : 2 * count]
    indices, values = words[:, :count].long(), words[:, count:].view(torch.float32)
    same, best = exact.gather(1, indices), exact.topk(count)
    errors, large = (values - same).abs(), same > 1.6
    assert large.sum() > num_rows * count * 0.9
    assert (errors / best.values[:, :1])[large].max() <= of_largest
    assert (errors / same)[large].square().mean().sqrt() <= of_each
    shared = (indices[:, :, None] == best.indices[:, None, :]).any(2)
    assert shared.float().mean() >= agreeing
    # Which of the others are chosen is decided near the weakest of the strongest.
    weakest = best.values[:, -1:]
    assert ((same - weakest).abs() <= 2 * of_largest * best.values[:, :1])[~shared].all()
