"""What an engine does not declare, or nobody gave it, is refused by name before anything runs."""

from __future__ import annotations

import pytest

from engines import create
from engines.batch import Batch
from engines.contract import ExportPlan
from engines.errors import BatchError, CapabilityError, ConfigError
from engines.losses import SFTLoss
from support.bigram import MODEL, BigramEngine, registered, sequences


def make(optimizer=None, **fields):
    with registered(**fields):
        engine = create(MODEL, {"strategy": "bigram"}, optimizer)
    engine.initialize()
    return engine


def disable_adapter(engine):
    with engine.disable_adapter():
        pass


class Entropic(SFTLoss):
    """Reads entropy."""

    needs = frozenset({"log_probs", "entropy"})


class Misspelt(SFTLoss):
    """Reads an output that doesn't exist."""

    needs = frozenset({"log_prob"})


@pytest.mark.parametrize(
    ("capability", "ask"),
    [
        ("lora", disable_adapter),
        ("offload", lambda engine: engine.to("cpu")),
        ("lora", lambda engine: engine.get_per_tensor_param(ExportPlan(adapters="only"))),
        ("export", lambda engine: engine.get_per_tensor_param()),
        ("entropy", lambda engine: engine.infer_batch(sequences(3), needs={"entropy"})),
        ("entropy", lambda engine: engine.infer_batch(sequences(3), needs=(), loss=Entropic())),
        ("entropy", lambda engine: engine.train_batch(sequences(3), Entropic())),
    ],
)
def test_capabilities(capability, ask):
    engine = make({"lr": 0.1}, capabilities=[])
    engine._base.calls.clear()
    with pytest.raises(CapabilityError) as error:
        ask(engine)
    assert f"needs the capability {capability}, which bigram on cpu (in-process) does not declare" in str(error.value)
    assert f"engines list --can {capability}" in str(error.value)
    assert "forward" not in engine._base.calls


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.train_batch(sequences(3), SFTLoss()),
        lambda engine: engine.optimizer_step(),
        lambda engine: engine.lr_scheduler_step(),
        lambda engine: engine.lr,
    ],
)
def test_training_without_an_optimizer(ask):
    with pytest.raises(ConfigError, match="created without an optimizer; it can only infer"):
        ask(make())


def test_tokens_outside_of_the_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 16}}')
    with registered():
        engine = create({"path": str(tmp_path)}, {"strategy": "bigram"}, {"lr": 0.1})
    engine.initialize()
    for wrong in (16, -1):
        batch = Batch.from_sequences([{"input_ids": ids, "loss_mask": ids} for ids in ([1, 15], [3, wrong, 99])])
        for ask in (
            lambda batch=batch: engine.train_batch(batch, SFTLoss()),
            lambda batch=batch: engine.infer_batch(batch),
        ):
            with pytest.raises(BatchError, match=f"sequence 1 holds token id {wrong}, outside .* vocabulary of 16"):
                ask()
    with pytest.raises(BatchError, match=r"input_ids must be int64 \[total_tokens\], got torch.float32"):
        engine.infer_batch(Batch.from_sequences([{"input_ids": [1.0, 2.0]}]))
    assert "forward" not in engine._base.calls


def test_unknown_outputs():
    with pytest.raises(ConfigError, match=r"unknown outputs \['logits'\]"):
        make().infer_batch(sequences(3), needs={"logits"})
    with pytest.raises(ConfigError, match=r"unknown outputs \['log_prob'\]"):
        make({"lr": 0.1}).train_batch(sequences(3), Misspelt())


class Critical(SFTLoss):
    """Reads values."""

    needs = frozenset({"values"})


@pytest.mark.parametrize(
    ("model_type", "ask", "said"),
    [
        (
            "language_model",
            lambda engine: engine.infer_batch(sequences(3), needs={"values"}),
            "the call asks for values, which a value_model gives; this engine is a language_model\n"
            "create it with another model_type, or ask for entropy or log_probs",
        ),
        (
            "language_model",
            lambda engine: engine.train_batch(sequences(3), Critical()),
            "Critical reads values, which a value_model gives; this engine is a language_model",
        ),
        (
            "value_model",
            lambda engine: engine.infer_batch(sequences(3)),
            "the call asks for log_probs, which a language_model gives; this engine is a value_model\n"
            "create it with another model_type, or ask for values",
        ),
        (
            "value_model",
            lambda engine: engine.infer_batch(sequences(3), needs={"values", "entropy"}),
            "the call asks for entropy, which a language_model gives",
        ),
        (
            "value_model",
            lambda engine: engine.infer_batch(sequences(3), needs=(), loss=SFTLoss()),
            "SFTLoss reads log_probs, which a language_model gives",
        ),
        ("value_model", lambda engine: engine.train_batch(sequences(3), SFTLoss()), "SFTLoss reads log_probs"),
        ("value_model", lambda engine: engine.forward_backward(sequences(3), SFTLoss()), "SFTLoss reads log_probs"),
    ],
)
def test_outputs_of_the_other_type_of_model(model_type, ask, said):
    with registered(model_type=["language_model", "value_model"]):
        engine = create(MODEL, {"strategy": "bigram"}, {"lr": 0.1}, model_type=model_type)
    engine.initialize()
    engine._base.calls.clear()
    with pytest.raises(ConfigError) as error:
        ask(engine)
    assert said in str(error.value)
    assert "forward" not in engine._base.calls


def test_a_field_that_the_loss_reads_and_the_batch_lacks():
    engine = make({"lr": 0.1})
    with pytest.raises(BatchError, match="no field loss_mask"):
        engine.train_batch(Batch.from_sequences([{"input_ids": [1, 2, 3]}]), SFTLoss())
    assert "forward" not in engine._base.calls


class Forgetful(SFTLoss):
    """Denominators and terms that are not those it declares."""

    def __init__(self, where):
        self.where = where

    def denominators(self, batch):
        return {} if self.where == "denominators" else super().denominators(batch)

    def __call__(self, out, batch):
        return {"entropy": out.log_probs.sum()} if self.where == "terms" else super().__call__(out, batch)


@pytest.mark.parametrize("where", ["denominators", "terms"])
def test_a_loss_that_contradicts_itself(where):
    with pytest.raises(BatchError, match=r"Forgetful.*declares coefficients for \['cross_entropy'\]"):
        make({"lr": 0.1}).train_batch(sequences(3), Forgetful(where))


def test_a_decaying_schedule_without_an_end():
    with registered(), pytest.raises(ConfigError, match="'linear' decays to 0"):
        create(MODEL, {"strategy": "bigram"}, {"lr": 0.1, "schedule": "linear"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 2}, "engine.tensor_parallel_size: 2 needs the capability tensor_parallel"),
        ({"micro_batch_size": 2, "max_tokens_per_micro_batch": 8}, "set one of them"),
        ({"micro_batch_sise": 2}, 'engine.micro_batch_sise: unknown key. Did you mean "micro_batch_size"?'),
        ({"micro_batch_size": 0}, "engine.micro_batch_size: input should be greater than or equal to 1, got 0"),
    ],
)
def test_settings(settings, said):
    with registered(), pytest.raises(ConfigError) as error:
        create(MODEL, {"strategy": "bigram", **settings})
    assert said in str(error.value)


def test_nothing_is_constructed_for_refused_settings():
    class Loud(BigramEngine):
        def __init__(self, ctx):
            raise AssertionError("constructed")

    with registered(Loud), pytest.raises(ConfigError):
        create(MODEL, {"strategy": "bigram", "pipeline_parallel_size": 2})
