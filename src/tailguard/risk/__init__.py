"""Tail risk: estimators of CVaR and VaR, and a risk budget for the policy."""

from tailguard.risk.config import RiskConfig
from tailguard.risk.constraint import CVaRConstraint
from tailguard.risk.cvar import (
    TailMethod,
    cvar_from_atoms,
    cvar_from_quantiles,
    cvar_from_samples,
    cvar_gpd_from_samples,
    cvar_standard_error,
    tail_heaviness,
    var_from_quantiles,
    var_from_samples,
)

__all__ = [
    "CVaRConstraint",
    "RiskConfig",
    "TailMethod",
    "cvar_from_atoms",
    "cvar_from_quantiles",
    "cvar_from_samples",
    "cvar_gpd_from_samples",
    "cvar_standard_error",
    "tail_heaviness",
    "var_from_quantiles",
    "var_from_samples",
]
