"""The checkpoint that ships with the repository."""

from __future__ import annotations

import json
import re
from pathlib import Path
from pydoc_data import topics

import numpy as np
from tokenizers import Tokenizer

from tools.train_tiny import CONFIG, EOS

DIRECTORY = Path(__file__).parents[2] / "checkpoints" / "kimi-linear-tiny"
GOLDEN = Path(__file__).parent / "golden" / "kimi_linear_tiny.npz"


def test_size_and_config():
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 4_000_000
    assert json.loads((DIRECTORY / "config.json").read_text()) == CONFIG
    generation = json.loads((DIRECTORY / "generation_config.json").read_text())
    assert generation["eos_token_id"] == CONFIG["eos_token_id"] == EOS


def test_token_ids_are_bytes():
    tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    text = "Tab\there, naïve: 漢字 🙂\n\n  end\x00 "
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert [tokenizer.token_to_id(t) for t in ("<bos>", "<eos>", "<pad>")] == [256, 257, 258]
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]


def test_it_writes_words():
    """Most of what it writes greedily are words of the text it has learned from."""
    known = set(re.findall(r"[a-z]+", " ".join(topics.topics.values()).lower()))
    tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    with np.load(GOLDEN) as golden:
        texts = [
            tokenizer.decode(golden[name].tolist()) for name in golden.files if name.startswith("greedy_")
        ]
    words = [word for text in texts for word in re.findall(r"[a-z]+", text.lower())[1:-1]]
    assert len(words) > 100
    assert np.mean([word in known for word in words]) > 0.9
