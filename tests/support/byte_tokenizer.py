"""A tokenizer that is made on the spot: one token for each byte, and two of its own."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

END, PAD = "<end>", "<pad>"
WORDS = [END, PAD, *sorted(ByteLevel.alphabet())]


def byte_tokenizer() -> Tokenizer:
    made = Tokenizer(BPE(vocab={word: number for number, word in enumerate(WORDS)}, merges=[]))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), Bytes()
    return made
