"""The reference model against the paper's formulas, written out here in numpy, and against `torch.nn.GRU`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_drafters import random_weights, small_config

from vllm_domino.config.draft import DraftConfig
from vllm_domino.model.drafter import Drafter, HeadOptions


def _drafter(
    config: DraftConfig, options: HeadOptions | None = None
) -> tuple[Drafter, dict[str, np.ndarray]]:
    weights = random_weights(config)
    drafter = Drafter(config, options)
    for name, parameter in drafter.public_parameters().items():
        parameter.data = weights[name]
    return drafter.requires_grad_(False), {n: t.double().numpy() for n, t in weights.items()}


def _rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def _silu(x):
    return x / (1 + np.exp(-x))


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _rotate(x, position, theta):
    """One head vector x [D]; pair (i, i + D/2) turns by position * theta^(-2i/D)."""
    half = len(x) // 2
    angle = position * theta ** (-2 * np.arange(half) / len(x))
    first, second = x[:half], x[half:]
    return np.concatenate(
        (first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle))
    )


def _context_row(w, config, features, position):
    """Keys and values [L, 2, Hkv, D] of one context token: no input norm, the same vector for every layer."""
    x = _rms(w["fc.weight"] @ features, w["hidden_norm.weight"])
    rows = np.zeros(config.context_row_shape)
    for i in range(config.num_hidden_layers):
        p = f"layers.{i}.self_attn."
        k = (w[p + "k_proj.weight"] @ x).reshape(config.num_key_value_heads, -1)
        rows[i, 0] = [_rotate(_rms(h, w[p + "k_norm.weight"]), position, config.rope_theta) for h in k]
        rows[i, 1] = (w[p + "v_proj.weight"] @ x).reshape(config.num_key_value_heads, -1)
    return rows


def _block(w, config, anchor, position, context, embedding):
    """Hidden states [T, H] of one request; every slot sees the whole context and the whole block."""
    x = np.stack([embedding[anchor]] + [embedding[config.mask_token_id]] * (config.block_size - 1))
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for i in range(config.num_hidden_layers):
        p = f"layers.{i}."
        h = _rms(x, w[p + "input_layernorm.weight"])
        a = p + "self_attn."
        q = (h @ w[a + "q_proj.weight"].T).reshape(-1, heads, size)
        k = (h @ w[a + "k_proj.weight"].T).reshape(-1, kv_heads, size)
        v = (h @ w[a + "v_proj.weight"].T).reshape(-1, kv_heads, size)
        out = np.zeros_like(q)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            own = [
                _rotate(_rms(k[t, kv], w[a + "k_norm.weight"]), position + t, config.rope_theta)
                for t in range(len(k))
            ]
            keys = np.concatenate((context[:, i, 0, kv], np.stack(own)))
            values = np.concatenate((context[:, i, 1, kv], v[:, kv]))
            for t in range(len(q)):
                query = _rotate(_rms(q[t, head], w[a + "q_norm.weight"]), position + t, config.rope_theta)
                scores = keys @ query / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights / weights.sum() @ values
        x = x + out.reshape(len(x), -1) @ w[a + "o_proj.weight"].T
        h = _rms(x, w[p + "post_attention_layernorm.weight"])
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (_silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return _rms(x, w["norm.weight"])


def _drafts(w, config, hidden, anchor, embedding, lm_head):
    """Greedy drafts: base logits, plus the correction from draft `pure_draft_prefix_len` on."""
    hidden = hidden if config.shift_label else hidden[1:]
    state, token, drafts = np.zeros(config.gru_hidden_dim), anchor, []
    for i in range(len(hidden)):
        gx = np.split(w["prefix_gru.weight_ih_l0"] @ embedding[token], 3)
        gh = np.split(w["prefix_gru.weight_hh_l0"] @ state, 3)
        reset, update = _sigmoid(gx[0] + gh[0]), _sigmoid(gx[1] + gh[1])
        state = (1 - update) * np.tanh(gx[2] + reset * gh[2]) + update * state
        logits = lm_head @ hidden[i]
        if i >= config.pure_draft_prefix_len:
            code = _silu(w["embed_proj.0.weight"] @ np.concatenate((hidden[i], state)))
            logits = logits + w["embed_proj.2.weight"] @ code
        token = int(logits.argmax())
        drafts.append(token)
    return drafts


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_formulas_by_hand(shift_label, prefix):
    config = small_config(shift_label=shift_label, pure_draft_prefix_len=prefix)
    drafter, w = _drafter(config)
    rng = np.random.default_rng(3)
    embedding, lm_head = rng.normal(size=(97, 32)), rng.normal(size=(97, 32)) * 0.3
    tables = torch.from_numpy(embedding).float(), torch.from_numpy(lm_head).float()
    for anchor, length in ((5, 0), (17, 1), (60, 9)):
        features = rng.normal(size=(length, config.feature_size))
        positions = rng.permutation(40)[:length]
        rows = np.zeros((length, *config.context_row_shape))
        for j in range(length):
            rows[j] = _context_row(w, config, features[j], positions[j])
        got = drafter.context_kv(torch.from_numpy(features).float(), torch.from_numpy(positions))
        np.testing.assert_allclose(got.numpy(), rows, atol=2e-5)
        case = (torch.tensor([anchor]), torch.tensor([40]), got.unsqueeze(0), torch.tensor([length]))
        hidden = _block(w, config, anchor, 40, rows, embedding)
        np.testing.assert_allclose(
            drafter.block_hidden(*case, tables[0])[0].numpy(),
            hidden if shift_label else hidden[1:],
            atol=5e-4,
        )
        assert drafter.draft(*case, *tables)[0][0].tolist() == _drafts(
            w, config, hidden, anchor, embedding, lm_head
        )


def test_gru_cell_is_torch_gru():
    drafter, _ = _drafter(small_config())
    head = drafter.head
    x = torch.randn(3, 6, 32)
    expected, _ = head.prefix_gru(x)  # torch.nn.GRU itself
    state = head.first_gru_step(x[:, 0])
    torch.testing.assert_close(state, expected[:, 0], atol=1e-6, rtol=1e-5)
    for i in range(1, 6):
        state = head.gru_cell(x[:, i], state)
        torch.testing.assert_close(state, expected[:, i], atol=1e-6, rtol=1e-5)


def _random_case(config, batch, context, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(97, (batch,), generator=g),
        torch.full((batch,), 100),
        torch.randn(batch, context, *config.context_row_shape, generator=g),
        torch.randint(context + 1, (batch,), generator=g),
    )


def test_rows_past_the_length_are_never_read():
    config = small_config()
    drafter, _ = _drafter(config)
    anchors, positions, context, lengths = _random_case(config, 4, 12)
    tables = torch.randn(97, 32), torch.randn(97, 32)
    before = drafter.draft(anchors, positions, context, lengths, *tables)[0]
    garbage = context.clone()
    for row, length in enumerate(lengths.tolist()):
        garbage[row, length:] = 1e4
    assert torch.equal(drafter.draft(anchors, positions, garbage, lengths, *tables)[0], before)


def test_requests_of_a_batch_do_not_see_each_other():
    config = small_config()
    drafter, _ = _drafter(config)
    case = _random_case(config, 5, 8)
    tables = torch.randn(97, 32), torch.randn(97, 32)
    together = drafter.block_hidden(*case, tables[0])
    for row in range(5):
        alone = drafter.block_hidden(*(t[row : row + 1] for t in case), tables[0])
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)


def test_order_of_context_rows_does_not_matter():
    config = small_config()
    drafter, _ = _drafter(config)
    anchors, positions, context, _ = _random_case(config, 2, 10)
    lengths, embedding = torch.tensor([10, 10]), torch.randn(97, 32)
    turned = context[:, torch.randperm(10)]
    torch.testing.assert_close(
        drafter.block_hidden(anchors, positions, context, lengths, embedding),
        drafter.block_hidden(anchors, positions, turned, lengths, embedding),
        atol=1e-5,
        rtol=1e-5,
    )


def test_a_pool_of_the_whole_vocabulary_changes_nothing():
    config = small_config()
    full, pool = _drafter(config)[0], _drafter(config, HeadOptions(candidate_pool=97))[0]
    case, tables = _random_case(config, 6, 7), (torch.randn(97, 32), torch.randn(97, 32))
    assert torch.equal(full.draft(*case, *tables)[0], pool.draft(*case, *tables)[0])


def test_scores_are_probabilities_of_the_drafts():
    config = small_config()
    drafter, _ = _drafter(config, HeadOptions(scores=True))
    case, tables = _random_case(config, 3, 7), (torch.randn(97, 32), torch.randn(97, 32) * 0.1)
    ids, probs = drafter.draft(*case, *tables)
    hidden = drafter.block_hidden(*case, tables[0])
    before = torch.cat((case[0][:, None], ids[:, :-1]), dim=1)
    correction = drafter.head(hidden, tables[0][before])
    correction[:, :1] = 0
    expected = torch.softmax(hidden @ tables[1].T + correction, -1).gather(2, ids[..., None])[..., 0]
    torch.testing.assert_close(probs, expected, atol=1e-5, rtol=1e-4)
