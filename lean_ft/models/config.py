"""What a decoder computes: the facts in which families differ, each named by its effect."""

from dataclasses import dataclass
from typing import Literal

from lean_ft.models.rope import RopeConfig


@dataclass(frozen=True)
class MixtureConfig:
    """What a mixture of experts computes, in the place of a feed-forward layer."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    weights_sum_to_one: bool  # a token's weights are a softmax over its own experts, not over all
    router_name: Literal["gate", "router"] = "gate"  # Hugging Face's, of the module
    router_bias: bool = False
    expert_bias: bool = False
    input_first: bool = False  # projections are (D, 2 * I) and (I, D), not (2 * I, D) and (D, I)
    known_to_peft: bool = True  # that inputs are first; else it takes them for outputs, and so adapters are laid out
    gates_alternate: bool = False  # with ups; not all gates first
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"  # with the last are ups alone, and no gates
    gate_scale: float = 1.0  # what is in the place of silu(gate) is silu(gate_scale * gate) / gate_scale
    up_offset: float = 0.0  # it is multiplied by up + up_offset
    limit: float | None = None  # gates are clamped from above, ups from both sides
    shared_intermediate_size: int = 0  # of an expert that every token meets beside those chosen; 0: there is none
    shared_name: Literal["shared_expert", "shared_experts"] = "shared_expert"  # Hugging Face's, of the module
    shared_is_fused: bool = False  # its gate and what it gates are one matrix
    shared_gate: bool = False  # its result is weighed by the sigmoid of a linear layer
    score: Literal["softmax", "sigmoid"] = "softmax"  # of a router's logits, which weighs experts
    corrected: bool = False  # experts are chosen by their scores plus a number each, which does not weigh them
    correction_is_row: bool = False  # these numbers are (1, E) in the folder, and not (E,)
    num_groups: int = 1  # of experts, of which a token chooses those whose two best scores add up to most
    groups_per_token: int = 1
    # Experts are chosen one after another, and each one's weight is a softmax over those left whose scores lie below its own
    # by at most that share of their size; None: all at once.
    margin: float | None = None
    weights_factor: float = 1.0  # of a token's weights
    weighs_input: bool = False  # a weight multiplies what its expert is given, and not what that returns
    wide_router: bool = False  # it computes in float32, and has what corrects it in float32
    wide_router_weight: bool = False  # and its own weight too, whatever the dtype of the others
    # What a router is given is scaled to a root mean square of 1, with that epsilon, and by a number a feature, and each
    # expert's weights by a number; None: it is a linear layer alone.
    router_norm_eps: float | None = None
    beside: bool = False  # it lies beside the feed-forward layer, each between norms of its own, and not in its place
    router_aux_loss_coef: float = 0.0  # what `load_balancing_loss` counts in training, unless it is set otherwise

    @property
    def input_first_in_adapters(self) -> bool:
        return self.input_first and self.known_to_peft

    @property
    def in_float32(self) -> tuple[str, ...]:
        """How the names of tensors end that are in float32, whatever the dtype of the others."""
        of_router = (f".{self.router_name}.weight",) if self.wide_router_weight else ()
        return (".e_score_correction_bias", *of_router) if self.wide_router else ()


@dataclass(frozen=True)
class LatentConfig:
    """What attention is made from, where keys and values are made from one small vector a token."""

    rank: int  # of that vector
    query_rank: int | None  # of the one that queries are made from; None: from the hidden state
    plain_dim: int  # features of a head's queries and keys that positions leave; `head_dim` are those that they turn
    value_dim: int  # features of a head's values


@dataclass(frozen=True)
class StateConfig:
    """A state for each head of values, behind a short convolution of queries, keys and values."""

    num_key_heads: int  # of queries and keys, each for as many neighbouring heads
    num_heads: int  # of values, and so of states
    key_dim: int  # features of a head
    value_dim: int
    num_taps: int  # of the convolution

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int] | None:
        return self.num_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class DeltaRuleConfig(StateConfig):
    """One that tokens correct."""

    fused_projections: bool  # one matrix for queries, keys, values and gates, and one for what decays and corrects


@dataclass(frozen=True)
class ShortConvolutionConfig:
    """A short convolution between two gates, with no other state than its last inputs."""

    num_channels: int  # the hidden size
    num_taps: int
    bias: bool
    state_shape: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Mamba2Config(StateConfig):
    """One that decays and that tokens add to."""

    activation: Literal["silu", "gelu", "gelu_tanh"]  # behind the convolution
    convolution_bias: bool
    in_bias: bool
    out_bias: bool
    norm: Literal["in", "out"] | None  # what is read is normed on the way into its gate, out of it, or not
    step_limits: tuple[float, float]  # between which a token's step is kept
    in_multiplier: float = 1.0
    multipliers: tuple[float, ...] = (1.0,) * 5  # of gates, values, keys, queries and steps, as they are projected
    out_multiplier: float = 1.0


MixerConfig = DeltaRuleConfig | ShortConvolutionConfig | Mamba2Config
"""What mixes tokens in the place of attention: each has a convolution of `num_channels` and `num_taps`, and a state of
`state_shape` a text or none."""


@dataclass(frozen=True)
class LayerConfig:
    """What differs from layer to layer."""

    rope: RopeConfig | None  # None: positions do not turn queries and keys
    window: int | None = None  # positions that a query sees, its own included; None: all up to its own
    # Positions are cut into chunks of so many, of which a query sees its own; None: they are not.
    chunk: int | None = None
    mixer: MixerConfig | None = None  # what mixes tokens in the place of attention, or beside it
    attends: bool = True  # there is attention
    feeds: bool = True  # there is a feed-forward layer, behind what mixes tokens
    mixture: MixtureConfig | None = None  # which that is; None: one feed-forward layer for all tokens
    # Of this layer's attention and feed-forward layer, where they are not those of the model.
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    unit_qk: bool = False  # each head's queries and keys are scaled to a root mean square of 1 once they are turned
    values_are_keys: bool = False  # values are the projection that keys are, before these are normed and turned
    keys_of: int | None = None  # the layer whose keys and values it attends to; None: its own


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder computes. A default is the value at which the fact changes nothing."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_positions: int  # the longest context the model was made for; nothing stops a longer one
    initializer_range: float
    tied_embeddings: bool

    norm_eps: float
    # Where a layer norms: on the way into attention and feed-forward, on the way out of them, or both; or once, into the
    # two side by side, of which the second then does not see what the first adds.
    norm_placement: Literal["in", "out", "both", "once"] = "in"
    norm_centered: bool = False  # norms of the residual take the mean away first
    norm_bias: bool = False  # and have a bias
    norm_weight_offset: float = 0.0  # added to every norm's weight

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False  # one matrix for queries, keys and values
    fused_gate_up: bool = False  # one for the gate and what it gates
    # With the last two there is no gate.
    activation: Literal["silu", "gelu", "gelu_tanh", "xielu", "relu2"] = "silu"
    # Of gates, before their activation, and of what the layer returns.
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)

    # Queries and keys are normed: each head, before or after positions turn it, or all as one vector.
    qk_norm: Literal["head", "turned_head", "projection"] | None = None
    value_norm: bool = False  # each head's values are scaled to a root mean square of 1
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    latent: LatentConfig | None = None  # None: queries, keys and values are projections of the hidden state
    attention_gate: bool = False  # what each head attended to is gated by a projection beside its query's
    attention_sinks: bool = False  # each head has a logit that joins the softmax and has no value
    attention_multipliers: tuple[float, float] = (1.0, 1.0)  # of what goes into attention, and what comes out of it

    embedding_multiplier: float = 1.0
    embedding_multiplier_in_weight_dtype: bool = False  # rounded to it first, as the model was trained
    residual_multiplier: float = 1.0  # of what attention and feed-forward add
    logits_divisor: float = 1.0
    logits_softcap: float | None = None  # logits become cap * tanh(logit / cap)
    # Each layer is given as many features of the token itself behind its feed-forward layer; 0: none.
    layer_input_dim: int = 0
    layer_input_vocab_size: int = 0  # of the embedding that these are read from
    layer_scalars: bool = False  # what leaves a layer is multiplied by a number of the folder's, which does not train
    head_bias: bool = False  # the output layer has one
    scores: bool = False  # the output layer gives one number a position in place of logits: a reward model

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mixture(self) -> MixtureConfig | None:
        """That of the layers which have one."""
        return next((layer.mixture for layer in self.layers if layer.mixture is not None), None)

    def num_kv_heads_of(self, layer: int) -> int:
        return self.layers[layer].num_kv_heads or self.num_kv_heads

    def head_dim_of(self, layer: int) -> int:
        return self.layers[layer].head_dim or self.head_dim

    @property
    def numbers_of_kv_heads(self) -> list[int]:
        """Those that layers have, each once."""
        return list(dict.fromkeys(self.num_kv_heads_of(layer) for layer in range(self.num_layers)))

    def cached_shapes(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Heads and features of what a layer of attention keeps of each token: keys and values, or latents; of none that keeps
        nothing."""
        if not self.layers[layer].attends or self.layers[layer].keys_of is not None:
            return ()
        if self.latent is not None:
            return ((1, self.latent.rank + self.head_dim),)
        return ((self.num_kv_heads_of(layer), self.head_dim_of(layer)),) * 2

    @property
    def givers(self) -> frozenset[int]:
        """The layers whose keys and values others attend to."""
        return frozenset(layer.keys_of for layer in self.layers if layer.keys_of is not None)

    @property
    def has_chunks(self) -> bool:
        return any(layer.chunk is not None for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether a layer reads what came before from a state, and not from the tokens themselves."""
        return any(layer.mixer is not None for layer in self.layers)
