"""Fixtures of the tests inside vLLM. Servers, references and the engine are made once per process: they cost seconds.

On vLLM's V2 runner, whose kernels Triton interprets on a CPU, only the tests marked `v2` run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness  # first: it sets what vLLM reads at import
import pytest
from prompts import chat_prompts
from reference import Reference, ReferenceRun


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "v2: runs on vLLM's V2 runner too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not harness.V2:
        return
    here = Path(__file__).parent
    dropped = [item for item in items if here in item.path.parents and item.get_closest_marker("v2") is None]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session", autouse=True)
def _pair() -> None:
    missing = [str(part) for part in (harness.TARGET, harness.DOMINO) if not (part / "config.json").is_file()]
    if missing:
        pytest.exit(
            f"the tiny pair is not there: {', '.join(missing)}; train it with `vllm-domino train tiny`", 2
        )


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Path:
    """The tiny drafter as an engine directory."""
    return harness.build_test_engine(Path(request.config.cache.mkdir("vllm-domino-engines")))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(harness.TARGET)


@pytest.fixture(scope="session")
def chats(tokenizer: Any) -> list[list[int]]:
    """32 questions, tokenized as chats."""
    return chat_prompts(tokenizer)


@pytest.fixture(scope="session")
def plain() -> Iterator[Any]:
    """The target without speculation."""
    with harness.open_llm() as llm:
        yield llm


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> harness.Trace:
    """The drafts of `served(15)`."""
    return harness.Trace(tmp_path_factory.mktemp("trace") / "drafts.jsonl")


@pytest.fixture(scope="session")
def served(engine: Path, trace: harness.Trace) -> Iterator[Callable[[int], Any]]:
    """The target with the engine and that many draft tokens, opened at the first call."""
    open_now: dict[int, Any] = {}
    with ExitStack() as stack:

        def get(num_tokens: int) -> Any:
            if num_tokens not in open_now:
                path = trace.path if num_tokens == harness.BLOCK else None
                llm = stack.enter_context(
                    harness.open_llm(harness.speculative(engine, num_tokens), trace=path)
                )
                open_now[num_tokens] = llm
            return open_now[num_tokens]

        yield get
        open_now.clear()


@pytest.fixture
def domino(served: Callable[[int], Any], trace: harness.Trace) -> Any:
    """The target with the engine and 15 draft tokens, nothing in its prefix cache, nothing in the trace."""
    llm = served(harness.BLOCK)
    llm.reset_prefix_cache()
    trace.take()
    return llm


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference.load()


@pytest.fixture(scope="session")
def runs(reference: Reference, chats: list[list[int]]) -> list[ReferenceRun]:
    """The reference loop on the 32 questions; shorter answers on the slow runner."""
    return [reference.decode(chat, 24 if harness.V2 else 48) for chat in chats]
