"""What the demo is made of; the whole of it runs as `make demo`."""

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.tiny_model import random_model
from ukv_jax import demo
from ukv_jax.engine import Trace


@pytest.fixture(scope="module")
def requests():
    model = SimpleNamespace(config=SimpleNamespace(bos_token_id=256), encode=lambda text: list(text.encode()))
    return demo.requests_of(model)


def test_requests_are_many_short_and_a_few_long(requests):
    lengths = np.array([len(r.prompt) for r in requests])
    assert len(requests) == demo.SHORT + demo.LONG
    assert np.sum(lengths > demo.LONG_PROMPT) == demo.LONG
    assert np.median(lengths) < 150
    assert all(r.prompt[0] == 256 for r in requests)
    assert len({r.sampling.seed for r in requests}) == len(requests)


def test_pools_have_the_same_bytes_and_the_split_follows_the_mean_request(requests):
    unified, static = demo.layouts(random_model(), requests)
    assert unified.total_bytes == static.total_bytes
    assert unified.max_tokens >= max(len(r.prompt) + r.sampling.max_new_tokens for r in requests)
    mean = np.mean([len(r.prompt) + r.sampling.max_new_tokens for r in requests])
    pages, slots = static.full.num_pages - 1, static.state.num_pages - 1
    assert pages * static.page_size / slots == pytest.approx(mean, rel=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_picture(requests, tmp_path):
    engines = []
    rng = np.random.default_rng(0)
    for layout in demo.layouts(random_model(), requests):
        active = rng.integers(1, 9, 50)
        pages = np.stack([active, 3 * active], axis=1)
        trace = Trace(pages, pages // 2, active, active // 4, active // 5)
        engines.append(
            SimpleNamespace(layout=layout, trace=lambda t=trace: t, peak_requests=9, decode_steps=50)
        )
    demo.draw(engines, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_readme_loop_runs(monkeypatch, capsys):
    """The loop printed in the README, as it stands there."""
    root = Path(__file__).parent.parent
    code = (root / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 20
    monkeypatch.chdir(root)
    exec(code, {})
    texts = ast.literal_eval(capsys.readouterr().out)
    assert len(texts) == 2
    assert all(len(text) > 40 for text in texts)
