"""Model types that lean_ft does not train, and why. Types that are neither here nor in a family have no row yet."""

_SPARSE = "an indexer chooses the tokens that each query attends to (sparse attention), which lean_ft does not compute"
_BOTH_WAYS = "tokens of a prompt attend in both directions, and lean_ft trains causal language models"
_ENCODER = "it is an encoder, and lean_ft reads no encoders but eurobert and modernbert"
_ENCODER_DECODER = "it has an encoder and a decoder, and lean_ft trains decoder-only models"
_CUSTOM_CODE = (
    "its repository needs custom code, and the repository whose name ends in -hf has the same model for transformers"
)
_REASONS = {
    _SPARSE: "axk2 deepseek_v32 deepseek_v4 dots3_note glm5_next glm_moe_dsa hy_v4 minimax_m3_vl mistral_large4 "
    "qwen4_exp",
    _CUSTOM_CODE: "internvl_chat",
    _BOTH_WAYS: "diffusion_gemma paligemma",
    _ENCODER: "albert bert big_bird camembert clip convbert data2vec-text deberta deberta-v2 distilbert electra ernie "
    "esm longformer megatron-bert mobilebert mpnet nomic_bert rembert roberta roberta-prelayernorm "
    "roc_bert roformer siglip xlm-roberta xlm-roberta-xl xmod",
    _ENCODER_DECODER: "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder led longt5 m2m_100 marian "
    "mbart mt5 mvp nllb-moe pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma t5gemma2 trocr umt5 "
    "vision-encoder-decoder whisper",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
REFUSED |= {f"{name}_text": reason for name, reason in REFUSED.items() if reason == _SPARSE}
