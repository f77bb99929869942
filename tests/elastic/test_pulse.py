"""A rank ends by itself once its supervisor is silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shoal.elastic.pulse import BEAT, SILENCE, Pulse

pytestmark = pytest.mark.fast

# shoal itself would import torch
SCRIPT = """
import importlib.util, subprocess, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("pulse", sys.argv[1])
pulse = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pulse)
pulse.end_without(Path(sys.argv[2]))
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("beats", [True, False])
def test_a_process_ends_with_its_own_once_nobody_beats(beats: bool, tmp_path: Path):
    file = Path(sys.modules[Pulse.__module__].__file__ or "")
    pulse = Pulse(tmp_path / "pulse") if beats else None
    command = [sys.executable, "-c", SCRIPT, str(file), str(tmp_path / "pulse")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        child = psutil.Process(int(process.stdout.readline()))
        began = time.monotonic()
        if pulse is not None:
            process.send_signal(signal.SIGSTOP)  # its own standstill is not its supervisor's
            time.sleep(SILENCE + 2 * BEAT)
            process.send_signal(signal.SIGCONT)
            time.sleep(3 * BEAT)
            assert process.poll() is None and child.is_running()
            pulse.close()
            began = time.monotonic()
        assert process.wait(10) == -signal.SIGKILL
        assert time.monotonic() - began < SILENCE + 6 * BEAT
        assert f"process {process.pid} ends: its supervisor has been silent for 2 s" in process.stderr.read()
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
