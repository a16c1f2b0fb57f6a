"""Settings that a recipe refuses once it has read its data, model and rewards.

`tests/settings/test_conflicts.py` has those that conflict without them."""

import pytest

from tests.recipes import (
    test_classify,
    test_distill,
    test_dpo,
    test_grpo,
    test_kto,
    test_ppo,
    test_quantize,
    test_reward,
)
from tests.recipes.conftest import run_recipe

QAT = "quantize.train=int4"
LIVE = test_distill.LIVE
STUDENT = ("model.path=tiny", "model.random_init=true")
REFUSED = {
    test_dpo: {
        ("reference.kind=streamed",): "the model is on cpu.*Set reference.kind=model",
        ("loss.name=dpo",): "Did you mean 'loss.name=sigmoid'",
        ("loss.gamma=1",): "gamma=1 has no effect with the loss sigmoid, only with simpo",
        ("loss.name=exo", "loss.label_smoothing=0"): "takes its logarithm",
        ("loss.label_smoothing=0.5",): "number >= 0 and < 0.5",
        ("data.source=tiny/validation.jsonl",): "this recipe trains on preference pairs",
        ("data.packing=wrapped",): "the answers of a pair are compared whole",
    },
    test_kto: {
        ("loss.label_smoothing=0.1",): "label_smoothing",
        ("data.source=tiny/validation.jsonl",): "this recipe trains on completions labeled",
        ("data.max_length=2", "data.max_prompt_length=1"): "no row of .* is left to train on|no completion left",
    },
    test_reward: {
        ("pad_token=<|end|>",): "pad token '<|end|>' also ends sequences.*Set pad_token",
        ("pad_token=<|edn|>",): "not a control token of this tokenizer. Did you mean",
        ("lora.targets=[score]",): "which is trained whole",
        ("loss.per_token=true", "data.shared_prompt=true"): "data.shared_prompt=true",
        ("loss.beta=1",): "beta",
    },
    test_classify: {
        ("lora.targets=[score]",): "score, which is trained whole",
        ("data.packing=wrapped",): "data.packing",
        ("loss.class_weights={c: 2}",): "loss.class_weights.c: no such label",
        ("data.labels=[a,b]",): "the label is .*; expected one of a, b",
    },
    test_distill: {
        STUDENT: "expected one of teacher=MODEL and cached=FOLDER.*found neither",
        (*STUDENT, "distill.teacher=./nowhere"): "nowhere",
        (*STUDENT, "distill.cached=nowhere"): "distill.cached=nowhere is not a folder of a teacher's predictions",
        (*STUDENT, *LIVE, "distill.divergence=forward"): "forward_kl",
        (*STUDENT, *LIVE, "distill.beta=0.5"): "beta=0.5 has no effect with divergence=forward_kl",
        (*STUDENT, *LIVE, "distill.cross_entropy_weight=1"): "gives the teacher no weight",
        (*STUDENT, *LIVE, "distill.temperature=0"): "> 0",
        (*STUDENT, *LIVE, "distill.on_policy=1.5"): "<= 1",
    },
    test_grpo: {
        (
            "generation.num_answers=3",
        ): "16 completions, which is not a multiple of generation.num_answers=3. Set gradient_accumulation_steps=3",
        ("generation.offload_training_state=true",): "to host memory, but the model is on cpu",
        ("generation.router_replay=true",): "this model has no experts",
        ("loss.name=cispo", "loss.epsilon=0.1"): "epsilon=0.1 has no effect with the loss cispo",
        ("data.max_prompt_length=2",): "no prompt of .* is left: 800 rows, 800 dropped .longer",
        ("data.columns.prompt=question",): "data.columns.prompt=question: the row has prompt, answer",
        ("rewards=[]",): "rewards is empty",
        ("rewards=[exact]",): "unknown reward 'exact'. Did you mean 'exact_answer'",
        ("rewards=[format]",): "needs `pattern`, a regular expression",
        ("rewards=[{model: tiny}]",): "not a reward model: it has no output layer",
        ("rewards=[{weight: 2}]",): "expected a function or a model, found neither",
    },
    test_ppo: {
        ("lora.rank=4", "value.path=tiny"): "with an adapter the value model is an output layer on the policy",
        ("generation.top_k=5",): "sample from other probabilities",
    },
    test_quantize: {
        ("quantize.train=nvfp4",): "nvfp4 is not supported: .* GPU from Blackwell on",
        (QAT, "lora.rank=4"): "an adapter freezes them",
        (QAT, "memory.float8_products=true"): "both round the layers' products",
        (QAT, "quantize.group_size=48"): "128 inputs, which is not a multiple of group_size=48",
    },
}


@pytest.mark.parametrize(
    ("module", "settings"),
    [(module, settings) for module, rows in REFUSED.items() for settings in rows],
    ids=lambda value: getattr(value, "RECIPE", str(value)),
)
def test_settings_are_refused_with_the_reason(module, settings, tmp_path):
    with pytest.raises(ValueError, match=REFUSED[module][settings]):
        run_recipe(module.RECIPE, tmp_path / "run", *module.SETTINGS, *settings)
