"""The command line: what it prints, and one line with exit code 2 for everything that is wrong."""

import json

import pytest

from tests.tiny_model import CONFIG, random_model, save_checkpoint
from ukv_jax.cli import main, size
from ukv_jax.compare import compare
from ukv_jax.engine import Engine, Model, Sampling
from ukv_jax.layout import UnifiedLayout

CACHE_OFF = ("--compile-cache", "off")
POOL = ("--pool-bytes", "24K", "--context", "21", "--max-requests", "3")  # one pool, so one compilation
SMALL = ("--page-size", "4", "--max-new-tokens", "12", "--seed", "5", "--temperature", "0.8", *CACHE_OFF)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory)
    return directory


def fails(capsys, *argv) -> str:
    """The one line that a refused command leaves on stderr."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


def test_generate_prints_json_and_text(capsys, checkpoint):
    prompts = ("--prompt", "Hello you", "--prompt", "~", "--prompt-ids", "1, 2 3")
    assert main(["generate", "--model", str(checkpoint), *prompts, *POOL, *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert set(found) == {"results", "pool", "run"}
    assert found["pool"]["kind"] == "unified"
    assert found["run"]["requests_at_once"] == 3
    model = Model.load(checkpoint)
    layout = UnifiedLayout.from_bytes(
        model.specs, total_bytes=24 << 10, page_size=4, max_requests=3, max_tokens=21
    )
    engine = Engine(model, layout, max_new_tokens=12)
    texts = [model.encode("Hello you"), model.encode("~"), [1, 2, 3]]
    # The seed counts up from prompt to prompt.
    expected = engine.generate(texts, Sampling(12, 0.8, seed=5))
    for r, e in zip(found["results"], expected, strict=True):
        assert (r["tokens"], r["text"], r["finish"], r["error"]) == (e.tokens, e.text, "length", None)
        assert r["logprobs"] == e.logprobs
        assert (r["stalls"], r["retractions"]) == (0, 0)
    assert [r["prompt"] for r in found["results"]] == ["Hello you", "~", [1, 2, 3]]

    assert main(["generate", "--model", str(checkpoint), *prompts, *POOL, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert expected[0].text in out
    assert expected[2].text in out


def test_one_bad_prompt_does_not_stop_the_others(capsys, checkpoint, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Hello you\n\n" + 20 * "long " + "\n~\n")
    code = main(["generate", "--model", str(checkpoint), "--prompts", str(file), *POOL, *SMALL, "--json"])
    out, err = capsys.readouterr()
    results = json.loads(out)["results"]
    assert code == 2
    assert [r["finish"] for r in results] == ["length", "error", "length"]
    assert err.startswith("error: prompt 1: a prompt of 100 tokens and 12 new ones")
    assert err.count("\n") == 1


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_compare_finds_the_pools_equal(capsys, checkpoint, tmp_path, kv_dtype):
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    sizes = ("--context", "40", "--requests", "3", "--chunk", "16", "--page-size", "4", *CACHE_OFF)
    kind = ("--kv-dtype", kv_dtype)
    assert main(["compare", "--model", str(checkpoint), "--text", str(file), *sizes, *kind, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # 135 tokens in stretches of 40, 40, 40 and 15: each predicts all of its tokens but the first.
    assert found["tokens"] == 39 * 3 + 14
    assert found["identical"] is True
    assert found["max_difference"] == 0
    assert found["agreement"] == 1
    assert found["perplexity"]["unified"] == found["perplexity"]["static"] > 1


def test_compare_refuses():
    model = random_model()
    layouts = [
        UnifiedLayout.from_tokens(model.specs, tokens=64, requests=2, page_size=4, max_tokens=16)
        for _ in range(2)
    ]
    other = UnifiedLayout.from_tokens(model.specs, tokens=64, requests=2, page_size=4, max_tokens=20)
    with pytest.raises(ValueError, match="same limits"):
        compare(model, (layouts[0], other), [1, 2, 3])
    with pytest.raises(ValueError, match=r"\[1, 96\], the vocabulary is \[0, 96\)"):
        compare(model, tuple(layouts), [1, 96])
    with pytest.raises(ValueError, match="at least 2 tokens"):
        compare(model, tuple(layouts), [1])


def test_missing_directory(capsys, tmp_path):
    error = fails(capsys, "generate", "--model", tmp_path / "nowhere", "--prompt", "x", *CACHE_OFF)
    assert "no config.json found" in error


def test_unknown_model_type(capsys, checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "perceptron"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = fails(capsys, "generate", "--model", tmp_path, "--prompt", "x", *CACHE_OFF)
    assert "'perceptron' is not implemented" in error
    assert "kimi_linear" in error


def test_pickle_checkpoint(capsys, checkpoint, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    error = fails(capsys, "generate", "--model", tmp_path, "--prompt", "x", *CACHE_OFF)
    assert "pytorch_model.bin" in error
    assert "safetensors" in error


def test_pool_too_small(capsys, checkpoint):
    common = ("generate", "--model", checkpoint, "--prompt", "x" * 50, *SMALL)
    for kind in ("unified", "static"):
        error = fails(capsys, *common, "--pool", kind, "--pool-bytes", "4K")
        assert "4096" in error
    # A split that has bytes enough, but too few of them on the right side.
    error = fails(capsys, *common, "--prompt", "y", "--pool", "static", "--pool-bytes", "9K")
    assert "one request of 62 tokens takes" in error
    assert "'full': 16" in error


def test_prompt_longer_than_a_request(capsys, checkpoint):
    error = fails(capsys, "generate", "--model", checkpoint, "--prompt", "x" * 50, "--context", "40", *SMALL)
    assert "50 tokens and 12 new ones" in error
    assert "40 tokens" in error


def test_ids_out_of_range(capsys, checkpoint):
    error = fails(
        capsys, "generate", "--model", checkpoint, "--prompt-ids", "3 96", "--context", "21", *SMALL
    )
    assert f"token id 96 is outside the vocabulary [0, {CONFIG.vocab_size})" in error


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("compare", "--text", __file__)])
def test_float16_latent_rows_are_refused_before_weights_are_read(capsys, checkpoint, tmp_path, command):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    error = fails(capsys, command[0], "--model", tmp_path, *command[1:], "--dtype", "float16", *CACHE_OFF)
    assert "caches its rows in one of bfloat16, float32, float8_e4m3fn, not in float16" in error


@pytest.mark.parametrize("page_size", ["0", "-4", "100000"])
def test_page_size_that_does_not_fit(capsys, checkpoint, page_size):
    sizes = ("--page-size", page_size, "--pool-bytes", "1M", *CACHE_OFF)
    error = fails(capsys, "generate", "--model", checkpoint, "--prompt", "x", *sizes)
    assert page_size in error


@pytest.mark.parametrize(
    "argv, text",
    [
        (("generate", "--prompt", "x"), "--model"),
        (("generate", "--model", "m", "--pool-bytes", "lots"), "'lots' is no size"),
        (("generate", "--model", "m", "--pool-bytes", "infG"), "must be positive and finite, got 'infG'"),
        (("generate", "--model", "m", "--pool", "elastic"), "elastic"),
        (("generate", "--model", "m"), "no prompt given"),
        (("generate", "--model", "m", "--prompt-ids", "one"), "token ids such as"),
        (("generate", "--model", "m", "--prompt", "x", "--top-p", "2"), "top_p"),
        (("generate", "--model", "m", "--prompts", "no/such/file"), "no/such/file"),
        (("frobnicate",), "frobnicate"),
        ((), "command"),
    ],
)
def test_arguments(capsys, argv, text):
    assert text in fails(capsys, *argv)


def test_help_says_what_takes_another_implementation_than_the_named(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "by the name triton chunks of MLA and steps of recurrent state, by the name mosaic chunks of GQA"
        in text
    )


def test_named_kernel_does_not_fall_back(capsys, checkpoint):
    common = ("generate", "--model", checkpoint, "--prompt", "x", *POOL, *SMALL)
    error = fails(capsys, *common, "--implementation", "mosaic")
    assert "mosaic" in error


@pytest.mark.parametrize(
    "text, value",
    [
        ("300000", 300000),
        ("2K", 2048),
        ("1.5M", 3 << 19),
        ("20GiB", 20 << 30),
        ("7 b", 7),
        ("1.5GB", 1_500_000_000),
    ],
)
def test_size(text, value):
    assert size(text) == value


def test_compile_cache(monkeypatch, tmp_path):
    import jax

    from ukv_jax.cli import use_compile_cache

    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv("UKV_JAX_COMPILE_CACHE", raising=False)
        assert use_compile_cache(None) == tmp_path / "ukv_jax" / "compiled"
        monkeypatch.setenv("UKV_JAX_COMPILE_CACHE", str(tmp_path / "elsewhere"))
        assert use_compile_cache(None) == tmp_path / "elsewhere"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "elsewhere")
        monkeypatch.setenv("UKV_JAX_COMPILE_CACHE", "off")
        assert use_compile_cache(None) is None
        assert jax.config.jax_compilation_cache_dir is None
        assert use_compile_cache(str(tmp_path / "flag")) == tmp_path / "flag"
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="compile cache"):
            use_compile_cache(str(tmp_path / "file" / "below"))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
