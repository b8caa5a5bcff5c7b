"""The frozen target as training sees it: hidden states of chosen layers, the embedding and the LM head."""

from __future__ import annotations

import torch
from torch import Tensor


class FrozenTarget:
    """A Transformers causal LM that gives features and never a gradient.

    Args:
        source: directory or Hugging Face id.
        layer_ids: decoder layers whose output is read (entry i + 1 of Transformers' `hidden_states`).
    """

    def __init__(self, source: str, layer_ids: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
        self.model.requires_grad_(False)
        self.source, self.layer_ids, self.device, self.dtype = source, layer_ids, device, dtype
        self.embedding: Tensor = self.model.get_input_embeddings().weight  # [V, H]
        self.lm_head: Tensor = self.model.get_output_embeddings().weight  # [V, H]

    @property
    def stop_ids(self) -> list[int]:
        """Token ids that end an answer."""
        stop = self.model.generation_config.eos_token_id
        return stop if isinstance(stop, list) else [] if stop is None else [stop]

    @torch.inference_mode()
    def _hidden_states(self, token_ids: Tensor, autocast: bool) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast):
            out = self.model.base_model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[i + 1] for i in self.layer_ids], dim=-1), out.last_hidden_state

    def features(self, token_ids: Tensor, autocast: bool = False) -> Tensor:
        """[B, T] int64 (padded at the end) -> [B, T, F*H]; padding follows every token, so causality masks
        it.
        """
        return self._hidden_states(token_ids, autocast)[0].clone()

    def features_and_last(self, token_ids: Tensor, autocast: bool = False) -> tuple[Tensor, Tensor]:
        """Features as above, and the last hidden state after the final norm, [B, T, H] (input of the LM
        head).
        """
        features, last = self._hidden_states(token_ids, autocast)
        return features.clone(), last.clone()
