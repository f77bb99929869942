"""What more memory or bandwidth would buy: whole searches, but from the degrees of known candidates on, and with what
is the same in several found once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.assembly.replan import without_collections
from shoal.planner.cluster import Link
from shoal.planner.search import Search
from shoal.planner.task import Choice, Estimate, Task

GB = 10**9


def bought(
    task: Task, chosen: Estimate, others: Sequence[Estimate] = (), refused: Sequence[Estimate] = ()
) -> dict[str, float]:
    """Seconds of a step that more would save over `chosen` (see `with_more`). `others`: the next best; what was
    `refused` is not what it would buy."""
    near = [each.choice.spread for each in (chosen, *others, *refused)]
    out = {_asked(each.choice) for each in refused}
    found, known = dict[str, float](), Search(task)
    with without_collections():  # all four keep what they find in common
        for what, more in with_more(task).items():
            best = next((each for each in Search(more, known).run(near).best if _asked(each.choice) not in out), None)
            found[what] = max(0.0, chosen.seconds - best.seconds) if best else 0.0
    return found


def with_more(task: Task) -> dict[str, Task]:
    """The task with more of one thing: 1 GB of each device, 1 GB/s in hosts, between them where there are several, to
    the host."""

    def more(link: Link) -> Link:
        return link.times(1 + GB / link.bandwidth)

    cluster = task.cluster
    inside = replace(cluster, hosts=tuple(replace(host, inside=more(host.inside)) for host in cluster.hosts))
    to_host = replace(cluster, hosts=tuple(replace(host, to_host=host.to_host + GB) for host in cluster.hosts))
    found = {
        "GB of memory": replace(task, limit=(task.most + GB) / task.share),
        "GB/s inside hosts": replace(task, cluster=inside),
        "GB/s between hosts": replace(task, cluster=replace(cluster, between=more(cluster.between))),
        "GB/s to the host": replace(task, cluster=to_host),
    }
    if len(cluster.hosts) == 1:
        del found["GB/s between hosts"]
    return found


def _asked(choice: Choice) -> Choice:
    """The choice without what prices find of it, which differs with the memory that there is."""
    offload = choice.offload and choice.offload._replace(device=0.0)
    return choice._replace(offload=offload, recompute="none", stages=(), shares=())
