"""Settings of memory and of many devices."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from lean_ft.settings.base import Settings


class MemoryConfig(Settings):
    """Every trade of memory against time."""

    activation_checkpointing: Literal["none", "full", "every_n", "selective", "budget"] = Field(
        "none",
        description="Keep only the input of each layer and recompute the rest in backward: for no layer, every layer, "
        "or every n-th. `selective` is `full` that also keeps what selective_keeps names. `budget` lets the compiler "
        "choose within activation_budget; it needs compile=true.",
    )
    selective_keeps: Literal["attention", "products"] = Field(
        "attention",
        description="What `selective` keeps: what attention returned, one hidden state a token and layer, so that it "
        "attends once; or that and every matrix product, so that only norms and activations are recomputed.",
    )
    activation_budget: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5,
        description="Share of a layer's activations that `budget` keeps: 0 recomputes all of them, 1 nothing that "
        "costs time.",
    )
    checkpoint_every_n: PositiveInt = Field(2, description="The n of `every_n`: layers 0, n, 2n ... recompute.")
    loss_chunk_tokens: NonNegativeInt | Literal["auto"] = Field(
        "auto",
        description="Target tokens whose logits exist at a time; 0 computes them all at once. `auto` gives them 1/64 of "
        "the memory that the weights leave on the device, with at least 256 and at most 4096 tokens.",
    )
    activation_offload: bool = Field(
        False, description="GPU: keep what layers save for backward in pinned host memory, and fetch it back ahead."
    )
    tile_mlp: NonNegativeInt = Field(
        0,
        description="Tiles of tokens that each feed-forward layer works through one after the other, so that only one "
        "tile's inner activations exist; 0 takes all tokens at once.",
    )
    tied_gradient: Literal["fused", "host", "separate"] = Field(
        "fused",
        description="Where the output layer is the embedding: `fused` adds the embedding's rows to the output layer's "
        "gradient, `separate` makes a gradient each and adds them. `host` is `fused`, and on a GPU the output layer's "
        "waits in pinned host memory while the layers go backward.",
    )
    float8_products: bool = Field(
        False,
        description="GPU with float8: the layers' linear projections multiply in 8 bits, faster and less exactly; best "
        "with compile=true.",
    )
    loss_accumulation_dtype: Literal["float32", "weight"] = Field(
        "float32",
        description="Type that sums the output weight's gradient over chunks: `float32`, or the weight's own type, "
        "which takes half the memory and rounds once a chunk.",
    )
    host_pool: bool | None = Field(
        None,
        description="CPU: keep the memory that tensors free for the next ones, never more than was once in use; without, "
        "every step pays the system for fresh pages. Linux with a C++ compiler. null: true where it can be had.",
    )


class ParallelConfig(Settings):
    """How several processes share the model and the work; of one process nothing. `leanft run --nproc-per-node` starts
    them."""

    replicate: PositiveInt = Field(
        1,
        description="Copies of the model. Each is cut over `shard` processes; as many copies as processes are DDP, fewer "
        "HSDP.",
    )
    shard: PositiveInt | None = Field(
        None,
        description="Processes with other data that a copy of the model, its gradients and the optimizer's state are cut over "
        "(FSDP); null takes all that the others leave.",
    )
    context: PositiveInt = Field(
        1,
        description="Processes that share the tokens of each row, and exchange heads for tokens around attention: for rows "
        "too long for one device.",
    )
    tensor: PositiveInt = Field(
        1,
        description="Processes that share the heads and inner features of each layer, and its tokens between layers: for "
        "neighbouring GPUs with fast links.",
    )
    experts: PositiveInt = Field(
        1,
        description="Of the processes that share a copy, as many neighbours each keep other experts of a mixture, to which "
        "tokens are sent; 1 gathers all experts of a layer instead.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free a layer's gathered weights after forward and gather them again for backward; false keeps them, "
        "which takes the memory of a whole model and sends a third less.",
    )
    vocabulary: Literal["auto", "cut", "gathered"] = Field(
        "auto",
        description="Whether the embedding and the output layer stay cut while they are used (no process has them whole, and "
        "hidden states travel instead), or are gathered as layers are; auto cuts large ones where that sends less.",
    )
    timeout_minutes: PositiveInt = Field(
        30,
        description="How long a process waits for the others, before it takes one of them for dead and ends the run.",
    )
