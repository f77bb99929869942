"""`python3 -m tests.device.simulator SCRIPT ...`: see `command.py`."""

import sys

from tests.device.simulator.command import simulate_script

ended = simulate_script(sys.argv[1:], devices=2, timeout=3600, shown=True)
for defect in ended.defects:
    print(defect)
print(f"{len(ended.traces)} processes, {len(ended.defects)} reports")
sys.exit(ended.code or min(len(ended.defects), 1))
