"""What `shoal eval` prints."""

from __future__ import annotations

import json

from shoal.training.evaluation import Evaluation


def show(evaluation: Evaluation, accuracy: float | None, as_json: bool) -> None:
    """The loss and how much it is a mean of, as a line or as one JSON object."""
    if as_json:
        print(json.dumps({"loss": evaluation.loss, "count": evaluation.tokens, "accuracy": accuracy}))
        return
    right = "" if accuracy is None else f", accuracy {accuracy:.2%}"
    print(f"loss {evaluation.loss:.6f}{right}, a mean of {evaluation.tokens:,}")
