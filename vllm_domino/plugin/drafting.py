"""What both runners share: the session, its checks, the context layer, and the rule that a draft never kills a step."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger

from vllm_domino.config.checkpoint import resolve_checkpoint
from vllm_domino.engine.check import check_fit
from vllm_domino.plugin.checks import refuse_unsupported, serving_facts, target_weights
from vllm_domino.plugin.context_layer import ContextLayer
from vllm_domino.plugin.metrics import DRAFT_FAILURES, DRAFT_SECONDS
from vllm_domino.plugin.trace import DraftTrace
from vllm_domino.runtime.draft_step import DraftStep
from vllm_domino.runtime.factory import open_session

logger = init_logger("vllm.domino")

_MAX_PENDING = 16  # failed context writes kept for another try; older ones are given up


class Drafting(nn.Module):
    """Draft step plus failure policy. An `nn.Module` because vLLM keeps it where it keeps a draft model."""

    def __init__(self, vllm_config: Any, target_model: nn.Module, device: torch.device):
        """Open the session and bind the target, before vLLM profiles memory.

        Raises:
            ValueError: the drafter does not fit the target, the options, the device or this way of serving.
        """
        super().__init__()
        spec = vllm_config.speculative_config
        refuse_unsupported(vllm_config, target_model)
        path = resolve_checkpoint(spec.model, spec.revision)
        facts = serving_facts(vllm_config, device)
        manifest = check_fit(path, facts)
        embedding, lm_head = target_weights(target_model, facts.vocab_size, facts.hidden_size)
        self.session = open_session(
            path, device, vllm_config.model_config.dtype, max_batch=vllm_config.scheduler_config.max_num_seqs
        )
        self.session.bind_target(embedding, lm_head)
        self.draft_window = min(manifest.draft_window, vllm_config.model_config.max_model_len)
        self.max_positions = self.session.config.max_position_embeddings
        self.step = DraftStep(
            self.session,
            max_requests=vllm_config.scheduler_config.max_num_seqs,
            max_rows=vllm_config.scheduler_config.max_num_batched_tokens,
            draft_window=self.draft_window,
            device=device,
        )
        self.layer = ContextLayer(vllm_config, self.step.row_size, self.session.dtype)
        self.num_tokens = spec.num_speculative_tokens
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self._reported = False
        self._trace = DraftTrace.from_environment()
        self._log_start(facts)

    def _log_start(self, facts: Any) -> None:
        logger.info(
            "Domino drafter: %s session, %s, block %d, %d draft tokens per step, window %d",
            self.session.backend,
            str(self.session.dtype).removeprefix("torch."),
            self.session.config.block_size,
            self.num_tokens,
            self.draft_window,
        )
        if self.max_positions < facts.max_model_len:
            logger.warning(
                "The drafter was made for %d positions and the target serves %d: past the drafter's length, "
                "requests go on without drafts",
                self.max_positions,
                facts.max_model_len,
            )

    def _attach(self) -> bool:
        """Bind the cache once vLLM has allocated it (again after it moved, as on wake-up)."""
        pages = self.layer.pages()
        if pages is None:
            return False
        self.step.attach_cache(pages)
        return True

    def store_context(self, features: Tensor, positions: Tensor, slots: Tensor) -> bool:
        """Write context rows; on failure keep them and write them before the next ones. False: not written yet."""
        self._attach()
        self._pending.append((features, positions, slots))
        try:
            while self._pending:
                self.step.store_context(*self._pending[0])
                self._pending.pop(0)
        except Exception as error:  # whatever a session raises, the server stays up
            self._failed("context rows", error)
            self._pending = [tuple(t.clone() for t in rows) for rows in self._pending[-_MAX_PENDING:]]
            return False
        return True

    def draft(
        self,
        anchor_ids: Tensor,
        positions: Tensor,
        block_table: Tensor,
        max_context: int,
        num_tokens: int | None = None,
    ) -> Tensor | None:
        """Draft ids [B, num_tokens], a view of a static buffer; None when the step failed.

        num_tokens: this step's number of draft tokens, where vLLM lets it depend on the load; None is
            `num_speculative_tokens`.
        """
        if self._pending:  # rows that the drafts would read are not written yet
            return None
        start = time.perf_counter()
        try:
            count = num_tokens or self.num_tokens
            drafts = self.step.draft(anchor_ids, positions, block_table, max_context, count)[:, :count]
            self._check_range(drafts)
        except Exception as error:  # as above
            self._failed("drafts", error)
            return None
        DRAFT_SECONDS.observe(time.perf_counter() - start)
        if self._trace is not None:
            self._trace.write(anchor_ids, positions, drafts)
        return drafts

    def _check_range(self, drafts: Tensor) -> None:
        """A wrong id would index past the target's embedding. A GPU is not asked (that would wait): ids are clamped."""
        if drafts.device.type != "cpu":
            drafts.clamp_(0, self.step.vocab_size - 1)
            return
        low, high = torch.aminmax(drafts)
        if low < 0 or high >= self.step.vocab_size:
            raise RuntimeError(
                f"draft ids {int(low)}…{int(high)} are outside the vocabulary of {self.step.vocab_size}"
            )

    def _failed(self, what: str, error: Exception) -> None:
        """Count a failure, and log the first. While a CUDA graph is captured it is raised: a graph that was captured
        around it would draft nothing ever after.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise error
        DRAFT_FAILURES.inc()
        if not self._reported:
            self._reported = True
            logger.error("Domino: %s failed for this step, which goes on without drafts (%s: %s); later failures are "
                         "only counted (vllm_domino:draft_failures)", what, type(error).__name__, error)  # fmt: skip

    # What vLLM's runners call on a draft model:

    def combine_hidden_states(self, features: Tensor) -> Tensor:
        """V2 asks for its context buffer's contents: all target layers side by side [N, F*H_target], as they are."""
        return features

    def precompute_and_store_context_kv(
        self, states: Tensor, positions: Tensor, slots: Tensor | None = None
    ) -> None:
        """V2's context seam; without slots (memory profiling) it runs the projection and writes nothing."""
        if slots is None:
            slots = torch.full_like(positions, -1)
        self.store_context(states, positions, slots)
