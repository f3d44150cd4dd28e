"""The audit: checks that measure what must hold, on the real objects, and can fail."""

from tailguard.audit.registry import (
    CHECKS,
    AuditCheck,
    Measurement,
    at_least,
    at_most,
    information,
    none_of,
    not_applicable,
    register_check,
    within,
)

__all__ = [
    "CHECKS",
    "AuditCheck",
    "Measurement",
    "at_least",
    "at_most",
    "information",
    "none_of",
    "not_applicable",
    "register_check",
    "within",
]
