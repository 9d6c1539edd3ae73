"""How benchmarks time: which kernels count, and that CUPTI tells of them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from bench import cupti, timing


@pytest.mark.parametrize(
    "spans, us",
    [([], 0), ([(0, 1000)], 1), ([(5000, 7000), (0, 1000)], 3), ([(0, 3000), (1000, 2000), (2500, 4000)], 4)],
)
def test_overlap_counts_once_and_gaps_not_at_all(spans, us):
    assert cupti.covered_us(spans) == us


class FakeRecorder:
    """Each flush is two kernels and each call as many as it says, one after the other."""

    def __init__(self):
        self.now, self.open = 0, []

    def launch(self, *lengths):
        for length in lengths:
            self.open.append((self.now, self.now + length))
            self.now += length

    def spans(self, run):
        self.open = []
        run()
        return self.open


def test_flushes_do_not_count_for_us_or_peers(monkeypatch):
    recorder = FakeRecorder()
    monkeypatch.setattr(timing, "_recorder", lambda: recorder)
    monkeypatch.setattr(timing, "_flush_l2", lambda: recorder.launch(70_000, 70_000))
    peers = SimpleNamespace(flush=lambda: recorder.launch(90_000, 50_000, 1000), finish=lambda result: None)
    ours = iter(range(1, 100))

    def call():
        recorder.launch(1000 * next(ours), 500)
        return jnp.zeros(1)

    timings = timing.measure({"ours": call, "theirs": lambda: recorder.launch(4000)}, iters=5, peers=peers)
    # The first three calls warm up.
    assert timings["ours"] == timing.Timing(6.5, pytest.approx(4.9), pytest.approx(8.1), 2)
    assert timings["theirs"] == timing.Timing(4, 4, 4, 1)


def test_a_run_with_another_number_of_kernels_is_an_error(monkeypatch):
    recorder = FakeRecorder()
    monkeypatch.setattr(timing, "_recorder", lambda: recorder)
    monkeypatch.setattr(timing, "_flush_l2", lambda: recorder.launch(70_000))
    lost = iter([0, 0, 0, 0, 1, 0, 0])
    with pytest.raises(RuntimeError, match="ours: runs of 1 or 2 kernels"):
        timing.measure({"ours": lambda: recorder.launch(*[500] * (2 - next(lost)))}, iters=4)


@pytest.mark.gpu
def test_cupti_tells_of_kernels():
    double = jax.jit(lambda x: x * 2)
    small, large = jnp.ones(1 << 10), jnp.ones(1 << 25)
    timings = timing.measure({"small": lambda: double(small), "large": lambda: double(large)}, iters=3)
    assert timings["small"].launches == timings["large"].launches == 1
    assert timings["small"].p10 > 0.3
    # 128 MiB read and as many written, at no more than 10 TB/s. (Others may use the card, so nothing is too long.)
    assert timings["large"].p10 > 26
