"""The store of the target's features: what it holds is the target's own forward, and losses do not notice it."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from vllm_domino.train import feature_store
from vllm_domino.train.data import Sample, pad_batch
from vllm_domino.train.feature_store import FeatureStore
from vllm_domino.train.recipe import DrafterRecipe
from vllm_domino.train.target_features import FrozenTarget
from vllm_domino.train.tasks import build_task

LAYERS, HIDDEN, VOCABULARY = (0, 1), 16, 60
SMALL = {
    "num_hidden_layers": 1,
    "block_size": 4,
    "gru_hidden_dim": 8,
    "emb_dim": 4,
    "target_layer_ids": LAYERS,
    "num_anchors": 4,
    "eagle_steps": 2,
}


def write_target(directory: Path, seed: int) -> str:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.5,  # features that differ from token to token
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return write_target(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture
def target(source) -> FrozenTarget:
    return frozen(source)


def frozen(source: str, layers: tuple[int, ...] = LAYERS) -> FrozenTarget:
    return FrozenTarget(source, layers, torch.float32, torch.device("cpu"))


def make_samples(count: int = 6, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    lengths = [rng.randrange(12, 30) for _ in range(count)]
    return [Sample(ids=tuple(rng.randrange(50) for _ in range(n)), prompt_length=4) for n in lengths]


def counting(target: FrozenTarget, monkeypatch) -> list[tuple[int, int]]:
    """Shapes of the batches that the target runs from now on."""
    shapes, run = [], target.features

    def features(token_ids, autocast=False):
        shapes.append(tuple(token_ids.shape))
        return run(token_ids, autocast)

    monkeypatch.setattr(target, "features", features)
    return shapes


@pytest.mark.parametrize(("autocast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_rows_are_those_of_transformers_own_forward(source, target, tmp_path, autocast, dtype):
    samples = make_samples()
    store = FeatureStore(tmp_path, target, samples, autocast)
    ids, _ = pad_batch([samples[4], samples[1]], pad=0)
    first = store.features([4, 1], ids)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    wanted = torch.cat((hidden[1], hidden[2]), dim=-1).to(dtype)
    assert first.dtype == dtype
    for row, index in enumerate((4, 1)):
        length = len(samples[index].ids)
        assert torch.equal(first[row, :length], wanted[row, :length])
        assert not first[row, length:].any()
    assert torch.equal(store.features([4, 1], ids), first)


def test_only_samples_that_are_missing_run_through_the_target(target, tmp_path, monkeypatch):
    samples = make_samples()
    shapes = counting(target, monkeypatch)
    store = FeatureStore(tmp_path, target, samples, autocast=False)

    def read(*indices):
        return store.features(list(indices), pad_batch([samples[index] for index in indices], pad=0)[0])

    longest = max(range(6), key=lambda index: len(samples[index].ids))
    others = [index for index in range(6) if index != longest]
    read(longest, others[0])
    assert shapes == [(2, len(samples[longest].ids))]
    mixed = read(longest, others[1], others[0], others[2])
    width = max(len(samples[others[1]].ids), len(samples[others[2]].ids))
    assert shapes[1:] == [(2, width)]
    # the rows of several calls land in the places of their samples
    for row, index in enumerate((longest, others[1], others[0], others[2])):
        alone = target.features(torch.tensor([samples[index].ids]))[0]
        assert torch.allclose(mixed[row, : len(alone)], alone, atol=1e-4)
    shapes.clear()
    read(*others[:3])
    assert shapes == []


def test_a_second_process_reads_what_the_first_one_wrote(source, target, tmp_path, monkeypatch):
    samples = make_samples()
    ids, _ = pad_batch(samples[:2], pad=0)
    first, second = (FeatureStore(tmp_path, frozen(source), samples, autocast=True) for _ in range(2))
    assert first.path == second.path
    written = first.features([0, 1], ids)
    shapes = counting(second.target, monkeypatch)
    assert torch.equal(second.features([0, 1], ids), written)
    assert torch.equal(FeatureStore(tmp_path, second.target, samples, True).features([0, 1], ids), written)
    assert shapes == []


def test_whatever_features_depend_on_has_a_store_of_its_own(source, target, tmp_path):
    samples = make_samples()
    other_target = frozen(write_target(tmp_path / "other", seed=1))
    stores = [
        FeatureStore(tmp_path, target, samples, True),
        FeatureStore(tmp_path, target, samples, False),
        FeatureStore(tmp_path, target, samples[:5], True),
        FeatureStore(tmp_path, target, make_samples(seed=1), True),
        FeatureStore(tmp_path, frozen(source, (1, 0)), samples, True),
        FeatureStore(tmp_path, other_target, samples, True),
    ]
    assert len({store.path for store in stores}) == len(stores)
    # where the response begins does not matter to the target
    moved = [Sample(ids=sample.ids, prompt_length=2) for sample in samples]
    assert FeatureStore(tmp_path, target, moved, True).path == stores[0].path


def test_rows_that_were_removed_are_made_again(target, tmp_path):
    samples = make_samples()
    ids, _ = pad_batch(samples[:2], pad=0)
    store = FeatureStore(tmp_path, target, samples, autocast=False)
    written = store.features([0, 1], ids)
    (store.path / "features").unlink()
    assert torch.equal(FeatureStore(tmp_path, target, samples, False).features([0, 1], ids), written)


def test_a_disk_with_too_little_room_is_refused(target, tmp_path, monkeypatch):
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda _path: usage)
    samples = make_samples() * 10**4  # 60,000 samples of 12 to 29 tokens, 64 bytes each
    gigabytes = sum(len(sample.ids) for sample in samples) * len(LAYERS) * HIDDEN * 2 / 1e9
    with pytest.raises(ValueError, match=rf"0\.0 GB free .* {gigabytes:.1f} GB more.*drop --features"):
        FeatureStore(tmp_path, target, samples, autocast=True)


def test_a_target_without_safetensors_is_refused(target, tmp_path):
    target.source = str(tmp_path)
    with pytest.raises(ValueError, match=r"no \*.safetensors.*drop --features"):
        FeatureStore(tmp_path / "store", target, make_samples(), autocast=True)


def losses_and_gradients(task, batches) -> list[torch.Tensor]:
    """Of every batch in turn: loss, hits and the sum of each gradient's values, as training computes them."""
    found = []
    for epoch, indices in batches:
        prepared = task.prepare(indices, epoch)
        task.module.zero_grad()
        autocast = task.recipe.precision == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            terms = task.loss(task.module, prepared, 0.5, prepared.weight_sum)
        terms.loss.backward()
        found += [terms.loss.detach(), terms.hits]
        found += [p.grad.clone() for p in task.module.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("method", ["domino", "dflash", "eagle3"])
def test_losses_and_gradients_with_a_store_are_those_without(source, tmp_path, method, precision):
    recipe = DrafterRecipe(**(SMALL | {"method": method, "precision": precision}))
    samples, target = make_samples(), frozen(source)
    batches = [(0, [0, 3]), (0, [2, 1]), (1, [0, 3]), (1, [2, 1])]  # other anchors in epoch 1

    def run(store):
        torch.manual_seed(0)
        return losses_and_gradients(build_task(recipe, target, 55, samples, 0, store), batches)

    without = run(None)
    store = FeatureStore(tmp_path, target, samples, autocast=precision == "bf16")
    filling, filled = run(store), run(store)
    assert len(without) == len(filling) == len(filled) > 8
    for plain, first, later in zip(without, filling, filled, strict=True):
        assert torch.equal(plain, first)
        assert torch.equal(plain, later)
