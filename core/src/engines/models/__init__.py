"""What every engine on Hugging Face models shares: building, packed attention, token outputs, weight names."""

from engines.models.asked import Asked
from engines.models.build import build_causal_lm
from engines.models.causal_lm import PackedCausalLM
from engines.models.conversion import WeightSource
from engines.models.export import ExportGroup, export_plan, named_weights
from engines.models.fitting import Plan, check_fit, keep_one_of_tied
from engines.models.load import load_plan
from engines.models.softmax import VocabularyShard
from engines.models.token_outputs import linear_log_probs

__all__ = [
    "Asked",
    "ExportGroup",
    "PackedCausalLM",
    "Plan",
    "VocabularyShard",
    "WeightSource",
    "build_causal_lm",
    "check_fit",
    "export_plan",
    "keep_one_of_tied",
    "linear_log_probs",
    "load_plan",
    "named_weights",
]
