"""Deals files of tests to the processes of `pytest -n`, also where one of them ends in the middle of a test.

pytest-xdist runs the test again that has ended a process, and so ends one process after the other. It also deals files
to a process that is still starting, and leaves one that has a single test waiting for a second one, for ever: a process
begins a test when it knows which one, or that none, comes next.

A file stays in one process, and so does a folder whose tests share processes that are dear to start.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

TOGETHER = ("tests/device",)


class Files(LoadFileScheduling):
    """Gives each process a file after the other. A test that ends its process has failed, and the rest of its file is
    left to another one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)

    def remove_node(self, node: WorkerController) -> str | None:
        work = self.assigned_work.pop(node)
        ended = next((test for tests in work.values() for test, done in tests.items() if not done), None)
        for file, tests in work.items():
            if ended in tests:
                tests[ended] = True
            if not all(tests.values()):
                self.workqueue[file] = tests
        for other in self.assigned_work:
            self._reschedule(other)
        return ended

    def _reschedule(self, node: WorkerController) -> None:
        if node.shutting_down or node not in self.registered_collections:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()
