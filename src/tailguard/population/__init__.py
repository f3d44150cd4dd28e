"""Populations: many members train with settings of their own, and the best hand their state to the others."""

from tailguard.population.ask_tell import PBT, MemberTrial
from tailguard.population.judge import measure
from tailguard.population.lineage import Lineage, Round, read_lineage
from tailguard.population.options import PopulationSettings
from tailguard.population.pbt import Move, Standing
from tailguard.population.space import SearchSpace

__all__ = [
    "PBT",
    "Lineage",
    "MemberTrial",
    "Move",
    "PopulationSettings",
    "Round",
    "SearchSpace",
    "Standing",
    "measure",
    "read_lineage",
]
