"""Where the files that ship with the package lie."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
TINY = ASSETS / "tiny"  # the trained pair: target, domino, dflash, eagle3
GSM8K_QUESTIONS = ASSETS / "gsm8k" / "questions.jsonl"
