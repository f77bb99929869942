"""What a plan will need, said before anything is trained: memory by role and tier, and the largest model that fits."""

from shoal.planner.deep_stages import KnownStages, blocks_by_stage, equal_stages
from shoal.planner.depth import Blocks, alike_blocks, deepened
from shoal.planner.dry_run import dry_run, dry_run_stages
from shoal.planner.fit import Family, family, largest
from shoal.planner.layout import Place, lay_out_all
from shoal.planner.memory import memory_need
from shoal.planner.need import TIERS, MemoryNeed, Row
from shoal.planner.parts import Part, as_cut, parts_of, with_stages
from shoal.planner.predict import BUDGET, DISK, HOST, Asks, Fit, Machine, Prediction, changes, others, predict, that_fit
from shoal.planner.prepare import Subject
from shoal.planner.recording import Recording, Staged, equal
from shoal.planner.repeats import SHALLOW
from shoal.planner.state import State, optimizer_state

__all__ = [
    "BUDGET",
    "DISK",
    "HOST",
    "SHALLOW",
    "TIERS",
    "Asks",
    "Blocks",
    "Family",
    "Fit",
    "KnownStages",
    "Machine",
    "MemoryNeed",
    "Part",
    "Place",
    "Prediction",
    "Recording",
    "Row",
    "Staged",
    "State",
    "Subject",
    "alike_blocks",
    "as_cut",
    "blocks_by_stage",
    "changes",
    "deepened",
    "dry_run",
    "dry_run_stages",
    "equal",
    "equal_stages",
    "family",
    "largest",
    "lay_out_all",
    "memory_need",
    "optimizer_state",
    "others",
    "parts_of",
    "predict",
    "that_fit",
    "with_stages",
]
