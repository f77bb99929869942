"""Chaos: a job is trained while its processes are killed, stopped, cut off and slowed down on purpose, and is then held
against the same job undisturbed.

    faults.py     what can happen, and the schedule of a run: from a file, or drawn from a seed
    nodes.py      nodes of a job as processes of this host, found and looked at from outside
    inject.py     each fault, done to those processes
    watch.py      what the run's folder tells: steps, generations, what the coordinator noticed
    steps.py      how fast its steps follow each other
    perform.py    the reference, the faults one after the other, the end
    verdict.py    whether anything was lost: losses, samples, processes, files

All of it uses `shoal train --nodes` as anybody would; only jobs/drill.py is inside a rank.
"""
