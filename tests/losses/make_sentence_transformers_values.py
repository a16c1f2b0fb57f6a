"""Write sentence_transformers_values.json, the results of sentence-transformers' losses and evaluator of retrieval, for
test_embedding.py, test_reranking.py and tests/embedding/test_ranking.py.

    python -m tests.losses.make_sentence_transformers_values

Run it after a change of their cases. Long tests compare the file with sentence-transformers.
"""

import json
from pathlib import Path

import torch

from tests.embedding import test_ranking
from tests.losses import test_embedding, test_reranking

FILE = Path(__file__).with_name("sentence_transformers_values.json")

if __name__ == "__main__":
    of_embedding, of_rows, in_short = (
        test_embedding.of_sentence_transformers,
        test_reranking.of_rows,
        test_embedding.in_short,
    )
    values = {
        "embedding": {name: in_short(*of_embedding(name, torch.float64)) for name in test_embedding.CASES},
        "reranking": {
            f"{name}, {labels}": in_short(*of_rows(name, labels, torch.float64))
            for name in test_reranking.CASES
            for labels in test_reranking.LABELS
        },
        "ranking": test_ranking.of_sentence_transformers(),
    }
    FILE.write_text(json.dumps(values, indent=1) + "\n")
