"""Decoder configuration: the facts in which several model families differ, named by their effects, and the parts of one
family."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lean_ft.models.rope import RopeConfig
from lean_ft.models.vision.config import VisionConfig

if TYPE_CHECKING:
    from torch import nn

    from lean_ft.models.attention.attention import Attention
    from lean_ft.models.block import Block
    from lean_ft.models.layers import MLP
    from lean_ft.models.moe import Experts
    from lean_ft.models.rope import RotaryEmbedding
    from lean_ft.models.state.state_mixer import StateMixer
    from lean_ft.models.trunk import Trunk


class RouterType(Protocol):
    """A class of routers: `moe.Router`, or one with the same calls."""

    def of(self, config: "DecoderConfig", mixture: "MixtureConfig", /) -> "nn.Module": ...


@dataclass(frozen=True)
class FamilyParts:
    """Modules of one family, in its file, that take the place of the usual modules. None: the usual module.

    Each has the parameter names of the module that it replaces, and its own: compilation, sharding, adapters and files
    see one decoder. It reads the facts of its family from `own` of `DecoderConfig` and `LayerConfig`.
    """

    trunk: type["Trunk"] | None = None
    block: type["Block"] | None = None
    attention: type["Attention"] | None = None
    mlp: type["MLP"] | None = None
    mixer: type["StateMixer"] | None = None
    router: RouterType | None = None
    experts: type["Experts"] | None = None
    rotary: type["RotaryEmbedding"] | None = None
    in_float32: tuple[str, ...] = ()  # ends of the names of tensors that are in float32, whatever the model's dtype
    # Whether they compute the same on a rank that has some of the heads and inner features (`parallel.tensor`).
    splits: bool = False


@dataclass(frozen=True)
class MixtureConfig:
    """A mixture of experts, usually instead of a feed-forward layer."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    weights_sum_to_one: bool  # a token's weights are normalized over its chosen experts, not over all experts
    router_name: Literal["gate", "router"] = "gate"  # the module's name in Hugging Face's format
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"  # relu2: without gates
    shared_intermediate_size: int = 0  # of the shared expert, which every token uses; 0: none
    shared_name: Literal["shared_expert", "shared_experts"] = "shared_expert"  # the module's name
    shared_is_fused: bool = False  # gate and up of the shared expert are one matrix
    shared_gate: bool = False  # the shared expert's output is multiplied by the sigmoid of a linear layer
    score: Literal["softmax", "sigmoid"] = "softmax"  # turns the router's logits into weights
    has_score_correction: bool = False  # a bias per expert takes part in the choice of experts, not in their weights
    num_groups: int = 1  # groups of experts; a token chooses groups first, and experts from them
    groups_per_token: int = 1
    weights_factor: float = 1.0  # multiplies a token's weights
    router_in_float32: bool = False  # the router computes in float32 and keeps its correction in float32
    router_weight_in_float32: bool = False  # the router's weight is in float32 too, whatever the model's dtype
    router_aux_loss_coef: float = 0.0  # the default weight of `load_balancing_loss` in training

    @property
    def in_float32(self) -> tuple[str, ...]:
        """Name suffixes of tensors that stay in float32, whatever the model's dtype."""
        router_weight = (f".{self.router_name}.weight",) if self.router_weight_in_float32 else ()
        return (".e_score_correction_bias", *router_weight) if self.router_in_float32 else ()


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: keys and values are projections of one low-rank vector per token."""

    rank: int  # of the key-value latent
    query_rank: int | None  # of the query latent; None: queries are projected from the hidden state
    plain_dim: int  # query and key features per head without rotary embedding; `head_dim` counts the rotated ones
    value_dim: int  # value features per head


@dataclass(frozen=True)
class StateConfig:
    """A recurrent state per value head, after a short convolution of queries, keys and values."""

    num_key_heads: int  # query and key heads; consecutive value heads share one
    num_heads: int  # value heads, each with a state
    key_dim: int  # features per head
    value_dim: int
    num_taps: int  # of the convolution

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int] | None:
        return self.num_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class DeltaRuleConfig(StateConfig):
    """Gated delta rule."""

    fused_projections: bool  # one matrix for queries, keys, values and gates, and one for decays and betas


@dataclass(frozen=True)
class ShortConvolutionConfig:
    """A short convolution between two gates; its only state is its last inputs."""

    num_channels: int  # the hidden size
    num_taps: int
    bias: bool

    @property
    def state_shape(self) -> None:
        return None


@dataclass(frozen=True)
class Mamba2Config(StateConfig):
    """Mamba-2."""

    activation: Literal["silu", "gelu", "gelu_tanh"]  # after the convolution
    convolution_bias: bool
    in_bias: bool
    out_bias: bool
    norm: Literal["before_gate", "after_gate"] | None  # where the state's output is normed
    step_limits: tuple[float, float]  # a token's step is clamped to these


# Each has a convolution of `num_channels` and `num_taps`, and a state of `state_shape` per row or none.
MixerConfig = DeltaRuleConfig | ShortConvolutionConfig | Mamba2Config


@dataclass(frozen=True)
class LayerConfig:
    """One layer."""

    rope: RopeConfig | None  # None: no rotary embedding
    # Sliding window: positions that a query sees, including its own; None: all up to its own. With `bidirectional`, as
    # many on its other side.
    window: int | None = None
    mixer: MixerConfig | None = None  # a token mixer instead of attention, or in parallel to it
    has_attention: bool = True
    mixture: MixtureConfig | None = None  # None: a dense feed-forward layer
    intermediate_size: int | None = None  # of a dense feed-forward layer; None: the model's; 0: the layer has none
    kv_shape: tuple[int, int] | None = None  # key-value heads, and features of every head; None: the model's
    kv_from_layer: int | None = None  # the earlier layer whose keys and values this layer attends to; None: its own
    own: Any = None  # as `DecoderConfig.own`, of one layer

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has a feed-forward layer or a mixture of experts."""
        return self.mixture is not None or self.intermediate_size != 0


