"""The draft step against the reference model: same drafts through pages, windows and slices as on plain tensors."""

import pytest
import torch
from small_drafters import small_config

from vllm_domino.model.drafter import Drafter
from vllm_domino.runtime import draft_step
from vllm_domino.runtime.draft_step import DraftStep
from vllm_domino.runtime.torch_session import TorchSession

PAGE = 8


@pytest.fixture(scope="module")
def drafter():
    torch.manual_seed(0)
    config = small_config(vocab_size=61, block_size=6, mask_token_id=60, emb_dim=8, gru_hidden_dim=12)
    model = Drafter(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.requires_grad_(False)


def _requests(drafter, lengths):
    """Per request: features, scattered pages, anchor; and the embedding that serves as LM head too."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(61, 32, generator=generator)
    pages = (
        torch.randperm(64, generator=generator)[: len(lengths) * 8].view(len(lengths), 8).to(torch.int32) + 1
    )
    features = [torch.randn(n, drafter.config.feature_size, generator=generator) for n in lengths]
    anchors = torch.randint(0, 60, (len(lengths),), generator=generator)
    return embedding, pages, features, anchors


def _step(drafter, embedding, *, window=64, max_requests=4):
    session = TorchSession(drafter, torch.device("cpu"), torch.float32)
    session.bind_target(embedding, embedding)
    step = DraftStep(
        session, max_requests=max_requests, max_rows=64, draft_window=window, device=torch.device("cpu")
    )
    step.attach_cache(torch.zeros(65, PAGE, step.row_size))
    return step


def _slots(pages, positions):
    return pages[positions // PAGE].long() * PAGE + positions % PAGE


def _reference(drafter, features, anchor, embedding, window):
    rows = drafter.context_kv(features, torch.arange(len(features)))[-window:]
    return drafter.draft(
        anchor.view(1),
        torch.tensor([len(features)]),
        rows.unsqueeze(0),
        torch.tensor([len(rows)]),
        embedding,
        embedding,
    )[0][0]


@pytest.mark.parametrize("window", [64, 16])
@pytest.mark.parametrize("gather_rows", [16_384, 64])
def test_drafts_equal_the_reference(drafter, monkeypatch, window, gather_rows):
    monkeypatch.setattr(draft_step, "GATHER_ROWS", gather_rows)
    lengths = [1, 17, 40, 64]
    embedding, pages, features, anchors = _requests(drafter, lengths)
    step = _step(drafter, embedding, window=window)
    for table, rows in zip(pages, features, strict=True):
        positions = torch.arange(len(rows))
        step.store_context(rows, positions, _slots(table, positions))
    got = step.draft(anchors, torch.tensor(lengths), pages, max(lengths))
    for index, rows in enumerate(features):
        want = _reference(drafter, rows, anchors[index], embedding, window)
        assert got[index].tolist() == want.tolist()


def test_buffers_on_a_cpu_are_bounded_in_bytes(drafter, monkeypatch):
    """However large the batch; but one request's whole window always has room."""
    embedding, *_ = _requests(drafter, [20])
    row_bytes = 4 * _step(drafter, embedding).row_size
    for limit, rows in ((100 * row_bytes, 100), (10 * row_bytes, 64)):
        monkeypatch.setattr(draft_step, "CPU_GATHER_BYTES", limit)
        step = _step(drafter, embedding, max_requests=32)
        assert len(step._gathered) == rows


def test_rejected_rows_are_not_written(drafter):
    embedding, pages, features, anchors = _requests(drafter, [20])
    step = _step(drafter, embedding)
    positions = torch.arange(20)
    step.store_context(features[0], positions, _slots(pages[0], positions))
    before = step.draft(anchors, torch.tensor([20]), pages, 20).clone()
    noise = torch.randn_like(features[0])
    step.store_context(noise, torch.zeros(20, dtype=torch.int64), torch.full((20,), -1))
    assert step.draft(anchors, torch.tensor([20]), pages, 20).tolist() == before.tolist()


def test_pages_of_other_requests_do_not_matter(drafter):
    """A request's drafts stay the same whoever shares the batch and whatever is left in unused pages."""
    embedding, pages, features, anchors = _requests(drafter, [30, 12])
    step = _step(drafter, embedding)
    step._cache.fill_(7.0)
    for table, rows in zip(pages, features, strict=True):
        positions = torch.arange(len(rows))
        step.store_context(rows, positions, _slots(table, positions))
    both = step.draft(anchors, torch.tensor([30, 12]), pages, 30).clone()
    alone = step.draft(anchors[1:], torch.tensor([12]), pages[1:], 12)
    assert alone[0].tolist() == both[1].tolist()


class _BucketedSession(TorchSession):
    """The reference model, which accepts only the sizes that an engine was built for."""

    batch_buckets = (1, 2, 4)
    context_buckets = (16, 64)

    def draft(self, anchor_ids, anchor_positions, context_kv, context_lengths, out):
        assert anchor_ids.shape[0] in self.batch_buckets
        assert context_kv.shape[1] in self.context_buckets
        super().draft(anchor_ids, anchor_positions, context_kv, context_lengths, out)


@pytest.mark.parametrize("gather_rows", [16_384, 192])
@pytest.mark.parametrize("requests", [3, 7])
def test_only_sizes_of_the_buckets_reach_the_session(drafter, monkeypatch, gather_rows, requests):
    """Padding to a bucket changes no draft, also where the gather buffer holds less than the next bucket; a batch above
    the largest bucket goes through in slices.
    """
    monkeypatch.setattr(draft_step, "GATHER_ROWS", gather_rows)
    lengths = [9, 40, 64, 1, 33, 50, 17][:requests]
    embedding, pages, features, anchors = _requests(drafter, lengths)
    session = _BucketedSession(drafter, torch.device("cpu"), torch.float32)
    session.bind_target(embedding, embedding)
    step = DraftStep(session, max_requests=requests, max_rows=64, draft_window=64, device=torch.device("cpu"))
    step.attach_cache(torch.zeros(65, PAGE, step.row_size))
    for table, rows in zip(pages, features, strict=True):
        positions = torch.arange(len(rows))
        step.store_context(rows, positions, _slots(table, positions))
    got = step.draft(anchors, torch.tensor(lengths), pages, max(lengths))
    for index, rows in enumerate(features):
        assert got[index].tolist() == _reference(drafter, rows, anchors[index], embedding, window=64).tolist()
