"""The committed golden checkpoints: what every family's must have (tools/golden.py)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import parity
from ukv_jax.models.config import load_config
from ukv_jax.models.families import FAMILIES

DIRECTORIES = sorted(path.name for path in parity.GOLDEN.iterdir() if path.is_dir())


def test_every_family_has_one():
    """Text on its own (`_text`) is the same family."""
    found = {load_config(parity.GOLDEN / name).family.removesuffix("_text") for name in DIRECTORIES}
    wanted = {name.removesuffix("_text").removesuffix("_mm_model") for name in FAMILIES}
    assert found == wanted


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_checkpoint_of_a_megabyte_with_layers_over_two_pages_and_the_window(name):
    golden, config = parity.load_golden(name), load_config(parity.GOLDEN / name)
    assert sum(path.stat().st_size for path in (parity.GOLDEN / name).iterdir()) <= 1_000_000
    assert str(golden["versions"]) == "transformers 5.24.0"
    prompt, vocab = len(golden["ids"]), golden["logits"].shape[1]
    window = config.swa.window if config.swa is not None else 0
    assert prompt > max(2 * 64, window)
    assert golden["logits"].shape == (prompt, vocab)
    assert golden["hidden"].shape == (config.num_layers + 1, len(golden["positions"]), config.hidden_size)
    assert golden["greedy"].shape == (64,)
    assert golden["greedy_logits"].shape == (64, vocab)
    # No token hangs on the last digits of its logit.
    assert golden["margin"] > 1e-4 * np.abs(golden["greedy_logits"]).max()
