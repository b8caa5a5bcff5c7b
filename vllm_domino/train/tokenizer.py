"""The tiny pair's tokenizer: byte-level BPE with a Qwen-style chat template.

Digits are single tokens, as in Qwen's own tokenizers: numbers are then spelled out digit by digit, which is
what makes the calculator annotations of GSM8K (`<<48/2=24>>24`) copyable by a small target.
"""

from __future__ import annotations

from collections.abc import Iterable

PAD, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (PAD, IM_START, IM_END, MASK)

# One letter run with its leading space, one digit, one run of other signs, or white space.
WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096, max_length: int = 4096):
    """Learn the merges from `texts`; the special tokens take the last ids, `<|mask|>` the very last.

    Returns a `PreTrainedTokenizerFast` of exactly `vocab_size` entries whose eos is `<|im_end|>`.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} tokens, the recipe asks for {vocab_size}: "
            "pass more text or a smaller --vocab-size to `vllm-domino train target`"
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=IM_END,
        mask_token=MASK,
        additional_special_tokens=[IM_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
