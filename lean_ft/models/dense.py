"""Linear layers after pooling, as in EmbeddingGemma. A folder of sentence-transformers has a subfolder for each.

`modules.json` lists the steps from texts to vectors. The transformer, the pooling and the scaling to length 1 have no
weights besides the model's; each `Dense` has its config.json and model.safetensors. Other modules are refused.

Shapes: M texts, D features.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.config import DenseConfig
from lean_ft.models.modules_json import MODULES, check_order, dense_config, read_modules
from lean_ft.models.safetensors_file import StoredTensor, read_header

WEIGHTS_FILE = "model.safetensors"
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


class Dense(nn.Module):
    """One layer. It computes in the dtype of its input, which is float32 or wider, whatever the weights' dtype."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        """(M, in_features) to (M, out_features)."""
        weight, bias = self.linear.weight, self.linear.bias
        bias = None if bias is None else bias.to(vectors.dtype)
        return _ACTIVATIONS[self.activation](F.linear(vectors, weight.to(vectors.dtype), bias))


class DenseLayers(nn.ModuleList):
    """The layers after pooling, first to last."""

    def __init__(self, layers: Iterable[DenseConfig]) -> None:
        super().__init__(map(Dense, layers))

    def forward(self, vectors: Tensor) -> Tensor:
        """The vectors (M, D') of M texts from their pooled hidden states (M, D), float32 or wider."""
        for layer in self:
            # Not through the layer's hooks: its shards are gathered from the decoder's forward pass on.
            vectors = layer.forward(vectors)
        return vectors


def makes_vectors(folder: Path) -> bool:
    """Whether a folder's modules.json lists the pooling of a text's hidden states; that of a reranker does not."""
    return any(module.kind == "Pooling" for module in read_modules(folder) or ())


def read_dense(folder: Path, hidden_size: int) -> tuple[DenseConfig, ...]:
    """The dense layers that a folder's modules.json lists, first to last; none without the file.

    Raises ValueError, with the module's name, for modules whose computation lean_ft lacks.
    """
    modules, layers = read_modules(folder), list[DenseConfig]()
    if modules is None:
        return ()
    check_order(folder / MODULES, modules)
    for module in modules:
        if module.kind == "Dense":
            layer, width = dense_config(folder, module.path), layers[-1].out_features if layers else hidden_size
            if layer.in_features != width:
                raise ValueError(
                    f"{folder / module.path / 'config.json'}: in_features is {layer.in_features}; expected {width}, "
                    "the number of features of its input."
                )
            layers.append(layer)
    return tuple(layers)


def stored_dense(folder: Path, layers: tuple[DenseConfig, ...]) -> dict[str, StoredTensor]:
    """The tensors of dense layers, by the folder's name and their own: `2_Dense/linear.weight`."""
    found = dict[str, StoredTensor]()
    for layer in layers:
        file = folder / layer.folder / WEIGHTS_FILE
        if not file.is_file():
            raise ValueError(f"{folder} has no {layer.folder}/{WEIGHTS_FILE}, which {MODULES} promises.")
        found |= {f"{layer.folder}/{name}": tensor for name, tensor in read_header(file).items()}
    return found
