"""`PackedCausalLM` against plain transformers, one sequence at a time, eager attention, no packing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.batch import Batch
from engines.errors import ModelError
from engines.models import PackedCausalLM, build_causal_lm, load_plan
from engines.testing.tiny import FAMILIES, REFERENCE_FAMILIES, random_sequences, tiny_folder, tiny_model
from engines.weights import PretrainedFolder

LENGTHS = [20, 20, 1, 33, 2, 7, 8, 9]
BOTH = frozenset({"log_probs", "entropy"})
CHOSEN = (*REFERENCE_FAMILIES, "gpt2", "mistral", "gemma2", "gpt_oss")
"""Families of `make test`: those that engines are held to, and one for each special case of attention and head."""


def families() -> list[Any]:
    names = dict.fromkeys((*CHOSEN, *FAMILIES))
    return [pytest.param(name, marks=[] if name in CHOSEN else [pytest.mark.more]) for name in names]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PackedCausalLM]:
    folders: dict[str, Path] = {}

    def load(family: str) -> PackedCausalLM:
        if family not in folders:
            folders[family] = tiny_folder(tmp_path_factory.mktemp("tiny"), family)
        model = build_causal_lm(folders[family])
        model.materialize("cpu")
        plan = load_plan(model.model, PretrainedFolder(folders[family]))
        with torch.no_grad():
            for name, weight in model.named_weights():
                weight.copy_(plan[name].read([0] * weight.dim(), weight.shape))
        return model

    return load


def plain(model: Any, sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Target-aligned log-probabilities and entropies of plain transformers."""
    log_probs, entropy = [], []
    for ids in sequences:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        log_p = logits.log_softmax(-1)
        log_probs += [torch.zeros(1), log_p.gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]]
        entropy += [torch.zeros(1), -(log_p.exp() * log_p).sum(-1)]
    return torch.cat(log_probs), torch.cat(entropy)


def pack(sequences: list[list[int]]) -> Batch:
    return Batch.from_sequences([{"input_ids": ids} for ids in sequences])


@pytest.mark.parametrize("family", families())
def test_outputs_and_gradients_equal_the_plain_model_sequence_by_sequence(
    load: Callable[..., PackedCausalLM], family: str
) -> None:
    sequences = random_sequences(LENGTHS)
    ours, theirs = load(family), tiny_model(family)
    theirs.set_attn_implementation("eager")
    out = ours(pack(sequences), BOTH)
    log_probs, entropy = plain(theirs, sequences)
    torch.testing.assert_close(out.log_probs, log_probs, rtol=2e-6, atol=4e-6)
    torch.testing.assert_close(out.entropy, entropy, rtol=2e-6, atol=4e-6)
    for values in ((out.log_probs, out.entropy), (log_probs, entropy)):
        (values[0].square().sum() + values[1].sum()).backward()
    want = dict(theirs.named_parameters())
    for name, parameter in ours.model.named_parameters():
        error = (parameter.grad - want[name].grad).abs().max() / want[name].grad.abs().max().clamp(min=1e-3)
        assert error < 1e-5, name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mistral", "gemma2"])
def test_sequences_do_not_see_each_other(load: Callable[..., PackedCausalLM], family: str) -> None:
    model = load(family).eval()
    sequences = random_sequences(LENGTHS)
    others = [sequences[0][::-1], *random_sequences(LENGTHS[1:3], seed=9), *sequences[3:]]
    first = sum(LENGTHS[:3])
    with torch.no_grad():
        one, two = (model(pack(rows), BOTH).log_probs for rows in (sequences, others))
    assert not torch.equal(one[:first], two[:first])
    if family == "qwen3_moe":  # experts work on other tokens beside these, in other shapes
        torch.testing.assert_close(one[first:], two[first:], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(one[first:], two[first:])


def test_a_gradient_stays_in_its_sequence(load: Callable[..., PackedCausalLM]) -> None:
    model = load("llama")
    embedded: list[Tensor] = []
    model.model.get_input_embeddings().register_forward_hook(lambda *args: embedded.append(args[-1]))
    out = model(pack(random_sequences([5, 6, 7])), BOTH)
    (grad,) = torch.autograd.grad(out.log_probs[5:11].sum(), embedded[0])
    rows = grad[0].abs().sum(1).nonzero()[:, 0].tolist()
    assert rows == [5, 6, 7, 8, 9]  # the last token of a sequence predicts nothing


def test_the_first_token_of_a_sequence_has_no_output(load: Callable[..., PackedCausalLM]) -> None:
    out = load("qwen3")(pack(random_sequences([1, 3, 1, 1, 2])), BOTH)
    assert out.log_probs.shape == (8,)
    assert (out.log_probs != 0).int().tolist() == (out.entropy != 0).int().tolist() == [0, 0, 1, 1, 0, 0, 0, 1]


def test_only_what_is_asked_for_is_given(load: Callable[..., PackedCausalLM]) -> None:
    model, batch = load("llama"), pack(random_sequences([4, 5]))
    for needs in (frozenset({"log_probs"}), frozenset({"entropy"}), BOTH, frozenset()):
        out = model(batch, needs)
        assert {name for name in BOTH if getattr(out, name) is not None} == needs


def test_a_filler_gives_zeros_that_reach_every_parameter(load: Callable[..., PackedCausalLM]) -> None:
    model = load("llama_tied")
    for targets_only in (False, True):
        model.zero_grad()
        filler = Batch.filler(pack(random_sequences([3])))
        out = model(filler, frozenset({"log_probs"}), targets_only)
        out.log_probs[filler["loss_mask"]].sum().backward()
        assert out.log_probs.tolist() == [0.0]
        assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in model.parameters())


