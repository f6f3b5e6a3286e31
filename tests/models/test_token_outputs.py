"""`linear_log_probs` against plain log-softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.models import token_outputs
from engines.models.head import CHUNK_ELEMENTS, Head, rows_per_chunk
from engines.models.token_outputs import linear_log_probs
from support.largest_tensor import LargestTensor
from support.log_probs import objective, reference

ROWS, HIDDEN, VOCAB = 13, 8, 37


def problem(
    *, bias: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    offsets = torch.randn(VOCAB, generator=generator) if bias else None
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in (hidden, weight, offsets)]
    return leaves[0], leaves[1], torch.randint(0, VOCAB, (ROWS,), generator=generator), leaves[2]


@pytest.mark.parametrize("chunk_rows", [1, 5, None])
@pytest.mark.parametrize(("softcap", "scale"), [(None, None), (2.0, None), (None, 0.3), (3.0, 1.7)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("need_entropy", [False, True])
@pytest.mark.parametrize(("uniform", "equal_weights"), [(True, False), (True, True), (False, True)])
def test_values_and_gradients_are_those_of_plain_log_softmax(
    chunk_rows: int | None,
    softcap: float | None,
    scale: float | None,
    bias: bool,
    need_entropy: bool,
    uniform: bool,
    equal_weights: bool,
) -> None:
    hidden, weight, targets, offsets = problem(bias=bias)
    log_probs, entropy = linear_log_probs(
        hidden,
        weight,
        targets,
        offsets,
        chunk_rows=chunk_rows,
        need_entropy=need_entropy,
        softcap=softcap,
        scale=scale,
        equal_weights=equal_weights,
    )
    objective(log_probs, entropy, uniform=uniform).backward()

    exact = [None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, offsets)]
    want = reference(exact[0], exact[1], targets, exact[2], softcap=softcap, scale=scale)
    objective(want[0], want[1] if need_entropy else None, uniform=uniform).backward()

    torch.testing.assert_close(log_probs.double(), want[0], rtol=1e-5, atol=1e-6)
    if need_entropy:
        torch.testing.assert_close(entropy.double(), want[1], rtol=1e-5, atol=1e-6)
    else:
        assert entropy is None
    for ours, theirs in zip((hidden, weight, offsets), exact, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2e-5, atol=2e-6)


def test_made_ahead_the_gradients_need_no_second_look_at_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, _ = problem()
    computed: list[int] = []
    logits = Head.logits
    monkeypatch.setattr(Head, "logits", lambda self, rows, out: computed.append(len(rows)) or logits(self, rows, out))
    for equal_weights, uniform, times in ((False, True, 2), (True, True, 1), (True, False, 2)):
        computed.clear()
        log_probs, _ = linear_log_probs(hidden, weight, targets, chunk_rows=ROWS, equal_weights=equal_weights)
        objective(log_probs, None, uniform=uniform).backward()
        assert computed == [ROWS] * times


def test_a_second_backward_pass_gives_the_same_gradient() -> None:
    hidden, weight, targets, _ = problem()
    log_probs, _ = linear_log_probs(hidden, weight, targets, equal_weights=True)
    first, second = (
        [grad.clone() for grad in torch.autograd.grad(-0.5 * log_probs.sum(), (hidden, weight), retain_graph=True)]
        for _ in range(2)
    )
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(one, two)


def test_only_the_gradients_asked_for_are_made() -> None:
    hidden, weight, targets, _ = problem()
    weight.requires_grad_(False)
    linear_log_probs(hidden, weight, targets, equal_weights=True)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_without_gradients_nothing_is_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, _ = problem()
    monkeypatch.setattr(token_outputs, "HeadGradients", None)
    with torch.no_grad():
        log_probs, _ = linear_log_probs(hidden, weight, targets, equal_weights=True)
    assert not log_probs.requires_grad


def test_chunks_are_equally_large() -> None:
    full = CHUNK_ELEMENTS // 50_000
    for rows, count in ((1, 1), (full, 1), (full + 20, 1), (2 * full, 2), (10 * full + 5, 10)):
        chunk = rows_per_chunk(rows, 50_000)
        sizes = [min(chunk, rows - start) for start in range(0, rows, chunk)]
        assert len(sizes) == count
        assert max(sizes) - min(sizes) < count
        assert max(sizes) * 50_000 <= 1.5 * CHUNK_ELEMENTS
    assert rows_per_chunk(0, 50_000) == 1
    assert rows_per_chunk(3, 2 * CHUNK_ELEMENTS) == 1


@pytest.mark.parametrize("need_entropy", [False, True])
@pytest.mark.parametrize("equal_weights", [False, True])
def test_logits_of_all_rows_are_never_held(need_entropy: bool, equal_weights: bool) -> None:
    rows, hidden_size, vocab = 64, 4, 500
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    with LargestTensor() as largest:
        log_probs, entropy = linear_log_probs(
            hidden, weight, targets, chunk_rows=8, need_entropy=need_entropy, equal_weights=equal_weights
        )
        (log_probs.sum() + (entropy.sum() if entropy is not None else 0)).backward()
    assert largest.numel == 2 * 8 * vocab


def test_no_rows_give_an_empty_result_that_is_attached() -> None:
    hidden, weight, targets, _ = problem()
    log_probs, entropy = linear_log_probs(hidden[:0], weight, targets[:0], need_entropy=True, equal_weights=True)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


def test_a_token_that_cannot_occur_adds_nothing_to_the_entropy() -> None:
    hidden, weight, targets, offsets = problem(bias=True)
    with torch.no_grad():
        offsets[5] = float("-inf")
    targets[targets == 5] = 6
    log_probs, entropy = linear_log_probs(hidden, weight, targets, offsets, need_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    keep = [i for i in range(VOCAB) if i != 5]
    log_p = (hidden @ weight[keep].T + offsets[keep]).log_softmax(-1)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1))
    assert all(x.grad.isfinite().all() for x in (hidden, weight, offsets))


def test_nan_shows() -> None:
    hidden, weight, targets, _ = problem()
    with torch.no_grad():
        hidden[2] = float("nan")
    log_probs, entropy = linear_log_probs(hidden, weight, targets, need_entropy=True)
    assert log_probs.isnan().nonzero().tolist() == entropy.isnan().nonzero().tolist() == [[2]]


@pytest.mark.parametrize("equal_weights", [False, True])
def test_bfloat16_computes_the_softmax_in_float32_and_sums_chunks_in_float32(equal_weights: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(64, 16, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 64, (256,), generator=generator)
    log_probs, _ = linear_log_probs(hidden, weight, targets, chunk_rows=1, equal_weights=equal_weights)
    log_probs.sum().backward()
    want = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, want)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    reference(*exact, targets, None, softcap=None, scale=None)[0].sum().backward()
    # 256 chunks summed in bfloat16 would be off by several per cent
    error = (weight.grad.double() - exact[1].grad).norm() / exact[1].grad.norm()
    assert error < 0.005
