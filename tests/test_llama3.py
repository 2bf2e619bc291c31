"""The reference Llama 3: published sizes, names, rotary embedding, causality."""

from __future__ import annotations

import pytest
import torch

from inductor_overlap.models.llama3 import (
    LLAMA3_SIZES,
    Llama3,
    Llama3Config,
    apply_rotary,
    rotary_table,
)

pytestmark = pytest.mark.quick

TINY = Llama3Config(
    dim=16, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=11, ffn_dim=24, max_seq=8
)

# https://huggingface.co/meta-llama/Meta-Llama-3-8B, -70B and Llama-3.1-405B (safetensors index)
PUBLISHED_PARAMETERS = {"8B": 8_030_261_248, "70B": 70_553_706_496, "405B": 405_853_388_800}


@pytest.mark.parametrize("size", PUBLISHED_PARAMETERS)
def test_named_sizes_have_the_published_number_of_parameters(size: str) -> None:
    with torch.device("meta"):
        model = Llama3(Llama3Config.named(size))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED_PARAMETERS[size]


def test_parameter_names_are_those_of_torchtitan() -> None:
    model = Llama3(Llama3Config(num_layers=1))
    assert list(dict(model.named_parameters())) == [
        "tok_embeddings.weight",
        "layers.0.attention_norm.weight",
        "layers.0.attention.wq.weight",
        "layers.0.attention.wk.weight",
        "layers.0.attention.wv.weight",
        "layers.0.attention.wo.weight",
        "layers.0.ffn_norm.weight",
        "layers.0.feed_forward.w1.weight",
        "layers.0.feed_forward.w2.weight",
        "layers.0.feed_forward.w3.weight",
        "norm.weight",
        "output.weight",
    ]


def test_rotary_turns_pairs_by_position_times_frequency() -> None:
    # head_dim 4, theta 100: frequencies 100**0 = 1 and 100**(-1/2) = 0.1; position 2.
    cos, sin = rotary_table(head_dim=4, max_seq=3, theta=100.0)
    torch.testing.assert_close(cos[2], torch.tensor([2.0, 0.2]).cos())
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 3, 1, 4)
    expected = torch.cat([cos[2, :1], sin[2, :1], -sin[2, 1:], cos[2, 1:]])
    torch.testing.assert_close(apply_rotary(x, cos, sin)[0, 2, 0], expected)


def test_logits_depend_on_earlier_tokens_only() -> None:
    torch.manual_seed(0)
    model = Llama3(TINY)
    tokens = torch.tensor([[1, 2, 3, 4]])
    changed = torch.tensor([[1, 2, 9, 4]])
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert difference[:2].max() == 0
    assert difference[2:].min() > 0


def test_a_meta_model_equals_an_eager_one_after_init_weights() -> None:
    with torch.device("meta"):
        late = Llama3(TINY)
    late.to_empty(device="cpu")
    early = Llama3(TINY)
    for model in (early, late):
        torch.manual_seed(3)
        model.init_weights()
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(early(tokens), late(tokens))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"choose one of \['405B', '70B', '8B', 'debug'\]"):
        Llama3Config.named("9B")
    with pytest.raises(ValueError, match="multiple of num_heads, got dim=10 and num_heads=4"):
        Llama3Config(dim=10, num_heads=4)
    with pytest.raises(ValueError, match="num_heads=8 and num_kv_heads=3"):
        Llama3Config(num_kv_heads=3)
    with pytest.raises(ValueError, match="9 positions, this model covers 8: raise max_seq"):
        Llama3(TINY)(torch.zeros(1, 9, dtype=torch.long))


def test_overrides_replace_fields_of_a_named_size() -> None:
    assert Llama3Config.named("8B", num_layers=2).num_layers == 2
    assert Llama3Config.named("8B", num_layers=2).dim == LLAMA3_SIZES["8B"].dim
