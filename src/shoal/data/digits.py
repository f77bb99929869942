"""The handwritten digits that scikit-learn has: 1,797 images of 8 x 8 pixels in 10 classes, each pixel 0 to 16.

From E. Alpaydin and C. Kaynak's set, https://archive.ics.uci.edu/dataset/80. Only its file is read: scikit-learn
itself, which takes a second, is not imported.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..errors import UserError
from .arrays import Arrays

FILE = "datasets/data/digits.csv.gz"
CLASSES, PIXELS, BRIGHTEST = 10, 64, 16


def digits() -> Arrays:
    """Returns the images as inputs [64] of 0 to 1, with their labels. Raises UserError without scikit-learn."""
    found = find_spec("sklearn")
    file = Path(found.origin).parent / FILE if found is not None and found.origin else None
    if file is None or not file.is_file():
        raise UserError(
            'data.source = "digits" is a file of scikit-learn, which is not installed: pip install "shoal[fed]", or '
            "pip install scikit-learn"
        )
    with gzip.open(file, "rt") as stream:
        table = np.loadtxt(stream, delimiter=",", dtype=np.float32)
    return Arrays(table[:, :PIXELS] / BRIGHTEST, table[:, PIXELS].astype(np.int64), "labels")
