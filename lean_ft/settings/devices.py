"""Settings of memory and parallelism."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from lean_ft.settings.base import Settings


class MemoryConfig(Settings):
    """Techniques that save memory, most of them at the cost of time."""

    activation_checkpointing: Literal["none", "full", "every_n", "selective", "budget"] = "none"
    """Keep only the input of a layer and recompute the rest in the backward pass: for no layer (`none`), all layers
    (`full`) or every n-th layer (`every_n`). `selective` also keeps what selective_keeps names. `budget` lets the
    compiler choose within activation_budget and requires compile=true."""
    selective_keeps: Literal["attention", "products"] = "attention"
    """What `selective` keeps. `attention`: the output of attention, so that attention runs once. `products`: also every
    matrix product, so that only norms and activations are recomputed."""
    activation_budget: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Fraction of a layer's activations that `budget` keeps. 0 recomputes all; 1 recomputes nothing that takes time."""
    checkpoint_every_n: PositiveInt = 2
    """The n of `every_n`: layers 0, n, 2n, ... are recomputed."""
    loss_chunk_tokens: NonNegativeInt | Literal["auto"] = "auto"
    """Number of target tokens whose logits exist at a time. 0 computes all logits at once. `auto` uses 1/64 of the
    memory that the weights leave free, with 256 to 4096 tokens."""
    activation_offload: bool = False
    """GPU: store the activations that layers save for the backward pass in pinned host memory, and prefetch them."""
    tile_mlp: NonNegativeInt = 0
    """Number of token tiles that each feed-forward layer processes one after the other, so that only one tile's inner
    activations exist. 0 processes all tokens at once."""
    tied_gradient: Literal["fused", "host", "separate"] = "fused"
    """Tied embeddings: `fused` adds the embedding's gradient rows to the output layer's gradient, `separate` computes
    two gradients and adds them. `host` is `fused`, and on a GPU the output layer's gradient waits in pinned host
    memory."""
    frozen_embeddings: Literal["device", "host"] = "device"
    """Embeddings that are not trained: `host` keeps them in pinned host memory, from which the GPU reads the rows of a
    batch. An output layer with the same weight is copied to the GPU for each loss."""
    experts: Literal["device", "streamed"] = "device"
    """Frozen experts of a mixture on a GPU: `streamed` keeps them in pinned host memory and copies them to the GPU
    layer by layer, in both passes. Needs activation_checkpointing=full and compile=false."""
    float8_products: bool = False
    """GPU with float8: compute the layers' linear projections in 8 bits. Faster and less exact; best with compile=true.
    With adapters, the frozen weights multiply in 8 bits."""
    loss_accumulation_dtype: Literal["float32", "weight"] = "float32"
    """Dtype that accumulates the output weight's gradient over chunks: `float32`, or the weight's own dtype, which
    takes half the memory and rounds once per chunk."""
    attention: Literal["auto", "flash2", "own", "eager"] = "auto"
    """GPU: the kernel of attention. `auto`: PyTorch's newest FlashAttention kernels of the card whose package is
    installed (3 on Hopper, 4 on Blackwell), else `flash2`, those that PyTorch contains. Layers that these lack (soft
    caps, heads over 256 features) use `own`, Triton kernels of lean_ft. `eager`: blocks of PyTorch operations, slow."""
    host_pool: bool | None = None
    """CPU: use a caching allocator that keeps freed memory for later tensors, so that steps do not wait for new pages.
    Needs Linux and a C++ compiler. null: true if available."""


class ParallelConfig(Settings):
    """How processes share the model and the data; no effect with one process. `leanft run --nproc-per-node N` starts
    N."""

    replicate: PositiveInt = 1
    """Number of copies of the model. Each copy is sharded over `shard` processes. As many copies as processes is DDP,
    fewer is HSDP."""
    shard: PositiveInt | None = None
    """Number of processes that shard a copy of the model, its gradients and the optimizer state (FSDP); each has its
    own data. null uses all remaining processes."""
    context: PositiveInt = 1
    """Context parallelism: number of processes that share the tokens of each row and exchange heads for tokens around
    attention. For rows that are too long for one device."""
    tensor: PositiveInt = 1
    """Tensor parallelism: number of processes that share the heads and inner features of each layer. For neighboring
    GPUs with fast links."""
    experts: PositiveInt = 1
    """Expert parallelism: number of ranks that divide a layer's experts; tokens are sent to them. 1 gathers all experts
    of a layer instead."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after the forward pass and gather them again for the backward pass. false keeps
    them, which takes the memory of a whole model and sends a third less."""
    vocabulary: Literal["auto", "cut", "gathered"] = "auto"
    """`cut` keeps the embedding and the output layer sharded while they are used and sends hidden states instead.
    `gathered` gathers them like layers. `auto` shards large ones if that sends less."""
    timeout_minutes: PositiveInt = 30
    """Minutes that a process waits for the others before it ends the run."""