@dataclass(frozen=True)
class DenseConfig:
    """A linear layer with an activation, of a folder of sentence-transformers."""

    folder: str  # its folder inside the model's, such as 2_Dense
    in_features: int
    out_features: int
    bias: bool
    activation: str  # the name of a class of torch.nn, such as Identity


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder. Each default is the value that changes nothing."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]  # the last `num_drafting` draft tokens
    max_positions: int  # the context length that the model was trained for; longer inputs are not refused
    initializer_range: float
    tied_embeddings: bool

    norm_eps: float
    # Norms before attention and feed-forward, after them, or both; or attention and feed-forward in parallel, on one
    # norm or on a norm each.
    norm_placement: Literal["pre", "post", "both", "parallel", "parallel_normed"] = "pre"
    norm_centered: bool = False  # LayerNorm instead of RMSNorm on the residual stream
    norm_parameters: Literal["weight", "weight_and_bias", "none"] = "weight"  # of the norms of the residual stream
    norm_weight_offset: float = 0.0  # added to every norm's weight

    bidirectional: bool = False  # tokens also see the later tokens of their text: a text encoder, which gives no text

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False  # one matrix for queries, keys and values
    # Its rows are the first head's query, key and value, then the second head's. False: all queries are first.
    qkv_by_head: bool = False
    fused_gate_up: bool = False  # one matrix for gate and up
    activation: Literal["silu", "gelu", "gelu_tanh", "xielu", "relu", "relu2"] = "silu"
    gated: bool = True  # False: dense feed-forward layers have an up projection alone

    # Norm of queries and keys: an RMSNorm per head before or after rotation, or over all heads at once. Or a LayerNorm
    # per head before rotation, with one weight and bias for all heads, or a weight for each head.
    qk_norm: Literal["head", "turned_head", "projection", "centered", "centered_by_head"] | None = None
    value_norm: bool = False  # each head's values are RMS-normed without a weight
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    latent: LatentConfig | None = None  # None: queries, keys and values are projections of the hidden state
    # Each head's output is multiplied by the sigmoid of a gate. The query projection also computes the gates
    # ("in_query"), or they have their own projection ("own").
    attention_gate: Literal["in_query", "own"] | None = None
    attention_sinks: bool = False  # each head has a learned logit without a value that joins the softmax

    # The first position's row in a learned embedding of positions, which is added to the tokens'; None: there is none.
    position_row: int | None = None
    embedding_multiplier: float = 1.0
    embedding_multiplier_in_weight_dtype: bool = False  # the multiplier is rounded to the weights' dtype first
    residual_multiplier: float = 1.0  # of the outputs of attention and feed-forward
    logits_divisor: float = 1.0
    logits_softcap: float | None = None  # logits become cap * tanh(logit / cap)
    head_bias: bool = False  # the output layer has a bias
    vision: VisionConfig | None = None  # None: the model does not read images
    # A reward model or classifier: scores per position that the output layer returns instead of logits.
    num_scores: int = 0
    # Whether the model computes logits or scores; without, it has no output layer, and gives hidden states alone.
    has_output: bool = True
    # Layers after the pooling of hidden states to a text's vector, first to last.
    dense: tuple[DenseConfig, ...] = ()
    num_drafting: int = 0  # layers after the last, which draft tokens for speculative decoding
    parts: FamilyParts = FamilyParts()
    own: Any = None  # the facts of one family, a frozen dataclass in its file, for `parts` alone

    @property
    def num_layers(self) -> int:
        """The number of layers between the embedding and the output layer, without those that draft tokens."""
        return len(self.layers) - self.num_drafting

    @property
    def gives_text(self) -> bool:
        """Whether the model computes logits of the next token."""
        return self.has_output and not self.num_scores and not self.bidirectional

    @property
    def vector_size(self) -> int:
        """The number of features of a text's vector."""
        return self.dense[-1].out_features if self.dense else self.hidden_size

    @property
    def mixture(self) -> MixtureConfig | None:
        """The mixture of experts of the layers that have one."""
        return next((layer.mixture for layer in self.layers if layer.mixture is not None), None)

    @property
    def in_float32(self) -> tuple[str, ...]:
        """Name suffixes of tensors that stay in float32, whatever the model's dtype."""
        return (*(self.mixture.in_float32 if self.mixture else ()), *self.parts.in_float32)

    @property
    def choices_of_mixtures(self) -> list[int]:
        """The number of experts that a token chooses in each layer with a mixture."""
        return [layer.mixture.experts_per_token for layer in self.layers if layer.mixture is not None]

    def num_kv_heads_of(self, layer: int) -> int:
        shape = self.layers[layer].kv_shape
        return self.num_kv_heads if shape is None else shape[0]

    def head_dim_of(self, layer: int) -> int:
        shape = self.layers[layer].kv_shape
        return self.head_dim if shape is None else shape[1]

    def rotation_of(self, layer: int) -> tuple[RopeConfig, int] | None:
        """How a layer rotates queries and keys, and the features of its heads; None: it does not."""
        rope = self.layers[layer].rope
        return None if rope is None else (rope, self.head_dim_of(layer))

    @property
    def rotations(self) -> list[tuple[RopeConfig, int]]:
        """The distinct rotations of the layers."""
        return list(dict.fromkeys(filter(None, map(self.rotation_of, range(len(self.layers))))))

    @property
    def kv_head_counts(self) -> list[int]:
        """The distinct numbers of key-value heads."""
        return list(dict.fromkeys(self.num_kv_heads_of(layer) for layer in range(self.num_layers)))

    def cached_shapes(self, layer: int) -> tuple[tuple[int, int], ...]:
        """(heads, features) of each tensor that a layer caches per token: keys and values, or latents, or nothing."""
        if not self.layers[layer].has_attention or self.layers[layer].kv_from_layer is not None:
            return ()
        if self.latent is not None:
            return ((1, self.latent.rank + self.head_dim),)
        return ((self.num_kv_heads_of(layer), self.head_dim_of(layer)),) * 2

    @property
    def kv_source_layers(self) -> frozenset[int]:
        """The layers whose keys and values others attend to."""
        return frozenset(layer.kv_from_layer for layer in self.layers if layer.kv_from_layer is not None)

    @property
    def why_no_prefix(self) -> str:
        """Why texts cannot share the keys and values of a prefix; empty if they can."""
        if self.bidirectional:
            return "tokens see the later tokens of their text"
        return "the model has recurrent layers, whose state cannot branch" if self.has_states else ""

    @property
    def has_states(self) -> bool:
        """Whether a layer has a recurrent state or a convolution."""
        return any(layer.mixer is not None for layer in self.layers)
