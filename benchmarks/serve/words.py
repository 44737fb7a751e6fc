"""A tokenizer with words enough for LMCache's ``long-doc-permutator``.

It draws its prompts from 8,000 words that are one token each and has no option for fewer; the
tokenizer of the benchmark's model has 658. So it gets one of made-up words. The engine splits such
a word into about three tokens.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

COUNT = 8192


def save(folder: Path) -> None:
    """Write the tokenizer where ``AutoTokenizer`` finds it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    syllables = ["".join(pair) for pair in product("bcdfghjklmnpqrstvwxz", "aeiou")]
    words = ["".join(pair) for pair in product(syllables, syllables)][:COUNT]
    ids = {"<unk>": 0, **{f"Ġ{word}": number for number, word in enumerate(words, 1)}}
    whole = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>").save_pretrained(folder)
