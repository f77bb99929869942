"""Side-by-side runs of Shoal and its peers. One file a question; `harness` runs the contenders in turn and writes the
record."""
