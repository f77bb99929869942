"""transformers knows the same names, however it was imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = """
import sys
from shoal.models.import_transformers import import_transformers
if sys.argv[1] == "quick":
    import_transformers()
import transformers
import transformers.models
import transformers.utils.import_utils as reads
texts = '__all__ = ["A"]\\ny = 2\\n__all__ = ["B", "C"]', "import __all__", "__all__ = [\\n    'D',\\n]\\n"
fetched = [reads.fetch__all__(text) for text in texts]
names = [str(sorted(map(str, each._class_to_module.items()))) for each in (transformers, transformers.models)]
print(fetched, list(map(hash, names)), list(map(len, names)), type(reads.__spec__.loader))
print(reads.fetch__all__.__module__, file=sys.stderr)
"""


def test_what_the_models_export_is_the_same():
    pytest.importorskip("transformers")
    quick, plain = (
        subprocess.run(
            [sys.executable, "-c", NAMES, how],
            capture_output=True, text=True, timeout=300, check=True, env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        for how in ("quick", "plain")
    )  # fmt: skip
    assert quick.stdout == plain.stdout
    assert quick.stderr.split()[-1] == "shoal.models.import_transformers" != plain.stderr.split()[-1]
