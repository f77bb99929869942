"""The output of `shoal eval`."""

from __future__ import annotations

import json

from shoal.training.evaluation import Evaluation


def show(evaluation: Evaluation, accuracy: float | None, as_json: bool) -> None:
    """Prints the loss, the accuracy if there is one, and the count that the loss is a mean over: a line, or JSON."""
    if as_json:
        print(json.dumps({"loss": evaluation.loss, "count": evaluation.tokens, "accuracy": accuracy}))
        return
    right = "" if accuracy is None else f", accuracy {accuracy:.2%}"
    print(f"loss {evaluation.loss:.6f}{right}, a mean of {evaluation.tokens:,}")
