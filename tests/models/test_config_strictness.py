"""Published config.json files with one field changed: what nobody reads is named, and what is malformed is refused in words."""

from __future__ import annotations

import copy
import json

import pytest

from tests.models.test_deepseek_loading import V2, V3
from tests.models.test_gemma4 import GEMMA_E2B
from tests.models.test_gpt_oss import GPT_OSS_20B
from tests.models.test_inkling import INKLING_SMALL
from tests.models.test_loading import KIMI_48B
from tests.models.test_state_loading import FALCON_1_5B, QWEN
from ukv_jax.models.config import OFF_WHEN_FALSE, load_config

PUBLISHED = {
    "kimi": KIMI_48B, "qwen": QWEN, "falcon": FALCON_1_5B, "gpt-oss": GPT_OSS_20B, "gemma": GEMMA_E2B,
    "inkling": INKLING_SMALL, "deepseek-v2": V2, "deepseek-v3": V3,
}  # fmt: skip
# Objects that concern no text model, or its Python code.
UNREAD = ("vision_config", "audio_config", "mtp_config", "auto_map")


def fields(config, above=()):
    """Path of every field, those of nested objects too."""
    for name, value in config.items():
        yield (*above, name)
        if isinstance(value, dict) and name not in UNREAD:
            yield from fields(value, (*above, name))


def at(config, path):
    for name in path:
        config = config[name]
    return config


@pytest.fixture
def load_with(tmp_path):
    """load_config of a config with the value at a path replaced or added."""

    def load(config, path, value):
        config = copy.deepcopy(config)
        at(config, path[:-1])[path[-1]] = value
        (tmp_path / "config.json").write_text(json.dumps(config))
        return load_config(tmp_path)

    return load


@pytest.mark.parametrize("name", PUBLISHED)
def test_unknown_fields_are_named_whatever_they_hold(load_with, name):
    config = PUBLISHED[name]
    objects = [
        path for path in fields(config) if isinstance(at(config, path), dict) and path[-1] not in UNREAD
    ]
    for path in [(), *objects]:
        for value in (False, 0, 0.0, "", [], {}, True, 3):
            with pytest.raises(ValueError, match="unheard_of"):
                load_with(config, (*path, "unheard_of"), value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_malformed_is_named_with_its_value(load_with, name):
    config, vague = PUBLISHED[name], []
    for path in fields(config):
        whole = isinstance(at(config, path), dict)  # of another object its own fields are named
        for value in ("abc", [1], [None], 1.5, -1, True, *([] if whole else [{"x": 1}])):
            if value is True and isinstance(at(config, path), bool):
                continue
            try:
                load_with(config, path, value)
            except ValueError as error:
                name = path[-1].removeprefix("torch_")
                if name not in str(error) or repr(value) not in str(error):
                    vague.append((path, value, str(error)))
    assert not vague, vague


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("kimi", "first_k_dense_replace", "abc"),
        ("kimi", "moe_layer_freq", 0),
        ("kimi", "moe_layer_freq", -1),
        ("kimi", "num_expert_group", 0),
        ("kimi", "linear_attn_config", 5),
        ("kimi", "linear_attn_config.kda_layers", ["zzz"]),
        ("kimi", "num_shared_experts", 1.5),
        ("kimi", "model_max_length", "abc"),
        ("kimi", "use_grouped_topk", 1),
        ("kimi", "eos_token_id", [1, "abc"]),
        ("deepseek-v3", "eos_token_id", 1.5),
        ("deepseek-v3", "bos_token_id", "abc"),
        ("deepseek-v3", "q_lora_rank", 1.5),
        ("deepseek-v3", "n_shared_experts", "abc"),
        ("deepseek-v3", "norm_topk_prob", 1),
        ("deepseek-v3", "rms_norm_eps", "1e-6"),
        ("falcon", "mamba_n_groups", 0),
        ("falcon", "mamba_d_conv", 1.5),
        ("falcon", "num_key_value_heads", "x"),
        ("falcon", "time_step_limit", 5),
        ("falcon", "embedding_multiplier", float("nan")),
        ("gpt-oss", "layer_types", 5),
        ("gpt-oss", "swiglu_limit", "7"),
        ("gemma", "text_config.num_kv_shared_layers", 1.5),
        ("gemma", "text_config.hidden_size_per_layer_input", "abc"),
        ("gemma", "text_config.vocab_size_per_layer_input", "abc"),
        ("gemma", "text_config.layer_types", []),
        ("inkling", "text_config.unpadded_vocab_size", 1.5),
        ("inkling", "text_config.local_layer_ids", 5),
        ("qwen", "text_config.mtp_num_hidden_layers", "abc"),
    ],
)
def test_malformed_values_are_refused(load_with, name, path, value):
    with pytest.raises(ValueError, match=path.rpartition(".")[2]):
        load_with(PUBLISHED[name], tuple(path.split(".")), value)


@pytest.mark.parametrize("name", sorted(OFF_WHEN_FALSE))
def test_options_of_the_general_class_may_be_off(load_with, name):
    expected = load_with(GPT_OSS_20B, ("use_cache",), True)
    assert load_with(GPT_OSS_20B, (name,), False) == load_with(GPT_OSS_20B, (name,), 0) == expected
    with pytest.raises(ValueError, match=f"not implemented: {{'{name}': True}}"):
        load_with(GPT_OSS_20B, (name,), True)
