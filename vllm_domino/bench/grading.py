"""Whether an answer is right: accuracy beside speed shows that nothing was bought with quality."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def is_right(kind: str, text: str, answer: str) -> bool:
    r"""Compare an output with the reference.

    kind "gsm8k": the number after `####`, else in the last `\boxed{}`, else the last number of the text.
    kind "boxed": the content of the last `\boxed{}` as it stands, numbers by value.
    """
    boxed = last_boxed(text)
    if kind == "boxed":
        return boxed is not None and (_plain(boxed) == _plain(answer) or _same_number(boxed, answer))
    marked = text.rsplit("####", 1)
    candidates = _NUMBER.findall(marked[1])[:1] if len(marked) == 2 else []
    candidates = candidates or _NUMBER.findall(boxed or "")[-1:] or _NUMBER.findall(text)[-1:]
    return bool(candidates) and _same_number(candidates[0], answer)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}`, braces inside it included; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index]
    return None


def _plain(text: str) -> str:
    return re.sub(r"\s|\\left|\\right|\\!|\\,|\$", "", text).replace("dfrac", "frac")


def _same_number(first: str, second: str) -> bool:
    try:
        return float(first.replace(",", "")) == float(second.replace(",", ""))
    except ValueError:
        return False