def test_targets_only_leaves_the_rest_zero(load: Callable[..., PackedCausalLM]) -> None:
    model = load("llama").eval()
    rows = [
        {"input_ids": ids, "loss_mask": [i % 3 == 0 for i in range(len(ids))]} for ids in random_sequences(LENGTHS)
    ]
    batch = Batch.from_sequences(rows)
    mask = batch["loss_mask"]
    everywhere, targets = (model(batch, BOTH, targets_only) for targets_only in (False, True))
    for name in BOTH:
        one, two = getattr(everywhere, name), getattr(targets, name)
        torch.testing.assert_close(one[mask], two[mask], rtol=1e-6, atol=1e-6)
        assert two[~mask].count_nonzero() == 0
        grads = [torch.autograd.grad(x[mask].sum(), list(model.parameters()), retain_graph=True) for x in (one, two)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_activation_checkpointing_changes_nothing(load: Callable[..., PackedCausalLM], family: str) -> None:
    batches = [pack(random_sequences(LENGTHS)), pack(random_sequences([40, 2, 11], seed=5))]
    grads, calls = [], []
    for checkpointing in (False, True):
        model = load(family).train()
        if checkpointing:
            model.enable_activation_checkpointing()
        count: list[int] = []
        model.layers()[0].register_forward_pre_hook(lambda *_, count=count: count.append(1))
        attention = next(m for n, m in model.layers()[0].named_modules() if n.endswith("attn"))
        attention.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        outs = [model(batch, BOTH) for batch in batches]  # both in flight: each recomputes with its own boundaries
        for out in outs:
            (out.log_probs.square().sum() + out.entropy.sum()).backward()
        grads.append([p.grad for p in model.parameters()])
        calls.append(len(count))
    assert calls[1] > calls[0]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_layers_are_the_decoder_layers_in_order(load: Callable[..., PackedCausalLM]) -> None:
    for family, kind in (("llama", "LlamaDecoderLayer"), ("gpt2", "GPT2Block"), ("mixtral", "MixtralDecoderLayer")):
        layers = load(family).layers()
        assert [type(layer).__name__ for layer in layers] == [kind, kind]


def test_check_accepts_every_family_and_leaves_the_model_as_it_was(load: Callable[..., PackedCausalLM]) -> None:
    model = load("gemma2").train()
    model.check()
    assert model.training
    assert model(pack(random_sequences([3])), BOTH).log_probs.requires_grad


def test_check_catches_a_head_that_does_more(load: Callable[..., PackedCausalLM]) -> None:
    model = load("granite")
    model._scale = None
    with pytest.raises(ModelError, match=r"GraniteForCausalLM.*differ by"):
        model.check()


def test_check_names_weights_that_are_not_finite(load: Callable[..., PackedCausalLM]) -> None:
    model = load("llama")
    with torch.no_grad():
        model.model.model.norm.weight[3] = torch.nan
    with pytest.raises(ModelError, match="not finite: its weights hold NaN or infinity"):
        model.check()


def test_check_catches_a_layer_through_which_sequences_see_each_other(load: Callable[..., PackedCausalLM]) -> None:
    class Leaky(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + 0.5 * hidden.roll(1, 1)

    model = load("llama")
    model.model.model.norm = nn.Sequential(model.model.model.norm, Leaky())
    with pytest.raises(ModelError, match="packed"):
        model.check()


def test_a_head_that_is_not_linear_is_refused(load: Callable[..., PackedCausalLM]) -> None:
    inner = load("llama").model
    inner.set_output_embeddings(nn.Sequential(inner.lm_head))
    with pytest.raises(ModelError, match="head is Sequential"):
        PackedCausalLM(inner)


def test_the_router_loss_of_a_model_is_never_added(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3_moe", output_router_logits=True)
    assert build_causal_lm(folder).model.config.output_router_logits is False
